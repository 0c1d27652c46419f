//! How work gets done that is too much for an IO thread: at once on inline backends, else on a worker, in its session's
//! turn, with the answer going back through [`ReplyTo`].

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use super::{
    Context, Core, Station,
    batch::Queued,
    duplicates::Key,
    error::RequestError,
    request::{Outcome, ReplyTo},
};
use crate::model::{
    CancelToken,
    worker::{QueueFull, WorkerPool},
};

/// The threads that models run on.
pub(super) type Workers = WorkerPool<Queued>;

/// How work ended that did not fail.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// The reply was appended.
    Replied,
    /// A late copy of an old request: no answer.
    Stale,
}

/// Where a piece of work belongs.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// The session in whose order it runs.
    pub(super) session: Option<Arc<str>>,
    /// Bytes that it holds while it waits.
    pub(super) bytes: usize,
    /// What its reply has in common with others.
    pub(super) context: Context,
    /// What tells copies of the request.
    pub(super) key: Option<Key>,
}

/// Work whose panic is its own fault and nobody else's.
pub(super) fn caught<T>(work: impl FnOnce() -> Result<T, RequestError>) -> Result<T, RequestError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(RequestError::Panicked))
}

impl Station {
    /// Does a piece of work at once if the backend is inline, else hands it to the workers.
    pub(super) fn perform(
        &self,
        place: Place,
        out: &mut Vec<u8>,
        reply_to: impl FnOnce() -> Box<dyn ReplyTo>,
        work: impl FnOnce(&Core, &CancelToken, &mut Vec<u8>) -> Result<Done, RequestError> + Send + 'static,
    ) -> Result<Outcome, RequestError> {
        let cancel = CancelToken::default();
        let Some(workers) = &self.workers else {
            return match work(&self.core, &cancel, out)? {
                Done::Replied => Ok(Outcome::Replied),
                Done::Stale => Ok(Outcome::Silent),
            };
        };
        let Place { session, bytes, context, key } = place;
        let (core, token, reply_to) = (Arc::clone(&self.core), cancel.clone(), reply_to());
        let (ticket, span) = (core.counters.in_flight.begin(context.arrived), tracing::Span::current());
        let queued = move |turn: Result<(), QueueFull>| {
            let _entered = span.enter();
            let mut out = Vec::new();
            let result = turn.map_err(|full| core.overloaded(full));
            let result = result.and_then(|()| caught(|| work(&core, &token, &mut out)));
            let answer = core.answer(&context, key, result, out);
            drop(ticket);
            reply_to.finish(answer);
        };
        workers.submit(context.asker, session, bytes, queued).map_err(|full| self.core.overloaded(full))?;
        Ok(Outcome::Queued(cancel))
    }
}

impl Core {
    pub(super) fn overloaded(&self, full: QueueFull) -> RequestError {
        let QueueFull { items, bytes } = full;
        RequestError::Overloaded { items, bytes, retry_after_ms: self.retry_after_ms() }
    }

    /// After work on a worker thread that wrote its reply to `out`; returns the frame to send, if there is one.
    pub(super) fn answer(
        &self,
        context: &Context,
        key: Option<Key>,
        result: Result<Done, RequestError>,
        mut out: Vec<u8>,
    ) -> Option<Vec<u8>> {
        let success = matches!(result, Ok(Done::Replied));
        if let Err(error) = result {
            out.clear();
            context.write_vent(self, &error, &mut out);
            self.counters.errors.add_one();
        }
        if let Some(key) = key {
            self.duplicates.finish(key, success.then_some(&out));
        }
        let is_answered = !out.is_empty() && context.fit_reply(self, 0, &mut out);
        context.answered(self, &out);
        is_answered.then_some(out)
    }
}
