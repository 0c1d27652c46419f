//! Opening basis files: what a good one gives, and every kind of thing that is none.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use aeon_proto::pcab;
use aeon_station::basis::{BasisFile, OpenError, PcaBasis, read_pca_bases, write_pca_bases};

use crate::toy;

#[test]
fn a_file_gives_its_numbers_in_place_and_both_hashes() {
    let folder = toy::folder(&["a"]);
    let path = folder.path().join("a.pcab");
    let file = BasisFile::open(&path).unwrap();
    let bytes = toy::basis("a");
    assert_eq!(file.path(), path);
    assert_eq!(file.basis_fp(), aeon_proto::hash::fnv1a32(&bytes));
    assert_eq!(file.blake3(), blake3::hash(&bytes));
    assert_eq!((file.bytes(), file.byte_len()), (&bytes[..], bytes.len()));
    assert_eq!((file.hidden_dim(), file.methodology()), (8, toy::spec().id()));
    let parts: Vec<_> = file.boundaries().collect();
    assert_eq!(parts.iter().map(|part| (part.boundary, part.k)).collect::<Vec<_>>(), [(0, 2), (1, 2), (2, 0)]);
    assert_eq!(parts[0].basis_offset, parts[1].basis_offset);
    assert!(std::ptr::eq(parts[0].basis, parts[1].basis));
    let inside = file.bytes().as_ptr_range();
    for part in &parts {
        assert!(inside.contains(&part.mean.as_ptr().cast()), "copied");
        assert_eq!(part.mean, [part.boundary as f32 + 0.5; toy::DIM]);
        assert_eq!(part.mean.as_ptr().align_offset(64), 0);
    }
    assert_eq!((parts[0].explained(0), parts[0].explained(1), parts[0].explained(9)), (0.0, 0.5, 0.75));
    assert_eq!(parts[0].prefix(1).unwrap(), &parts[0].basis[..toy::DIM]);
    assert!(parts[0].prefix(3).is_none());
    assert!(file.boundary(3).is_none());
    assert_eq!((file.median_norm(1), file.median_norm(0)), (Some(3.5), None));
    let basis = PcaBasis::open(&path).unwrap();
    let layer = basis.layer(0).unwrap();
    assert_eq!(layer.components.dim(), (2, 8));
    assert_eq!(layer.components[(1, 5)], -1.0);
    assert_eq!((layer.mean[7], layer.variance[2]), (0.5, 8.0));
    assert_eq!(basis.layer(2).unwrap().components.dim(), (0, 8));
    assert!(basis.layer(3).is_none());
}

#[test]
fn read_and_written_bases_are_the_same_file() {
    let folder = toy::folder(&["a"]);
    let bases = read_pca_bases(&folder.path().join("a.pcab")).unwrap();
    let copy = folder.path().join("copy.pcab");
    let written = write_pca_bases(&copy, &bases).unwrap();
    assert_eq!(fs::read(&copy).unwrap(), toy::basis("a"));
    assert_eq!((written.basis_fp, written.len), (BasisFile::open(&copy).unwrap().basis_fp(), toy::basis("a").len()));
    let mut bad = bases.clone();
    bad.layers[0].mean[3] = f32::NAN;
    assert!(write_pca_bases(&copy, &bad).unwrap_err().to_string().contains("not valid"));
    bad.layers.reverse();
    assert!(write_pca_bases(&copy, &bad).unwrap_err().to_string().contains("do not make a file"));
    assert_eq!(read_pca_bases(&copy).unwrap(), bases);
}

fn open(path: &Path) -> OpenError {
    let error = BasisFile::open(path).unwrap_err();
    assert_eq!(error.path(), path);
    assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
    error
}

#[test]
fn what_is_no_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    assert!(matches!(open(&at("missing")), OpenError::Unreadable { .. }));
    assert!(matches!(open(folder.path()), OpenError::NotAFile { got: "directory", .. }));
    rustix::fs::mkfifoat(rustix::fs::CWD, at("fifo"), rustix::fs::Mode::RUSR).unwrap();
    assert!(matches!(open(&at("fifo")), OpenError::NotAFile { got: "FIFO", .. }));
    let _listener = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    assert!(matches!(open(&at("socket")), OpenError::NotAFile { got: "socket", .. }));
    assert!(matches!(open(Path::new("/dev/null")), OpenError::NotAFile { got: "device", .. }));
    std::os::unix::fs::symlink(at("loop"), at("loop")).unwrap();
    assert!(matches!(open(&at("loop")), OpenError::Unreadable { .. }));
    fs::write(at("empty"), "").unwrap();
    assert!(matches!(open(&at("empty")), OpenError::Empty { .. }));
    // Files of the system that have no length but give bytes.
    assert!(matches!(open(Path::new("/proc/self/status")), OpenError::Empty { .. }));
}

#[test]
fn a_file_that_may_not_be_read_is_refused() {
    let folder = toy::folder(&["a"]);
    let path = folder.path().join("a.pcab");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(&path).is_ok() {
        eprintln!("permissions do not bind this user: not tested");
        return;
    }
    let OpenError::Unreadable { source, .. } = open(&path) else { panic!() };
    assert_eq!(source.kind(), std::io::ErrorKind::PermissionDenied);
}

#[test]
fn the_limit_on_the_length_is_exact_and_holds_before_anything_is_read() {
    let folder = toy::folder(&["a"]);
    let path = folder.path().join("a.pcab");
    let len = toy::basis("a").len() as u64;
    BasisFile::open_with_limit(&path, len).unwrap();
    let error = BasisFile::open_with_limit(&path, len - 1).unwrap_err();
    assert!(matches!(error, OpenError::TooLarge { max, got, .. } if max == len - 1 && got == len));
    // Five gigabytes that no disk holds.
    let sparse = fs::File::create(folder.path().join("sparse")).unwrap();
    sparse.set_len(5 << 30).unwrap();
    let error = BasisFile::open(&folder.path().join("sparse")).unwrap_err();
    assert!(matches!(error, OpenError::TooLarge { max, got, .. } if max == 4 << 30 && got == 5 << 30));
}

#[test]
fn every_shorter_file_and_every_flipped_header_byte_is_refused_or_valid() {
    let bytes = toy::basis("a");
    let name = Path::new("toy");
    for len in 0..bytes.len() {
        assert!(BasisFile::from_bytes(name, &bytes[..len]).is_err(), "{len}");
    }
    for at in 0..64 + 3 * 32 {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << bit;
            match BasisFile::from_bytes(name, &bytes) {
                // The fields whose every value is legal.
                Ok(file) => assert_eq!(file.boundaries().count(), 3, "byte {at} bit {bit}"),
                Err(error) => assert!(matches!(error, OpenError::Format { .. } | OpenError::Content { .. }), "{error}"),
            }
        }
    }
}

#[test]
fn faults_inside_are_told_with_their_place() {
    let name = Path::new("toy.pcab");
    let mut bytes = toy::basis("a");
    bytes.push(0);
    let error = BasisFile::from_bytes(name, &bytes).unwrap_err();
    assert!(matches!(error, OpenError::Format { source: pcab::OpenError::TrailingBytes { .. }, .. }));
    let mut bytes = toy::basis("a");
    let mean = BasisFile::from_bytes(name, &bytes).unwrap().bytes().len() - bytes.len() + 192;
    bytes[mean..mean + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let error = BasisFile::from_bytes(name, &bytes).unwrap_err();
    assert!(matches!(error, OpenError::Content { source: pcab::VerifyError::NonFinite { index: 0, .. }, .. }));
    let mut writer = pcab::PcabWriter::new(1, 1);
    writer.entry(0, &[0.0], &[], &[0.0]).unwrap();
    let long = format!(r#"{{"text":"{}"}}"#, "x".repeat(1 << 20));
    let error = BasisFile::from_bytes(name, &writer.finish(&long).unwrap()).unwrap_err();
    assert!(matches!(error, OpenError::MetadataTooLarge { max: 1_048_576, .. }));
}
