//! HELLO and HEALTH: what a station is, and how it is.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use aeon_proto::{frame::EncodeError, meta::RequestMeta, payload::FrameWriter, qres::Format};
use serde_json::{Value, json};

use super::{Context, Station, error::RequestError, millis};
use crate::{basis::BasisFile, codec::StreamError};

/// The content type of this protocol; version 1 adds a parameter.
const CONTENT_TYPE: &str = "application/x-aeon-flow";
/// Header, length and meta of a frame whose meta is as long as can be.
const MAX_HELLO_LEN: usize = aeon_proto::frame::HEADER_LEN + 2 + u16::MAX as usize;

/// Whether a content type asks for version 1 or a later one.
fn asks_for_v1(content_type: Option<&str>) -> bool {
    let Some(content_type) = content_type else { return false };
    let mut parts = content_type.split(';').map(str::trim);
    parts.next().is_some_and(|name| name.eq_ignore_ascii_case(CONTENT_TYPE))
        && parts.filter_map(|part| part.strip_prefix("v=")).any(|v| v.trim().parse::<u32>().is_ok_and(|v| v >= 1))
}

impl Station {
    pub(super) fn hello(
        &self,
        meta: &RequestMeta<'_>,
        context: &Context,
        out: &mut Vec<u8>,
    ) -> Result<(), RequestError> {
        let core = &*self.core;
        let info = core.model.info();
        let v1 = asks_for_v1(meta.content_type.as_deref());
        let station = json!({
            "name": core.name,
            "version": env!("CARGO_PKG_VERSION"),
            "uptime_ms": millis(core.started.elapsed()),
        });
        let model = json!({
            "name": info.name,
            "hidden_dim": info.hidden_dim,
            "vocab": info.vocab,
            "n_layers": info.n_layers,
            "max_position": info.max_position,
            "bos": info.bos,
            "eos": info.eos,
            "config_fp": info.config_fp,
            "layers_fp": info.layers_fp,
        });
        let limits = json!({
            "max_frame": core.limits.max_frame_len,
            "max_datagram": core.limits.max_datagram_len,
            "max_seq": core.limits.max_positions,
        });
        let bases = core.bases.current();
        // Where a residual may come in: before the first layer held here, and before the final norm.
        let boundaries = [info.layers.start, info.n_layers];
        let count = if info.has_head() { 2 } else { 1 };

        let mut frame = FrameWriter::new(out, context.stream_id, context.sequence, context.success);
        let mut reply = frame.meta();
        reply.unsigned("status", 200);
        match v1 {
            true => reply.string("content_type", "application/x-aeon-flow; v=1"),
            false => reply.string("content_type", CONTENT_TYPE),
        };
        reply
            .raw("station", &station.to_string())
            .raw("model", &model.to_string())
            .unsigneds("layers", [u64::from(info.layers.start), u64::from(info.layers.end)])
            .unsigneds("boundaries", boundaries.iter().take(count).map(|boundary| u64::from(*boundary)))
            .strings("accepts", accepts(v1, !bases.is_empty()))
            .raw("limits", &limits.to_string());
        if v1 {
            let max = context.max_reply_len.min(MAX_HELLO_LEN - aeon_proto::auth::MAX_REPLY_LEN);
            let room = max.saturating_sub(frame.len()).saturating_sub(r#","bases":[]}"#.len());
            frame.meta().raw("bases", &list(bases.bases(), room));
        }
        finish(frame)
    }

    pub(super) fn health(&self, context: &Context, out: &mut Vec<u8>) -> Result<(), RequestError> {
        let core = &*self.core;
        let (sessions, session_bytes) = core.sessions.usage();
        let (queued, queued_bytes) = self.workers.as_ref().map_or((0, 0), |workers| workers.usage());
        let dropped = &core.counters.dropped;
        let dropped = [
            ("never_answered", &dropped.never_answered),
            ("empty", &dropped.empty),
            ("undecodable", &dropped.undecodable),
            ("peer_not_allowed", &dropped.peer_not_allowed),
            ("duplicate", &dropped.duplicate),
            ("stale", &dropped.stale),
            ("amplification", &dropped.amplification),
            ("unauthenticated", &dropped.unauthenticated),
            ("idle_cancel", &dropped.idle_cancel),
        ];
        let (entries, bytes) = core.replay.usage();
        let replayed = &core.replay.counters;
        let replay = [
            ("entries", entries as u64),
            ("bytes", bytes as u64),
            ("max_bytes", core.replay.budget() as u64),
            ("hits", replayed.hits.value()),
            ("misses", replayed.misses.value()),
            ("captures", replayed.captures.value()),
            ("refused", replayed.refused.value()),
            ("evictions", replayed.evictions.value()),
        ];
        let (shard_entries, shard_bytes) = core.shards.usage();
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut frame = FrameWriter::new(out, context.stream_id, context.sequence, context.success);
        frame
            .meta()
            .unsigned("status", 200)
            .boolean("draining", core.draining.load(std::sync::atomic::Ordering::Relaxed))
            .unsigned("uptime_ms", millis(core.started.elapsed()))
            .unsigned("clock_ms", millis(clock))
            .unsigned("requests", core.counters.requests.value())
            .unsigned("errors", core.counters.errors.value())
            .unsigned("connections", core.counters.connections.value() as u64)
            .unsigned("connections_refused", core.counters.connections_refused.value())
            .unsigned("buffered_bytes", core.counters.buffered_bytes.value() as u64)
            .unsigned("send_errors", core.counters.send_errors.value())
            .unsigned("sessions", sessions as u64)
            .unsigned("session_bytes", session_bytes as u64)
            .unsigned("queued", queued as u64)
            .unsigned("queued_bytes", queued_bytes as u64)
            .numbers("replay", replay)
            .unsigned("shard_entries", shard_entries as u64)
            .unsigned("shard_bytes", shard_bytes as u64)
            .numbers("dropped", dropped.map(|(name, count)| (name, count.value())));
        finish(frame)
    }
}

/// Bases as clients see them, in at most `room` bytes without the brackets. One that does not fit is left out: clients
/// then send raw, which is better than no answer.
fn list<'a>(bases: impl Iterator<Item = &'a Arc<BasisFile>>, room: usize) -> String {
    let mut list = "[".to_owned();
    for file in bases {
        let text = describe(file).to_string();
        let comma = if list.len() > 1 { "," } else { "" };
        if list.len() + comma.len() + text.len() > room + 1 {
            tracing::debug!(path = %file.path().display(), "no room for this basis in HELLO");
            continue;
        }
        list += comma;
        list += &text;
    }
    list + "]"
}

/// A basis as clients see it: enough to know whether theirs is the same, and how much of it they can use.
pub(super) fn describe(file: &BasisFile) -> Value {
    let boundaries: Vec<Value> = file
        .boundaries()
        .map(|part| json!({ "boundary": part.boundary, "k": part.k, "explained": part.explained(part.k) }))
        .collect();
    let mut basis = json!({
        "basis_fp": format!("0x{:08x}", file.basis_fp()),
        "blake3": file.blake3().to_hex().as_str(),
        "methodology": format!("0x{:08x}", file.methodology()),
        "boundaries": boundaries,
    });
    if let Some(judged) = &file.metadata().end_effect
        && let Some((boundary, worst)) = judged.worst()
    {
        // Six digits, so that a budget of one per cent is 0.01 and not the f32 next to it.
        let round = |value: f32| (f64::from(value) * 1e6).round() / 1e6;
        basis["judged"] = json!({
            "passed": judged.passed(),
            "budget": round(judged.budget),
            "positions": judged.positions,
            "worst_boundary": boundary,
            "k": worst.k,
            "kl": round(worst.kl),
            "top1": round(worst.top1),
            "perplexity_ratio": round(worst.perplexity_ratio),
        });
    }
    basis
}

/// A frame that does not fit the format was too much to ask for.
pub(super) fn finish(frame: FrameWriter<'_>) -> Result<(), RequestError> {
    let len = frame.len();
    match frame.finish() {
        Ok(_) => Ok(()),
        Err(EncodeError::PayloadTooLong { .. }) => {
            let max = aeon_proto::frame::MAX_FRAME_LEN;
            Err(RequestError::ReplyTooLarge { len, max, datagram: false })
        }
        Err(error) => Err(StreamError::Encode(error).into()),
    }
}

/// Body kinds, the exact one first.
fn accepts(v1: bool, has_bases: bool) -> impl Iterator<Item = &'static str> {
    let lossy = Format::ALL.map(Format::name).into_iter().chain(has_bases.then_some("pcar"));
    ["f32"].into_iter().chain(lossy.filter(move |_| v1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_one_is_asked_for_by_the_parameter() {
        for (content_type, v1) in [
            ("application/x-aeon-flow; v=1", true),
            ("Application/X-Aeon-Flow;v=2; q=1", true),
            ("application/x-aeon-flow", false),
            ("application/x-aeon-flow; v=0", false),
            ("application/x-aeon-flow; v=x", false),
            ("text/plain; v=1", false),
        ] {
            assert_eq!(asks_for_v1(Some(content_type)), v1, "{content_type}");
        }
        assert!(!asks_for_v1(None));
    }
}
