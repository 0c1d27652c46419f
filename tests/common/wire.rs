//! Raw frames over every carrier: what goes out and what comes back is bytes, written here a second time on purpose.

use std::{fmt, io, net::SocketAddr, path::Path};

use aeon_proto::route::Route;
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UdpSocket, UnixStream},
};

use super::within;

/// A frame: header and payload.
pub fn raw_frame(stream_id: u16, sequence: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend_from_slice(&stream_id.to_be_bytes());
    out.extend_from_slice(&sequence.to_be_bytes());
    out.push(flags);
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes()[1..]);
    out.extend_from_slice(payload);
    out
}

/// A payload: meta and body.
pub fn payload(meta: &str, body: &[u8]) -> Vec<u8> {
    let mut out = (meta.len() as u16).to_be_bytes().to_vec();
    out.extend_from_slice(meta.as_bytes());
    out.extend_from_slice(body);
    out
}

/// A request frame.
pub fn request(route: Route, sequence: u32, meta: &str, body: &[u8]) -> Vec<u8> {
    raw_frame(route.0, sequence, 0, &payload(meta, body))
}

/// A frame that withdraws a request.
pub fn cancel(route: Route, sequence: u32) -> Vec<u8> {
    raw_frame(route.0, sequence, 0x08, &[])
}

/// A frame with its length in front.
pub fn prefixed(frame: &[u8]) -> Vec<u8> {
    let mut out = (frame.len() as u32).to_be_bytes().to_vec();
    out.extend_from_slice(frame);
    out
}

/// A frame that came back.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub stream_id: u16,
    pub sequence: u32,
    pub flags: u8,
    pub text: String,
    pub meta: Value,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn decode(frame: &[u8]) -> Self {
        let number = |range: std::ops::Range<usize>| frame[range].iter().fold(0_u32, |n, b| n << 8 | u32::from(*b));
        let payload = &frame[10..];
        assert_eq!(payload.len(), number(7..10) as usize, "length of the header");
        let meta_len = number(10..12) as usize;
        let text = std::str::from_utf8(&payload[2..2 + meta_len]).unwrap().to_owned();
        let meta = serde_json::from_str(&text).unwrap();
        let (stream_id, sequence) = (number(0..2) as u16, number(2..6));
        Self { stream_id, sequence, flags: frame[6], text, meta, body: payload[2 + meta_len..].to_vec() }
    }

    pub fn status(&self) -> u64 {
        self.meta["status"].as_u64().unwrap()
    }

    /// The meta of a success.
    pub fn ok(self) -> Value {
        assert_eq!((self.status(), self.flags), (200, 0x30), "{self:?}");
        self.meta
    }

    /// Checks that this is the vent of a request: flags, opcode, sequence, status and the form of its meta.
    #[track_caller]
    pub fn assert_vent(&self, what: &str, route: u16, sequence: u32, status: u64) {
        assert_eq!(self.status(), status, "{what}: {}", self.text);
        assert_eq!((self.flags, self.stream_id, self.sequence), (0x38, route, sequence), "{what}");
        assert!(self.text.starts_with(&format!("{{\"status\":{status},\"error\":\"")), "{what}: {}", self.text);
        assert!(self.body.is_empty(), "{what}");
    }
}

/// A stream of either kind.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

enum Carrier {
    Stream { stream: Box<dyn Stream>, is_prefixed: bool, input: Vec<u8> },
    Datagrams(UdpSocket),
}

/// One raw connection to a station.
pub struct Wire {
    carrier: Carrier,
    name: &'static str,
    sequence: u32,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Wire {
    pub fn stream(name: &'static str, stream: impl Stream + 'static, is_prefixed: bool) -> Self {
        let carrier = Carrier::Stream { stream: Box::new(stream), is_prefixed, input: Vec::new() };
        Self { carrier, name, sequence: rand::random() }
    }

    pub async fn uds(path: &Path) -> Self {
        Self::stream("uds", UnixStream::connect(path).await.unwrap(), true)
    }

    pub async fn tcp(address: SocketAddr) -> Self {
        Self::stream("tcp", TcpStream::connect(address).await.unwrap(), true)
    }

    pub async fn bare_tcp(address: SocketAddr) -> Self {
        Self::stream("bare tcp", TcpStream::connect(address).await.unwrap(), false)
    }

    pub async fn udp(address: SocketAddr) -> Self {
        let local = if address.is_ipv6() { "[::1]:0" } else { "127.0.0.1:0" };
        let socket = UdpSocket::bind(local).await.unwrap();
        socket.connect(address).await.unwrap();
        Self { carrier: Carrier::Datagrams(socket), name: "udp", sequence: rand::random() }
    }

    pub const fn name(&self) -> &'static str {
        self.name
    }

    pub const fn is_udp(&self) -> bool {
        matches!(self.carrier, Carrier::Datagrams(_))
    }

    /// A sequence that was not used on this connection.
    pub const fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// Sends bytes as they are: on a stream without a prefix.
    pub async fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.carrier {
            Carrier::Stream { stream, .. } => within("sending", stream.write_all(bytes)).await,
            Carrier::Datagrams(socket) => within("sending", socket.send(bytes)).await.map(|_| ()),
        }
    }

    /// Sends frames, with prefixes where the carrier has them.
    pub async fn send(&mut self, frames: &[Vec<u8>]) {
        let prefixes = matches!(self.carrier, Carrier::Stream { is_prefixed: true, .. });
        if self.is_udp() {
            for frame in frames {
                self.send_raw(frame).await.unwrap();
            }
            return;
        }
        let bytes: Vec<u8> =
            frames.iter().flat_map(|frame| if prefixes { prefixed(frame) } else { frame.clone() }).collect();
        self.send_raw(&bytes).await.unwrap();
    }

    /// The next frame as raw bytes, without its prefix; `None` at the end of a stream.
    pub async fn receive_raw(&mut self) -> Option<Vec<u8>> {
        let frame = self.receive_unless_cut().await;
        if let (None, Carrier::Stream { input, .. }) = (&frame, &self.carrier) {
            assert!(input.is_empty(), "the stream ended inside a frame");
        }
        frame
    }

    /// As [`Wire::receive_raw`], where the station may give the connection up inside a frame.
    pub async fn receive_unless_cut(&mut self) -> Option<Vec<u8>> {
        within("an answer", async {
            match &mut self.carrier {
                Carrier::Datagrams(socket) => {
                    let mut buffer = vec![0; 65_536];
                    let len = socket.recv(&mut buffer).await.unwrap();
                    buffer.truncate(len);
                    Some(buffer)
                }
                Carrier::Stream { stream, is_prefixed, input } => loop {
                    let prefix_len = if *is_prefixed { 4 } else { 0 };
                    if let Some(header) = input.get(prefix_len..prefix_len + 10) {
                        let len = 10 + u32::from_be_bytes([0, header[7], header[8], header[9]]) as usize;
                        if *is_prefixed {
                            assert_eq!(input[..4], (len as u32).to_be_bytes(), "prefix of a reply");
                        }
                        if input.len() >= prefix_len + len {
                            let rest = input.split_off(prefix_len + len);
                            return Some(std::mem::replace(input, rest).split_off(prefix_len));
                        }
                    }
                    match stream.read_buf(input).await {
                        Ok(0) | Err(_) => return None,
                        Ok(_) => {}
                    }
                },
            }
        })
        .await
    }

    pub async fn receive(&mut self) -> Option<Answer> {
        self.receive_raw().await.map(|frame| Answer::decode(&frame))
    }

    /// Sends frames and waits for one answer.
    pub async fn exchange(&mut self, frame: Vec<u8>) -> Answer {
        self.send(&[frame]).await;
        self.receive().await.expect("the connection goes on")
    }

    /// Asks one thing under a new sequence.
    pub async fn ask(&mut self, route: Route, meta: &str, body: &[u8]) -> Answer {
        let sequence = self.next_sequence();
        let answer = self.exchange(request(route, sequence, meta, body)).await;
        assert_eq!((answer.stream_id, answer.sequence), (route.0, sequence), "{answer:?}");
        answer
    }

    /// Says that nothing more will be sent.
    pub async fn shutdown(&mut self) {
        if let Carrier::Stream { stream, .. } = &mut self.carrier {
            within("shutdown", stream.shutdown()).await.unwrap();
        }
    }

    /// The connection must be closed by the station, with nothing more on it.
    pub async fn assert_closed(&mut self, what: &str) {
        assert_eq!(self.receive_raw().await, None, "{what}: closed");
    }
}
