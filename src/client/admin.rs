//! Asks a node's HTTP listener: metrics, reload, drain.

use std::{fmt, io, str::FromStr, time::Duration};

use axum::{
    body::{Body, to_bytes},
    http::{Method, Request, Uri, header, uri::Scheme},
};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Where a node is asked if nobody says: port 7080 of this machine.
pub const DEFAULT_ADMIN: &str = "http://127.0.0.1:7080";

/// Bytes of an answer. Metrics of a node with hundreds of bases take less.
const MAX_ANSWER_LEN: usize = 16 << 20;

/// The HTTP listener of a node, as in `http://127.0.0.1:7080`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminAddress {
    host: String,
    port: u16,
    /// In front of the routes, without a slash at its end; behind a proxy it may be something.
    base: String,
}

/// Why a text is no address of a node's HTTP listener.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// No URL.
    #[error("{0:?} is no URL; expected http://HOST:PORT")]
    Malformed(String),
    /// Another scheme.
    #[error("{0:?}: a node speaks plain http only; put a proxy in front of it for https")]
    Scheme(String),
    /// A query, or a name and password.
    #[error("{0:?}: expected http://HOST:PORT, and nothing behind a ? or in front of an @")]
    Extra(String),
}

impl FromStr for AdminAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let malformed = || AddressError::Malformed(text.to_owned());
        let uri: Uri = text.parse().map_err(|_| malformed())?;
        match uri.scheme() {
            Some(scheme) if *scheme == Scheme::HTTP => {}
            Some(_) => return Err(AddressError::Scheme(text.to_owned())),
            None => return Err(malformed()),
        }
        let authority = uri.authority().ok_or_else(malformed)?;
        if uri.query().is_some() || authority.as_str().contains('@') {
            return Err(AddressError::Extra(text.to_owned()));
        }
        let host = authority.host();
        if host.is_empty() {
            return Err(malformed());
        }
        let port = authority.port_u16();
        if port.is_none() && authority.as_str() != host {
            return Err(malformed());
        }
        let base = uri.path().trim_end_matches('/').to_owned();
        Ok(Self { host: host.to_owned(), port: port.unwrap_or(80), base })
    }
}

impl fmt::Display for AdminAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, base } = self;
        write!(f, "http://{host}:{port}{base}")
    }
}

/// What a node answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminAnswer {
    /// The HTTP status.
    pub status: u16,
    /// The body.
    pub text: String,
}

/// Why a node gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// No connection.
    #[error("cannot reach {address}; check that a node runs there with --http and that you may connect")]
    Connect {
        /// Who was asked.
        address: AdminAddress,
        /// What the system said.
        source: io::Error,
    },
    /// No answer in time.
    #[error("{address} did not answer within {waited:?}")]
    Timeout {
        /// Who was asked.
        address: AdminAddress,
        /// How long was waited.
        waited: Duration,
    },
    /// Something else than HTTP, or a connection that broke.
    #[error("{address} did not answer as a node does: {problem}")]
    BadAnswer {
        /// Who was asked.
        address: AdminAddress,
        /// What is wrong.
        problem: String,
    },
}

impl AdminError {
    /// Whether the node could not be reached at all.
    #[must_use]
    pub const fn is_unreachable(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Timeout { .. })
    }
}

impl AdminAddress {
    /// `GET` of a route such as `/metrics`.
    ///
    /// # Errors
    /// See [`AdminError`]; a status that says no is an answer.
    pub async fn get(&self, route: &str, timeout: Duration) -> Result<AdminAnswer, AdminError> {
        self.ask(Method::GET, route, timeout).await
    }

    /// `POST` without a body to a route such as `/reload`.
    ///
    /// # Errors
    /// See [`AdminError`]; a status that says no is an answer.
    pub async fn post(&self, route: &str, timeout: Duration) -> Result<AdminAnswer, AdminError> {
        self.ask(Method::POST, route, timeout).await
    }

    async fn ask(&self, method: Method, route: &str, timeout: Duration) -> Result<AdminAnswer, AdminError> {
        match tokio::time::timeout(timeout, self.exchange(method, route)).await {
            Ok(answer) => answer,
            Err(_) => Err(AdminError::Timeout { address: self.clone(), waited: timeout }),
        }
    }

    async fn exchange(&self, method: Method, route: &str) -> Result<AdminAnswer, AdminError> {
        let bad = |problem: String| AdminError::BadAnswer { address: self.clone(), problem };
        // The brackets of an IPv6 address belong to the URL.
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let socket = TcpStream::connect((host, self.port))
            .await
            .map_err(|source| AdminError::Connect { address: self.clone(), source })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await.map_err(|e| bad(e.to_string()))?;
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{route}", self.base))
            .header(header::HOST, format!("{}:{}", self.host, self.port))
            .header(header::CONNECTION, "close")
            .body(Body::empty())
            .map_err(|error| bad(error.to_string()))?;
        let answer = async {
            let answer = sender.send_request(request).await.map_err(|error| bad(error.to_string()))?;
            let status = answer.status().as_u16();
            let body = to_bytes(Body::new(answer.into_body()), MAX_ANSWER_LEN).await;
            let body = body.map_err(|error| bad(error.to_string()))?;
            let text = String::from_utf8(body.to_vec()).map_err(|_| bad("the answer is no text".to_owned()))?;
            Ok(AdminAnswer { status, text })
        };
        tokio::pin!(answer);
        tokio::select! {
            answer = &mut answer => answer,
            // The connection's end leaves what was read of the answer to be taken, or an error to be told.
            _ = connection => answer.await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_urls() {
        for (text, shown) in [
            ("http://127.0.0.1:7080", "http://127.0.0.1:7080"),
            ("http://node", "http://node:80"),
            ("http://[::1]:9/", "http://[::1]:9"),
            ("http://proxy:1/station/1/", "http://proxy:1/station/1"),
        ] {
            assert_eq!(text.parse::<AdminAddress>().unwrap().to_string(), shown);
        }
        assert_eq!(DEFAULT_ADMIN.parse::<AdminAddress>().unwrap().to_string(), DEFAULT_ADMIN);
        for text in ["", "node:80", "127.0.0.1:7080", "/x", "http://", "http://:80", "http://a:99999", "http://a b"] {
            assert!(matches!(text.parse::<AdminAddress>(), Err(AddressError::Malformed(_))), "{text}");
        }
        assert!(matches!("https://a".parse::<AdminAddress>(), Err(AddressError::Scheme(_))));
        for text in ["http://a/?x", "http://me:secret@a"] {
            assert!(matches!(text.parse::<AdminAddress>(), Err(AddressError::Extra(_))), "{text}");
        }
    }
}
