//! The golden vectors of QRES, made by `vectors/make_qres.py`.
//!
//! An `error` in a vector is the name of the variant of the error type.
#![expect(clippy::unwrap_used, reason = "a vector that cannot be read is a failed test")]

use aeon_proto::qres::{Format, Header, Parts, QresBody, Rotation, encode};
use serde_json::Value;

fn floats(text: &Value) -> Vec<f32> {
    let words = text.as_str().unwrap().split_ascii_whitespace();
    words.map(|word| f32::from_bits(u32::from_str_radix(word, 16).unwrap())).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn flags(list: &Value) -> Vec<bool> {
    list.as_array().unwrap().iter().map(|flag| flag.as_bool().unwrap()).collect()
}

#[test]
fn every_vector_is_written_and_read_bit_by_bit() {
    let file: Value = serde_json::from_str(include_str!("../vectors/qres.json")).unwrap();
    let cases = file["cases"].as_array().unwrap();
    let (mut good, mut bad) = (0, 0);
    for case in cases {
        let (name, hex) = (case["name"].as_str().unwrap(), case["hex"].as_str().unwrap());
        let bytes: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let body = match QresBody::decode(&bytes) {
            Ok(body) => body,
            Err(error) => {
                let variant: String = format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect();
                assert_eq!(Some(&*variant), case["error"].as_str(), "{name}");
                bad += 1;
                continue;
            }
        };
        let expect = &case["expect"];
        let number = |key: &str| u32::try_from(expect[key].as_u64().unwrap()).unwrap();
        let format = Format::peek(&bytes).unwrap();
        assert_eq!(format.codes(), (number("format") as u8, number("bits") as u8), "{name}");
        let header = Header {
            boundary: number("boundary"),
            hidden_dim: number("hidden_dim"),
            basis_fp: number("basis_fp"),
            methodology: number("methodology"),
            format,
            seed: number("seed"),
        };
        assert_eq!((body.header(), body.seq()), (&header, number("seq") as usize), "{name}");
        let escaped: Vec<bool> = (0..body.seq()).map(|position| body.is_escaped(position)).collect();
        assert_eq!(escaped, flags(&expect["escaped"]), "{name}");
        body.check_finite().unwrap();

        let mean = Some(&case["mean"]).filter(|mean| !mean.is_null()).map(floats);
        let rotation = Rotation::new(header.hidden_dim as usize, header.seed).filter(|_| format.is_rotated());
        let parts = Parts { mean: mean.as_deref(), rotation: rotation.as_ref() };
        let mut read = vec![f32::NAN; body.seq() * header.hidden_dim as usize];
        body.read(&parts, &mut read).unwrap();
        assert_eq!(bits(&read), bits(&floats(&case["read"])), "{name}");
        let (escape, mut again) = (flags(&case["escape"]), Vec::new());
        encode(&header, &parts, &floats(&case["residuals"]), |position, _| escape[position], &mut again).unwrap();
        assert_eq!(again, bytes, "{name}");
        good += 1;
    }
    assert_eq!((good, bad), (GOOD, BAD));
}

const GOOD: usize = 71;
const BAD: usize = 35;
