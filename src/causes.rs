//! One line for an error and everything that led to it, for logs, vents and standard error.

use std::error::Error;

/// The text of an error and of its causes. A cause that its error's text ends with already is not told twice.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text += ": ";
            text += &cause_text;
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Fault {
        text: &'static str,
        source: Option<Box<Self>>,
    }

    #[test]
    fn each_cause_is_told_once() {
        let fault = |text, source: Option<Fault>| Fault { text, source: source.map(Box::new) };
        let deep = fault("no such file", None);
        let middle = fault("cannot read it: no such file", Some(deep));
        assert_eq!(with_causes(&fault("start", Some(middle))), "start: cannot read it: no such file");
        let other = fault("b", Some(fault("c", None)));
        assert_eq!(with_causes(&fault("a", Some(other))), "a: b: c");
    }
}
