//! The checks behind the fuzz targets. Those of the byte formats are shared with the property tests of `proto`; here each
//! runs under a counting allocator, so that an input which draws out memory beyond its own size fails like a panic.

#[path = "../../proto/tests/support/hostile.rs"]
mod hostile;

// By path and not through the station's crate, whose numeric dependencies take minutes to build with instrumentation.
#[path = "../../src/codec.rs"]
#[allow(dead_code)]
mod codec;
#[path = "../../src/config"]
mod config {
    pub(crate) mod settings;
}
#[path = "../../src/model"]
mod model {
    pub(crate) mod spec;
}
#[path = "../../src/net"]
mod net {
    #[allow(dead_code)]
    pub(crate) mod peer;
}
#[path = "../../src/admin"]
mod admin {
    pub(crate) mod body;
}

mod http_body;
mod settings;
mod stream;

use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Bytes that a check may hold whatever its input: error texts, the limits of the reassembler.
const CONSTANT: usize = 64 << 10;

/// Runs `check` and panics if it held more than `factor` times the bytes of the input, and [`CONSTANT`], at any time.
///
/// The check's own copies count too: the pieces that it compares and the bytes that it encodes again.
fn bounded(bytes: &[u8], factor: usize, check: impl FnOnce(&[u8])) {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    check(bytes);
    let held = MEMORY.peak_usage().saturating_sub(before);
    let allowed = factor * bytes.len() + CONSTANT;
    assert!(held <= allowed, "{held} bytes held for an input of {}, allowed are {allowed}", bytes.len());
}

/// The stream through the station's codec and, if it is of bare frames, through the crate's own readers.
fn frame_stream_in_reads(bytes: &[u8]) {
    stream::chunks(bytes);
    if let Some((&[how, _], stream)) = bytes.split_first_chunk::<2>()
        && how & 1 == 1
    {
        hostile::frames(stream);
    }
}

macro_rules! bounded {
    ($($name:ident: $factor:literal, $check:path, $doc:literal;)*) => {
        $(
            #[doc = $doc]
            pub fn $name(bytes: &[u8]) {
                bounded(bytes, $factor, $check);
            }
        )*
    };
}

bounded! {
    frame_stream: 32, frame_stream_in_reads, "A stream of frames, prefixed or bare, cut into reads at random.";
    payload: 192, hostile::payload, "Payload, meta text, typed request meta. `[0,0,...` keeps a value for every two bytes, in both readings.";
    pcar: 16, hostile::pcar, "A PCAR body.";
    qres: 96, hostile::qres, "A QRES body. Three bits are read into four bytes, through a rotation of as many numbers.";
    pcab: 64, hostile::pcab, "A basis file.";
    bw: 8, hostile::bw, "A `.bw` blob.";
    bwah_reply: 8, hostile::bwah_reply, "A reply of the replay cache.";
    bwah_capture: 8, hostile::bwah_capture, "A capture, as it comes in an HTTP body.";
    methodology: 192, hostile::methodology, "A methodology spec.";
    config: 1024, settings::file, "A configuration file.";
    http_body: 128, http_body::body, "A body of an HTTP request, in pieces.";
    fragments: 64, hostile::fragments, "Datagrams of the fragmented transport. Parts may be of one byte each.";
}
