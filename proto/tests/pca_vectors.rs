//! The golden vectors of PCAR, PCAB, methodology specs and the kernels, made by `vectors/make_pca.py`.
//!
//! An `error` in a vector is the name of the variant of the error type.
#![expect(clippy::unwrap_used, reason = "a vector that cannot be read is a failed test")]

use std::fmt::Debug;

use aeon_proto::{
    hash::fnv1a32,
    kernel::Kernel,
    methodology::MethodologySpec,
    pcab::{Pcab, PcabWriter},
    pcar::{self, PcarBody},
};
use serde_json::Value;

fn cases(text: &str) -> Vec<Value> {
    let mut file: Value = serde_json::from_str(text).unwrap();
    serde_json::from_value(file["cases"].take()).unwrap()
}

fn text<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().unwrap_or_else(|| panic!("{} of {case}", key))
}

fn bytes(case: &Value) -> Vec<u8> {
    let hex = text(case, "hex");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn bits_of_list(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|bits| u32::from_str_radix(bits.as_str().unwrap(), 16).unwrap()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The name of an error's variant.
fn variant(error: &impl Debug) -> String {
    format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect()
}

#[test]
fn pcar() {
    let cases = cases(include_str!("../vectors/pcar.json"));
    assert_eq!(cases.len(), 26);
    for case in cases {
        let (name, bytes) = (text(&case, "name"), bytes(&case));
        let body = match PcarBody::decode(&bytes) {
            Ok(body) => body,
            Err(error) => {
                assert_eq!(Some(&*variant(&error)), case["error"].as_str(), "{name}");
                continue;
            }
        };
        let expect = &case["expect"];
        for (key, got) in [
            ("boundary", body.boundary()),
            ("k", body.k()),
            ("hidden_dim", body.hidden_dim()),
            ("methodology", body.methodology()),
            ("basis_fp", body.basis_fp()),
        ] {
            assert_eq!(got, number(&expect[key]), "{key} of {name}");
        }
        assert_eq!(body.seq(), number(&expect["seq"]) as usize, "{name}");
        let mut components = Vec::new();
        body.read_components(&mut components);
        assert_eq!(bits(&components), bits_of_list(&expect["components"]), "{name}");
        let mut again = Vec::new();
        pcar::encode(&body.header(), &components, &mut again).unwrap();
        assert_eq!(again, bytes, "{name}");
    }
}

#[test]
fn pcab() {
    let cases = cases(include_str!("../vectors/pcab.json"));
    assert_eq!(cases.len(), 58);
    for case in cases {
        let (name, bytes) = (text(&case, "name"), bytes(&case));
        let error = |stage: &str, error: String| {
            assert_eq!((Some(stage), Some(&*error)), (case["stage"].as_str(), case["error"].as_str()), "{name}");
        };
        let file = match Pcab::open(&bytes) {
            Ok(file) => file,
            Err(fault) => {
                error("open", variant(&fault));
                continue;
            }
        };
        if let Err(fault) = file.verify() {
            error("verify", variant(&fault));
            continue;
        }
        let expect = &case["expect"];
        assert_eq!(file.hidden_dim(), number(&expect["hidden_dim"]), "{name}");
        assert_eq!(file.methodology(), number(&expect["methodology"]), "{name}");
        assert_eq!(format!("{:#010x}", fnv1a32(&bytes)), text(expect, "basis_fp"), "{name}");
        assert_eq!(file.metadata_bytes(), text(expect, "metadata").as_bytes(), "{name}");
        let entries = expect["entries"].as_array().unwrap();
        assert_eq!(file.entry_count() as usize, entries.len(), "{name}");
        let parts: Vec<_> = file.entries().map(|e| (e, e.mean(), e.basis(), e.variance())).collect();
        let mut writer = PcabWriter::new(file.hidden_dim(), file.methodology());
        for (index, (expected, (entry, mean, basis, variance))) in entries.iter().zip(&parts).enumerate() {
            assert_eq!(entry.boundary(), number(&expected["boundary"]), "{name}");
            assert_eq!(entry.k(), number(&expected["k"]), "{name}");
            for (key, values) in [("mean", mean), ("basis", basis), ("variance", variance)] {
                assert_eq!(bits(values), bits_of_list(&expected[key]), "{key} of {name}");
            }
            match parts[..index].iter().find(|(other, ..)| other.basis_offset() == entry.basis_offset()) {
                Some((owner, ..)) => writer.shared_entry(entry.boundary(), mean, owner.boundary(), variance),
                None => writer.entry(entry.boundary(), mean, basis, variance),
            }
            .unwrap();
        }
        assert_eq!(writer.finish(text(expect, "metadata")).unwrap(), bytes, "{name}");
    }
}

#[test]
fn methodology() {
    let cases = cases(include_str!("../vectors/methodology.json"));
    assert_eq!(cases.len(), 34);
    for case in cases {
        let name = text(&case, "name");
        match MethodologySpec::parse(text(&case, "text")) {
            Ok(spec) => {
                assert_eq!(Some(spec.canonical()), case["canonical"].as_str(), "{name}");
                assert_eq!(Some(&*format!("{:#010x}", spec.id())), case["id"].as_str(), "{name}");
                let k = spec.k_rule().k(spec.hidden_dim()).ok();
                assert_eq!(k.map(u64::from), case["k"].as_u64(), "{name}");
            }
            Err(error) => assert_eq!(Some(&*variant(&error)), case["error"].as_str(), "{name}"),
        }
    }
}

#[test]
fn kernel() {
    let cases = cases(include_str!("../vectors/kernel.json"));
    assert_eq!(cases.len(), 11);
    for case in cases {
        let name = text(&case, "name");
        let values = |key: &str| -> Vec<f32> {
            let words = text(&case, key).split_ascii_whitespace();
            words.map(|word| f32::from_bits(u32::from_str_radix(word, 16).unwrap())).collect()
        };
        let (mean, basis) = (values("mean"), values("basis"));
        let [d, k, n] = ["d", "k", "n"].map(|key| number(&case[key]) as usize);
        assert_eq!((mean.len(), basis.len()), (d, k * d), "{name}");
        for kernel in Kernel::available() {
            let mut lifted = vec![f32::NAN; n * d];
            kernel.lift_batch(&mean, &basis, &values("components"), &mut lifted).unwrap();
            assert_eq!(bits(&lifted), bits(&values("lifted")), "lift of {name} by {}", kernel.name());
            let mut projected = vec![f32::NAN; n * k];
            kernel.project_batch(&mean, &basis, &values("residuals"), &mut projected).unwrap();
            assert_eq!(bits(&projected), bits(&values("projected")), "projection of {name} by {}", kernel.name());
        }
    }
}
