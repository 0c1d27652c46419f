//! From metrics to figures: what a station did between two looks at it.

use std::{collections::BTreeMap, time::Instant};

use serde_json::Value;

/// A value with the labels of its metric.
#[derive(Debug, Clone, PartialEq)]
struct Sample {
    labels: Vec<(String, String)>,
    value: f64,
}

/// The metrics of a station at one moment, by name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Metrics {
    samples: BTreeMap<String, Vec<Sample>>,
    at: Instant,
}

/// Buckets of a histogram: upper bound in seconds, observations up to it.
type Buckets = Vec<(f64, f64)>;

impl Metrics {
    /// Reads the Prometheus text format. A line that is none of it is passed over: what the rest says is still true.
    pub(crate) fn read(text: &str, at: Instant) -> Self {
        let mut samples: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, sample)) = read_line(line) {
                samples.entry(name.to_owned()).or_default().push(sample);
            }
        }
        Self { samples, at }
    }

    /// As far as HEALTH says the same as the metrics.
    pub(crate) fn from_health(health: &Value, hello: Option<&Value>, at: Instant) -> Self {
        let mut samples: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
        let mut put = |name: &str, labels: &[(&str, &str)], value: &Value| {
            let value = value.as_f64().or_else(|| value.as_bool().map(f64::from));
            if let Some(value) = value {
                let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
                samples.entry(name.to_owned()).or_default().push(Sample { labels, value });
            }
        };
        put("aeon_requests_total", &[], &health["requests"]);
        put("aeon_faults_total", &[("fault", "all")], &health["errors"]);
        put("aeon_sessions", &[], &health["sessions"]);
        put("aeon_session_bytes", &[], &health["session_bytes"]);
        put("aeon_queued_requests", &[], &health["queued"]);
        put("aeon_draining", &[], &health["draining"]);
        put("aeon_replay_hits_total", &[], &health["replay"]["hits"]);
        put("aeon_replay_misses_total", &[], &health["replay"]["misses"]);
        put("aeon_replay_bytes", &[], &health["replay"]["bytes"]);
        put("uptime_seconds", &[], &health["uptime_ms"].as_f64().map_or(Value::Null, |ms| (ms / 1000.0).into()));
        if let Value::Object(dropped) = &health["dropped"] {
            for (reason, count) in dropped {
                put("aeon_dropped_frames_total", &[("reason", reason)], count);
            }
        }
        if let Some(hello) = hello {
            let layers = format!("{}..{}", hello["layers"][0], hello["layers"][1]);
            let model = hello["model"]["name"].as_str().unwrap_or_default();
            put("aeon_model_info", &[("model", model), ("layers", &layers)], &1.into());
        }
        Self { samples, at }
    }

    fn rows<'a>(&'a self, name: &str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Sample> {
        let matches = move |sample: &&Sample| labels.iter().all(|(key, value)| sample.label(key) == Some(value));
        self.samples.get(name).into_iter().flatten().filter(matches)
    }

    /// The sum over all rows that have these labels; 0 if there are none.
    fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.rows(name, labels).map(|sample| sample.value).sum()
    }

    fn has(&self, name: &str) -> bool {
        self.samples.contains_key(name)
    }

    fn label(&self, name: &str, key: &str) -> Option<&str> {
        self.samples.get(name)?.first()?.label(key)
    }

    fn buckets(&self, name: &str, labels: &[(&str, &str)]) -> Buckets {
        let mut buckets: Buckets = Vec::new();
        for sample in self.rows(&format!("{name}_bucket"), labels) {
            let Some(bound) = sample.label("le").and_then(|le| le.parse::<f64>().ok()) else { continue };
            match buckets.iter_mut().find(|(known, _)| *known == bound) {
                Some((_, count)) => *count += sample.value,
                None => buckets.push((bound, sample.value)),
            }
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        buckets
    }
}

impl Sample {
    fn label(&self, key: &str) -> Option<&str> {
        self.labels.iter().find(|(known, _)| known == key).map(|(_, value)| &**value)
    }
}

/// `name{key="value",…} number`, with `\\`, `\"` and `\n` in values.
fn read_line(line: &str) -> Option<(&str, Sample)> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at_checked(end)?;
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (key, after) = rest.split_once("=\"")?;
            let mut value = String::new();
            let mut characters = after.char_indices();
            let close = loop {
                match characters.next()? {
                    (at, '"') => break at,
                    (_, '\\') => match characters.next()?.1 {
                        'n' => value.push('\n'),
                        other => value.push(other),
                    },
                    (_, other) => value.push(other),
                }
            };
            labels.push((key.trim_start_matches(',').trim().to_owned(), value));
            rest = after.get(close + 1..)?;
        }
        rest = rest.strip_prefix('}')?;
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name, Sample { labels, value }))
}

/// Quantiles of one kind of duration, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Quantiles {
    pub(crate) p50: Option<f64>,
    pub(crate) p99: Option<f64>,
}

/// The duration that a share of all observations stayed under, by the straight line inside its bucket. `None` without
/// observations; an observation over the last bound counts as that bound.
fn quantile(buckets: &Buckets, share: f64) -> Option<f64> {
    let total = buckets.last().map(|(_, count)| *count).filter(|total| *total > 0.0)?;
    let wanted = share * total;
    let (mut low, mut below) = (0.0, 0.0);
    for (bound, count) in buckets {
        if *count >= wanted && *count > below {
            if bound.is_infinite() {
                return Some(low);
            }
            return Some(low + (bound - low) * (wanted - below) / (count - below));
        }
        (low, below) = (*bound, *count);
    }
    Some(low)
}

/// What a row says of a station. Rates and shares are those since the look before, or since its start at the first look.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Figures {
    pub(crate) model: String,
    pub(crate) layers: String,
    pub(crate) is_draining: bool,
    pub(crate) reload_failed: bool,
    pub(crate) requests_per_second: f64,
    pub(crate) tokens_per_second: Option<f64>,
    pub(crate) errors_per_second: f64,
    /// Of requests to the model.
    pub(crate) latency: Quantiles,
    /// By stage.
    pub(crate) stages: Vec<(&'static str, Quantiles)>,
    pub(crate) bytes_in_per_token: Option<f64>,
    pub(crate) bytes_out_per_token: Option<f64>,
    /// Bytes of all bodies as f32, by those that were sent.
    pub(crate) compression: Option<f64>,
    pub(crate) sessions: u64,
    pub(crate) session_bytes: u64,
    /// Of 1.
    pub(crate) replay_hit_rate: Option<f64>,
    pub(crate) replay_bytes: u64,
    pub(crate) queued: u64,
    pub(crate) oldest_seconds: Option<f64>,
    /// Faults and dropped frames in the time looked at, the most frequent first.
    pub(crate) faults: Vec<(String, u64)>,
    /// Bytes of bodies a second by direction, carrier and kind, those that are not 0.
    pub(crate) bodies: Vec<(String, f64)>,
}

/// Routes whose latency is that of the model.
const MODEL_ROUTES: [&str; 5] = ["EMBED", "FORWARD", "FORWARD_PCA", "LM_HEAD", "LM_HEAD_PCA"];
const STAGES: [&str; 4] = ["queue", "lift", "compute", "write"];

impl Figures {
    /// The figures of `now`, against those of `before` (`None`: since the station started). A station that was started
    /// again meanwhile counts from its start.
    pub(crate) fn new(before: Option<&Metrics>, now: &Metrics) -> Self {
        let requests = |metrics: &Metrics| metrics.sum("aeon_requests_total", &[]);
        let before = before.filter(|before| requests(before) <= requests(now));
        let seconds = before.map_or_else(|| uptime(now), |before| now.at.duration_since(before.at).as_secs_f64());
        let grown = |name: &str, labels: &[(&str, &str)]| {
            let start = before.map_or(0.0, |before| before.sum(name, labels));
            (now.sum(name, labels) - start).max(0.0)
        };
        let rate = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let positions = grown("aeon_positions_total", &[]);
        let per_token = |bytes: f64| (positions > 0.0).then(|| bytes / positions);
        let body = |way: &str| grown("aeon_body_bytes_total", &[("direction", way)]);
        let (sent, saved) = (body("in") + body("out"), grown("aeon_compression_saved_bytes_total", &[]));
        let (hits, misses) = (grown("aeon_replay_hits_total", &[]), grown("aeon_replay_misses_total", &[]));
        let buckets = |name: &str, labels: &[(&str, &str)]| {
            let mut buckets = now.buckets(name, labels);
            for (bound, count) in before.map(|before| before.buckets(name, labels)).unwrap_or_default() {
                if let Some((_, held)) = buckets.iter_mut().find(|(known, _)| *known == bound) {
                    *held -= count;
                }
            }
            buckets
        };
        let quantiles = |buckets: &Buckets| Quantiles { p50: quantile(buckets, 0.5), p99: quantile(buckets, 0.99) };
        let mut latency: Buckets = Vec::new();
        for route in MODEL_ROUTES {
            for (bound, count) in buckets("aeon_request_duration_seconds", &[("route", route)]) {
                match latency.iter_mut().find(|(known, _)| *known == bound) {
                    Some((_, held)) => *held += count,
                    None => latency.push((bound, count)),
                }
            }
        }
        let stages =
            STAGES.map(|stage| (stage, quantiles(&buckets("aeon_stage_duration_seconds", &[("stage", stage)]))));
        let mut faults = Vec::new();
        for (name, key) in [("aeon_faults_total", "fault"), ("aeon_dropped_frames_total", "reason")] {
            for value in now.rows(name, &[]).filter_map(|sample| sample.label(key)) {
                let count = grown(name, &[(key, value)]);
                if count > 0.0 {
                    let shown = if key == "reason" { format!("dropped {value}") } else { value.to_owned() };
                    faults.push((shown, count as u64));
                }
            }
        }
        faults.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let bodies = now.rows("aeon_body_bytes_total", &[]).filter_map(|sample| {
            let [way, carrier, kind] = ["direction", "carrier", "kind"].map(|key| sample.label(key));
            let (way, carrier, kind) = (way?, carrier?, kind?);
            let labels = [("direction", way), ("carrier", carrier), ("kind", kind)];
            let bytes = rate(grown("aeon_body_bytes_total", &labels));
            (bytes > 0.0).then(|| (format!("{way} {carrier} {kind}"), bytes))
        });
        let whole = |name: &str| now.sum(name, &[]) as u64;
        let label = |key| now.label("aeon_model_info", key).unwrap_or("?").to_owned();
        Self {
            model: label("model"),
            layers: label("layers"),
            is_draining: whole("aeon_draining") > 0,
            reload_failed: whole("aeon_last_reload_failed") > 0,
            requests_per_second: rate(grown("aeon_requests_total", &[])),
            tokens_per_second: now.has("aeon_positions_total").then(|| rate(positions)),
            errors_per_second: rate(grown("aeon_faults_total", &[])),
            latency: quantiles(&latency),
            stages: stages.into_iter().collect(),
            bytes_in_per_token: per_token(body("in")),
            bytes_out_per_token: per_token(body("out")),
            compression: (sent > 0.0).then(|| (sent + saved) / sent),
            sessions: whole("aeon_sessions"),
            session_bytes: whole("aeon_session_bytes"),
            replay_hit_rate: (hits + misses > 0.0).then(|| hits / (hits + misses)),
            replay_bytes: whole("aeon_replay_bytes"),
            queued: whole("aeon_queued_requests"),
            oldest_seconds: now
                .has("aeon_oldest_in_flight_seconds")
                .then(|| now.sum("aeon_oldest_in_flight_seconds", &[])),
            faults,
            bodies: bodies.collect(),
        }
    }

    /// For programs.
    pub(crate) fn to_json(&self) -> Value {
        let quantiles = |held: &Quantiles| serde_json::json!({ "p50_seconds": held.p50, "p99_seconds": held.p99 });
        let stages = self.stages.iter().map(|(stage, held)| ((*stage).to_owned(), quantiles(held)));
        let pairs = |list: &[(String, u64)]| -> serde_json::Map<String, Value> {
            list.iter().map(|(name, count)| (name.clone(), (*count).into())).collect()
        };
        let bodies: serde_json::Map<String, Value> =
            self.bodies.iter().map(|(name, rate)| (name.clone(), (*rate).into())).collect();
        serde_json::json!({
            "model": self.model,
            "layers": self.layers,
            "draining": self.is_draining,
            "last_reload_failed": self.reload_failed,
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
            "errors_per_second": self.errors_per_second,
            "latency": quantiles(&self.latency),
            "stages": stages.collect::<serde_json::Map<String, Value>>(),
            "bytes_in_per_token": self.bytes_in_per_token,
            "bytes_out_per_token": self.bytes_out_per_token,
            "compression": self.compression,
            "sessions": self.sessions,
            "session_bytes": self.session_bytes,
            "replay_hit_rate": self.replay_hit_rate,
            "replay_bytes": self.replay_bytes,
            "queued": self.queued,
            "oldest_in_flight_seconds": self.oldest_seconds,
            "faults": pairs(&self.faults),
            "body_bytes_per_second": bodies,
        })
    }
}

fn uptime(metrics: &Metrics) -> f64 {
    if metrics.has("uptime_seconds") {
        return metrics.sum("uptime_seconds", &[]);
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // The clock of the station may be another one: a time before its start is no time.
    (now.as_secs_f64() - metrics.sum("aeon_start_time_seconds", &[])).max(0.0)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;

    /// Metrics of a station that has answered `requests` FORWARDs.
    pub(crate) fn metrics(requests: u64, at: Instant) -> Metrics {
        let text = format!(
            "# HELP aeon_requests_total Requests.\n\
             aeon_requests_total{{route=\"FORWARD\",status=\"200\"}} {requests}\n\
             aeon_requests_total{{route=\"HELLO\",status=\"200\"}} 0\n\
             aeon_positions_total {requests}\n\
             aeon_faults_total{{fault=\"position\"}} {}\n\
             aeon_faults_total{{fault=\"model\"}} 0\n\
             aeon_dropped_frames_total{{reason=\"stale\"}} {requests}\n\
             aeon_request_duration_seconds_bucket{{route=\"FORWARD\",le=\"0.001\"}} {}\n\
             aeon_request_duration_seconds_bucket{{route=\"FORWARD\",le=\"0.01\"}} {requests}\n\
             aeon_request_duration_seconds_bucket{{route=\"FORWARD\",le=\"+Inf\"}} {requests}\n\
             aeon_stage_duration_seconds_bucket{{stage=\"compute\",le=\"0.001\"}} {requests}\n\
             aeon_stage_duration_seconds_bucket{{stage=\"compute\",le=\"+Inf\"}} {requests}\n\
             aeon_body_bytes_total{{direction=\"in\",carrier=\"unix\",kind=\"u32\"}} {}\n\
             aeon_body_bytes_total{{direction=\"out\",carrier=\"unix\",kind=\"pcar\"}} {}\n\
             aeon_compression_saved_bytes_total{{direction=\"out\"}} {}\n\
             aeon_replay_hits_total 3\naeon_replay_misses_total 1\naeon_replay_bytes 1048576\n\
             aeon_sessions 2\naeon_session_bytes 3145728\naeon_queued_requests 1\n\
             aeon_oldest_in_flight_seconds 0.25\naeon_draining 0\naeon_last_reload_failed 1\n\
             aeon_start_time_seconds 0\n\
             aeon_model_info{{station=\"n\",model=\"de\\\"mo\",layers=\"0..3\"}} 1\n# EOF\n",
            requests / 10,
            requests / 2,
            requests * 4,
            requests * 100,
            requests * 96,
        );
        Metrics::read(&text, at)
    }

    #[test]
    fn figures_are_those_between_two_looks() {
        let start = Instant::now();
        let (before, now) = (metrics(100, start), metrics(300, start + Duration::from_secs(2)));
        let figures = Figures::new(Some(&before), &now);
        assert_eq!((figures.requests_per_second, figures.tokens_per_second), (100.0, Some(100.0)));
        assert_eq!(figures.errors_per_second, 10.0);
        assert_eq!((figures.bytes_in_per_token, figures.bytes_out_per_token), (Some(4.0), Some(100.0)));
        assert_eq!(figures.compression, Some(200.0 / 104.0));
        assert_eq!(figures.faults, [("dropped stale".to_owned(), 200), ("position".to_owned(), 20)]);
        assert_eq!((figures.model.as_str(), figures.layers.as_str()), ("de\"mo", "0..3"));
        assert_eq!((figures.sessions, figures.queued, figures.oldest_seconds), (2, 1, Some(0.25)));
        // Half of the requests are under 1 ms, the other half under 10 ms.
        assert_eq!(figures.latency.p50, Some(0.001));
        assert!((figures.latency.p99.unwrap() - 0.00982).abs() < 1e-6);
        assert_eq!(figures.replay_hit_rate, None, "none of the hits is new");
        assert!(figures.reload_failed && !figures.is_draining);
        assert_eq!(figures.bodies, [("in unix u32".to_owned(), 400.0), ("out unix pcar".to_owned(), 10_000.0)]);
    }

    #[test]
    fn the_first_look_and_a_restart_count_from_the_start() {
        let start = Instant::now();
        let first = Figures::new(None, &metrics(100, start));
        assert_eq!(first.replay_hit_rate, Some(0.75));
        assert!(first.requests_per_second > 0.0 && first.latency.p50.is_some());
        let restarted = Figures::new(Some(&metrics(500, start)), &metrics(100, start + Duration::from_secs(1)));
        assert_eq!(restarted.replay_hit_rate, Some(0.75));
    }

    #[test]
    fn lines_that_are_none_are_passed_over() {
        let text = "a 1\n\nb\nc{\nd{x=\"\nd{x=\"y\"\ne{x=\"y\"}\nf{x=\"a,b}\\n\",z=\"\"} 2 1700000000\ng x\n\u{7f} {";
        let metrics = Metrics::read(text, Instant::now());
        assert_eq!(metrics.samples.keys().collect::<Vec<_>>(), ["a", "f"]);
        assert_eq!(metrics.sum("f", &[("x", "a,b}\n"), ("z", "")]), 2.0);
        assert_eq!(Figures::new(None, &metrics).requests_per_second, 0.0);
    }

    #[test]
    fn quantiles_of_nothing_and_of_the_last_bucket() {
        assert_eq!(quantile(&Vec::new(), 0.5), None);
        assert_eq!(quantile(&vec![(1.0, 0.0), (f64::INFINITY, 0.0)], 0.5), None);
        assert_eq!(quantile(&vec![(1.0, 0.0), (f64::INFINITY, 4.0)], 0.5), Some(1.0));
        assert_eq!(quantile(&vec![(1.0, 4.0), (2.0, 4.0), (f64::INFINITY, 4.0)], 1.0), Some(1.0));
    }

    #[test]
    fn health_gives_what_it_has() {
        let health = serde_json::json!({
            "requests": 50, "errors": 5, "sessions": 1, "session_bytes": 9, "queued": 0, "draining": true,
            "uptime_ms": 5000, "replay": {"hits": 1, "misses": 3, "bytes": 7}, "dropped": {"stale": 2, "empty": 0},
        });
        let hello = serde_json::json!({"layers": [3, 6], "model": {"name": "demo"}});
        let figures = Figures::new(None, &Metrics::from_health(&health, Some(&hello), Instant::now()));
        assert_eq!((figures.requests_per_second, figures.errors_per_second), (10.0, 1.0));
        assert_eq!((figures.tokens_per_second, figures.latency), (None, Quantiles::default()));
        assert_eq!((figures.layers.as_str(), figures.is_draining), ("3..6", true));
        assert_eq!(figures.replay_hit_rate, Some(0.25));
        assert_eq!(figures.faults, [("all".to_owned(), 5), ("dropped stale".to_owned(), 2)]);
    }
}
