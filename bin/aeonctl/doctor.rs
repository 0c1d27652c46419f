//! `aeonctl doctor`: examines a mesh before it is used.

use aeon_station::client::doctor::{Examination, Finding, Severity, diagnose, examine};
use serde_json::{Value, json};

use crate::Context;

/// A mesh with which something is wrong; what, was printed.
#[derive(Debug)]
pub(crate) struct Unhealthy {
    errors: usize,
    /// Whether a station did not answer at all.
    pub(crate) is_unreachable: bool,
}

impl std::fmt::Display for Unhealthy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let errors = if self.errors == 1 { "error" } else { "errors" };
        write!(f, "this mesh does not work: {} {errors} found", self.errors)
    }
}

impl std::error::Error for Unhealthy {}

pub(crate) async fn doctor(context: &Context) -> anyhow::Result<()> {
    let stations = context.stations()?;
    // All at once: a mesh of which one does not answer is not a reason to wait for each.
    let examinations = stations.iter().map(|station| examine(station, &context.options));
    let examinations: Vec<Examination> = futures_util::future::join_all(examinations).await;
    let findings = diagnose(&examinations, env!("CARGO_PKG_VERSION"));
    let errors = findings.iter().filter(|finding| finding.severity == Severity::Error).count();
    if context.json {
        let stations: Vec<Value> = examinations.iter().map(as_json).collect();
        println!("{}", json!({ "ok": errors == 0, "stations": stations, "findings": findings }));
    } else {
        examinations.iter().for_each(print);
        findings.iter().for_each(print_finding);
        if findings.is_empty() {
            println!("nothing is wrong with this mesh");
        }
    }
    let is_unreachable = |it: &Examination| it.hello.as_ref().is_err_and(|error| error.is_unreachable());
    match errors {
        0 => Ok(()),
        errors => Err(Unhealthy { errors, is_unreachable: examinations.iter().any(is_unreachable) }.into()),
    }
}

fn as_json(it: &Examination) -> Value {
    let mut value = json!({
        "address": it.station.to_string(),
        "answers": it.hello.is_ok(),
        "draining": it.is_draining,
        "round_trip_ms": it.round_trip.map(|time| time.as_secs_f64() * 1000.0),
        "clock_offset_ms": it.clock_offset_ms,
        "datagram": it.datagram_len,
    });
    if let Ok(hello) = &it.hello {
        value["name"] = hello.station.name.as_str().into();
        value["version"] = hello.station.version.as_str().into();
        value["model"] = hello.model.name.as_str().into();
        value["config_fp"] = hello.model.config_fp.as_str().into();
        value["layers"] = json!(hello.layers);
        value["bases"] = hello.bases.iter().map(|basis| basis.basis_fp.as_str()).collect();
    }
    value
}

fn print(it: &Examination) {
    println!("{}", it.station);
    let Ok(hello) = &it.hello else { return println!("  does not answer") };
    let [lo, hi] = hello.layers;
    println!(
        "  {}, layers {lo}..{hi} of {}, version {}",
        hello.model.name, hello.model.n_layers, hello.station.version
    );
    let mut line = Vec::new();
    if let Some(time) = it.round_trip {
        line.push(format!("round trip {:.2} ms", time.as_secs_f64() * 1000.0));
    }
    line.push(match it.clock_offset_ms {
        Some(offset) => format!("clock {:+.3} s", offset as f64 / 1000.0),
        None => "clock not told".to_owned(),
    });
    if let Some(len) = it.datagram_len {
        line.push(format!("datagrams up to {len} bytes"));
    }
    line.push(format!("{} bases", hello.bases.len()));
    println!("  {}", line.join(", "));
}

fn print_finding(finding: &Finding) {
    let severity = match finding.severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    };
    println!("{severity}: {}: {}", finding.stations.join(", "), finding.problem);
    println!("  do: {}", finding.advice);
}
