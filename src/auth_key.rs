//! The file that a shared key is kept in, for stations and clients. What is done with it: `aeon_proto::auth`.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use aeon_proto::auth::{Key, SecretTooShort};

/// The longest key file, in bytes.
const MAX_LEN: u64 = 4096;
/// Name of the systemd credential.
const CREDENTIAL: &str = "auth-key";

/// Why a file gives no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// Too much for a key; probably another file.
    #[error("more than {MAX_LEN} bytes: this is no key file")]
    TooLong,
    /// Too little for a key.
    #[error(transparent)]
    TooShort(#[from] SecretTooShort),
}

/// Reads a key file. White space at its ends does not count. One that everybody may read is used with a warning.
///
/// # Errors
/// See [`KeyFileError`].
pub fn read(path: &Path) -> Result<Key, KeyFileError> {
    let file = File::open(path)?;
    if file.metadata()?.permissions().mode() & 0o004 != 0 {
        tracing::warn!(path = %path.display(), "everybody on this machine may read the key file; chmod o-r it");
    }
    let mut secret = Vec::new();
    file.take(MAX_LEN + 1).read_to_end(&mut secret)?;
    if secret.len() as u64 > MAX_LEN {
        return Err(KeyFileError::TooLong);
    }
    Ok(Key::from_secret(&secret)?)
}

/// The file of the credential `auth-key`, if systemd handed one over (`LoadCredential=auth-key:FILE`).
#[must_use]
pub fn credential() -> Option<PathBuf> {
    let path = Path::new(&std::env::var_os("CREDENTIALS_DIRECTORY")?).join(CREDENTIAL);
    path.exists().then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_file_is_read_within_limits() {
        let dir = tempfile::tempdir().unwrap();
        let file = |content: &[u8]| {
            let path = dir.path().join("key");
            std::fs::write(&path, content).unwrap();
            read(&path)
        };
        assert!(file(b"0123456789abcdef\n").is_ok());
        assert!(matches!(file(b"0123456789abcde\n"), Err(KeyFileError::TooShort(SecretTooShort { got: 15 }))));
        assert!(matches!(file(&[b'x'; 4097]), Err(KeyFileError::TooLong)));
        assert!(file(&[b'x'; 4096]).is_ok());
        assert!(matches!(read(dir.path()), Err(KeyFileError::Read(_))));
        assert!(matches!(read(Path::new("/nowhere")), Err(KeyFileError::Read(_))));
    }
}
