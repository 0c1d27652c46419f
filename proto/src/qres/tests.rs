//! Round trips, what each format costs and keeps, and that nothing but a well-formed body is read.

use alloc::{format, vec, vec::Vec};

use proptest::prelude::*;

use super::{encode::encode_by, *};
use crate::{
    frame::{Flags, Frame},
    payload::{FrameWriter, Payload},
    residual::NonFinite,
    route::Route,
};

/// Values like those of a residual: a Gaussian bulk (a sum of uniform numbers) and a few large coordinates.
fn residuals(seq: usize, d: usize) -> Vec<f32> {
    let mut state = 12_345_u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..seq * d)
        .map(|n| {
            let bulk: f32 = (0..12).map(|_| uniform()).sum();
            if n % d == 5 { 40.0 + bulk } else { bulk }
        })
        .collect()
}

fn header(format: Format, d: usize) -> Header {
    let seed = if matches!(format, Format::Rotated(_)) { 9 } else { 0 };
    Header { boundary: 3, hidden_dim: d as u32, basis_fp: 0, methodology: 0, format, seed }
}

fn all_formats() -> Vec<Format> {
    let mut formats = vec![Format::F16, Format::I8];
    formats.extend((MIN_BITS..=MAX_BITS).map(Format::Rotated));
    formats
}

fn round_trip(
    format: Format,
    d: usize,
    values: &[f32],
    escape: impl FnMut(usize, &[f32]) -> bool,
) -> (Vec<u8>, Vec<f32>) {
    let header = header(format, d);
    let rotation = Rotation::new(d, 9).filter(|_| matches!(format, Format::Rotated(_)));
    let parts = Parts { mean: None, rotation: rotation.as_ref() };
    let mut bytes = vec![0xee];
    encode(&header, &parts, values, escape, &mut bytes).unwrap();
    assert_eq!(bytes.remove(0), 0xee);
    let body = QresBody::decode(&bytes).unwrap();
    assert_eq!((*body.header(), body.seq()), (header, values.len() / d));
    body.check_finite().unwrap();
    let mut out = vec![f32::NAN; values.len()];
    body.read(&parts, &mut out).unwrap();
    (bytes, out)
}

fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let sum = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let error = sum(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    libm::sqrt(error / sum(&mut a.iter().map(|a| f64::from(*a))))
}

#[test]
fn each_format_keeps_what_its_bits_allow() {
    let (seq, d) = (5, 576);
    let values = residuals(seq, d);
    // Lloyd-Max distortion of a Gaussian: 0.0345, 0.0095, 0.0025, 0.00066, 0.00017, 0.000043; f16 rounds to 2^-11.
    let bounds = [0.0005, 0.02, 0.20, 0.105, 0.054, 0.028, 0.0145, 0.0075];
    for (format, bound) in all_formats().into_iter().zip(bounds) {
        let (bytes, out) = round_trip(format, d, &values, |_, _| false);
        assert_eq!(bytes.len(), encoded_len(format, d, seq, 0), "{format:?}");
        let error = relative_error(&values, &out);
        assert!(error < bound && error > bound / 4.0, "{format:?}: {error}");
    }
    assert_eq!(encoded_len(Format::Rotated(4), 576, 1, 0), 32 + 1 + 290);
    assert_eq!(encoded_len(Format::I8, 576, 1, 0), 32 + 1 + 594);
}

#[test]
fn three_bits_of_3584_fit_a_packet_with_their_frame_and_a_meta_of_80_bytes() {
    let (body, _) = round_trip(Format::Rotated(3), 3584, &residuals(1, 3584), |_, _| false);
    let meta = format!(r#"{{"session":"{}","pos":1234}}"#, "s".repeat(55));
    assert_eq!(meta.len(), 80);
    let mut datagram = Vec::new();
    let mut frame = FrameWriter::new(&mut datagram, Route::FORWARD_Q.0, 1, Flags::NONE);
    frame.meta_text(&meta);
    frame.body().extend_from_slice(&body);
    frame.finish().unwrap();
    // 1,500 bytes of Ethernet, less 20 of IPv4 and 8 of UDP.
    assert!(datagram.len() <= 1472, "{}", datagram.len());
    let payload = Payload::decode(Frame::decode_exact(&datagram).unwrap().payload).unwrap();
    assert_eq!((payload.meta, payload.body), (&*meta, &*body));
}

#[test]
fn odd_widths_and_single_positions_work() {
    for d in [1, 2, 3, 63, 64, 65, 100, 130] {
        for format in all_formats() {
            let values = residuals(3, d);
            let (bytes, out) = round_trip(format, d, &values, |_, _| false);
            assert_eq!(bytes.len(), encoded_len(format, d, 3, 0), "{format:?} {d}");
            assert!(relative_error(&values, &out) < 1.0, "{format:?} {d}");
        }
    }
}

#[test]
fn escaped_positions_are_halves_and_large_ones_whole() {
    let d = 64;
    let mut values = residuals(10, d);
    let (bytes, out) = round_trip(Format::Rotated(4), d, &values, |position, _| position == 0 || position == 9);
    assert_eq!(bytes.len(), encoded_len(Format::Rotated(4), d, 10, 2));
    let body = QresBody::decode(&bytes).unwrap();
    let escaped: Vec<bool> = (0..10).map(|position| body.is_escaped(position)).collect();
    assert_eq!(escaped.iter().filter(|escaped| **escaped).count(), 2);
    assert!(escaped[0] && escaped[9] && bytes[HEADER_LEN..][..2] == [1, 2]);
    for position in [0, 9] {
        let range = position * d..(position + 1) * d;
        assert!(relative_error(&values[range.clone()], &out[range]) < 0.0005);
    }
    // What f16 cannot hold is escaped without being asked, as f32, in every format.
    values[d] = 1e9;
    values[d + 1] = -1e38;
    for format in all_formats() {
        let (bytes, out) = round_trip(format, d, &values, |_, _| false);
        let body = QresBody::decode(&bytes).unwrap();
        assert!(body.is_escaped(1) && !body.is_escaped(0), "{format:?}");
        assert_eq!(out[d..2 * d], values[d..2 * d], "{format:?}");
    }
}

#[test]
fn the_mean_is_taken_off_and_put_back() {
    let d = 96;
    let mean: Vec<f32> = (0..d).map(|n| (n as f32 - 40.0) * 3.0).collect();
    let values: Vec<f32> = residuals(4, d).iter().zip(mean.iter().cycle()).map(|(v, m)| v + m).collect();
    let header = Header { basis_fp: 7, methodology: 8, ..header(Format::Rotated(5), d) };
    let rotation = Rotation::new(d, 9).unwrap();
    let parts = Parts { mean: Some(&mean), rotation: Some(&rotation) };
    let mut bytes = Vec::new();
    encode(&header, &parts, &values, |_, _| false, &mut bytes).unwrap();
    let mut out = vec![0.0; values.len()];
    let body = QresBody::decode(&bytes).unwrap();
    body.read(&parts, &mut out).unwrap();
    let (_, without) = round_trip(Format::Rotated(5), d, &values, |_, _| false);
    assert!(relative_error(&values, &out) * 3.0 < relative_error(&values, &without));
    // A body that names a mean is not read without it, nor the other way round, nor with another seed.
    let other = Rotation::new(d, 10).unwrap();
    for parts in [
        Parts { mean: None, ..parts },
        Parts { rotation: None, ..parts },
        Parts { rotation: Some(&other), ..parts },
        Parts { mean: Some(&mean[1..]), ..parts },
    ] {
        assert_eq!(body.read(&parts, &mut out), Err(ReadError::Parts));
        assert_eq!(encode(&header, &parts, &values, |_, _| false, &mut Vec::new()), Err(EncodeError::Parts));
    }
    assert!(matches!(body.read(&parts, &mut out[1..]), Err(ReadError::Shape { got: 383, seq: 4, d: 96 })));
}

#[test]
fn nothing_and_zeros_are_finite() {
    for format in all_formats() {
        let (_, out) = round_trip(format, 64, &[0.0; 128], |_, _| false);
        assert!(out.iter().all(|value| *value == 0.0), "{format:?}");
    }
    let mut out = Vec::new();
    let header = header(Format::F16, 2);
    let parts = Parts { mean: None, rotation: None };
    let mut encode = |header: &Header, values: &[f32]| encode(header, &parts, values, |_, _| false, &mut out);
    assert_eq!(encode(&header, &[]), Err(EncodeError::Shape { got: 0, d: 2 }));
    assert_eq!(encode(&header, &[1.0; 3]), Err(EncodeError::Shape { got: 3, d: 2 }));
    assert_eq!(encode(&header, &[1.0, f32::NAN]), Err(EncodeError::NonFinite(NonFinite { index: 1 })));
    let wrong = Header { format: Format::Rotated(9), ..header };
    assert!(matches!(encode(&wrong, &[1.0, 2.0]), Err(EncodeError::Header(DecodeError::UnknownFormat { .. }))));
    let wrong = Header { hidden_dim: 0, ..header };
    assert!(matches!(encode(&wrong, &[1.0, 2.0]), Err(EncodeError::Header(DecodeError::Width { got: 0 }))));
    assert!(out.is_empty());
}

#[test]
fn every_fault_of_a_body_is_named() {
    let (good, _) = round_trip(Format::Rotated(3), 64, &residuals(3, 64), |position, _| position == 1);
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        QresBody::decode(&changed).map(|body| body.check_finite())
    };
    assert!(matches!(with(0, b"PCAR"), Err(DecodeError::BadTag { got }) if &got == b"PCAR"));
    assert_eq!(with(8, &[0; 4]), Err(DecodeError::Width { got: 0 }));
    assert_eq!(with(8, &[255; 4]), Err(DecodeError::Width { got: u32::MAX }));
    assert!(matches!(with(8, &[65, 0]), Err(DecodeError::Length { seq: 3, escaped: 1, .. })));
    assert_eq!(with(12, &[0; 4]), Err(DecodeError::NoPositions));
    assert!(matches!(with(12, &[255; 4]), Err(DecodeError::Truncated { .. })));
    assert!(matches!(with(12, &[4]), Err(DecodeError::Length { seq: 4, .. })));
    assert!(matches!(with(20, &[1]), Err(DecodeError::Unused { field: "methodology", got: 1 })));
    for codes in [[2, 2], [2, 9], [0, 8], [1, 16], [3, 4], [9, 9]] {
        assert_eq!(with(24, &codes), Err(DecodeError::UnknownFormat { format: codes[0], bits: codes[1] }));
    }
    assert!(matches!(with(24, &[1, 8]), Err(DecodeError::Unused { field: "seed", got: 9 })));
    assert_eq!(with(26, &[2, 0]), Err(DecodeError::UnknownFlags { flags: 2 }));
    assert_eq!(with(27, &[1]), Err(DecodeError::UnknownFlags { flags: 0x100 }));
    assert_eq!(with(32, &[0b1010]), Err(DecodeError::Bitmap));
    assert!(matches!(with(32, &[0b110]), Err(DecodeError::Length { escaped: 2, .. })));
    assert_eq!(with(33, &[0, 0x7c]), Ok(Err(NonFinitePosition { position: 0 })));
    let escaped = 33 + 2 + 24;
    assert_eq!(with(escaped + 126, &[0, 0xfe]), Ok(Err(NonFinitePosition { position: 1 })));
    // Three codes of 3 bits leave 7 bits of their last byte, which must be 0.
    let (mut odd, _) = round_trip(Format::Rotated(3), 3, &residuals(2, 3), |_, _| false);
    let last = odd.len() - 1;
    assert!(odd[last] < 2);
    odd[last] |= 2;
    assert_eq!(QresBody::decode(&odd), Err(DecodeError::Padding { position: 1 }));
    for len in 0..good.len() {
        assert!(QresBody::decode(&good[..len]).is_err(), "{len}");
    }
    let mut long = good.clone();
    long.push(0);
    assert!(matches!(QresBody::decode(&long), Err(DecodeError::Length { .. })));
}

/// The definition, one number at a time: `proto/spec-qres.md` as code.
mod naive {
    use ::half::f16;

    use super::*;

    fn rotation(d: usize, seed: u32) -> Vec<(Vec<usize>, Vec<bool>)> {
        let mut state = u64::from(seed);
        let mut next = move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        let mut round = || {
            let words: Vec<u64> = (0..d.div_ceil(64)).map(|_| next()).collect();
            let signs = (0..d).map(|j| words[j / 64] >> (j % 64) & 1 == 1).collect();
            let mut source: Vec<usize> = (0..d).collect();
            for last in (1..d).rev() {
                source.swap(last, (((next() >> 32) * (last as u64 + 1)) >> 32) as usize);
            }
            (source, signs)
        };
        vec![round(), round()]
    }

    fn transform(values: &mut [f32], block: usize) {
        let mut apart = 1;
        while apart < block {
            for low in (0..values.len()).filter(|j| j / apart % 2 == 0) {
                let (a, b) = (values[low], values[low + apart]);
                (values[low], values[low + apart]) = (a + b, a - b);
            }
            apart *= 2;
        }
    }

    fn gain(values: &[f32]) -> f16 {
        let mut a = [0.0_f32; 16];
        for (j, value) in values.iter().enumerate() {
            a[j % 16] += value * value;
        }
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                a[l] += a[l + half];
            }
        }
        f16::from_f32_const((a[0] / values.len() as f32).sqrt())
    }

    fn levels(bits: u8) -> Vec<f32> {
        let book = Codebook::of(bits).unwrap();
        (0..1_usize << bits).map(|code| book.level(code as u8)).collect()
    }

    fn mean(parts: &Parts<'_>, j: usize) -> f32 {
        parts.mean.map_or(0.0, |mean| mean[j])
    }

    pub(super) fn encode(header: &Header, parts: &Parts<'_>, values: &[f32], escaped: &[bool]) -> Vec<u8> {
        let d = header.hidden_dim as usize;
        let halves = |row: &[f32]| row.iter().map(|v| f16::from_f32_const(*v)).collect::<Vec<_>>();
        let differences = |row: &[f32]| row.iter().enumerate().map(|(j, v)| v - mean(parts, j)).collect::<Vec<_>>();
        let scale = |block: &[f32]| f16::from_f32_const(block.iter().fold(0.0_f32, |m, v| m.max(v.abs())) / 127.0);
        let escaped: Vec<bool> = values
            .chunks(d)
            .zip(escaped)
            .map(|(row, escaped)| {
                let fits = match header.format {
                    Format::F16 => halves(row).iter().all(|half| half.is_finite()),
                    Format::I8 => row.chunks(64).all(|block| scale(block).is_finite()),
                    Format::Rotated(_) => gain(&differences(row)).is_finite(),
                };
                *escaped || !fits
            })
            .collect();
        let overflows = |row: &[f32]| !halves(row).iter().all(|half| half.is_finite());
        let are_whole = values.chunks(d).zip(&escaped).any(|(row, escaped)| *escaped && overflows(row));

        let (format, bits) = header.format.codes();
        let mut out = b"QRES".to_vec();
        let words = [header.boundary, header.hidden_dim, escaped.len() as u32, header.basis_fp, header.methodology];
        out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        out.extend([format, bits, u8::from(are_whole), 0]);
        out.extend(header.seed.to_le_bytes());
        let mut bitmap = vec![0; escaped.len().div_ceil(8)];
        for (position, _) in escaped.iter().enumerate().filter(|(_, escaped)| **escaped) {
            bitmap[position / 8] |= 1 << (position % 8);
        }
        out.extend(bitmap);
        for (row, escaped) in values.chunks(d).zip(&escaped) {
            match header.format {
                _ if *escaped && are_whole => out.extend(row.iter().flat_map(|v| v.to_le_bytes())),
                Format::F16 => out.extend(halves(row).iter().flat_map(|half| half.to_le_bytes())),
                _ if *escaped => out.extend(halves(row).iter().flat_map(|half| half.to_le_bytes())),
                Format::I8 => {
                    out.extend(row.chunks(64).flat_map(|block| scale(block).to_le_bytes()));
                    for (j, value) in row.iter().enumerate() {
                        let scale = scale(row.chunks(64).nth(j / 64).unwrap()).to_f32_const();
                        let scaled = if scale == 0.0 { 0.0 } else { (value / scale).clamp(-127.0, 127.0) };
                        out.push(scaled.round_ties_even() as i8 as u8);
                    }
                }
                Format::Rotated(bits) => {
                    let mut values = differences(row);
                    let gain = gain(&values);
                    out.extend(gain.to_le_bytes());
                    let block = 1 << d.trailing_zeros();
                    for (source, signs) in rotation(d, header.seed) {
                        values = source.iter().map(|j| if signs[*j] { -values[*j] } else { values[*j] }).collect();
                        transform(&mut values, block);
                    }
                    let scale = gain.to_f32_const() * block as f32;
                    let levels = levels(bits);
                    let codes = values.iter().map(|value| {
                        let scaled = if scale == 0.0 { 0.0 } else { value / scale };
                        levels.windows(2).filter(|two| scaled >= (two[0] + two[1]) * 0.5).count()
                    });
                    let mut packed = vec![0; (d * usize::from(bits)).div_ceil(8)];
                    for (j, code) in codes.enumerate() {
                        for bit in 0..usize::from(bits) {
                            let at = j * usize::from(bits) + bit;
                            packed[at / 8] |= ((code >> bit & 1) as u8) << (at % 8);
                        }
                    }
                    out.extend(packed);
                }
            }
        }
        out
    }

    pub(super) fn read(header: &Header, parts: &Parts<'_>, escaped: &[bool], bytes: &[u8]) -> Vec<f32> {
        let d = header.hidden_dim as usize;
        let are_whole = bytes[26] == 1;
        let mut at = HEADER_LEN + escaped.len().div_ceil(8);
        let mut take = |len: usize| {
            at += len;
            &bytes[at - len..at]
        };
        let half = |two: &[u8]| f16::from_le_bytes([two[0], two[1]]).to_f32_const();
        let mut out = Vec::new();
        for escaped in escaped {
            match header.format {
                _ if *escaped && are_whole => {
                    out.extend(take(4 * d).chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())));
                }
                Format::F16 => out.extend(take(2 * d).chunks(2).map(half)),
                _ if *escaped => out.extend(take(2 * d).chunks(2).map(half)),
                Format::I8 => {
                    let scales: Vec<f32> = take(2 * d.div_ceil(64)).chunks(2).map(half).collect();
                    out.extend(take(d).iter().enumerate().map(|(j, code)| f32::from(*code as i8) * scales[j / 64]));
                }
                Format::Rotated(bits) => {
                    let (gain, levels) = (half(take(2)), levels(bits));
                    let packed = take((d * usize::from(bits)).div_ceil(8));
                    let mut values: Vec<f32> = (0..d)
                        .map(|j| {
                            let code = (0..usize::from(bits)).fold(0, |code, bit| {
                                let at = j * usize::from(bits) + bit;
                                code | usize::from(packed[at / 8] >> (at % 8) & 1) << bit
                            });
                            levels[code] * gain
                        })
                        .collect();
                    let block = 1 << d.trailing_zeros();
                    for (source, signs) in rotation(d, header.seed).iter().rev() {
                        transform(&mut values, block);
                        let mut back = vec![0.0; d];
                        for (value, j) in values.iter().zip(source) {
                            back[*j] = if signs[*j] { -value } else { *value };
                        }
                        values = back;
                    }
                    let scale = 1.0 / block as f32;
                    out.extend(values.iter().enumerate().map(|(j, value)| match parts.mean {
                        Some(mean) => value * scale + mean[j],
                        None => value * scale,
                    }));
                }
            }
        }
        out
    }
}

fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Encodes and reads by the definition and by every build, and compares all bits.
fn compare(format: Format, values: &[f32], d: usize, seed: u32, mean: Option<&[f32]>, escaped: &[bool]) -> Vec<f32> {
    let rotation = Rotation::new(d, seed).filter(|_| format.is_rotated());
    let mean = mean.filter(|_| format.is_rotated());
    let fp = u32::from(mean.is_some());
    let seed = if format.is_rotated() { seed } else { 0 };
    let header = Header { boundary: 3, hidden_dim: d as u32, basis_fp: fp, methodology: fp, format, seed };
    let parts = Parts { mean, rotation: rotation.as_ref() };
    let expected = naive::encode(&header, &parts, values, escaped);
    let mut read = Vec::new();
    for path in Path::available() {
        let mut bytes = Vec::new();
        encode_by(path, &header, &parts, values, |position, _| escaped[position], &mut bytes).unwrap();
        assert_eq!(bytes, expected, "{path:?} {format:?} {d}");
        let body = QresBody::decode(&bytes).unwrap();
        assert_eq!(body.check_finite(), Ok(()));
        assert_eq!((body.header(), body.seq()), (&header, escaped.len()));
        let escaped: Vec<bool> = (0..escaped.len()).map(|position| body.is_escaped(position)).collect();
        read = vec![f32::NAN; values.len()];
        body.read_by(path, &parts, &mut read).unwrap();
        assert_eq!(bits_of(&read), bits_of(&naive::read(&header, &parts, &escaped, &bytes)), "{path:?} {format:?} {d}");
    }
    read
}

#[test]
fn every_build_gives_the_bits_of_the_definition() {
    for d in [1, 2, 3, 5, 8, 12, 16, 63, 64, 65, 72, 96, 128, 576, 3584] {
        let values = residuals(3, d);
        let mean: Vec<f32> = residuals(1, d + 1)[1..].to_vec();
        for format in Format::ALL {
            compare(format, &values, d, 0xffff_fff0 ^ d as u32, Some(&mean), &[true, false, false]);
            compare(format, &values, d, 0, None, &[false; 3]);
        }
    }
}

#[test]
fn the_ends_of_the_range_are_kept_or_escaped() {
    let d = 64;
    for format in Format::ALL {
        // f16 holds up to 65,504, so a gain or scale of more makes an escape, and that as f32.
        for (value, is_escaped) in
            [(65_504.0, false), (65_519.0, false), (65_520.0, format != Format::I8), (f32::MAX, true)]
        {
            let read = compare(format, &[value; 64], d, 7, None, &[false]);
            let (worst, best) = (read.iter().fold(0.0_f32, |most, v| most.max((v / value - 1.0).abs())), read[0]);
            assert!(worst < 0.6, "{format:?} {value}: {worst}");
            assert_eq!(best == value, is_escaped || value == 65_504.0 && format == Format::F16, "{format:?} {value}");
        }
        // Differences that overflow are escaped, though residual and mean are finite.
        let (low, high) = ([f32::MIN; 64], [f32::MAX; 64]);
        assert_eq!(compare(format, &high, d, 7, Some(&low), &[false]), high);
        // Under half the least half, 2^-25, a gain or scale is 0; the position is read as the mean.
        let tiny = [1e-9; 64];
        assert!(compare(format, &tiny, d, 7, None, &[false]).iter().all(|value| *value == 0.0), "{format:?}");
        assert!(compare(format, &[f32::from_bits(1); 64], d, 7, None, &[false]).iter().all(|value| *value == 0.0));
        if format.is_rotated() {
            let mean = [3.0; 64];
            assert_eq!(compare(format, &mean, d, 7, Some(&mean), &[false]), mean);
        }
        // One position over the range does not touch the others.
        let mut values = residuals(2, d);
        let alone = compare(format, &values, d, 7, None, &[false, false]);
        values[d + 9] = f32::MAX;
        let read = compare(format, &values, d, 7, None, &[false, false]);
        assert_eq!((&read[..d], &read[d..]), (&alone[..d], &values[d..]));
    }
}

#[test]
fn kinds_have_names() {
    let names: Vec<&str> = Format::ALL.iter().map(|format| format.name()).collect();
    assert_eq!(names, ["f16", "i8", "q8", "q7", "q6", "q5", "q4", "q3"]);
    for format in Format::ALL {
        assert_eq!(Format::from_name(format.name()), Some(format));
    }
    for name in ["", "f32", "q2", "q9", "Q4", "pcar", "e4"] {
        assert_eq!(Format::from_name(name), None);
    }
}

#[test]
fn outliers_have_four_times_the_median_norm() {
    assert_eq!(norm(&[3.0, 4.0]), 5.0);
    let values = residuals(1, 576);
    let exact = libm::sqrt(values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum());
    assert!((f64::from(norm(&values)) / exact - 1.0).abs() < 1e-6);
    assert!(!is_outlier(&[3.0, 4.0], 1.25) && is_outlier(&[3.0, 4.0], 1.24));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_finite_residuals_go_and_come_by_the_definition(
        d in prop_oneof![1_usize..40, Just(64_usize), Just(96), Just(160)],
        seq in 1_usize..12,
        format in 0_usize..8,
        seed: u32,
        has_mean: bool,
        words in prop::collection::vec(prop_oneof![8 => 0x3a00_0000_u32..0x4300_0000, 1 => any::<u32>()], 64..200),
        escaped: u16,
    ) {
        let value = |n: usize| {
            let word = words[n % words.len()] ^ ((n as u32).wrapping_mul(0x9e37_79b9) & 0x8000_0000);
            if f32::from_bits(word).is_finite() { f32::from_bits(word) } else { 1.0 }
        };
        let values: Vec<f32> = (0..seq * d).map(value).collect();
        let mean: Vec<f32> = (0..d).map(|n| value(7 * n + 3)).collect();
        let escaped: Vec<bool> = (0..seq).map(|position| escaped >> position & 1 == 1).collect();
        compare(Format::ALL[format], &values, d, seed, has_mean.then_some(&mean[..]), &escaped);
    }

    #[test]
    fn no_bytes_do_harm(
        seq in 1_u32..20,
        d in 1_u32..80,
        codes in prop_oneof![Just([0_u8, 16]), Just([1, 8]), (3_u8..9).prop_map(|bits| [2, bits]), any::<[u8; 2]>()],
        flags in prop_oneof![Just(0_u16), Just(1), any::<u16>()],
        fields: [u32; 4],
        tail in prop::collection::vec(any::<u8>(), 0..4000),
        exact: bool,
    ) {
        let mut bytes = b"QRES".to_vec();
        for word in [fields[0], d, seq, fields[1] % 2, fields[2] % 2] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(codes);
        bytes.extend(flags.to_le_bytes());
        bytes.extend((if codes[0] == 2 { fields[3] } else { 0 }).to_le_bytes());
        bytes.extend(&tail);
        if exact && let Err(DecodeError::Length { needed, .. }) = QresBody::decode(&bytes) {
            bytes.resize(needed as usize, 0);
        }
        if let Ok(body) = QresBody::decode(&bytes) {
            let header = body.header();
            let rotation = Rotation::new(d as usize, header.seed).filter(|_| header.format.is_rotated());
            let mean = vec![1.0; d as usize];
            let parts = Parts { mean: (header.basis_fp != 0).then_some(&mean[..]), rotation: rotation.as_ref() };
            let mut out = vec![0.0; body.seq() * d as usize];
            body.read(&parts, &mut out).unwrap();
            if body.check_finite().is_ok() {
                prop_assert!(out.iter().all(|value| value.is_finite()));
            }
        }
    }
}
