//! Requests and bytes by route, status, carrier and body kind: tables of counters over closed sets.

use aeon_proto::{
    frame::HEADER_LEN,
    meta::{Input, RequestMeta},
    qres::Format,
    route::Route,
};

use super::{Counter, Histogram};

/// Bytes that say how long the meta of a payload is.
const META_LEN_LEN: usize = 2;

macro_rules! labels {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// All values of this label.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The value in metrics and logs.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}
pub(super) use labels;

labels! {
    /// The kind of socket that a request came on.
    Carrier {
        /// A Unix stream socket.
        Unix = "unix",
        /// TCP.
        Tcp = "tcp",
        /// UDP: requests may be lost, doubled and reordered, and their sender may be forged.
        Udp = "udp",
        /// HTTP, for the prefix replay cache.
        Http = "http",
    }
}

labels! {
    /// Which way.
    Direction {
        /// From peers.
        In = "in",
        /// To peers.
        Out = "out",
    }
}

labels! {
    /// What a body holds.
    BodyKind {
        /// Residuals.
        F32 = "f32",
        /// PCA components.
        Pcar = "pcar",
        /// Residuals in half precision.
        F16 = "f16",
        /// Residuals in 8-bit blocks.
        I8 = "i8",
        /// Rotated residuals of 3 bits.
        Q3 = "q3",
        /// Of 4 bits.
        Q4 = "q4",
        /// Of 5 bits.
        Q5 = "q5",
        /// Of 6 bits.
        Q6 = "q6",
        /// Of 7 bits.
        Q7 = "q7",
        /// Of 8 bits.
        Q8 = "q8",
        /// Token ids.
        U32 = "u32",
        /// The most likely ids and their logits.
        TopK = "topk",
        /// All logits.
        Logits = "logits",
        /// An envelope of the prefix replay cache.
        Bwah = "bwah",
        /// Anything else.
        Other = "other",
    }
}

labels! {
    /// How a request was answered: the status codes of the protocol.
    StatusLabel {
        /// Done.
        Ok = "200",
        /// A replay miss.
        NoContent = "204",
        /// Malformed.
        BadRequest = "400",
        /// Not allowed.
        Forbidden = "403",
        /// Unknown route or key.
        NotFound = "404",
        /// Another position, boundary or configuration.
        Conflict = "409",
        /// Another basis or methodology.
        PreconditionFailed = "412",
        /// Too large.
        TooLarge = "413",
        /// NaN or infinity.
        Unprocessable = "422",
        /// Withdrawn.
        Cancelled = "499",
        /// The station's fault.
        Internal = "500",
        /// Not on this station.
        NotImplemented = "501",
        /// Overloaded or draining.
        Unavailable = "503",
        /// Its deadline passed.
        Timeout = "504",
        /// A status of the station behind this one that is none of these.
        Other = "other",
        /// Not answered: a copy, or too much for an address that is not proven.
        Silent = "none",
    }
}

/// The route of a request, or [`RouteLabel::OTHER`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteLabel(usize);

impl RouteLabel {
    /// Every opcode that has no name.
    pub const OTHER: Self = Self(Route::ALL.len());

    /// The label of an opcode.
    #[must_use]
    pub fn of(route: Route) -> Self {
        Self(Route::ALL.iter().position(|known| *known == route).unwrap_or(Route::ALL.len()))
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=Route::ALL.len()).map(Self)
    }

    /// The value in metrics and logs: the name in the specification, or "other".
    #[must_use]
    pub fn name(self) -> &'static str {
        Route::ALL.get(self.0).and_then(|route| route.name()).unwrap_or("other")
    }
}

impl StatusLabel {
    /// The label of a status code.
    #[must_use]
    pub fn of(status: u16) -> Self {
        match status {
            200 => Self::Ok,
            204 => Self::NoContent,
            400 => Self::BadRequest,
            403 => Self::Forbidden,
            404 => Self::NotFound,
            409 => Self::Conflict,
            412 => Self::PreconditionFailed,
            413 => Self::TooLarge,
            422 => Self::Unprocessable,
            499 => Self::Cancelled,
            500 => Self::Internal,
            501 => Self::NotImplemented,
            503 => Self::Unavailable,
            504 => Self::Timeout,
            _ => Self::Other,
        }
    }
}

impl BodyKind {
    /// What the body of a request holds, by its route, its meta, and for a quantised one by its header.
    #[must_use]
    pub fn of_request(route: Route, meta: &RequestMeta<'_>, body: &[u8]) -> Self {
        match route {
            Route::EMBED => Self::U32,
            Route::FORWARD if meta.input == Input::Ids => Self::U32,
            Route::FORWARD | Route::LM_HEAD => Self::F32,
            Route::FORWARD_PCA | Route::LM_HEAD_PCA => Self::Pcar,
            Route::FORWARD_Q | Route::LM_HEAD_Q => {
                Format::peek(body).map_or(Self::Other, |format| Self::named(format.name().as_bytes()))
            }
            Route::AMPLITUHEDRON_CAPTURE => Self::Bwah,
            _ => Self::Other,
        }
    }

    fn named(name: &[u8]) -> Self {
        let kind = Self::ALL.iter().find(|kind| kind.name().as_bytes() == name);
        kind.copied().unwrap_or(Self::Other)
    }
}

/// What counting needs to know of a reply, as far as its first bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    /// Its status.
    pub status: StatusLabel,
    /// The number of the status, 0 without a reply.
    pub code: u16,
    /// What its body holds.
    pub kind: BodyKind,
    /// Bytes of the body.
    pub body_len: usize,
    /// Bytes of the frame.
    pub frame_len: usize,
}

impl Reply {
    /// No reply.
    pub const NONE: Self =
        Self { status: StatusLabel::Silent, code: 0, kind: BodyKind::Other, body_len: 0, frame_len: 0 };

    /// Reads an encoded reply of this station. Its meta begins with the status and goes on with the body kind if it has
    /// one; both are found without reading the rest.
    #[must_use]
    pub fn read(frame: &[u8]) -> Self {
        let read = || {
            let payload = frame.get(HEADER_LEN..)?;
            let (len, rest) = payload.split_first_chunk::<META_LEN_LEN>()?;
            let meta_len = usize::from(u16::from_be_bytes(*len));
            let (meta, body) = rest.split_at_checked(meta_len)?;
            let digits = meta.strip_prefix(b"{\"status\":")?;
            let end = digits.iter().position(|byte| !byte.is_ascii_digit())?;
            let (digits, rest) = digits.split_at_checked(end)?;
            let code = std::str::from_utf8(digits).ok()?.parse().ok()?;
            let kind = rest.strip_prefix(b",\"body\":\"").and_then(|rest| rest.split(|byte| *byte == b'"').next());
            let kind = kind.map_or(BodyKind::Other, BodyKind::named);
            let status = StatusLabel::of(code);
            Some(Self { status, code, kind, body_len: body.len(), frame_len: frame.len() })
        };
        read().unwrap_or(Self { status: StatusLabel::Other, frame_len: frame.len(), ..Self::NONE })
    }
}

type Table<const ROWS: usize, const COLUMNS: usize> = [[Counter; COLUMNS]; ROWS];

const ROUTES: usize = Route::ALL.len() + 1;
const STATUSES: usize = StatusLabel::ALL.len();
const KINDS: usize = BodyKind::ALL.len();
const CARRIERS: usize = Carrier::ALL.len();
const DIRECTIONS: usize = Direction::ALL.len();

/// The tables.
#[derive(Debug)]
pub struct Traffic {
    requests: Table<ROUTES, STATUSES>,
    durations: [Histogram; ROUTES],
    frame_bytes: Table<DIRECTIONS, CARRIERS>,
    body_bytes: [Table<CARRIERS, KINDS>; DIRECTIONS],
    saved_bytes: [Counter; DIRECTIONS],
    /// Positions that went through the layers.
    pub positions: Counter,
}

fn table<const ROWS: usize, const COLUMNS: usize>() -> Table<ROWS, COLUMNS> {
    std::array::from_fn(|_| std::array::from_fn(|_| Counter::default()))
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            requests: table(),
            durations: std::array::from_fn(|_| Histogram::default()),
            frame_bytes: table(),
            body_bytes: [table(), table()],
            saved_bytes: Default::default(),
            positions: Counter::default(),
        }
    }
}

impl Traffic {
    /// Requests of a route that were answered so.
    #[must_use]
    pub fn requests(&self, route: RouteLabel, status: StatusLabel) -> &Counter {
        &self.requests[route.0][status as usize]
    }

    /// Time from the arrival of a route's requests until their reply was ready.
    #[must_use]
    pub fn durations(&self, route: RouteLabel) -> &Histogram {
        &self.durations[route.0]
    }

    /// Bytes of frames.
    #[must_use]
    pub fn frame_bytes(&self, direction: Direction, carrier: Carrier) -> &Counter {
        &self.frame_bytes[direction as usize][carrier as usize]
    }

    /// Bytes of bodies.
    #[must_use]
    pub fn body_bytes(&self, direction: Direction, carrier: Carrier, kind: BodyKind) -> &Counter {
        &self.body_bytes[direction as usize][carrier as usize][kind as usize]
    }

    /// Bytes that bodies would have had more as f32.
    #[must_use]
    pub fn saved_bytes(&self, direction: Direction) -> &Counter {
        &self.saved_bytes[direction as usize]
    }

    /// Counts a request that was answered, or will not be.
    pub fn answered(&self, route: RouteLabel, carrier: Carrier, reply: &Reply) {
        self.requests(route, reply.status).add_one();
        if reply.frame_len > 0 {
            self.frame_bytes(Direction::Out, carrier).add(reply.frame_len as u64);
            self.body_bytes(Direction::Out, carrier, reply.kind).add(reply.body_len as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use aeon_proto::{frame::Flags, payload::FrameWriter, status::Status};

    use super::*;

    #[test]
    fn labels_are_in_the_order_of_their_tables() {
        assert!(StatusLabel::ALL.iter().enumerate().all(|(index, status)| *status as usize == index));
        assert!(BodyKind::ALL.iter().enumerate().all(|(index, kind)| *kind as usize == index));
        assert!(Carrier::ALL.iter().enumerate().all(|(index, carrier)| *carrier as usize == index));
        for status in [Status::OK, Status::NO_CONTENT, Status::CONFLICT, Status::TIMEOUT, Status::UNAVAILABLE] {
            assert_eq!(StatusLabel::of(status.0).name(), status.0.to_string());
        }
        assert_eq!(StatusLabel::of(418), StatusLabel::Other);
        assert_eq!(RouteLabel::of(Route::FORWARD).name(), "FORWARD");
        assert_eq!(RouteLabel::of(Route(0x1234)), RouteLabel::OTHER);
        assert_eq!((RouteLabel::OTHER.name(), RouteLabel::all().count()), ("other", ROUTES));
    }

    #[test]
    fn a_reply_is_read_from_its_first_bytes() {
        let encode = |meta: &str, body: &[u8]| {
            let mut bytes = Vec::new();
            let mut frame = FrameWriter::new(&mut bytes, 3, 1, Flags::SUCCESS);
            frame.meta_text(meta);
            frame.body().extend_from_slice(body);
            frame.finish().unwrap();
            Reply::read(&bytes)
        };
        let reply = encode(r#"{"status":200,"body":"pcar","seq":1}"#, &[0; 12]);
        assert_eq!((reply.status, reply.code, reply.kind, reply.body_len), (StatusLabel::Ok, 200, BodyKind::Pcar, 12));
        let reply = encode(r#"{"status":200,"body":"new"}"#, &[0; 3]);
        assert_eq!((reply.status, reply.kind, reply.body_len), (StatusLabel::Ok, BodyKind::Other, 3));
        let reply = encode(r#"{"status":418,"error":"teapot"}"#, &[]);
        assert_eq!((reply.status, reply.code, reply.kind), (StatusLabel::Other, 418, BodyKind::Other));
        let reply = encode(r#"{"status":99999999}"#, &[]);
        assert_eq!((reply.status, reply.code), (StatusLabel::Other, 0));
        assert_eq!(Reply::read(&[]).status, StatusLabel::Other);
    }
}
