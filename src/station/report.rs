//! What operators see of a station's bases and sessions, as JSON.

use std::{
    fmt,
    hash::{BuildHasher, RandomState},
    time::Instant,
};

use serde_json::{Value, json};

use super::{Station, hello, millis};
use crate::basis::BasisFile;

/// The short name of a session in logs and lists, 12 hex digits: a keyed hash of its name with a key that is new in each
/// process. Whoever knows a session's name can work on it, so names are secrets of their clients, even those that are easy
/// to guess; this one tells sessions apart and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionTag(u64);

impl SessionTag {
    pub(super) fn new(key: &RandomState, name: &str) -> Self {
        Self(key.hash_one(name) >> 16)
    }
}

impl fmt::Display for SessionTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:012x}", self.0)
    }
}

impl Station {
    /// `{"bases":[…],"methodologies":[…],"left_out":[…]}`: what is in use now. File names, no folders.
    #[must_use]
    pub fn bases_report(&self) -> Value {
        let set = self.core.bases.current();
        let methodologies: Vec<Value> = set
            .methodologies()
            .iter()
            .map(|methodology| {
                json!({
                    "methodology": format!("0x{:08x}", methodology.spec.id()),
                    "name": methodology.name,
                    "hidden_dim": methodology.spec.hidden_dim(),
                })
            })
            .collect();
        let left_out: Vec<Value> = set
            .duplicates()
            .iter()
            .map(|left| json!({ "file": file_name(&left.path), "basis_fp": format!("0x{:08x}", left.basis_fp), "copy": left.is_copy }))
            .collect();
        let bases: Vec<Value> = set.bases().map(|file| describe(file)).collect();
        json!({ "bases": bases, "methodologies": methodologies, "left_out": left_out })
    }

    /// `{"count":…,"bytes":…,"max_count":…,"max_bytes":…,"sessions":[…]}`, the one used last first. Sessions go by their
    /// [`SessionTag`].
    #[must_use]
    pub fn sessions_report(&self) -> Value {
        let core = &*self.core;
        let sessions: Vec<Value> = core
            .sessions
            .list(Instant::now())
            .iter()
            .map(|session| {
                json!({
                    "session": core.tag(&session.name).to_string(),
                    "positions": session.positions,
                    "bytes": session.bytes,
                    "idle_ms": millis(session.idle),
                })
            })
            .collect();
        let (count, bytes) = core.sessions.usage();
        let limits = &core.limits.sessions;
        json!({
            "count": count,
            "bytes": bytes,
            "max_count": limits.count,
            "max_bytes": limits.bytes,
            "sessions": sessions,
        })
    }
}

fn file_name(path: &std::path::Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What HELLO says of a basis, and what only operators are told.
fn describe(file: &BasisFile) -> Value {
    let mut described = hello::describe(file);
    described["file"] = file_name(file.path()).into();
    described["hidden_dim"] = file.hidden_dim().into();
    described["bytes"] = file.byte_len().into();
    described
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_tells_sessions_apart_and_is_of_this_process_alone() {
        let (key, other) = (RandomState::new(), RandomState::new());
        let tag = |key: &RandomState, name: &str| SessionTag::new(key, name).to_string();
        assert_eq!(tag(&key, "a"), tag(&key, "a"));
        assert_ne!(tag(&key, "a"), tag(&key, "b"));
        assert_ne!(tag(&key, "a"), tag(&other, "a"));
        assert_eq!(tag(&key, "a").len(), 12);
    }
}
