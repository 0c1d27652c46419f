//! Examines the stations of a mesh before it is used, and says what is wrong with them and what to do about it.
//!
//! [`examine`] asks one station; [`diagnose`] looks at the answers of all and asks nobody. `aeonctl doctor` shows both.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aeon_proto::{payload::MetaWriter, route::Route};
use serde::Serialize;

use super::{
    address::StationAddress,
    connection::{Client, ClientOptions, Reply},
    error::ClientError,
    hello::{Hello, RemoteBasis},
};
use crate::{causes::with_causes, station::limits::MAX_DATAGRAM_LEN};

/// HEALTH requests of which the quickest tells the round-trip time.
const PINGS: usize = 5;
/// A UDP request is padded to this, so that the answer is within three times its size.
const PING_LEN: usize = 1000;
/// The size of datagram that gets through is found to this many bytes.
const DATAGRAM_STEP: usize = 256;
/// Time for one datagram of some size to be answered; it is sent three times in it.
const DATAGRAM_TIMEOUT: Duration = Duration::from_millis(1000);
/// Longest wait for any other answer.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Header, meta and token around the body of a request.
const REQUEST_OVERHEAD: usize = 256;
/// Clocks that differ by more are worth a word.
const MAX_CLOCK_OFFSET_MS: u64 = 1000;

/// What was found out about one station.
#[derive(Debug)]
pub struct Examination {
    /// Where it is.
    pub station: StationAddress,
    /// What it says of itself, or why it does not.
    pub hello: Result<Hello, ClientError>,
    /// Whether it is about to stop.
    pub is_draining: bool,
    /// The shortest time between a HEALTH request and its answer.
    pub round_trip: Option<Duration>,
    /// Milliseconds by which its clock is ahead of this one; known to half the round-trip time.
    pub clock_offset_ms: Option<i64>,
    /// Bytes of the largest datagram that got through to it; UDP only.
    pub datagram_len: Option<usize>,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The mesh works, but not as well as it could.
    Warning,
    /// The mesh does not work.
    Error,
}

/// What is wrong, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at, in one word.
    pub check: &'static str,
    /// The stations concerned.
    pub stations: Vec<String>,
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub advice: String,
}

/// Asks one station what it is and how it is, and tries how large a datagram gets through to it. Ends within a bound,
/// whatever the station does.
pub async fn examine(address: &StationAddress, options: &ClientOptions) -> Examination {
    let options = ClientOptions { request_timeout: options.request_timeout.min(MAX_WAIT), ..options.clone() };
    let (client, hello) = match meet(address, options.clone()).await {
        Ok((client, hello)) => (Some(client), Ok(hello)),
        Err(error) => (None, Err(error)),
    };
    let mut found = Examination {
        station: address.clone(),
        hello,
        is_draining: false,
        round_trip: None,
        clock_offset_ms: None,
        datagram_len: None,
    };
    let (Some(client), Ok(hello)) = (client, &found.hello) else { return found };
    for _ in 0..PINGS {
        let (sent, sent_at) = (Instant::now(), unix_ms());
        let Ok(reply) = client.padded_health(PING_LEN).await else { break };
        let round_trip = sent.elapsed();
        found.is_draining |= reply.boolean("draining").unwrap_or(false);
        if found.round_trip.is_none_or(|best| round_trip < best) {
            found.round_trip = Some(round_trip);
            // The answer was written half way, as far as anyone can tell.
            let half_way = sent_at.saturating_add_unsigned(u64::try_from(round_trip.as_millis() / 2).unwrap_or(0));
            let theirs = reply.number("clock_ms").and_then(|clock| i64::try_from(clock).ok());
            found.clock_offset_ms = theirs.map(|theirs| theirs.saturating_sub(half_way));
        }
    }
    if client.is_udp() {
        let max = hello.limits.max_datagram.min(MAX_DATAGRAM_LEN);
        let options = ClientOptions { request_timeout: DATAGRAM_TIMEOUT, first_retry: DATAGRAM_TIMEOUT / 4, ..options };
        found.datagram_len = largest_datagram(address, options, max).await;
    }
    found
}

async fn meet(address: &StationAddress, options: ClientOptions) -> Result<(Client, Hello), ClientError> {
    let client = Client::connect(address, options).await?;
    let hello = client.hello().await?;
    Ok((client, hello))
}

/// The largest datagram that is answered, up to `max`; `None` if not even small ones are.
async fn largest_datagram(address: &StationAddress, options: ClientOptions, max: usize) -> Option<usize> {
    let client = Client::connect(address, options).await.ok()?;
    let arrives = async |len| client.padded_health(len).await.is_ok();
    if arrives(max).await {
        return Some(max);
    }
    let (mut fits, mut lost) = (PING_LEN.min(max), max);
    if !arrives(fits).await {
        return None;
    }
    while lost.saturating_sub(fits) > DATAGRAM_STEP {
        let middle = fits.midpoint(lost);
        match arrives(middle).await {
            true => fits = middle,
            false => lost = middle,
        }
    }
    Some(fits)
}

impl Client {
    /// HEALTH in a frame of `len` bytes, or of as few as it takes.
    async fn padded_health(&self, len: usize) -> Result<Reply, ClientError> {
        let padding = "0".repeat(len.saturating_sub(self.request_len(r#"{"pad":""}"#.len())));
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("pad", &padding);
        };
        self.request(Route::HEALTH, meta, &[]).await
    }
}

fn unix_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// A station that answered.
struct Answered<'a> {
    station: &'a StationAddress,
    hello: &'a Hello,
    examination: &'a Examination,
}

/// Looks at the stations of a mesh, named in the order of their layers. `version` is this program's.
#[must_use]
pub fn diagnose(examinations: &[Examination], version: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut answered = Vec::new();
    for examination in examinations {
        match &examination.hello {
            Ok(hello) => answered.push(Answered { station: &examination.station, hello, examination }),
            Err(error) => findings.push(silence(&examination.station, error)),
        }
    }
    let is_partial = answered.len() < examinations.len();
    for station in &answered {
        check_station(station, version, &mut findings);
    }
    check_model(&answered, &mut findings);
    check_layers(&answered, is_partial, &mut findings);
    for pair in answered.windows(2) {
        if let [left, right] = pair {
            check_hop(left, right, &mut findings);
        }
    }
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    findings
}

fn finding(
    severity: Severity,
    check: &'static str,
    stations: &[&StationAddress],
    problem: String,
    advice: impl Into<String>,
) -> Finding {
    let stations = stations.iter().map(ToString::to_string).collect();
    Finding { severity, check, stations, problem, advice: advice.into() }
}

/// A station that does not say what it is.
fn silence(station: &StationAddress, error: &ClientError) -> Finding {
    let problem = with_causes(error);
    let kind = match error {
        ClientError::Connect { source, .. } => Some(source.kind()),
        _ => None,
    };
    let advice = match (station, kind) {
        (StationAddress::Unix(_), Some(std::io::ErrorKind::PermissionDenied)) => {
            "join the group of the socket file (ls -l shows it), or have --uds-mode or SocketMode= changed"
        }
        (StationAddress::Unix(_), _) if error.is_unreachable() => {
            "start the station (systemctl status aeon-node says why it does not run), or correct the path"
        }
        (StationAddress::Udp(_), _) if error.is_unreachable() => {
            "check address and port, that it listens beyond loopback, and that its --allow names this machine's network: \
             a station does not answer others over UDP, nor, if it has a key, those without it (--auth-key-file)"
        }
        (StationAddress::Tcp(_), _) if error.is_unreachable() => {
            "check address and port, that it listens beyond loopback, and the firewalls on the way"
        }
        (_, _) if error.status().is_some_and(|status| status.0 == 403) => {
            "if it asks for signed requests, give its key with --auth-key-file; else add this machine's network to --allow of \
             the station, or this user to --uds-allow-uid"
        }
        _ if matches!(error, ClientError::NotAuthentic { .. }) => {
            "give the key that this station was started with (--auth-key-file), or none if it has none"
        }
        _ => "it is no station of this protocol's version 1; update it, or put one in front of it: --model upstream:…",
    };
    let check = if error.is_unreachable() { "reach" } else { "hello" };
    finding(Severity::Error, check, &[station], problem, advice)
}

/// What can be said of one station alone.
fn check_station(it: &Answered<'_>, version: &str, findings: &mut Vec<Finding>) {
    let Answered { station, hello, examination } = *it;
    let mut add = |severity, check, problem: String, advice: String| {
        findings.push(finding(severity, check, &[station], problem, advice));
    };
    if !hello.content_type.contains("v=1") {
        let problem = format!("it speaks {:?}, not version 1 of the protocol", hello.content_type);
        add(Severity::Warning, "protocol", problem, "update it; until then residuals travel to it raw".to_owned());
    }
    if hello.station.version != version {
        let problem = format!("it runs version {}, this program is {version}", hello.station.version);
        add(Severity::Warning, "version", problem, "install the same version everywhere".to_owned());
    }
    if examination.is_draining {
        let advice = "wait for its restart, or start it again if nobody does".to_owned();
        add(Severity::Error, "draining", "it is about to stop and takes no new work".to_owned(), advice);
    }
    let position_len = hello.model.hidden_dim.saturating_mul(4).saturating_add(REQUEST_OVERHEAD);
    if hello.limits.max_frame < position_len {
        let problem = format!("it takes frames of {} bytes, one position needs {position_len}", hello.limits.max_frame);
        add(Severity::Error, "frame", problem, format!("start it with --max-frame {position_len} or more"));
    }
    if let StationAddress::Udp(_) = station {
        let limit = hello.limits.max_datagram.min(MAX_DATAGRAM_LEN);
        let through = examination.datagram_len.unwrap_or(0);
        if through < position_len {
            let problem = format!(
                "datagrams of {through} bytes get through, one position of {} values needs {position_len}",
                hello.model.hidden_dim
            );
            let advice = "use TCP or a Unix socket for this station, or exchange PCA components";
            add(Severity::Error, "datagram", problem, advice.to_owned());
        } else if through < limit {
            let problem =
                format!("it announces datagrams of {limit} bytes, but those over {through} are lost on the way");
            let advice = format!(
                "start it with --max-datagram {through}, so that peers cut their requests to that; or let IP fragments \
                 pass the firewalls on the way"
            );
            add(Severity::Error, "datagram", problem, advice);
        }
    }
    let uncertainty = examination.round_trip.unwrap_or_default().as_millis();
    let allowed = MAX_CLOCK_OFFSET_MS.saturating_add(u64::try_from(uncertainty).unwrap_or(u64::MAX));
    if let Some(offset) = examination.clock_offset_ms.filter(|offset| offset.unsigned_abs() > allowed) {
        let way = if offset > 0 { "ahead of" } else { "behind" };
        let seconds = offset.unsigned_abs() as f64 / 1000.0;
        let problem = format!("its clock is {seconds:.1} s {way} this machine's");
        let advice = "set up time synchronisation on both (timedatectl set-ntp true); until then their logs and traces \
                      cannot be laid side by side";
        add(Severity::Warning, "clock", problem, advice.to_owned());
    }
}

/// One model on all.
fn check_model(stations: &[Answered<'_>], findings: &mut Vec<Finding>) {
    let Some((first, others)) = stations.split_first() else { return };
    for other in others.iter().filter(|other| other.hello.model.config_fp != first.hello.model.config_fp) {
        let (a, b) = (&first.hello.model, &other.hello.model);
        let problem = format!(
            "they serve different models: {} (config {}) and {} (config {})",
            a.name, a.config_fp, b.name, b.config_fp
        );
        let advice =
            "start all with the same model; a converted or quantised copy counts only with the same configuration";
        findings.push(finding(Severity::Error, "model", &[first.station, other.station], problem, advice));
    }
}

/// Every layer once, in the order of the stations.
fn check_layers(stations: &[Answered<'_>], is_partial: bool, findings: &mut Vec<Finding>) {
    let Some(n_layers) = stations.iter().map(|it| it.hello.model.n_layers).max() else { return };
    let mut sorted: Vec<&Answered<'_>> = stations.iter().collect();
    sorted.sort_by_key(|it| (it.hello.layers[0], it.hello.layers[1]));
    let before = findings.len();
    let mut next = 0;
    let mut last: Option<&Answered<'_>> = None;
    for it in &sorted {
        let [lo, hi] = it.hello.layers;
        if lo > next {
            findings.push(missing(next, lo, &[last, Some(*it)], is_partial));
        } else if let Some(last) = last.filter(|_| lo < next) {
            let problem = format!("both hold layers {lo}..{}", next.min(hi));
            let advice = match next < hi {
                true => format!("start {} with --layers {next}..{hi}, or leave one of them out", it.station),
                false => format!("leave {} out: all that it holds is held before it", it.station),
            };
            findings.push(finding(Severity::Error, "layers", &[last.station, it.station], problem, advice));
        }
        if hi >= next {
            (next, last) = (hi, Some(*it));
        }
    }
    if next < n_layers {
        findings.push(missing(next, n_layers, &[last], is_partial));
    }
    let is_ordered = sorted.iter().zip(stations).all(|(a, b)| std::ptr::eq(*a, b));
    if findings.len() == before && !is_ordered {
        let names: Vec<String> = sorted.iter().map(|it| format!("--station {}", it.station)).collect();
        let all: Vec<&StationAddress> = stations.iter().map(|it| it.station).collect();
        let problem = "they are not named in the order of their layers".to_owned();
        findings.push(finding(Severity::Error, "order", &all, problem, format!("write {}", names.join(" "))));
    }
}

fn missing(lo: u32, hi: u32, around: &[Option<&Answered<'_>>], is_partial: bool) -> Finding {
    let stations: Vec<&StationAddress> = around.iter().flatten().map(|it| it.station).collect();
    let advice = match is_partial {
        true => format!("a station that does not answer may hold them; else start one with --layers {lo}..{hi}"),
        false => format!("start a station with --layers {lo}..{hi} and name it too"),
    };
    finding(Severity::Error, "layers", &stations, format!("layers {lo}..{hi} are held by none"), advice)
}

/// What crosses from one station to the next must be understood there.
fn check_hop(left: &Answered<'_>, right: &Answered<'_>, findings: &mut Vec<Finding>) {
    let boundary = left.hello.layers[1];
    if boundary != right.hello.layers[0] {
        return;
    }
    let both = [left.station, right.station];
    let usable = |hello: &Hello| -> Vec<RemoteBasis> {
        hello.bases.iter().filter(|basis| basis.k_at(boundary) > 0).cloned().collect()
    };
    let (ours, theirs) = (usable(left.hello), usable(right.hello));
    let (mut common, before) = (0, findings.len());
    for (a, b) in ours.iter().filter_map(|a| theirs.iter().find(|b| b.basis_fp == a.basis_fp).map(|b| (a, b))) {
        if a.blake3 != b.blake3 {
            let problem = format!("they have different files that go by the fingerprint {}", a.basis_fp);
            let advice = "remove one of the two files, fit it again by another methodology, and reload";
            findings.push(finding(Severity::Error, "basis", &both, problem, advice));
        } else if a.methodology != b.methodology {
            let problem =
                format!("basis {} is by methodology {} here and {} there", a.basis_fp, a.methodology, b.methodology);
            let advice = "copy the folder of methodologies from one to the other, and reload both";
            findings.push(finding(Severity::Error, "methodology", &both, problem, advice));
        } else {
            common += 1;
        }
    }
    if common > 0 || (ours.is_empty() && theirs.is_empty()) || findings.len() > before {
        return;
    }
    let list = |bases: &[RemoteBasis]| -> String {
        let names = bases.iter().map(|basis| format!("{} (methodology {})", basis.basis_fp, basis.methodology));
        let names: Vec<String> = names.collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    let problem = format!(
        "they share no basis for boundary {boundary}: {} has {}, {} has {}; residuals travel raw between them",
        left.station,
        list(&ours),
        right.station,
        list(&theirs)
    );
    let advice = "copy the basis file and its methodology from one to the folders of the other, and reload it \
                  (systemctl reload aeon-node, or SIGHUP)";
    findings.push(finding(Severity::Warning, "basis", &both, problem, advice));
}
