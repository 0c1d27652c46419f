//! One small file, taken apart and built again, and every way to spoil it.

use alloc::{format, string::String, vec, vec::Vec};

use proptest::prelude::*;

use super::*;

const META: &str = r#"{"m":1}"#;

/// Width 3: boundary 0 with two rows, boundary 2 that shares them, boundary 5 with a mean only.
///
/// ```text
/// 64 table · 192 mean · 256 basis · 320 variance · 384 mean · 448 variance · 512 mean · 576 variance · 640 meta · 647
/// ```
fn small() -> Vec<u8> {
    let mut writer = PcabWriter::new(3, 0xdead_beef);
    writer.entry(0, &[0.5, 1.5, -2.0], &[1.0, 0.0, 0.0, 0.0, 0.6, 0.8], &[3.0, 2.0, 6.0]).unwrap();
    writer.shared_entry(2, &[1.0, 1.0, 1.0], 0, &[1.0, 4.0, 5.0]).unwrap();
    writer.entry(5, &[0.0, -0.0, 7.0], &[], &[9.0]).unwrap();
    writer.finish(META).unwrap()
}

fn with_u32(at: usize, value: u32) -> Vec<u8> {
    let mut bytes = small();
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    bytes
}

fn with_u64(at: usize, value: u64) -> Vec<u8> {
    let mut bytes = small();
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    bytes
}

#[test]
fn deconstructs() {
    let bytes = small();
    assert_eq!(bytes.len(), 647);
    let file = Pcab::open(&bytes).unwrap();
    file.verify().unwrap();
    assert_eq!((file.hidden_dim(), file.entry_count(), file.methodology()), (3, 3, 0xdead_beef));
    let shape: Vec<_> = file.entries().map(|entry| (entry.boundary(), entry.k(), entry.basis_offset())).collect();
    assert_eq!(shape, [(0, 2, 256), (2, 2, 256), (5, 0, 576)]);
    let shared = file.at_boundary(2).unwrap();
    assert_eq!(*shared.mean(), [1.0; 3]);
    assert_eq!(*shared.basis(), [1.0, 0.0, 0.0, 0.0, 0.6, 0.8]);
    assert_eq!(*shared.variance(), [1.0, 4.0, 5.0]);
    assert_eq!(shared.explained(), 1.0);
    assert_eq!(file.at_boundary(5).unwrap().basis().len(), 0);
    assert_eq!([1, 3, 4, 6, u32::MAX].map(|boundary| file.at_boundary(boundary).is_some()), [false; 5]);
    assert!(file.entry(3).is_none());
    assert_eq!(file.metadata_bytes(), META.as_bytes());
    assert_eq!(file.metadata().unwrap().get("m"), Some(&json::Value::Unsigned(1)));
    let again = Pcab::with_layout(&bytes, file.layout());
    assert_eq!(*again.at_boundary(0).unwrap().mean(), [0.5, 1.5, -2.0]);
}

#[test]
fn views_at_any_alignment_give_the_same_numbers() {
    for offset in 0..4 {
        let mut bytes = vec![0xa5; offset];
        bytes.extend(small());
        let file = Pcab::open(&bytes[offset..]).unwrap();
        file.verify().unwrap();
        assert_eq!(*file.at_boundary(0).unwrap().mean(), [0.5, 1.5, -2.0]);
    }
}

#[test]
fn every_shorter_file_and_every_longer_one_is_refused() {
    let bytes = small();
    for len in 0..bytes.len() {
        let needed = if len < 64 { 64 } else { 647 };
        assert_eq!(Pcab::open(&bytes[..len]).unwrap_err(), OpenError::Truncated { needed, got: len as u64 });
    }
    let longer = [&bytes[..], &[0]].concat();
    assert_eq!(Pcab::open(&longer).unwrap_err(), OpenError::TrailingBytes { expected: 647, got: 648 });
}

#[test]
fn header_fields_at_and_past_their_limits() {
    let open = |bytes: Vec<u8>| Pcab::open(&bytes).map(|_| ()).unwrap_err();
    assert_eq!(open(with_u32(0, 0x4241_4351)), OpenError::BadMagic { got: *b"QCAB" });
    for got in [0, 2, 0x0100_0000] {
        assert_eq!(open(with_u32(4, got)), OpenError::BadVersion { got });
    }
    assert_eq!(open(with_u32(8, 0)), OpenError::ZeroHiddenDim);
    let huge = OpenError::OutOfFile { section: Section::Mean(0), end: 192 + 4 * 0xffff_ffff, file_len: 647 };
    assert_eq!(open(with_u32(8, u32::MAX)), huge);
    assert_eq!(open(with_u32(12, 0)), OpenError::NoEntries);
    let needed = 64 + 32 * u64::from(u32::MAX);
    assert_eq!(open(with_u32(12, u32::MAX)), OpenError::Truncated { needed, got: 647 });
    assert!(Pcab::open(&with_u32(16, u32::MAX)).is_ok());
    assert_eq!(open(with_u32(20, 1)), OpenError::UnknownFlags { got: 1 });
    for offset in 48..64 {
        let mut bytes = small();
        bytes[offset] = 3;
        assert_eq!(open(bytes), OpenError::ReservedNotZero { offset: offset as u64, got: 3 });
    }
    let section = Section::Metadata;
    assert_eq!(open(with_u64(24, 639)), OpenError::Unaligned { section, got: 639 });
    assert_eq!(open(with_u64(24, 576)), OpenError::Overlap { section, expected: 640, got: 576 });
    assert_eq!(open(with_u64(24, 704)), OpenError::OutOfFile { section, end: 711, file_len: 647 });
    assert_eq!(open(with_u64(24, u64::MAX - 63)), OpenError::OutOfFile { section, end: u64::MAX - 56, file_len: 647 });
    assert_eq!(open(with_u64(32, 8)), OpenError::OutOfFile { section, end: 648, file_len: 647 });
    assert_eq!(open(with_u64(32, 6)), OpenError::FileLen { expected: 646, got: 647 });
    assert_eq!(open(with_u64(32, u64::MAX)), OpenError::SizeOverflow { section });
    assert_eq!(open(with_u64(40, 648)), OpenError::Truncated { needed: 648, got: 647 });
    assert_eq!(open(with_u64(40, 646)), OpenError::TrailingBytes { expected: 646, got: 647 });
    assert_eq!(open(with_u64(40, u64::MAX)), OpenError::Truncated { needed: u64::MAX, got: 647 });
}

#[test]
fn table_fields_at_and_past_their_limits() {
    let open = |bytes: Vec<u8>| Pcab::open(&bytes).map(|_| ()).unwrap_err();
    let entry = |index: usize| 64 + 32 * index;
    assert_eq!(open(with_u32(entry(1), 0)), OpenError::BoundaryOrder { entry: 1, previous: 0, got: 0 });
    assert_eq!(open(with_u32(entry(2), 1)), OpenError::BoundaryOrder { entry: 2, previous: 2, got: 1 });
    assert_eq!(open(with_u32(entry(0) + 4, 4)), OpenError::TooManyComponents { entry: 0, got: 4, max: 3 });
    let three = OpenError::SharedBasisK { entry: 1, owner: 0, expected: 2, got: 3 };
    assert_eq!(open(with_u32(entry(1) + 4, 3)), three);
    let none = OpenError::SharedBasisK { entry: 1, owner: 0, expected: 2, got: 0 };
    assert_eq!(open(with_u32(entry(1) + 4, 0)), none);
    for (index, field, section, start) in [
        (0, 8, Section::Mean(0), 192),
        (0, 16, Section::Basis(0), 256),
        (0, 24, Section::Variance(0), 320),
        (1, 8, Section::Mean(1), 384),
        (1, 24, Section::Variance(1), 448),
        (2, 8, Section::Mean(2), 512),
        (2, 16, Section::Basis(2), 576),
        (2, 24, Section::Variance(2), 576),
    ] {
        let at = entry(index) + field;
        let before = OpenError::Overlap { section, expected: start, got: start - 64 };
        assert_eq!(open(with_u64(at, start - 64)), before);
        assert_eq!(open(with_u64(at, start + 4)), OpenError::Unaligned { section, got: start + 4 });
        assert_eq!(open(with_u64(at, 0)), OpenError::Overlap { section, expected: start, got: 0 });
        let later = open(with_u64(at, start + 64));
        let gap = OpenError::Gap { section, expected: start, got: start + 64 };
        assert!(later == gap || matches!(later, OpenError::OutOfFile { .. }), "{section}: {later}");
        assert!(matches!(open(with_u64(at, 1 << 40)), OpenError::OutOfFile { .. }));
        let end = open(with_u64(at, u64::MAX));
        let len = if section == Section::Basis(2) { 0 } else { 4 };
        assert!(len == 0 || end == OpenError::SizeOverflow { section }, "{section}: {end}");
    }
    // A basis may be shared only where an earlier one starts.
    assert!(matches!(open(with_u64(entry(1) + 16, 192)), OpenError::Overlap { .. }));
    assert!(matches!(open(with_u64(entry(1) + 16, 320)), OpenError::Overlap { .. }));
    assert!(matches!(open(with_u64(entry(1) + 16, 448)), OpenError::Overlap { .. } | OpenError::OutOfFile { .. }));
}

#[test]
fn verify_names_each_fault() {
    let verify = |at: usize, value: f32| Pcab::open(&with_u32(at, value.to_bits())).unwrap().verify();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let bad = |section, index| Err(VerifyError::NonFinite { section, index });
        assert_eq!(verify(196, value), bad(Section::Mean(0), 1));
        assert_eq!(verify(256 + 20, value), bad(Section::Basis(0), 5));
        assert_eq!(verify(448 + 8, value), bad(Section::Variance(1), 2));
    }
    assert_eq!(verify(256, 1.01), Err(VerifyError::NotUnit { entry: 0, row: 0, got: 1.01 * 1.01 }));
    assert!(matches!(verify(256, f32::MAX), Err(VerifyError::NotUnit { entry: 0, row: 0, .. })));
    assert_eq!(verify(256 + 12, 0.01), Err(VerifyError::NotOrthogonal { entry: 0, row: 1, other: 0, got: 0.01 }));
    assert_eq!(verify(256 + 12, 0.9e-4), Ok(()));
    assert_eq!(verify(320, -1.0), Err(VerifyError::NegativeVariance { entry: 0, index: 0, got: -1.0 }));
    assert_eq!(verify(576, -1.0), Err(VerifyError::NegativeVariance { entry: 2, index: 0, got: -1.0 }));
    assert_eq!(verify(448 + 8, 4.5), Err(VerifyError::TotalTooSmall { entry: 1, sum: 5.0, total: 4.5 }));
    assert_eq!(verify(448 + 8, 4.9999), Ok(()));
    for offset in [160, 191, 204, 255, 280, 319, 332, 396, 460, 524, 580, 639] {
        let mut bytes = small();
        bytes[offset] = 1;
        let fault = VerifyError::PaddingNotZero { offset: offset as u64, got: 1 };
        assert_eq!(Pcab::open(&bytes).unwrap().verify(), Err(fault));
    }
    let metadata = |text: &[u8; 7]| {
        let mut bytes = small();
        bytes[640..].copy_from_slice(text);
        Pcab::open(&bytes).unwrap().verify()
    };
    assert_eq!(metadata(b"[1,2,3]"), Err(VerifyError::Metadata(json::Error::NotObject)));
    assert_eq!(metadata(b"{\"m\":\xff}"), Err(VerifyError::MetadataNotUtf8 { valid_up_to: 5 }));
}

#[test]
fn an_unshared_basis_needs_falling_variances_and_a_shared_one_does_not() {
    let basis = [1.0, 0.0, 0.0, 1.0];
    let mut writer = PcabWriter::new(2, 0);
    writer.entry(1, &[0.0; 2], &basis, &[1.0, 2.0, 3.0]).unwrap();
    let bytes = writer.finish("").unwrap();
    let order = VerifyError::VarianceOrder { entry: 0, index: 1, previous: 1.0, got: 2.0 };
    assert_eq!(Pcab::open(&bytes).unwrap().verify(), Err(order));
    writer.shared_entry(2, &[0.0; 2], 1, &[5.0, 1.0, 6.0]).unwrap();
    let bytes = writer.finish("").unwrap();
    Pcab::open(&bytes).unwrap().verify().unwrap();
}

#[test]
fn the_writer_refuses_what_cannot_be_opened() {
    let (zero, one) = ([0.0; 2], [1.0, 0.0]);
    assert_eq!(PcabWriter::new(0, 0).entry(0, &[], &[], &[1.0]), Err(WriteError::ZeroHiddenDim));
    let mut writer = PcabWriter::new(2, 0);
    assert_eq!(writer.finish("{}"), Err(WriteError::NoEntries));
    let bad_basis = |got| Err(WriteError::BasisLen { boundary: 4, hidden_dim: 2, got });
    assert_eq!(writer.entry(4, &zero, &[0.0; 3], &[1.0]), bad_basis(3));
    assert_eq!(writer.entry(4, &zero, &[0.0; 6], &[1.0]), bad_basis(6));
    assert_eq!(
        writer.entry(4, &zero[..1], &one, &[1.0; 2]),
        Err(WriteError::MeanLen { boundary: 4, expected: 2, got: 1 })
    );
    assert_eq!(writer.entry(4, &zero, &one, &[1.0]), Err(WriteError::VarianceLen { boundary: 4, expected: 2, got: 1 }));
    assert_eq!(writer.shared_entry(4, &zero, 3, &[1.0]), Err(WriteError::NothingToShare { boundary: 4, with: 3 }));
    writer.entry(4, &zero, &[], &[1.0]).unwrap();
    assert_eq!(writer.shared_entry(5, &zero, 4, &[1.0]), Err(WriteError::NothingToShare { boundary: 5, with: 4 }));
    assert_eq!(writer.entry(4, &zero, &one, &[1.0; 2]), Err(WriteError::BoundaryOrder { previous: 4, got: 4 }));
    assert_eq!(writer.finish("[]"), Err(WriteError::Metadata(json::Error::NotObject)));
    assert!(writer.finish("{}").is_ok());
}

/// Boundary, mean, basis, variance, and the boundary whose basis it shares.
type Owned = (u32, Vec<f32>, Vec<f32>, Vec<f32>, Option<u32>);

/// Writes an opened file again.
fn rewrite(file: &Pcab<'_>) -> Vec<u8> {
    let parts: Vec<_> = file.entries().map(|entry| (entry, entry.mean(), entry.basis(), entry.variance())).collect();
    let mut writer = PcabWriter::new(file.hidden_dim(), file.methodology());
    for (index, (entry, mean, basis, variance)) in parts.iter().enumerate() {
        let owner = parts[..index].iter().find(|other| other.0.basis_offset() == entry.basis_offset());
        match owner {
            Some(owner) => writer.shared_entry(entry.boundary(), mean, owner.0.boundary(), variance).unwrap(),
            None => writer.entry(entry.boundary(), mean, basis, variance).unwrap(),
        }
    }
    writer.finish(core::str::from_utf8(file.metadata_bytes()).unwrap()).unwrap()
}

/// Whatever opens is either written again to the same bytes, or verify says what it was that could not be.
fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(file) = Pcab::open(bytes) {
        match file.verify() {
            Err(
                VerifyError::PaddingNotZero { .. } | VerifyError::MetadataNotUtf8 { .. } | VerifyError::Metadata(_),
            ) => {}
            // The first fault hides later ones.
            Err(_) if file.metadata().is_err() => {}
            _ => prop_assert_eq!(rewrite(&file), bytes),
        }
    }
    Ok(())
}

#[test]
fn every_single_byte_of_a_file_may_change() {
    let bytes = small();
    for at in 0..bytes.len() {
        for change in [1, 2, 4, 0x40, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= change;
            check(&bytes).unwrap();
        }
    }
}

proptest! {
    #[test]
    fn what_is_written_reads_back(
        d in 1_usize..40,
        methodology in any::<u32>(),
        shape in prop::collection::vec((1_u32..5, 0_usize..4, any::<bool>()), 1..6),
        bits in prop::collection::vec(any::<u32>(), 64),
        note in "[a-z\"\\\\é𝄞]{0,20}",
    ) {
        let number = |n: usize| f32::from_bits(bits[n % bits.len()]);
        let mut entries: Vec<Owned> = Vec::new();
        let mut boundary = 0;
        for (n, (step, k, share)) in shape.iter().enumerate() {
            let k = (*k).min(d);
            let own: Vec<f32> = (0..k * d).map(|j| number(n + j)).collect();
            let shared = entries.last().filter(|last| *share && !last.2.is_empty());
            let with = shared.map(|last| last.0);
            let basis = shared.map_or(own, |last| last.2.clone());
            let variance = (0..=basis.len() / d).map(|j| number(7 * n + j)).collect();
            entries.push((boundary, (0..d).map(|j| number(3 * n + j)).collect(), basis, variance, with));
            boundary += step;
        }
        let mut writer = PcabWriter::new(d as u32, methodology);
        for (boundary, mean, basis, variance, with) in &entries {
            match with {
                Some(with) => writer.shared_entry(*boundary, mean, *with, variance).unwrap(),
                None => writer.entry(*boundary, mean, basis, variance).unwrap(),
            }
        }
        let mut text = Vec::new();
        json::write_string(&note, &mut text);
        let metadata = format!("{{\"note\":{}}}", String::from_utf8(text).unwrap());
        let bytes = writer.finish(&metadata).unwrap();
        let file = Pcab::open(&bytes).unwrap();
        prop_assert_eq!(file.methodology(), methodology);
        for (boundary, mean, basis, variance, _) in &entries {
            let entry = file.at_boundary(*boundary).unwrap();
            let same = |a: &[f32], b: &[f32]| a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()));
            prop_assert!(same(&entry.mean(), mean) && same(&entry.basis(), basis) && same(&entry.variance(), variance));
        }
        prop_assert_eq!(rewrite(&file), bytes);
    }

    #[test]
    fn any_bytes_are_refused_or_written_again(
        mut bytes in prop::collection::vec(any::<u8>(), 0..400),
        header in any::<bool>(),
    ) {
        if header && bytes.len() >= 64 {
            bytes[..64].copy_from_slice(&small()[..64]);
            let len = bytes.len() as u64;
            bytes[40..48].copy_from_slice(&len.to_le_bytes());
        }
        check(&bytes)?;
    }

    #[test]
    fn fields_set_to_anything(
        changes in prop::collection::vec((0_usize..40, prop_oneof![any::<u32>(), 0_u32..700]), 1..4),
    ) {
        let mut bytes = small();
        for (word, value) in changes {
            bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
        }
        check(&bytes)?;
    }
}
