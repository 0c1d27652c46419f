//! One station: requests out, replies matched by opcode and sequence.
//!
//! Requests may be pipelined from any number of tasks. A request whose future is dropped is withdrawn at the station. Over
//! UDP a request is repeated, byte for byte, until its answer comes: stations recognise copies. The pauses begin with an
//! estimate of the round trip, double, and have a part that is left to chance. While a request waits, its station is asked
//! for HEALTH from time to time, so that one that is gone is told from one that is busy.

use std::{
    collections::HashMap,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use aeon_proto::{
    auth::{self, AuthError, SignError, Stamp},
    frame::{Flags, Frame, MAX_FRAME_LEN},
    json::{Object, Value},
    payload::{FrameWriter, MetaWriter, Payload},
    route::Route,
    status::Status,
};
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpStream, UdpSocket, UnixStream},
    sync::{mpsc, oneshot},
};
use tokio_util::codec::FramedRead;

use super::{
    address::StationAddress,
    error::{ClientError, reason_of},
    hello::Hello,
    rtt::{Estimator, jittered},
    watch::{Verdict, Watch},
};
use crate::{
    codec::{FrameCodec, Framing, OwnedFrame},
    station::limits::MAX_DATAGRAM_LEN,
};

/// Bytes that a HELLO over UDP is padded to, so that its answer is within three times its size.
const HELLO_PADDING: usize = 1200;
/// Bytes that any other UDP request is padded to until the address is proven: the vent with the token is within three times
/// that.
const MIN_UNPROVEN_LEN: usize = 160;
/// Refusals of a UDP port before it counts as unreachable, and the pause after one.
const MAX_REFUSALS: u32 = 3;
const REFUSAL_PAUSE: Duration = Duration::from_millis(50);
/// Repetitions of a request that a station was too busy for, and the longest pause between them.
const MAX_BUSY_RETRIES: u32 = 8;
const MAX_BUSY_PAUSE: Duration = Duration::from_secs(5);
/// Copies of a datagram without an answer from an idle station after which datagrams like it count as lost on the way.
const MAX_LOST_COPIES: u32 = 6;

/// How a client behaves.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// Prefixed or bare frames, on TCP.
    pub framing: Framing,
    /// Time for a connection to come about.
    pub connect_timeout: Duration,
    /// Time for an answer, all repetitions together.
    pub request_timeout: Duration,
    /// Time until a UDP request is repeated for the first time, until the round trip was measured; doubled for each
    /// further time, up to 16 times and 4 seconds.
    pub first_retry: Duration,
    /// The shared key of stations that take only signed requests. Answers must then be signed too.
    pub auth: Option<auth::Key>,
    /// A station from which nothing is heard while it owes an answer is asked for HEALTH after this time, and given up
    /// before twice this time has passed. `None` waits for the answer without asking.
    pub health_interval: Option<Duration>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            framing: Framing::Prefixed,
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(120),
            first_retry: Duration::from_millis(250),
            auth: None,
            health_interval: Some(Duration::from_secs(5)),
        }
    }
}

/// A success.
#[derive(Debug, Clone)]
pub struct Reply {
    /// Its status, 2xx.
    pub status: Status,
    /// The meta text.
    pub meta: String,
    /// The body.
    pub body: Bytes,
}

impl Reply {
    /// A whole number of the meta.
    #[must_use]
    pub fn number(&self, key: &str) -> Option<u64> {
        match Object::parse(&self.meta).ok()?.get(key)? {
            Value::Unsigned(value) => Some(*value),
            _ => None,
        }
    }

    /// A truth value of the meta.
    #[must_use]
    pub fn boolean(&self, key: &str) -> Option<bool> {
        match Object::parse(&self.meta).ok()?.get(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// An array of whole numbers of the meta.
    #[must_use]
    pub fn numbers(&self, key: &str) -> Option<Vec<u64>> {
        let number = |value: &Value<'_>| match value {
            Value::Unsigned(value) => Some(*value),
            _ => None,
        };
        match Object::parse(&self.meta).ok()?.get(key)? {
            Value::Array(values) => values.iter().map(number).collect(),
            _ => None,
        }
    }

    /// A string of the meta.
    #[must_use]
    pub fn string(&self, key: &str) -> Option<String> {
        match Object::parse(&self.meta).ok()?.get(key)? {
            Value::String(value) => Some(value.clone().into_owned()),
            _ => None,
        }
    }
}

type Key = (u16, u32);

/// What happens to a waiting request.
#[derive(Debug)]
enum Event {
    Answer(OwnedFrame),
    /// An answer on a stream without the signature that it must have.
    Unsigned(AuthError, OwnedFrame),
    /// The port is closed (UDP): the request may be repeated.
    Refused(io::Error),
    Ended(String),
}

#[derive(Debug)]
enum Waiting {
    Open(HashMap<Key, Waiter>),
    Ended(String),
}

#[derive(Debug)]
struct Waiter {
    events: mpsc::UnboundedSender<Event>,
    /// What its answer must be signed for.
    nonce: Option<u128>,
}

#[derive(Debug)]
struct Shared {
    address: StationAddress,
    options: ClientOptions,
    waiting: Mutex<Waiting>,
    outgoing: mpsc::UnboundedSender<Bytes>,
    next_sequence: AtomicU32,
    token: Mutex<Option<String>>,
    is_udp: bool,
    max_request_len: usize,
    round_trip: Mutex<Estimator>,
    signs: SignsOfLife,
}

/// When a station was last heard.
#[derive(Debug, Clone)]
struct SignsOfLife {
    born: Instant,
    /// Nanoseconds after `born`.
    last: Arc<AtomicU64>,
}

impl SignsOfLife {
    fn new() -> Self {
        Self { born: Instant::now(), last: Arc::default() }
    }

    fn note(&self) {
        let nanos = u64::try_from(self.born.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.last.fetch_max(nanos, Ordering::Relaxed);
    }

    fn last(&self) -> Instant {
        self.born + Duration::from_nanos(self.last.load(Ordering::Relaxed))
    }
}

/// Notes every byte that comes: a large answer over a slow link is a sign of life long before it is whole.
struct Heard<R> {
    read: R,
    signs: SignsOfLife,
}

impl<R: AsyncRead + Unpin> AsyncRead for Heard<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.read).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.signs.note();
        }
        read
    }
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn round_trip(&self) -> MutexGuard<'_, Estimator> {
        self.round_trip.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, frame: OwnedFrame) {
        // Failures of stock-client mode carry FIN alone; everything a station sends to a request is an answer.
        if let Waiting::Open(requests) = &*self.waiting()
            && let Some(waiter) = requests.get(&(frame.stream_id, frame.sequence))
        {
            let event = match self.check_signature(&frame, waiter) {
                Ok(()) => Event::Answer(frame),
                // Anyone can send a datagram that looks like an answer.
                Err(_) if self.is_udp => return,
                Err(error) => Event::Unsigned(error, frame),
            };
            let _ = waiter.events.send(event);
        }
    }

    fn check_signature(&self, frame: &OwnedFrame, waiter: &Waiter) -> Result<(), AuthError> {
        let (Some(key), Some(nonce)) = (&self.options.auth, waiter.nonce) else { return Ok(()) };
        let OwnedFrame { stream_id, sequence, flags, payload } = frame;
        let frame = Frame { stream_id: *stream_id, sequence: *sequence, flags: *flags, payload };
        key.verify_reply(&frame, nonce)
    }

    /// Signs a request frame if stations need that; returns the nonce that its answer must be signed for.
    fn sign(&self, frame: &mut Vec<u8>) -> Result<Option<u128>, SignError> {
        let Some(key) = &self.options.auth else { return Ok(None) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let stamp = Stamp { ts: now.as_millis() as u64, nonce: rand::random() };
        key.sign_request(frame, 0, stamp)?;
        Ok(Some(stamp.nonce))
    }

    fn end(&self, reason: &str) {
        let waiting = std::mem::replace(&mut *self.waiting(), Waiting::Ended(reason.to_owned()));
        if let Waiting::Open(requests) = waiting {
            for waiter in requests.into_values() {
                let _ = waiter.events.send(Event::Ended(reason.to_owned()));
            }
        }
    }
}

/// A connection to one station. Cheap to clone; it closes when the last clone is gone.
#[derive(Debug, Clone)]
pub struct Client {
    shared: Arc<Shared>,
    /// Its end stops the tasks.
    _open: Arc<oneshot::Sender<()>>,
}

/// Takes a request off the list when its future ends or is dropped, and withdraws it at the station in the latter case.
struct Registration<'a> {
    shared: &'a Shared,
    key: Key,
    /// HEALTH asked on behalf of this request.
    probe: Option<(Key, Bytes)>,
    answered: bool,
}

impl Registration<'_> {
    fn forget_probe(&mut self) {
        if let (Some((key, _)), Waiting::Open(requests)) = (self.probe.take(), &mut *self.shared.waiting()) {
            requests.remove(&key);
        }
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        self.forget_probe();
        if let Waiting::Open(requests) = &mut *self.shared.waiting() {
            requests.remove(&self.key);
        }
        if !self.answered {
            let frame = Frame { stream_id: self.key.0, sequence: self.key.1, flags: Flags::VENT, payload: &[] };
            let mut bytes = Vec::new();
            if frame.encode(&mut bytes).is_ok() && self.shared.sign(&mut bytes).is_ok() {
                let _ = self.shared.outgoing.send(bytes.into());
            }
        }
    }
}

impl Client {
    /// Connects to a station.
    ///
    /// # Errors
    /// [`ClientError::Connect`] or [`ClientError::Busy`]. A UDP address connects always; whether a station is there shows
    /// at the first request.
    pub async fn connect(address: &StationAddress, options: ClientOptions) -> Result<Self, ClientError> {
        let failed = |source| ClientError::Connect { station: address.clone(), source };
        let timeout = options.connect_timeout;
        let connected = match address {
            StationAddress::Unix(path) => {
                let stream = connect_unix(address, path, timeout).await?;
                Self::stream(address, options, Framing::Prefixed, stream)
            }
            StationAddress::Tcp(host) => {
                let stream = tokio::time::timeout(timeout, TcpStream::connect(host))
                    .await
                    .map_err(|_| failed(io::ErrorKind::TimedOut.into()))?
                    .map_err(failed)?;
                let _ = stream.set_nodelay(true);
                let framing = options.framing;
                Self::stream(address, options, framing, stream)
            }
            StationAddress::Udp(host) => {
                let mut addresses = tokio::net::lookup_host(host).await.map_err(failed)?;
                let target = addresses.next().ok_or_else(|| failed(io::ErrorKind::AddrNotAvailable.into()))?;
                let local = if target.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
                let socket = UdpSocket::bind(local).await.map_err(failed)?;
                crate::net::udp::allow_fragments(&socket, target.is_ipv6()).map_err(failed)?;
                let _ = socket2::SockRef::from(&socket).set_recv_buffer_size(4 << 20);
                socket.connect(target).await.map_err(failed)?;
                Self::datagrams(address, options, socket)
            }
        };
        Ok(connected)
    }

    fn shared(
        address: &StationAddress,
        options: ClientOptions,
        max_request_len: usize,
    ) -> (Arc<Shared>, mpsc::UnboundedReceiver<Bytes>) {
        let (outgoing, queue) = mpsc::unbounded_channel();
        // A client that is started again on the same port must not seem to repeat old requests: sequences begin with the
        // time in milliseconds, so that they go on from where any earlier client was.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let shared = Shared {
            address: address.clone(),
            round_trip: Mutex::new(Estimator::new(options.first_retry)),
            signs: SignsOfLife::new(),
            options,
            waiting: Mutex::new(Waiting::Open(HashMap::new())),
            outgoing,
            next_sequence: AtomicU32::new(now.as_millis() as u32),
            token: Mutex::default(),
            is_udp: matches!(address, StationAddress::Udp(_)),
            max_request_len,
        };
        (Arc::new(shared), queue)
    }

    fn stream(
        address: &StationAddress,
        options: ClientOptions,
        framing: Framing,
        stream: impl AsyncRead + AsyncWrite + Send + 'static,
    ) -> Self {
        let (shared, mut queue) = Self::shared(address, options, MAX_FRAME_LEN);
        let (read, mut write) = tokio::io::split(stream);
        let (open, mut closed) = oneshot::channel();
        let reading = Arc::clone(&shared);
        let signs = shared.signs.clone();
        let read = Heard { read, signs: signs.clone() };
        tokio::spawn(async move {
            let mut frames = FramedRead::new(read, FrameCodec::new(framing, MAX_FRAME_LEN));
            let reason = loop {
                let frame = tokio::select! {
                    frame = frames.next() => frame,
                    _ = &mut closed => break "closed by this client".to_owned(),
                };
                match frame {
                    Some(Ok(frame)) => reading.deliver(frame),
                    Some(Err(error)) => break reason_of(&error),
                    None => break "end of stream".to_owned(),
                }
            };
            reading.end(&reason);
        });
        // The writer holds no reference to the rest, so that it ends when the last request can no longer come.
        let writing = Arc::downgrade(&shared);
        tokio::spawn(async move {
            while let Some(frame) = queue.recv().await {
                let mut batch = Vec::new();
                let mut add = |frame: &Bytes| {
                    if framing == Framing::Prefixed {
                        batch.extend_from_slice(&(frame.len() as u32).to_be_bytes());
                    }
                    batch.extend_from_slice(frame);
                };
                add(&frame);
                while let Ok(frame) = queue.try_recv() {
                    add(&frame);
                }
                if let Err(error) = write_all(&mut write, &batch, &signs).await {
                    // The reader sees the end too and usually knows more (a last vent).
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    if let Some(shared) = writing.upgrade() {
                        shared.end(&error.to_string());
                    }
                    return;
                }
            }
        });
        Self { shared, _open: Arc::new(open) }
    }

    fn datagrams(address: &StationAddress, options: ClientOptions, socket: UdpSocket) -> Self {
        let (shared, mut queue) = Self::shared(address, options, MAX_DATAGRAM_LEN);
        let (open, mut closed) = oneshot::channel();
        let task = Arc::clone(&shared);
        tokio::spawn(async move {
            let mut buffer = vec![0; MAX_DATAGRAM_LEN + 1];
            loop {
                tokio::select! {
                    biased;
                    received = socket.recv(&mut buffer) => match received {
                        Ok(len) => {
                            task.signs.note();
                            if let Ok(frame) = Frame::decode_exact(&buffer[..len]) {
                                let Frame { stream_id, sequence, flags, payload } = frame;
                                let payload = Bytes::copy_from_slice(payload);
                                task.deliver(OwnedFrame { stream_id, sequence, flags, payload });
                            }
                        }
                        Err(error) => task.refused(&error),
                    },
                    Some(frame) = queue.recv() => {
                        // A send fails for reasons that pass; the request is repeated.
                        if let Err(error) = socket.send(&frame).await {
                            task.refused(&error);
                        }
                    }
                    _ = &mut closed => return,
                }
            }
        });
        Self { shared, _open: Arc::new(open) }
    }

    /// The station's address.
    #[must_use]
    pub fn address(&self) -> &StationAddress {
        &self.shared.address
    }

    /// Whether requests travel as datagrams.
    #[must_use]
    pub fn is_udp(&self) -> bool {
        self.shared.is_udp
    }

    /// Bytes of a request whose meta, without what this client adds to it, has `meta_len` bytes, and that has no body; with a
    /// key up to a few more than it will have.
    pub(super) fn request_len(&self, meta_len: usize) -> usize {
        let token = self.shared.token.lock().unwrap_or_else(PoisonError::into_inner);
        let token_len = token.as_ref().map_or(0, |token| r#","token":"""#.len() + token.len());
        let auth_len = if self.shared.options.auth.is_some() { auth::MAX_REQUEST_LEN } else { 0 };
        aeon_proto::frame::HEADER_LEN + 2 + meta_len + token_len + auth_len
    }

    /// Asks what the station is.
    ///
    /// # Errors
    /// As [`Client::request`]; [`ClientError::BadReply`] if the answer lacks something.
    pub async fn hello(&self) -> Result<Hello, ClientError> {
        let reply = self.hello_reply().await?;
        serde_json::from_str(&reply.meta).map_err(|error| self.bad_reply(Route::HELLO, error.to_string()))
    }

    /// Asks what the station is, for the answer as it came.
    ///
    /// # Errors
    /// As [`Client::request`].
    pub async fn hello_reply(&self) -> Result<Reply, ClientError> {
        let padding = if self.shared.is_udp { "0".repeat(HELLO_PADDING) } else { String::new() };
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("content_type", "application/x-aeon-flow; v=1");
            if !padding.is_empty() {
                meta.string("pad", &padding);
            }
        };
        self.request(Route::HELLO, meta, &[]).await
    }

    /// Sends a request and waits for its answer; a vent is an error. What a busy station refuses is repeated a few times.
    ///
    /// Cancel safe: when the future is dropped, the station is told to stop.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn request(
        &self,
        route: Route,
        meta: impl Fn(&mut MetaWriter<'_, '_>),
        body: &[u8],
    ) -> Result<Reply, ClientError> {
        self.request_with(route, meta, body, false).await
    }

    /// As [`Client::request`], for callers that can send less at once, or from elsewhere: with `gives_up`, a datagram that an
    /// idle station does not answer is [`ClientError::Unanswered`] as soon as that is seen, and not when the time is up.
    pub(super) async fn request_with(
        &self,
        route: Route,
        meta: impl Fn(&mut MetaWriter<'_, '_>),
        body: &[u8],
        gives_up: bool,
    ) -> Result<Reply, ClientError> {
        let deadline = Instant::now() + self.shared.options.request_timeout;
        let mut busy = 0;
        loop {
            let error = match self.exchange(route, &meta, body, deadline, gives_up).await {
                Err(error) => error,
                reply => return reply,
            };
            match error.status() {
                Some(Status::FORBIDDEN) if self.learn_token(&error) => {}
                Some(Status::UNAVAILABLE) if busy < MAX_BUSY_RETRIES => {
                    // Never sooner than the station said; longer each time, so that many clients do not keep it busy
                    // with refusing them.
                    let asked = Duration::from_millis(error.vent_number("retry_after_ms").unwrap_or(100).max(1));
                    let left = deadline.saturating_duration_since(Instant::now());
                    if asked >= left {
                        return Err(error);
                    }
                    let wait = jittered((asked * (1 << busy)).min(MAX_BUSY_PAUSE.max(asked)), rand::random());
                    busy += 1;
                    if wait >= left {
                        return Err(error);
                    }
                    tokio::time::sleep(wait).await;
                }
                _ => return Err(error),
            }
        }
    }

    async fn exchange(
        &self,
        route: Route,
        meta: &impl Fn(&mut MetaWriter<'_, '_>),
        body: &[u8],
        deadline: Instant,
        gives_up: bool,
    ) -> Result<Reply, ClientError> {
        let shared = &*self.shared;
        let sequence = shared.next_sequence.fetch_add(1, Ordering::Relaxed);
        let (request, nonce) = self.encode(route, sequence, meta, body)?;
        let (events, mut answer) = mpsc::unbounded_channel();
        let key = (route.0, sequence);
        let closed = |reason: String| ClientError::Closed { station: shared.address.clone(), route, reason };
        match &mut *shared.waiting() {
            Waiting::Ended(reason) => return Err(closed(reason.clone())),
            Waiting::Open(requests) => requests.insert(key, Waiter { events: events.clone(), nonce }),
        };
        let mut registration = Registration { shared, key, probe: None, answered: false };
        let started = Instant::now();
        let mut watch = shared.options.health_interval.map(|interval| Watch::new(interval, started));
        let first_pause = shared.round_trip().timeout();
        let mut pause = first_pause;
        let mut repeat_at = started + jittered(pause, rand::random());
        let (mut copies, mut refusals) = (1, 0);
        // Whether the station had nothing to do after so many copies that one must have come.
        let mut is_idle = false;
        let _ = shared.outgoing.send(request.clone());
        loop {
            let now = Instant::now();
            if is_idle && (gives_up || now >= deadline) {
                return Err(ClientError::Unanswered {
                    station: shared.address.clone(),
                    route,
                    copies,
                    len: request.len(),
                });
            }
            if now >= deadline {
                let waited = started.elapsed();
                return Err(ClientError::Timeout { station: shared.address.clone(), route, waited });
            }
            let mut wake = deadline;
            if shared.is_udp {
                if now >= repeat_at {
                    pause = shared.round_trip().longer(pause);
                    repeat_at = now + jittered(pause, rand::random());
                    copies += 1;
                    let _ = shared.outgoing.send(request.clone());
                }
                wake = wake.min(repeat_at);
            }
            if let Some(watch) = &mut watch {
                match watch.check(now, shared.signs.last(), shared.is_udp.then_some(pause)) {
                    Verdict::Wait(until) => wake = wake.min(until),
                    Verdict::Probe => {
                        self.probe(&mut registration, &events)?;
                        continue;
                    }
                    Verdict::Silent(waited) => {
                        return Err(ClientError::Silent { station: shared.address.clone(), route, waited });
                    }
                }
            }
            match tokio::time::timeout_at(wake.into(), answer.recv()).await {
                Ok(Some(Event::Answer(frame))) if (frame.stream_id, frame.sequence) == key => {
                    registration.answered = true;
                    match copies {
                        1 => shared.round_trip().sample(started.elapsed()),
                        _ => shared.round_trip().unclear(first_pause),
                    }
                    return self.decode(route, frame);
                }
                // HEALTH: the station lives. Over UDP it may show that the request never arrives, or its answer.
                Ok(Some(Event::Answer(health))) => {
                    let health = self.decode(Route::HEALTH, health);
                    if let Err(error) = &health {
                        // The address must be proven first: the next probe has the token.
                        self.learn_token(error);
                        registration.forget_probe();
                    }
                    let has_no_work = health.is_ok_and(|health| health.number("queued") == Some(0));
                    is_idle = shared.is_udp && copies >= MAX_LOST_COPIES && has_no_work;
                }
                Ok(Some(Event::Unsigned(error, frame))) => {
                    registration.answered = true;
                    let station = shared.address.clone();
                    let said = self.decode(route, frame).err().map(|error| error.to_string());
                    return Err(ClientError::NotAuthentic { station, route, error, said });
                }
                Ok(Some(Event::Refused(error))) => {
                    refusals += 1;
                    if refusals >= MAX_REFUSALS {
                        registration.answered = true;
                        return Err(ClientError::Connect { station: shared.address.clone(), source: error });
                    }
                    repeat_at = Instant::now() + REFUSAL_PAUSE;
                }
                Ok(Some(Event::Ended(reason))) => {
                    registration.answered = true;
                    return Err(closed(reason));
                }
                Ok(None) => return Err(closed("connection dropped".to_owned())),
                Err(_) => {}
            }
        }
    }

    /// Takes the token out of a 403 over UDP; false if there is none that is new.
    fn learn_token(&self, error: &ClientError) -> bool {
        let token = error.vent_string("token").filter(|_| self.shared.is_udp);
        let mut known = self.shared.token.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = token.is_some() && *known != token;
        if is_new {
            *known = token;
        }
        is_new
    }

    /// Asks for HEALTH on behalf of a waiting request; its answer comes where the request's own does.
    fn probe(
        &self,
        registration: &mut Registration<'_>,
        events: &mpsc::UnboundedSender<Event>,
    ) -> Result<(), ClientError> {
        let frame = match &registration.probe {
            Some((_, frame)) => frame.clone(),
            None => {
                let sequence = self.shared.next_sequence.fetch_add(1, Ordering::Relaxed);
                let (frame, nonce) = self.encode(Route::HEALTH, sequence, &|_: &mut MetaWriter<'_, '_>| {}, &[])?;
                let key = (Route::HEALTH.0, sequence);
                if let Waiting::Open(requests) = &mut *self.shared.waiting() {
                    requests.insert(key, Waiter { events: events.clone(), nonce });
                }
                registration.probe = Some((key, frame.clone()));
                frame
            }
        };
        let _ = self.shared.outgoing.send(frame);
        Ok(())
    }

    /// Whether the connection has ended, so that every further request fails at once.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(*self.shared.waiting(), Waiting::Ended(_))
    }

    fn encode(
        &self,
        route: Route,
        sequence: u32,
        meta: &impl Fn(&mut MetaWriter<'_, '_>),
        body: &[u8],
    ) -> Result<(Bytes, Option<u128>), ClientError> {
        let mut bytes = Vec::with_capacity(body.len() + 256);
        let mut frame = FrameWriter::new(&mut bytes, route.0, sequence, Flags::NONE);
        meta(&mut frame.meta());
        match &*self.shared.token.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(token) => {
                frame.meta().string("token", token);
            }
            None if self.shared.is_udp => {
                let missing = MIN_UNPROVEN_LEN.saturating_sub(frame.len() + body.len());
                if missing > 0 {
                    frame.meta().string("pad", &"0".repeat(missing));
                }
            }
            None => {}
        }
        frame.body().extend_from_slice(body);
        frame.finish()?;
        let nonce = self.shared.sign(&mut bytes)?;
        let (len, max) = (bytes.len(), self.shared.max_request_len);
        if len > max {
            return Err(ClientError::RequestTooLarge { station: self.shared.address.clone(), route, len, max });
        }
        Ok((bytes.into(), nonce))
    }

    fn decode(&self, route: Route, frame: OwnedFrame) -> Result<Reply, ClientError> {
        let bad = |problem: String| self.bad_reply(route, problem);
        let Payload { meta, body } = Payload::decode(&frame.payload).map_err(|error| bad(error.to_string()))?;
        let object = Object::parse(meta).map_err(|error| bad(error.to_string()))?;
        // The original station's replies may have no status; their flags say what they are.
        let status = match object.get("status") {
            Some(Value::Unsigned(status)) => Status(u16::try_from(*status).unwrap_or(u16::MAX)),
            None if frame.flags.contains(Flags::VENT) => Status::INTERNAL,
            None => Status::OK,
            Some(_) => return Err(bad("status is no number".to_owned())),
        };
        if !status.is_success() || frame.flags.contains(Flags::VENT) {
            let text = match object.get("error") {
                Some(Value::String(text)) => text.clone().into_owned(),
                _ => status.description().to_owned(),
            };
            let station = self.shared.address.clone();
            return Err(ClientError::Vent { station, route, status, text, meta: meta.to_owned() });
        }
        Ok(Reply { status, meta: meta.to_owned(), body: frame.payload.slice_ref(body) })
    }

    pub(crate) fn bad_reply(&self, route: Route, problem: String) -> ClientError {
        ClientError::BadReply { station: self.shared.address.clone(), route, problem }
    }
}

impl Shared {
    /// Tells every waiting request that the peer's port refused a datagram, or that one could not be sent.
    fn refused(&self, error: &io::Error) {
        if let Waiting::Open(requests) = &*self.waiting() {
            for waiter in requests.values() {
                let copy = error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error);
                let _ = waiter.events.send(Event::Refused(copy));
            }
        }
    }
}

/// Writes all of `bytes`. Each part that the peer's system took, while more is left, is a sign of life: no answer can come
/// before the request is there.
async fn write_all(write: &mut (impl AsyncWrite + Unpin), mut bytes: &[u8], signs: &SignsOfLife) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = write.write(bytes).await?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = bytes.get(written..).unwrap_or_default();
        if !bytes.is_empty() {
            signs.note();
        }
    }
    Ok(())
}

/// Connects to a Unix socket; a full backlog is waited for, since the system reports it at once.
async fn connect_unix(
    address: &StationAddress,
    path: &std::path::Path,
    timeout: Duration,
) -> Result<UnixStream, ClientError> {
    let started = Instant::now();
    let mut wait = Duration::from_millis(2);
    loop {
        match UnixStream::connect(path).await {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let waited = started.elapsed();
                if waited >= timeout {
                    return Err(ClientError::Busy { station: address.clone(), waited });
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(Duration::from_millis(100));
            }
            Err(source) => return Err(ClientError::Connect { station: address.clone(), source }),
        }
    }
}
