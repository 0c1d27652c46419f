//! What a connection needs of its socket.

use std::{
    io::{self, ErrorKind},
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, Interest, ReadBuf, Ready};

/// A connected, non-blocking stream socket. `ready` is cancel safe and the other calls never wait, so nothing is lost when
/// a `select!` drops one of them.
pub trait StreamSocket: Send + Sync + 'static {
    /// Waits until the socket can be read or written.
    fn ready(&self, interest: Interest) -> impl Future<Output = io::Result<Ready>> + Send;
    /// Reads what is there, or waits for it. A read that does not fill the buffer has emptied the socket: the next one waits
    /// without asking the system again.
    fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>>;
    /// Waits until the socket can be written.
    fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    /// Reads what is there.
    ///
    /// # Errors
    /// `WouldBlock` if nothing is.
    fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes what fits.
    ///
    /// # Errors
    /// `WouldBlock` if nothing does.
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize>;
    /// Whether nobody can read what would be written: the peer has closed its socket, not just its sending side.
    fn is_abandoned(&self) -> bool;
    /// Tells the peer that nothing more will come.
    fn shutdown_write(&self);
}

macro_rules! stream_socket {
    ($type:ty) => {
        impl StreamSocket for $type {
            async fn ready(&self, interest: Interest) -> io::Result<Ready> {
                <$type>::ready(self, interest).await
            }
            fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
                let mut buffer = ReadBuf::new(buffer);
                ready!(AsyncRead::poll_read(Pin::new(self), cx, &mut buffer))?;
                Poll::Ready(Ok(buffer.filled().len()))
            }
            fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.poll_write_ready(cx)
            }
            fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
                <$type>::try_read(self, buffer)
            }
            fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
                <$type>::try_write(self, bytes)
            }
            fn is_abandoned(&self) -> bool {
                // Sending nothing fails where sending something would.
                socket2::SockRef::from(self).send(&[]).is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
            }
            fn shutdown_write(&self) {
                // The peer may be gone already.
                let _ = socket2::SockRef::from(self).shutdown(std::net::Shutdown::Write);
            }
        }
    };
}

stream_socket!(tokio::net::UnixStream);
stream_socket!(tokio::net::TcpStream);
