//! Bytes of a file in memory that nobody can change any more.
//!
//! The file is read once and copied into a memfd, which is then sealed and mapped. What was hashed while it was copied is
//! therefore what is used, whatever happens to the file on disk: a mapping of the file itself would change with it, and
//! would end the process with SIGBUS when the file is cut.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::OwnedFd,
};

use aeon_proto::hash::Fnv1a32;
use memmap2::{Mmap, MmapOptions};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

/// Bytes copied at once: large enough that the calls cost nothing, small enough for the level-2 cache that both hashes
/// then read them from.
const CHUNK_LEN: usize = 256 << 10;

/// What can go wrong; the caller adds the path.
#[derive(Debug)]
pub(super) enum SealError {
    /// Reading the source failed.
    Read(io::Error),
    /// The memfd could not be made, filled, sealed or mapped.
    Memory(io::Error),
}

/// Sealed bytes and their hashes.
#[derive(Debug)]
pub(super) struct Sealed {
    map: Mmap,
    fnv: u32,
    blake3: blake3::Hash,
}

impl Sealed {
    /// Reads `source` to its end; the caller bounds it.
    pub(super) fn copy(source: &mut dyn Read) -> Result<Self, SealError> {
        let mut file = File::from(create().map_err(|errno| SealError::Memory(errno.into()))?);
        let mut buffer = vec![0; CHUNK_LEN];
        let (mut fnv, mut blake3) = (Fnv1a32::new(), blake3::Hasher::new());
        loop {
            let count = match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(SealError::Read(error)),
            };
            let chunk = buffer.get(..count).unwrap_or_default();
            fnv.update(chunk);
            blake3.update(chunk);
            file.write_all(chunk).map_err(SealError::Memory)?;
        }
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(|errno| SealError::Memory(errno.into()))?;
        let map = map(&file).map_err(SealError::Memory)?;
        Ok(Self { map, fnv: fnv.finish(), blake3: blake3.finalize() })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    pub(super) const fn fnv(&self) -> u32 {
        self.fnv
    }

    pub(super) const fn blake3(&self) -> blake3::Hash {
        self.blake3
    }
}

/// A memfd without the right to be executed, which some systems insist on and kernels before 6.3 do not know.
fn create() -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create(c"aeon-basis", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(c"aeon-basis", flags),
        made => made,
    }
}

/// Maps a sealed memfd. A private mapping, because kernels before 6.7 refuse shared ones of sealed files even for
/// reading; the pages are the memfd's own either way, since nothing writes to them.
#[expect(unsafe_code, reason = "mapping a file is unsafe because others may change it; here nobody can")]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: a mapping is sound as long as the file behind it neither changes nor shrinks. `copy` has put F_SEAL_WRITE,
    // F_SEAL_GROW and F_SEAL_SHRINK on this memfd, and the kernel grants F_SEAL_WRITE only when no writable mapping
    // exists and refuses every later write, writable shared mapping and truncation through any descriptor; F_SEAL_SEAL
    // keeps it so. The mapping itself is read-only, and `Mmap` gives out `&[u8]` alone.
    unsafe { MmapOptions::new().map_copy_read_only(file) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn sealed_bytes_cannot_be_written_cut_or_unsealed() {
        let mut file = File::from(create().unwrap());
        file.write_all(b"before").unwrap();
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).unwrap();
        let map = map(&file).unwrap();
        let refused = |result: io::Result<()>| {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
        };
        refused(file.write_all_at(b"after!", 0));
        refused(file.set_len(0));
        refused(file.set_len(4096));
        assert_eq!(fcntl_add_seals(&file, SealFlags::FUTURE_WRITE), Err(Errno::PERM));
        assert_eq!(&map[..], b"before");
        assert!(rustix::fs::fcntl_get_seals(&file).unwrap().contains(seals));
    }

    #[test]
    fn hashes_are_of_the_bytes() {
        let bytes: Vec<u8> = (0..=255).cycle().take(3 * CHUNK_LEN + 17).collect();
        let sealed = Sealed::copy(&mut &bytes[..]).unwrap();
        assert_eq!(sealed.bytes(), bytes);
        assert_eq!(sealed.fnv(), aeon_proto::hash::fnv1a32(&bytes));
        assert_eq!(sealed.blake3(), blake3::hash(&bytes));
    }
}
