//! The bases that a station serves with: several at once, each request holding on to the set that it began with.
//!
//! ```text
//! DIR/*.pcab ───────────┐
//! DIR/methodologies/ ───┴─ load ──> BasisSet ──(swapped whole)──> Registry ── current() ──> Arc<BasisSet>
//! ```
//!
//! A set never changes. A reload builds a new one beside it and swaps them; when anything is wrong, the old one stays. A
//! request takes an `Arc` of the set or of its basis, so a basis that is withdrawn lives until its last request ends.
//! Several bases can be loaded, which is what makes a rolling change of basis possible. Spec: `proto/SPEC.md`, "PCAR".

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use super::{
    file::{self, BasisFile, OpenError},
    methodologies::{Methodologies, MethodologyError},
};
use crate::causes::with_causes;

/// Why a set of bases is not loaded.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The folder cannot be listed.
    #[error("{path}: cannot read the folder of bases")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A basis file is bad.
    #[error(transparent)]
    Basis(#[from] OpenError),
    /// The methodologies are bad.
    #[error(transparent)]
    Methodology(#[from] MethodologyError),
    /// A basis was fitted by a methodology that is not there.
    #[error(
        "{path}: made by methodology {methodology:#010x}, which is not among those loaded; \
         put its spec there with: aeonctl methodology add"
    )]
    UnknownMethodology {
        /// The basis file.
        path: PathBuf,
        /// The id in it.
        methodology: u32,
    },
    /// A basis and its methodology are of different widths.
    #[error("{path}: hidden_dim is {got}, but its methodology {methodology} says {expected}")]
    HiddenDim {
        /// The basis file.
        path: PathBuf,
        /// The methodology's name.
        methodology: String,
        /// By the methodology.
        expected: u32,
        /// In the file.
        got: u32,
    },
    /// A basis has a boundary that its methodology does not name.
    #[error("{path}: has boundary {boundary}, which its methodology {methodology} does not name")]
    Boundary {
        /// The basis file.
        path: PathBuf,
        /// The methodology's name.
        methodology: String,
        /// The boundary.
        boundary: u32,
    },
}

/// A basis file that was left out because another one has its fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: has the basis_fp {basis_fp:#010x} of {first}{}", if *.is_copy { " (a copy)" } else { " but other contents" })]
pub struct Duplicate {
    /// The file that was left out.
    pub path: PathBuf,
    /// The file that is served.
    pub first: PathBuf,
    /// Their fingerprint.
    pub basis_fp: u32,
    /// Whether they are the same file; else two files happen to have one fingerprint.
    pub is_copy: bool,
}

/// Why a request cannot use a basis. The station answers 412.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// No loaded basis has this fingerprint.
    #[error("basis fingerprint mismatch")]
    UnknownBasis {
        /// What was asked for.
        basis_fp: u32,
        /// What is loaded.
        have: Vec<u32>,
    },
    /// The methodology is not loaded, or is not the one of that basis.
    #[error("methodology mismatch")]
    Methodology {
        /// The basis's.
        expected: u32,
        /// What was asked for.
        got: u32,
    },
}

/// Bases and methodologies that belong together. Never changes.
#[derive(Debug, Default)]
pub struct BasisSet {
    bases: HashMap<u32, Arc<BasisFile>>,
    order: Vec<Arc<BasisFile>>,
    methodologies: Methodologies,
    duplicates: Vec<Duplicate>,
}

impl BasisSet {
    /// Puts files and methodologies together. Of two files with one fingerprint the first is taken.
    ///
    /// # Errors
    /// [`RegistryError`] if a basis has no methodology here, or does not fit it.
    pub fn new(files: Vec<Arc<BasisFile>>, methodologies: Methodologies) -> Result<Self, RegistryError> {
        let mut set = Self { methodologies, ..Self::default() };
        for file in files {
            set.check_methodology(&file)?;
            let basis_fp = file.basis_fp();
            if let Some(first) = set.bases.get(&basis_fp) {
                let is_copy = first.blake3() == file.blake3();
                let (path, first) = (file.path().to_owned(), first.path().to_owned());
                set.duplicates.push(Duplicate { path, first, basis_fp, is_copy });
                continue;
            }
            set.bases.insert(basis_fp, Arc::clone(&file));
            set.order.push(file);
        }
        Ok(set)
    }

    fn check_methodology(&self, file: &BasisFile) -> Result<(), RegistryError> {
        let (path, id) = (file.path().to_owned(), file.methodology());
        let Some(methodology) = self.methodologies.get(id) else {
            return Err(RegistryError::UnknownMethodology { path, methodology: id });
        };
        let (expected, got) = (methodology.spec.hidden_dim(), file.hidden_dim());
        if expected != got {
            return Err(RegistryError::HiddenDim { path, methodology: methodology.name.clone(), expected, got });
        }
        let named = methodology.spec.boundaries();
        let unnamed = |boundary: &u32| named.is_some_and(|named| named.binary_search(boundary).is_err());
        if let Some(boundary) = file.boundaries().map(|part| part.boundary).find(unnamed) {
            return Err(RegistryError::Boundary { path, methodology: methodology.name.clone(), boundary });
        }
        Ok(())
    }

    /// The basis with a fingerprint.
    #[must_use]
    pub fn get(&self, basis_fp: u32) -> Option<&Arc<BasisFile>> {
        self.bases.get(&basis_fp)
    }

    /// The basis with a BLAKE3 hash.
    #[must_use]
    pub fn by_hash(&self, hash: &blake3::Hash) -> Option<&Arc<BasisFile>> {
        self.order.iter().find(|file| file.blake3() == *hash)
    }

    /// The basis that a body names by fingerprint and methodology.
    ///
    /// # Errors
    /// [`LookupError`], the fingerprint first.
    pub fn find(&self, basis_fp: u32, methodology: u32) -> Result<&Arc<BasisFile>, LookupError> {
        let Some(file) = self.bases.get(&basis_fp) else {
            return Err(LookupError::UnknownBasis { basis_fp, have: self.fingerprints().collect() });
        };
        let expected = file.methodology();
        match expected == methodology && self.methodologies.get(methodology).is_some() {
            true => Ok(file),
            false => Err(LookupError::Methodology { expected, got: methodology }),
        }
    }

    /// All bases, in the order of their file names.
    pub fn bases(&self) -> impl ExactSizeIterator<Item = &Arc<BasisFile>> {
        self.order.iter()
    }

    /// The fingerprints of all bases, in the same order.
    pub fn fingerprints(&self) -> impl ExactSizeIterator<Item = u32> {
        self.order.iter().map(|file| file.basis_fp())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The methodologies.
    #[must_use]
    pub const fn methodologies(&self) -> &Methodologies {
        &self.methodologies
    }

    /// The files that were left out.
    #[must_use]
    pub fn duplicates(&self) -> &[Duplicate] {
        &self.duplicates
    }
}

/// Where bases and methodologies are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Folder of `*.pcab`.
    pub bases: PathBuf,
    /// Folder of methodologies; `methodologies` in the folder of bases if `None`, and then it need not exist.
    pub methodologies: Option<PathBuf>,
    /// Largest basis file, in bytes.
    pub max_len: u64,
}

impl Source {
    /// A folder of bases with its methodologies in it, and the usual limit.
    #[must_use]
    pub fn new(bases: impl Into<PathBuf>) -> Self {
        Self { bases: bases.into(), methodologies: None, max_len: file::DEFAULT_MAX_LEN }
    }

    /// Loads everything. What `old` already serves from the same path and with the same bytes is taken over from it, and
    /// comes first where fingerprints collide.
    fn load(&self, old: &BasisSet) -> Result<BasisSet, RegistryError> {
        let default = self.bases.join("methodologies");
        let methodologies = match &self.methodologies {
            Some(folder) => Methodologies::load(folder)?,
            None if default.exists() => Methodologies::load(&default)?,
            None => Methodologies::default(),
        };
        let mut files = Vec::new();
        for path in self.paths()? {
            let file = BasisFile::open_with_limit(&path, self.max_len)?;
            let served = old.get(file.basis_fp());
            let same = served.filter(|served| served.path() == path && served.blake3() == file.blake3());
            files.push(same.map_or_else(|| Arc::new(file), Arc::clone));
        }
        let is_new = |file: &Arc<BasisFile>| !old.get(file.basis_fp()).is_some_and(|served| Arc::ptr_eq(served, file));
        files.sort_by_key(is_new);
        let mut set = BasisSet::new(files, methodologies)?;
        set.order.sort_by(|a, b| a.path().cmp(b.path()));
        Ok(set)
    }

    /// The basis files of the folder, in order. Hidden ones, such as those that are being written, are passed over.
    fn paths(&self) -> Result<Vec<PathBuf>, RegistryError> {
        let failed = |source| RegistryError::Folder { path: self.bases.clone(), source };
        let mut paths = Vec::new();
        for entry in fs::read_dir(&self.bases).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
            if !hidden && path.extension().is_some_and(|extension| extension == "pcab") {
                paths.push(path);
            }
        }
        paths.sort();
        Ok(paths)
    }
}

/// What a reload changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reload {
    /// Fingerprints that are served now and were not before.
    pub added: Vec<u32>,
    /// Fingerprints that were served before and are no longer.
    pub withdrawn: Vec<u32>,
    /// How many stayed.
    pub kept: usize,
    /// Files that were left out.
    pub duplicates: Vec<Duplicate>,
}

/// The set in use, and where it comes from.
#[derive(Debug, Default)]
pub struct Registry {
    source: Option<Source>,
    current: RwLock<Arc<BasisSet>>,
    /// Held while a new set is built, so that reloads come one after the other.
    reloading: Mutex<()>,
    /// Why the last reload changed nothing, if it failed.
    failure: Mutex<Option<String>>,
}

impl Registry {
    /// Loads bases and methodologies.
    ///
    /// # Errors
    /// See [`RegistryError`]: a station does not start with a basis that it cannot use.
    pub fn open(source: Source) -> Result<Self, RegistryError> {
        let set = source.load(&BasisSet::default())?;
        Ok(Self { source: Some(source), ..Self::fixed(set) })
    }

    /// A registry of a set that comes from no folder; reloading keeps it.
    #[must_use]
    pub fn fixed(set: BasisSet) -> Self {
        Self { current: RwLock::new(Arc::new(set)), ..Self::default() }
    }

    /// The set in use. A request takes it once and keeps it to its end.
    #[must_use]
    pub fn current(&self) -> Arc<BasisSet> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The folder that bases come from.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.source.as_ref().map(|source| &*source.bases)
    }

    /// Loads everything again and swaps the set. Reads all files: not for a thread that serves sockets.
    ///
    /// # Errors
    /// See [`RegistryError`]; the old set stays in use then.
    pub fn reload(&self) -> Result<Reload, RegistryError> {
        let _one_at_a_time = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        let old = self.current();
        let Some(source) = &self.source else {
            return Ok(Reload { kept: old.order.len(), ..Reload::default() });
        };
        let loaded = source.load(&old);
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) =
            loaded.as_ref().err().map(|error| with_causes(error));
        Ok(self.swap(&old, loaded?))
    }

    /// Why the last reload failed, with its causes; `None` if it went well, or if there was none.
    #[must_use]
    pub fn last_failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts another set in use.
    pub fn replace(&self, set: BasisSet) -> Reload {
        let _one_at_a_time = self.reloading.lock().unwrap_or_else(PoisonError::into_inner);
        self.swap(&self.current(), set)
    }

    fn swap(&self, old: &BasisSet, new: BasisSet) -> Reload {
        // By hash, because another file with the same fingerprint is another basis.
        let missing_in = |set: &BasisSet, file: &Arc<BasisFile>| set.by_hash(&file.blake3()).is_none();
        let fingerprint = |file: &Arc<BasisFile>| file.basis_fp();
        let added: Vec<u32> = new.order.iter().filter(|file| missing_in(old, file)).map(fingerprint).collect();
        let reload = Reload {
            withdrawn: old.order.iter().filter(|file| missing_in(&new, file)).map(fingerprint).collect(),
            kept: new.order.len() - added.len(),
            duplicates: new.duplicates.clone(),
            added,
        };
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
        reload
    }
}
