//! What a prefix is called: the key of a replay or capture, read from request meta or JSON and written into it.
//!
//! `prefix_hash` is chosen by the coordinator; ours takes [`prefix_hash`]. A 64-bit hash can collide, by accident or on
//! purpose, so [`prefix_digest`] may go with it. Lengths and layers are part of the key.

use aeon_proto::{
    json::{Object, Value},
    meta::{Error as MetaError, parse_fingerprint},
    payload::MetaWriter,
};

use crate::model::kept::Provenance;

/// The largest whole number that every JSON reader takes exactly.
const MAX_JSON_NUMBER: u64 = (1 << 53) - 1;

/// XXH64 (seed 0) of the token ids as packed little-endian u32.
#[must_use]
pub fn prefix_hash(ids: &[u32]) -> u64 {
    let mut hasher = xxhash_rust::xxh64::Xxh64::new(0);
    ids.iter().for_each(|id| hasher.update(&id.to_le_bytes()));
    hasher.digest()
}

/// 128 bits of a BLAKE3 hash; 32 hex digits on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 16]);

impl Digest {
    /// The digest of some bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        let mut digest = [0; 16];
        digest.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
        Self(digest)
    }

    /// Reads 32 hex digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() != 32 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(|value| Self(value.to_be_bytes()))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// BLAKE3-128 of the token ids as packed little-endian u32.
#[must_use]
pub fn prefix_digest(ids: &[u32]) -> Digest {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    Digest::of(&bytes)
}

/// Which entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefixKey {
    /// Hash of the prefix.
    pub prefix_hash: u64,
    /// Positions of the prefix.
    pub prefix_len: u32,
    /// First layer of the station.
    pub layer_lo: u16,
    /// One past the last layer of the station.
    pub layer_hi: u16,
}

/// What must be true of an entry beside its key. What is not named is not compared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Conditions {
    /// `prefix_digest`: compared if the entry has one too.
    pub prefix_digest: Option<Digest>,
    /// `config_fp` of the model.
    pub config_fp: Option<String>,
    /// `mesh_fp`: of everything that the prefix passed through; see [`mesh_fp`].
    pub mesh_fp: Option<Digest>,
    /// `exact`: the prefix passed through nothing that loses anything.
    pub exact: bool,
    /// `basis_fp`: the prefix passed through this basis. In a capture it says so.
    pub basis_fp: Option<u32>,
}

/// One value for all that a prefix passes through in a mesh: the `layers_fp` of each station, in order, and behind that of a
/// station how its answer travels, if not raw. A station's entry depends on all of it: if an earlier station is started
/// with other weights, or a link loses something, entries made otherwise must not be found.
#[must_use]
pub fn mesh_fp<'a>(passed: impl IntoIterator<Item = &'a str>) -> Digest {
    let lines: Vec<&str> = passed.into_iter().collect();
    Digest::of(lines.join("\n").as_bytes())
}

fn field<T>(key: &'static str, expected: &'static str) -> Result<T, MetaError> {
    Err(MetaError::Field { key, expected })
}

/// A whole number that may need 64 bits: a string `0x…` or of decimal digits, or a JSON number that every reader takes
/// exactly.
fn wide(object: &Object<'_>, key: &'static str) -> Result<u64, MetaError> {
    let read = match object.get(key) {
        Some(Value::Unsigned(value)) if *value <= MAX_JSON_NUMBER => Some(*value),
        Some(Value::String(text)) => {
            let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
                Some(digits) => (digits, 16),
                None => (&**text, 10),
            };
            Some(digits).filter(|digits| !digits.starts_with('+')).and_then(|d| u64::from_str_radix(d, radix).ok())
        }
        _ => None,
    };
    read.ok_or(MetaError::Field { key, expected: "a string \"0x…\" or of decimal digits, or a number below 2^53" })
}

fn narrow<T: TryFrom<u64>>(object: &Object<'_>, key: &'static str, expected: &'static str) -> Result<T, MetaError> {
    T::try_from(wide(object, key)?).map_err(|_| MetaError::Field { key, expected })
}

fn digest(object: &Object<'_>, key: &'static str) -> Result<Option<Digest>, MetaError> {
    match object.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => match Digest::parse(text) {
            Some(digest) => Ok(Some(digest)),
            None => field(key, "a string of 32 hex digits"),
        },
        Some(_) => field(key, "a string of 32 hex digits"),
    }
}

impl PrefixKey {
    /// Reads `prefix_hash`, `prefix_len`, `layer_lo` and `layer_hi`.
    ///
    /// # Errors
    /// The first key that is missing or does not hold what belongs there.
    pub fn read(object: &Object<'_>) -> Result<Self, MetaError> {
        let layer = "a whole number from 0 to 65535";
        Ok(Self {
            prefix_hash: wide(object, "prefix_hash")?,
            prefix_len: narrow(object, "prefix_len", "a whole number from 0 to 4294967295")?,
            layer_lo: narrow(object, "layer_lo", layer)?,
            layer_hi: narrow(object, "layer_hi", layer)?,
        })
    }

    /// Writes what [`PrefixKey::read`] reads.
    pub fn write(&self, meta: &mut MetaWriter<'_, '_>) {
        meta.string("prefix_hash", &format!("0x{:016x}", self.prefix_hash))
            .unsigned("prefix_len", u64::from(self.prefix_len))
            .unsigned("layer_lo", u64::from(self.layer_lo))
            .unsigned("layer_hi", u64::from(self.layer_hi));
    }
}

impl Conditions {
    /// Reads the optional keys. `config_fp` is read with the rest of the request meta, so it is not looked for here.
    ///
    /// # Errors
    /// The first key that does not hold what belongs there.
    pub fn read(object: &Object<'_>, config_fp: Option<&str>) -> Result<Self, MetaError> {
        let exact = match object.get("exact") {
            None => false,
            Some(Value::Bool(exact)) => *exact,
            Some(_) => return field("exact", "true or false"),
        };
        let basis_fp = match object.get("basis_fp") {
            None => None,
            Some(Value::String(text)) if parse_fingerprint(text).is_some() => parse_fingerprint(text),
            Some(_) => return field("basis_fp", "a string like \"0x0123abcd\""),
        };
        Ok(Self {
            prefix_digest: digest(object, "prefix_digest")?,
            config_fp: config_fp.map(str::to_owned),
            mesh_fp: digest(object, "mesh_fp")?,
            exact,
            basis_fp,
        })
    }

    /// Writes the keys that are set.
    pub fn write(&self, meta: &mut MetaWriter<'_, '_>) {
        if let Some(digest) = self.prefix_digest {
            meta.string("prefix_digest", &digest.to_string());
        }
        if let Some(config_fp) = &self.config_fp {
            meta.string("config_fp", config_fp);
        }
        if let Some(digest) = self.mesh_fp {
            meta.string("mesh_fp", &digest.to_string());
        }
        if self.exact {
            meta.boolean("exact", true);
        }
        if let Some(basis_fp) = self.basis_fp {
            meta.string("basis_fp", &format!("0x{basis_fp:08x}"));
        }
    }

    /// Whether a prefix that came through `provenance` will do.
    #[must_use]
    pub fn accept(&self, provenance: Provenance) -> bool {
        let exact = !self.exact || provenance == Provenance::Raw;
        exact && self.basis_fp.is_none_or(|basis_fp| provenance == Provenance::Basis(basis_fp))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use aeon_proto::{
        frame::{Flags, Frame},
        payload::{FrameWriter, Payload},
    };
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> Result<PrefixKey, MetaError> {
        PrefixKey::read(&Object::parse(text)?)
    }

    #[test]
    fn hash_and_digest_are_of_the_ids_as_little_endian_words() {
        assert_eq!(prefix_hash(&[]), 0xef46_db37_51d8_e999);
        assert_eq!(prefix_hash(&[1, 0x0203_0405]), xxhash_rust::xxh64::xxh64(&[1, 0, 0, 0, 5, 4, 3, 2], 0));
        assert_eq!(prefix_digest(&[]).to_string(), "af1349b9f5f9a1a6a0404dea36dcc949");
        assert_eq!(Digest::parse("AF1349B9f5f9a1a6a0404dea36dcc949"), Some(prefix_digest(&[])));
        for text in ["", "af1349b9f5f9a1a6a0404dea36dcc94", "+f1349b9f5f9a1a6a0404dea36dcc949", "é"] {
            assert_eq!(Digest::parse(text), None, "{text}");
        }
    }

    /// Small edits of a text must not meet: a rolling hash gives the same value for +31, -1 on neighbours.
    #[test]
    fn small_edits_give_other_hashes() {
        let base: Vec<u32> = (0..24).map(|n| 1000 + n * 37 % 50).collect();
        let mut all = HashSet::from([base.clone()]);
        for at in 0..base.len() {
            for step in [1, 31, 37, 256, 65_536] {
                let mut edited = base.clone();
                edited[at] += step;
                all.insert(edited.clone());
                if at + 1 < base.len() {
                    for back in [1, 31, 256] {
                        let mut pair = edited.clone();
                        pair[at + 1] -= back;
                        all.insert(pair);
                    }
                }
            }
            let mut swapped = base.clone();
            swapped.swap(at, (at + 1) % base.len());
            all.insert(swapped);
            all.insert(base[..at].to_vec());
            let mut padded = base.clone();
            padded.extend(vec![0; at]);
            all.insert(padded);
        }
        let hashes: HashSet<u64> = all.iter().map(|ids| prefix_hash(ids)).collect();
        assert_eq!(hashes.len(), all.len());
    }

    #[test]
    fn wide_numbers_are_strings_or_small_numbers() {
        let read = |hash: &str| {
            key(&format!(r#"{{"prefix_hash":{hash},"prefix_len":"7","layer_lo":0,"layer_hi":"0x5"}}"#))
                .map(|key| key.prefix_hash)
        };
        assert_eq!(read("\"0xFFFFffffFFFFffff\""), Ok(u64::MAX));
        assert_eq!(read("\"18446744073709551615\""), Ok(u64::MAX));
        assert_eq!(read("9007199254740991"), Ok((1 << 53) - 1));
        for bad in
            ["9007199254740992", "-1", "1.0", "\"\"", "\"0x\"", "\"+1\"", "\"0x+1\"", "\" 1\"", "null", "\"1e3\""]
        {
            let result = read(bad);
            assert!(matches!(result, Err(MetaError::Field { key: "prefix_hash", .. })), "{bad}: {result:?}");
        }
        assert!(matches!(read("\"18446744073709551616\""), Err(MetaError::Field { .. })));
    }

    #[test]
    fn a_missing_or_wrong_key_names_itself() {
        let whole = r#""prefix_hash":"1","prefix_len":2,"layer_lo":3,"layer_hi":4"#;
        assert_eq!(
            key(&format!("{{{whole}}}")),
            Ok(PrefixKey { prefix_hash: 1, prefix_len: 2, layer_lo: 3, layer_hi: 4 })
        );
        for (name, other) in
            [("prefix_len", "4294967296"), ("layer_lo", "65536"), ("layer_hi", "[]"), ("prefix_hash", "true")]
        {
            let missing = whole.replace(name, "x");
            let text = format!("{{{missing},\"{name}\":{other}}}");
            for text in [format!("{{{missing}}}"), text] {
                assert!(matches!(key(&text), Err(MetaError::Field { key, .. }) if key == name), "{text}");
            }
        }
        assert!(matches!(key(&format!("{{{whole},\"layer_lo\":3}}")), Err(MetaError::Json(_))));
    }

    #[test]
    fn conditions_of_the_wrong_type_are_refused() {
        for (name, bad) in [
            ("prefix_digest", "\"00\""),
            ("prefix_digest", "7"),
            ("mesh_fp", "null"),
            ("exact", "1"),
            ("basis_fp", "\"beef\""),
            ("basis_fp", "5"),
        ] {
            let text = format!("{{\"{name}\":{bad}}}");
            let result = Conditions::read(&Object::parse(&text).unwrap(), None);
            assert!(matches!(result, Err(MetaError::Field { key, .. }) if key == name), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(
            prefix_hash: u64, prefix_len: u32, layer_lo: u16, layer_hi: u16, digest: Option<[u8; 16]>, exact: bool,
            basis_fp: Option<u32>, mesh: Option<[u8; 16]>,
        ) {
            let key = PrefixKey { prefix_hash, prefix_len, layer_lo, layer_hi };
            let conditions = Conditions {
                prefix_digest: digest.map(Digest),
                config_fp: Some("ab".to_owned()),
                mesh_fp: mesh.map(Digest),
                exact,
                basis_fp,
            };
            let mut out = Vec::new();
            let mut frame = FrameWriter::new(&mut out, 0xb001, 7, Flags::NONE);
            key.write(&mut frame.meta());
            conditions.write(&mut frame.meta());
            prop_assert!(frame.finish().is_ok());
            let payload = Frame::decode_exact(&out).unwrap().payload;
            let object = Object::parse(Payload::decode(payload).unwrap().meta).unwrap();
            prop_assert_eq!(PrefixKey::read(&object), Ok(key));
            prop_assert_eq!(Conditions::read(&object, Some("ab")), Ok(conditions));
        }
    }
}
