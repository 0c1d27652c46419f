//! Status codes: every response carries one in its meta. Spec: `proto/SPEC.md`, "Status codes".

use core::fmt;

/// A status code. Unknown numbers are kept and shown.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Status(pub u16);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            /// What the number means, in a few words.
            #[must_use]
            pub const fn description(self) -> &'static str {
                match self.0 {
                    $($code => $text,)*
                    _ => "unknown status",
                }
            }
        }
    };
}

statuses! {
    /// The request was done.
    OK = 200, "ok";
    /// The prefix cache has no such entry.
    NO_CONTENT = 204, "replay miss";
    /// Malformed, of a wrong size, or of another hidden size.
    BAD_REQUEST = 400, "malformed request";
    /// The peer may not ask, or its UDP address is not proven.
    FORBIDDEN = 403, "not allowed";
    /// No such route or shard key.
    NOT_FOUND = 404, "unknown route or key";
    /// Position, boundary or configuration differ.
    CONFLICT = 409, "position, boundary or configuration conflict";
    /// Basis or methodology differ.
    PRECONDITION_FAILED = 412, "basis or methodology mismatch";
    /// Frame, datagram, sequence or context too large.
    TOO_LARGE = 413, "too large";
    /// NaN or infinity in numbers that must be finite.
    UNPROCESSABLE = 422, "NaN or infinity";
    /// Withdrawn by its sender.
    CANCELLED = 499, "cancelled";
    /// The station's own fault.
    INTERNAL = 500, "internal error";
    /// A known route that this station does not serve.
    NOT_IMPLEMENTED = 501, "route not enabled on this station";
    /// Overloaded or draining; try again later.
    UNAVAILABLE = 503, "overloaded or draining";
    /// The request's own deadline passed.
    TIMEOUT = 504, "deadline passed";
}

impl Status {
    /// Whether the request was done (2xx).
    #[must_use]
    pub const fn is_success(self) -> bool {
        matches!(self.0, 200..=299)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.description())
    }
}
