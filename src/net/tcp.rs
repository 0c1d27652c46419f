//! The TCP carrier, prefixed or bare.

use std::{io, net::SocketAddr};

use tokio::net::TcpListener;

use super::{listener::Acceptor, peer::AllowList};
use crate::station::request::{Carrier, Origin};

/// A bound TCP listener.
#[derive(Debug)]
pub struct TcpCarrier {
    listener: TcpListener,
    allow: AllowList,
}

impl TcpCarrier {
    /// Binds `address`.
    ///
    /// # Errors
    /// What the system said.
    pub async fn bind(address: SocketAddr, allow: AllowList) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await?, allow })
    }

    /// Takes a non-blocking socket that listens already.
    ///
    /// # Errors
    /// If the runtime cannot watch it.
    pub fn inherit(listener: std::net::TcpListener, allow: AllowList) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::from_std(listener)?, allow })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// What the system said.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Accepts until draining begins.
    pub async fn run(self, acceptor: Acceptor) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = acceptor.draining() => return,
            };
            match accepted {
                Ok((socket, address)) => {
                    // A small request must not wait for the acknowledgement of the one before it.
                    let _ = socket.set_nodelay(true);
                    let is_allowed = self.allow.allows(address.ip());
                    acceptor.admit(socket, Carrier::Tcp, Origin::Network(address), is_allowed);
                }
                Err(error) => acceptor.after_error(&error).await,
            }
        }
    }
}
