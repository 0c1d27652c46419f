//! Any bytes, and valid ones with a few faults, through every reader. The seeds are those of the fuzz targets.
#![allow(clippy::unwrap_used)]

#[path = "support/hostile.rs"]
mod hostile;

use std::path::Path;

use proptest::{collection::vec, prelude::*, sample::Index};

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

/// One fault in a file: (what, where, byte).
type Fault = (u8, Index, u8);

fn apply(bytes: &mut Vec<u8>, (what, at, byte): Fault) {
    if bytes.is_empty() {
        return bytes.push(byte);
    }
    let at = at.index(bytes.len());
    match what {
        0 => bytes[at] = byte,
        1 => bytes[at] ^= 1 << (byte % 8),
        2 => bytes.insert(at, byte),
        3 => bytes.truncate(at),
        4 => drop(bytes.remove(at)),
        5 => bytes[at..].iter_mut().take(4).for_each(|place| *place = byte),
        _ => bytes.extend_from_within(at..),
    }
}

/// Runs `reader` over the seeds as they are, over any bytes, and over seeds with faults.
fn judge(target: &str) {
    let (_, reader) = hostile::READERS.into_iter().find(|(name, _)| *name == target).unwrap();
    let seeds = seeds(target);
    assert!(seeds.len() >= 4, "{target} has {} seeds", seeds.len());
    seeds.iter().for_each(|seed| reader(seed));
    let faulty = (any::<Index>(), vec((0_u8..7, any::<Index>(), any::<u8>()), 1..4)).prop_map(|(seed, faults)| {
        let mut bytes = seeds[seed.index(seeds.len())].clone();
        faults.into_iter().for_each(|fault| apply(&mut bytes, fault));
        bytes
    });
    let bytes = prop_oneof![1 => vec(any::<u8>(), 0..300), 4 => faulty];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&bytes, |bytes| {
            reader(&bytes);
            Ok(())
        })
        .unwrap();
}

macro_rules! judged {
    ($($target:ident),*) => {
        $(
            #[test]
            fn $target() {
                judge(stringify!($target));
            }
        )*

        #[test]
        fn every_reader_is_judged() {
            assert_eq!(hostile::READERS.map(|(name, _)| name), [$(stringify!($target)),*]);
        }
    };
}

judged!(frame_stream, payload, pcar, qres, pcab, bw, bwah_reply, bwah_capture, methodology, fragments);
