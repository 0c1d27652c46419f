//! What PCA components and fewer bits do to a model: bytes, cosine, and, since a high cosine can hide a ruined model, its output.

use std::sync::Arc;

use aeon_proto::{
    kernel,
    payload::MetaWriter,
    pcar::PcarBody,
    qres::{Format, QresBody},
    residual,
    route::Route,
};
use aeon_station::{
    basis::{BasisFile, quantiser::Quantiser},
    client::{Client, ClientError, StationAddress},
    model::session::random_name,
};
use anyhow::Context as _;
use serde_json::{Value, json};

use crate::Context;

/// Positions that one request holds: their logits must fit a datagram.
const CHUNK: usize = 8;

/// One way to send residuals, measured.
pub(crate) struct Row {
    name: String,
    bytes_per_token: f64,
    cosine_mean: f64,
    cosine_min: f64,
    same_token: f64,
    perplexity: f64,
}

/// How residuals are sent.
#[derive(Debug, Clone, Copy)]
enum Form {
    Raw,
    Pcar(u32),
    Quantised(Format),
}

/// What came through the second station for one way to send.
#[derive(Default)]
struct Pass {
    bytes: usize,
    residuals: Vec<f32>,
    logits: Vec<f32>,
}

/// Two stations and the tokens that are sent through them.
pub(crate) struct Probe<'a> {
    first: Client,
    second: Client,
    ids: &'a [u32],
    basis: &'a Arc<BasisFile>,
    boundary: u32,
    vocab: usize,
}

impl<'a> Probe<'a> {
    pub(crate) async fn new(
        context: &Context,
        stations: &[StationAddress; 2],
        ids: &'a [u32],
        basis: &'a Arc<BasisFile>,
    ) -> anyhow::Result<Self> {
        let first = Client::connect(&stations[0], context.options.clone()).await?;
        let second = Client::connect(&stations[1], context.options.clone()).await?;
        let hello = second.hello().await?;
        Ok(Self { first, second, ids, basis, boundary: hello.layers[0], vocab: hello.model.vocab })
    }

    /// Sends the tokens raw, in each of the formats, and as components for each `k`.
    pub(crate) async fn rows(&self, formats: &[Format], ks: &[u32]) -> anyhow::Result<Vec<Row>> {
        let raw = self.pass(Form::Raw).await?;
        let mut rows = vec![self.compare("f32", &raw, &raw)];
        for format in formats {
            let pass = self.pass(Form::Quantised(*format)).await?;
            rows.push(self.compare(format.name(), &raw, &pass));
        }
        for k in ks {
            let pass = self.pass(Form::Pcar(*k)).await?;
            rows.push(self.compare(&format!("pcar k={k}"), &raw, &pass));
        }
        Ok(rows)
    }

    async fn pass(&self, form: Form) -> anyhow::Result<Pass> {
        let session = random_name();
        let basis_fp = format!("0x{:08x}", self.basis.basis_fp());
        let mut pass = Pass::default();
        for (index, chunk) in self.ids.chunks(CHUNK).enumerate() {
            let place = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("session", &session).unsigned("pos", (index * CHUNK) as u64);
            };
            let mut body = Vec::new();
            residual::encode_u32s(chunk, &mut body);
            let ask = |meta: &mut MetaWriter<'_, '_>| {
                place(meta);
                meta.string("in", "ids");
                match form {
                    Form::Raw => return,
                    Form::Pcar(k) => meta.strings("accept", ["pcar"]).unsigned("accept_k", u64::from(k)),
                    Form::Quantised(format) => meta.strings("accept", [format.name()]),
                };
                meta.strings("accept_basis", [&*basis_fp]);
            };
            let sent = self.first.request(Route::FORWARD, ask, &body).await?.body;
            pass.bytes += sent.len();
            let route = match form {
                Form::Raw => Route::FORWARD,
                Form::Pcar(_) => Route::FORWARD_PCA,
                Form::Quantised(_) => Route::FORWARD_Q,
            };
            let last = self.second.request(route, place, &sent).await?.body;
            match form {
                Form::Raw => pass.residuals.extend_from_slice(&residual::decode_f32s(&sent)?),
                Form::Pcar(_) => self.lift(&sent, &mut pass.residuals)?,
                Form::Quantised(_) => pass.residuals.extend(self.read(&sent)?),
            }
            let logits = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("return", "logits");
            };
            let reply = self.second.request(Route::LM_HEAD, logits, &last).await?;
            pass.logits.extend_from_slice(&residual::decode_f32s(&reply.body)?);
        }
        for client in [&self.first, &self.second] {
            let reset = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("session", &session);
            };
            client.request(Route::RESET, reset, &[]).await.map(drop).or_else(ignore_vent)?;
        }
        Ok(pass)
    }

    /// What the second station lifts from a body: the same bits, by the same arithmetic.
    fn lift(&self, body: &[u8], out: &mut Vec<f32>) -> anyhow::Result<()> {
        let body = PcarBody::decode(body)?;
        let part = self.basis.boundary(self.boundary).context("the basis has nothing for this boundary")?;
        let mut components = Vec::new();
        body.read_components(&mut components);
        let mut lifted = vec![0.0; body.seq() * part.mean.len()];
        let rows = part.prefix(body.k() as usize).context("the basis has fewer components than were sent")?;
        kernel::lift_batch(part.mean, rows, &components, &mut lifted)?;
        out.extend_from_slice(&lifted);
        Ok(())
    }

    /// As [`Self::lift`], for a quantised body.
    fn read(&self, body: &[u8]) -> anyhow::Result<Vec<f32>> {
        let body = QresBody::decode(body)?;
        let basis = Some(Arc::clone(self.basis)).filter(|_| body.header().basis_fp != 0);
        let quantiser = Quantiser::of(*body.header(), basis).context("the body names another basis or boundary")?;
        Ok(quantiser.decode(&body)?)
    }

    fn compare(&self, name: &str, raw: &Pass, pass: &Pass) -> Row {
        let tokens = self.ids.len();
        let width = raw.residuals.len() / tokens;
        let pairs = raw.residuals.chunks(width).zip(pass.residuals.chunks(width));
        let cosines: Vec<f64> = pairs.map(|(a, b)| cosine(a, b)).collect();
        let rows = || pass.logits.chunks(self.vocab);
        let same = raw.logits.chunks(self.vocab).zip(rows()).filter(|(a, b)| best(a) == best(b)).count();
        // The last position predicts a token that is not in the text.
        let surprises = rows().zip(self.ids.iter().skip(1)).map(|(logits, next)| surprise(logits, *next as usize));
        Row {
            name: name.to_owned(),
            bytes_per_token: pass.bytes as f64 / tokens as f64,
            cosine_mean: cosines.iter().sum::<f64>() / tokens as f64,
            cosine_min: cosines.iter().copied().fold(f64::INFINITY, f64::min),
            same_token: same as f64 / tokens as f64,
            perplexity: (surprises.sum::<f64>() / (tokens - 1) as f64).exp(),
        }
    }
}

fn ignore_vent(error: ClientError) -> Result<(), ClientError> {
    if error.status().is_some() { Ok(()) } else { Err(error) }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn best(logits: &[f32]) -> u32 {
    aeon_station::model::head::argmax(logits)
}

/// How unexpected a token is, in nats.
fn surprise(logits: &[f32], token: usize) -> f64 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - highest).exp()).sum();
    total.ln() - f64::from(logits[token] - highest)
}

/// The table for people.
pub(crate) fn text(rows: &[Row], tokens: usize) -> String {
    let mut out = format!(
        "what other forms of residuals do to this model, on {tokens} tokens of held-out text, one hop:\n  {:<10} {:>11} {:>12} {:>11} {:>11} {:>11}\n",
        "body", "bytes/token", "cosine mean", "cosine min", "same token", "perplexity"
    );
    for row in rows {
        out += &format!(
            "  {:<10} {:>11.1} {:>12.4} {:>11.4} {:>10.1}% {:>11.1}\n",
            row.name,
            row.bytes_per_token,
            row.cosine_mean,
            row.cosine_min,
            100.0 * row.same_token,
            row.perplexity
        );
    }
    out
}

/// The table for programs.
pub(crate) fn json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        json!({
            "body": row.name,
            "bytes_per_token": row.bytes_per_token,
            "cosine_mean": row.cosine_mean,
            "cosine_min": row.cosine_min,
            "same_token": row.same_token,
            "perplexity": row.perplexity,
        })
    };
    rows.iter().map(row).collect()
}
