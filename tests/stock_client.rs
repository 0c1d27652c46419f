//! A client that behaves like `AeonFlowProtocol` of the TypeScript aeon library, against stations with and without
//! `--stock-clients`. It has a codec and rules of its own and uses nothing of `aeon-proto`, so it sees the wire as that
//! library does:
//!
//! - A client opens even stream ids only. Others exist once a frame comes on them or a FORK frame lists them; sending on a
//!   stream that does not exist is an error of the library.
//! - Of a frame that comes in, POISON (0x20) is looked at first: the stream dies and the payload is dropped. Then VENT: the
//!   stream dies, and a VENT goes back. Then FIN: the payload is kept and the stream ends. Then FORK. All else is data.
//! - A dead or ended stream can be sent on, but a VENT or POISON of one is not sent.
//! - Each stream counts its sequence from 0. Sequences of what comes in are not looked at.
//! - A stream takes 64 frames by `send`; `finish` sends one more frame with FIN at any time.
//! - A race sends RACE on each stream, ends with the first FIN, and vents the others. A fold sends FOLD and waits for all.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
};

use aeon_station::{
    demo,
    model::{CancelToken, Head, HeadOutput, LayerRange},
    net::connection::ConnectionOptions,
};
use common::{
    PATIENCE, floats, ids, read_ids,
    slow::{SlowLab, SlowOptions},
};
use serde_json::{Value, json};

const FORK: u8 = 0x01;
const RACE: u8 = 0x02;
const FOLD: u8 = 0x04;
const VENT: u8 = 0x08;
const FIN: u8 = 0x10;
const POISON: u8 = 0x20;

const HELLO: u16 = 0;
const HEALTH: u16 = 1;
const EMBED: u16 = 2;
const FORWARD: u16 = 3;
const LM_HEAD: u16 = 4;
const RESET: u16 = 5;
/// Where the station's FORK comes.
const PARENT: u16 = 0xfffe;
/// Frames that a stream takes by `send`.
const HIGH_WATER_MARK: usize = 64;

trait Socket: Read + Write + Send {}
impl<T: Read + Write + Send> Socket for T {}

/// Where a station listens.
#[derive(Debug, Clone)]
enum Place {
    Unix(PathBuf),
    Tcp(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Racing,
    Folding,
    Vented,
    Closed,
}

#[derive(Debug)]
struct Stream {
    state: State,
    children: Vec<u16>,
    next_sequence: u32,
    buffered: usize,
    /// What came with FIN or as data, oldest first.
    received: Vec<Vec<u8>>,
    /// How many of them the test has looked at.
    read: usize,
}

/// An error of the library, in its words.
#[derive(Debug, PartialEq, Eq)]
enum ClientError {
    NoSuchStream(u16),
    Backpressure(u16),
}

struct StockClient {
    socket: Box<dyn Socket>,
    streams: BTreeMap<u16, Stream>,
    next_even: u16,
    /// Flags of all frames that came in.
    seen_flags: Vec<u8>,
}

impl StockClient {
    fn connect(place: &Place) -> Self {
        let socket: Box<dyn Socket> = match place {
            Place::Unix(path) => {
                let socket = UnixStream::connect(path).unwrap();
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                Box::new(socket)
            }
            Place::Tcp(address) => {
                let socket = TcpStream::connect(address).unwrap();
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                Box::new(socket)
            }
        };
        Self { socket, streams: BTreeMap::new(), next_even: 0, seen_flags: Vec::new() }
    }

    /// Connects and waits for the streams that the station opens.
    fn served(place: &Place) -> Self {
        let mut client = Self::connect(place);
        client.pump();
        assert!(client.streams.contains_key(&FORWARD), "the first message of the station opens the routes");
        client
    }

    fn create(&mut self, id: u16) {
        let (children, received) = (Vec::new(), Vec::new());
        let stream = Stream { state: State::Open, children, next_sequence: 0, buffered: 0, received, read: 0 };
        self.streams.insert(id, stream);
    }

    fn open_stream(&mut self) -> u16 {
        let id = self.next_even;
        self.next_even += 2;
        self.create(id);
        id
    }

    fn stream(&mut self, id: u16) -> Result<&mut Stream, ClientError> {
        self.streams.get_mut(&id).ok_or(ClientError::NoSuchStream(id))
    }

    fn state(&self, id: u16) -> State {
        self.streams[&id].state
    }

    /// Each frame is one message: its length, then the frame.
    fn send_frame(&mut self, id: u16, flags: u8, payload: &[u8]) {
        let Ok(stream) = self.stream(id) else { return };
        let sequence = stream.next_sequence;
        stream.next_sequence += 1;
        let mut message = (10 + payload.len() as u32).to_be_bytes().to_vec();
        message.extend_from_slice(&id.to_be_bytes());
        message.extend_from_slice(&sequence.to_be_bytes());
        message.push(flags);
        message.extend_from_slice(&(payload.len() as u32).to_be_bytes()[1..]);
        message.extend_from_slice(payload);
        self.socket.write_all(&message).unwrap();
    }

    fn send(&mut self, id: u16, payload: &[u8]) -> Result<(), ClientError> {
        let stream = self.stream(id)?;
        if stream.buffered >= HIGH_WATER_MARK {
            return Err(ClientError::Backpressure(id));
        }
        stream.buffered += 1;
        self.send_frame(id, 0, payload);
        Ok(())
    }

    fn finish(&mut self, id: u16, payload: &[u8]) -> Result<(), ClientError> {
        self.stream(id)?;
        self.send_frame(id, FIN, payload);
        self.stream(id)?.state = State::Closed;
        Ok(())
    }

    fn is_dead(&self, id: u16) -> bool {
        self.streams.get(&id).is_none_or(|stream| matches!(stream.state, State::Vented | State::Closed))
    }

    fn vent(&mut self, id: u16) {
        if self.is_dead(id) {
            return;
        }
        self.streams.get_mut(&id).unwrap().state = State::Vented;
        self.send_frame(id, VENT, &[]);
        for child in self.streams[&id].children.clone() {
            self.vent(child);
        }
    }

    fn poison(&mut self, id: u16) {
        if self.is_dead(id) {
            return;
        }
        self.streams.get_mut(&id).unwrap().state = State::Vented;
        self.send_frame(id, POISON, &[]);
    }

    /// Reads one message and handles the frames in it.
    fn pump(&mut self) {
        let mut prefix = [0; 4];
        self.socket.read_exact(&mut prefix).unwrap();
        let mut message = vec![0; u32::from_be_bytes(prefix) as usize];
        self.socket.read_exact(&mut message).unwrap();
        let mut rest = &message[..];
        while !rest.is_empty() {
            let (header, behind) = rest.split_at(10);
            let id = u16::from_be_bytes([header[0], header[1]]);
            let len = u32::from_be_bytes([0, header[7], header[8], header[9]]) as usize;
            let (payload, behind) = behind.split_at(len);
            self.handle(id, header[6], payload);
            rest = behind;
        }
    }

    fn handle(&mut self, id: u16, flags: u8, payload: &[u8]) {
        self.seen_flags.push(flags);
        if !self.streams.contains_key(&id) {
            self.create(id);
        }
        let stream = self.streams.get_mut(&id).unwrap();
        if flags & POISON != 0 {
            stream.state = State::Vented;
        } else if flags & VENT != 0 {
            self.vent(id);
        } else if flags & FIN != 0 {
            if !payload.is_empty() {
                stream.received.push(payload.to_vec());
            }
            stream.state = State::Closed;
        } else if flags & FORK != 0 {
            for child in payload.chunks_exact(2) {
                let child = u16::from_be_bytes([child[0], child[1]]);
                if !self.streams.contains_key(&child) {
                    self.create(child);
                }
                let parent = self.streams.get_mut(&id).unwrap();
                if !parent.children.contains(&child) {
                    parent.children.push(child);
                }
            }
        } else if !payload.is_empty() {
            stream.received.push(payload.to_vec());
        }
    }

    /// The next payload on a stream, which may be there already.
    fn receive(&mut self, id: u16) -> Reply {
        loop {
            let stream = self.streams.get_mut(&id).unwrap();
            if let Some(payload) = stream.received.get(stream.read) {
                stream.read += 1;
                return Reply::split(payload);
            }
            self.pump();
        }
    }

    fn ask(&mut self, id: u16, meta: &Value, body: &[u8]) -> Reply {
        self.send(id, &request(meta, body)).unwrap();
        self.receive(id)
    }

    /// Races streams whose requests were sent; returns the winner and what it got.
    fn race(&mut self, ids: &[u16]) -> (u16, Reply) {
        for id in ids {
            self.streams.get_mut(id).unwrap().state = State::Racing;
        }
        for id in ids {
            let others: Vec<u8> = ids.iter().filter(|other| *other != id).flat_map(|id| id.to_be_bytes()).collect();
            self.send_frame(*id, RACE, &others);
        }
        loop {
            if let Some(winner) = ids.iter().copied().find(|id| self.state(*id) == State::Closed) {
                for id in ids.iter().filter(|id| **id != winner) {
                    self.vent(*id);
                }
                return (winner, self.receive(winner));
            }
            self.pump();
        }
    }

    /// Folds streams whose requests were sent: waits until all have ended.
    fn fold(&mut self, ids: &[u16]) -> Vec<Reply> {
        for id in ids {
            self.streams.get_mut(id).unwrap().state = State::Folding;
        }
        for id in ids {
            self.send_frame(*id, FOLD, &[]);
        }
        while ids.iter().any(|id| !self.is_dead(*id)) {
            self.pump();
        }
        ids.iter().map(|id| self.receive(*id)).collect()
    }
}

/// The station's payload layout: u16 length, JSON, body.
fn request(meta: &Value, body: &[u8]) -> Vec<u8> {
    let meta = meta.to_string();
    let mut payload = (meta.len() as u16).to_be_bytes().to_vec();
    payload.extend_from_slice(meta.as_bytes());
    payload.extend_from_slice(body);
    payload
}

#[derive(Debug)]
struct Reply {
    meta: Value,
    body: Vec<u8>,
}

impl Reply {
    fn split(payload: &[u8]) -> Self {
        let len = usize::from(u16::from_be_bytes([payload[0], payload[1]]));
        Self { meta: serde_json::from_slice(&payload[2..2 + len]).unwrap(), body: payload[2 + len..].to_vec() }
    }

    fn status(&self) -> &Value {
        &self.meta["status"]
    }

    #[track_caller]
    fn ok(self) -> Vec<u8> {
        assert_eq!(*self.status(), 200, "{}", self.meta);
        self.body
    }
}

/// A station in a process of its own, on a Unix socket and on TCP.
struct Station {
    child: Child,
    places: [Place; 2],
}

impl Drop for Station {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Station {
    fn start(dir: &Path, name: &str, arguments: &[&str]) -> Self {
        let socket = dir.join(name);
        let mut child = Command::new(env!("CARGO_BIN_EXE_aeon-node"))
            .args(["--uds", socket.to_str().unwrap(), "--tcp", "127.0.0.1:0"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, first) = mpsc::channel();
        std::thread::spawn(move || {
            let _ = sender.send(lines.next());
            lines.for_each(drop);
        });
        let ready = first.recv_timeout(PATIENCE).unwrap().unwrap().unwrap();
        let tcp = ready.split(' ').find_map(|field| field.strip_prefix("tcp=")).unwrap_or_else(|| panic!("{ready}"));
        let places = [Place::Unix(socket), Place::Tcp(tcp.to_owned())];
        Self { child, places }
    }
}

const PROMPT: &str = "First Citizen:\nBefore we proceed";

fn unsplit(prompt: &[u32], count: usize) -> Vec<u32> {
    let (model, cancel) = (demo::load(None).unwrap(), CancelToken::default());
    let mut cache = model.new_cache();
    let (mut tokens, mut input) = (Vec::new(), prompt.to_vec());
    while tokens.len() < count {
        let residuals = model.forward(cache.as_mut(), model.embed(&input).unwrap(), &cancel).unwrap();
        let last = residuals.len() - model.info().hidden_dim;
        let HeadOutput::Tokens(next) = model.head(&residuals[last..], Head::Token, &cancel).unwrap() else { panic!() };
        tokens.push(next[0]);
        input = next;
    }
    tokens
}

/// EMBED and FORWARD at the first station, FORWARD and LM_HEAD at the second.
fn tokens(first: &mut StockClient, second: &mut StockClient, session: &str, prompt: &[u32], count: usize) -> Vec<u32> {
    let (mut tokens, mut input, mut pos) = (Vec::new(), prompt.to_vec(), 0);
    while tokens.len() < count {
        let meta = json!({"session": session, "pos": pos});
        let residuals = first.ask(EMBED, &json!({}), &ids(&input)).ok();
        let residuals = first.ask(FORWARD, &meta, &residuals).ok();
        let residuals = second.ask(FORWARD, &meta, &residuals).ok();
        let width = residuals.len() / input.len();
        let next = read_ids(&second.ask(LM_HEAD, &json!({}), &residuals[residuals.len() - width..]).ok());
        pos += input.len();
        tokens.extend(&next);
        input = next;
    }
    tokens
}

#[test]
fn a_stock_client_gets_the_tokens_of_one_piece_over_either_carrier() {
    let dir = tempfile::tempdir().unwrap();
    let first = Station::start(dir.path(), "1", &["--stock-clients", "--layers", "0..3"]);
    let second = Station::start(dir.path(), "2", &["--stock-clients", "--layers", "3..6"]);
    let prompt = demo::tokenizer().unwrap().encode(PROMPT, true).unwrap();
    let expected = unsplit(&prompt, 20);
    for (session, places) in [("u", [0, 1]), ("t", [1, 0])] {
        let mut one = StockClient::served(&first.places[places[0]]);
        let mut two = StockClient::served(&second.places[places[1]]);
        for (client, layers) in [(&mut one, json!([0, 3])), (&mut two, json!([3, 6]))] {
            // Stream 0 is the client's own first stream, and the route HELLO.
            let hello = client.open_stream();
            assert_eq!(hello, HELLO);
            let reply = client.ask(hello, &json!({"content_type": "application/x-aeon-flow; v=1"}), &[]);
            assert_eq!((reply.status(), &reply.meta["layers"]), (&json!(200), &layers));
            assert_eq!(reply.meta["model"]["name"], "demo");
            assert_eq!(client.state(hello), State::Closed, "FIN ends the stream");
        }
        assert_eq!(tokens(&mut one, &mut two, session, &prompt, 20), expected);
        for client in [&mut one, &mut two] {
            assert_eq!(*client.ask(RESET, &json!({"session": session}), &[]).status(), 200);
            // One FORK, and then nothing but FIN: no bit that this client reads otherwise.
            assert_eq!(client.seen_flags[0], FORK);
            assert!(client.seen_flags[1..].iter().all(|flags| *flags == FIN), "{:?}", client.seen_flags);
        }
    }
}

#[test]
fn failures_are_read_like_answers_and_say_what_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let station = Station::start(dir.path(), "s", &["--stock-clients", "--layers", "3..6"]);
    for place in &station.places {
        let mut client = StockClient::served(place);
        let residual = floats(&[0.5; 128]);
        let cases = [
            (FORWARD, json!({}), floats(&[1.0; 3]), 400),
            (FORWARD, json!({"session": "e", "pos": 7}), residual.clone(), 409),
            (FORWARD, json!({}), floats(&[f32::NAN; 128]), 422),
            (EMBED, json!({}), ids(&[1]), 501),
            (0x0103, json!({}), [b"PCAR".as_slice(), &ids(&[3, 1, 128, 0, 7]), &floats(&[1.0])].concat(), 412),
        ];
        for (stream, meta, body, status) in cases {
            let reply = client.ask(stream, &meta, &body);
            assert_eq!(client.state(stream), State::Closed);
            assert_eq!(*reply.status(), status, "{}", reply.meta);
            assert!(reply.meta["error"].as_str().is_some_and(|text| !text.is_empty()), "{}", reply.meta);
            assert!(reply.body.is_empty());
        }
        // An even stream of the client's own that is no route.
        client.next_even = 8;
        let unknown = client.open_stream();
        assert_eq!(*client.ask(unknown, &json!({}), &[]).status(), 404);
        assert_eq!(*client.ask(FORWARD, &json!({}), &residual).status(), 200, "the connection goes on");
        assert!(client.seen_flags[1..].iter().all(|flags| *flags == FIN), "{:?}", client.seen_flags);
        // A message that is no frame: the last vent of a broken connection is readable too.
        client.socket.write_all(&[0, 0, 0, 9, 0, 3, 0, 0, 0, 9, 0, 0, 0]).unwrap();
        let before = client.streams.values().map(|stream| stream.received.len()).sum::<usize>();
        client.pump();
        assert_eq!(client.streams.values().map(|stream| stream.received.len()).sum::<usize>(), before + 1);
        assert_eq!(*client.seen_flags.last().unwrap(), FIN);
    }
}

/// The control: why the mode is there.
#[test]
fn without_the_mode_a_stock_client_can_read_no_reply() {
    let dir = tempfile::tempdir().unwrap();
    let station = Station::start(dir.path(), "s", &["--model", "identity:4"]);
    for place in &station.places {
        let mut client = StockClient::connect(place);
        // It can only send on even streams: FORWARD is out of reach.
        let hello = client.open_stream();
        assert_eq!(client.send(FORWARD, &request(&json!({}), &floats(&[1.0; 4]))), Err(ClientError::NoSuchStream(3)));
        // HELLO is not, and is answered; but the answer kills the stream, and its payload is lost.
        client.send(hello, &request(&json!({}), &[])).unwrap();
        client.pump();
        assert_eq!(client.seen_flags, [FIN | POISON]);
        assert_eq!((client.state(hello), client.streams[&hello].received.len()), (State::Vented, 0));
        // So are failures: a body of the wrong size on EMBED.
        let embed = client.open_stream();
        client.send(embed, &request(&json!({}), &[1])).unwrap();
        client.pump();
        assert_eq!((client.state(embed), client.streams[&embed].received.len()), (State::Vented, 0));
        assert_eq!(client.seen_flags, [FIN | POISON, VENT | FIN | POISON]);
    }
}

#[test]
fn requests_that_end_their_stream_are_answered_and_outlast_the_high_water_mark() {
    let dir = tempfile::tempdir().unwrap();
    let station = Station::start(dir.path(), "s", &["--stock-clients", "--model", "identity:4"]);
    for place in &station.places {
        let mut client = StockClient::served(place);
        for n in 0..HIGH_WATER_MARK {
            let body = floats(&[n as f32; 4]);
            assert_eq!(client.ask(FORWARD, &json!({}), &body).ok(), body);
        }
        // The library counts what it has sent and never less; a request with FIN goes past that.
        let body = request(&json!({}), &floats(&[1.0; 4]));
        assert_eq!(client.send(FORWARD, &body), Err(ClientError::Backpressure(FORWARD)));
        for n in 0..10 {
            let body = floats(&[n as f32; 4]);
            client.finish(FORWARD, &request(&json!({}), &body)).unwrap();
            assert_eq!(client.receive(FORWARD).ok(), body);
        }
    }
}

async fn slow_lab() -> SlowLab {
    let connection = ConnectionOptions { stock_clients: true, ..ConnectionOptions::default() };
    SlowLab::start(SlowOptions { connection, ..SlowOptions::default() }).await
}

/// Runs a client that blocks beside the stations of this process.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn vent_and_poison_cancel_a_stream_and_no_other() {
    let lab = slow_lab().await;
    for place in [Place::Unix(lab.uds.clone()), Place::Tcp(lab.tcp.to_string())] {
        for how in [VENT, POISON] {
            let (begun, finished) = (lab.control.begun().len(), lab.control.finished().len());
            let from = place.clone();
            let mut client = beside(move || {
                let mut client = StockClient::served(&from);
                // Three on one stream, of which one is being worked on, and one on another stream behind them.
                for value in [1.0, 2.0, 3.0] {
                    client.send(FORWARD, &request(&json!({"session": "c"}), &floats(&[value; 2]))).unwrap();
                }
                client.send(LM_HEAD, &request(&json!({}), &floats(&[7.0; 2]))).unwrap();
                client
            })
            .await;
            lab.control.until_begun(begun + 1).await;
            let client = beside(move || {
                match how {
                    VENT => client.vent(FORWARD),
                    _ => client.poison(FORWARD),
                }
                assert_eq!(client.state(FORWARD), State::Vented);
                // Each request of the stream is told, in the meta of a frame that this client reads.
                for _ in 0..3 {
                    let reply = client.receive(FORWARD);
                    assert_eq!(*reply.status(), 499, "{}", reply.meta);
                }
                assert_eq!(read_ids(&client.receive(LM_HEAD).ok()), [7]);
                // Nothing of the cancelled work is left in the session: it was never begun.
                assert_eq!(client.ask(RESET, &json!({"session": "c"}), &[]).meta["status"], 200);
                client
            })
            .await;
            assert_eq!(lab.control.finished().len(), finished, "cancelled work was done");
            assert!(client.seen_flags[1..].iter().all(|flags| *flags == FIN));
        }
    }
    // A vent of the stream that opened the others reaches all of them.
    let place = Place::Tcp(lab.tcp.to_string());
    let begun = lab.control.begun().len();
    let mut client = beside(move || {
        let mut client = StockClient::served(&place);
        client.send(FORWARD, &request(&json!({}), &floats(&[1.0; 2]))).unwrap();
        client.send(LM_HEAD, &request(&json!({}), &floats(&[1.0; 2]))).unwrap();
        client
    })
    .await;
    lab.control.until_begun(begun + 1).await;
    beside(move || {
        client.vent(PARENT);
        assert_eq!((client.receive(FORWARD).meta["status"].clone(), client.receive(LM_HEAD).meta["status"].clone()), {
            (json!(499), json!(499))
        });
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn races_and_folds_come_to_their_end() {
    let lab = slow_lab().await;
    for place in [Place::Unix(lab.uds.clone()), Place::Tcp(lab.tcp.to_string())] {
        let (begun, finished) = (lab.control.begun().len(), lab.control.finished().len());
        let from = place.clone();
        let mut client = beside(move || {
            let mut client = StockClient::served(&from);
            client.send(FORWARD, &request(&json!({}), &floats(&[1.0; 2]))).unwrap();
            client
        })
        .await;
        lab.control.until_begun(begun + 1).await;
        let mut client = beside(move || {
            // The station says nothing to RACE, which could be taken for the winner's answer. HEALTH answers at once; the
            // loser is vented, and so cancelled.
            client.send(HEALTH, &request(&json!({}), &[])).unwrap();
            let (winner, reply) = client.race(&[FORWARD, HEALTH]);
            assert_eq!((winner, reply.meta["draining"].clone()), (HEALTH, json!(false)));
            let before = reply.meta["dropped"]["never_answered"].as_u64().unwrap();
            assert_eq!(client.receive(FORWARD).meta["status"], 499);
            // A fold of two: what comes is their answers and nothing else.
            client.send(EMBED, &request(&json!({}), &ids(&[5]))).unwrap();
            client.send(HELLO, &request(&json!({}), &[])).unwrap();
            let replies = client.fold(&[EMBED, HELLO]);
            assert_eq!(
                (&replies[0].body, replies[1].meta["model"]["name"].as_str()),
                (&floats(&[5.0, 0.0]), Some("slow"))
            );
            assert_eq!((client.streams[&EMBED].received.len(), client.streams[&HELLO].received.len()), (1, 1));
            // Two RACE and two FOLD frames were counted; at HEALTH's own answer none, one or both of the RACE frames.
            let after = client.ask(HEALTH, &json!({}), &[]).meta["dropped"]["never_answered"].as_u64().unwrap();
            assert!((2..=4).contains(&(after - before)), "{before} {after}");
            client
        })
        .await;
        assert_eq!(lab.control.finished().len(), finished);
        lab.control.allow(1);
        beside(move || {
            let body = floats(&[3.0; 2]);
            assert_eq!(client.ask(FORWARD, &json!({}), &body).ok(), body, "the connection goes on");
        })
        .await;
    }
}
