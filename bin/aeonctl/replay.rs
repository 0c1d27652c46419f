//! `aeonctl replay` and `aeonctl capture`: the prefix replay caches of stations.

use std::{io::Read, path::PathBuf};

use aeon_proto::bwah::CaptureView;
use aeon_station::{
    client::{Client, Hello},
    replay::{
        coordinator::{Decision, decide},
        key::{Conditions, Digest, PrefixKey, mesh_fp, prefix_digest, prefix_hash},
    },
};
use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};

use crate::{Context, usage};

/// Which prefix.
#[derive(Debug, Args)]
struct KeyOptions {
    /// Token ids of the prefix, comma-separated; its hash, length and digest are computed from them
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with_all = ["prefix_hash", "prefix_len"])]
    ids: Vec<u32>,
    /// Hash of the prefix, 0x… or decimal
    #[arg(long, value_name = "HASH", value_parser = parse_hash, requires = "prefix_len")]
    prefix_hash: Option<u64>,
    /// Positions of the prefix
    #[arg(long, value_name = "N", requires = "prefix_hash")]
    prefix_len: Option<u32>,
    /// BLAKE3-128 of the prefix, 32 hex digits
    #[arg(long, value_name = "HEX", value_parser = parse_digest)]
    prefix_digest: Option<Digest>,
    /// Only a prefix that came through nothing that loses anything
    #[arg(long)]
    exact: bool,
    /// Only a prefix that came through the basis with this fingerprint
    #[arg(long, value_name = "0xFP", value_parser = parse_basis, conflicts_with = "exact")]
    basis_fp: Option<u32>,
}

fn parse_hash(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text:?} is no 64-bit number; write 0x… or decimal digits"))
}

fn parse_digest(text: &str) -> Result<Digest, String> {
    Digest::parse(text).ok_or_else(|| format!("{text:?} is not 32 hex digits"))
}

fn parse_basis(text: &str) -> Result<u32, String> {
    aeon_proto::meta::parse_fingerprint(text).ok_or_else(|| format!("{text:?} is no fingerprint such as 0x0123abcd"))
}

impl KeyOptions {
    /// Hash and length.
    fn prefix(&self) -> anyhow::Result<(u64, u32)> {
        match (self.prefix_hash, self.prefix_len) {
            (Some(hash), Some(len)) => Ok((hash, len)),
            _ if self.ids.is_empty() => {
                Err(usage("no prefix was named; give --ids 1,2,3 or --prefix-hash and --prefix-len"))
            }
            _ => Ok((prefix_hash(&self.ids), u32::try_from(self.ids.len()).unwrap_or(u32::MAX))),
        }
    }

    fn conditions(&self) -> Conditions {
        let computed = (!self.ids.is_empty()).then(|| prefix_digest(&self.ids));
        Conditions {
            prefix_digest: self.prefix_digest.or(computed),
            exact: self.exact,
            basis_fp: self.basis_fp,
            ..Conditions::default()
        }
    }
}

fn key((prefix_hash, prefix_len): (u64, u32), hello: &Hello) -> anyhow::Result<PrefixKey> {
    let layer = |layer: u32| u16::try_from(layer).context("the station has more layers than a key can name");
    let layers = hello.layers();
    Ok(PrefixKey { prefix_hash, prefix_len, layer_lo: layer(layers.start)?, layer_hi: layer(layers.end)? })
}

async fn connect(context: &Context) -> anyhow::Result<Vec<(Client, Hello)>> {
    let mut stations = Vec::new();
    for address in context.stations()? {
        let client = Client::connect(address, context.options.clone()).await?;
        let hello = client.hello().await?;
        stations.push((client, hello));
    }
    Ok(stations)
}

/// What all stations hold, if together they are the whole model: coordinators name it.
fn mesh(stations: &[(Client, Hello)]) -> Option<Digest> {
    let mut next = 0;
    for (_, hello) in stations {
        if hello.layers().start != next {
            return None;
        }
        next = hello.layers().end;
    }
    let n_layers = stations.first()?.1.model.n_layers;
    (next == n_layers).then(|| mesh_fp(stations.iter().map(|(_, hello)| hello.model.layers_fp.as_str())))
}

/// Options of `aeonctl replay`.
#[derive(Debug, Args)]
pub(crate) struct Replay {
    #[command(flatten)]
    key: KeyOptions,
    /// Session to put the prefix into, in place of what it holds
    #[arg(long, value_name = "NAME")]
    session: Option<String>,
}

impl Replay {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        let (prefix, conditions) = (self.key.prefix()?, self.key.conditions());
        let mut answers = Vec::new();
        let mut hits = Vec::new();
        for (client, hello) in connect(context).await? {
            let hit = client.replay(&key(prefix, &hello)?, &conditions, self.session.as_deref()).await?;
            let layers = hello.layers();
            let (address, layers) = (client.address().to_string(), format!("{}..{}", layers.start, layers.end));
            if context.json {
                answers.push(match &hit {
                    None => json!({"address": address, "layers": layers, "hit": false}),
                    Some(hit) => json!({
                        "address": address,
                        "layers": layers,
                        "hit": true,
                        "tail_bytes": 4 * hit.tail.len(),
                        "envelope_bytes": hit.envelope_len,
                        "slab_bytes": hit.slab_bytes,
                        "provenance": hit.provenance,
                        "spliced": hit.spliced,
                    }),
                });
            } else {
                match &hit {
                    None => println!("{address}  layers {layers}  miss"),
                    Some(hit) => println!(
                        "{address}  layers {layers}  hit: tail {} bytes (envelope {}), slab {} bytes, {}{}",
                        4 * hit.tail.len(),
                        hit.envelope_len,
                        hit.slab_bytes,
                        hit.provenance,
                        if hit.spliced { ", put into the session" } else { "" },
                    ),
                }
            }
            hits.push(hit);
        }
        let skip = matches!(decide(hits), Decision::Skip { .. });
        match context.json {
            true => println!("{}", json!({"stations": answers, "prefill_can_be_skipped": skip})),
            false => println!("prefill can be skipped: {}", if skip { "yes" } else { "no" }),
        }
        Ok(())
    }
}

/// Options of `aeonctl capture`.
#[derive(Debug, Args)]
pub(crate) struct Capture {
    #[command(flatten)]
    key: KeyOptions,
    /// Session whose first positions the stations capture
    #[arg(long, value_name = "NAME", conflicts_with = "envelope", required_unless_present = "envelope")]
    session: Option<String>,
    /// BWAH capture to give to one station, which has its own key; - for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ids", "prefix_hash", "prefix_len"])]
    envelope: Option<PathBuf>,
}

impl Capture {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        let mut conditions = self.key.conditions();
        let mut answers: Vec<Value> = Vec::new();
        if let Some(path) = &self.envelope {
            let mut envelope = Vec::new();
            if path.as_os_str() == "-" {
                std::io::stdin().read_to_end(&mut envelope).context("reading standard input")?;
            } else {
                envelope = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
            }
            // What is no capture is not sent: the fault is told here with all that is known of it.
            let view = CaptureView::parse(&envelope).with_context(|| format!("{}: no BWAH capture", path.display()))?;
            let client = Client::connect(context.station()?, context.options.clone()).await?;
            let reply = client.capture_envelope(&envelope, &conditions).await?;
            print(context, &mut answers, client.address().to_string(), view.prefix_len, &reply.meta)?;
        } else if let Some(session) = &self.session {
            let prefix = self.key.prefix()?;
            let stations = connect(context).await?;
            conditions.mesh_fp = mesh(&stations);
            for (client, hello) in stations {
                let reply = client.capture_session(&key(prefix, &hello)?, &conditions, session).await?;
                print(context, &mut answers, client.address().to_string(), prefix.1, &reply.meta)?;
            }
        }
        if context.json {
            println!("{}", Value::Array(answers));
        }
        Ok(())
    }
}

fn print(
    context: &Context,
    answers: &mut Vec<Value>,
    address: String,
    prefix_len: u32,
    meta: &str,
) -> anyhow::Result<()> {
    let mut answer: Value = serde_json::from_str(meta)?;
    if context.json {
        answer["address"] = address.into();
        answers.push(answer);
    } else {
        println!(
            "{address}  captured {prefix_len} positions; the cache holds {} entries in {} bytes",
            answer["held"], answer["held_bytes"]
        );
    }
    Ok(())
}
