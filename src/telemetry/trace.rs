//! The W3C trace context that a request may carry in its meta (`trace`), for logs.

use std::fmt;

/// A `traceparent` of <https://www.w3.org/TR/trace-context/>: which trace a request belongs to, and which span sent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// Of the whole trace; never 0.
    pub trace_id: u128,
    /// Of the sender's span; never 0.
    pub parent_id: u64,
    /// Bit 0: the sender keeps this trace.
    pub flags: u8,
}

impl TraceParent {
    /// Reads `VERSION-TRACE-PARENT-FLAGS`, all in lower-case hex. `None` for everything that a receiver must ignore: another
    /// form, an id of zeros, version ff. Of versions that are not known, what version 00 knows is read.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let (head, rest) = bytes.split_at_checked(55)?;
        let version = hex(head.get(..2)?)?;
        if version == 0xff || !(rest.is_empty() || version != 0 && rest.first() == Some(&b'-')) {
            return None;
        }
        if [2, 35, 52].iter().any(|dash| head.get(*dash) != Some(&b'-')) {
            return None;
        }
        let trace_id = hex(head.get(3..35)?)?;
        let parent_id = u64::try_from(hex(head.get(36..52)?)?).ok()?;
        let flags = u8::try_from(hex(head.get(53..55)?)?).ok()?;
        (trace_id != 0 && parent_id != 0).then_some(Self { trace_id, parent_id, flags })
    }
}

fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |value, digit| match digit {
        b'0'..=b'9' => Some(value << 4 | u128::from(digit - b'0')),
        b'a'..=b'f' => Some(value << 4 | u128::from(digit - b'a' + 10)),
        _ => None,
    })
}

impl fmt::Display for TraceParent {
    /// The trace's id.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.trace_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn reads_what_the_recommendation_allows() {
        let trace = TraceParent::parse(GOOD).unwrap();
        assert_eq!((trace.parent_id, trace.flags), (0x00f0_67aa_0ba9_02b7, 1));
        assert_eq!(trace.to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(TraceParent::parse(&GOOD.replacen("00", "cc", 1)).is_some());
        assert!(TraceParent::parse(&(GOOD.replacen("00", "cc", 1) + "-later")).is_some());
    }

    #[test]
    fn everything_else_is_ignored() {
        let zero_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        let zero_parent = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16));
        for bad in [
            "",
            "00",
            &GOOD.to_uppercase(),
            &GOOD.replace('-', "_"),
            &GOOD[1..],
            &format!("{GOOD}0"),
            &format!("{GOOD}-more"),
            &GOOD.replacen("00", "ff", 1),
            &GOOD.replacen('4', "+", 1),
            &GOOD.replacen('4', "é", 1),
            &(GOOD.replacen("00", "cc", 1) + "later"),
            &zero_trace,
            &zero_parent,
        ] {
            assert_eq!(TraceParent::parse(bad), None, "{bad}");
        }
        for end in 0..GOOD.len() {
            assert_eq!(TraceParent::parse(&GOOD[..end]), None);
        }
    }
}
