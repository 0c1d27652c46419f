//! The metrics of a station, written out for Prometheus.
//!
//! Nothing here runs while requests do: a scrape reads the counters of [`crate::telemetry`] and the sizes of tables. No
//! label value comes from a peer: they are those of closed sets, or of what the operator loaded.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::{self, DescriptorEncoder, EncodeGaugeValue, MetricEncoder, NoLabelSet},
    metrics::MetricType,
    registry::{Registry, Unit},
};

use super::{Core, Station};
use crate::telemetry::{
    Histogram,
    faults::Fault,
    traffic::{BodyKind, Carrier, Direction, RouteLabel, StatusLabel},
};

/// The text form of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposition {
    /// The Prometheus text format, version 0.0.4.
    Prometheus,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Exposition {
    /// What a client gets that says what it accepts: OpenMetrics if it names that, else the older format.
    #[must_use]
    pub fn accepted(accept: &str) -> Self {
        match accept.contains("application/openmetrics-text") {
            true => Self::OpenMetrics,
            false => Self::Prometheus,
        }
    }

    /// The content type.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => encoding::prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl Station {
    /// All metrics of this station.
    ///
    /// # Errors
    /// If a value cannot be written, which memory does not do.
    pub fn metrics(&self, exposition: Exposition) -> Result<String, fmt::Error> {
        let (queued, queued_bytes) = self.workers.as_ref().map_or((0, 0), |workers| workers.usage());
        let mut registry = Registry::with_prefix("aeon");
        registry.register_collector(Box::new(Collected { core: Arc::clone(&self.core), queued, queued_bytes }));
        let mut out = String::new();
        match exposition {
            Exposition::Prometheus => encoding::prometheus_text::encode(&mut out, &registry)?,
            Exposition::OpenMetrics => encoding::text::encode(&mut out, &registry)?,
        }
        Ok(out)
    }
}

#[derive(Debug)]
struct Collected {
    core: Arc<Core>,
    queued: usize,
    queued_bytes: usize,
}

type Labels<'a, const N: usize> = [(&'static str, &'a str); N];

/// One metric after the other.
struct Writer<'a, 'e>(&'a mut DescriptorEncoder<'e>);

impl Writer<'_, '_> {
    fn counter(&mut self, name: &str, help: &str, unit: Option<Unit>, value: u64) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        encode_counter(&mut metric, value)
    }

    fn counters<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        rows: impl Iterator<Item = (Labels<'a, N>, u64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        for (labels, value) in rows {
            encode_counter(&mut metric.encode_family(&labels)?, value)?;
        }
        Ok(())
    }

    fn gauge(&mut self, name: &str, help: &str, unit: Option<Unit>, value: impl EncodeGaugeValue) -> fmt::Result {
        self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?.encode_gauge(&value)
    }

    /// Histograms of durations in seconds, which the name says itself: not every reader of OpenMetrics takes a unit here.
    fn histograms<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl Iterator<Item = (Labels<'a, N>, &'a Histogram)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, histogram) in rows {
            let held = histogram.snapshot();
            let mut metric = metric.encode_family(&labels)?;
            metric.encode_histogram::<NoLabelSet>(held.sum, held.count, &held.buckets, None)?;
        }
        Ok(())
    }

    fn infos<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl Iterator<Item = [(&'static str, String); N]>,
    ) -> fmt::Result {
        let mut rows = rows.peekable();
        // Without rows there is no metric: not every reader takes a description of nothing.
        if rows.peek().is_none() {
            return Ok(());
        }
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Info)?;
        for labels in rows {
            metric.encode_info(&labels)?;
        }
        Ok(())
    }
}

fn encode_counter(metric: &mut MetricEncoder<'_>, value: u64) -> fmt::Result {
    metric.encode_counter::<NoLabelSet, u64, u64>(&value, None)
}

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Writer(&mut encoder);
        self.traffic(&mut out)?;
        self.work(&mut out)?;
        self.memory(&mut out)?;
        self.faults(&mut out)?;
        self.identity(&mut out)
    }
}

impl Collected {
    fn traffic(&self, out: &mut Writer<'_, '_>) -> fmt::Result {
        let counters = &self.core.counters;
        let traffic = &counters.traffic;
        let routes = || RouteLabel::all();
        // A route that was never asked for has one row; what never happened has none.
        let requests = routes().flat_map(|route| {
            StatusLabel::ALL.iter().filter_map(move |status| {
                let count = traffic.requests(route, *status).value();
                let labels = [("route", route.name()), ("status", status.name())];
                (count > 0 || *status == StatusLabel::Ok).then_some((labels, count))
            })
        });
        out.counters("requests", "Requests by route and status.", None, requests)?;
        let durations = routes().map(|route| (route, traffic.durations(route)));
        out.histograms(
            "request_duration_seconds",
            "Time from the arrival of a request until its reply is ready.",
            durations
                .filter(|(route, held)| route.name() == "FORWARD" || !held.is_empty())
                .map(|(route, held)| ([("route", route.name())], held)),
        )?;
        let pairs = || Direction::ALL.iter().flat_map(|direction| Carrier::ALL.iter().map(move |c| (*direction, *c)));
        out.counters(
            "frame",
            "Bytes of frames, headers included.",
            Some(Unit::Bytes),
            pairs().map(|(direction, carrier)| {
                let labels = [("direction", direction.name()), ("carrier", carrier.name())];
                (labels, traffic.frame_bytes(direction, carrier).value())
            }),
        )?;
        let bodies = pairs().flat_map(|(direction, carrier)| {
            BodyKind::ALL.iter().map(move |kind| {
                let labels = [("direction", direction.name()), ("carrier", carrier.name()), ("kind", kind.name())];
                (labels, traffic.body_bytes(direction, carrier, *kind).value())
            })
        });
        out.counters("body", "Bytes of bodies by what they hold.", Some(Unit::Bytes), bodies)?;
        out.counters(
            "compression_saved",
            "Bytes that bodies of PCA components or fewer bits would have had more as f32.",
            Some(Unit::Bytes),
            Direction::ALL.iter().map(|way| ([("direction", way.name())], traffic.saved_bytes(*way).value())),
        )?;
        out.counter("positions", "Positions that went through the layers.", None, traffic.positions.value())?;
        let dropped = &counters.dropped;
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
        out.counters(
            "dropped_frames",
            "Frames and datagrams that were dropped without an answer.",
            None,
            dropped.iter().map(|(reason, count)| ([("reason", *reason)], count.value())),
        )?;
        out.counter("send_errors", "Replies that did not reach their UDP peer.", None, counters.send_errors.value())?;
        let accepted = counters.connections_accepted.value();
        out.counter("connections", "Connections accepted, refused ones among them.", None, accepted)?;
        let refused = counters.connections_refused.value();
        out.counter("connections_refused", "Connections refused: over the limit, or not allowed.", None, refused)?;
        out.gauge("open_connections", "Connections open now.", None, counters.connections.value() as u64)?;
        let buffered = counters.buffered_bytes.value() as u64;
        out.gauge(
            "buffered_bytes",
            "Half frames, waiting requests and unread replies of all connections.",
            None,
            buffered,
        )
    }

    fn work(&self, out: &mut Writer<'_, '_>) -> fmt::Result {
        let counters = &self.core.counters;
        let stages = &counters.stages;
        let rows =
            [("queue", &stages.queue), ("lift", &stages.lift), ("compute", &stages.compute), ("write", &stages.write)];
        out.histograms(
            "stage_duration_seconds",
            "Time of requests by stage: waiting, components to residuals, the model, writing to the socket.",
            rows.iter().map(|(stage, histogram)| ([("stage", *stage)], *histogram)),
        )?;
        out.gauge("in_flight", "Requests that wait for the model or run on it.", None, counters.in_flight.count())?;
        let oldest = counters.in_flight.oldest(Instant::now()).unwrap_or_default();
        out.gauge(
            "oldest_in_flight",
            "Age of the oldest request in flight, 0 if there is none.",
            Some(Unit::Seconds),
            oldest.as_secs_f64(),
        )?;
        out.gauge("queued_requests", "Requests in the model's queue, running ones included.", None, self.queued)?;
        out.gauge("queued", "Bytes of the requests in the model's queue.", Some(Unit::Bytes), self.queued_bytes)
    }

    fn memory(&self, out: &mut Writer<'_, '_>) -> fmt::Result {
        let core = &self.core;
        let bytes = || Some(Unit::Bytes);
        let (sessions, session_bytes) = core.sessions.usage();
        out.gauge("sessions", "Sessions held.", None, sessions)?;
        out.gauge("sessions_limit", "Sessions that may be held.", None, core.limits.sessions.count)?;
        out.gauge("session", "Bytes of keys and values of all sessions.", bytes(), session_bytes)?;
        let limit = core.limits.sessions.bytes;
        out.gauge("session_limit", "Bytes that all sessions may take.", bytes(), limit)?;
        let (entries, held) = core.replay.usage();
        let replay = &core.replay.counters;
        out.counter("replay_hits", "Lookups in the replay cache that found an entry.", None, replay.hits.value())?;
        out.counter("replay_misses", "Lookups that found none.", None, replay.misses.value())?;
        out.counter("replay_captures", "Entries put into the replay cache.", None, replay.captures.value())?;
        out.counter("replay_refused", "Captures that were refused.", None, replay.refused.value())?;
        out.counter("replay_evictions", "Entries dropped for others.", None, replay.evictions.value())?;
        out.gauge("replay_entries", "Entries of the replay cache.", None, entries)?;
        out.gauge("replay", "Bytes of the replay cache.", bytes(), held)?;
        out.gauge("replay_limit", "Bytes that the replay cache may take.", bytes(), core.replay.budget())?;
        let (entries, held) = core.shards.usage();
        out.gauge("shard_entries", "Entries of all shards.", None, entries)?;
        out.gauge("shard", "Bytes of all shards.", bytes(), held)
    }

    fn faults(&self, out: &mut Writer<'_, '_>) -> fmt::Result {
        let counters = &self.core.counters;
        let faults = &counters.faults;
        out.counters(
            "faults",
            "Faults by kind, whether or not they were logged.",
            None,
            Fault::ALL.iter().map(|fault| ([("fault", fault.name())], faults.of(*fault).value())),
        )?;
        let fallbacks = [Fault::UnknownBasis, Fault::Methodology, Fault::BasisBoundary];
        out.counters(
            "raw_fallbacks",
            "Requests answered with 412, after which their client sends raw residuals.",
            None,
            fallbacks.iter().map(|fault| ([("reason", fault.name())], faults.of(*fault).value())),
        )?;
        let reloads = &counters.reloads;
        let rows = [("done", &reloads.done), ("failed", &reloads.failed)];
        out.counters(
            "reloads",
            "Reloads of bases and methodologies.",
            None,
            rows.iter().map(|(result, count)| ([("result", *result)], count.value())),
        )?;
        out.gauge(
            "last_reload_failed",
            "1 if the last reload left the old bases in use.",
            None,
            u32::from(reloads.last_failed()),
        )
    }

    fn identity(&self, out: &mut Writer<'_, '_>) -> fmt::Result {
        let core = &self.core;
        let draining = u32::from(core.draining.load(Ordering::Relaxed));
        out.gauge("draining", "1 once new work is refused.", None, draining)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let started = now.saturating_sub(core.started.elapsed()).as_secs_f64();
        out.gauge("start_time", "When the station started, since 1970.", Some(Unit::Seconds), started)?;
        let build = [[("version", env!("CARGO_PKG_VERSION").to_owned())]];
        out.infos("build", "The program.", build.into_iter())?;
        let info = core.model.info();
        let model = [[
            ("station", core.name.clone()),
            ("model", info.name.clone()),
            ("layers", format!("{}..{}", info.layers.start, info.layers.end)),
            ("n_layers", info.n_layers.to_string()),
            ("hidden_dim", info.hidden_dim.to_string()),
            ("config_fp", info.config_fp.clone()),
            ("layers_fp", info.layers_fp.clone()),
        ]];
        out.infos("model", "The model and the layers of it that are here.", model.into_iter())?;
        let set = core.bases.current();
        let bases = set.bases().map(|file| {
            let boundaries: Vec<String> = file.boundaries().map(|part| part.boundary.to_string()).collect();
            [
                ("basis_fp", format!("0x{:08x}", file.basis_fp())),
                ("methodology", format!("0x{:08x}", file.methodology())),
                ("blake3", file.blake3().to_hex().to_string()),
                ("boundaries", boundaries.join(",")),
            ]
        });
        out.infos("basis", "Bases in use.", bases)?;
        let methodologies = set.methodologies().iter().map(|methodology| {
            [("methodology", format!("0x{:08x}", methodology.spec.id())), ("name", methodology.name.clone())]
        });
        out.infos("methodology", "Methodologies in use.", methodologies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_what_the_client_accepts() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3";
        assert_eq!(Exposition::accepted(prometheus), Exposition::OpenMetrics);
        assert_eq!(Exposition::accepted("*/*"), Exposition::Prometheus);
        assert_eq!(Exposition::accepted(""), Exposition::Prometheus);
    }
}
