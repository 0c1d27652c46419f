//! The registry: loading a folder, looking bases up, and reloading it well and badly.

use std::{fs, path::PathBuf, sync::Arc};

use aeon_station::basis::{
    BasisFile, BasisSet, LookupError, OpenError, Registry,
    methodologies::{Methodologies, MethodologyError},
    registry::{RegistryError, Source},
};

use crate::toy;

fn fp(name: &str) -> u32 {
    aeon_proto::hash::fnv1a32(&toy::basis(name))
}

#[test]
fn bases_are_found_by_fingerprint_and_methodology() {
    let folder = toy::folder(&["b", "a"]);
    let registry = Registry::open(Source::new(folder.path())).unwrap();
    let set = registry.current();
    assert_eq!(set.fingerprints().collect::<Vec<_>>(), [fp("a"), fp("b")]);
    let id = toy::spec().id();
    let found = set.find(fp("b"), id).unwrap();
    assert_eq!(found.bytes(), toy::basis("b"));
    assert!(Arc::ptr_eq(found, set.get(fp("b")).unwrap()));
    assert!(Arc::ptr_eq(found, set.by_hash(&found.blake3()).unwrap()));
    let unknown = set.find(1, id).unwrap_err();
    assert_eq!(unknown, LookupError::UnknownBasis { basis_fp: 1, have: vec![fp("a"), fp("b")] });
    assert_eq!(unknown.to_string(), "basis fingerprint mismatch");
    let other = set.find(fp("a"), id ^ 1).unwrap_err();
    assert_eq!(other, LookupError::Methodology { expected: id, got: id ^ 1 });
    // The fingerprint is looked at first.
    assert!(matches!(set.find(1, id ^ 1), Err(LookupError::UnknownBasis { .. })));
    assert_eq!(set.methodologies().get(id).unwrap().name, "toy");
}

#[test]
fn a_reload_takes_new_files_and_keeps_what_did_not_change() {
    let folder = toy::folder(&["a", "b"]);
    let registry = Registry::open(Source::new(folder.path())).unwrap();
    let before = registry.current();
    toy::write(folder.path(), "c", &toy::basis("c"));
    fs::remove_file(folder.path().join("b.pcab")).unwrap();
    fs::write(folder.path().join(".d.pcab"), "being written").unwrap();
    fs::write(folder.path().join("notes.txt"), "no basis").unwrap();
    let reload = registry.reload().unwrap();
    assert_eq!((reload.added, reload.withdrawn, reload.kept), (vec![fp("c")], vec![fp("b")], 1));
    let after = registry.current();
    assert!(Arc::ptr_eq(before.get(fp("a")).unwrap(), after.get(fp("a")).unwrap()), "not loaded twice");
    assert!(after.get(fp("b")).is_none());
    assert!(before.get(fp("b")).is_some(), "a set never changes");
    assert_eq!(registry.reload().unwrap().kept, 2);
}

#[test]
fn a_bad_file_leaves_the_old_set_and_is_named() {
    let folder = toy::folder(&["a"]);
    let registry = Registry::open(Source::new(folder.path())).unwrap();
    let before = registry.current();
    let bad = |error: RegistryError, name: &str| {
        assert!(error.to_string().contains(name), "{error}");
        assert!(Arc::ptr_eq(&before, &registry.current()));
        error
    };
    toy::write(folder.path(), "bad", b"PCAB but not for long");
    assert!(matches!(bad(registry.reload().unwrap_err(), "bad.pcab"), RegistryError::Basis(OpenError::Format { .. })));
    fs::remove_file(folder.path().join("bad.pcab")).unwrap();
    fs::create_dir(folder.path().join("dir.pcab")).unwrap();
    let error = bad(registry.reload().unwrap_err(), "dir.pcab");
    assert!(matches!(error, RegistryError::Basis(OpenError::NotAFile { .. })));
    fs::remove_dir(folder.path().join("dir.pcab")).unwrap();
    fs::write(folder.path().join("methodologies/bad.json"), "{").unwrap();
    let error = bad(registry.reload().unwrap_err(), "bad.json");
    assert!(matches!(error, RegistryError::Methodology(MethodologyError::Spec { .. })));
    fs::remove_dir_all(folder.path().join("methodologies")).unwrap();
    assert!(matches!(bad(registry.reload().unwrap_err(), "a.pcab"), RegistryError::UnknownMethodology { .. }));
    fs::remove_dir_all(folder.path()).unwrap();
    assert!(matches!(bad(registry.reload().unwrap_err(), ""), RegistryError::Folder { .. }));
    assert_eq!(before.find(fp("a"), toy::spec().id()).unwrap().bytes(), toy::basis("a"));
}

#[test]
fn a_second_file_with_one_fingerprint_is_left_out() {
    let folder = toy::folder(&["a"]);
    let registry = Registry::open(Source::new(folder.path())).unwrap();
    toy::write(folder.path(), "a-copy", &toy::basis("a"));
    let duplicates = registry.reload().unwrap().duplicates;
    assert_eq!(duplicates.len(), 1);
    assert_eq!(duplicates[0].path, folder.path().join("a-copy.pcab"), "what is served stays");
    assert!(duplicates[0].is_copy && duplicates[0].to_string().ends_with("a.pcab (a copy)"), "{}", duplicates[0]);
    // The same fingerprint over other bytes: four bytes of the metadata are chosen so.
    let other = collision(&toy::basis("a"));
    assert_eq!(aeon_proto::hash::fnv1a32(&other), fp("a"));
    toy::write(folder.path(), "a-copy", &other);
    let duplicates = registry.reload().unwrap().duplicates;
    assert!(!duplicates[0].is_copy && duplicates[0].path.ends_with("a-copy.pcab"), "{}", duplicates[0]);
    assert_eq!(registry.current().get(fp("a")).unwrap().bytes(), toy::basis("a"));
    // At the start the first by name is served.
    let registry = Registry::open(Source::new(folder.path())).unwrap();
    assert_eq!(registry.current().get(fp("a")).unwrap().bytes(), other);
    assert_eq!(registry.current().duplicates().len(), 1);
}

/// Another valid file with the same FNV-1a: some text in the metadata is varied until the hash is hit. Hashing goes on
/// from the state before the varied part, and back from the end over the rest, so that one pass over 2^20 texts meets
/// another in the middle.
fn collision(bytes: &[u8]) -> Vec<u8> {
    const PRIME: u32 = 0x0100_0193;
    const INVERSE: u32 = 0x359c_449b;
    assert_eq!(PRIME.wrapping_mul(INVERSE), 1);
    let variant = br#""variant":"a""#;
    let at = bytes.windows(variant.len()).position(|window| window == variant).unwrap();
    // The length must not change, so that offsets stay: the varied text replaces the model's name and variant.
    let start = bytes.windows(8).position(|window| window == br#"{"model""#).unwrap();
    let end = at + variant.len();
    let room = end - start - r#"{"":"#.len() - 1;
    let before =
        bytes[..start].iter().chain(br#"{""#).fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(*b)).wrapping_mul(PRIME));
    let tail: Vec<u8> = br#"":0"#.iter().chain(&bytes[end..]).copied().collect();
    let target = aeon_proto::hash::fnv1a32(bytes);
    let after = tail.iter().rev().fold(target, |h, b| h.wrapping_mul(INVERSE) ^ u32::from(*b));
    let text = |n: u32, len: u32| -> Vec<u8> {
        (0..len).map(|digit| b'a' + (u64::from(n) / 26_u64.pow(digit) % 26) as u8).collect()
    };
    let (left, right) = (room as u32 / 2, (room - room / 2) as u32);
    let forward: std::collections::HashMap<u32, u32> = (0..1 << 18)
        .map(|n| (text(n, left).iter().fold(before, |h, b| (h ^ u32::from(*b)).wrapping_mul(PRIME)), n))
        .collect();
    let backward = |n: u32| text(n, right).iter().rev().fold(after, |h, b| h.wrapping_mul(INVERSE) ^ u32::from(*b));
    let (a, b) = (0..1 << 22).find_map(|n| forward.get(&backward(n)).map(|a| (*a, n))).unwrap();
    [&bytes[..start], br#"{""#, &text(a, left), &text(b, right), &tail].concat()
}

#[test]
fn a_basis_must_fit_its_methodology() {
    let file = || vec![Arc::new(BasisFile::from_bytes(&PathBuf::from("x.pcab"), &toy::basis("x")).unwrap())];
    // Only the width and the boundaries are compared; the id binds the rest.
    let set = BasisSet::new(file(), Methodologies::default());
    assert!(matches!(set, Err(RegistryError::UnknownMethodology { .. })));
    let folder = toy::folder(&[]);
    let methodologies = Methodologies::load(&folder.path().join("methodologies")).unwrap();
    let set = BasisSet::new(file(), methodologies).unwrap();
    let registry = Registry::fixed(set);
    assert_eq!(registry.reload().unwrap().kept, 1);
    assert_eq!(registry.current().bases().len(), 1);
    for (changed, expected_width) in [(r#""hidden_dim":9"#, true), (r#""hidden_dim":8,"boundaries":[0,2]"#, false)] {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(r#"{{"model":"toy","k_rule":{{"fixed":2}},{changed}}}"#);
        fs::create_dir(folder.path().join("methodologies")).unwrap();
        fs::write(folder.path().join("methodologies/other.json"), &text).unwrap();
        let id = aeon_proto::methodology::MethodologySpec::parse(&text).unwrap().id();
        let mut bytes = toy::basis("x");
        bytes[16..20].copy_from_slice(&id.to_le_bytes());
        toy::write(folder.path(), "x", &bytes);
        let error = Registry::open(Source::new(folder.path())).unwrap_err();
        match expected_width {
            true => assert!(matches!(error, RegistryError::HiddenDim { expected: 9, got: 8, .. }), "{error}"),
            false => assert!(matches!(error, RegistryError::Boundary { boundary: 1, .. }), "{error}"),
        }
    }
}
