//! What a carrier tells the station about a request, and how it gets the answer.

use std::{fmt, net::SocketAddr, sync::Arc, time::Instant};

use aeon_proto::frame::{Flags, Frame};

pub use crate::telemetry::traffic::Carrier;

use crate::model::CancelToken;

/// Where a peer is, for logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Origin {
    /// Nobody says.
    #[default]
    Unknown,
    /// A network address.
    Network(SocketAddr),
    /// A process of this machine.
    Process {
        /// Its id, if the system says.
        pid: Option<i32>,
        /// Its user.
        uid: u32,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("unknown"),
            Self::Network(address) => address.fmt(f),
            Self::Process { pid: Some(pid), uid } => write!(f, "pid {pid} uid {uid}"),
            Self::Process { pid: None, uid } => write!(f, "uid {uid}"),
        }
    }
}

/// Who asks. A stream connection has one for its lifetime, UDP one for each datagram.
#[derive(Debug, Clone)]
pub struct Peer {
    /// The kind of socket.
    pub carrier: Carrier,
    /// Tells stream connections apart, so that each gets its turn; 0 on UDP and HTTP.
    pub connection: u64,
    /// The sender's address, on UDP.
    pub address: Option<SocketAddr>,
    /// Where it is, for logs.
    pub origin: Origin,
    /// Whether replies to this address may be larger than three times their request: always on streams and loopback.
    pub is_proven: bool,
    /// The largest reply that the carrier can take, in bytes of the frame.
    pub max_reply_len: usize,
    /// The session of requests that name none (`--connection-session`).
    pub default_session: Option<Arc<str>>,
    /// Whether replies carry FIN alone, for clients that read 0x20 as POISON (`--stock-clients`).
    pub stock_replies: bool,
}

impl Peer {
    /// The flags of a reply to this peer.
    #[must_use]
    pub const fn reply_flags(&self, success: bool) -> Flags {
        match (self.stock_replies, success) {
            (true, _) => Flags::FIN,
            (false, true) => Flags::SUCCESS,
            (false, false) => Flags::FAILURE,
        }
    }
}

/// A request frame and where it came from.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Who asks.
    pub peer: &'a Peer,
    /// The frame; its flags are those of a request and its payload is not empty.
    pub frame: Frame<'a>,
    /// When it came.
    pub arrived: Instant,
}

/// Takes the answer of queued work, from a worker thread. It is dropped unused if the queue does not take the work.
pub trait ReplyTo: Send {
    /// Called once, with the encoded frame, or with `None` if the request must not be answered.
    fn finish(self: Box<Self>, reply: Option<Vec<u8>>);
}

/// What became of a request.
#[derive(Debug)]
pub enum Outcome {
    /// The reply was appended to the output.
    Replied,
    /// It waits for the model; the answer goes to the [`ReplyTo`]. The token withdraws it.
    Queued(CancelToken),
    /// It must not be answered.
    Silent,
}
