//! What can go wrong between a client and a station.

use std::{io, time::Duration};

use aeon_proto::{
    auth::{AuthError, SignError},
    frame::EncodeError,
    json,
    route::Route,
    status::Status,
};

use super::address::StationAddress;
use crate::codec::StreamError;

/// Why a request to a station has no answer, or not the one that was wanted.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection.
    #[error("cannot reach station {station}; check that it runs there and that you may connect")]
    Connect {
        /// Which station.
        station: StationAddress,
        /// What the system said.
        source: io::Error,
    },
    /// The station does not take connections fast enough.
    #[error("station {station} is busy: it took no connection within {waited:?}")]
    Busy {
        /// Which station.
        station: StationAddress,
        /// How long was tried.
        waited: Duration,
    },
    /// The connection ended under a request.
    #[error("station {station} closed the connection while {route} was waiting for its answer: {reason}")]
    Closed {
        /// Which station.
        station: StationAddress,
        /// What was asked.
        route: Route,
        /// Why, as far as it is known.
        reason: String,
    },
    /// No answer in time.
    #[error("station {station} did not answer {route} within {waited:?}; check that it runs{}", strangers(station))]
    Timeout {
        /// Which station.
        station: StationAddress,
        /// What was asked.
        route: Route,
        /// How long was waited.
        waited: Duration,
    },
    /// The station gives no sign of life: neither the answer nor HEALTH came.
    #[error(
        "station {station} is silent: it answered neither {route} nor HEALTH for {waited:.1?}; check that it runs there and \
         that the network between is up{}",
        strangers(station)
    )]
    Silent {
        /// Which station.
        station: StationAddress,
        /// What was asked.
        route: Route,
        /// Since when nothing was heard.
        waited: Duration,
    },
    /// The station lives and has nothing to do, but datagrams of this request, or of its answer, get lost each time.
    #[error(
        "station {station} is alive and idle, but {copies} copies of {route} ({len} bytes) got no answer: datagrams of this \
         size, or of the answer's, seem to be lost on the way; use tcp: instead, or send less at once"
    )]
    Unanswered {
        /// Which station.
        station: StationAddress,
        /// What was asked.
        route: Route,
        /// How often it was sent.
        copies: u32,
        /// Bytes of the request.
        len: usize,
    },
    /// The station refused.
    #[error("station {station} refused {route} with {status}: {text}")]
    Vent {
        /// Which station.
        station: StationAddress,
        /// What was asked.
        route: Route,
        /// Its status.
        status: Status,
        /// Its words.
        text: String,
        /// The whole meta of the vent.
        meta: String,
    },
    /// An answer that is not of the protocol.
    #[error("station {station} answered {route} with something else: {problem}")]
    BadReply {
        /// Which station.
        station: StationAddress,
        /// What was asked.
        route: Route,
        /// What is wrong with it.
        problem: String,
    },
    /// An answer that is not signed by the station's key.
    #[error(
        "answer of station {station} to {route} does not count: {error}; {}",
        said.as_deref().unwrap_or("check that it runs with the same --auth-key-file")
    )]
    NotAuthentic {
        /// Which station.
        station: StationAddress,
        /// What was asked.
        route: Route,
        /// What is wrong with it.
        error: AuthError,
        /// What the answer says, if it is a refusal.
        said: Option<String>,
    },
    /// A request that does not fit a frame or datagram.
    #[error("request {route} of {len} bytes does not fit what station {station} takes ({max})")]
    RequestTooLarge {
        /// Which station.
        station: StationAddress,
        /// What was asked.
        route: Route,
        /// Bytes of the request.
        len: usize,
        /// Bytes that fit.
        max: usize,
    },
    /// A request that cannot be encoded.
    #[error("request cannot be encoded")]
    Encode(#[from] EncodeError),
    /// A request that cannot be signed.
    #[error("request cannot be signed")]
    Sign(#[from] SignError),
    /// One station of a mesh failed, and nothing took its place.
    #[error("station {number} of {count}, {station} with layers {lo}..{hi}, failed{standbys}", lo = layers[0], hi = layers[1])]
    Hop {
        /// Its number, from 1.
        number: usize,
        /// Stations of the mesh.
        count: usize,
        /// Where it is.
        station: StationAddress,
        /// First layer held, and one past the last.
        layers: [u32; 2],
        /// Why no standby took its place, beginning with a comma; empty if there is none.
        standbys: String,
        /// What happened.
        source: Box<Self>,
    },
    /// The stations named are not one model.
    #[error("the stations named do not make one model: {problem}")]
    Mesh {
        /// What is wrong and what to do.
        problem: String,
    },
}

impl ClientError {
    /// What happened at a station, without where in the mesh it is.
    #[must_use]
    pub fn cause(&self) -> &Self {
        match self {
            Self::Hop { source, .. } => source.cause(),
            other => other,
        }
    }

    /// Whether a station could not be reached at all.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(
            self.cause(),
            Self::Connect { .. }
                | Self::Busy { .. }
                | Self::Closed { .. }
                | Self::Timeout { .. }
                | Self::Silent { .. }
                | Self::Unanswered { .. }
        )
    }

    /// The status of a vent.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self.cause() {
            Self::Vent { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// A whole number in the meta of a vent.
    #[must_use]
    pub fn vent_number(&self, key: &str) -> Option<u64> {
        let Self::Vent { meta, .. } = self.cause() else { return None };
        match json::Object::parse(meta).ok()?.get(key)? {
            json::Value::Unsigned(value) => Some(*value),
            _ => None,
        }
    }

    /// A string in the meta of a vent.
    #[must_use]
    pub fn vent_string(&self, key: &str) -> Option<String> {
        let Self::Vent { meta, .. } = self.cause() else { return None };
        match json::Object::parse(meta).ok()?.get(key)? {
            json::Value::String(value) => Some(value.clone().into_owned()),
            _ => None,
        }
    }
}

/// What may be behind silence: over UDP stations do not answer strangers.
const fn strangers(station: &StationAddress) -> &'static str {
    match station {
        StationAddress::Udp(_) => ", that its --allow covers this address, and whether it needs --auth-key-file",
        _ => "",
    }
}

/// Why a connection ended, in words for all requests that were waiting on it.
pub(super) fn reason_of(error: &StreamError) -> String {
    match error {
        StreamError::Io(source) => source.to_string(),
        other => other.to_string(),
    }
}
