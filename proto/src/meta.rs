//! Request meta: what a client says about its request. Spec: `proto/SPEC.md`, "Request meta".
//!
//! Unknown keys are ignored. A known key with a value of another type is an error that names the key and what belongs
//! there: a typing mistake must not silently become the default.

mod canonical;

use alloc::{
    borrow::{Cow, ToOwned},
    vec::Vec,
};

use crate::json::{self, Object, Value};

/// The longest session name.
pub const MAX_SESSION_LEN: usize = 64;

/// Why a meta text is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum Error {
    /// Not an object by the rules of this protocol.
    #[error("meta: {0}")]
    Json(#[from] json::Error),
    /// A known key holds a value that does not belong there.
    #[error("meta key {key:?} must be {expected}")]
    Field {
        /// The key.
        key: &'static str,
        /// What belongs there.
        expected: &'static str,
    },
}

/// A body kind that a client can accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BodyKind {
    /// Packed f32: the raw residual.
    F32,
    /// IEEE half precision.
    F16,
    /// 8-bit blocks.
    I8,
    /// Rotated, this many bits a coordinate (3 to 8), fixed length.
    Q(u8),
    /// Rotated, this many bits a coordinate (3 to 8), entropy coded.
    E(u8),
    /// PCA components.
    Pcar,
}

impl BodyKind {
    /// Reads a name such as `f32` or `q4`.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "f32" => Self::F32,
            "f16" => Self::F16,
            "i8" => Self::I8,
            "pcar" => Self::Pcar,
            _ => match name.as_bytes() {
                [b'q', bits @ b'3'..=b'8'] => Self::Q(bits.saturating_sub(b'0')),
                [b'e', bits @ b'3'..=b'8'] => Self::E(bits.saturating_sub(b'0')),
                _ => return None,
            },
        })
    }

    /// The name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::I8 => "i8",
            Self::Pcar => "pcar",
            Self::Q(3) => "q3",
            Self::Q(4) => "q4",
            Self::Q(5) => "q5",
            Self::Q(6) => "q6",
            Self::Q(7) => "q7",
            Self::Q(_) => "q8",
            Self::E(3) => "e3",
            Self::E(4) => "e4",
            Self::E(5) => "e5",
            Self::E(6) => "e6",
            Self::E(7) => "e7",
            Self::E(_) => "e8",
        }
    }
}

/// What LM_HEAD (or a FORWARD with `"out":"token"`) returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Return {
    /// The most likely token id, ties to the lower id.
    #[default]
    Token,
    /// The `top_k` most likely ids and their logits.
    TopK,
    /// All logits.
    Logits,
}

/// What a FORWARD body holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Input {
    /// Residuals.
    #[default]
    Residual,
    /// Token ids: the station embeds them first.
    Ids,
}

/// What a FORWARD answers with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Output {
    /// Residuals.
    #[default]
    Residual,
    /// The token after the last position: the station applies its head.
    Token,
}

/// The typed view of a request's meta; absent keys are `None` or the default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestMeta<'a> {
    /// `content_type`, in HELLO.
    pub content_type: Option<Cow<'a, str>>,
    /// `session`: 1 to 64 characters of `[A-Za-z0-9._:-]`.
    pub session: Option<Cow<'a, str>>,
    /// `pos`: index of the body's first position in the session.
    pub pos: Option<u64>,
    /// `accept`: body kinds the client can read, best first; names this version does not know are left out. `None` means
    /// f32 only.
    pub accept: Option<Vec<BodyKind>>,
    /// `accept_basis`: fingerprints of the bases the client can lift with.
    pub accept_basis: Option<Vec<u32>>,
    /// `accept_k`: components wanted at most.
    pub accept_k: Option<u32>,
    /// `boundary`: number of layers the body has passed, to be checked.
    pub boundary: Option<u32>,
    /// `config_fp`: fingerprint of the model configuration, to be checked.
    pub config_fp: Option<Cow<'a, str>>,
    /// `deadline_ms`, counted from arrival.
    pub deadline_ms: Option<u64>,
    /// `timing`: ask for stage times in the response.
    pub timing: bool,
    /// `return`.
    pub returns: Return,
    /// `top_k`, for `"return":"topk"`.
    pub top_k: Option<u32>,
    /// `in`.
    pub input: Input,
    /// `out`.
    pub output: Output,
    /// `trace`: a W3C traceparent.
    pub trace: Option<Cow<'a, str>>,
    /// `token`: proof of the sender's UDP address.
    pub token: Option<Cow<'a, str>>,
    /// `fp48` of the body: low 48 bits of its XXH64.
    pub fp48: Option<u64>,
}

impl<'a> RequestMeta<'a> {
    /// Reads a meta text.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn parse(text: &'a str) -> Result<Self, Error> {
        canonical::read(text).map_or_else(|| Self::parse_whole(text), Ok)
    }

    fn parse_whole(text: &'a str) -> Result<Self, Error> {
        let object = Object::parse(text)?;
        if object.is_empty() {
            return Ok(Self::default());
        }
        let string = |key| string(&object, key);
        let unsigned = |key| unsigned(&object, key);
        let small = |key| small(&object, key);
        Ok(Self {
            content_type: string("content_type")?,
            session: session(&object)?,
            pos: unsigned("pos")?,
            accept: accept(&object)?,
            accept_basis: fingerprints(&object, "accept_basis")?,
            accept_k: small("accept_k")?,
            boundary: small("boundary")?,
            config_fp: string("config_fp")?,
            deadline_ms: unsigned("deadline_ms")?,
            timing: match object.get("timing") {
                None => false,
                Some(Value::Bool(timing)) => *timing,
                Some(_) => return Err(Error::Field { key: "timing", expected: "true or false" }),
            },
            returns: match choice(&object, "return", "\"token\", \"topk\" or \"logits\"", &["token", "topk", "logits"])?
            {
                Some(1) => Return::TopK,
                Some(2) => Return::Logits,
                _ => Return::Token,
            },
            top_k: small("top_k")?,
            input: match choice(&object, "in", "\"residual\" or \"ids\"", &["residual", "ids"])? {
                Some(1) => Input::Ids,
                _ => Input::Residual,
            },
            output: match choice(&object, "out", "\"residual\" or \"token\"", &["residual", "token"])? {
                Some(1) => Output::Token,
                _ => Output::Residual,
            },
            trace: string("trace")?,
            token: string("token")?,
            fp48: fp48(&object)?,
        })
    }
}

/// Whether `name` is a legal session name.
#[must_use]
pub fn is_session_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_SESSION_LEN
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte))
}

/// Reads the text form of a fingerprint or methodology id, `0x` and 1 to 8 hex digits.
#[must_use]
pub fn parse_fingerprint(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))?;
    if digits.is_empty() || digits.starts_with('+') {
        return None;
    }
    u32::from_str_radix(digits, 16).ok()
}

fn string<'a>(object: &Object<'a>, key: &'static str) -> Result<Option<Cow<'a, str>>, Error> {
    match object.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(match text {
            Cow::Borrowed(text) => Cow::Borrowed(*text),
            Cow::Owned(text) => Cow::Owned(text.to_owned()),
        })),
        Some(_) => Err(Error::Field { key, expected: "a string" }),
    }
}

fn unsigned(object: &Object<'_>, key: &'static str) -> Result<Option<u64>, Error> {
    match object.get(key) {
        None => Ok(None),
        Some(Value::Unsigned(value)) => Ok(Some(*value)),
        Some(_) => Err(Error::Field { key, expected: "a whole number from 0" }),
    }
}

fn small(object: &Object<'_>, key: &'static str) -> Result<Option<u32>, Error> {
    let expected = "a whole number from 0 to 4294967295";
    match unsigned(object, key)? {
        None => Ok(None),
        Some(value) => u32::try_from(value).map(Some).map_err(|_| Error::Field { key, expected }),
    }
}

fn session<'a>(object: &Object<'a>) -> Result<Option<Cow<'a, str>>, Error> {
    let name = string(object, "session")?;
    if name.as_deref().is_some_and(|name| !is_session_name(name)) {
        return Err(Error::Field { key: "session", expected: "1 to 64 characters of A-Z a-z 0-9 . _ : -" });
    }
    Ok(name)
}

fn accept(object: &Object<'_>) -> Result<Option<Vec<BodyKind>>, Error> {
    let wrong = Error::Field { key: "accept", expected: "an array of body kinds" };
    let Some(value) = object.get("accept") else { return Ok(None) };
    let Value::Array(items) = value else { return Err(wrong) };
    let mut kinds = Vec::new();
    for item in items {
        let Value::String(name) = item else { return Err(wrong) };
        kinds.extend(BodyKind::parse(name).filter(|kind| !kinds.contains(kind)));
    }
    Ok(Some(kinds))
}

fn fingerprints(object: &Object<'_>, key: &'static str) -> Result<Option<Vec<u32>>, Error> {
    let wrong = Error::Field { key, expected: "an array of strings like \"0x0123abcd\"" };
    let Some(value) = object.get(key) else { return Ok(None) };
    let Value::Array(items) = value else { return Err(wrong) };
    let read = |item: &Value<'_>| match item {
        Value::String(text) => parse_fingerprint(text),
        _ => None,
    };
    items.iter().map(read).collect::<Option<Vec<u32>>>().map(Some).ok_or(wrong)
}

fn fp48(object: &Object<'_>) -> Result<Option<u64>, Error> {
    let wrong = Error::Field { key: "fp48", expected: "a string of 12 hex digits" };
    match object.get("fp48") {
        None => Ok(None),
        Some(Value::String(text)) if text.len() == 12 && !text.starts_with('+') => {
            u64::from_str_radix(text, 16).map(Some).map_err(|_| wrong)
        }
        Some(_) => Err(wrong),
    }
}

fn choice(
    object: &Object<'_>,
    key: &'static str,
    expected: &'static str,
    names: &[&str],
) -> Result<Option<usize>, Error> {
    match string(object, key)? {
        None => Ok(None),
        Some(text) => names.iter().position(|name| *name == text).map(Some).ok_or(Error::Field { key, expected }),
    }
}

#[cfg(test)]
mod tests {
    use alloc::{format, vec};

    use super::*;

    #[test]
    fn reads_every_key() {
        let meta = RequestMeta::parse(
            r#"{"session":"s-1","pos":5,"accept":["q4","new","f32","q4"],"accept_basis":["0xdeadbeef"],"accept_k":9,
                "boundary":3,"config_fp":"ab","deadline_ms":100,"timing":true,"return":"topk","top_k":4,"in":"ids",
                "out":"token","trace":"00-x","token":"t","fp48":"00000000ffff","content_type":"c","unknown":[{}]}"#,
        )
        .unwrap();
        let expected = RequestMeta {
            content_type: Some("c".into()),
            session: Some("s-1".into()),
            pos: Some(5),
            accept: Some(vec![BodyKind::Q(4), BodyKind::F32]),
            accept_basis: Some(vec![0xdead_beef]),
            accept_k: Some(9),
            boundary: Some(3),
            config_fp: Some("ab".into()),
            deadline_ms: Some(100),
            timing: true,
            returns: Return::TopK,
            top_k: Some(4),
            input: Input::Ids,
            output: Output::Token,
            trace: Some("00-x".into()),
            token: Some("t".into()),
            fp48: Some(0xffff),
        };
        assert_eq!(meta, expected);
        assert_eq!(RequestMeta::parse("{}").unwrap(), RequestMeta::default());
        assert_eq!(RequestMeta::parse("").unwrap(), RequestMeta::default());
    }

    #[test]
    fn a_known_key_with_a_wrong_value_names_itself() {
        for (key, bad) in [
            ("session", "\"\""),
            ("session", "\"a b\""),
            ("session", "7"),
            ("pos", "-1"),
            ("pos", "1.5"),
            ("pos", "\"1\""),
            ("accept", "\"f32\""),
            ("accept", "[1]"),
            ("accept_basis", "[\"beef\"]"),
            ("accept_basis", "[\"0x123456789\"]"),
            ("accept_k", "4294967296"),
            ("boundary", "null"),
            ("config_fp", "1"),
            ("deadline_ms", "true"),
            ("timing", "1"),
            ("return", "\"best\""),
            ("top_k", "[]"),
            ("in", "\"text\""),
            ("out", "0"),
            ("fp48", "\"123\""),
            ("fp48", "\"00000000zzzz\""),
        ] {
            let text = format!("{{\"{key}\":{bad}}}");
            let result = RequestMeta::parse(&text);
            assert!(matches!(result, Err(Error::Field { key: named, .. }) if named == key), "{text}: {result:?}");
        }
        assert!(RequestMeta::parse(&format!("{{\"session\":\"{}\"}}", "x".repeat(64))).is_ok());
        assert!(RequestMeta::parse(&format!("{{\"session\":\"{}\"}}", "x".repeat(65))).is_err());
    }

    #[test]
    fn body_kind_names_read_back() {
        let mut kinds = vec![BodyKind::F32, BodyKind::F16, BodyKind::I8, BodyKind::Pcar];
        kinds.extend((3..=8).flat_map(|bits| [BodyKind::Q(bits), BodyKind::E(bits)]));
        for kind in kinds {
            assert_eq!(BodyKind::parse(kind.name()), Some(kind));
        }
        for name in ["q2", "q9", "e", "F32", ""] {
            assert_eq!(BodyKind::parse(name), None);
        }
    }
}
