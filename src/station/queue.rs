//! How work gets done that is too much for an IO thread: at once on inline backends, else on a worker, in its session's
//! turn, with the answer going back through [`ReplyTo`].

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use super::{
    Context, Core, Station,
    duplicates::Key,
    error::RequestError,
    request::{Outcome, ReplyTo},
};
use crate::model::{
    CancelToken,
    worker::{QueueFull, Size},
};

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
    /// What it takes of the workers.
    pub(super) size: Size,
    /// What its reply has in common with others.
    pub(super) context: Context,
    /// What tells copies of the request.
    pub(super) key: Option<Key>,
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
        let Place { session, size, context, key } = place;
        let (core, token, reply_to) = (Arc::clone(&self.core), cancel.clone(), reply_to());
        let (ticket, span) = (core.counters.in_flight.begin(context.arrived), tracing::Span::current());
        let queued = move |turn: Result<(), QueueFull>| {
            let _entered = span.enter();
            let answer = core.answer(&context, key, |core, out| match turn {
                Ok(()) => work(core, &token, out),
                Err(full) => Err(core.overloaded(full)),
            });
            drop(ticket);
            reply_to.finish(answer);
        };
        workers.submit(context.asker, session, size, queued).map_err(|full| self.core.overloaded(full))?;
        Ok(Outcome::Queued(cancel))
    }
}

impl Core {
    fn overloaded(&self, full: QueueFull) -> RequestError {
        let QueueFull { items, bytes } = full;
        RequestError::Overloaded { items, bytes, retry_after_ms: self.retry_after_ms() }
    }

    /// Does work on a worker thread; returns the reply frame, if there is one to send.
    fn answer(
        &self,
        context: &Context,
        key: Option<Key>,
        work: impl FnOnce(&Self, &mut Vec<u8>) -> Result<Done, RequestError>,
    ) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        let result = catch_unwind(AssertUnwindSafe(|| work(self, &mut out))).unwrap_or(Err(RequestError::Panicked));
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
