//! The figures at the end of a generation.

use aeon_station::client::{Pipeline, generate::Generated, pipeline::HopTraffic, recovery::Failover};
use serde_json::{Value, json};

/// One link: the client to a station, and back.
pub(crate) struct Hop {
    pub(crate) station: String,
    pub(crate) layers: String,
    pub(crate) traffic: HopTraffic,
}

pub(crate) fn hops(pipeline: &Pipeline) -> Vec<Hop> {
    let hop = |stage: &aeon_station::client::pipeline::Stage| {
        let layers = stage.hello.layers();
        Hop {
            station: stage.address().to_string(),
            layers: format!("{}..{}", layers.start, layers.end),
            traffic: stage.traffic,
        }
    };
    pipeline.stages().iter().map(hop).collect()
}

fn per_position(bytes: u64, traffic: HopTraffic) -> f64 {
    bytes as f64 / traffic.positions.max(1) as f64
}

/// The report for people.
pub(crate) fn text(generated: &Generated, prompt_len: usize, hops: &[Hop]) -> String {
    let mut out = format!("stopped: {}\n", generated.stop);
    out += &format!("prompt {prompt_len} tokens, generated {} tokens", generated.tokens.len());
    if let Some(rate) = generated.tokens_per_second() {
        out += &format!(", {rate:.1} tokens/s");
    }
    out += &format!("\ntime to first token {:.1} ms\n", generated.first_token.as_secs_f64() * 1000.0);
    out += "bytes per token on each hop (bodies):\n";
    let width = hops.iter().map(|hop| hop.station.len()).max().unwrap_or(0);
    for hop in hops {
        let (sent, received) =
            (per_position(hop.traffic.sent, hop.traffic), per_position(hop.traffic.received, hop.traffic));
        out += &format!(
            "  {:<width$}  layers {:<7} in {sent:>8.1}  out {received:>8.1}  ({} requests",
            hop.station, hop.layers, hop.traffic.requests
        );
        if hop.traffic.compressed + hop.traffic.refused > 0 {
            let HopTraffic { compressed, refused, saved, .. } = hop.traffic;
            out += &format!(", {compressed} compressed, {saved} bytes saved, {refused} refused");
        }
        out += ")\n";
    }
    out
}

/// The report for programs.
pub(crate) fn json(generated: &Generated, prompt_len: usize, hops: &[Hop], text: &str) -> Value {
    let hops: Vec<Value> = hops
        .iter()
        .map(|hop| {
            json!({
                "station": hop.station,
                "layers": hop.layers,
                "requests": hop.traffic.requests,
                "compressed_requests": hop.traffic.compressed,
                "refused_requests": hop.traffic.refused,
                "saved_bytes": hop.traffic.saved,
                "bytes_in_per_token": per_position(hop.traffic.sent, hop.traffic),
                "bytes_out_per_token": per_position(hop.traffic.received, hop.traffic),
            })
        })
        .collect();
    json!({
        "text": text,
        "tokens": generated.tokens,
        "stopped": generated.stop.to_string(),
        "prompt_tokens": prompt_len,
        "tokens_per_second": generated.tokens_per_second(),
        "time_to_first_token_ms": generated.first_token.as_secs_f64() * 1000.0,
        "hops": hops,
    })
}

/// Who took over from whom, for people.
pub(crate) fn failovers_text(failovers: &[Failover]) -> String {
    let line = |it: &Failover| format!("station {}: {} took over from {} ({})\n", it.number, it.to, it.from, it.reason);
    failovers.iter().map(line).collect()
}

/// Who took over from whom, for programs.
pub(crate) fn failovers_json(failovers: &[Failover]) -> Value {
    let failover = |it: &Failover| json!({ "station": it.number, "from": it.from.to_string(), "to": it.to.to_string(), "reason": it.reason });
    failovers.iter().map(failover).collect()
}
