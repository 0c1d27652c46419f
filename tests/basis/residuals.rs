//! Files of residuals: what is written reads back, NumPy's files are read, and bad ones are refused.

use std::{fs, path::Path};

use aeon_station::basis::{
    OpenError,
    residuals::{ReadError, Residuals, read_npy, read_safetensors, write_safetensors},
};
use ndarray::Array2;

fn sample() -> Residuals {
    let mut residuals = Residuals::default();
    for boundary in [0, 2, 10] {
        let values = Array2::from_shape_fn((3, 5), |(i, j)| (boundary * 100 + i * 10 + j) as f32);
        residuals.boundaries.insert(boundary as u32, values);
    }
    residuals.metadata.insert("model".to_owned(), "toy \"quoted\"".to_owned());
    residuals
}

#[test]
fn safetensors_read_back_and_another_reader_agrees() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.safetensors");
    write_safetensors(&path, &sample()).unwrap();
    assert_eq!(read_safetensors(&path).unwrap(), sample());
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor("boundary.10").unwrap();
    assert_eq!(tensor.shape(), [3, 5]);
    assert_eq!(tensor.data()[..4], 1000_f32.to_le_bytes());
    write_safetensors(&path, &Residuals::default()).unwrap();
    assert_eq!(read_safetensors(&path).unwrap(), Residuals::default());
}

fn safetensors_of(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat()
}

#[test]
fn bad_safetensors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.safetensors");
    write_safetensors(&path, &sample()).unwrap();
    let bytes = fs::read(&path).unwrap();
    let read = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        read_safetensors(&path).unwrap_err()
    };
    for len in 1..bytes.len() {
        assert!(!matches!(read(&bytes[..len]), ReadError::File(_)), "{len}");
    }
    assert!(matches!(read(b""), ReadError::File(OpenError::Empty { .. })));
    assert!(matches!(read(&[&bytes[..], b"x"].concat()), ReadError::Length { .. }));
    assert!(matches!(read(&u64::MAX.to_le_bytes()), ReadError::Format { .. }));
    let tensor = |name: &str, dtype: &str, shape: &str, from: u64, to: u64| {
        safetensors_of(
            &format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}}}"#),
            24,
        )
    };
    fs::write(&path, tensor("boundary.0", "F32", "[2,3]", 0, 24)).unwrap();
    read_safetensors(&path).unwrap();
    assert!(matches!(read(&tensor("boundary.0", "F16", "[2,6]", 0, 24)), ReadError::Type { .. }));
    assert!(matches!(read(&tensor("boundary.0", "F32", "[6]", 0, 24)), ReadError::Shape { .. }));
    for name in ["boundary.00", "boundary.+1", "boundary.-1", "weights", "boundary.4294967296"] {
        assert!(matches!(read(&tensor(name, "F32", "[2,3]", 0, 24)), ReadError::Format { .. }), "{name}");
    }
    for (shape, from, to) in [("[2,3]", 4, 28), ("[2,3]", 0, 20), ("[2,2]", 0, 24), ("[4294967296,4294967296]", 0, 24)]
    {
        assert!(matches!(read(&tensor("boundary.0", "F32", shape, from, to)), ReadError::Format { .. }), "{shape}");
    }
    let huge = tensor("boundary.0", "F32", "[1000000000,1000]", 0, 4_000_000_000_000);
    assert!(matches!(read(&huge), ReadError::Length { .. }));
    assert!(matches!(read_safetensors(Path::new("/dev/zero")), Err(ReadError::File(OpenError::NotAFile { .. }))));
}

fn npy(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
    let len = header.len() as u32;
    let len = if version == 1 { len.to_le_bytes()[..2].to_vec() } else { len.to_le_bytes().to_vec() };
    [b"\x93NUMPY", &[version, 0][..], &len, header.as_bytes(), data].concat()
}

#[test]
fn npy_matrices_are_read_and_others_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.npy");
    let read = |bytes: Vec<u8>| {
        fs::write(&path, bytes).unwrap();
        read_npy(&path)
    };
    let data: Vec<u8> = [1.5_f32, -2.0, 3.0, 4.0, 5.0, 6.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }         \n";
    for version in 1..=3 {
        let matrix = read(npy(version, header, &data)).unwrap();
        assert_eq!((matrix.dim(), matrix[(0, 1)], matrix[(1, 2)]), ((2, 3), -2.0, 6.0));
    }
    let doubles: Vec<u8> = [1.5_f64, -2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    let other = "{\"shape\":(1,2),\"fortran_order\":False,\"descr\":\"<f8\"}";
    assert_eq!(read(npy(1, other, &doubles)).unwrap(), ndarray::array![[1.5, -2.0]]);
    let whole = npy(1, header, &data);
    for len in 1..whole.len() {
        assert!(!matches!(read(whole[..len].to_vec()), Ok(_) | Err(ReadError::File(_))), "{len}");
    }
    assert!(matches!(read(npy(1, header, &[&data[..], b"x"].concat())), Err(ReadError::Length { .. })));
    assert!(matches!(read(npy(4, header, &data)), Err(ReadError::Format { .. })));
    let with = |from: &str, to: &str| npy(1, &header.replace(from, to), &data);
    assert!(matches!(read(with("False", "True")), Err(ReadError::Format { .. })));
    assert!(matches!(read(with("<f4", ">f4")), Err(ReadError::Type { .. })));
    assert!(matches!(read(with("<f4", "|O")), Err(ReadError::Type { .. })));
    assert!(matches!(read(with("(2, 3)", "(6,)")), Err(ReadError::Shape { .. })));
    assert!(matches!(read(with("(2, 3)", "(9999999999, 9999999999)")), Err(ReadError::Length { .. })));
    for broken in ["", "{", "{'descr': <f4, 'fortran_order': False, 'shape': (2, 3)}", "{'descr': 'é"] {
        assert!(matches!(read(npy(1, broken, &data)), Err(ReadError::Format { .. })), "{broken}");
    }
    assert!(matches!(read(npy(2, &" ".repeat(20_000), &data)), Err(ReadError::Format { .. })));
}
