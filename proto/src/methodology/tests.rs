//! Spellings, limits and rules of methodology specs.

use alloc::{format, vec};

use proptest::prelude::*;

use super::*;

const K8: &str = r#"{"model":"qwen-0.5b","hidden_dim":896,"k_rule":{"per_thousand":8,"floor":8}}"#;

fn spec(more: &str) -> Result<MethodologySpec, Error> {
    MethodologySpec::parse(&format!(r#"{{"model":"m","hidden_dim":4,"k_rule":{{"fixed":2}}{more}}}"#))
}

#[test]
fn reads_every_member() {
    let text = r#"{"variant":"v","calibration":{"tokens":9,"corpus_hash":"c"},"boundaries":[0,1,4294967295],
        "k_rule":{"coverage_per_thousand":950},"hidden_dim":3584,"model":"qwen"}"#;
    let spec = MethodologySpec::parse(text).unwrap();
    assert_eq!((spec.model(), spec.hidden_dim(), spec.variant()), ("qwen", 3584, Some("v")));
    assert_eq!(spec.k_rule(), KRule::Coverage { per_thousand: 950 });
    assert_eq!(spec.boundaries(), Some(&[0, 1, u32::MAX][..]));
    assert_eq!(spec.calibration(), Some(&Calibration { corpus_hash: "c".into(), tokens: 9 }));
    let spec = MethodologySpec::parse(K8).unwrap();
    assert_eq!((spec.boundaries(), spec.calibration(), spec.variant()), (None, None, None));
}

#[test]
fn two_spellings_give_one_id_and_any_other_spec_another() {
    let first = MethodologySpec::parse(K8).unwrap();
    let canonical = r#"{"hidden_dim":896,"k_rule":{"floor":8,"per_thousand":8},"model":"qwen-0.5b"}"#;
    assert_eq!(first.canonical(), canonical);
    assert_eq!(first.id(), fnv1a32(canonical.as_bytes()));
    let spaced = " { \"k_rule\" : {\n\"floor\":8,\t\"per_thousand\":8 },\r\"\\u006dodel\":\"qwen\\u002d0.5b\",
        \"hidden_dim\":896 } ";
    assert_eq!(MethodologySpec::parse(spaced), Ok(first.clone()));
    assert_eq!(MethodologySpec::parse(canonical), Ok(first.clone()));
    let more = K8.replace("896", "896,\"new\":[]");
    assert_ne!(MethodologySpec::parse(&more).unwrap().id(), first.id());
}

#[test]
fn keys_sort_by_utf16_and_strings_escape_as_rfc_8785_says() {
    // By code points (and UTF-8) U+FB33 comes before U+1F600; by UTF-16 the surrogate d83d comes first.
    let more = ",\"\u{fb33}\":1,\"\u{1f600}\":2,\"\u{20ac}\":3,\"\\r\":4,\"1\":5,\"\u{80}\":6,\"\u{f6}\":7";
    let canonical = spec(more).unwrap().canonical;
    let expected = "{\"\\r\":4,\"1\":5,\"hidden_dim\":4,\"k_rule\":{\"fixed\":2},\"model\":\"m\",\
        \"\u{80}\":6,\"\u{f6}\":7,\"\u{20ac}\":3,\"\u{1f600}\":2,\"\u{fb33}\":1}";
    assert_eq!(canonical, expected);
    let more = r#","z":"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/\b\f\t\u007f\u2028""#;
    let canonical = spec(more).unwrap().canonical;
    let expected = "\"z\":\"\u{20ac}$\\u000f\\nA'B\\\"\\\\\\\\\\\"/\\b\\f\\t\u{7f}\u{2028}\"}";
    assert!(canonical.ends_with(expected), "{canonical}");
    let canonical = spec(r#","z":[null,true,false,-7,{"b":[],"a":{}}]"#).unwrap().canonical;
    assert!(canonical.ends_with(r#""z":[null,true,false,-7,{"a":{},"b":[]}]}"#), "{canonical}");
}

#[test]
fn numbers_at_and_past_their_limits() {
    let limit = 1_i128 << 53;
    for (text, result) in [
        ("9007199254740991", Ok(())),
        ("-9007199254740991", Ok(())),
        ("9007199254740992", Err(Error::IntegerTooLarge { value: limit })),
        ("-9007199254740992", Err(Error::IntegerTooLarge { value: -limit })),
        ("18446744073709551615", Err(Error::IntegerTooLarge { value: i128::from(u64::MAX) })),
        ("18446744073709551616", Err(Error::NotInteger)),
        ("1.5", Err(Error::NotInteger)),
        ("1.0", Err(Error::NotInteger)),
        ("1e3", Err(Error::NotInteger)),
        ("-0", Err(Error::NotInteger)),
    ] {
        assert_eq!(spec(&format!(",\"z\":[{{\"y\":{text}}}]")).map(|_| ()), result, "{text}");
    }
}

#[test]
fn wrong_members_name_themselves() {
    let parse = |text: &str| MethodologySpec::parse(text).unwrap_err();
    let field = |text: &str| match parse(text) {
        Error::Field { key, .. } | Error::Missing { key } => key,
        other => panic!("{text}: {other}"),
    };
    assert_eq!(parse("[]"), Error::Json(json::Error::NotObject));
    assert_eq!(parse("{}"), Error::Missing { key: "model" });
    assert_eq!(field(r#"{"model":1}"#), "model");
    for hidden_dim in ["0", "4294967296", "-1", "\"4\""] {
        assert_eq!(field(&format!(r#"{{"model":"m","hidden_dim":{hidden_dim}}}"#)), "hidden_dim");
    }
    for (rule, key) in [
        ("8", "k_rule"),
        (r#"{"per_thousand":8}"#, "k_rule.floor"),
        (r#"{"per_thousand":0,"floor":1}"#, "k_rule.per_thousand"),
        (r#"{"per_thousand":1001,"floor":1}"#, "k_rule.per_thousand"),
        (r#"{"per_thousand":1,"floor":-1}"#, "k_rule.floor"),
        (r#"{"fixed":5}"#, "k_rule.fixed"),
        (r#"{"fixed":4294967296}"#, "k_rule.fixed"),
        (r#"{"coverage_per_thousand":0}"#, "k_rule.coverage_per_thousand"),
        (r#"{"fixed":1,"coverage_per_thousand":1}"#, "k_rule"),
    ] {
        assert_eq!(field(&format!(r#"{{"model":"m","hidden_dim":4,"k_rule":{rule}}}"#)), key, "{rule}");
    }
    for (more, key) in [
        (r#","boundaries":{}"#, "boundaries"),
        (r#","boundaries":[1,1]"#, "boundaries"),
        (r#","boundaries":[4294967296]"#, "boundaries"),
        (r#","calibration":[]"#, "calibration"),
        (r#","calibration":{"tokens":1}"#, "calibration.corpus_hash"),
        (r#","calibration":{"corpus_hash":"x"}"#, "calibration.tokens"),
        (r#","calibration":{"corpus_hash":"x","tokens":-1}"#, "calibration.tokens"),
        (r#","variant":null"#, "variant"),
    ] {
        assert_eq!(
            spec(more)
                .map_err(|error| match error {
                    Error::Field { key, .. } | Error::Missing { key } => key,
                    _ => "",
                })
                .map(|_| ()),
            Err(key),
            "{more}"
        );
    }
}

#[test]
fn the_id_that_stands_for_none_is_refused() {
    assert_eq!(spec(r#","variant":"rqupahjr""#), Err(Error::ReservedId));
    assert!(spec(r#","variant":"rqupahjs""#).is_ok());
}

#[test]
fn rules_give_k() {
    let rule = KRule::PerThousand { per_thousand: 8, floor: 8 };
    for (d, k) in [(896, 8), (3584, 29), (8192, 66), (1000, 8), (1001, 9), (5, 5), (u32::MAX, 34_359_739)] {
        assert_eq!(rule.k(d), Ok(k), "{d}");
    }
    assert_eq!(KRule::PerThousand { per_thousand: 1000, floor: 0 }.k(7), Ok(7));
    assert_eq!(KRule::Fixed(7).k(7), Ok(7));
    assert_eq!(KRule::Fixed(0).k(7), Ok(0));
    assert_eq!(KRule::Fixed(8).k(7), Err(KError::TooMany { k: 8, hidden_dim: 7 }));
    assert_eq!(KRule::Unknown.k(7), Err(KError::UnknownRule));
    assert_eq!(KRule::Unknown.k_by_variance(7, &[], 0.0), Err(KError::UnknownRule));
    let rule = KRule::Coverage { per_thousand: 900 };
    assert_eq!(rule.k(7), Err(KError::NeedsVariances));
    assert_eq!(rule.k_by_variance(7, &[6.0, 3.0, 1.0], 10.0), Ok(2));
    assert_eq!(rule.k_by_variance(7, &[6.0, 2.0, 2.0], 10.0), Ok(3));
    let short = KError::NotCovered { components: 1, per_thousand: 900 };
    assert_eq!(rule.k_by_variance(7, &[6.0], 10.0), Err(short));
    assert_eq!(rule.k_by_variance(7, &[], 0.0), Ok(0));
    assert_eq!(rule.k_by_variance(1, &[6.0, 3.0], 10.0), Err(KError::TooMany { k: 2, hidden_dim: 1 }));
    assert_eq!(KRule::Fixed(3).k_by_variance(7, &[], 0.0), Ok(3));
    let later = r#"{"model":"m","hidden_dim":4,"k_rule":{"entropy":1}}"#;
    assert_eq!(MethodologySpec::parse(later).unwrap().k_rule(), KRule::Unknown);
}

proptest! {
    #[test]
    fn canonical_text_is_its_own_canonical_text(
        keys in prop::collection::btree_set("\\PC{0,6}", 0..8),
        number in -9_007_199_254_740_991_i64..=9_007_199_254_740_991,
    ) {
        let mut more = vec![];
        for key in keys.iter().filter(|key| !["model", "hidden_dim", "k_rule"].contains(&&***key)) {
            more.push(b',');
            json::write_string(key, &mut more);
            more.extend_from_slice(format!(":{number}").as_bytes());
        }
        if let Ok(first) = spec(&String::from_utf8(more).unwrap()) {
            let again = MethodologySpec::parse(first.canonical()).unwrap();
            prop_assert_eq!(again, first);
        }
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,60}", at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let _ = MethodologySpec::parse(&text);
        let mut spoilt = K8.as_bytes().to_vec();
        let at = at.index(spoilt.len());
        spoilt[at] = byte;
        if let Ok(text) = core::str::from_utf8(&spoilt) {
            let _ = MethodologySpec::parse(text);
        }
    }
}
