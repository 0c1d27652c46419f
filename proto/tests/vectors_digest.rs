//! A change of the vectors is a change of the wire: whoever makes one has to say so in the changelog.
#![expect(clippy::unwrap_used, reason = "the files are ours")]

use std::{collections::BTreeMap, fs, path::Path};

use xxhash_rust::xxh64::Xxh64;

/// Name and bytes of each file of vectors.
fn vectors() -> BTreeMap<String, Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let vectors = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    vectors.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap())).collect()
}

/// XXH64 (seed 0) of each file's name, a zero byte, its length as u64 little-endian and its bytes, in order of the names.
fn digest(vectors: &BTreeMap<String, Vec<u8>>) -> String {
    let mut hash = Xxh64::new(0);
    for (name, bytes) in vectors {
        hash.update(name.as_bytes());
        hash.update(&[0]);
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    format!("{:016x}", hash.digest())
}

/// The lines under the first heading `### Wire`: those of the version that is being made.
fn wire_section(changelog: &str) -> Vec<&str> {
    let lines = changelog.lines().skip_while(|line| line.trim() != "### Wire").skip(1);
    lines.take_while(|line| !line.starts_with('#')).collect()
}

#[test]
fn the_changelog_names_the_vectors_under_wire() {
    let Ok(changelog) = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../CHANGELOG.md")) else {
        println!("skipped: no CHANGELOG.md beside this crate");
        return;
    };
    let vectors = vectors();
    assert_eq!(vectors.len(), 12, "files of vectors");
    let digest = digest(&vectors);
    let line = format!("- Golden vectors: `{digest}`.");
    assert!(
        wire_section(&changelog).contains(&&*line),
        "the golden vectors have changed: say in CHANGELOG.md under Wire what changed on the wire, and put this line there \
         in place of the one before:\n{line}"
    );
}

#[test]
fn the_readme_of_the_vectors_lists_every_file() {
    let readme = include_str!("../vectors/README.md");
    for name in vectors().keys() {
        assert!(readme.lines().any(|line| line.starts_with(&format!("| `{name}`"))), "{name} in vectors/README.md");
    }
}

#[test]
fn the_digest_sees_names_contents_and_their_border() {
    let of = |files: &[(&str, &[u8])]| {
        digest(&files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect())
    };
    let whole = of(&[("a.json", b"12"), ("b.json", b"3")]);
    for other in [
        of(&[("a.json", b"1"), ("b.json", b"23")]),
        of(&[("a.json", b"13"), ("b.json", b"3")]),
        of(&[("a.json", b"12"), ("c.json", b"3")]),
        of(&[("a.json", b"12")]),
    ] {
        assert_ne!(whole, other);
    }
    let lines =
        wire_section("# C\n## new\n### Added\n- x\n### Wire\n- y\n### Fixed\n- z\n## old\n### Wire\n- Golden\n");
    assert_eq!(lines, ["- y"]);
}
