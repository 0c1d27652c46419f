//! A mesh as one model: token ids in at the first station, a token out of the last.
//!
//! A pipeline keeps the token history of its session. When a station has lost the session (evicted, or started again) it
//! says where to go on, and the history is sent again from there: requests are idempotent, so the other stations simply
//! do it twice.

use aeon_proto::{payload::MetaWriter, residual, route::Route, status::Status};
use bytes::Bytes;

use super::{
    address::StationAddress,
    connection::{Client, ClientOptions, Reply},
    error::ClientError,
    hello::Hello,
    replay::Replaying,
};
use crate::model::session::random_name;

/// Bytes that header and meta of a request or reply take at most.
const FRAME_OVERHEAD: usize = 512;
/// How often lost history is sent again for one step.
const MAX_RECOVERIES: usize = 4;

/// What is wanted after the last position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// The most likely token.
    Token,
    /// The best few ids and logits.
    TopK(u32),
}

/// What came out.
#[derive(Debug, Clone, PartialEq)]
pub struct Next {
    /// Ids in descending order of their logits; the most likely one alone for [`Want::Token`].
    pub ids: Vec<u32>,
    /// Their logits; empty for [`Want::Token`].
    pub logits: Vec<f32>,
}

/// What went over the link to one station and back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HopTraffic {
    /// Requests.
    pub requests: u64,
    /// Positions.
    pub positions: u64,
    /// Body bytes sent to the station.
    pub sent: u64,
    /// Body bytes that came back.
    pub received: u64,
}

/// A station of a pipeline.
#[derive(Debug)]
pub struct Stage {
    client: Client,
    /// What the station said of itself.
    pub hello: Hello,
    /// What went over its link.
    pub traffic: HopTraffic,
}

impl Stage {
    /// Where the station is.
    #[must_use]
    pub fn address(&self) -> &StationAddress {
        self.client.address()
    }

    pub(super) const fn client(&self) -> &Client {
        &self.client
    }
}

/// Several stations that hold all layers of one model, in order, and one session on them.
#[derive(Debug)]
pub struct Pipeline {
    stages: Vec<Stage>,
    session: String,
    history: Vec<u32>,
    pub(super) replay: Replaying,
}

impl Pipeline {
    /// Connects to the stations and checks that they are one model, in order.
    ///
    /// # Errors
    /// [`ClientError::Mesh`] with what does not fit; others if a station cannot be reached.
    pub async fn connect(addresses: &[StationAddress], options: &ClientOptions) -> Result<Self, ClientError> {
        let mut stages = Vec::new();
        for address in addresses {
            let client = Client::connect(address, options.clone()).await?;
            let hello = client.hello().await?;
            stages.push(Stage { client, hello, traffic: HopTraffic::default() });
        }
        check_mesh(&stages)?;
        Ok(Self { stages, session: random_name(), history: Vec::new(), replay: Replaying::default() })
    }

    /// The stations, in order.
    #[must_use]
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The model that they hold together.
    #[must_use]
    pub fn model(&self) -> &super::hello::RemoteModel {
        // `check_mesh` refused a pipeline without a station.
        &self.stages[0].hello.model
    }

    /// Tokens of the session so far.
    #[must_use]
    pub fn history(&self) -> &[u32] {
        &self.history
    }

    /// The session's name on the stations.
    #[must_use]
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Puts `ids` behind the session's tokens and returns what comes next.
    ///
    /// # Errors
    /// See [`ClientError`]; the session is then as it was before.
    pub async fn extend(&mut self, ids: &[u32], want: Want) -> Result<Next, ClientError> {
        let start = self.history.len();
        self.history.extend_from_slice(ids);
        if self.replay.is_about(start) {
            self.end_captures().await;
        }
        let result = match start == 0 && self.replay.is_enabled() {
            true => self.begin(want).await,
            false => self.run(start, want).await,
        };
        if result.is_err() {
            self.history.truncate(start);
        }
        result
    }

    /// Goes back to the first `len` tokens.
    pub fn rewind(&mut self, len: usize) {
        self.history.truncate(len);
    }

    /// Drops the session on all stations and begins a new one.
    ///
    /// # Errors
    /// The first station's error that is none of "unknown session".
    pub async fn reset(&mut self) -> Result<(), ClientError> {
        self.history.clear();
        let session = std::mem::replace(&mut self.session, random_name());
        for stage in &self.stages {
            stage
                .client
                .request(
                    Route::RESET,
                    |meta| {
                        meta.string("session", &session);
                    },
                    &[],
                )
                .await?;
        }
        Ok(())
    }

    pub(super) async fn run(&mut self, start: usize, want: Want) -> Result<Next, ClientError> {
        let mut pos = start;
        let mut recoveries = 0;
        let chunk = self.chunk_len(want);
        loop {
            let end = self.history.len().min(pos + chunk);
            let is_last = end == self.history.len();
            match self.pass(pos, end, is_last.then_some(want)).await {
                Ok(Some(next)) => return Ok(next),
                Ok(None) => pos = end,
                Err(error) => {
                    let expected = error.vent_number("expected_pos").and_then(|pos| usize::try_from(pos).ok());
                    match expected {
                        Some(expected)
                            if error.status() == Some(Status::CONFLICT)
                                && expected < pos
                                && recoveries < MAX_RECOVERIES =>
                        {
                            tracing::info!(%error, "sending the history again");
                            recoveries += 1;
                            pos = expected;
                        }
                        _ => return Err(error),
                    }
                }
            }
        }
    }

    /// Positions that one request may hold on every hop.
    fn chunk_len(&self, want: Want) -> usize {
        let logits = match want {
            Want::Token => 4,
            Want::TopK(k) => 8 * k as usize,
        };
        let positions = |stage: &Stage| {
            let limits = stage.hello.limits;
            let max = if stage.client.is_udp() { limits.max_datagram } else { limits.max_frame };
            let room = max.saturating_sub(FRAME_OVERHEAD);
            // A residual crosses every link but that of a single station.
            let width = if self.stages.len() == 1 { 4 } else { 4 * stage.hello.model.hidden_dim };
            let fits = if logits > room { 0 } else { room / width };
            fits.min(limits.max_seq)
        };
        self.stages.iter().map(positions).min().unwrap_or(1).max(1)
    }

    /// Sends the tokens `from..to` through all stations; `want` only with the last tokens.
    async fn pass(&mut self, from: usize, to: usize, want: Option<Want>) -> Result<Option<Next>, ClientError> {
        let ids = self.history.get(from..to).unwrap_or_default();
        let seq = ids.len();
        let mut body = Vec::new();
        residual::encode_u32s(ids, &mut body);
        let mut body = Bytes::from(body);
        let count = self.stages.len();
        for (index, stage) in self.stages.iter_mut().enumerate() {
            let (first, last) = (index == 0, index + 1 == count);
            let hello = &stage.hello;
            let meta = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("session", &self.session)
                    .unsigned("pos", from as u64)
                    .unsigned("boundary", u64::from(hello.layers[0]))
                    .string("config_fp", &hello.model.config_fp);
                if first {
                    meta.string("in", "ids");
                }
                match want {
                    Some(Want::Token) if last => {
                        meta.string("out", "token");
                    }
                    Some(Want::TopK(k)) if last => {
                        let k = u64::from(k).min(hello.model.vocab as u64);
                        meta.string("out", "token").string("return", "topk").unsigned("top_k", k);
                    }
                    _ => {}
                }
            };
            let reply = stage.client.request(Route::FORWARD, meta, &body).await?;
            stage.traffic.requests += 1;
            stage.traffic.positions += seq as u64;
            stage.traffic.sent += body.len() as u64;
            stage.traffic.received += reply.body.len() as u64;
            let kind = match want {
                Some(Want::Token) if last => "u32",
                Some(Want::TopK(_)) if last => "topk",
                _ => "f32",
            };
            check_reply(stage, &reply, kind, from, seq)?;
            // The last station's residual is not needed while the prompt goes on.
            if last {
                return match want {
                    None => Ok(None),
                    Some(want) => read_next(stage, &reply, want).map(Some),
                };
            }
            body = reply.body;
        }
        Ok(None)
    }
}

/// A reply must be for this hop and these positions, so that none can be taken for another's.
fn check_reply(stage: &Stage, reply: &Reply, kind: &str, pos: usize, seq: usize) -> Result<(), ClientError> {
    let bad = |what: &str, expected: String, got: String| {
        Err(stage.client.bad_reply(Route::FORWARD, format!("{what} {expected} expected, {got} came")))
    };
    let got = reply.string("body");
    if got.as_deref() != Some(kind) {
        return bad("body", kind.to_owned(), format!("{got:?}"));
    }
    for (key, expected) in [("pos", pos), ("seq", seq), ("dim", stage.hello.model.hidden_dim)] {
        let got = reply.number(key);
        if got != Some(expected as u64) {
            return bad(key, expected.to_string(), format!("{got:?}"));
        }
    }
    let bytes = 4 * seq * stage.hello.model.hidden_dim;
    if kind == "f32" && reply.body.len() != bytes {
        return bad("bytes of residual", bytes.to_string(), reply.body.len().to_string());
    }
    Ok(())
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

/// Checks that stations hold one model, all of it, in order.
fn check_mesh(stages: &[Stage]) -> Result<(), ClientError> {
    let wrong = |problem: String| Err(ClientError::Mesh { problem });
    let Some(first) = stages.first() else {
        return wrong("no station was named; add --station uds:PATH or the like".to_owned());
    };
    let mut next = 0;
    for stage in stages {
        let (address, layers) = (stage.address(), stage.hello.layers());
        if stage.hello.model.config_fp != first.hello.model.config_fp {
            let (theirs, ours) = (&stage.hello.model.name, &first.hello.model.name);
            return wrong(format!(
                "{address} serves {theirs}, {} serves {ours} (their config_fp differ); start all with the same model",
                first.address()
            ));
        }
        if layers.start != next {
            return wrong(format!(
                "{address} holds layers {}..{}, but layer {next} is next; name the stations in the order of their layers \
                 and start one for those that are missing",
                layers.start, layers.end
            ));
        }
        next = layers.end;
    }
    let n_layers = first.hello.model.n_layers;
    if next != n_layers {
        return wrong(format!(
            "layers {next}..{n_layers} are held by none of them; start a station with --layers {next}..{n_layers}"
        ));
    }
    Ok(())
}
