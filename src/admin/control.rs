//! What operators ask over HTTP: reload, drain, and what is in use and in memory.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::Next,
    response::Response,
};
use serde_json::json;

use super::{
    Admin,
    reply::{Refusal, json as reply, typed},
};
use crate::{
    control::{ReloadFailure, ReloadReport},
    station::Exposition,
};

/// Refuses what a browser sends on behalf of a page of somebody else: it names that page in every POST, and no other client
/// sends this header.
pub(super) async fn refuse_pages(request: Request, next: Next) -> Response {
    let is_safe = request.method().is_safe();
    match !is_safe && request.headers().contains_key(header::ORIGIN) {
        true => Refusal::FromPage.into_response(),
        false => next.run(request).await,
    }
}

/// `POST /reload`.
pub(super) async fn reload(State(admin): State<Admin>) -> Response {
    if !admin.may_control {
        return Refusal::ControlNotAllowed.into_response();
    }
    match admin.control.reload().await {
        Ok(report) => {
            let ReloadReport { reload, methodologies, .. } = &report;
            let hex = |list: &[u32]| list.iter().map(|fp| format!("0x{fp:08x}")).collect::<Vec<String>>();
            let left_out: Vec<String> = reload.duplicates.iter().map(ToString::to_string).collect();
            let answer = json!({
                "reloaded": report.has_folder,
                "added": hex(&reload.added),
                "withdrawn": hex(&reload.withdrawn),
                "kept": reload.kept,
                "methodologies": methodologies,
                "left_out": left_out,
                "text": report.to_string(),
            });
            reply(200, answer.to_string())
        }
        Err(failure) => {
            let ReloadFailure { kept, .. } = failure;
            reply(422, json!({ "reloaded": false, "error": failure.to_string(), "kept": kept }).to_string())
        }
    }
}

/// `POST /drain`: the answer comes at once, the node stops when work in flight has ended.
pub(super) async fn drain(State(admin): State<Admin>) -> Response {
    if !admin.may_control {
        return Refusal::ControlNotAllowed.into_response();
    }
    let in_flight = admin.station().counters().in_flight.count();
    tracing::warn!(in_flight, "asked over HTTP to drain");
    admin.control.drain();
    reply(202, json!({ "draining": true, "in_flight": in_flight }).to_string())
}

/// `GET /bases`.
pub(super) async fn bases(State(admin): State<Admin>) -> Response {
    reply(200, admin.station().bases_report().to_string())
}

/// `GET /sessions`.
pub(super) async fn sessions(State(admin): State<Admin>) -> Response {
    reply(200, admin.station().sessions_report().to_string())
}

/// `GET /metrics`.
pub(super) async fn metrics(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let exposition = Exposition::accepted(accept);
    match admin.station().metrics(exposition) {
        Ok(text) => typed(200, exposition.content_type(), text),
        Err(_) => Refusal::Internal.into_response(),
    }
}
