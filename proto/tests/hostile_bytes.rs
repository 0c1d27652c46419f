//! Any bytes, and valid ones with a few faults, through every reader. The seeds are those of the fuzz targets.
#![allow(clippy::unwrap_used)]

#[path = "support/hostile.rs"]
mod hostile;
#[path = "support/judge.rs"]
mod judge;

use std::path::Path;

macro_rules! judged {
    ($($target:ident),*) => {
        $(
            #[test]
            fn $target() {
                let (_, reader) = hostile::READERS.into_iter().find(|(name, _)| *name == stringify!($target)).unwrap();
                let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
                judge::judge(&corpus, stringify!($target), reader);
            }
        )*

        #[test]
        fn every_reader_is_judged() {
            assert_eq!(hostile::READERS.map(|(name, _)| name), [$(stringify!($target)),*]);
        }
    };
}

judged!(frame_stream, payload, pcar, qres, pcab, bw, bwah_reply, bwah_capture, methodology, fragments);
