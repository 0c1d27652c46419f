//! The prefix replay cache over HTTP: the same entries, keys and errors as on the frame routes.

use std::{sync::Arc, time::Instant};

use aeon_proto::{
    frame::Frame,
    json::{Object, Value},
    payload::Payload,
};
use axum::{
    body::Body,
    extract::{Request as HttpRequest, State},
    http::StatusCode,
    response::Response,
};
use tokio::{
    sync::{OwnedSemaphorePermit, oneshot},
    time::error::Elapsed,
};

use super::{
    Admin, body,
    reply::{Refusal, json, read_body, typed, vent},
};
use crate::{
    model::CancelToken,
    station::request::{Carrier, Origin, Outcome, Peer, ReplyTo, Request},
};

/// The type of an envelope.
const ENVELOPE: &str = "application/x-bitwise-residual";

/// Hands the answer of queued work to the waiting request.
struct Waiting(oneshot::Sender<Option<Vec<u8>>>);

impl ReplyTo for Waiting {
    fn finish(self: Box<Self>, reply: Option<Vec<u8>>) {
        // A client that went away gets nothing.
        let _ = self.0.send(reply);
    }
}

/// Withdraws queued work when the client goes away.
struct CancelOnDrop(CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Waits for a place among the bodies that are held at once.
async fn turn(admin: &Admin) -> Result<OwnedSemaphorePermit, Elapsed> {
    let place = Arc::clone(&admin.bodies).acquire_owned();
    match tokio::time::timeout(admin.timeout, place).await {
        Ok(Ok(permit)) => Ok(permit),
        // It is never closed.
        Ok(Err(_)) => std::future::pending().await,
        Err(elapsed) => Err(elapsed),
    }
}

/// `POST /amplituhedron/replay`: the key is the meta of a REPLAY frame.
pub(super) async fn replay(State(admin): State<Admin>, request: HttpRequest<Body>) -> Response {
    let max = admin.station().limits().max_frame_len;
    let Ok(_body) = turn(&admin).await else { return Refusal::Busy.into_response() };
    match read_body(request, max, admin.timeout).await {
        Ok(body) => ask(&admin, &body).await.unwrap_or_else(Refusal::into_response),
        Err(refusal) => refusal.into_response(),
    }
}

async fn ask(admin: &Admin, key: &[u8]) -> Result<Response, Refusal> {
    let bytes = body::key_frame(key)?;
    let frame = Frame::decode_exact(&bytes).map_err(|_| Refusal::Internal)?;
    let peer = Peer {
        carrier: Carrier::Http,
        connection: 0,
        address: None,
        origin: Origin::Unknown,
        is_proven: true,
        max_reply_len: admin.station().limits().max_frame_len,
        default_session: None,
        stock_replies: false,
    };
    let (done, answer) = oneshot::channel();
    let mut reply = Vec::new();
    let request = Request { peer: &peer, frame, arrived: Instant::now() };
    match admin.station().handle(request, &mut reply, || Box::new(Waiting(done))) {
        Outcome::Replied => {}
        Outcome::Queued(cancel) => {
            let _cancel = CancelOnDrop(cancel);
            reply = answer.await.ok().flatten().ok_or(Refusal::Internal)?;
        }
        Outcome::Silent => return Err(Refusal::Internal),
    }
    translate(&reply).ok_or(Refusal::Internal)
}

/// A reply frame as an HTTP answer.
fn translate(reply: &[u8]) -> Option<Response> {
    let payload = Payload::decode(Frame::decode_exact(reply).ok()?.payload).ok()?;
    let object = Object::parse(payload.meta).ok()?;
    let Some(Value::Unsigned(status)) = object.get("status") else { return None };
    match u16::try_from(*status).ok()? {
        200 => Some(typed(200, ENVELOPE, payload.body.to_vec())),
        204 => {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::NO_CONTENT;
            Some(response)
        }
        status => Some(json(status, payload.meta.to_owned())),
    }
}

/// `POST /amplituhedron/capture`: the body is an envelope.
pub(super) async fn capture(State(admin): State<Admin>, request: HttpRequest<Body>) -> Response {
    let max = admin.station().limits().max_frame_len;
    let Ok(_body) = turn(&admin).await else { return Refusal::Busy.into_response() };
    let body = match read_body(request, max, admin.timeout).await {
        Ok(body) => body,
        Err(refusal) => return refusal.into_response(),
    };
    // Unpacking and hashing 16 MiB takes milliseconds: not on a thread that serves sockets.
    let station = Arc::clone(admin.station());
    match tokio::task::spawn_blocking(move || station.capture_envelope(&body)).await {
        Ok(Ok(())) => json(200, r#"{"captured":true}"#),
        Ok(Err(error)) => vent(&error),
        Err(_) => Refusal::Internal.into_response(),
    }
}
