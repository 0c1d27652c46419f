//! The Unix socket carrier: binding a path safely, and accepting on it.
//!
//! A socket file is replaced only if nobody listens on it, and removed at the end only if it is still the one that was
//! made here. It appears at its path with its final mode, since it is bound under another name in the same folder and
//! renamed. Two stations that start at once on one path are kept apart by a lock on the folder.

use std::{
    fs, io,
    os::{
        fd::AsRawFd,
        unix::{
            fs::{FileTypeExt, MetadataExt, PermissionsExt},
            net::UnixListener as StdListener,
        },
    },
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::UnixListener;

use super::{listener::Acceptor, peer::CredentialList};
use crate::station::request::{Carrier, Origin};

/// Bytes of a socket path: `sun_path` holds 108, one of which ends it.
const MAX_PATH_LEN: usize = 107;

/// Why a socket path cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path does not fit a socket address.
    #[error(
        "socket path {path} has {len} bytes, a socket address holds {max}; choose a shorter one, for example under /run"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        len: usize,
        /// Bytes that fit.
        max: usize,
    },
    /// A station runs there already.
    #[error("a process already listens on {path}{}; stop it or choose another path", pid.map_or(String::new(), |pid| format!(" (pid {pid})")))]
    InUse {
        /// The path.
        path: PathBuf,
        /// The process that listens, if the system says so.
        pid: Option<i32>,
    },
    /// Something that is no socket is in the way.
    #[error("{path} exists and is no socket; it is left alone, choose another path or remove it")]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// No group of this name.
    #[error("no group {group:?} on this system")]
    UnknownGroup {
        /// The name.
        group: String,
    },
    /// The system refused.
    #[error("{action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Options of a Unix socket listener.
#[derive(Debug, Clone)]
pub struct UdsOptions {
    /// Mode of the socket file.
    pub mode: u32,
    /// Group of the socket file: a name or a number.
    pub group: Option<String>,
    /// Who may connect, beyond what the mode says.
    pub credentials: CredentialList,
}

impl Default for UdsOptions {
    fn default() -> Self {
        Self { mode: 0o660, group: None, credentials: CredentialList::default() }
    }
}

/// A bound socket file; it is removed when this goes, if it is still ours.
#[derive(Debug)]
pub struct BoundSocket {
    listener: StdListener,
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        if let Ok(meta) = fs::symlink_metadata(&self.path)
            && (meta.dev(), meta.ino()) == self.identity
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds `path`.
///
/// # Errors
/// See [`BindError`]. Nothing at `path` is touched then.
pub fn bind(path: &Path, options: &UdsOptions) -> Result<BoundSocket, BindError> {
    check_path_len(path)?;
    let io_error = |action, path: &Path| {
        let path = path.to_owned();
        move |source| BindError::Io { action, path, source }
    };
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let lock = fs::File::open(folder).map_err(io_error("opening the folder of the socket,", folder))?;
    flock(&lock, FlockOperation::LockExclusive)
        .map_err(|error| io_error("locking the folder of the socket,", folder)(error.into()))?;
    check_free(path)?;

    // By way of the folder's descriptor the temporary name is short, however long the path is.
    let temporary = PathBuf::from(format!("/proc/self/fd/{}/.aeon-{}", lock.as_raw_fd(), std::process::id()));
    // Under the lock and with our own process id, this can only be left from a process that died.
    let _ = fs::remove_file(&temporary);
    let listener = StdListener::bind(&temporary).map_err(io_error("binding", path))?;
    let publish = || {
        if let Some(group) = &options.group {
            let gid = group_id(group)?;
            std::os::unix::fs::chown(&temporary, None, Some(gid)).map_err(io_error("setting the group of", path))?;
        }
        fs::set_permissions(&temporary, fs::Permissions::from_mode(options.mode))
            .map_err(io_error("setting the mode of", path))?;
        listener.set_nonblocking(true).map_err(io_error("setting up", path))?;
        let meta = fs::symlink_metadata(&temporary).map_err(io_error("looking at", path))?;
        fs::rename(&temporary, path).map_err(io_error("naming", path))?;
        Ok((meta.dev(), meta.ino()))
    };
    match publish() {
        Ok(identity) => Ok(BoundSocket { listener, path: path.to_owned(), identity }),
        Err(error) => {
            let _ = fs::remove_file(&temporary);
            Err(error)
        }
    }
}

/// Whether a path fits a socket address.
///
/// # Errors
/// [`BindError::PathTooLong`].
pub(crate) fn check_path_len(path: &Path) -> Result<(), BindError> {
    match path.as_os_str().len() {
        len if len > MAX_PATH_LEN => Err(BindError::PathTooLong { path: path.to_owned(), len, max: MAX_PATH_LEN }),
        _ => Ok(()),
    }
}

/// Whether a path can be taken: nothing there, or a socket that nobody listens on.
fn check_free(path: &Path) -> Result<(), BindError> {
    let meta = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(BindError::Io { action: "looking at", path: path.to_owned(), source }),
        Ok(meta) => meta,
    };
    if !meta.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.to_owned() });
    }
    match probe(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(stream) => {
            let pid = rustix::net::sockopt::socket_peercred(&stream).ok().map(|cred| cred.pid.as_raw_pid());
            Err(BindError::InUse { path: path.to_owned(), pid: pid.filter(|pid| *pid > 0) })
        }
        // A full backlog, or a socket of another kind: someone is there.
        Err(_) => Err(BindError::InUse { path: path.to_owned(), pid: None }),
    }
}

/// Connects without waiting: on a socket whose backlog is full, a plain connect would.
fn probe(path: &Path) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(socket)
}

/// The number of a group, by name in the system's group file or as a number.
fn group_id(group: &str) -> Result<u32, BindError> {
    if let Ok(gid) = group.parse() {
        return Ok(gid);
    }
    let unknown = || BindError::UnknownGroup { group: group.to_owned() };
    let groups = fs::read_to_string("/etc/group").map_err(|_| unknown())?;
    groups
        .lines()
        .map(|line| line.split(':'))
        .find_map(|mut fields| (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok()).flatten())
        .ok_or_else(unknown)
}

/// Where a socket listens; an abstract name begins with `@`, as systemd writes it.
///
/// # Errors
/// What the system said.
pub fn path_of(listener: &StdListener) -> io::Result<PathBuf> {
    use std::os::{linux::net::SocketAddrExt, unix::ffi::OsStrExt};
    let address = listener.local_addr()?;
    let text = match (address.as_pathname(), address.as_abstract_name()) {
        (Some(path), _) => return Ok(path.to_owned()),
        (None, Some(name)) => [b"@", name].concat(),
        (None, None) => b"(unnamed)".to_vec(),
    };
    Ok(std::ffi::OsStr::from_bytes(&text).into())
}

/// A listener that is ready to accept.
#[derive(Debug)]
pub struct UdsListener {
    listener: UnixListener,
    path: PathBuf,
    /// The socket file, if it was made here.
    _file: Option<BoundSocket>,
    credentials: CredentialList,
}

impl UdsListener {
    /// Takes a bound socket into the running runtime.
    ///
    /// # Errors
    /// If the runtime cannot watch it.
    pub fn new(socket: BoundSocket, credentials: CredentialList) -> io::Result<Self> {
        let listener = UnixListener::from_std(socket.listener.try_clone()?)?;
        Ok(Self { listener, path: socket.path.clone(), _file: Some(socket), credentials })
    }

    /// Takes a non-blocking socket that listens already. Its file stays when this goes.
    ///
    /// # Errors
    /// If the runtime cannot watch it.
    pub fn inherit(listener: StdListener, credentials: CredentialList) -> io::Result<Self> {
        let path = path_of(&listener)?;
        Ok(Self { listener: UnixListener::from_std(listener)?, path, _file: None, credentials })
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts until draining begins.
    pub async fn run(self, acceptor: Acceptor) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = acceptor.draining() => return,
            };
            match accepted {
                Ok((socket, _)) => {
                    let peer = socket.peer_cred();
                    let origin = peer
                        .as_ref()
                        .map_or(Origin::Unknown, |cred| Origin::Process { pid: cred.pid(), uid: cred.uid() });
                    let allowed = peer.is_ok_and(|cred| self.credentials.allows(cred.uid(), cred.gid()));
                    acceptor.admit(socket, Carrier::Unix, origin, allowed);
                }
                Err(error) => acceptor.after_error(&error).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream as StdStream;

    use super::*;

    fn bind_default(path: &Path) -> Result<BoundSocket, BindError> {
        bind(path, &UdsOptions::default())
    }

    #[test]
    fn a_stale_file_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(StdListener::bind(&path).unwrap());
        assert!(path.exists());
        let bound = bind_default(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        let error = bind_default(&path).unwrap_err();
        assert!(
            matches!(error, BindError::InUse { pid: Some(pid), .. } if pid == std::process::id() as i32),
            "{error}"
        );
        assert!(StdStream::connect(&path).is_ok());
        drop(bound);
        assert!(!path.exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_listener_with_a_full_backlog_is_someone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        listener.listen(0).unwrap();
        let waiting: Vec<_> = std::iter::from_fn(|| probe(&path).ok()).take(100).collect();
        assert!(waiting.len() < 100);
        assert!(matches!(bind_default(&path), Err(BindError::InUse { .. })));
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (file, folder, link) = (dir.path().join("f"), dir.path().join("d"), dir.path().join("l"));
        fs::write(&file, "keep").unwrap();
        fs::create_dir(&folder).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &folder, &link] {
            assert!(matches!(bind_default(path), Err(BindError::NotASocket { .. })), "{path:?}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "keep");
        assert!(folder.is_dir() && fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[test]
    fn only_our_own_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = bind_default(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = bind_default(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn paths_around_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let room = MAX_PATH_LEN - dir.path().as_os_str().len() - 1;
        let fits = dir.path().join("x".repeat(room));
        let bound = bind_default(&fits).unwrap();
        assert!(StdStream::connect(&fits).is_ok());
        drop(bound);
        let error = bind_default(&dir.path().join("x".repeat(room + 1))).unwrap_err();
        assert!(error.to_string().contains("has 108 bytes, a socket address holds 107"), "{error}");
    }

    #[test]
    fn mode_and_group_are_set_before_the_name_appears() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let bound = bind(&path, &UdsOptions { mode: 0o600, ..UdsOptions::default() }).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(bound);
        let options = UdsOptions { group: Some("no such group".into()), ..UdsOptions::default() };
        assert!(matches!(bind(&path, &options), Err(BindError::UnknownGroup { .. })));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert_eq!(group_id("0").unwrap(), 0);
        assert_eq!(group_id("root").unwrap(), 0);
    }
}
