//! The station: one handler for the requests of every carrier.
//!
//! [`Station::handle`] answers cheap routes and backends that work inline at once, by appending the reply to the caller's
//! output; other model work goes to the worker queue and is answered through [`ReplyTo`]. The station knows no socket:
//! carriers bring frames and take replies. Every fault of a request becomes one vent through [`error`].

mod address;
pub mod auth;
mod coding;
mod duplicates;
pub mod error;
mod hello;
mod layers;
pub mod limits;
mod metrics;
mod pca;
mod queue;
mod replay;
mod report;
pub mod request;
mod shard;

use std::{
    hash::RandomState,
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use aeon_proto::{frame::Frame, meta::RequestMeta, payload::Payload, route::Route};

use self::{
    address::AddressTokens,
    auth::{AuthOptions, Authenticator, Refused},
    duplicates::{Duplicates, Key, Known},
    error::RequestError,
    limits::Limits,
    replay::Prefix,
    request::{Carrier, Origin, Outcome, Peer, ReplyTo, Request},
    shard::ShardStore,
};
use crate::{
    basis::Registry,
    model::{
        LayerRange,
        session::SessionTable,
        worker::{Asker, WorkerPool},
    },
    replay::cache::{ReplayCache, Shape},
    telemetry::{
        Counters,
        faults::{Fault, fault},
        trace::TraceParent,
        traffic::{BodyKind, Direction, Reply, RouteLabel},
    },
};

pub use self::{metrics::Exposition, report::SessionTag};

/// Where the span of a request and the line about its end are logged, so that they can be asked for alone.
const REQUEST_TARGET: &str = "aeon_station::request";

/// Logs why a request failed. What its span says is repeated only where spans are not logged.
macro_rules! tell {
    ($level:ident, $context:expr, $error:expr, $fault:expr) => {{
        let (context, error, status) = ($context, $error, $error.status().0);
        let route = Route(context.stream_id);
        if tracing::enabled!(target: REQUEST_TARGET, tracing::Level::DEBUG) {
            fault!($level, $fault, status, %error, "{route} refused: {error}");
        } else {
            let session = context.session.map(tracing::field::display);
            let trace = context.trace.map(tracing::field::display);
            let (sequence, peer) = (context.sequence, context.origin);
            fault!($level, $fault, status, %route, sequence, %peer, session, trace, %error, "{route} refused: {error}");
        }
    }};
}

/// A reply may be this many times the size of a request from an address that is not proven, as QUIC does it.
const AMPLIFICATION: usize = 3;

/// One model range and everything that requests to it share.
#[derive(Debug)]
pub struct Station {
    core: Arc<Core>,
    /// `None` for backends that work inline.
    workers: Option<WorkerPool>,
}

/// What request handling needs, on IO threads and workers alike.
#[derive(Debug)]
struct Core {
    name: String,
    model: Arc<dyn LayerRange>,
    bases: Arc<Registry>,
    sessions: SessionTable,
    limits: Limits,
    counters: Arc<Counters>,
    started: Instant,
    draining: AtomicBool,
    addresses: AddressTokens,
    auth: OnceLock<Authenticator>,
    duplicates: Duplicates,
    replay: ReplayCache,
    shards: ShardStore,
    /// Makes the short names of sessions in logs and lists: nobody can tell a session's name from them.
    session_tags: RandomState,
}

impl Station {
    /// A station with its own worker threads (none if the backend works inline).
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn new(name: String, model: Arc<dyn LayerRange>, limits: Limits, workers: usize) -> std::io::Result<Self> {
        Self::with_bases(name, model, Arc::default(), limits, workers)
    }

    /// A station that takes and gives PCA components by the bases of a registry.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn with_bases(
        name: String,
        model: Arc<dyn LayerRange>,
        bases: Arc<Registry>,
        limits: Limits,
        workers: usize,
    ) -> std::io::Result<Self> {
        let workers = match model.is_inline() {
            true => None,
            false => Some(WorkerPool::start(workers.max(1), limits.queue)?),
        };
        let started = Instant::now();
        let core = Core {
            replay: ReplayCache::new(Shape::of(&*model), limits.max_replay_bytes),
            shards: ShardStore::new(limits.shards),
            name,
            model,
            bases,
            sessions: SessionTable::new(limits.sessions),
            limits,
            counters: Arc::default(),
            started,
            draining: AtomicBool::new(false),
            addresses: AddressTokens::new(started),
            auth: OnceLock::new(),
            duplicates: Duplicates::default(),
            session_tags: RandomState::new(),
        };
        Ok(Self { core: Arc::new(core), workers })
    }

    /// The counters that carriers add to.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        &self.core.counters
    }

    /// The limits that it was made with.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.core.limits
    }

    /// The model range that it serves.
    #[must_use]
    pub fn model(&self) -> &Arc<dyn LayerRange> {
        &self.core.model
    }

    /// The bases that it works with.
    #[must_use]
    pub fn bases(&self) -> &Arc<Registry> {
        &self.core.bases
    }

    /// From now on only requests signed with a key are taken. Called once, before carriers are started.
    pub fn require_auth(&self, options: AuthOptions) {
        let _ = self.core.auth.set(Authenticator::new(options));
    }

    /// Whether a frame that withdraws a request may do so: with a key, only one that is signed.
    #[must_use]
    pub fn admits_cancel(&self, carrier: Carrier, frame: &Frame<'_>) -> bool {
        let Some(auth) = self.core.auth_for(carrier) else { return true };
        let admitted = auth.verify(frame).and_then(|stamp| auth.take(stamp)).is_ok();
        if !admitted {
            self.core.counters.dropped.unauthenticated.add_one();
        }
        admitted
    }

    /// From now on new model work is refused with 503.
    pub fn drain(&self) {
        self.core.draining.store(true, Ordering::Relaxed);
    }

    /// Whether new work is refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.core.draining.load(Ordering::Relaxed)
    }

    /// What a client is told to wait when the station cannot take it now.
    #[must_use]
    pub fn retry_after_ms(&self) -> u64 {
        self.core.retry_after_ms()
    }

    /// Sessions held now.
    #[must_use]
    pub fn session_count(&self) -> usize {
        self.core.sessions.usage().0
    }

    /// The pulses of the model threads (see [`WorkerPool::pulses`]) after which idle ones are asked for their next beat.
    /// None for a backend that works inline.
    #[must_use]
    pub fn take_pulses(&self) -> Vec<u64> {
        let Some(workers) = &self.workers else { return Vec::new() };
        let pulses = workers.pulses();
        workers.probe();
        pulses
    }

    /// Drops sessions that were not used for long.
    pub fn expire_sessions(&self, now: Instant) -> usize {
        self.core.sessions.expire(now)
    }

    /// Handles one request. A reply is one whole frame at the end of `out`; `reply_to` is called only for queued work.
    pub fn handle(
        &self,
        request: Request<'_>,
        out: &mut Vec<u8>,
        reply_to: impl FnOnce() -> Box<dyn ReplyTo>,
    ) -> Outcome {
        let core = &*self.core;
        core.counters.requests.add_one();
        let frame_len = request.frame.encoded_len() as u64;
        core.counters.traffic.frame_bytes(Direction::In, request.peer.carrier).add(frame_len);
        let start = out.len();
        let mut context = Context::new(core, &request);
        let span = context.span();
        let _entered = span.enter();
        let mut key = None;
        // Work of inline backends runs here, on a task that may serve every UDP peer: a panic costs its own request alone.
        let dispatched =
            catch_unwind(AssertUnwindSafe(|| self.dispatch(&request, &mut context, &mut key, out, reply_to)));
        let outcome = dispatched.unwrap_or(Err(RequestError::Panicked)).unwrap_or_else(|error| {
            out.truncate(start);
            core.counters.errors.add_one();
            context.write_vent(core, &error, out);
            Outcome::Replied
        });
        if let Outcome::Queued(_) = outcome {
            return outcome;
        }
        if let Some(key) = key {
            let reply = out.get(start..).filter(|reply| context.is_success(reply));
            core.duplicates.finish(key, reply);
        }
        let outcome = match outcome {
            Outcome::Replied if !context.fit_reply(core, start, out) => Outcome::Silent,
            outcome => outcome,
        };
        context.answered(core, out.get(start..).unwrap_or_default());
        outcome
    }

    fn dispatch(
        &self,
        request: &Request<'_>,
        context: &mut Context,
        key: &mut Option<Key>,
        out: &mut Vec<u8>,
        reply_to: impl FnOnce() -> Box<dyn ReplyTo>,
    ) -> Result<Outcome, RequestError> {
        let auth = self.core.auth_for(request.peer.carrier);
        let stamp = match auth.map(|auth| auth.verify(&request.frame)).transpose() {
            Ok(stamp) => stamp,
            // Over UDP a stranger must not even learn that someone is here.
            Err(_) if request.peer.carrier == Carrier::Udp => {
                self.core.counters.dropped.unauthenticated.add_one();
                return Ok(Outcome::Silent);
            }
            Err(refused) => return Err(refused.into()),
        };
        if let Some(stamp) = stamp {
            context.sign_for(stamp.nonce);
        }
        let route = Route(request.frame.stream_id);
        match route {
            Route::HELLO | Route::HEALTH | Route::EMBED | Route::FORWARD | Route::LM_HEAD | Route::RESET => {}
            _ if coding::is_coded(route) => {}
            Route::AMPLITUHEDRON_REPLAY | Route::AMPLITUHEDRON_CAPTURE | Route::SHARD_PUT | Route::SHARD_GET => {}
            _ if route.name().is_some() => return Err(RequestError::RouteNotEnabled(route)),
            _ => return Err(RequestError::UnknownRoute(route)),
        }
        let payload = Payload::decode(request.frame.payload)?;
        let meta = RequestMeta::parse(payload.meta)?;
        context.note(&self.core, route, &meta, request, payload.body);
        context.prove(&self.core, meta.token.as_deref());
        let (len, max) = (request.frame.encoded_len(), self.core.limits.max_datagram_len);
        if request.peer.carrier == Carrier::Udp && len > max {
            return Err(RequestError::DatagramTooLarge { len, max });
        }
        let session = match (&meta.session, &request.peer.default_session) {
            (Some(name), _) => Some(Arc::from(&**name)),
            (None, default) => default.clone(),
        };
        // What changes a session must not be done twice, and what a worker does need not be. What is signed is taken once,
        // so that copies of it can be answered only from here.
        let remembers = match route {
            _ if stamp.is_some() => true,
            Route::FORWARD | Route::FORWARD_PCA | Route::FORWARD_Q | Route::RESET | Route::AMPLITUHEDRON_REPLAY => {
                session.is_some() || self.workers.is_some()
            }
            Route::HELLO | Route::HEALTH | Route::SHARD_PUT | Route::SHARD_GET => false,
            _ => self.workers.is_some(),
        };
        if remembers && let Some(address) = request.peer.address {
            let copy = Key::new(address, &request.frame);
            match self.core.duplicates.begin(copy) {
                Known::New => *key = Some(copy),
                Known::InFlight => {
                    self.core.counters.dropped.duplicate.add_one();
                    return Ok(Outcome::Silent);
                }
                Known::Done(reply) => {
                    if stamp.is_some() {
                        context.unproven_len = None;
                    }
                    out.extend_from_slice(&reply);
                    return Ok(Outcome::Replied);
                }
            }
        }
        if let (Some(auth), Some(stamp)) = (auth, stamp) {
            match auth.take(stamp) {
                Ok(()) => context.unproven_len = None,
                // Someone sends a datagram again that is not theirs, or so late that it is not known any more.
                Err(Refused::Replayed | Refused::Forgotten) if request.peer.carrier == Carrier::Udp => {
                    self.core.counters.dropped.unauthenticated.add_one();
                    return Ok(Outcome::Silent);
                }
                Err(refused) => return Err(refused.into()),
            }
        }
        match route {
            Route::HELLO => self.hello(&meta, context, out)?,
            Route::HEALTH => self.health(context, out)?,
            Route::SHARD_PUT => self.shard_put(payload.meta, context, out)?,
            Route::SHARD_GET => self.shard_get(payload.meta, context, out)?,
            _ => {
                let prefix = Prefix { meta: &meta, text: payload.meta, context: *context, key: *key };
                match route {
                    Route::AMPLITUHEDRON_REPLAY => return self.replay(prefix, out, reply_to),
                    Route::AMPLITUHEDRON_CAPTURE => return self.capture(prefix, payload.body, out, reply_to),
                    _ => {}
                }
                let call = self.core.prepare(route, &meta, payload.body, session, request, context)?;
                return self.start(call, *context, *key, out, reply_to);
            }
        }
        Ok(Outcome::Replied)
    }
}

/// What replies to one request have in common. Plain data, so that it can go to a worker.
#[derive(Debug, Clone, Copy)]
struct Context {
    stream_id: u16,
    sequence: u32,
    success: aeon_proto::frame::Flags,
    failure: aeon_proto::frame::Flags,
    carrier: Carrier,
    address: Option<SocketAddr>,
    asker: Asker,
    max_reply_len: usize,
    /// The largest reply to an address that is not proven.
    unproven_len: Option<usize>,
    arrived: Instant,
    /// The nonce of the request that replies are signed for.
    nonce: Option<u128>,
    /// Where the peer is, for logs.
    origin: Origin,
    /// Its session's short name, for logs.
    session: Option<SessionTag>,
    /// The trace that the request belongs to, for logs.
    trace: Option<TraceParent>,
}

impl Context {
    fn new(core: &Core, request: &Request<'_>) -> Self {
        let Peer { carrier, connection, address, origin, is_proven, max_reply_len, .. } = *request.peer;
        let frame_len = request.frame.encoded_len();
        Self {
            stream_id: request.frame.stream_id,
            sequence: request.frame.sequence,
            success: request.peer.reply_flags(true),
            failure: request.peer.reply_flags(false),
            carrier,
            address,
            asker: address.map_or(Asker::Connection(connection), Asker::Address),
            max_reply_len: max_reply_len.min(core.limits.max_frame_len),
            unproven_len: (!is_proven).then_some(frame_len.saturating_mul(AMPLIFICATION)),
            arrived: request.arrived,
            nonce: None,
            origin,
            session: None,
            trace: None,
        }
    }

    /// One span for each request. It costs something only where it is logged.
    fn span(&self) -> tracing::Span {
        tracing::debug_span!(
            target: REQUEST_TARGET,
            "request",
            route = %Route(self.stream_id),
            sequence = self.sequence,
            carrier = self.carrier.name(),
            peer = %self.origin,
            session = tracing::field::Empty,
            trace = tracing::field::Empty,
            parent = tracing::field::Empty,
            status = tracing::field::Empty,
            micros = tracing::field::Empty,
        )
    }

    /// Takes over what the meta says for logs, and counts the body.
    fn note(&mut self, core: &Core, route: Route, meta: &RequestMeta<'_>, request: &Request<'_>, body: &[u8]) {
        let kind = BodyKind::of_request(route, meta, body);
        core.counters.traffic.body_bytes(Direction::In, self.carrier, kind).add(body.len() as u64);
        let session = meta.session.as_deref().or(request.peer.default_session.as_deref());
        self.session = session.map(|name| core.tag(name));
        // A sender's trace that cannot be read is to be ignored, as if it were not there.
        self.trace = meta.trace.as_deref().and_then(TraceParent::parse);
        let span = tracing::Span::current();
        if span.is_disabled() {
            return;
        }
        if let Some(session) = self.session {
            span.record("session", tracing::field::display(session));
        }
        if let Some(trace) = self.trace {
            span.record("trace", tracing::field::display(trace));
            span.record("parent", tracing::field::display(format_args!("{:016x}", trace.parent_id)));
        }
    }

    /// Counts a request whose reply is ready; an empty one is none.
    fn answered(&self, core: &Core, reply: &[u8]) {
        let reply = if reply.is_empty() { Reply::NONE } else { Reply::read(reply) };
        let route = RouteLabel::of(Route(self.stream_id));
        let took = self.arrived.elapsed();
        core.counters.traffic.answered(route, self.carrier, &reply);
        core.counters.traffic.durations(route).observe(took);
        if tracing::enabled!(target: REQUEST_TARGET, tracing::Level::DEBUG) {
            let (status, micros) = (reply.code, u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
            let span = tracing::Span::current();
            span.record("status", status).record("micros", micros);
            tracing::debug!(target: REQUEST_TARGET, "{} answered with {} in {micros} us", Route(self.stream_id), status);
        }
    }

    /// From now on replies are signed, which makes them longer.
    fn sign_for(&mut self, nonce: u128) {
        self.nonce = Some(nonce);
        self.max_reply_len = self.max_reply_len.saturating_sub(aeon_proto::auth::MAX_REPLY_LEN);
    }

    /// Lifts the limit on the size of replies if the token was issued to this address.
    fn prove(&mut self, core: &Core, token: Option<&str>) {
        if let (Some(_), Some(address), Some(token)) = (self.unproven_len, self.address, token)
            && core.addresses.verify(address, token, self.arrived)
        {
            self.unproven_len = None;
        }
    }

    /// Refuses a reply that the carrier cannot take.
    fn check_fits(&self, len: usize) -> Result<(), RequestError> {
        if len <= self.max_reply_len {
            return Ok(());
        }
        let datagram = self.carrier == Carrier::Udp;
        Err(RequestError::ReplyTooLarge { len, max: self.max_reply_len, datagram })
    }

    /// Refuses a reply that is too large for an address that is not proven.
    fn check_amplification(&self, core: &Core, len: usize) -> Result<(), RequestError> {
        match self.address {
            Some(address) if self.unproven_len.is_some_and(|max| len > max) => {
                Err(RequestError::AddressNotProven { token: core.addresses.issue(address, self.arrived) })
            }
            _ => Ok(()),
        }
    }

    fn write_vent(&self, core: &Core, error: &RequestError, out: &mut Vec<u8>) {
        let fault = error.fault();
        core.counters.faults.of(fault).add_one();
        match fault {
            Fault::Model | Fault::Panic => tell!(ERROR, self, error, fault),
            Fault::Overloaded | Fault::NoCapacity | Fault::Upstream => tell!(WARN, self, error, fault),
            _ => tell!(DEBUG, self, error, fault),
        }
        error.write_vent(self.stream_id, self.sequence, self.failure, out);
    }

    /// The last look at a finished reply: what an unproven address must not get becomes a vent with a token, or nothing
    /// if even that is too large. Returns whether there is a reply.
    fn fit_reply(&self, core: &Core, start: usize, out: &mut Vec<u8>) -> bool {
        let len = out.len().saturating_sub(start);
        if let Err(error) = self.check_fits(len).and_then(|()| self.check_amplification(core, len)) {
            out.truncate(start);
            self.write_vent(core, &error, out);
            if self.unproven_len.is_some_and(|max| out.len().saturating_sub(start) > max) {
                out.truncate(start);
                core.counters.dropped.amplification.add_one();
                return false;
            }
        }
        self.sign(core, start, out);
        true
    }

    /// Signs a reply to a signed request.
    fn sign(&self, core: &Core, start: usize, out: &mut Vec<u8>) {
        let (Some(nonce), Some(auth)) = (self.nonce, core.auth.get()) else { return };
        if auth.key().sign_reply(out, start, nonce).is_err() {
            let len = out.len().saturating_sub(start);
            out.truncate(start);
            let error = RequestError::ReplyTooLarge { len, max: self.max_reply_len, datagram: false };
            self.write_vent(core, &error, out);
            // A vent is short.
            let _ = auth.key().sign_reply(out, start, nonce);
        }
    }

    /// Whether an encoded reply is one that says 2xx.
    fn is_success(&self, reply: &[u8]) -> bool {
        const STATUS: &[u8] = b"{\"status\":2";
        reply.get(12..).is_some_and(|meta| meta.starts_with(STATUS))
    }
}

impl Core {
    /// The key that requests on this carrier need.
    fn auth_for(&self, carrier: Carrier) -> Option<&Authenticator> {
        self.auth.get().filter(|auth| match carrier {
            Carrier::Unix => !auth.exempts_unix(),
            Carrier::Tcp | Carrier::Udp => true,
            // It has no place for a signature: its allow list says who may ask.
            Carrier::Http => false,
        })
    }

    /// The short name of a session in logs and lists.
    fn tag(&self, name: &str) -> SessionTag {
        SessionTag::new(&self.session_tags, name)
    }

    fn retry_after_ms(&self) -> u64 {
        millis(self.limits.retry_after)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
