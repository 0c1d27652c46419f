//! REPLAY and CAPTURE: the frame routes of the prefix replay cache. Spec: `proto/SPEC.md`, "Prefix replay".
//!
//! A lookup is answered at once. What touches a session (a replay that is spliced into it, a capture of what it holds) runs
//! in the session's lane like FORWARD, and obeys the same order, budget and rules for copies over UDP.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use aeon_proto::{
    bwah::{CaptureView, decode_amplituhedron_capture, try_encode_amplituhedron_reply},
    json::Object,
    meta::RequestMeta,
    payload::FrameWriter,
    route::Route,
};

use super::{
    Context, Core, Station,
    duplicates::Key,
    error::RequestError,
    hello::finish,
    queue::{Done, Place},
    request::{Carrier, Outcome, ReplyTo},
};
use crate::{
    model::{
        CancelToken,
        kept::{Provenance, Tail},
        session::Refused,
    },
    replay::{
        cache::{Capture, Entry},
        key::{Conditions, PrefixKey},
    },
    telemetry::{
        Counters,
        faults::fault,
        traffic::{BodyKind, Direction, RouteLabel, StatusLabel},
    },
};

/// Captures up to this size are decoded on the thread that received them: some tens of microseconds.
const INLINE_LEN: usize = 128 << 10;
/// More than header and meta of a hit take: 12 bytes, 8 members with numbers of at most 20 digits.
const REPLY_OVERHEAD: usize = 256;

/// A request of these routes, as far as both have the same.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prefix<'a> {
    pub(super) meta: &'a RequestMeta<'a>,
    pub(super) text: &'a str,
    pub(super) context: Context,
    pub(super) key: Option<Key>,
}

impl Prefix<'_> {
    fn place(&self, session: Option<Arc<str>>, bytes: usize) -> Place {
        Place { session, size: bytes.into(), context: self.context, key: self.key }
    }

    fn deadline(&self) -> Option<(Instant, u64)> {
        let ms = self.meta.deadline_ms?;
        Some((self.context.arrived.checked_add(Duration::from_millis(ms))?, ms))
    }
}

fn check_time(deadline: Option<(Instant, u64)>, cancel: &CancelToken) -> Result<(), RequestError> {
    match deadline {
        _ if cancel.is_cancelled() => Err(RequestError::Cancelled),
        Some((deadline, deadline_ms)) if Instant::now() >= deadline => {
            Err(RequestError::DeadlinePassed { deadline_ms })
        }
        _ => Ok(()),
    }
}

impl Station {
    /// REPLAY: the tail of a prefix, and with a session the prefix itself into that.
    pub(super) fn replay(
        &self,
        request: Prefix<'_>,
        out: &mut Vec<u8>,
        reply_to: impl FnOnce() -> Box<dyn ReplyTo>,
    ) -> Result<Outcome, RequestError> {
        let core = &*self.core;
        let object = Object::parse(request.text).map_err(aeon_proto::meta::Error::from)?;
        let key = PrefixKey::read(&object)?;
        let conditions = Conditions::read(&object, request.meta.config_fp.as_deref())?;
        core.check_draining()?;
        check_time(request.deadline(), &CancelToken::default())?;
        let session: Option<Arc<str>> = request.meta.session.as_deref().map(Arc::from);
        if session.is_some() && core.replay.shape().slab_per_position.is_none() {
            return Err(RequestError::CacheNotPortable);
        }
        let context = request.context;
        let Some(entry) = core.replay.find(&key, &conditions, session.is_some()) else {
            let mut frame = FrameWriter::new(out, context.stream_id, context.sequence, context.success);
            frame.meta().unsigned("status", 204);
            finish(frame)?;
            return Ok(Outcome::Replied);
        };
        let tail_len = size_of_val(entry.capture.tail.as_slice());
        context.check_fits(tail_len.saturating_add(REPLY_OVERHEAD))?;
        context.check_amplification(core, tail_len)?;
        let Some(name) = session else {
            core.write_hit(&context, &key, &entry, false, out)?;
            return Ok(Outcome::Replied);
        };
        let deadline = request.deadline();
        self.perform(request.place(Some(Arc::clone(&name)), 0), out, reply_to, move |core, cancel, out| {
            check_time(deadline, cancel)?;
            match core.splice(&name, &key, &entry, &context)? {
                Done::Stale => Ok(Done::Stale),
                Done::Replied => core.write_hit(&context, &key, &entry, true, out).map(|()| Done::Replied),
            }
        })
    }

    /// CAPTURE: an envelope, or what a session of this station holds.
    pub(super) fn capture(
        &self,
        request: Prefix<'_>,
        body: &[u8],
        out: &mut Vec<u8>,
        reply_to: impl FnOnce() -> Box<dyn ReplyTo>,
    ) -> Result<Outcome, RequestError> {
        let core = &*self.core;
        let context = request.context;
        let deadline = request.deadline();
        let object = Object::parse(request.text).map_err(aeon_proto::meta::Error::from)?;
        let conditions = Conditions::read(&object, request.meta.config_fp.as_deref())?;
        match (&request.meta.session, body.is_empty()) {
            (None, false) => {
                let envelope = CaptureView::parse(body).map_err(RequestError::Envelope)?;
                if object.get("prefix_hash").is_some() && PrefixKey::read(&object)? != key_of(&envelope) {
                    return Err(RequestError::CaptureKey);
                }
                core.check_capture(&conditions)?;
                if body.len() <= INLINE_LEN {
                    core.capture_envelope(body, conditions)?;
                    core.write_captured(&context, out)?;
                    return Ok(Outcome::Replied);
                }
                let body = body.to_vec();
                self.perform(request.place(None, body.len()), out, reply_to, move |core, cancel, out| {
                    check_time(deadline, cancel)?;
                    core.capture_envelope(&body, conditions)?;
                    core.write_captured(&context, out).map(|()| Done::Replied)
                })
            }
            (Some(name), true) => {
                let key = PrefixKey::read(&object)?;
                core.check_capture(&conditions)?;
                let slab_values = core.replay.slab_len(key.prefix_len).ok_or(RequestError::CacheNotPortable)?;
                core.replay.check(&key, slab_values)?;
                let name: Arc<str> = Arc::from(&**name);
                self.perform(request.place(Some(Arc::clone(&name)), 0), out, reply_to, move |core, cancel, out| {
                    check_time(deadline, cancel)?;
                    core.capture_session(&name, key, conditions, &context)?;
                    core.write_captured(&context, out).map(|()| Done::Replied)
                })
            }
            _ => Err(RequestError::CaptureSource),
        }
    }

    /// Takes a capture that came over HTTP.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn capture_envelope(&self, body: &[u8]) -> Result<(), RequestError> {
        let core = &*self.core;
        let arrived = Instant::now();
        core.counters.requests.add_one();
        let conditions = Conditions::default();
        let result = core.check_capture(&conditions).and_then(|()| core.capture_envelope(body, conditions));
        let status = StatusLabel::of(result.as_ref().map_or_else(|error| error.status().0, |()| 200));
        let Counters { traffic, faults, errors, .. } = &*core.counters;
        let route = RouteLabel::of(Route::AMPLITUHEDRON_CAPTURE);
        traffic.requests(route, status).add_one();
        traffic.durations(route).observe(arrived.elapsed());
        traffic.body_bytes(Direction::In, Carrier::Http, BodyKind::Bwah).add(body.len() as u64);
        result.inspect_err(|error| {
            errors.add_one();
            faults.of(error.fault()).add_one();
            fault!(DEBUG, error.fault(), status = error.status().0, %error, "capture over HTTP refused: {error}");
        })
    }
}

fn key_of(envelope: &CaptureView<'_>) -> PrefixKey {
    let CaptureView { prefix_hash, prefix_len, layer_lo, layer_hi, .. } = *envelope;
    PrefixKey { prefix_hash, prefix_len, layer_lo, layer_hi }
}

impl Core {
    pub(super) fn check_draining(&self) -> Result<(), RequestError> {
        match self.draining.load(Ordering::Relaxed) {
            true => Err(RequestError::Draining { retry_after_ms: self.retry_after_ms() }),
            false => Ok(()),
        }
    }

    fn check_capture(&self, conditions: &Conditions) -> Result<(), RequestError> {
        self.check_draining()?;
        let ours = &self.replay.shape().config_fp;
        match &conditions.config_fp {
            Some(config_fp) if !config_fp.eq_ignore_ascii_case(ours) => {
                Err(RequestError::Config { expected: ours.as_ref().to_owned() })
            }
            _ => Ok(()),
        }
    }

    fn capture_envelope(&self, body: &[u8], conditions: Conditions) -> Result<(), RequestError> {
        let key = key_of(&CaptureView::parse(body).map_err(RequestError::Envelope)?);
        // What is certain to be refused is not unpacked.
        self.replay.check(&key, 0)?;
        let decoded = decode_amplituhedron_capture(body).map_err(RequestError::Envelope)?;
        let provenance = conditions.basis_fp.map_or(Provenance::Raw, Provenance::Basis);
        self.keep(key, conditions, provenance, decoded.tail, decoded.kv)
    }

    fn keep(
        &self,
        key: PrefixKey,
        conditions: Conditions,
        provenance: Provenance,
        tail: Vec<f32>,
        slab: Vec<f32>,
    ) -> Result<(), RequestError> {
        if !conditions.accept(provenance) {
            return Err(RequestError::Provenance { got: provenance });
        }
        let Conditions { prefix_digest, mesh_fp, .. } = conditions;
        self.replay.insert(key, Capture { tail, slab, prefix_digest, mesh_fp, provenance })?;
        Ok(())
    }

    /// Captures the first positions of a session.
    fn capture_session(
        &self,
        name: &str,
        key: PrefixKey,
        conditions: Conditions,
        context: &Context,
    ) -> Result<(), RequestError> {
        let prefix_len = key.prefix_len as usize;
        let guard = self
            .sessions
            .open(name, Some(prefix_len), Instant::now(), || self.model.new_cache())
            .map_err(|error| self.session_refused(error, prefix_len))?;
        let state = guard.lock();
        let len = state.cache.len();
        if prefix_len > len {
            return Err(RequestError::Position { expected: len, got: prefix_len });
        }
        let overtaken =
            |tail: &&Tail| context.address.is_some_and(|address| !tail.was_there(address, context.sequence));
        let Some(tail) = state.kept.tail(prefix_len).filter(|tail| !overtaken(tail)) else {
            return Err(RequestError::TailNotKept { prefix_len, kept: state.kept.prefixes() });
        };
        let (tail, provenance) = (tail.values.clone(), state.kept.provenance(prefix_len));
        let slab =
            self.model.export_cache(state.cache.as_ref(), prefix_len).map_err(|error| self.model_error(error))?;
        drop(state);
        self.keep(key, conditions, provenance, tail, slab)
    }

    /// Makes a session hold a prefix, in place of whatever it held. All of it or nothing.
    fn splice(&self, name: &str, key: &PrefixKey, entry: &Entry, context: &Context) -> Result<Done, RequestError> {
        let prefix_len = key.prefix_len as usize;
        let guard = self
            .sessions
            .open(name, Some(0), Instant::now(), || self.model.new_cache())
            .map_err(|error| self.session_refused(error, 0))?;
        let mut state = guard.lock();
        if let Some(address) = context.address
            && state.is_stale(address, context.sequence)
        {
            self.counters.dropped.stale.add_one();
            return Ok(Done::Stale);
        }
        let more = prefix_len.saturating_sub(state.cache.len());
        let growth = more.saturating_mul(self.model.cache_bytes_per_position());
        self.sessions.reserve(&guard, growth).map_err(|error| self.session_refused(error, 0))?;
        let imported = self.model.import_cache(prefix_len, &entry.capture.slab);
        if let Ok(cache) = imported {
            state.cache = cache;
            state.kept.replace(prefix_len, entry.capture.tail.clone(), entry.capture.provenance);
            if let Some(address) = context.address {
                state.changed_by(address, context.sequence);
            }
            self.sessions.settle(&guard, state.bytes());
            return Ok(Done::Replied);
        }
        self.sessions.settle(&guard, state.bytes());
        imported.map(|_| Done::Replied).map_err(|error| self.model_error(error))
    }

    fn session_refused(&self, refused: Refused, got: usize) -> RequestError {
        match refused {
            Refused::Position { expected } => RequestError::Position { expected, got },
            Refused::TooLarge { wanted, budget } => RequestError::SessionTooLarge { wanted, max: budget },
            Refused::Budget { wanted, budget } => {
                RequestError::NoCapacity { wanted, budget, retry_after_ms: self.retry_after_ms() }
            }
        }
    }

    fn write_hit(
        &self,
        context: &Context,
        key: &PrefixKey,
        entry: &Entry,
        spliced: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), RequestError> {
        let tail = &entry.capture.tail;
        let body = try_encode_amplituhedron_reply(true, Some(tail), None).map_err(|_| RequestError::ReplyTooLarge {
            len: size_of_val(tail.as_slice()),
            max: u32::MAX as usize,
            datagram: false,
        })?;
        let mut frame = FrameWriter::new(out, context.stream_id, context.sequence, context.success);
        frame
            .meta()
            .unsigned("status", 200)
            .string("body", "bwah")
            .unsigned("prefix_len", u64::from(key.prefix_len))
            .unsigneds("layers", [u64::from(key.layer_lo), u64::from(key.layer_hi)])
            .unsigned("dim", tail.len() as u64)
            .display("provenance", entry.capture.provenance)
            .unsigned("slab_bytes", size_of_val(entry.capture.slab.as_slice()) as u64)
            .boolean("spliced", spliced);
        frame.body().extend_from_slice(&body);
        finish(frame)
    }

    fn write_captured(&self, context: &Context, out: &mut Vec<u8>) -> Result<(), RequestError> {
        let (entries, bytes) = self.replay.usage();
        let mut frame = FrameWriter::new(out, context.stream_id, context.sequence, context.success);
        frame
            .meta()
            .unsigned("status", 200)
            .boolean("captured", true)
            .unsigned("held", entries as u64)
            .unsigned("held_bytes", bytes as u64);
        finish(frame)
    }
}
