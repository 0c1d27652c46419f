//! Files that appear whole or not at all: written beside their place, synced, then renamed into it.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// A file could not be written; whatever was at its place is still there.
#[derive(Debug, thiserror::Error)]
#[error("{path}: cannot write the file")]
pub struct WriteFileError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Puts `bytes` at `path`. A process that has the old file open or mapped keeps the old bytes.
///
/// # Errors
/// [`WriteFileError`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), WriteFileError> {
    let file = AtomicFile::create(path)?;
    file.write_at(bytes, 0)?;
    file.finish()
}

/// A file that is being written. Dropped before [`Self::finish`], it leaves nothing.
#[derive(Debug)]
pub(super) struct AtomicFile {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
}

impl AtomicFile {
    pub(super) fn create(path: &Path) -> Result<Self, WriteFileError> {
        let failed = |source| WriteFileError { path: path.to_owned(), source };
        let Some(name) = path.file_name() else {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file")));
        };
        // Hidden and with another ending, so that nobody who loads all files of the folder takes it.
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{:016x}.tmp", rand::random::<u64>()));
        let temporary = path.with_file_name(hidden);
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary).map_err(failed)?;
        Ok(Self { path: path.to_owned(), temporary, file })
    }

    pub(super) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), WriteFileError> {
        self.file.write_all_at(bytes, offset).map_err(|source| WriteFileError { path: self.path.clone(), source })
    }

    /// An error about this file that the system did not find.
    pub(super) fn failed(&self, problem: String) -> WriteFileError {
        WriteFileError { path: self.path.clone(), source: io::Error::new(io::ErrorKind::InvalidInput, problem) }
    }

    pub(super) fn finish(self) -> Result<(), WriteFileError> {
        let renamed = self.file.sync_all().and_then(|()| fs::rename(&self.temporary, &self.path));
        renamed.map_err(|source| WriteFileError { path: self.path.clone(), source })?;
        // The rename is durable once the folder is; some file systems cannot sync folders, and the file is there anyway.
        let folder = self.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // Gone already when it was finished.
        let _ = fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_finished_leaves_the_old_one_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_atomically(&path, b"old").unwrap();
        let half = AtomicFile::create(&path).unwrap();
        half.write_at(b"half", 0).unwrap();
        assert_eq!(half.failed("disk gone".to_owned()).source.to_string(), "disk gone");
        drop(half);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        write_atomically(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write_atomically(&folder.path().join("no/such"), b"").is_err());
        assert!(write_atomically(Path::new("/"), b"").is_err());
        assert!(write_atomically(folder.path(), b"").is_err(), "a folder is not replaced");
    }
}
