//! The model routes EMBED, FORWARD, LM_HEAD, their `_PCA` forms, and RESET: checks first, then the work, inline or on a worker.
//!
//! The order of the checks is part of the protocol: sizes, then what the body is (hash, boundary, configuration), then
//! `pos`, then finite numbers, then capacity, then the deadline. What depends on the session is checked when its turn has
//! come, since requests of one session run in the order in which they arrived.

use std::{
    borrow::Cow,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use aeon_proto::{
    meta::{Input, Output, RequestMeta, Return},
    payload::FrameWriter,
    pcar::PcarBody,
    residual,
    route::Route,
};

use super::{
    Context, Core, Station,
    duplicates::Key,
    error::RequestError,
    hello::finish,
    pca::Projection,
    queue::{Done, Place},
};
use crate::{
    model::{
        Cache, CancelToken, Head, HeadOutput,
        kept::Provenance,
        session::Refused,
        worker::{Size, WorkerPool},
    },
    station::request::{Carrier, Outcome, ReplyTo, Request},
    telemetry::{Counters, traffic::Direction},
};

/// More than the header and the meta of any success of these routes take: 12 bytes, 8 members with numbers of at most 20
/// digits, 24 bytes of `fp48`, 100 of `timing`.
const REPLY_OVERHEAD: usize = 320;
/// Work of more positions is long: a prompt, not a step. It takes tens of times what a step does.
const LONG_POSITIONS: usize = 64;

/// What is to be done with the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Embed,
    Forward { ids: bool, head: Option<Head> },
    Head(Head),
    Reset,
}

/// A request that passed every check that needs no session.
#[derive(Debug)]
pub(super) struct Call<'a> {
    operation: Operation,
    body: Cow<'a, [u8]>,
    /// How the body is lifted, if it holds components.
    lift: Option<Projection>,
    /// How the answer is compressed, if the client accepts that.
    compress: Option<Projection>,
    seq: usize,
    /// Bytes of the body that a success will have.
    reply_len: usize,
    session: Option<Arc<str>>,
    pos: Option<usize>,
    deadline: Option<(Instant, u64)>,
    timing: bool,
    fp48: bool,
}

impl Core {
    /// Checks a request as far as it can be checked without its session.
    pub(super) fn prepare<'a>(
        &self,
        route: Route,
        meta: &RequestMeta<'_>,
        body: &'a [u8],
        session: Option<Arc<str>>,
        request: &Request<'_>,
        context: &Context,
    ) -> Result<Call<'a>, RequestError> {
        let info = self.model.info();
        let head = || self.head(meta);
        let operation = match route {
            Route::EMBED => Operation::Embed,
            Route::LM_HEAD | Route::LM_HEAD_PCA => Operation::Head(head()?),
            Route::RESET if session.is_none() => return Err(RequestError::SessionMissing),
            Route::RESET => Operation::Reset,
            _ => Operation::Forward {
                ids: meta.input == Input::Ids && route == Route::FORWARD,
                head: if meta.output == Output::Token { Some(head()?) } else { None },
            },
        };
        let not_here =
            |part| RequestError::NotHere { part, lo: info.layers.start, hi: info.layers.end, n_layers: info.n_layers };
        let (needs_embedding, needs_head) = match operation {
            Operation::Embed => (true, false),
            Operation::Head(_) => (false, true),
            Operation::Forward { ids, head } => (ids, head.is_some()),
            Operation::Reset => (false, false),
        };
        if needs_embedding && !info.has_embedding() {
            return Err(not_here("embedding"));
        }
        if needs_head && !info.has_head() {
            return Err(not_here("head"));
        }
        let is_pca = matches!(route, Route::FORWARD_PCA | Route::LM_HEAD_PCA);
        if is_pca || operation == Operation::Reset {
            check_fp48(meta, body)?;
        }
        let (lift, seq) = match operation {
            Operation::Reset => (None, 0),
            _ if is_pca => {
                let (projection, seq) = self.check_pcar(body, self.boundary_of(operation))?;
                (Some(projection), seq)
            }
            _ => (None, self.check_body(body, needs_embedding)?),
        };
        let compress = match operation {
            Operation::Embed => self.choose_kind(meta, None, 0)?,
            Operation::Forward { head: None, .. } => self.choose_kind(meta, lift.as_ref(), info.layers.end)?,
            Operation::Forward { head: Some(_), .. } | Operation::Head(_) | Operation::Reset => None,
        };
        let reply_len = self.check_reply(operation, seq, compress.as_ref(), context)?;
        if !is_pca {
            check_fp48(meta, body)?;
        }
        self.check_model(operation, meta)?;
        let pos = meta.pos.map(|pos| usize::try_from(pos).unwrap_or(usize::MAX));
        if let Operation::Forward { .. } = operation {
            self.check_position(pos, seq, session.as_deref(), context.carrier)?;
        }
        if let Operation::Head(_) = operation {
            check_finite(body, lift.is_some())?;
        }
        if self.draining.load(Ordering::Relaxed) && operation != Operation::Reset {
            // Its turn will not come, so what is looked at then is looked at now: a fault of the request comes first.
            if let Operation::Forward { ids: false, .. } = operation {
                check_finite(body, lift.is_some())?;
            }
            return Err(RequestError::Draining { retry_after_ms: self.retry_after_ms() });
        }
        // A deadline that lies past the end of time is none.
        let deadline = meta.deadline_ms.and_then(|ms| {
            let deadline = request.arrived.checked_add(Duration::from_millis(ms))?;
            Some((deadline, ms))
        });
        Ok(Call {
            operation,
            body: Cow::Borrowed(body),
            lift,
            compress,
            seq,
            reply_len,
            session,
            pos,
            deadline,
            timing: meta.timing,
            fp48: meta.fp48.is_some(),
        })
    }

    fn head(&self, meta: &RequestMeta<'_>) -> Result<Head, RequestError> {
        let vocab = self.model.info().vocab;
        match (meta.returns, meta.top_k) {
            (Return::Token, _) => Ok(Head::Token),
            (Return::Logits, _) => Ok(Head::Logits),
            (Return::TopK, Some(k)) if k >= 1 && k as usize <= vocab => Ok(Head::TopK(k as usize)),
            (Return::TopK, _) => Err(RequestError::TopK { vocab }),
        }
    }

    /// Checks the size of a body, and token ids against the vocabulary; returns the number of positions.
    fn check_body(&self, body: &[u8], ids: bool) -> Result<usize, RequestError> {
        let info = self.model.info();
        let len = body.len();
        if !len.is_multiple_of(4) {
            return Err(RequestError::BodyLength { len });
        }
        let width = if ids { 4 } else { 4 * info.hidden_dim };
        if !len.is_multiple_of(width) {
            return Err(RequestError::HiddenDim { len, hidden_dim: info.hidden_dim });
        }
        let seq = len / width;
        if seq == 0 {
            return Err(RequestError::NoPositions);
        }
        if seq > self.limits.max_positions {
            return Err(RequestError::TooManyPositions { seq, max: self.limits.max_positions });
        }
        if ids {
            let vocab = info.vocab;
            let (words, _) = body.as_chunks::<4>();
            let id = |word: &[u8; 4]| u32::from_le_bytes(*word);
            if let Some(index) = words.iter().position(|word| id(word) as usize >= vocab) {
                return Err(RequestError::TokenId { id: id(&words[index]), index, vocab });
            }
        }
        Ok(seq)
    }

    /// Refuses what cannot be answered; returns the bytes of the answer's body.
    fn check_reply(
        &self,
        operation: Operation,
        seq: usize,
        compress: Option<&Projection>,
        context: &Context,
    ) -> Result<usize, RequestError> {
        let info = self.model.info();
        let (rows, width) = match operation {
            Operation::Reset => (0, 0),
            Operation::Embed | Operation::Forward { head: None, .. } => {
                (seq, compress.map_or(4 * info.hidden_dim, Projection::width))
            }
            Operation::Forward { head: Some(head), .. } => (1, head_width(head, info.vocab)),
            Operation::Head(head) => (seq, head_width(head, info.vocab)),
        };
        let body_len = rows.saturating_mul(width);
        context.check_fits(body_len.saturating_add(REPLY_OVERHEAD))?;
        context.check_amplification(self, body_len)?;
        Ok(body_len)
    }

    /// The boundary at which a body of this operation enters.
    fn boundary_of(&self, operation: Operation) -> u32 {
        let info = self.model.info();
        match operation {
            Operation::Head(_) => info.n_layers,
            Operation::Embed | Operation::Forward { .. } | Operation::Reset => info.layers.start,
        }
    }

    fn check_model(&self, operation: Operation, meta: &RequestMeta<'_>) -> Result<(), RequestError> {
        let info = self.model.info();
        let expected = self.boundary_of(operation);
        if let Some(got) = meta.boundary
            && got != expected
        {
            return Err(RequestError::Boundary { expected, got });
        }
        match &meta.config_fp {
            Some(config_fp) if !config_fp.eq_ignore_ascii_case(&info.config_fp) => {
                Err(RequestError::Config { expected: info.config_fp.clone() })
            }
            _ => Ok(()),
        }
    }

    /// What can be said of `pos` before the session's turn has come.
    fn check_position(
        &self,
        pos: Option<usize>,
        seq: usize,
        session: Option<&str>,
        carrier: Carrier,
    ) -> Result<(), RequestError> {
        match (session, pos) {
            (Some(_), None) if carrier == Carrier::Udp => return Err(RequestError::PositionMissing),
            (None, Some(got)) if got > 0 => return Err(RequestError::Position { expected: 0, got }),
            _ => {}
        }
        self.check_context(pos.unwrap_or(0), seq)
    }

    fn check_context(&self, pos: usize, seq: usize) -> Result<(), RequestError> {
        let context_len = self.model.info().max_position;
        let end = pos.saturating_add(seq);
        if end > context_len { Err(RequestError::ContextTooLong { end, context_len }) } else { Ok(()) }
    }
}

fn check_fp48(meta: &RequestMeta<'_>, body: &[u8]) -> Result<(), RequestError> {
    let Some(expected) = meta.fp48 else { return Ok(()) };
    let got = fp48(body);
    if got == expected { Ok(()) } else { Err(RequestError::BodyFingerprint { expected, got }) }
}

/// Bytes of one position's answer from the head.
const fn head_width(head: Head, vocab: usize) -> usize {
    match head {
        Head::Token => 4,
        Head::TopK(k) => k.saturating_mul(8),
        Head::Logits => vocab.saturating_mul(4),
    }
}

/// Low 48 bits of XXH64 (seed 0).
fn fp48(body: &[u8]) -> u64 {
    xxhash_rust::xxh64::xxh64(body, 0) & 0xffff_ffff_ffff
}

/// What a reply's body holds.
enum Answer {
    Residuals(Vec<f32>),
    /// Residuals as a PCAR body.
    Components(Vec<u8>),
    Head(HeadOutput),
    Nothing,
}

impl Station {
    /// Runs a call at once, or hands it to the workers.
    pub(super) fn start(
        &self,
        call: Call<'_>,
        context: Context,
        key: Option<Key>,
        out: &mut Vec<u8>,
        reply_to: impl FnOnce() -> Box<dyn ReplyTo>,
    ) -> Result<Outcome, RequestError> {
        let at_once = |workers: &WorkerPool| {
            // A session that is not there yet may still be on its way through the queue.
            let unknown = |name: &Arc<str>| !self.core.sessions.contains(name) && !workers.has_work(name);
            call.operation == Operation::Reset && call.session.as_ref().is_some_and(unknown)
        };
        if self.workers.as_ref().is_none_or(at_once) {
            return match self.core.run(&call, &context, &CancelToken::default(), out)? {
                Done::Replied => Ok(Outcome::Replied),
                Done::Stale => Ok(Outcome::Silent),
            };
        }
        let call = Call { body: Cow::Owned(call.body.into_owned()), ..call };
        // A few bytes can ask for megabytes of logits: what is bounded is the larger of the two.
        let bytes = call.body.len().max(call.reply_len);
        let size = Size { bytes, is_long: call.seq > LONG_POSITIONS };
        let place = Place { session: call.session.clone(), size, context, key };
        self.perform(place, out, reply_to, move |core, cancel, out| core.run(&call, &context, cancel, out))
    }
}

impl Core {
    /// Does the work of a call and appends the reply to `out`.
    fn run(
        &self,
        call: &Call<'_>,
        context: &Context,
        cancel: &CancelToken,
        out: &mut Vec<u8>,
    ) -> Result<Done, RequestError> {
        let started = Instant::now();
        let mut lift = Duration::ZERO;
        // Before anything else: what a cancelled request would have met is not for its sender to hear any more.
        if cancel.is_cancelled() {
            return Err(RequestError::Cancelled);
        }
        let mut pos = call.pos;
        let answer = match call.operation {
            Operation::Reset => {
                let by = context.address.map(|address| (address, context.sequence));
                let name = call.session.as_deref().unwrap_or_default();
                if !self.sessions.reset(name, by) {
                    self.counters.dropped.stale.add_one();
                    return Ok(Done::Stale);
                }
                Answer::Nothing
            }
            Operation::Embed => {
                call.check_time(cancel)?;
                call.answer(self.embed(&call.body)?)?
            }
            Operation::Head(head) => {
                let residuals = call.residuals(&mut lift)?;
                call.check_time(cancel)?;
                Answer::Head(self.apply_head(&residuals, head, cancel)?)
            }
            Operation::Forward { .. } => {
                let Some((answer, begin)) = self.forward(call, context, cancel, &mut lift)? else {
                    self.counters.dropped.stale.add_one();
                    return Ok(Done::Stale);
                };
                pos = Some(begin);
                answer
            }
        };
        let queue = started.saturating_duration_since(context.arrived);
        let compute = started.elapsed().saturating_sub(lift);
        self.write_reply(call, context, pos, [queue, lift, compute], &answer, out)?;
        self.note_work(call, [queue, lift, compute], &answer);
        Ok(Done::Replied)
    }

    /// Counts work that was done.
    fn note_work(&self, call: &Call<'_>, [queue, lift, compute]: [Duration; 3], answer: &Answer) {
        let Counters { stages, traffic, .. } = &*self.counters;
        if call.operation == Operation::Reset {
            return;
        }
        stages.queue.observe(queue);
        stages.compute.observe(compute);
        let raw = call.seq.saturating_mul(4 * self.model.info().hidden_dim);
        let saved = |body: &[u8]| raw.saturating_sub(body.len()) as u64;
        if call.lift.is_some() {
            stages.lift.observe(lift);
            traffic.saved_bytes(Direction::In).add(saved(&call.body));
        }
        if let Answer::Components(body) = answer {
            traffic.saved_bytes(Direction::Out).add(saved(body));
        }
        if let Operation::Forward { .. } = call.operation {
            traffic.positions.add(call.seq as u64);
        }
    }

    fn embed(&self, body: &[u8]) -> Result<Vec<f32>, RequestError> {
        let ids = residual::decode_u32s(body).map_err(|error| RequestError::BodyLength { len: error.len })?;
        self.model.embed(&ids).map_err(|error| self.model_error(error))
    }

    fn apply_head(&self, residuals: &[f32], head: Head, cancel: &CancelToken) -> Result<HeadOutput, RequestError> {
        self.model.head(residuals, head, cancel).map_err(|error| self.model_error(error))
    }

    pub(super) fn model_error(&self, error: crate::model::ModelError) -> RequestError {
        RequestError::from_model(error, self.retry_after_ms())
    }

    /// Runs a FORWARD through the layers; returns the answer and the position of the first, or `None` for a stale copy.
    /// A session holds the new positions only if there is an answer, so that a failed request can be repeated.
    fn forward(
        &self,
        call: &Call<'_>,
        context: &Context,
        cancel: &CancelToken,
        lift: &mut Duration,
    ) -> Result<Option<(Answer, usize)>, RequestError> {
        let Some(name) = &call.session else {
            let lifted = call.finite_residuals(lift)?;
            call.check_time(cancel)?;
            let mut cache = self.model.new_cache();
            let (answer, _) = self.compute(call, lifted, cache.as_mut(), cancel)?;
            return Ok(Some((answer, 0)));
        };
        let refused = |refused, got| self.refused(refused, got);
        let guard = self
            .sessions
            .open(name, call.pos, Instant::now(), || self.model.new_cache())
            .map_err(|error| refused(error, call.pos.unwrap_or(0)))?;
        let mut state = guard.lock();
        if let Some(address) = context.address
            && state.is_stale(address, context.sequence)
        {
            return Ok(None);
        }
        let len = state.cache.len();
        let begin = call.pos.unwrap_or(len);
        if begin > len {
            return Err(RequestError::Position { expected: len, got: begin });
        }
        self.check_context(begin, call.seq)?;
        let lifted = call.finite_residuals(lift)?;
        let growth = (begin + call.seq).saturating_sub(len).saturating_mul(self.model.cache_bytes_per_position());
        self.sessions.reserve(&guard, growth).map_err(|error| refused(error, begin))?;
        let result = call.check_time(cancel).and_then(|()| {
            state.truncate(begin);
            let answer = self.compute(call, lifted, state.cache.as_mut(), cancel);
            answer.inspect_err(|_| state.truncate(begin))
        });
        if let Ok((_, tail)) = &result {
            let by = context.address.map(|address| (address, context.sequence));
            if let Some((address, sequence)) = by {
                state.changed_by(address, sequence);
            }
            let provenance = call.lift.as_ref().map_or(Provenance::Raw, |lift| Provenance::Basis(lift.basis_fp()));
            state.kept.note(begin, call.seq, tail, provenance, by);
        }
        self.sessions.settle(&guard, state.bytes());
        let (answer, _) = result?;
        Ok(Some((answer, begin)))
    }

    /// From residuals (`None`: the token ids of the body) through the layers to the answer, and to the residual of the last
    /// position.
    fn compute(
        &self,
        call: &Call<'_>,
        residuals: Option<Vec<f32>>,
        cache: &mut dyn Cache,
        cancel: &CancelToken,
    ) -> Result<(Answer, Vec<f32>), RequestError> {
        let input = residuals.map_or_else(|| self.embed(&call.body), Ok)?;
        let output = self.model.forward(cache, input, cancel).map_err(|error| self.model_error(error))?;
        let output = self.checked(output)?;
        let tail = output[output.len().saturating_sub(self.model.info().hidden_dim)..].to_vec();
        let answer = match call.operation {
            Operation::Forward { head: Some(head), .. } => Answer::Head(self.apply_head(&tail, head, cancel)?),
            _ => call.answer(output)?,
        };
        Ok((answer, tail))
    }

    /// A result with NaN or infinity is an error here and now, not at the next station.
    fn checked(&self, output: Vec<f32>) -> Result<Vec<f32>, RequestError> {
        match residual::check_finite_values(&output) {
            Ok(()) => Ok(output),
            Err(error) => Err(RequestError::ResultNonFinite { index: error.index }),
        }
    }

    fn refused(&self, refused: Refused, got: usize) -> RequestError {
        match refused {
            Refused::Position { expected } => RequestError::Position { expected, got },
            Refused::TooLarge { wanted, budget } => RequestError::SessionTooLarge { wanted, max: budget },
            Refused::Budget { wanted, budget } => {
                RequestError::NoCapacity { wanted, budget, retry_after_ms: self.retry_after_ms() }
            }
        }
    }

    fn write_reply(
        &self,
        call: &Call<'_>,
        context: &Context,
        pos: Option<usize>,
        stages: [Duration; 3],
        answer: &Answer,
        out: &mut Vec<u8>,
    ) -> Result<(), RequestError> {
        let info = self.model.info();
        let mut encoded = Vec::new();
        let (kind, body) = match answer {
            Answer::Components(body) => (Some("pcar"), body),
            Answer::Residuals(residuals) => {
                // The common case goes straight into the frame, below.
                if call.fp48 {
                    residual::encode_f32s(residuals, &mut encoded);
                }
                (Some("f32"), &encoded)
            }
            Answer::Head(output) => (Some(encode_head(output, &mut encoded)), &encoded),
            Answer::Nothing => (None, &encoded),
        };
        let mut frame = FrameWriter::new(out, context.stream_id, context.sequence, context.success);
        let mut meta = frame.meta();
        meta.unsigned("status", 200);
        if let Some(kind) = kind {
            meta.string("body", kind);
            if let Some(pos) = pos {
                meta.unsigned("pos", pos as u64);
            }
            meta.unsigned("seq", call.seq as u64)
                .unsigneds("layers", [u64::from(info.layers.start), u64::from(info.layers.end)])
                .unsigned("dim", info.hidden_dim as u64);
        }
        if call.fp48 {
            meta.string("fp48", &format!("{:012x}", fp48(body)));
        }
        if call.timing {
            let [queue, lift, compute] = stages.map(micros);
            meta.raw("timing", &format!("{{\"queue_us\":{queue},\"lift_us\":{lift},\"compute_us\":{compute}}}"));
        }
        match answer {
            Answer::Residuals(residuals) if !call.fp48 => residual::encode_f32s(residuals, frame.body()),
            _ => frame.body().extend_from_slice(body),
        }
        finish(frame)
    }
}

impl Call<'_> {
    /// The residuals of the body; `lift_time` grows by the time that lifting took.
    fn residuals(&self, lift_time: &mut Duration) -> Result<Cow<'_, [f32]>, RequestError> {
        let Some(projection) = &self.lift else { return floats(&self.body) };
        let started = Instant::now();
        let residuals = projection.lift(&self.body, self.seq)?;
        *lift_time += started.elapsed();
        Ok(Cow::Owned(residuals))
    }

    /// As [`Self::residuals`], checked to be finite before and after lifting; `None` if the body holds token ids.
    fn finite_residuals(&self, lift_time: &mut Duration) -> Result<Option<Vec<f32>>, RequestError> {
        if let Operation::Forward { ids: true, .. } = self.operation {
            return Ok(None);
        }
        check_finite(&self.body, self.lift.is_some())?;
        Ok(Some(self.residuals(lift_time)?.into_owned()))
    }

    /// Residuals in the form that the client accepts.
    fn answer(&self, residuals: Vec<f32>) -> Result<Answer, RequestError> {
        match &self.compress {
            Some(projection) => projection.compress(&residuals).map(Answer::Components),
            None => Ok(Answer::Residuals(residuals)),
        }
    }

    fn check_time(&self, cancel: &CancelToken) -> Result<(), RequestError> {
        if cancel.is_cancelled() {
            return Err(RequestError::Cancelled);
        }
        match self.deadline {
            Some((deadline, deadline_ms)) if Instant::now() >= deadline => {
                Err(RequestError::DeadlinePassed { deadline_ms })
            }
            _ => Ok(()),
        }
    }
}

fn check_finite(body: &[u8], is_pcar: bool) -> Result<(), RequestError> {
    let checked = if is_pcar { PcarBody::decode(body)?.check_finite() } else { residual::check_finite(body) };
    checked.map_err(|error| RequestError::NonFinite { index: error.index })
}

fn floats(body: &[u8]) -> Result<Cow<'_, [f32]>, RequestError> {
    residual::decode_f32s(body).map_err(|error| RequestError::BodyLength { len: error.len })
}

fn encode_head(output: &HeadOutput, body: &mut Vec<u8>) -> &'static str {
    match output {
        HeadOutput::Tokens(tokens) => {
            residual::encode_u32s(tokens, body);
            "u32"
        }
        HeadOutput::TopK { k, ids, logits } => {
            for (ids, logits) in ids.chunks(*k).zip(logits.chunks(*k)) {
                residual::encode_u32s(ids, body);
                residual::encode_f32s(logits, body);
            }
            "topk"
        }
        HeadOutput::Logits(logits) => {
            residual::encode_f32s(logits, body);
            "logits"
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
