//! What the golden-vector tests share: reading a file, the three ways of writing bytes, running all entries of a section.

use serde_json::Value;
use xxhash_rust::xxh64::xxh64;

/// Reads `vectors/<name>`.
pub(crate) fn load(name: &str) -> Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// A field that must be a string.
pub(crate) fn string<'v>(entry: &'v Value, key: &str) -> &'v str {
    entry[key].as_str().unwrap_or_else(|| panic!("string {key:?} in {entry}"))
}

/// A field that must be a whole number.
pub(crate) fn number(entry: &Value, key: &str) -> u64 {
    entry[key].as_u64().unwrap_or_else(|| panic!("number {key:?} in {entry}"))
}

/// A field that must be an array.
pub(crate) fn array<'v>(entry: &'v Value, key: &str) -> &'v [Value] {
    entry[key].as_array().unwrap_or_else(|| panic!("array {key:?} in {entry}"))
}

/// Bytes of a hex text.
pub(crate) fn unhex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "{text}");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Bytes written as hex or as a rule; `None` where only a digest stands.
pub(crate) fn bytes(value: &Value) -> Option<Vec<u8>> {
    if let Some(text) = value["hex"].as_str() {
        return Some(unhex(text));
    }
    let rule = value.get("rule")?;
    let add = number(rule, "add");
    Some((0..number(rule, "len")).map(|i| (i * 31 + add) as u8).collect())
}

/// Whether `got` is what `value` says, in whichever way that is written.
pub(crate) fn matches(value: &Value, got: &[u8]) -> bool {
    match bytes(value) {
        Some(expected) => got == expected,
        None => {
            let digest = u64::from_str_radix(string(value, "xxh64"), 16).unwrap();
            got.len() as u64 == number(value, "length") && xxh64(got, 0) == digest
        }
    }
}

/// Checks every entry of a section, names the entry that fails, and counts them against `count` and the file's own count.
pub(crate) fn run(file: &Value, section: &str, count: usize, check: impl Fn(&str, &Value)) {
    let entries = array(file, section);
    assert_eq!(entries.len(), count, "entries in {section}");
    assert_eq!(number(&file["counts"], section), count as u64, "stated count of {section}");
    let mut seen = std::collections::BTreeSet::new();
    for entry in entries {
        let id = string(entry, "id");
        assert!(seen.insert(id), "{section}/{id} stands twice");
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(id, entry))) {
            eprintln!("in entry {section}/{id}");
            std::panic::resume_unwind(panic);
        }
    }
    assert_eq!(seen.len(), count);
}
