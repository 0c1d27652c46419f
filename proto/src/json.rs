//! JSON as this protocol reads it: one object, no duplicate keys at any level, a bounded depth.
//!
//! Two parsers that read different values from one text are a fault that nobody sees, so duplicates are refused instead
//! of resolved. `serde_json` does the parsing; this module adds the rules and keeps strings borrowed where it can.

use alloc::{borrow::Cow, string::String, vec::Vec};
use core::{cell::RefCell, fmt};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// Levels of nesting that are read; the object itself is the first.
pub const MAX_DEPTH: usize = 32;

/// Why a text is not an object by the rules of this protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum Error {
    /// Not JSON at all.
    #[error("not JSON at byte {offset}")]
    Syntax {
        /// Where the parser stopped.
        offset: usize,
    },
    /// JSON, but no object.
    #[error("a JSON object expected")]
    NotObject,
    /// A key stands twice in one object.
    #[error("key {key:?} stands twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Objects or arrays nested too deep.
    #[error("nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
}

/// A JSON value that borrows its strings from the text where they have no escapes.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A whole number that fits u64.
    Unsigned(u64),
    /// A negative whole number that fits i64.
    Negative(i64),
    /// Any other number.
    Float(f64),
    /// A string.
    String(Cow<'a, str>),
    /// An array.
    Array(Vec<Self>),
    /// An object.
    Object(Object<'a>),
}

/// The members of a JSON object in the order of the text; keys are distinct.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Object<'a> {
    members: Vec<(Cow<'a, str>, Value<'a>)>,
}

impl<'a> Object<'a> {
    /// Reads an object from `text`. An empty text is the empty object.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn parse(text: &'a str) -> Result<Self, Error> {
        if text.is_empty() || text == "{}" {
            return Ok(Self::default());
        }
        let fault = RefCell::new(None);
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let parsed = ValueSeed { depth: 0, fault: &fault }
            .deserialize(&mut deserializer)
            .and_then(|value| deserializer.end().map(|()| value));
        match parsed {
            Ok(Value::Object(object)) => Ok(object),
            Ok(_) => Err(Error::NotObject),
            Err(error) => Err(fault.into_inner().unwrap_or_else(|| Error::Syntax { offset: offset_of(text, &error) })),
        }
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.members.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The members in the order of the text.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value<'a>)> {
        self.members.iter().map(|(key, value)| (&**key, value))
    }

    /// Whether there is no member.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }
}

/// `serde_json` counts lines and columns from 1; a meta text is usually one line.
fn offset_of(text: &str, error: &serde_json::Error) -> usize {
    let lines: usize = text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    lines.saturating_add(error.column()).saturating_sub(1).min(text.len())
}

struct ValueSeed<'f> {
    depth: usize,
    fault: &'f RefCell<Option<Error>>,
}

impl ValueSeed<'_> {
    fn nested<E: serde::de::Error>(&self) -> Result<Self, E> {
        let depth = self.depth.saturating_add(1);
        if depth > MAX_DEPTH {
            return Err(self.fail(Error::TooDeep));
        }
        Ok(Self { depth, fault: self.fault })
    }

    fn fail<E: serde::de::Error>(&self, error: Error) -> E {
        self.fault.replace(Some(error));
        E::custom("refused")
    }
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Value<'de>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Value<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(Value::Bool(value))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Value::Unsigned(value))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
        Ok(u64::try_from(value).map_or(Value::Negative(value), Value::Unsigned))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
        Ok(Value::Float(value))
    }
    fn visit_borrowed_str<E>(self, value: &'de str) -> Result<Self::Value, E> {
        Ok(Value::String(Cow::Borrowed(value)))
    }
    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(Value::String(Cow::Owned(value.into())))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(self.nested()?)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members: Vec<(Cow<'de, str>, Value<'de>)> = Vec::new();
        while let Some(key) = map.next_key_seed(KeySeed)? {
            let value = map.next_value_seed(self.nested()?)?;
            members.push((key, value));
        }
        match duplicate(&members) {
            Some(key) => Err(self.fail(Error::DuplicateKey { key })),
            None => Ok(Value::Object(Object { members })),
        }
    }
}

/// Finds a key that stands twice: by pairs while there are few, by sorting when a hostile text has thousands.
fn duplicate(members: &[(Cow<'_, str>, Value<'_>)]) -> Option<String> {
    const FEW: usize = 24;
    if members.len() <= FEW {
        let mut rest = members;
        while let Some(((key, _), others)) = rest.split_first() {
            if others.iter().any(|(other, _)| other == key) {
                return Some(key.clone().into_owned());
            }
            rest = others;
        }
        return None;
    }
    let mut keys: Vec<&str> = members.iter().map(|(key, _)| &**key).collect();
    keys.sort_unstable();
    keys.array_windows().find(|[a, b]| a == b).map(|[key, _]| (*key).into())
}

struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed {
    type Value = Cow<'de, str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_borrowed_str<E>(self, value: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(value))
    }
    fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(value.into()))
    }
}

/// Appends `text` to `out` as a JSON string, quotes included, with the escapes of RFC 8785 and no others.
pub fn write_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    // Nearly every key and name is plain, and is copied whole.
    if !text.bytes().any(|byte| byte < b' ' || byte == b'"' || byte == b'\\') {
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
        return;
    }
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            0x08 => out.extend_from_slice(b"\\b"),
            0x0c => out.extend_from_slice(b"\\f"),
            0..=0x1f => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                let digit = |nibble: u8| HEX.get(usize::from(nibble)).copied().unwrap_or(b'0');
                out.extend_from_slice(&[b'\\', b'u', b'0', b'0', digit(byte >> 4), digit(byte & 0xf)]);
            }
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use alloc::{format, string::ToString};

    use super::*;

    #[test]
    fn reads_every_kind_of_value_and_borrows_plain_strings() {
        let text = r#"{"n":null,"b":true,"u":18446744073709551615,"i":-5,"f":1.5,"s":"plain","e":"a\nb","a":[1,{}]}"#;
        let object = Object::parse(text).unwrap();
        assert_eq!(object.get("n"), Some(&Value::Null));
        assert_eq!(object.get("b"), Some(&Value::Bool(true)));
        assert_eq!(object.get("u"), Some(&Value::Unsigned(u64::MAX)));
        assert_eq!(object.get("i"), Some(&Value::Negative(-5)));
        assert_eq!(object.get("f"), Some(&Value::Float(1.5)));
        assert!(matches!(object.get("s"), Some(Value::String(Cow::Borrowed("plain")))));
        assert_eq!(object.get("e"), Some(&Value::String("a\nb".into())));
        assert!(matches!(object.get("a"), Some(Value::Array(items)) if items.len() == 2));
        assert_eq!(object.get("x"), None);
        assert_eq!(object.iter().len(), 8);
        assert!(Object::parse("").unwrap().is_empty());
    }

    #[test]
    fn duplicates_are_refused_at_every_level_and_in_long_objects() {
        let twice = |key: &str| Err(Error::DuplicateKey { key: key.into() });
        assert_eq!(Object::parse(r#"{"a":1,"b":2,"a":1}"#), twice("a"));
        assert_eq!(Object::parse(r#"{"x":[{"k":{},"\u006b":1}]}"#), twice("k"));
        let mut text = "{".to_string();
        for n in 0..1000 {
            text += &format!("\"k{n}\":0,");
        }
        assert!(Object::parse(&format!("{text}\"z\":0}}")).is_ok());
        assert_eq!(Object::parse(&format!("{text}\"k500\":0}}")), twice("k500"));
    }

    #[test]
    fn depth_is_bounded_at_its_limit() {
        let nested = |levels: usize| format!("{{\"a\":{}{}}}", "[".repeat(levels), "]".repeat(levels));
        assert!(Object::parse(&nested(MAX_DEPTH - 1)).is_ok());
        assert_eq!(Object::parse(&nested(MAX_DEPTH + 1)), Err(Error::TooDeep));
        assert_eq!(Object::parse(&nested(64)), Err(Error::TooDeep));
        assert_eq!(Object::parse(&"{\"a\":".repeat(13_000)), Err(Error::TooDeep));
    }

    #[test]
    fn what_is_no_object_says_why() {
        for text in ["[]", "null", "7", "\"s\""] {
            assert_eq!(Object::parse(text), Err(Error::NotObject), "{text}");
        }
        assert_eq!(Object::parse("{{"), Err(Error::Syntax { offset: 1 }));
        assert_eq!(Object::parse("{}x"), Err(Error::Syntax { offset: 2 }));
        assert!(matches!(Object::parse("{\"a\":01}"), Err(Error::Syntax { .. })));
        assert!(matches!(Object::parse("{\"a\":NaN}"), Err(Error::Syntax { .. })));
    }

    #[test]
    fn written_strings_read_back() {
        let text = "quote \" back \\ tab \t nl \n bell \u{7} feed \u{c} erase \u{8} é 𝄞";
        let mut out = Vec::new();
        write_string(text, &mut out);
        assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
    }
}
