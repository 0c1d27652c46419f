//! Files that appear whole or not at all: written beside their place, synced, then renamed into it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
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

/// Puts what `write` writes at `path`. A process that has the old file open or mapped keeps the old bytes.
///
/// # Errors
/// [`WriteFileError`].
pub fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), WriteFileError> {
    let failed = |source| WriteFileError { path: path.to_owned(), source };
    let Some(name) = path.file_name() else {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file")));
    };
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // Hidden and without the right ending, so that nobody who loads all files of the folder takes it.
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{:016x}.tmp", rand::random::<u64>()));
    let temporary = folder.join(temporary);
    let written = write_synced(&temporary, write).and_then(|()| fs::rename(&temporary, path));
    if let Err(source) = written {
        let _ = fs::remove_file(&temporary);
        return Err(failed(source));
    }
    // The rename is durable once the folder is; some file systems cannot sync folders, and the file is there anyway.
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    Ok(())
}

fn write_synced(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let mut out = io::BufWriter::with_capacity(1 << 20, file);
    write(&mut out)?;
    out.flush()?;
    out.get_ref().sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write_atomically(&path, |out| out.write_all(b"old")).unwrap();
        let error = write_atomically(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("disk gone"))
        });
        assert_eq!(error.unwrap_err().source.to_string(), "disk gone");
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        write_atomically(&path, |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(write_atomically(&folder.path().join("no/such"), |_| Ok(())).is_err());
        assert!(write_atomically(Path::new("/"), |_| Ok(())).is_err());
    }
}
