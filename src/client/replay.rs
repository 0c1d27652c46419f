//! The prefix replay caches of stations: asking one, filling one, and the coordinator's rule for a mesh.
//!
//! [`Client::replay`] and [`Client::capture_session`] are the routes of one station. [`Pipeline`] uses them when
//! [`Pipeline::use_replay`] was called: the first prompt of a session is asked for on every station at once, each of which
//! puts it into the session in the same step; prefill is skipped only if all of them did. Otherwise the prompt runs
//! through the mesh as usual and is captured on every station in the background.

use aeon_proto::{bwah, payload::MetaWriter, residual, route::Route, status::Status};
use futures_util::future::join_all;

use super::{
    connection::{Client, Reply},
    error::ClientError,
    pass::read_next,
    pipeline::{Next, Pipeline, Stage, Want},
};
use crate::replay::{
    coordinator::{Decision, decide},
    key::{Conditions, PrefixKey, mesh_fp, prefix_digest, prefix_hash},
};

/// Captures of one pipeline that may be under way at once; they are few, since only first prompts are captured.
const MAX_CAPTURES: usize = 64;

/// A prefix that a station has.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    /// The station's output residual at the last position.
    pub tail: Vec<f32>,
    /// Bytes of keys and values that the station holds for it.
    pub slab_bytes: u64,
    /// Whether the prefix was put into the session that was named.
    pub spliced: bool,
    /// What it was made from: `raw`, or a basis.
    pub provenance: String,
    /// Bytes of the envelope.
    pub envelope_len: usize,
}

/// Why captures and hits of a mesh were worth it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayStats {
    /// Prompts whose prefill was skipped.
    pub skipped: u64,
    /// Prompts that ran through the mesh.
    pub prefilled: u64,
    /// Captures sent in the background.
    pub captures: u64,
    /// Prompts that one station that had lost them got back from its cache.
    pub restored: u64,
}

impl Client {
    /// Asks for a prefix, and has it put into `session` if one is named; `None` is a miss.
    ///
    /// Cancel safe as [`Client::request`].
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::BadReply`] for a hit that is not whole.
    pub async fn replay(
        &self,
        key: &PrefixKey,
        conditions: &Conditions,
        session: Option<&str>,
    ) -> Result<Option<Hit>, ClientError> {
        let reply = self.request(Route::AMPLITUHEDRON_REPLAY, meta(key, conditions, session), &[]).await?;
        if reply.status == Status::NO_CONTENT {
            return Ok(None);
        }
        let bad = |problem: String| self.bad_reply(Route::AMPLITUHEDRON_REPLAY, problem);
        let decoded = bwah::decode_amplituhedron_reply(&reply.body).map_err(|error| bad(error.to_string()))?;
        let tail =
            decoded.tail.filter(|tail| !tail.is_empty()).ok_or_else(|| bad("a hit without a tail".to_owned()))?;
        residual::check_finite_values(&tail).map_err(|error| bad(format!("tail: {error}")))?;
        for (name, expected) in [("prefix_len", u64::from(key.prefix_len)), ("dim", tail.len() as u64)] {
            let got = reply.number(name);
            if got != Some(expected) {
                return Err(bad(format!("{name} {expected} expected, {got:?} came")));
            }
        }
        let spliced = reply.boolean("spliced").unwrap_or(false);
        if session.is_some() && !spliced {
            return Err(bad("the station did not put the prefix into the session".to_owned()));
        }
        Ok(Some(Hit {
            tail,
            slab_bytes: reply.number("slab_bytes").unwrap_or(0),
            spliced,
            provenance: reply.string("provenance").unwrap_or_default(),
            envelope_len: reply.body.len(),
        }))
    }

    /// Has a station capture the first positions of a session.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn capture_session(
        &self,
        key: &PrefixKey,
        conditions: &Conditions,
        session: &str,
    ) -> Result<Reply, ClientError> {
        self.request(Route::AMPLITUHEDRON_CAPTURE, meta(key, conditions, Some(session)), &[]).await
    }

    /// Gives a station an envelope to keep; the key is in it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn capture_envelope(&self, envelope: &[u8], conditions: &Conditions) -> Result<Reply, ClientError> {
        let meta = |meta: &mut MetaWriter<'_, '_>| conditions.write(meta);
        self.request(Route::AMPLITUHEDRON_CAPTURE, meta, envelope).await
    }
}

fn meta(key: &PrefixKey, conditions: &Conditions, session: Option<&str>) -> impl Fn(&mut MetaWriter<'_, '_>) {
    move |meta| {
        key.write(meta);
        conditions.write(meta);
        if let Some(session) = session {
            meta.string("session", session);
        }
    }
}

/// A prompt as all stations of a mesh know it.
#[derive(Debug, Clone)]
struct Prompt {
    /// One key a station: they differ in the layers.
    keys: Vec<PrefixKey>,
    conditions: Conditions,
}

impl Pipeline {
    /// From now on the first prompt of each session is looked for in the stations' replay caches, and captured if it is
    /// not in all of them.
    pub fn use_replay(&mut self) {
        self.replay.enabled = true;
    }

    /// How often replay helped so far.
    #[must_use]
    pub fn replay_stats(&self) -> ReplayStats {
        self.replay.stats
    }

    /// Waits until the captures that are under way have ended, so that the session may be dropped. Cancel safe.
    pub async fn captured(&mut self) {
        while self.replay.captures.join_next().await.is_some() {}
    }

    /// Ends captures before the positions that they are about are replaced: one that came late would keep the new
    /// positions under the old key.
    pub(super) async fn end_captures(&mut self) {
        self.replay.captures.shutdown().await;
        self.replay.captured_len = 0;
    }

    fn prompt(&self, ids: &[u32]) -> Option<Prompt> {
        let prefix_len = u32::try_from(ids.len()).ok().filter(|len| *len > 0)?;
        let prefix_hash = prefix_hash(ids);
        let key = |stage: &Stage| {
            let layers = stage.hello.layers();
            let (layer_lo, layer_hi) = (u16::try_from(layers.start).ok()?, u16::try_from(layers.end).ok()?);
            Some(PrefixKey { prefix_hash, prefix_len, layer_lo, layer_hi })
        };
        let losses: Vec<Option<String>> = (0..self.stages().len()).map(|index| self.loss_behind(index)).collect();
        let made_by = self.stages().iter().zip(&losses);
        let made_by = made_by.flat_map(|(stage, loss)| [Some(stage.hello.model.layers_fp.as_str()), loss.as_deref()]);
        Some(Prompt {
            keys: self.stages().iter().map(key).collect::<Option<_>>()?,
            conditions: Conditions {
                prefix_digest: Some(prefix_digest(ids)),
                config_fp: Some(self.model().config_fp.clone()),
                mesh_fp: Some(mesh_fp(made_by.flatten())),
                // Where all residuals travel raw, what came through a basis would give other tokens.
                exact: losses.iter().all(Option::is_none),
                basis_fp: None,
            },
        })
    }

    /// What comes after the first prompt of the session: from the replay caches, else by prefill.
    pub(super) async fn begin(&mut self, want: Want) -> Result<Next, ClientError> {
        let Some(prompt) = self.prompt(&self.history) else { return self.run(want).await };
        self.replay.prompt_len = self.history.len();
        if let Decision::Skip { last } = decide(self.ask(&prompt).await) {
            match self.next_after(&last.tail, want).await {
                Ok(next) => {
                    self.replay.stats.skipped += 1;
                    let len = self.history.len();
                    self.stages.iter_mut().for_each(|stage| stage.held = len);
                    return Ok(next);
                }
                // The prefix is in the sessions, but running the prompt again is right in any case.
                Err(error) => tracing::warn!(%error, "the tail of a replay gave no token; running the prompt"),
            }
        }
        let next = self.run(want).await?;
        self.replay.stats.prefilled += 1;
        self.capture(&prompt);
        Ok(next)
    }

    /// Asks all stations at once. What is not a whole hit of this model is a miss.
    async fn ask(&self, prompt: &Prompt) -> Vec<Option<Hit>> {
        let ask = |(stage, key)| async move {
            let stage: &Stage = stage;
            match stage.client.replay(key, &prompt.conditions, Some(&stage.session)).await {
                Ok(hit) => hit.filter(|hit| hit.tail.len() == stage.hello.model.hidden_dim),
                Err(error) => {
                    tracing::debug!(%error, "no replay");
                    None
                }
            }
        };
        join_all(self.stages().iter().zip(&prompt.keys).map(ask)).await
    }

    /// Has a station that lost its session, or took over from another, put the first prompt back from its own cache.
    /// Returns how many positions it then holds.
    pub(super) async fn restore(&mut self, index: usize) -> Option<usize> {
        let len = self.replay.prompt_len;
        // One position must be left to run, or nothing would come out.
        if !self.replay.enabled || len >= self.history.len() {
            return None;
        }
        let prompt = self.prompt(self.history.get(..len)?)?;
        let (stage, key) = (self.stages.get(index)?, prompt.keys.get(index)?);
        match stage.client.replay(key, &prompt.conditions, Some(&stage.session)).await {
            Ok(hit) => {
                hit?;
                self.replay.stats.restored += 1;
                Some(len)
            }
            Err(error) => {
                tracing::debug!(%error, "no replay");
                None
            }
        }
    }

    /// Applies the last station's head to its output at the last position of the prompt.
    async fn next_after(&self, tail: &[f32], want: Want) -> Result<Next, ClientError> {
        let Some(stage) = self.stages().last() else { return Err(ClientError::Mesh { problem: "empty".to_owned() }) };
        let mut body = Vec::new();
        residual::encode_f32s(tail, &mut body);
        let model = &stage.hello.model;
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.unsigned("boundary", u64::from(model.n_layers)).string("config_fp", &model.config_fp);
            if let Want::TopK(k) = want {
                meta.string("return", "topk").unsigned("top_k", u64::from(k).min(model.vocab as u64));
            }
        };
        let reply = stage.client.request(Route::LM_HEAD, meta, &body).await?;
        read_next(stage, &reply, want)
    }

    /// Captures the prompt on every station, without keeping anyone waiting. A failure costs the next one a prefill.
    fn capture(&mut self, prompt: &Prompt) {
        while self.replay.captures.try_join_next().is_some() {}
        if self.replay.captures.len() >= MAX_CAPTURES {
            return;
        }
        self.replay.captured_len = self.history.len();
        self.replay.stats.captures += self.stages.len() as u64;
        for (stage, key) in self.stages.iter().zip(&prompt.keys) {
            let (client, session) = (stage.client.clone(), stage.session.clone());
            let (key, conditions) = (*key, prompt.conditions.clone());
            self.replay.captures.spawn(async move {
                if let Err(error) = client.capture_session(&key, &conditions, &session).await {
                    tracing::info!(%error, "prompt was not captured");
                }
            });
        }
    }
}

/// What a pipeline keeps for replay.
#[derive(Debug, Default)]
pub(super) struct Replaying {
    enabled: bool,
    stats: ReplayStats,
    captures: tokio::task::JoinSet<()>,
    /// Positions that the captures under way are about.
    captured_len: usize,
    /// Positions of the session's first prompt.
    prompt_len: usize,
}

impl Replaying {
    /// Whether captures may be under way that new tokens at `start` would be in the way of.
    pub(super) const fn is_about(&self, start: usize) -> bool {
        start < self.captured_len
    }

    pub(super) const fn is_enabled(&self) -> bool {
        self.enabled
    }
}
