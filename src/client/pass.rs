//! One pass of some positions through all stations of a pipeline.
//!
//! Between two stations that have the same basis (by its BLAKE3 hash), residuals may travel as PCA components, and between
//! any two that say so, as numbers of few bits: the first station is asked to answer so, and its answer goes on unchanged.
//! A station that refuses such a body with 412 gets raw residuals from then on: the hop before it is repeated at the same positions with `accept` f32, so that the result is
//! the one that a raw request would have had.
//!
//! Over UDP the checksum of a datagram has 16 bits only, so bodies carry their `fp48` both ways. What was damaged in spite of
//! the checksum is refused by the station (400) or does not fit the request, and is asked again.

use std::sync::Arc;

use aeon_proto::{
    meta::parse_fingerprint,
    payload::MetaWriter,
    pcar::{self, PcarBody},
    qres::{Format, QresBody},
    residual,
    route::Route,
    status::Status,
};
use bytes::Bytes;

use super::{
    connection::Reply,
    error::ClientError,
    hello::{Hello, RemoteBasis},
    pipeline::{Next, Pipeline, QuantisedWire, Stage, Want, Wire},
    policy::{CompressionPolicy, compress_residuals},
};
use crate::basis::{BasisFile, quantiser::Quantiser};

/// How often one request is sent again because it, or its answer, was damaged on the way.
const MAX_DAMAGED: usize = 8;

/// What a body holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Ids,
    Raw,
    /// PCA components.
    Components,
    Quantised,
}

impl Form {
    const fn route(self) -> Route {
        match self {
            Self::Ids | Self::Raw => Route::FORWARD,
            Self::Components => Route::FORWARD_PCA,
            Self::Quantised => Route::FORWARD_Q,
        }
    }

    const fn is_coded(self) -> bool {
        matches!(self, Self::Components | Self::Quantised)
    }
}

/// What one station gets.
#[derive(Debug)]
struct Body {
    form: Form,
    bytes: Bytes,
    /// What this client compressed.
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
    /// The station answers with numbers of few bits; the mean is taken off that this basis has.
    Quantised {
        format: Format,
        basis_fp: Option<u32>,
    },
    /// The station answers raw; this client compresses for the next one.
    Local,
}

impl Pipeline {
    /// Sends the tokens `from..to` through the stations up to number `last`; `want` only with the last tokens, and through
    /// all stations. An error comes with the index of the station that it is about.
    pub(super) async fn pass(
        &mut self,
        (from, to): (usize, usize),
        last: usize,
        want: Option<Want>,
    ) -> Result<Option<Next>, (usize, ClientError)> {
        let ids = self.history.get(from..to).unwrap_or_default();
        let seq = ids.len();
        let mut bytes = Vec::new();
        residual::encode_u32s(ids, &mut bytes);
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
                    return read_next(&self.stages[index], &reply, want).map(Some).map_err(|error| (index, error));
                }
                Ok(reply) => {
                    let form = checked_form(&reply, link);
                    let compressed =
                        if link == Link::Local { self.compress(index + 1, from, &reply.body) } else { None };
                    let output = match compressed {
                        Some((form, bytes)) => Body { form, bytes, uncompressed: Some(reply.body) },
                        None => Body { form, bytes: reply.body, uncompressed: None },
                    };
                    before.push(std::mem::replace(&mut input, output));
                }
                Err(error) if error.status() == Some(Status::PRECONDITION_FAILED) && input.form.is_coded() => {
                    let stage = &mut self.stages[index];
                    tracing::info!(station = %stage.address(), %error, "falling back to raw residuals");
                    stage.traffic.refused += 1;
                    stage.raw_since = Some(std::time::Instant::now());
                    let raw = input.uncompressed.take();
                    let raw = raw.map(|bytes| Body { form: Form::Raw, bytes, uncompressed: None });
                    // What is coded comes from this client or from a station before this one.
                    let Some(other) = raw.or_else(|| before.pop()) else { return Err((index, error)) };
                    input = other;
                }
                Err(error) => return Err((index, error)),
            }
        }
    }

    /// What residuals pass through on the link behind station `index` if they lose anything there.
    pub(super) fn loss_behind(&self, index: usize) -> Option<String> {
        let quantised = |format: Format, basis_fp: Option<u32>| {
            let mean = basis_fp.filter(|_| format.is_rotated()).map(|basis_fp| format!(" 0x{basis_fp:08x}"));
            Some(format!("{}{}", format.name(), mean.unwrap_or_default()))
        };
        let (basis_fp, k) = match (self.link_behind(index), self.wire.behind(index)) {
            (Link::Remote { basis_fp, k }, _) => (basis_fp, k),
            (Link::Quantised { format, basis_fp }, _) => return quantised(format, basis_fp),
            (Link::Local, Wire::Pcar(wire)) => (wire.local.as_ref()?.basis_fp(), wire.k),
            (Link::Local, Wire::Quantised(wire)) => {
                let next = self.stages.get(index + 1)?;
                return quantised(wire.format, local_mean(wire, next).map(|basis| basis.basis_fp()));
            }
            (Link::Local, Wire::Exact | Wire::Each(_)) | (Link::Raw, _) => return None,
        };
        let k = k.map(|k| format!(" {k}")).unwrap_or_default();
        Some(format!("pcar 0x{basis_fp:08x}{k}"))
    }

    /// How the link from station `index` to the next one is spoken.
    fn link_behind(&self, index: usize) -> Link {
        let (Some(stage), Some(next)) = (self.stages.get(index), self.stages.get(index + 1)) else { return Link::Raw };
        if next.raw_since.is_some() {
            return Link::Raw;
        }
        let wire = match self.wire.behind(index) {
            Wire::Exact | Wire::Each(_) => return Link::Raw,
            Wire::Quantised(wire) => return quantised_link(wire, stage, next),
            Wire::Pcar(wire) => wire,
        };
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

    /// Compresses raw residuals, of the positions from `pos` on, for station `index`; `None` if they cannot be.
    fn compress(&mut self, index: usize, pos: usize, raw: &Bytes) -> Option<(Form, Bytes)> {
        let stage = self.stages.get_mut(index)?;
        let boundary = stage.hello.layers[0];
        let residuals = residual::decode_f32s(raw).ok()?;
        let mut body = Vec::new();
        match self.wire.behind(index.checked_sub(1)?) {
            Wire::Exact | Wire::Each(_) => None,
            Wire::Pcar(wire) => {
                let basis = wire.local.as_ref()?;
                let policy = CompressionPolicy::of(basis, wire.k.unwrap_or(u32::MAX));
                compress_residuals(&residuals, boundary, &policy, basis, &mut body).ok()?;
                Some((Form::Components, body.into()))
            }
            Wire::Quantised(wire) => {
                let width = u32::try_from(stage.hello.model.hidden_dim).ok()?;
                let basis = local_mean(wire, stage).map(Arc::clone);
                let quantiser = Quantiser::new(wire.format, boundary, width, basis)?;
                quantiser.encode(&residuals, Some(pos), &mut stage.norms, &mut body).ok()?;
                Some((Form::Quantised, body.into()))
            }
        }
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
        let want = want.filter(|_| index + 1 == self.stages.len());
        let stage = &mut self.stages[index];
        if stage.is_lost {
            let reason = "its last request had no answer".to_owned();
            return Err(ClientError::Closed { station: stage.address().clone(), route: Route::FORWARD, reason });
        }
        let (boundary, config_fp) = (stage.hello.layers[0], stage.hello.model.config_fp.clone());
        let vocab = stage.hello.model.vocab as u64;
        let fp48 = stage.client.is_udp().then(|| fp48(&input.bytes));
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("session", &stage.session)
                .unsigned("pos", pos as u64)
                .unsigned("boundary", u64::from(boundary))
                .string("config_fp", &config_fp);
            if let Some(fp48) = &fp48 {
                meta.string("fp48", fp48);
            }
            if input.form == Form::Ids {
                meta.string("in", "ids");
            }
            match link {
                Link::Raw | Link::Local => {}
                Link::Remote { basis_fp, k } => {
                    meta.strings("accept", ["pcar", "f32"]).strings("accept_basis", [&*format!("0x{basis_fp:08x}")]);
                    if let Some(k) = k {
                        meta.unsigned("accept_k", u64::from(k));
                    }
                }
                Link::Quantised { format, basis_fp } => {
                    meta.strings("accept", [format.name(), "f32"]);
                    // An empty list too says something: that no mean is to be taken off.
                    let basis_fp = basis_fp.map(|basis_fp| format!("0x{basis_fp:08x}"));
                    meta.strings("accept_basis", basis_fp.as_deref());
                }
            }
            match want {
                Some(Want::Token) => {
                    meta.string("out", "token");
                }
                Some(Want::TopK(k)) => {
                    let k = u64::from(k).min(vocab);
                    meta.string("out", "token").string("return", "topk").unsigned("top_k", k);
                }
                None => {}
            }
        };
        let kinds: &[&str] = match (want, link) {
            (Some(Want::Token), _) => &["u32"],
            (Some(Want::TopK(_)), _) => &["topk"],
            (None, Link::Remote { .. }) => &["pcar", "f32"],
            (None, Link::Quantised { format, .. }) => &[format.name(), "f32"],
            (None, Link::Raw | Link::Local) => &["f32"],
        };
        let route = input.form.route();
        // A request that was dropped may have been worked on or not, as one that is not answered.
        stage.was_closed = stage.client.is_closed() && !stage.is_waiting;
        stage.held = stage.held.min(pos);
        stage.is_waiting = true;
        let mut damaged = 0;
        let reply = loop {
            let reply = stage.client.request_with(route, meta, &input.bytes, true).await.and_then(|reply| {
                check_reply(stage, &reply, kinds, (pos, seq), link)?;
                check_fp48(stage, &reply, fp48.is_some())?;
                Ok(reply)
            });
            match reply {
                Err(error) if fp48.is_some() && damaged < MAX_DAMAGED && may_be_damage(&error, pos) => {
                    tracing::debug!(station = %stage.address(), %error, "sending again what may have been damaged");
                    damaged += 1;
                }
                reply => break reply,
            }
        };
        stage.is_waiting = false;
        let reply = reply?;
        stage.held = pos + seq;
        stage.traffic.requests += 1;
        stage.traffic.positions += seq as u64;
        stage.traffic.sent += input.bytes.len() as u64;
        stage.traffic.received += reply.body.len() as u64;
        if input.form.is_coded() {
            let raw = 4 * seq * stage.hello.model.hidden_dim;
            stage.traffic.compressed += 1;
            stage.traffic.saved += raw.saturating_sub(input.bytes.len()) as u64;
        }
        Ok(reply)
    }
}

/// Low 48 bits of XXH64 (seed 0), as the meta has them.
fn fp48(body: &[u8]) -> String {
    format!("{:012x}", xxhash_rust::xxh64::xxh64(body, 0) & 0xffff_ffff_ffff)
}

/// An answer to a request with `fp48` must have its own: that shows also that the station saw the request's, and checked
/// it.
fn check_fp48(stage: &Stage, reply: &Reply, is_asked: bool) -> Result<(), ClientError> {
    if !is_asked {
        return Ok(());
    }
    let (got, expected) = (reply.string("fp48"), fp48(&reply.body));
    if got.as_deref() == Some(&*expected) {
        return Ok(());
    }
    let problem = format!("the body has fp48 {expected}, its meta says {got:?}: the datagram was damaged on its way");
    Err(stage.client.bad_reply(Route::FORWARD, problem))
}

/// Whether an error can come from a datagram that was damaged on its way without its checksum showing it. A request that
/// really is wrong gets the same answer again.
fn may_be_damage(error: &ClientError, pos: usize) -> bool {
    match error {
        ClientError::BadReply { .. } => true,
        ClientError::Vent { status: Status::BAD_REQUEST | Status::NOT_FOUND | Status::NOT_IMPLEMENTED, .. } => true,
        // Of another position, boundary or model than the one that was sent.
        ClientError::Vent { status: Status::CONFLICT, .. } => {
            error.vent_number("expected_pos").is_none_or(|expected| expected >= pos as u64)
        }
        ClientError::Vent { status, .. } => status.description() == Status(0).description(),
        _ => false,
    }
}

/// A station may answer raw where something else was asked for, if it has lost the basis meanwhile.
fn checked_form(reply: &Reply, link: Link) -> Form {
    match (link, reply.string("body").as_deref()) {
        (Link::Remote { .. }, Some("pcar")) => Form::Components,
        (Link::Quantised { format, .. }, Some(kind)) if kind == format.name() => Form::Quantised,
        _ => Form::Raw,
    }
}

/// How residuals of few bits go from one station to the next.
fn quantised_link(wire: &QuantisedWire, stage: &Stage, next: &Stage) -> Link {
    let kind = wire.format.name();
    if !next.hello.takes(kind) {
        return Link::Raw;
    }
    let boundary = next.hello.layers[0];
    let is_shared = |basis: &&RemoteBasis| {
        let theirs = stage.hello.basis(basis.fingerprint());
        wire.basis_fp.is_none_or(|wanted| wanted == basis.fingerprint())
            && basis.has(boundary)
            && theirs.is_some_and(|theirs| theirs.blake3 == basis.blake3)
    };
    let shared = next.hello.bases.iter().filter(|_| wire.format.is_rotated()).find(is_shared);
    // A mean that only this client and the next station have is worth more than the bytes of the first link.
    if !stage.hello.takes(kind) || shared.is_none() && local_mean(wire, next).is_some() {
        return Link::Local;
    }
    Link::Quantised { format: wire.format, basis_fp: shared.map(RemoteBasis::fingerprint) }
}

/// The basis of this client's own, if a station has the same one, with a mean for what it takes.
fn local_mean<'a>(wire: &'a QuantisedWire, next: &Stage) -> Option<&'a Arc<BasisFile>> {
    let file = wire.local.as_ref().filter(|_| wire.format.is_rotated())?;
    let theirs = next.hello.basis(file.basis_fp())?;
    let is_it = theirs.blake3 == file.blake3().to_hex().as_str() && file.boundary(next.hello.layers[0]).is_some();
    is_it.then_some(file)
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
        (_, Link::Quantised { format, basis_fp }) if kind == format.name() => {
            check_quantised(stage, reply, seq, format, basis_fp)
        }
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

/// As [`check_components`]. The basis may have been withdrawn meanwhile, which the next station need not know of.
fn check_quantised(
    stage: &Stage,
    reply: &Reply,
    seq: usize,
    format: Format,
    basis_fp: Option<u32>,
) -> Result<(), ClientError> {
    let bad = |problem: String| Err(stage.client.bad_reply(Route::FORWARD, format!("quantised body: {problem}")));
    let body = match QresBody::decode(&reply.body) {
        Ok(body) => body,
        Err(error) => return bad(error.to_string()),
    };
    if let Err(error) = body.check_finite() {
        return bad(error.to_string());
    }
    let (header, width) = (body.header(), stage.hello.model.hidden_dim);
    let expected = (stage.hello.layers[1], width, format, seq);
    let got = (header.boundary, header.hidden_dim as usize, header.format, body.seq());
    if got != expected {
        return bad(format!("boundary, width, format and positions {expected:?} expected, {got:?} came"));
    }
    match header.basis_fp {
        0 => Ok(()),
        got if format.is_rotated() && basis_fp == Some(got) => Ok(()),
        got => bad(format!("basis 0x{:08x} or none expected, 0x{got:08x} came", basis_fp.unwrap_or(0))),
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
        Want::TopK(k) => next.ids.len() == next.logits.len() && next.ids.len() == (k as usize).min(vocab),
    };
    if !whole || next.ids.iter().any(|id| *id as usize >= vocab) {
        let wanted = match want {
            Want::Token => "a token".to_owned(),
            Want::TopK(k) => format!("{} tokens and logits, each", (k as usize).min(vocab)),
        };
        return Err(bad(format!("{wanted} below {vocab} expected, {} bytes of something else came", reply.body.len())));
    }
    Ok(next)
}
