//! The methodologies that a station knows: a folder of specs, one JSON file each.
//!
//! `qwen-0.5b/k8.json` is the methodology named `qwen-0.5b/k8`. The wire carries the id of a spec, never the spec, so both
//! sides need the file. [`super::registry`] loads the folder with the bases; `aeonctl methodology` lists it and adds to it.
//! What a spec holds is the business of `aeon_proto::methodology`.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use aeon_proto::methodology::{self, MethodologySpec};

use super::{
    atomic::{WriteFileError, write_atomically},
    file::{OpenError, open_regular},
};

/// Longest spec that is read.
const MAX_SPEC_LEN: u64 = 1 << 20;
/// Most specs in a folder: each is looked at on every reload.
const MAX_SPECS: usize = 10_000;
/// Folders in folders; more is a loop of links.
const MAX_DEPTH: usize = 8;

/// A methodology and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Methodology {
    /// Its file below the folder, without `.json`.
    pub name: String,
    /// Its file.
    pub path: PathBuf,
    /// What it says.
    pub spec: MethodologySpec,
}

/// Methodologies by id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Methodologies {
    by_id: BTreeMap<u32, Methodology>,
}

/// Why methodologies are not loaded, or one is not added.
#[derive(Debug, thiserror::Error)]
pub enum MethodologyError {
    /// A folder cannot be listed.
    #[error("{path}: cannot read the folder of methodologies")]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] OpenError),
    /// A file is no text.
    #[error("{path}: not UTF-8 at byte {valid_up_to}")]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Bytes that are.
        valid_up_to: usize,
    },
    /// A file is no methodology.
    #[error("{path}: not a methodology")]
    Spec {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: methodology::Error,
    },
    /// Two different specs have one id.
    #[error("{path}: has the id {id:#010x} of {first}, which says something else; change \"variant\" in one of them")]
    Collision {
        /// The second file.
        path: PathBuf,
        /// The first.
        first: PathBuf,
        /// Their id.
        id: u32,
    },
    /// The folder holds more than anyone would have.
    #[error("{path}: more than {MAX_SPECS} methodologies, or folders nested deeper than {MAX_DEPTH}")]
    TooMany {
        /// The folder.
        path: PathBuf,
    },
    /// A name that leads out of the folder or to no file.
    #[error("{name:?} is no name of a methodology; write MODEL/VARIANT in letters, digits, '.', '-' and '_'")]
    BadName {
        /// The name.
        name: String,
    },
    /// There is another spec of that name.
    #[error("{path}: exists, and says something else; choose another name")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] WriteFileError),
}

impl Methodologies {
    /// Loads all `*.json` of a folder and the folders in it. Hidden files are passed over.
    ///
    /// # Errors
    /// See [`MethodologyError`]; one bad file fails the whole.
    pub fn load(folder: &Path) -> Result<Self, MethodologyError> {
        let mut found = Vec::new();
        list(folder, "", 0, &mut found)?;
        found.sort();
        let mut methodologies = Self::default();
        for (name, path) in found {
            let spec = read_spec(&path)?;
            methodologies.insert(Methodology { name, path, spec })?;
        }
        Ok(methodologies)
    }

    /// Puts a methodology in. One that says the same as another changes nothing.
    ///
    /// # Errors
    /// [`MethodologyError::Collision`].
    pub fn insert(&mut self, methodology: Methodology) -> Result<(), MethodologyError> {
        let id = methodology.spec.id();
        if let Some(first) = self.by_id.get(&id) {
            if first.spec.canonical() == methodology.spec.canonical() {
                return Ok(());
            }
            return Err(MethodologyError::Collision { path: methodology.path, first: first.path.clone(), id });
        }
        self.by_id.insert(id, methodology);
        Ok(())
    }

    /// The methodology with an id.
    #[must_use]
    pub fn get(&self, id: u32) -> Option<&Methodology> {
        self.by_id.get(&id)
    }

    /// All of them, by id.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Methodology> {
        self.by_id.values()
    }
}

/// Reads one spec.
///
/// # Errors
/// See [`MethodologyError`].
pub fn read_spec(path: &Path) -> Result<MethodologySpec, MethodologyError> {
    let (file, len) = open_regular(path)?;
    if len > MAX_SPEC_LEN {
        return Err(OpenError::TooLarge { path: path.to_owned(), max: MAX_SPEC_LEN, got: len }.into());
    }
    let mut bytes = Vec::new();
    file.take(MAX_SPEC_LEN)
        .read_to_end(&mut bytes)
        .map_err(|source| OpenError::Unreadable { path: path.to_owned(), source })?;
    let text = std::str::from_utf8(&bytes)
        .map_err(|error| MethodologyError::NotUtf8 { path: path.to_owned(), valid_up_to: error.valid_up_to() })?;
    MethodologySpec::parse(text).map_err(|source| MethodologyError::Spec { path: path.to_owned(), source })
}

/// Adds a spec to a folder under a name such as `qwen-0.5b/k8`, as canonical JSON, and returns its file.
///
/// # Errors
/// See [`MethodologyError`]; a name that is taken by the same spec is no error.
pub fn add(folder: &Path, name: &str, spec: &MethodologySpec) -> Result<PathBuf, MethodologyError> {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
    };
    if !name.split('/').all(is_part) || name.split('/').count() > MAX_DEPTH {
        return Err(MethodologyError::BadName { name: name.to_owned() });
    }
    let path = folder.join(format!("{name}.json"));
    let mut known = match fs::exists(folder) {
        Ok(false) => Methodologies::default(),
        _ => Methodologies::load(folder)?,
    };
    if let Some(there) = known.iter().find(|methodology| methodology.name == name)
        && there.spec != *spec
    {
        return Err(MethodologyError::Exists { path });
    }
    known.insert(Methodology { name: name.to_owned(), path: path.clone(), spec: spec.clone() })?;
    let parent = path.parent().unwrap_or(folder);
    fs::create_dir_all(parent).map_err(|source| MethodologyError::Folder { path: parent.to_owned(), source })?;
    write_atomically(&path, |out| {
        out.write_all(spec.canonical().as_bytes())?;
        out.write_all(b"\n")
    })?;
    Ok(path)
}

/// Collects names and files below `folder`.
fn list(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<(String, PathBuf)>) -> Result<(), MethodologyError> {
    let failed = |source| MethodologyError::Folder { path: folder.to_owned(), source };
    if depth >= MAX_DEPTH {
        return Err(MethodologyError::TooMany { path: folder.to_owned() });
    }
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let file_name = entry.file_name();
        let Some(name) = file_name.to_str().filter(|name| !name.starts_with('.')) else { continue };
        let path = entry.path();
        if fs::metadata(&path).is_ok_and(|metadata| metadata.is_dir()) {
            list(&path, &format!("{prefix}{name}/"), depth + 1, found)?;
        } else if let Some(name) = name.strip_suffix(".json") {
            if found.len() >= MAX_SPECS {
                return Err(MethodologyError::TooMany { path: folder.to_owned() });
            }
            found.push((format!("{prefix}{name}"), path));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(variant: &str) -> MethodologySpec {
        let text = format!(r#"{{"model":"toy","hidden_dim":4,"k_rule":{{"fixed":2}},"variant":"{variant}"}}"#);
        MethodologySpec::parse(&text).unwrap()
    }

    #[test]
    fn added_specs_are_found_under_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("methodologies");
        let path = add(&folder, "toy/a", &spec("a")).unwrap();
        assert_eq!(path, folder.join("toy/a.json"));
        add(&folder, "toy/a", &spec("a")).unwrap();
        add(&folder, "b", &spec("b")).unwrap();
        fs::write(folder.join("notes.txt"), "no spec").unwrap();
        fs::write(folder.join(".hidden.json"), "no spec").unwrap();
        let loaded = Methodologies::load(&folder).unwrap();
        let mut names: Vec<_> = loaded.iter().map(|methodology| &*methodology.name).collect();
        names.sort_unstable();
        assert_eq!(names, ["b", "toy/a"]);
        assert_eq!(loaded.get(spec("a").id()).unwrap().spec, spec("a"));
        assert!(matches!(add(&folder, "toy/a", &spec("c")), Err(MethodologyError::Exists { .. })));
        for name in ["", "/etc/x", "../x", "a//b", "a/../b", ".x", "a/.b", "sp ace"] {
            assert!(matches!(add(&folder, name, &spec("d")), Err(MethodologyError::BadName { .. })), "{name}");
        }
    }

    #[test]
    fn one_bad_file_fails_the_folder_and_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let bad = folder.path().join("bad.json");
        fs::write(&bad, "{}").unwrap();
        let error = Methodologies::load(folder.path()).unwrap_err();
        assert!(matches!(&error, MethodologyError::Spec { path, .. } if *path == bad), "{error}");
        fs::write(&bad, b"\xff").unwrap();
        assert!(matches!(Methodologies::load(folder.path()), Err(MethodologyError::NotUtf8 { valid_up_to: 0, .. })));
        fs::write(&bad, vec![b' '; MAX_SPEC_LEN as usize + 1]).unwrap();
        let error = Methodologies::load(folder.path());
        assert!(matches!(error, Err(MethodologyError::File(OpenError::TooLarge { .. }))));
        fs::remove_file(&bad).unwrap();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("loop")).unwrap();
        assert!(matches!(Methodologies::load(folder.path()), Err(MethodologyError::TooMany { .. })));
        assert!(matches!(Methodologies::load(&bad), Err(MethodologyError::Folder { .. })));
    }
}
