//! Sockets that systemd opened and passes on (`LISTEN_FDS`), told apart by name and by what they are.
//!
//! | name (`FileDescriptorName=`) | stream, Unix | stream, IP | datagram, IP |
//! |---|---|---|---|
//! | `flow`, or none at all | frames | frames | frames |
//! | `http` | refused | HTTP | refused |
//!
//! Such a socket belongs to systemd: it is not unlinked, its buffers stay as they were set, and what has not been accepted
//! or received when this process ends waits for the next one.

use std::{
    env, io,
    net::{TcpListener, UdpSocket},
    os::unix::net::UnixListener,
};

use listenfd::ListenFd;
use socket2::SockRef;

/// The first descriptor that systemd passes.
const FIRST_FD: usize = 3;
/// Name of sockets for frames.
const FLOW: &str = "flow";
/// Name of sockets for HTTP.
const HTTP: &str = "http";

/// Why a node does not start with the sockets that it was given.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Sockets were to come and none did.
    #[error(
        "--systemd-sockets: no sockets were passed; start the node through its .socket unit \
         (systemctl start aeon-node.socket), or leave the option out and name listeners"
    )]
    Missing,
    /// Not one name for each socket.
    #[error("{fds} sockets were passed with {names} names (LISTEN_FDNAMES={text:?}); expected one name for each")]
    Names {
        /// Sockets.
        fds: usize,
        /// Names.
        names: usize,
        /// The names as they came.
        text: String,
    },
    /// A name that says nothing here.
    #[error(
        "socket {fd} is named {name:?}, expected {FLOW:?} or {HTTP:?}; set FileDescriptorName={FLOW} in its .socket unit"
    )]
    UnknownName {
        /// The descriptor.
        fd: usize,
        /// Its name.
        name: String,
    },
    /// A descriptor of a kind that carries no frames.
    #[error(
        "descriptor {fd} ({name}) is neither a Unix or TCP stream socket nor a UDP socket; \
         use ListenStream= or, with an IP address, ListenDatagram="
    )]
    Kind {
        /// The descriptor.
        fd: usize,
        /// Its name.
        name: String,
    },
    /// HTTP on something else than TCP.
    #[error("socket {fd} is named {HTTP:?} but is no TCP socket; give it ListenStream=ADDR:PORT or the name {FLOW:?}")]
    HttpNotTcp {
        /// The descriptor.
        fd: usize,
    },
    /// A connection instead of a listener.
    #[error("socket {fd} ({name}) does not listen; set Accept=no in its .socket unit")]
    NotListening {
        /// The descriptor.
        fd: usize,
        /// Its name.
        name: String,
    },
    /// Stock clients cannot be served over UDP.
    #[error("a UDP socket was passed, which --stock-clients cannot be used with; remove ListenDatagram= or the option")]
    StockClientsOverUdp,
    /// The system refused.
    #[error("cannot use socket {fd} ({name})")]
    Io {
        /// The descriptor.
        fd: usize,
        /// Its name.
        name: String,
        /// What the system said.
        source: io::Error,
    },
}

/// Sockets that listen already. All are non-blocking and closed on exec.
#[derive(Debug, Default)]
pub struct Inherited {
    /// Unix sockets for frames.
    pub uds: Vec<UnixListener>,
    /// UDP sockets for frames.
    pub udp: Vec<UdpSocket>,
    /// TCP sockets for frames.
    pub tcp: Vec<TcpListener>,
    /// TCP sockets for HTTP.
    pub http: Vec<TcpListener>,
}

/// Whether sockets were passed to this process.
#[must_use]
pub fn are_passed() -> bool {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    number("LISTEN_FDS").is_some_and(|count| count > 0) && number("LISTEN_PID") == Some(std::process::id())
}

/// Takes the sockets that were passed to this process. A second call finds none.
///
/// # Errors
/// See [`SocketError`]: one socket that cannot be used refuses all, since peers would wait on it for ever.
pub fn take() -> Result<Inherited, SocketError> {
    if !are_passed() {
        return Err(SocketError::Missing);
    }
    let names = env::var("LISTEN_FDNAMES").ok();
    let mut passed = ListenFd::from_env();
    let names: Vec<String> = match &names {
        // Whoever passes no names passes sockets for frames.
        None => vec![FLOW.to_owned(); passed.len()],
        Some(text) => text.split(':').map(str::to_owned).collect(),
    };
    if names.len() != passed.len() {
        let text = env::var("LISTEN_FDNAMES").unwrap_or_default();
        return Err(SocketError::Names { fds: passed.len(), names: names.len(), text });
    }
    let mut inherited = Inherited::default();
    for (index, name) in names.into_iter().enumerate() {
        inherited.take_one(&mut passed, index, name)?;
    }
    Ok(inherited)
}

impl Inherited {
    fn take_one(&mut self, passed: &mut ListenFd, index: usize, name: String) -> Result<(), SocketError> {
        let fd = FIRST_FD + index;
        let is_http = match &*name {
            FLOW => false,
            HTTP => true,
            _ => return Err(SocketError::UnknownName { fd, name }),
        };
        let check = |socket: SockRef<'_>| {
            let failed = |source| SocketError::Io { fd, name: name.clone(), source };
            socket.set_nonblocking(true).map_err(failed)?;
            let is_stream = socket.r#type().map_err(failed)? == socket2::Type::STREAM;
            match is_stream && !socket.is_listener().map_err(failed)? {
                true => Err(SocketError::NotListening { fd, name: name.clone() }),
                false => Ok(()),
            }
        };
        // Each of these looks at the kind and the family first, and leaves what does not fit in its place.
        if let Ok(Some(socket)) = passed.take_tcp_listener(index) {
            check(SockRef::from(&socket))?;
            if is_http {
                self.http.push(socket)
            } else {
                self.tcp.push(socket)
            }
            return Ok(());
        }
        if let Ok(Some(socket)) = passed.take_unix_listener(index) {
            if is_http {
                return Err(SocketError::HttpNotTcp { fd });
            }
            check(SockRef::from(&socket))?;
            self.uds.push(socket);
            return Ok(());
        }
        if let Ok(Some(socket)) = passed.take_udp_socket(index) {
            if is_http {
                return Err(SocketError::HttpNotTcp { fd });
            }
            check(SockRef::from(&socket))?;
            self.udp.push(socket);
            return Ok(());
        }
        Err(SocketError::Kind { fd, name })
    }
}
