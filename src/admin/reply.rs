//! Bodies in and answers out, with one size limit and one form of errors.

use std::time::Duration;

use aeon_proto::{
    frame::{Flags, Frame},
    json,
    payload::Payload,
};
use axum::{
    body::Body,
    http::{HeaderValue, Request, StatusCode, header},
    response::Response,
};
use futures_util::StreamExt;

use super::body::{self, BodyError, KeyError};
use crate::{
    station::error::RequestError,
    telemetry::faults::{Fault, fault},
};

/// Time in which what a refused client still sends is read and dropped, so that it gets to see the answer.
const LINGER: Duration = Duration::from_secs(2);

/// Why a request is refused before the station sees it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// From a network that is on no list.
    #[error("peer is not allowed; ask the operator of this node to list its network")]
    PeerNotAllowed,
    /// From a peer that may look but not change anything.
    #[error("this peer may not reload or drain; ask from the node's own machine, or list its network in admin-allow")]
    ControlNotAllowed,
    /// From a page in a browser.
    #[error("requests of web pages (with an Origin header) are not taken")]
    FromPage,
    /// No such path.
    #[error(
        "no such path; there are /amplituhedron/replay, /amplituhedron/capture, /live, /ready, /metrics, /bases, \
         /sessions, /reload and /drain"
    )]
    UnknownPath,
    /// Another method.
    #[error("method not allowed; the /amplituhedron paths, /reload and /drain take POST, all others take GET")]
    Method,
    /// A body that was not read to its end.
    #[error(transparent)]
    Body(#[from] BodyError<axum::Error>),
    /// Too many bodies are being read.
    #[error("too many requests with bodies at once; come back later")]
    Busy,
    /// A key that no meta can hold.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// An answer of the station that cannot be read, or none.
    #[error("internal error; the log of this node says more")]
    Internal,
}

impl Refusal {
    const fn status(&self) -> u16 {
        match self {
            Self::PeerNotAllowed | Self::ControlNotAllowed | Self::FromPage => 403,
            Self::UnknownPath => 404,
            Self::Method => 405,
            Self::Body(BodyError::TooLarge { .. }) => 413,
            Self::Body(BodyError::TooSlow { .. }) => 408,
            Self::Body(BodyError::Broken { .. }) | Self::Key(_) => 400,
            Self::Internal => 500,
            Self::Busy => 503,
        }
    }

    /// Whether what the client still sends cannot be told from a new request.
    const fn ends_connection(&self) -> bool {
        match self {
            Self::Body(_) | Self::Busy | Self::PeerNotAllowed | Self::FromPage => true,
            Self::ControlNotAllowed | Self::UnknownPath | Self::Method | Self::Key(_) | Self::Internal => false,
        }
    }

    pub(super) fn into_response(self) -> Response {
        let mut text = Vec::new();
        text.extend_from_slice(b"{\"error\":");
        json::write_string(&self.to_string(), &mut text);
        if let Self::Body(BodyError::TooLarge { max }) = self {
            text.extend_from_slice(format!(",\"max_frame\":{max}").as_bytes());
        }
        text.push(b'}');
        let mut response = json(self.status(), text);
        if self.ends_connection() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// An answer with a JSON body.
pub(super) fn json(status: u16, text: impl Into<Body>) -> Response {
    typed(status, "application/json", text)
}

/// An answer with a body of a type.
pub(super) fn typed(status: u16, content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// The answer that says what a vent says: the vent's meta is the JSON body.
pub(super) fn vent(error: &RequestError) -> Response {
    let mut frame = Vec::new();
    error.write_vent(0, 0, Flags::FAILURE, &mut frame);
    let meta = Frame::decode_exact(&frame).ok().and_then(|frame| Payload::decode(frame.payload).ok());
    match meta {
        Some(payload) => json(error.status().0, payload.meta.to_owned()),
        None => Refusal::Internal.into_response(),
    }
}

/// Reads a whole body of at most `max` bytes. Memory grows with what came, whatever was announced.
pub(super) async fn read_body(request: Request<Body>, max: usize, timeout: Duration) -> Result<Vec<u8>, Refusal> {
    let announced =
        request.headers().get(header::CONTENT_LENGTH).and_then(|len| len.to_str().ok()?.parse::<u64>().ok());
    let asks_first = request.headers().contains_key(header::EXPECT);
    let mut chunks = request.into_body().into_data_stream();
    let read = match announced.is_some_and(|len| len > max as u64) {
        true => Err(BodyError::TooLarge { max }),
        false => body::collect(&mut chunks, max, timeout).await,
    };
    // A client that asks before it sends has sent nothing yet. Any other goes on sending, and would not see an answer on
    // a connection that is closed under it.
    match &read {
        Err(BodyError::TooLarge { .. }) if !asks_first => {
            let rest = async { while let Some(Ok(_)) = chunks.next().await {} };
            let _ = tokio::time::timeout(LINGER, rest).await;
        }
        Err(BodyError::Broken { source, .. }) => {
            fault!(DEBUG, Fault::Http, error = %source, "HTTP body broke off: {source}")
        }
        _ => {}
    }
    Ok(read?)
}
