//! The worked examples of `spec-pca.md`, `spec-qres.md`, `spec-bw.md` and `spec-replay.md` are what they claim to be.
//!
//! An example is a fenced block whose first line says its kind and what it must be read as: `kind key=value …`. A block of
//! bytes holds hex; a line may begin with its offset and a colon, and ends at a `#`.
#![allow(clippy::unwrap_used)]

use aeon_proto::{
    bw, bwah,
    fragment::{self, Header, Outcome, Part, Reassembler},
    frame::{Flags, Frame},
    hash::fnv1a32,
    json::Object,
    kernel::Kernel,
    methodology::MethodologySpec,
    payload::{FrameWriter, Payload},
    pcab::{Pcab, PcabWriter},
    pcar::{self, PcarBody},
    qres::{self, Format, Parts, QresBody, Rotation},
};

const PAGES: [(&str, &str); 4] = [
    ("spec-pca.md", include_str!("../spec-pca.md")),
    ("spec-qres.md", include_str!("../spec-qres.md")),
    ("spec-bw.md", include_str!("../spec-bw.md")),
    ("spec-replay.md", include_str!("../spec-replay.md")),
];

type Check = fn(&Example);

/// How many examples of each kind the pages have, and how each is checked.
const KINDS: [(&str, usize, Check); 14] = [
    ("pcar", 2, check_pcar),
    ("pcab", 1, check_pcab),
    ("qres", 1, check_qres),
    ("qres-values", 1, check_qres_values),
    ("qres-levels", 6, check_qres_levels),
    ("methodology", 1, check_methodology),
    ("kernel", 1, check_kernel),
    ("fnv1a32", 1, check_fnv),
    ("bw", 3, check_bw),
    ("bwah-reply", 2, check_reply),
    ("bwah-capture", 1, check_capture),
    ("fragment", 1, check_fragment),
    ("ack", 1, check_ack),
    ("frame", 7, check_frame),
];

#[derive(Debug)]
struct Example {
    kind: String,
    /// The rest of the first line.
    info: String,
    lines: Vec<String>,
}

impl Example {
    /// The text of a field, up to the next space.
    fn find(&self, key: &str) -> Option<&str> {
        self.info.split(' ').find_map(|field| field.strip_prefix(key)?.strip_prefix('='))
    }

    fn text(&self, key: &str) -> &str {
        self.find(key).unwrap_or_else(|| panic!("{key} of {self:?}"))
    }

    fn number(&self, key: &str) -> u64 {
        let text = self.text(key);
        text.strip_prefix("0x").map_or_else(|| text.parse(), |digits| u64::from_str_radix(digits, 16)).unwrap()
    }

    fn u32(&self, key: &str) -> u32 {
        self.number(key).try_into().unwrap()
    }

    fn list<T: std::str::FromStr>(&self, key: &str) -> Vec<T> {
        self.text(key)
            .split(',')
            .map(|item| item.parse().ok().unwrap_or_else(|| panic!("{item} of {self:?}")))
            .collect()
    }

    /// The lines without remarks.
    fn code(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().map(|line| line.split('#').next().unwrap().trim())
    }

    /// The bytes, filled with zeros up to the offset of a line that has one.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for line in self.code() {
            let (offset, digits) = line.split_once(':').unwrap_or(("", line));
            if !offset.is_empty() {
                let offset = usize::from_str_radix(offset, 16).unwrap();
                assert!(offset >= bytes.len(), "{self:?}");
                bytes.resize(offset, 0);
            }
            bytes.extend(unhex(digits));
        }
        bytes
    }

    fn bits(&self, line: usize) -> Vec<f32> {
        let words = self.code().nth(line).unwrap().split(' ');
        words.map(|word| f32::from_bits(u32::from_str_radix(word, 16).unwrap())).collect()
    }
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().filter(|c| *c != ' ').map(|c| c.to_digit(16).unwrap_or_else(|| panic!("{text}")) as u8).collect();
    assert!(digits.len().is_multiple_of(2), "{text}");
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn examples() -> Vec<Example> {
    let mut found = Vec::new();
    for (page, text) in PAGES {
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let Some(info) = line.strip_prefix("```") else {
                assert!(!line.starts_with("    "), "{page}: a block without a kind: {line}");
                continue;
            };
            let (kind, info) = info.split_once(' ').unwrap_or((info, ""));
            let lines: Vec<String> = lines.by_ref().take_while(|line| *line != "```").map(str::to_owned).collect();
            if kind != "text" {
                found.push(Example { kind: kind.to_owned(), info: info.to_owned(), lines });
            }
        }
    }
    found
}

#[test]
fn every_example_is_what_it_says() {
    let examples = examples();
    for (kind, count, check) in KINDS {
        let mut checked = 0;
        for example in examples.iter().filter(|example| example.kind == kind) {
            check(example);
            checked += 1;
        }
        assert_eq!(checked, count, "examples of kind {kind}");
    }
    for example in &examples {
        assert!(KINDS.iter().any(|(kind, ..)| *kind == example.kind), "unknown kind {example:?}");
    }
}

fn check_pcar(example: &Example) {
    let bytes = example.bytes();
    let body = PcarBody::decode(&bytes).unwrap();
    let [boundary, k, hidden_dim, methodology, basis_fp] =
        ["boundary", "k", "hidden_dim", "methodology", "basis_fp"].map(|key| example.u32(key));
    let header = pcar::Header { boundary, k, hidden_dim, methodology, basis_fp };
    assert_eq!(body.header(), header);
    let (mut components, mut again) = (Vec::new(), Vec::new());
    body.read_components(&mut components);
    assert_eq!(components, example.list::<f32>("components"));
    pcar::encode(&header, &components, &mut again).unwrap();
    assert_eq!(again, bytes);
}

fn check_qres(example: &Example) {
    let bytes = example.bytes();
    let body = QresBody::decode(&bytes).unwrap();
    let [boundary, hidden_dim, seq, basis_fp, methodology, bits, seed] =
        ["boundary", "hidden_dim", "seq", "basis_fp", "methodology", "bits", "seed"].map(|key| example.u32(key));
    let format = Format::Rotated(bits as u8);
    let header = qres::Header { boundary, hidden_dim, basis_fp, methodology, format, seed };
    assert_eq!((body.header(), body.seq()), (&header, seq as usize));
    let escaped: Vec<u8> = (0..body.seq()).map(|position| u8::from(body.is_escaped(position))).collect();
    assert_eq!(escaped, example.list::<u8>("escaped"));
}

/// The lines are the mean, and for each position the residual and then, for each, what is read.
fn check_qres_values(example: &Example) {
    let examples = examples();
    let bytes = examples.iter().find(|other| other.kind == "qres").unwrap().bytes();
    let body = QresBody::decode(&bytes).unwrap();
    let header = *body.header();
    let (mean, d) = (example.bits(0), header.hidden_dim as usize);
    let rotation = Rotation::new(d, header.seed).unwrap();
    let parts = Parts { mean: Some(&mean), rotation: Some(&rotation) };
    let lines = |from: usize| (from..from + body.seq()).flat_map(|line| example.bits(line)).collect::<Vec<f32>>();
    let (mut read, mut again) = (vec![0.0; body.seq() * d], Vec::new());
    body.read(&parts, &mut read).unwrap();
    assert_eq!(read, lines(1 + body.seq()));
    qres::encode(&header, &parts, &lines(1), |position, _| body.is_escaped(position), &mut again).unwrap();
    assert_eq!(again, bytes);
}

fn check_qres_levels(example: &Example) {
    let levels = qres::levels(example.u32("bits") as u8).unwrap();
    let (low, high) = levels.split_at(levels.len() / 2);
    let printed: Vec<f32> = (0..example.lines.len()).flat_map(|line| example.bits(line)).collect();
    assert_eq!(high, printed);
    assert!(low.iter().rev().zip(high).all(|(low, high)| *low == -high));
}

fn check_pcab(example: &Example) {
    let bytes = example.bytes();
    let file = Pcab::open(&bytes).unwrap();
    file.verify().unwrap();
    assert_eq!(bytes.len() as u64, example.number("len"));
    assert_eq!(fnv1a32(&bytes), example.u32("basis_fp"));
    assert_eq!((file.hidden_dim(), file.methodology()), (example.u32("hidden_dim"), example.u32("methodology")));
    assert_eq!(file.metadata_bytes(), example.text("meta").as_bytes());
    let [mean, basis, variance] = ["mean", "basis", "variance"].map(|key| example.list::<f32>(key));
    let mut writer = PcabWriter::new(file.hidden_dim(), file.methodology());
    writer.entry(example.u32("boundary"), &mean, &basis, &variance).unwrap();
    assert_eq!(writer.finish(example.text("meta")).unwrap(), bytes);
}

fn check_methodology(example: &Example) {
    let [text, canonical] = example.lines.as_slice() else { panic!("{example:?}") };
    let spec = MethodologySpec::parse(text).unwrap();
    assert_eq!((spec.canonical(), spec.id()), (canonical.as_str(), example.u32("id")));
    assert_eq!(spec.k_rule().k(spec.hidden_dim()).unwrap(), example.u32("k"));
}

fn check_kernel(example: &Example) {
    let [mean, rows, components, expected_lift, expected_back] = [0, 1, 2, 3, 4].map(|line| example.bits(line));
    let (d, k) = (example.number("d") as usize, example.number("k") as usize);
    for kernel in Kernel::available() {
        let (mut lifted, mut back) = (vec![0.0; d], vec![0.0; k]);
        kernel.lift_batch(&mean, &rows, &components, &mut lifted).unwrap();
        kernel.project_batch(&mean, &rows, &lifted, &mut back).unwrap();
        assert_eq!((&lifted, &back), (&expected_lift, &expected_back), "{}", kernel.name());
    }
}

fn check_fnv(example: &Example) {
    assert_eq!(example.lines.len(), 3);
    for line in &example.lines {
        let (hash, text) = line.split_once(' ').unwrap_or((line, ""));
        assert_eq!(format!("{:08x}", fnv1a32(text.as_bytes())), hash);
    }
}

fn check_bw(example: &Example) {
    let (bytes, mime, content) = (example.bytes(), example.text("mime"), unhex(example.text("content")));
    assert_eq!(bw::encode(&content, mime), bytes);
    assert_eq!(bw::decode(&bytes), Ok(bw::Decoded { bytes: content, mime }));
}

fn check_reply(example: &Example) {
    let (bytes, tail) = (example.bytes(), example.find("tail").map(|_| example.list::<f32>("tail")));
    assert_eq!(bwah::encode_amplituhedron_reply(true, tail.as_deref(), None), bytes);
    let reply = bwah::decode_amplituhedron_reply(&bytes).unwrap();
    assert_eq!((reply.hit, reply.tail, reply.kv), (true, tail, None));
}

fn check_capture(example: &Example) {
    let (bytes, tail) = (example.bytes(), example.list::<f32>("tail"));
    let (hash, len) = (example.number("prefix_hash"), example.u32("prefix_len"));
    let [lo, hi] = ["layer_lo", "layer_hi"].map(|key| u16::try_from(example.number(key)).unwrap());
    assert_eq!(bwah::encode_amplituhedron_capture(hash, len, lo, hi, &tail, &[]), bytes);
    let capture = bwah::decode_amplituhedron_capture(&bytes).unwrap();
    assert_eq!((capture.prefix_hash, capture.prefix_len, capture.layer_lo, capture.layer_hi), (hash, len, lo, hi));
    assert_eq!((capture.tail, capture.kv), (tail, vec![]));
}

fn check_fragment(example: &Example) {
    let bytes = example.bytes();
    let (first, part) = bytes.split_first_chunk().unwrap();
    let header = Header::decode(*first);
    assert_eq!(u64::from(header.frame_id), example.number("frame_id"));
    assert_eq!(u64::from(header.index), example.number("index"));
    assert_eq!(u64::from(header.total), example.number("total"));
    let mut again = Vec::new();
    Part { header, bytes: part }.write(&mut again);
    assert_eq!(again, bytes);
    assert_eq!(Reassembler::new(fragment::Limits::default()).push(0, &(), &bytes), Ok(Outcome::Waiting));
}

fn check_ack(example: &Example) {
    let bytes = example.bytes();
    let [ack] = fragment::decode_acks(&bytes).collect::<Vec<_>>()[..] else { panic!("{example:?}") };
    assert_eq!((u64::from(ack.stream_id), ack.base), (example.number("stream_id"), example.u32("base")));
    let named: Vec<u32> = (ack.base..ack.base + 64).filter(|sequence| ack.contains(*sequence)).collect();
    assert_eq!(named, example.list::<u32>("sequences"));
    assert_eq!(ack.encode().as_slice(), bytes);
}

fn check_frame(example: &Example) {
    let bytes = example.bytes();
    // A meta may hold spaces: it stands last, but for the body.
    let (_, meta) = example.info.split_once(" meta=").unwrap();
    let (meta, body) = meta.split_once(" body=").unwrap_or((meta, ""));
    let body = unhex(body);
    let (stream_id, sequence) = (u16::try_from(example.number("stream")).unwrap(), example.u32("sequence"));
    let flags = Flags(example.number("flags").try_into().unwrap());
    let frame = Frame::decode_exact(&bytes).unwrap();
    assert_eq!((frame.stream_id, frame.sequence, frame.flags), (stream_id, sequence, flags));
    assert_eq!(Payload::decode(frame.payload), Ok(Payload { meta, body: &body }));
    Object::parse(meta).unwrap();
    let mut again = Vec::new();
    let mut writer = FrameWriter::new(&mut again, stream_id, sequence, flags);
    writer.meta_text(meta);
    writer.body().extend_from_slice(&body);
    writer.finish().unwrap();
    assert_eq!(again, bytes);
}
