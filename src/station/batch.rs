//! The work of model calls: one at a time, or those of several sessions together.
//!
//! A call goes through the same steps either way: its session is opened, then locked, the model does its part, and the
//! session takes over what came of it. [`Core::run_together`] takes several calls through each step before the next, so
//! that the model gets the parts of all of them at once. Sessions are locked for as long as their calls run, which is safe
//! because the workers never run two calls of one session at once. What a call meets is its own: a fault, a cancel or a
//! panic costs no other call its answer.

use std::{
    borrow::Cow,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use super::{
    Context, Core, Station,
    coding::Coding,
    duplicates::Key,
    error::RequestError,
    layers::{Answer, Call, Operation},
    queue::{Done, Workers, caught},
    request::{Outcome, ReplyTo},
};
use crate::{
    basis::quantiser::Norms,
    model::{
        Cache, CancelToken, Head, HeadOutput, ModelError,
        batch::{ForwardPart, HeadPart},
        kept::Provenance,
        session::{SessionGuard, SessionState},
        worker::{Batched, QueueFull},
    },
    telemetry::Ticket,
};

/// A call that waits for the model.
pub(super) struct Queued {
    core: Arc<Core>,
    asked: Asked,
    responder: Responder,
}

/// What is asked.
struct Asked {
    call: Call<'static>,
    context: Context,
    cancel: CancelToken,
    span: tracing::Span,
}

/// Who gets the answer.
struct Responder {
    key: Option<Key>,
    ticket: Ticket,
    reply_to: Box<dyn ReplyTo>,
}

impl Responder {
    fn finish(self, core: &Core, asked: &Asked, result: Result<Done, RequestError>, out: Vec<u8>) {
        let _entered = asked.span.enter();
        let answer = core.answer(&asked.context, self.key, result, out);
        drop(self.ticket);
        self.reply_to.finish(answer);
    }
}

impl Batched for Queued {
    fn rows(&self) -> usize {
        self.asked.call.seq.max(1)
    }

    fn run(batch: Vec<Self>) {
        if let Some(core) = batch.first().map(|first| Arc::clone(&first.core)) {
            core.counters.batches.observe(batch.len());
            core.run_batch(batch);
        }
    }

    fn give_way(self, full: QueueFull) {
        let error = self.core.overloaded(full);
        self.responder.finish(&self.core, &self.asked, Err(error), Vec::new());
    }
}

impl Station {
    /// Hands a call to the workers.
    pub(super) fn enqueue(
        &self,
        workers: &Workers,
        call: Call<'static>,
        context: Context,
        key: Option<Key>,
        reply_to: Box<dyn ReplyTo>,
    ) -> Result<Outcome, RequestError> {
        let cancel = CancelToken::default();
        let ticket = self.core.counters.in_flight.begin(context.arrived);
        // A few bytes can ask for megabytes of logits: what is bounded is the larger of the two.
        let (session, bytes) = (call.session.clone(), call.body.len().max(call.reply_len));
        let asked = Asked { call, context, cancel: cancel.clone(), span: tracing::Span::current() };
        let responder = Responder { key, ticket, reply_to };
        let queued = Queued { core: Arc::clone(&self.core), asked, responder };
        let submitted = workers.submit_batched(context.asker, session, bytes, queued);
        submitted.map_err(|full| self.core.overloaded(full))?;
        Ok(Outcome::Queued(cancel))
    }
}

/// A call that is being worked on.
struct Task<'a> {
    call: &'a Call<'a>,
    context: &'a Context,
    cancel: &'a CancelToken,
    started: Instant,
    lift: Duration,
}

impl<'a> Task<'a> {
    fn new(call: &'a Call<'a>, context: &'a Context, cancel: &'a CancelToken) -> Self {
        Self { call, context, cancel, started: Instant::now(), lift: Duration::ZERO }
    }
}

/// What came of a call: an answer, and the position of its first residual; `None` for a stale copy that gets none.
type Made = Option<(Option<usize>, Answer)>;

/// What a call still needs, once its session's turn has come.
enum Step<'a> {
    /// Nothing of the model.
    Done(Made),
    Head(Cow<'a, [f32]>, Head),
    Forward(Forward<'a>),
}

/// What goes through the layers.
struct Forward<'a> {
    memory: Memory<'a>,
    /// Positions before it.
    begin: usize,
    input: Vec<f32>,
    /// What is wanted of the last position in place of residuals.
    head: Option<Head>,
}

/// Where a sequence is remembered.
enum Memory<'a> {
    Session(&'a SessionGuard, MutexGuard<'a, SessionState>),
    /// That of a request without a session goes with its answer.
    Own(Box<dyn Cache>),
}

impl Memory<'_> {
    fn cache(&mut self) -> &mut dyn Cache {
        match self {
            Self::Session(_, state) => state.cache.as_mut(),
            Self::Own(cache) => cache.as_mut(),
        }
    }

    fn truncate(&mut self, len: usize) {
        match self {
            Self::Session(_, state) => state.truncate(len),
            Self::Own(cache) => cache.truncate(len),
        }
    }
}

/// Residuals behind the layers, and what the head made of the last one if it was asked.
type Through = (Vec<f32>, Option<HeadOutput>);

impl Core {
    /// Does the work of one call and appends the reply to `out`.
    pub(super) fn run(
        &self,
        call: &Call<'_>,
        context: &Context,
        cancel: &CancelToken,
        out: &mut Vec<u8>,
    ) -> Result<Done, RequestError> {
        let mut task = Task::new(call, context, cancel);
        let guard = self.open(&task)?;
        let made = match self.begin(&mut task, guard.as_ref())? {
            Step::Done(made) => made,
            Step::Head(residuals, head) => Some((call.pos, Answer::Head(self.apply_head(&residuals, head, cancel)?))),
            Step::Forward(mut forward) => {
                let through = caught(|| {
                    let output = self.apply_layers(&mut forward, cancel)?;
                    let head = forward.head.map(|head| self.apply_head(self.tail(&output), head, cancel));
                    Ok((output, head.transpose()?))
                });
                Some(self.end_forward(&task, forward, through)?)
            }
        };
        self.conclude(&task, made, out)
    }

    /// Does the work of the calls that a worker took together, and answers each.
    fn run_batch(&self, batch: Vec<Queued>) {
        let (asked, mut responders): (Vec<_>, Vec<_>) =
            batch.into_iter().map(|queued| (queued.asked, Some(queued.responder))).unzip();
        let mut answer = |index: usize, result, out| {
            let responder = responders.get_mut(index).and_then(Option::take);
            if let (Some(asked), Some(responder)) = (asked.get(index), responder) {
                responder.finish(self, asked, result, out);
            }
        };
        let is_alone = asked.len() < 2;
        let crowded = if is_alone { (0..asked.len()).collect() } else { self.run_together(&asked, &mut answer) };
        for index in crowded {
            let Some(Asked { call, context, cancel, span }) = asked.get(index) else { continue };
            let mut out = Vec::new();
            let result = span.in_scope(|| caught(|| self.run(call, context, cancel, &mut out)));
            answer(index, result, out);
        }
    }

    /// Takes several calls through the model at once. Returns those for whose sessions there was no room beside the others:
    /// each may find it once these are done.
    fn run_together(
        &self,
        asked: &[Asked],
        answer: &mut impl FnMut(usize, Result<Done, RequestError>, Vec<u8>),
    ) -> Vec<usize> {
        let mut tasks: Vec<Task<'_>> =
            asked.iter().map(|asked| Task::new(&asked.call, &asked.context, &asked.cancel)).collect();
        let mut conclude = |index: usize, task: &Task<'_>, made: Result<Made, RequestError>| {
            let mut out = Vec::new();
            let result = made.and_then(|made| caught(|| self.conclude(task, made, &mut out)));
            answer(index, result, out);
        };
        // Declared before what borrows from them: each is unlocked before it is let go.
        let opened: Vec<_> = tasks.iter().map(|task| caught(|| self.open(task))).collect();
        let (guards, refused): (Vec<_>, Vec<_>) = opened
            .into_iter()
            .map(|opened| match opened {
                Ok(guard) => (guard, None),
                Err(error) => (None, Some(error)),
            })
            .unzip();
        let (mut crowded, mut heads, mut forwards) = (Vec::new(), Vec::new(), Vec::new());
        for (index, ((task, guard), refused)) in tasks.iter_mut().zip(&guards).zip(refused).enumerate() {
            let step = refused.map_or_else(|| caught(|| self.begin(task, guard.as_ref())), Err);
            match step {
                Ok(Step::Forward(forward)) => forwards.push((index, forward)),
                Ok(Step::Head(residuals, head)) => heads.push((index, residuals, head)),
                Ok(Step::Done(made)) => conclude(index, task, Ok(made)),
                Err(RequestError::NoCapacity { .. }) => crowded.push(index),
                Err(error) => conclude(index, task, Err(error)),
            }
        }
        let tasks = &*tasks;
        let outputs = self.layers_together(&mut forwards, tasks);
        let last_rows = forwards
            .iter()
            .zip(&outputs)
            .filter_map(|((index, forward), output)| Some((*index, self.tail(output.as_ref().ok()?), forward.head?)));
        let head_only = heads.iter().map(|(index, residuals, head)| (*index, &**residuals, *head));
        let parts: Vec<HeadPart<'_>> = head_only
            .chain(last_rows)
            .map(|(index, residuals, want)| HeadPart { residuals, want, cancel: tasks[index].cancel })
            .collect();
        let mut made = self.heads_together(&parts).into_iter();
        // In the order of `parts`.
        let mut next = || made.next().unwrap_or(Err(RequestError::Panicked));
        for (index, ..) in &heads {
            let task = &tasks[*index];
            conclude(*index, task, next().map(|output| Some((task.call.pos, Answer::Head(output)))));
        }
        for ((index, forward), output) in forwards.into_iter().zip(outputs) {
            let through = output.and_then(|output| {
                let head = forward.head.map(|_| next()).transpose()?;
                Ok((output, head))
            });
            let task = &tasks[index];
            conclude(index, task, self.end_forward(task, forward, through).map(Some));
        }
        crowded
    }

    /// Residuals behind the layers, of each.
    fn layers_together(
        &self,
        forwards: &mut [(usize, Forward<'_>)],
        tasks: &[Task<'_>],
    ) -> Vec<Result<Vec<f32>, RequestError>> {
        let count = forwards.len();
        if count > 1 {
            let parts = forwards.iter_mut().map(|(index, forward)| {
                let Forward { memory, input, .. } = forward;
                ForwardPart { cache: memory.cache(), residuals: input, cancel: tasks[*index].cancel }
            });
            let results = catch_unwind(AssertUnwindSafe(|| self.model.forward_batch(parts.collect())));
            if let Ok(Ok(results)) = results
                && results.len() == count
            {
                return results.into_iter().map(|result| self.output(result)).collect();
            }
        }
        // One, or a batch that failed as a whole: whose fault it is shows when each is alone.
        let alone = |(index, forward): &mut (usize, Forward<'_>)| {
            forward.memory.truncate(forward.begin);
            caught(|| self.apply_layers(forward, tasks[*index].cancel))
        };
        forwards.iter_mut().map(alone).collect()
    }

    /// What the head makes of each.
    fn heads_together(&self, parts: &[HeadPart<'_>]) -> Vec<Result<HeadOutput, RequestError>> {
        if parts.len() > 1
            && let Ok(Ok(results)) = catch_unwind(AssertUnwindSafe(|| self.model.head_batch(parts)))
            && results.len() == parts.len()
        {
            return results.into_iter().map(|result| result.map_err(|error| self.model_error(error))).collect();
        }
        let alone = |part: &HeadPart<'_>| caught(|| self.apply_head(part.residuals, part.want, part.cancel));
        parts.iter().map(alone).collect()
    }

    fn apply_layers(&self, forward: &mut Forward<'_>, cancel: &CancelToken) -> Result<Vec<f32>, RequestError> {
        let input = std::mem::take(&mut forward.input);
        self.output(self.model.forward(forward.memory.cache(), input, cancel))
    }

    fn output(&self, result: Result<Vec<f32>, ModelError>) -> Result<Vec<f32>, RequestError> {
        self.checked(result.map_err(|error| self.model_error(error))?)
    }

    fn apply_head(&self, residuals: &[f32], head: Head, cancel: &CancelToken) -> Result<HeadOutput, RequestError> {
        self.model.head(residuals, head, cancel).map_err(|error| self.model_error(error))
    }

    /// The residual of the last position.
    fn tail<'r>(&self, residuals: &'r [f32]) -> &'r [f32] {
        &residuals[residuals.len().saturating_sub(self.model.info().hidden_dim)..]
    }

    /// Takes the session of a call into use, if it has one.
    fn open(&self, task: &Task<'_>) -> Result<Option<SessionGuard>, RequestError> {
        // Before anything else: what a cancelled request would have met is not for its sender to hear any more.
        if task.cancel.is_cancelled() {
            return Err(RequestError::Cancelled);
        }
        let (Operation::Forward { .. }, Some(name)) = (task.call.operation, &task.call.session) else {
            return Ok(None);
        };
        let pos = task.call.pos;
        let opened = self.sessions.open(name, pos, Instant::now(), || self.model.new_cache());
        opened.map(Some).map_err(|refused| self.refused(refused, pos.unwrap_or(0)))
    }

    /// What a call needs of the model. Its session is locked from here on, and holds what is before the request.
    fn begin<'a>(&self, task: &mut Task<'a>, guard: Option<&'a SessionGuard>) -> Result<Step<'a>, RequestError> {
        let Task { call, context, cancel, .. } = *task;
        let head = match call.operation {
            Operation::Reset => {
                let by = context.address.map(|address| (address, context.sequence));
                if !self.sessions.reset(call.session.as_deref().unwrap_or_default(), by) {
                    self.counters.dropped.stale.add_one();
                    return Ok(Step::Done(None));
                }
                return Ok(Step::Done(Some((None, Answer::Nothing))));
            }
            Operation::Embed => {
                call.check_time(cancel)?;
                return Ok(Step::Done(Some((
                    call.pos,
                    call.answer(self.embed(&call.body)?, None, &mut Norms::default())?,
                ))));
            }
            Operation::Head(head) => {
                let residuals = call.residuals(&mut task.lift)?;
                call.check_time(cancel)?;
                return Ok(Step::Head(residuals, head));
            }
            Operation::Forward { head, .. } => head,
        };
        let input = |lifted: Option<Vec<f32>>| lifted.map_or_else(|| self.embed(&call.body), Ok);
        let Some(guard) = guard else {
            let lifted = call.finite_residuals(&mut task.lift)?;
            call.check_time(cancel)?;
            let (input, memory) = (input(lifted)?, Memory::Own(self.model.new_cache()));
            return Ok(Step::Forward(Forward { memory, begin: 0, input, head }));
        };
        let mut state = guard.lock();
        if let Some(address) = context.address
            && state.is_stale(address, context.sequence)
        {
            self.counters.dropped.stale.add_one();
            return Ok(Step::Done(None));
        }
        let len = state.cache.len();
        let begin = call.pos.unwrap_or(len);
        if begin > len {
            return Err(RequestError::Position { expected: len, got: begin });
        }
        self.check_context(begin, call.seq)?;
        let lifted = call.finite_residuals(&mut task.lift)?;
        let growth = (begin + call.seq).saturating_sub(len).saturating_mul(self.model.cache_bytes_per_position());
        self.sessions.reserve(guard, growth).map_err(|refused| self.refused(refused, begin))?;
        let input = call.check_time(cancel).and_then(|()| {
            state.truncate(begin);
            caught(|| input(lifted))
        });
        match input {
            Ok(input) => Ok(Step::Forward(Forward { memory: Memory::Session(guard, state), begin, input, head })),
            Err(error) => {
                self.sessions.settle(guard, state.bytes());
                Err(error)
            }
        }
    }

    /// The answer to a request for the layers, and its position. A session holds the new positions only if there is an
    /// answer, so that a failed request can be repeated.
    fn end_forward(
        &self,
        task: &Task<'_>,
        forward: Forward<'_>,
        through: Result<Through, RequestError>,
    ) -> Result<(Option<usize>, Answer), RequestError> {
        let Task { call, context, .. } = *task;
        let Forward { mut memory, begin, .. } = forward;
        let is_kept = matches!(memory, Memory::Session(..));
        let mut norms = match &mut memory {
            Memory::Session(_, state) => std::mem::take(&mut state.kept.norms),
            Memory::Own(_) => Norms::default(),
        };
        let mut tail = Vec::new();
        let answer = through.and_then(|(output, head)| {
            // A session keeps it; else nobody reads it.
            if is_kept {
                tail.extend_from_slice(self.tail(&output));
            }
            match head {
                Some(head) => Ok(Answer::Head(head)),
                None => caught(|| call.answer(output, Some(begin), &mut norms)),
            }
        });
        if let Memory::Session(guard, mut state) = memory {
            if answer.is_ok() {
                let by = context.address.map(|address| (address, context.sequence));
                if let Some((address, sequence)) = by {
                    state.changed_by(address, sequence);
                }
                let provenance = call.lift.as_ref().map_or(Provenance::Raw, Coding::provenance);
                state.kept.note(begin, call.seq, &tail, provenance, by);
                state.kept.norms = norms;
            } else {
                state.kept.norms = norms;
                state.truncate(begin);
            }
            self.sessions.settle(guard, state.bytes());
        }
        answer.map(|answer| (Some(begin), answer))
    }

    /// Appends the reply to `out`.
    fn conclude(&self, task: &Task<'_>, made: Made, out: &mut Vec<u8>) -> Result<Done, RequestError> {
        let Task { call, context, started, lift, .. } = *task;
        let Some((pos, answer)) = made else { return Ok(Done::Stale) };
        let queue = started.saturating_duration_since(context.arrived);
        let compute = started.elapsed().saturating_sub(lift);
        self.write_reply(call, context, pos, [queue, lift, compute], &answer, out)?;
        self.note_work(call, [queue, lift, compute], &answer);
        Ok(Done::Replied)
    }
}
