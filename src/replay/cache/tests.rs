use super::*;
use crate::replay::key::prefix_digest;

const HIDDEN: usize = 4;
/// Two layers, keys and values of three numbers each.
const PER_POSITION: usize = 2 * 2 * 3;

fn cache(budget: usize) -> ReplayCache {
    let shape = Shape {
        hidden_dim: HIDDEN,
        layers: 2..4,
        max_position: 1000,
        slab_per_position: Some(PER_POSITION),
        config_fp: "c0ffee".into(),
        layers_fp: "beef".into(),
    };
    ReplayCache::new(shape, budget)
}

fn key(prefix_hash: u64, prefix_len: u32) -> PrefixKey {
    PrefixKey { prefix_hash, prefix_len, layer_lo: 2, layer_hi: 4 }
}

fn capture(prefix_len: u32, value: f32) -> Capture {
    let slab = vec![value; PER_POSITION * prefix_len as usize];
    Capture { tail: vec![value; HIDDEN], slab, ..Capture::default() }
}

fn entry_len(prefix_len: u32) -> usize {
    ENTRY_OVERHEAD + 4 * (HIDDEN + PER_POSITION * prefix_len as usize)
}

fn has(cache: &ReplayCache, key: &PrefixKey) -> bool {
    cache.find(key, &Conditions::default(), true).is_some()
}

#[test]
fn the_least_recently_used_entry_goes_first() {
    let cache = cache(3 * entry_len(5));
    for hash in 1..=3 {
        cache.insert(key(hash, 5), capture(5, hash as f32)).unwrap();
    }
    assert!(has(&cache, &key(1, 5)));
    cache.insert(key(4, 5), capture(5, 4.0)).unwrap();
    assert!(has(&cache, &key(1, 5)) && !has(&cache, &key(2, 5)) && has(&cache, &key(3, 5)));
    assert_eq!(cache.usage(), (3, 3 * entry_len(5)));
    assert_eq!((cache.counters.evictions.value(), cache.counters.captures.value()), (1, 4));
    // Two make room for one of their size together, at once.
    cache.insert(key(5, 16), capture(16, 5.0)).unwrap();
    assert!(cache.usage().1 <= cache.budget());
    assert!(has(&cache, &key(5, 16)));
}

#[test]
fn a_large_entry_after_many_small_ones_never_overshoots() {
    let cache = cache(50 * entry_len(1));
    for hash in 0..500 {
        cache.insert(key(hash, 1), capture(1, 0.5)).unwrap();
        assert!(cache.usage().1 <= cache.budget());
    }
    let fits = (cache.budget() - ENTRY_OVERHEAD - 4 * HIDDEN) / (4 * PER_POSITION);
    cache.insert(key(9, fits as u32), capture(fits as u32, 0.5)).unwrap();
    assert!(cache.usage().1 <= cache.budget() && cache.usage().0 <= 2);
    let before = cache.usage();
    let large = cache.insert(key(10, 1000), capture(1000, 0.5)).unwrap_err();
    assert!(matches!(large, CaptureError::TooLarge { budget, .. } if budget == cache.budget()));
    assert_eq!(cache.usage(), before);
    assert!(matches!(cache.check(&key(1, 1000), PER_POSITION * 1000), Err(CaptureError::TooLarge { .. })));
}

#[test]
fn the_budget_holds_at_its_edge() {
    let exact = cache(entry_len(3));
    exact.insert(key(1, 3), capture(3, 1.0)).unwrap();
    let under = cache(entry_len(3) - 1);
    let refused = under.insert(key(1, 3), capture(3, 1.0));
    assert_eq!(refused, Err(CaptureError::TooLarge { len: entry_len(3), budget: entry_len(3) - 1 }));
    let nothing_fits = cache(0).insert(key(1, 1), capture(1, 1.0)).unwrap_err();
    assert!(nothing_fits.to_string().contains("max-replay-bytes"));
}

#[test]
fn a_new_capture_replaces_the_old_one() {
    let cache = cache(10 * entry_len(5));
    for value in [1.0, 2.0, 3.0] {
        cache.insert(key(1, 5), capture(5, value)).unwrap();
    }
    assert_eq!(cache.usage(), (1, entry_len(5)));
    assert_eq!(cache.find(&key(1, 5), &Conditions::default(), true).unwrap().capture.tail, [3.0; HIDDEN]);
    assert_eq!(cache.counters.evictions.value(), 0);
}

#[test]
fn what_does_not_fit_the_station_is_refused() {
    let cache = cache(1 << 20);
    let refused = |key, edit: fn(&mut Capture)| {
        let mut capture = capture(5, 1.0);
        edit(&mut capture);
        cache.insert(key, capture).unwrap_err()
    };
    assert_eq!(refused(key(1, 0), |_| ()), CaptureError::EmptyPrefix);
    assert!(matches!(refused(key(1, 1001), |_| ()), CaptureError::PrefixTooLong { context_len: 1000, .. }));
    for (layer_lo, layer_hi) in [(0, 4), (2, 3), (3, 4), (2, 5), (4, 2)] {
        let key = PrefixKey { layer_lo, layer_hi, ..key(1, 5) };
        assert!(matches!(refused(key, |_| ()), CaptureError::Layers { .. }));
    }
    assert_eq!(refused(key(1, 5), |c| c.tail.truncate(3)), CaptureError::TailLen { expected: 4, got: 3 });
    assert_eq!(refused(key(1, 5), |c| c.tail.clear()), CaptureError::TailLen { expected: 4, got: 0 });
    let slab = |got| CaptureError::SlabLen { expected: 240, got };
    assert_eq!(refused(key(1, 5), |c| c.slab.truncate(59)), slab(236));
    assert_eq!(refused(key(1, 5), |c| c.slab.push(0.0)), slab(244));
    assert_eq!(refused(key(1, 5), |c| c.slab.truncate(48)), slab(192));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut tail = capture(5, 1.0);
        tail.tail[2] = bad;
        let nan = CaptureError::NonFinite { part: Part::Tail, index: 2 };
        assert_eq!(cache.insert(key(1, 5), tail), Err(nan));
        let mut slab = capture(5, 1.0);
        slab.slab[59] = bad;
        assert_eq!(cache.insert(key(1, 5), slab), Err(CaptureError::NonFinite { part: Part::Slab, index: 59 }));
    }
    assert_eq!(cache.usage(), (0, 0));
    assert_eq!(cache.counters.captures.value(), 0);
    assert!(cache.counters.refused.value() > 10);
    // Awkward numbers that are finite are kept bit for bit.
    let awkward = vec![-0.0, f32::MAX, f32::from_bits(1), f32::MIN_POSITIVE];
    cache.insert(key(1, 5), Capture { tail: awkward.clone(), ..capture(5, 1.0) }).unwrap();
    let kept = cache.find(&key(1, 5), &Conditions::default(), true).unwrap();
    assert!(kept.capture.tail.iter().zip(&awkward).all(|(a, b)| a.to_bits() == b.to_bits()));
}

#[test]
fn a_backend_without_slabs_keeps_tails_alone() {
    let shape = Shape { slab_per_position: None, ..cache(0).shape };
    let cache = ReplayCache::new(shape, 1 << 20);
    assert_eq!(cache.insert(key(1, 5), capture(5, 1.0)), Err(CaptureError::SlabNotTaken { got: 240 }));
    cache.insert(key(1, 5), Capture { slab: vec![], ..capture(5, 1.0) }).unwrap();
    assert!(cache.find(&key(1, 5), &Conditions::default(), false).is_some());
    assert!(!has(&cache, &key(1, 5)));
}

#[test]
fn a_tail_alone_is_no_whole_prefix() {
    let cache = cache(1 << 20);
    cache.insert(key(1, 5), Capture { slab: vec![], ..capture(5, 1.0) }).unwrap();
    assert!(cache.find(&key(1, 5), &Conditions::default(), false).is_some());
    assert!(cache.find(&key(1, 5), &Conditions::default(), true).is_none());
}

#[test]
fn every_part_of_the_key_counts() {
    let cache = cache(1 << 20);
    cache.insert(key(1, 5), capture(5, 1.0)).unwrap();
    let base = key(1, 5);
    for other in [
        PrefixKey { prefix_hash: 2, ..base },
        PrefixKey { prefix_len: 6, ..base },
        PrefixKey { layer_lo: 1, ..base },
        PrefixKey { layer_hi: 5, ..base },
    ] {
        assert!(!has(&cache, &other));
    }
    assert!(has(&cache, &base));
}

#[test]
fn a_difference_in_how_it_was_made_is_a_miss() {
    let cache = cache(1 << 20);
    let (ours, theirs) = (prefix_digest(&[1, 2]), prefix_digest(&[1, 3]));
    let made = Capture { prefix_digest: Some(ours), mesh_fp: Some(theirs), ..capture(5, 1.0) };
    cache.insert(key(1, 5), made.clone()).unwrap();
    let lossy = Capture { provenance: Provenance::Basis(7), prefix_digest: None, mesh_fp: None, ..made };
    cache.insert(key(2, 5), lossy).unwrap();
    let hit = |hash, conditions: Conditions| cache.find(&key(hash, 5), &conditions, true).is_some();
    let any = Conditions::default;
    assert!(hit(1, Conditions { prefix_digest: Some(ours), ..any() }));
    assert!(!hit(1, Conditions { prefix_digest: Some(theirs), ..any() }));
    // One side without a digest: there is nothing to compare.
    assert!(hit(2, Conditions { prefix_digest: Some(theirs), ..any() }));
    assert!(hit(1, Conditions { config_fp: Some("C0FFEE".to_owned()), ..any() }));
    assert!(!hit(1, Conditions { config_fp: Some("c0ffef".to_owned()), ..any() }));
    assert!(hit(1, Conditions { mesh_fp: Some(theirs), ..any() }));
    assert!(!hit(1, Conditions { mesh_fp: Some(ours), ..any() }));
    assert!(!hit(2, Conditions { mesh_fp: Some(ours), ..any() }));
    assert!(hit(1, Conditions { exact: true, ..any() }) && !hit(2, Conditions { exact: true, ..any() }));
    assert!(hit(2, Conditions { basis_fp: Some(7), ..any() }) && !hit(2, Conditions { basis_fp: Some(8), ..any() }));
    assert!(!hit(1, Conditions { basis_fp: Some(7), ..any() }));
}

#[test]
fn what_was_found_outlives_its_eviction() {
    let cache = cache(entry_len(5));
    cache.insert(key(1, 5), capture(5, 1.0)).unwrap();
    let held = cache.find(&key(1, 5), &Conditions::default(), true).unwrap();
    cache.insert(key(2, 5), capture(5, 2.0)).unwrap();
    assert!(!has(&cache, &key(1, 5)));
    assert_eq!(held.capture.slab, vec![1.0; PER_POSITION * 5]);
}

/// Many writers over the same keys, with entries of changing sizes: the budget holds at every moment and the number of
/// bytes is that of the entries.
#[test]
fn many_writers_over_the_same_keys_keep_size_and_metric_equal() {
    let cache = cache(40 * entry_len(20));
    std::thread::scope(|scope| {
        for writer in 0..8_u64 {
            let cache = &cache;
            scope.spawn(move || {
                let mut state = writer + 1;
                for _ in 0..3000 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let (hash, len) = (state >> 33 & 0x3f, (state >> 45) as u32 % 30 + 1);
                    // The length is part of the key: one in three writes meets an existing key.
                    let len = if hash % 3 == 0 { 7 } else { len };
                    if state >> 60 < 12 {
                        cache.insert(key(hash, len), capture(len, hash as f32)).unwrap();
                    } else if let Some(entry) = cache.find(&key(hash, len), &Conditions::default(), true) {
                        assert!(entry.capture.slab.iter().all(|value| *value == hash as f32));
                    }
                    assert!(cache.usage().1 <= cache.budget());
                }
            });
        }
    });
    let slots = cache.lock();
    let counted: usize = slots.slots.values().map(|slot| slot.entry.bytes()).sum();
    assert_eq!((counted, slots.order.len()), (slots.bytes, slots.slots.len()));
    for (used, key) in &slots.order {
        assert_eq!(slots.slots[key].used, *used);
    }
    assert!(cache.counters.evictions.value() > 0);
}

#[test]
fn many_misses_of_one_prefix_leave_one_entry() {
    let cache = cache(1 << 20);
    std::thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                let _ = cache.find(&key(1, 5), &Conditions::default(), true);
                cache.insert(key(1, 5), capture(5, 1.0)).unwrap();
            });
        }
    });
    assert_eq!(cache.usage(), (1, entry_len(5)));
    assert_eq!((cache.counters.captures.value(), cache.counters.evictions.value()), (64, 0));
}
