//! The metas that most requests carry, read in one pass and without an allocation.
//!
//! This is a short cut, not a second grammar: it takes flat objects of a few known keys, without spaces, escapes or
//! repetition, and gives up at anything else, which the whole reader then judges. What it takes it reads alike.

use alloc::borrow::Cow;

use super::{RequestMeta, is_session_name};

/// Decimal digits that fit u64 whatever they are.
const MAX_DIGITS: usize = 19;

/// The meta, or `None` if the whole reader has to look at it.
pub(super) fn read(text: &str) -> Option<RequestMeta<'_>> {
    let mut meta = RequestMeta::default();
    let mut rest = text.strip_prefix('{')?;
    loop {
        let (key, value) = rest.strip_prefix('"')?.split_once('"')?;
        let value = value.strip_prefix(':')?;
        rest = match key {
            "pos" => number(value, &mut meta.pos)?,
            "deadline_ms" => number(value, &mut meta.deadline_ms)?,
            "boundary" => {
                let mut wide = meta.boundary.map(u64::from);
                let rest = number(value, &mut wide)?;
                meta.boundary = Some(wide?.try_into().ok()?);
                rest
            }
            "session" => string(value, &mut meta.session)?,
            "config_fp" => string(value, &mut meta.config_fp)?,
            "trace" => string(value, &mut meta.trace)?,
            "token" => string(value, &mut meta.token)?,
            _ => return None,
        };
        if rest == "}" {
            break;
        }
        rest = rest.strip_prefix(',')?;
    }
    let session = meta.session.as_deref();
    session.is_none_or(is_session_name).then_some(meta)
}

/// A whole number into a key that did not stand before.
fn number<'a>(text: &'a str, into: &mut Option<u64>) -> Option<&'a str> {
    let count = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, rest) = text.split_at_checked(count)?;
    let is_plain = (1..=MAX_DIGITS).contains(&count) && (count == 1 || !digits.starts_with('0'));
    if !is_plain || into.is_some() {
        return None;
    }
    let digit = |value: u64, byte: u8| value.wrapping_mul(10).wrapping_add(u64::from(byte.wrapping_sub(b'0')));
    *into = Some(digits.bytes().fold(0, digit));
    Some(rest)
}

/// A string without escapes into a key that did not stand before.
fn string<'a>(text: &'a str, into: &mut Option<Cow<'a, str>>) -> Option<&'a str> {
    let (value, rest) = text.strip_prefix('"')?.split_once('"')?;
    if into.is_some() || value.bytes().any(|byte| byte < b' ' || byte == b'\\') {
        return None;
    }
    *into = Some(Cow::Borrowed(value));
    Some(rest)
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn common_metas_take_the_short_way() {
        for text in [
            r#"{"pos":0,"boundary":0}"#,
            r#"{"session":"s-1","pos":18446744073709551}"#,
            r#"{"boundary":3,"config_fp":"ab","deadline_ms":100,"trace":"00-é","token":"t"}"#,
        ] {
            assert_eq!(read(text), Some(RequestMeta::parse_whole(text).unwrap()), "{text}");
        }
    }

    #[test]
    fn whatever_is_unusual_takes_the_long_way() {
        for text in [
            "",
            "{}",
            "{",
            r#"{"pos":1"#,
            r#"{"pos":1}}"#,
            r#"{"pos":1},"#,
            r#"{"pos":1,}"#,
            r#"{"pos":01}"#,
            r#"{"pos":-1}"#,
            r#"{"pos":1.5}"#,
            r#"{"pos":1e3}"#,
            r#"{"pos": 1}"#,
            r#"{"pos":1,"pos":1}"#,
            r#"{"pos":"1"}"#,
            r#"{"pos":}"#,
            r#"{"boundary":4294967296}"#,
            r#"{"boundary":1,"boundary":1}"#,
            r#"{"session":"a b"}"#,
            r#"{"session":""}"#,
            r#"{"token":"a\n"}"#,
            "{\"token\":\"a\nb\"}",
            r#"{"session":"a","session":"a"}"#,
            r#"{"accept":["f32"]}"#,
            r#"{"pos":18446744073709551615}"#,
            r#"{"p\u006fs":1}"#,
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn it_never_reads_what_the_whole_reader_reads_differently(
            parts in proptest::collection::vec(prop_oneof![
                Just("{"), Just("}"), Just(","), Just(":"), Just("\""), Just("\"pos\":"), Just("\"boundary\":"), Just("\"session\":"),
                Just("\"token\":"), Just("\"deadline_ms\":"), Just("7"), Just("0"), Just("\"a\""), Just("\\"), Just(" "),
                Just("99999999999"), Just("é"),
            ], 0..12),
        ) {
            let text = parts.concat();
            if let Some(meta) = read(&text) {
                prop_assert_eq!(Ok(meta), RequestMeta::parse_whole(&text));
            }
            let object = alloc::format!("{{{text}}}");
            if let Some(meta) = read(&object) {
                prop_assert_eq!(Ok(meta), RequestMeta::parse_whole(&object));
            }
        }
    }
}
