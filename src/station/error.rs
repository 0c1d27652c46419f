//! Why a request is not done, and the one table that says which status its sender gets.
//!
//! Every variant is decided in [`RequestError::status`]; there is no wildcard arm, so a new fault does not compile until
//! someone has decided it. The text and the fields go to the peer; they hold what was expected and what came, never paths,
//! model input or the cause of an internal error.

use aeon_proto::{
    bwah::BwahError,
    frame::Flags,
    meta,
    payload::{self, FrameWriter, MetaWriter},
    pcar, qres,
    route::Route,
    status::Status,
};

use super::auth::Refused;
use crate::{
    causes::with_causes,
    codec::StreamError,
    model::{ModelError, kept::Provenance},
    replay::cache::CaptureError,
    telemetry::faults::{Fault, fault},
};

/// The longest error text that a peer gets, in bytes.
const MAX_TEXT: usize = 300;
/// Bases that the vent of an unknown one lists at most, so that it fits the smallest datagram.
const MAX_HAVE: usize = 64;

/// Why a request is not done.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The stream cannot be read on.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// Half a frame, then nothing.
    #[error("half a frame: {got} bytes of it came in {waited_ms} ms")]
    HalfFrame {
        /// Bytes that came.
        got: usize,
        /// How long was waited.
        waited_ms: u64,
    },
    /// The peer is on no list of those who may ask.
    #[error("peer is not allowed; ask the operator of this station to list it")]
    PeerNotAllowed,
    /// More connections than the station takes.
    #[error("{max} connections are open, no more are taken")]
    TooManyConnections {
        /// The limit.
        max: usize,
        /// When to come back.
        retry_after_ms: u64,
    },
    /// Not signed with the station's key, or not to be taken for its stamp.
    #[error(transparent)]
    NotAuthenticated(#[from] Refused),
    /// A large reply to an address that may be forged.
    #[error("address not proven: repeat the request with this token in its meta, or pad it to a third of its reply")]
    AddressNotProven {
        /// What to repeat the request with.
        token: String,
    },
    /// No such opcode.
    #[error("unknown route {0}")]
    UnknownRoute(Route),
    /// An opcode that this station does not serve.
    #[error("route {0} is not enabled on this station")]
    RouteNotEnabled(Route),
    /// The payload does not split.
    #[error(transparent)]
    Payload(#[from] payload::Error),
    /// The meta is refused.
    #[error(transparent)]
    Meta(#[from] meta::Error),
    /// A body that is no whole number of values.
    #[error("body of {len} bytes is no multiple of 4")]
    BodyLength {
        /// Bytes of the body.
        len: usize,
    },
    /// A body that is no whole number of residuals.
    #[error("hidden_dim mismatch: body of {len} bytes is no multiple of 4 x {hidden_dim}")]
    HiddenDim {
        /// Bytes of the body.
        len: usize,
        /// This model's width.
        hidden_dim: usize,
    },
    /// A body of the PCA routes that is none.
    #[error("PCAR body: {0}")]
    Pcar(#[from] pcar::DecodeError),
    /// A body of the quantised routes that is none.
    #[error(transparent)]
    Qres(#[from] qres::DecodeError),
    /// NaN or infinity in a quantised body.
    #[error("position {position} of the quantised body holds NaN or infinity")]
    PositionNonFinite {
        /// Which position.
        position: usize,
    },
    /// Components of a basis that is not loaded.
    #[error("basis fingerprint mismatch")]
    UnknownBasis {
        /// Fingerprints that are loaded.
        have: Vec<u32>,
    },
    /// Components that were made by another methodology than the basis, or one that is not known here.
    #[error("methodology mismatch")]
    MethodologyMismatch {
        /// The basis's.
        expected: u32,
    },
    /// The basis has no components for the boundary.
    #[error("the basis has no components for boundary {boundary}; send raw f32")]
    BoundaryNotInBasis {
        /// Of the route.
        boundary: u32,
    },
    /// Components of residuals of another width.
    #[error("hidden_dim mismatch: {got} in the {part}, this model has {expected}")]
    PcarHiddenDim {
        /// "body", or "basis" if the body has this model's width and its basis another.
        part: &'static str,
        /// This model's width.
        expected: usize,
        /// By that part.
        got: u32,
    },
    /// More components than the basis has.
    #[error("{k} components in the body, the basis has {max} at this boundary")]
    TooManyComponents {
        /// By the body.
        k: usize,
        /// Of the basis.
        max: usize,
    },
    /// NaN or infinity after lifting.
    #[error("value {index} of the lifted residual is NaN or infinite")]
    LiftedNonFinite {
        /// Which value.
        index: usize,
    },
    /// A request without a position.
    #[error("body is empty, at least one position is expected")]
    NoPositions,
    /// More positions than one request may hold.
    #[error("{seq} positions in one request, at most {max} are taken; split it")]
    TooManyPositions {
        /// Positions of the body.
        seq: usize,
        /// The limit.
        max: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} at position {index} of the body is outside the vocabulary of {vocab}")]
    TokenId {
        /// The id.
        id: u32,
        /// Which of the body.
        index: usize,
        /// Number of ids.
        vocab: usize,
    },
    /// `top_k` is missing or out of range.
    #[error("\"return\":\"topk\" needs top_k from 1 to {vocab}")]
    TopK {
        /// Number of ids.
        vocab: usize,
    },
    /// None of the body kinds that the client accepts.
    #[error("none of the accepted body kinds is supported; this station answers with f32")]
    NothingAcceptable,
    /// A session without a position on a carrier that may lose or double requests.
    #[error("a session over UDP needs pos in every request")]
    PositionMissing,
    /// RESET of nothing.
    #[error("RESET needs a session")]
    SessionMissing,
    /// The body is not what its sender hashed.
    #[error("fp48 of the body is {got:012x}, the request says {expected:012x}: the body was damaged on its way")]
    BodyFingerprint {
        /// By the request.
        expected: u64,
        /// By the body.
        got: u64,
    },
    /// The reply does not fit a frame or datagram.
    #[error("reply of {len} bytes does not fit, at most {max}; ask for fewer positions at once")]
    ReplyTooLarge {
        /// Bytes of the reply.
        len: usize,
        /// The limit.
        max: usize,
        /// Whether the limit is that of a datagram.
        datagram: bool,
    },
    /// The sequence would be longer than the model allows.
    #[error("positions up to {end} asked for, the context of this model is {context_len}")]
    ContextTooLong {
        /// One past the last position.
        end: usize,
        /// The model's limit.
        context_len: usize,
    },
    /// A body from another boundary than this station takes.
    #[error("boundary {got} in the request, this route takes boundary {expected}")]
    Boundary {
        /// Of the route.
        expected: u32,
        /// By the request.
        got: u32,
    },
    /// Another model configuration.
    #[error("config_fp of the request differs from this model's: the stations hold different models")]
    Config {
        /// This model's.
        expected: String,
    },
    /// The request does not go on where the session ends.
    #[error("pos {got} asked for, the session goes on at {expected}")]
    Position {
        /// Positions the session holds.
        expected: usize,
        /// By the request.
        got: usize,
    },
    /// NaN or infinity in the body.
    #[error("value {index} of the body is NaN or infinite")]
    NonFinite {
        /// Which value.
        index: usize,
    },
    /// Withdrawn.
    #[error("cancelled")]
    Cancelled,
    /// The deadline of the request passed.
    #[error("deadline of {deadline_ms} ms passed")]
    DeadlinePassed {
        /// By the request.
        deadline_ms: u64,
    },
    /// Too much work is waiting.
    #[error("overloaded: {items} requests of {bytes} bytes are waiting")]
    Overloaded {
        /// Work in the queue.
        items: usize,
        /// Bytes in the queue.
        bytes: usize,
        /// When to come back.
        retry_after_ms: u64,
    },
    /// All sessions are in use and the budget is spent.
    #[error("no capacity: sessions in use leave no room, {wanted} wanted of {budget}")]
    NoCapacity {
        /// Wanted in all.
        wanted: usize,
        /// Allowed in all.
        budget: usize,
        /// When to come back.
        retry_after_ms: u64,
    },
    /// A session that alone is larger than all sessions may be.
    #[error(
        "session of {wanted} bytes, all sessions together may hold {max}; send a shorter text, or raise max-session-bytes"
    )]
    SessionTooLarge {
        /// Bytes that it would take.
        wanted: usize,
        /// The limit.
        max: usize,
    },
    /// Half frames and unread replies take too much memory.
    #[error(
        "{held} bytes of this connection wait, {room} may now; read replies, send whole frames, or come back later"
    )]
    NoBufferRoom {
        /// What the connection holds.
        held: usize,
        /// What it may hold now.
        room: usize,
        /// When to come back.
        retry_after_ms: u64,
    },
    /// A request in a datagram over the limit.
    #[error("datagram of {len} bytes, at most {max} are taken; send fewer positions at once, or use a stream")]
    DatagramTooLarge {
        /// Bytes that came.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The station is about to stop.
    #[error("draining: this station is about to stop")]
    Draining {
        /// When to come back.
        retry_after_ms: u64,
    },
    /// The part of the model is on another station.
    #[error("this station holds layers {lo}..{hi} of {n_layers}, so it has no {part}; ask the station that has")]
    NotHere {
        /// "embedding" or "head".
        part: &'static str,
        /// First layer.
        lo: u32,
        /// One past the last layer.
        hi: u32,
        /// Layers of the model.
        n_layers: u32,
    },
    /// The station behind this one refused.
    #[error("the station behind this one answered: {text}")]
    Upstream {
        /// Its status.
        status: Status,
        /// Its words.
        text: String,
        /// Where it says that the session goes on.
        expected_pos: Option<usize>,
    },
    /// The station behind this one does not answer.
    #[error("the station behind this one does not answer")]
    UpstreamUnreachable {
        /// When to come back.
        retry_after_ms: u64,
    },
    /// The layers gave NaN or infinity for finite input.
    #[error("value {index} of the result is NaN or infinite though the request was finite")]
    ResultNonFinite {
        /// Which value.
        index: usize,
    },
    /// The backend failed; its cause is for the operator's log only.
    #[error("the model failed at {operation}; its station's log says why")]
    Compute {
        /// What was being computed.
        operation: &'static str,
    },
    /// A capture body that is no envelope.
    #[error("capture body, {}: {}", .0.name(), with_causes(.0))]
    Envelope(BwahError),
    /// A capture of something, and of nothing or of two things.
    #[error("CAPTURE needs a BWAH body, or a session and an empty body")]
    CaptureSource,
    /// The key in the meta and the one in the envelope differ.
    #[error("the key in the meta is not the one in the envelope; leave it out of the meta")]
    CaptureKey,
    /// A capture that is not kept.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The session has no tail at the end of the prefix any more.
    #[error(
        "tail of prefix_len {prefix_len} is not kept; capture at the end of a prefill, before the session goes back"
    )]
    TailNotKept {
        /// By the request.
        prefix_len: usize,
        /// Prefixes whose tails are kept.
        kept: Vec<usize>,
    },
    /// A prefix that came through something else than its capture says.
    #[error("provenance of the prefix is {got}, the capture says otherwise")]
    Provenance {
        /// What it came through.
        got: Provenance,
    },
    /// The backend cannot export or import what its sessions remember.
    #[error("the sessions of this station's backend cannot be captured or replayed into")]
    CacheNotPortable,
    /// Nothing under this key of a shard.
    #[error("no such key in this shard")]
    ShardKeyUnknown,
    /// A value larger than a shard may hold.
    #[error("shard entry of {len} bytes, at most {max} are taken")]
    ShardEntryTooLarge {
        /// Bytes of the entry.
        len: usize,
        /// The limit.
        max: usize,
    },
    /// The handler panicked.
    #[error("internal error; the station's log says more")]
    Panicked,
}

impl RequestError {
    /// The status that the sender gets.
    #[must_use]
    pub const fn status(&self) -> Status {
        match self {
            Self::Stream(StreamError::FrameTooLarge { .. })
            | Self::TooManyPositions { .. }
            | Self::SessionTooLarge { .. }
            | Self::DatagramTooLarge { .. }
            | Self::ReplyTooLarge { .. }
            | Self::ContextTooLong { .. }
            | Self::Capture(CaptureError::PrefixTooLong { .. } | CaptureError::TooLarge { .. })
            | Self::ShardEntryTooLarge { .. } => Status::TOO_LARGE,
            Self::Stream(_)
            | Self::HalfFrame { .. }
            | Self::Payload(_)
            | Self::Meta(_)
            | Self::BodyLength { .. }
            | Self::HiddenDim { .. }
            | Self::NoPositions
            | Self::Pcar(_)
            | Self::Qres(_)
            | Self::PcarHiddenDim { .. }
            | Self::TooManyComponents { .. }
            | Self::TokenId { .. }
            | Self::TopK { .. }
            | Self::NothingAcceptable
            | Self::PositionMissing
            | Self::SessionMissing
            | Self::BodyFingerprint { .. }
            | Self::Envelope(_)
            | Self::CaptureSource
            | Self::CaptureKey
            | Self::Capture(
                CaptureError::EmptyPrefix
                | CaptureError::TailLen { .. }
                | CaptureError::SlabLen { .. }
                | CaptureError::SlabNotTaken { .. },
            ) => Status::BAD_REQUEST,
            Self::UnknownBasis { .. } | Self::MethodologyMismatch { .. } | Self::BoundaryNotInBasis { .. } => {
                Status::PRECONDITION_FAILED
            }
            Self::PeerNotAllowed | Self::NotAuthenticated(_) | Self::AddressNotProven { .. } => Status::FORBIDDEN,
            Self::UnknownRoute(_) | Self::ShardKeyUnknown => Status::NOT_FOUND,
            Self::RouteNotEnabled(_) | Self::NotHere { .. } | Self::CacheNotPortable => Status::NOT_IMPLEMENTED,
            Self::Boundary { .. }
            | Self::Config { .. }
            | Self::Position { .. }
            | Self::TailNotKept { .. }
            | Self::Provenance { .. }
            | Self::Capture(CaptureError::Layers { .. }) => Status::CONFLICT,
            Self::NonFinite { .. }
            | Self::PositionNonFinite { .. }
            | Self::LiftedNonFinite { .. }
            | Self::Capture(CaptureError::NonFinite { .. }) => Status::UNPROCESSABLE,
            Self::Cancelled => Status::CANCELLED,
            Self::DeadlinePassed { .. } => Status::TIMEOUT,
            Self::TooManyConnections { .. }
            | Self::Overloaded { .. }
            | Self::NoCapacity { .. }
            | Self::NoBufferRoom { .. }
            | Self::Draining { .. }
            | Self::UpstreamUnreachable { .. } => Status::UNAVAILABLE,
            Self::Upstream { status, .. } => *status,
            Self::ResultNonFinite { .. } | Self::Compute { .. } | Self::Panicked => Status::INTERNAL,
        }
    }

    /// The kind of fault that this is in metrics, and whose share of log lines it takes.
    #[must_use]
    pub const fn fault(&self) -> Fault {
        match self {
            Self::Stream(_) | Self::HalfFrame { .. } => Fault::Stream,
            Self::TooManyConnections { .. } => Fault::Connections,
            Self::UnknownBasis { .. } => Fault::UnknownBasis,
            Self::MethodologyMismatch { .. } => Fault::Methodology,
            Self::BoundaryNotInBasis { .. } => Fault::BasisBoundary,
            Self::Position { .. } => Fault::Position,
            Self::Overloaded { .. } => Fault::Overloaded,
            Self::NoCapacity { .. } => Fault::NoCapacity,
            Self::Draining { .. } => Fault::Draining,
            Self::Upstream { .. } | Self::UpstreamUnreachable { .. } => Fault::Upstream,
            Self::Panicked => Fault::Panic,
            // The others are told apart by their status alone.
            _ => match self.status() {
                Status::FORBIDDEN => Fault::Forbidden,
                Status::NOT_FOUND | Status::NOT_IMPLEMENTED => Fault::NotHere,
                Status::CONFLICT => Fault::Conflict,
                Status::PRECONDITION_FAILED => Fault::UnknownBasis,
                Status::TOO_LARGE => Fault::TooLarge,
                Status::UNPROCESSABLE => Fault::NonFinite,
                Status::CANCELLED => Fault::Cancelled,
                Status::TIMEOUT => Fault::Deadline,
                Status::UNAVAILABLE => Fault::Overloaded,
                Status::INTERNAL => Fault::Model,
                _ => Fault::BadRequest,
            },
        }
    }

    /// The fields that a vent carries beside status and text.
    fn fields(&self, meta: &mut MetaWriter<'_, '_>) {
        match self {
            Self::NotAuthenticated(Refused::Stale { now_ms, .. }) => {
                meta.unsigned("now_ms", *now_ms);
            }
            Self::AddressNotProven { token } => {
                meta.string("token", token);
            }
            Self::HiddenDim { hidden_dim, .. } => {
                meta.unsigned("hidden_dim", *hidden_dim as u64);
            }
            Self::TooManyPositions { max, .. } => {
                meta.unsigned("max_seq", *max as u64);
            }
            Self::TokenId { vocab, .. } | Self::TopK { vocab } => {
                meta.unsigned("vocab", *vocab as u64);
            }
            Self::SessionTooLarge { max, .. } => {
                meta.unsigned("max_session_bytes", *max as u64);
            }
            Self::ReplyTooLarge { max, datagram: true, .. } | Self::DatagramTooLarge { max, .. } => {
                meta.unsigned("max_datagram", *max as u64);
            }
            Self::ReplyTooLarge { max, datagram: false, .. } | Self::Stream(StreamError::FrameTooLarge { max, .. }) => {
                meta.unsigned("max_frame", *max as u64);
            }
            Self::ContextTooLong { context_len, .. } => {
                meta.unsigned("context_len", *context_len as u64);
            }
            Self::Boundary { expected, .. } => {
                meta.unsigned("boundary", u64::from(*expected));
            }
            Self::Config { expected } => {
                meta.string("config_fp", expected);
            }
            Self::Position { expected, .. } | Self::Upstream { expected_pos: Some(expected), .. } => {
                meta.unsigned("expected_pos", *expected as u64);
            }
            Self::TooManyConnections { retry_after_ms, .. }
            | Self::Overloaded { retry_after_ms, .. }
            | Self::NoCapacity { retry_after_ms, .. }
            | Self::NoBufferRoom { retry_after_ms, .. }
            | Self::Draining { retry_after_ms }
            | Self::UpstreamUnreachable { retry_after_ms } => {
                meta.unsigned("retry_after_ms", *retry_after_ms);
            }
            Self::TailNotKept { kept, .. } => {
                meta.unsigneds("kept", kept.iter().map(|prefix_len| *prefix_len as u64));
            }
            Self::Capture(CaptureError::PrefixTooLong { context_len, .. }) => {
                meta.unsigned("context_len", *context_len as u64);
            }
            Self::Capture(CaptureError::TooLarge { budget, .. }) => {
                meta.unsigned("max_replay_bytes", *budget as u64);
            }
            Self::Capture(CaptureError::Layers { held, .. }) => {
                meta.unsigneds("layers", [u64::from(held.start), u64::from(held.end)]);
            }
            Self::ShardEntryTooLarge { max, .. } => {
                meta.unsigned("max_shard_entry", *max as u64);
            }
            Self::NotHere { lo, hi, .. } => {
                meta.unsigneds("layers", [u64::from(*lo), u64::from(*hi)]);
            }
            Self::UnknownBasis { have } => {
                let have: Vec<String> =
                    have.iter().take(MAX_HAVE).map(|basis_fp| format!("0x{basis_fp:08x}")).collect();
                meta.strings("have", have.iter().map(String::as_str));
            }
            Self::MethodologyMismatch { expected } => {
                meta.string("methodology", &format!("0x{expected:08x}"));
            }
            Self::PcarHiddenDim { expected, .. } => {
                meta.unsigned("hidden_dim", *expected as u64);
            }
            Self::TooManyComponents { max, .. } => {
                meta.unsigned("k", *max as u64);
            }
            Self::Stream(_)
            | Self::HalfFrame { .. }
            | Self::Pcar(_)
            | Self::Qres(_)
            | Self::PositionNonFinite { .. }
            | Self::BoundaryNotInBasis { .. }
            | Self::LiftedNonFinite { .. }
            | Self::PeerNotAllowed
            | Self::NotAuthenticated(Refused::NotAuthentic(_) | Refused::Forgotten | Refused::Replayed)
            | Self::UnknownRoute(_)
            | Self::RouteNotEnabled(_)
            | Self::Payload(_)
            | Self::Meta(_)
            | Self::BodyLength { .. }
            | Self::NoPositions
            | Self::NothingAcceptable
            | Self::PositionMissing
            | Self::SessionMissing
            | Self::BodyFingerprint { .. }
            | Self::NonFinite { .. }
            | Self::Cancelled
            | Self::DeadlinePassed { .. }
            | Self::Upstream { expected_pos: None, .. }
            | Self::Envelope(_)
            | Self::CaptureSource
            | Self::CaptureKey
            | Self::Capture(
                CaptureError::EmptyPrefix
                | CaptureError::TailLen { .. }
                | CaptureError::SlabLen { .. }
                | CaptureError::SlabNotTaken { .. }
                | CaptureError::NonFinite { .. },
            )
            | Self::Provenance { .. }
            | Self::CacheNotPortable
            | Self::ShardKeyUnknown
            | Self::ResultNonFinite { .. }
            | Self::Compute { .. }
            | Self::Panicked => {}
        }
    }

    /// Appends the vent for this error to `out`.
    pub fn write_vent(&self, stream_id: u16, sequence: u32, flags: Flags, out: &mut Vec<u8>) {
        let mut text = self.to_string();
        if text.len() > MAX_TEXT {
            let end = (0..=MAX_TEXT).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
            text.truncate(end);
        }
        let mut frame = FrameWriter::new(out, stream_id, sequence, flags);
        let mut meta = frame.meta();
        meta.unsigned("status", u64::from(self.status().0)).string("error", &text);
        self.fields(&mut meta);
        // The text is bounded and the fields are numbers and short strings: this always fits.
        let _ = frame.finish();
    }

    /// From a backend's error, whose cause stays in the operator's log.
    pub(crate) fn from_model(error: ModelError, retry_after_ms: u64) -> Self {
        match error {
            ModelError::Cancelled => Self::Cancelled,
            ModelError::NotHere { part, lo, hi, n_layers } => Self::NotHere { part, lo, hi, n_layers },
            ModelError::Upstream { status, text, expected_pos } => Self::Upstream { status, text, expected_pos },
            ModelError::UpstreamUnreachable { ref source, .. } => {
                fault!(WARN, Fault::Upstream, cause = %source, "{error}: {source}");
                Self::UpstreamUnreachable { retry_after_ms }
            }
            ModelError::Compute { operation, ref source } => {
                fault!(ERROR, Fault::Model, operation, cause = %source, "model failed at {operation}: {source}");
                Self::Compute { operation }
            }
            ModelError::CacheNotPortable => Self::CacheNotPortable,
            ModelError::ForeignCache | ModelError::CacheLen { .. } | ModelError::CacheNonFinite { .. } => {
                fault!(ERROR, Fault::Model, %error, "model failed: {error}");
                Self::Compute { operation: "session cache" }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use aeon_proto::{frame::Frame, json::Object, payload::Payload};

    use super::*;

    fn vent(error: &RequestError) -> String {
        let mut out = Vec::new();
        error.write_vent(3, 9, Flags::FAILURE, &mut out);
        let frame = Frame::decode_exact(&out).unwrap();
        assert_eq!((frame.stream_id, frame.sequence, frame.flags), (3, 9, Flags::FAILURE));
        let payload = Payload::decode(frame.payload).unwrap();
        assert!(payload.body.is_empty());
        Object::parse(payload.meta).unwrap();
        payload.meta.to_owned()
    }

    #[test]
    fn a_vent_names_status_text_and_what_to_do() {
        let position = RequestError::Position { expected: 5, got: 9 };
        let expected = r#"{"status":409,"error":"pos 9 asked for, the session goes on at 5","expected_pos":5}"#;
        assert_eq!(vent(&position), expected);
        let large = RequestError::ReplyTooLarge { len: 70_000, max: 65_507, datagram: true };
        assert!(vent(&large).starts_with(r#"{"status":413,"#) && vent(&large).ends_with(r#""max_datagram":65507}"#));
        let draining = RequestError::Draining { retry_after_ms: 250 };
        assert!(vent(&draining).ends_with(r#""retry_after_ms":250}"#));
    }

    #[test]
    fn a_long_text_is_cut_at_a_character() {
        let error = RequestError::Upstream { status: Status(418), text: "é".repeat(1000), expected_pos: None };
        let text = vent(&error);
        assert!(text.len() < 400 && text.starts_with(r#"{"status":418"#), "{text}");
    }
}
