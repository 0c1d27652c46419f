//! Route opcodes: the `stream_id` of a request says what is asked. Spec: `proto/SPEC.md`, "Routes".

use core::fmt;

/// A route opcode. Unknown numbers are kept, so that they can be logged and refused by value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route(pub u16);

macro_rules! routes {
    ($($(#[$doc:meta])* $name:ident = $code:literal;)*) => {
        impl Route {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            /// Every opcode that this version of the protocol names.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The opcode's name in the specification, if it has one.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

routes! {
    /// What the station is: model, layers, limits, versions.
    HELLO = 0x0000;
    /// Whether it works: uptime, load, counters.
    HEALTH = 0x0001;
    /// Token ids to residuals.
    EMBED = 0x0002;
    /// Residuals through this station's layers.
    FORWARD = 0x0003;
    /// Residuals to tokens or logits.
    LM_HEAD = 0x0004;
    /// Drops a session.
    RESET = 0x0005;
    /// Pushes a basis file.
    BASIS_PUT = 0x0006;
    /// FORWARD with PCA components as body.
    FORWARD_PCA = 0x0103;
    /// LM_HEAD with PCA components as body.
    LM_HEAD_PCA = 0x0104;
    /// FORWARD with quantised residuals as body.
    FORWARD_Q = 0x0203;
    /// LM_HEAD with quantised residuals as body.
    LM_HEAD_Q = 0x0204;
    /// Asks the prefix cache.
    AMPLITUHEDRON_REPLAY = 0xb001;
    /// Fills the prefix cache.
    AMPLITUHEDRON_CAPTURE = 0xb002;
    /// Writes a value of a shard.
    SHARD_PUT = 0xf001;
    /// Reads a value of a shard.
    SHARD_GET = 0xf002;
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "0x{:04x}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn opcodes_are_the_numbers_of_the_specification() {
        let numbers: alloc::vec::Vec<u16> = Route::ALL.iter().map(|route| route.0).collect();
        let expected = [
            0x0000, 0x0001, 0x0002, 0x0003, 0x0004, 0x0005, 0x0006, 0x0103, 0x0104, 0x0203, 0x0204, 0xb001, 0xb002,
            0xf001, 0xf002,
        ];
        assert_eq!(numbers, expected);
        assert_eq!(Route::FORWARD_PCA.to_string(), "FORWARD_PCA");
        assert_eq!(Route(0x1234).to_string(), "0x1234");
    }
}
