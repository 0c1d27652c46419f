//! One pass of some positions through all stations of a pipeline.
//!
//! Between two stations that have the same basis (by its BLAKE3 hash), residuals may travel as PCA components: the first
//! station is asked to answer so, and its answer goes on unchanged. A station that refuses them with 412 gets raw
//! residuals from then on: the hop before it is repeated at the same positions with `accept` f32, so that the result is
//! the one that a raw request would have had.

use aeon_proto::{
    meta::parse_fingerprint,
    payload::MetaWriter,
    pcar::{self, PcarBody},
    residual,
    route::Route,
    status::Status,
};
use bytes::Bytes;

use super::{
    connection::Reply,
    error::ClientError,
    hello::Hello,
    pipeline::{Next, Pipeline, Stage, Want, Wire},
    policy::{CompressionPolicy, compress_residuals},
};

/// What a body holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Ids,
    Raw,
    Components,
}

/// What one station gets.
#[derive(Debug)]
struct Body {
    form: Form,
    bytes: Bytes,
    /// What this client made the components from.
    uncompressed: Option<Bytes>,
}

/// How the link behind a station is to be spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    Raw,
    /// The station answers with components, which the next one lifts.
    Remote {
        basis_fp: u32,
        k: Option<u32>,
    },
    /// The station answers raw; this client compresses for the next one.
    Local,
}

impl Pipeline {
    /// Sends the tokens `from..to` through all stations; `want` only with the last tokens.
    pub(super) async fn pass(
        &mut self,
        from: usize,
        to: usize,
        want: Option<Want>,
    ) -> Result<Option<Next>, ClientError> {
        let ids = self.history.get(from..to).unwrap_or_default();
        let seq = ids.len();
        let mut bytes = Vec::new();
        residual::encode_u32s(ids, &mut bytes);
        let last = self.stages.len() - 1;
        let mut input = Body { form: Form::Ids, bytes: bytes.into(), uncompressed: None };
        // What the stations before got: a refusal goes back to the last of them, and from there on it may again.
        let mut before: Vec<Body> = Vec::new();
        loop {
            let index = before.len();
            let link = if index == last { Link::Raw } else { self.link_behind(index) };
            match self.hop(index, &input, (from, seq), want, link).await {
                Ok(reply) if index == last => {
                    // The last station's residual is not needed while the prompt goes on.
                    let Some(want) = want else { return Ok(None) };
                    return read_next(&self.stages[index], &reply, want).map(Some);
                }
                Ok(reply) => {
                    let form = if matches!(link, Link::Remote { .. }) { Form::Components } else { Form::Raw };
                    let form = checked_form(&reply, form);
                    let compressed = if link == Link::Local { self.compress(index + 1, &reply.body) } else { None };
                    let output = match compressed {
                        Some(bytes) => Body { form: Form::Components, bytes, uncompressed: Some(reply.body) },
                        None => Body { form, bytes: reply.body, uncompressed: None },
                    };
                    before.push(std::mem::replace(&mut input, output));
                }
                Err(error) if error.status() == Some(Status::PRECONDITION_FAILED) && input.form == Form::Components => {
                    let stage = &mut self.stages[index];
                    tracing::info!(station = %stage.address(), %error, "falling back to raw residuals");
                    stage.traffic.refused += 1;
                    stage.raw_since = Some(std::time::Instant::now());
                    let raw = input.uncompressed.take();
                    let raw = raw.map(|bytes| Body { form: Form::Raw, bytes, uncompressed: None });
                    // Components come from this client or from a station before this one.
                    let Some(other) = raw.or_else(|| before.pop()) else { return Err(error) };
                    input = other;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What residuals pass through on the link behind station `index` if they lose anything there.
    pub(super) fn loss_behind(&self, index: usize) -> Option<String> {
        let (basis_fp, k) = match (self.link_behind(index), &self.wire) {
            (Link::Remote { basis_fp, k }, _) => (basis_fp, k),
            (Link::Local, Wire::Pcar(wire)) => (wire.local.as_ref()?.basis_fp(), wire.k),
            (Link::Local, Wire::Exact) | (Link::Raw, _) => return None,
        };
        let k = k.map(|k| format!(" {k}")).unwrap_or_default();
        Some(format!("pcar 0x{basis_fp:08x}{k}"))
    }

    /// How the link from station `index` to the next one is spoken.
    fn link_behind(&self, index: usize) -> Link {
        let Wire::Pcar(wire) = &self.wire else { return Link::Raw };
        let (Some(stage), Some(next)) = (self.stages.get(index), self.stages.get(index + 1)) else { return Link::Raw };
        if next.raw_since.is_some() {
            return Link::Raw;
        }
        let boundary = next.hello.layers[0];
        let wanted = |basis_fp: u32| wire.basis_fp.is_none_or(|wanted| wanted == basis_fp);
        let shared = next.hello.bases.iter().find(|basis| {
            let theirs = stage.hello.basis(basis.fingerprint());
            wanted(basis.fingerprint())
                && basis.k_at(boundary) > 0
                && theirs.is_some_and(|theirs| theirs.blake3 == basis.blake3)
        });
        if let Some(basis) = shared {
            return Link::Remote { basis_fp: basis.fingerprint(), k: wire.k };
        }
        let lifts = wire.local.as_ref().is_some_and(|file| {
            let theirs = next.hello.basis(file.basis_fp());
            let same = theirs.is_some_and(|theirs| theirs.blake3 == file.blake3().to_hex().as_str());
            same && wanted(file.basis_fp()) && file.boundary(boundary).is_some_and(|part| part.k > 0)
        });
        if lifts { Link::Local } else { Link::Raw }
    }

    /// Compresses raw residuals for station `index` with this client's basis; `None` if they cannot be.
    fn compress(&self, index: usize, raw: &Bytes) -> Option<Bytes> {
        let Wire::Pcar(wire) = &self.wire else { return None };
        let basis = wire.local.as_ref()?;
        let policy = CompressionPolicy::of(basis, wire.k.unwrap_or(u32::MAX));
        let mut body = Vec::new();
        let boundary = self.stages.get(index)?.hello.layers[0];
        compress_residuals(&residual::decode_f32s(raw).ok()?, boundary, &policy, basis, &mut body).ok()?;
        Some(body.into())
    }

    /// One request to one station, and its answer, checked.
    async fn hop(
        &mut self,
        index: usize,
        input: &Body,
        (pos, seq): (usize, usize),
        want: Option<Want>,
        link: Link,
    ) -> Result<Reply, ClientError> {
        let is_last = index + 1 == self.stages.len();
        let stage = &mut self.stages[index];
        let (boundary, config_fp) = (stage.hello.layers[0], stage.hello.model.config_fp.clone());
        let vocab = stage.hello.model.vocab as u64;
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("session", &self.session)
                .unsigned("pos", pos as u64)
                .unsigned("boundary", u64::from(boundary))
                .string("config_fp", &config_fp);
            if input.form == Form::Ids {
                meta.string("in", "ids");
            }
            if let Link::Remote { basis_fp, k } = link {
                meta.strings("accept", ["pcar", "f32"]).strings("accept_basis", [&*format!("0x{basis_fp:08x}")]);
                if let Some(k) = k {
                    meta.unsigned("accept_k", u64::from(k));
                }
            }
            match want {
                Some(Want::Token) if is_last => {
                    meta.string("out", "token");
                }
                Some(Want::TopK(k)) if is_last => {
                    let k = u64::from(k).min(vocab);
                    meta.string("out", "token").string("return", "topk").unsigned("top_k", k);
                }
                _ => {}
            }
        };
        let route = if input.form == Form::Components { Route::FORWARD_PCA } else { Route::FORWARD };
        let reply = stage.forward(&self.options, route, meta, &input.bytes).await?;
        stage.traffic.requests += 1;
        stage.traffic.positions += seq as u64;
        stage.traffic.sent += input.bytes.len() as u64;
        stage.traffic.received += reply.body.len() as u64;
        stage.traffic.compressed += u64::from(input.form == Form::Components);
        let kinds: &[&str] = match want {
            Some(Want::Token) if is_last => &["u32"],
            Some(Want::TopK(_)) if is_last => &["topk"],
            _ if matches!(link, Link::Remote { .. }) => &["pcar", "f32"],
            _ => &["f32"],
        };
        check_reply(stage, &reply, kinds, (pos, seq), link)?;
        Ok(reply)
    }
}

/// A station may answer raw where components were asked for, if it has lost the basis meanwhile.
fn checked_form(reply: &Reply, asked: Form) -> Form {
    match (asked, reply.string("body").as_deref()) {
        (Form::Components, Some("pcar")) => Form::Components,
        _ => Form::Raw,
    }
}

/// A reply must be for this hop and these positions, so that none can be taken for another's.
pub(super) fn check_reply(
    stage: &Stage,
    reply: &Reply,
    kinds: &[&str],
    (pos, seq): (usize, usize),
    link: Link,
) -> Result<(), ClientError> {
    let bad = |what: &str, expected: String, got: String| {
        Err(stage.client.bad_reply(Route::FORWARD, format!("{what} {expected} expected, {got} came")))
    };
    let got = reply.string("body");
    let Some(kind) = got.as_deref().filter(|got| kinds.contains(got)) else {
        return bad("body", kinds.join(" or "), format!("{got:?}"));
    };
    let hello = &stage.hello;
    for (key, expected) in [("pos", pos), ("seq", seq), ("dim", hello.model.hidden_dim)] {
        let got = reply.number(key);
        if got != Some(expected as u64) {
            return bad(key, expected.to_string(), format!("{got:?}"));
        }
    }
    let (got, expected) = (reply.numbers("layers"), hello.layers.map(u64::from));
    if got.as_deref() != Some(&expected) {
        return bad("layers", format!("{expected:?}"), format!("{got:?}"));
    }
    match (kind, link) {
        ("pcar", Link::Remote { basis_fp, k }) => check_components(stage, reply, seq, (basis_fp, k)),
        ("f32", _) => {
            let bytes = 4 * seq * hello.model.hidden_dim;
            match reply.body.len() {
                len if len == bytes => Ok(()),
                len => bad("bytes of residual", bytes.to_string(), len.to_string()),
            }
        }
        _ => Ok(()),
    }
}

/// Components go on as they came, so they must be what was asked for.
fn check_components(
    stage: &Stage,
    reply: &Reply,
    seq: usize,
    (basis_fp, k): (u32, Option<u32>),
) -> Result<(), ClientError> {
    let bad = |problem: String| Err(stage.client.bad_reply(Route::FORWARD, format!("components: {problem}")));
    let body = match PcarBody::decode(&reply.body) {
        Ok(body) => body,
        Err(error) => return bad(error.to_string()),
    };
    let Hello { layers: [_, boundary], model, .. } = &stage.hello;
    let basis = stage.hello.basis(basis_fp);
    let expected = pcar::Header {
        boundary: *boundary,
        k: basis.map_or(0, |basis| basis.k_at(*boundary)).min(k.unwrap_or(u32::MAX)),
        hidden_dim: u32::try_from(model.hidden_dim).unwrap_or(u32::MAX),
        methodology: basis.and_then(|basis| parse_fingerprint(&basis.methodology)).unwrap_or(0),
        basis_fp,
    };
    match (body.header(), body.seq()) {
        got if got == (expected, seq) => Ok(()),
        (got, positions) => bad(format!("{seq} of {expected:?} expected, {positions} of {got:?} came")),
    }
}

pub(super) fn read_next(stage: &Stage, reply: &Reply, want: Want) -> Result<Next, ClientError> {
    let bad = |problem: String| stage.client.bad_reply(Route::FORWARD, problem);
    let words = residual::decode_u32s(&reply.body).map_err(|error| bad(error.to_string()))?;
    let vocab = stage.hello.model.vocab;
    let next = match want {
        Want::Token => Next { ids: words.into_owned(), logits: Vec::new() },
        Want::TopK(_) => {
            let (ids, logits) = words.split_at(words.len() / 2);
            Next { ids: ids.to_vec(), logits: logits.iter().map(|bits| f32::from_bits(*bits)).collect() }
        }
    };
    let whole = match want {
        Want::Token => next.ids.len() == 1,
        Want::TopK(_) => !next.ids.is_empty() && next.ids.len() == next.logits.len(),
    };
    if !whole || next.ids.iter().any(|id| *id as usize >= vocab) {
        return Err(bad(format!("a token below {vocab} expected, {} bytes of something else came", reply.body.len())));
    }
    Ok(next)
}
