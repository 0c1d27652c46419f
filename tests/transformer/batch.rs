//! That several sequences at once come out as each alone, bit for bit.

use std::sync::atomic::{AtomicUsize, Ordering};

use aeon_station::model::{
    Cache, CancelToken, Head, HeadOutput, LayerRange, ModelError,
    batch::{ForwardPart, HeadPart},
    identity::Identity,
    transformer::Transformer,
};
use serde_json::json;

use crate::tiny::{Tiny, odd_sizes};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A sequence: how many positions are there already, and how many come with the request.
struct Asked {
    before: usize,
    seq: usize,
}

/// Residuals that are different for every sequence.
fn input(model: &Transformer, n: usize, asked: &Asked) -> Vec<f32> {
    let ids: Vec<u32> = (0..asked.before + asked.seq).map(|at| ((at * 7 + n * 11) % 37) as u32).collect();
    model.embed(&ids).unwrap()
}

/// A cache that holds what came before the request.
fn cache(model: &Transformer, input: &[f32], asked: &Asked) -> Box<dyn Cache> {
    let mut cache = model.new_cache();
    let hidden = model.info().hidden_dim;
    if asked.before > 0 {
        model.forward(cache.as_mut(), input[..asked.before * hidden].to_vec(), &CancelToken::default()).unwrap();
    }
    cache
}

fn models() -> [Transformer; 2] {
    let large = json!({"hidden_size": 512, "intermediate_size": 1100, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 2});
    [json!({"model_type": "qwen2"}), large].map(|sizes| Tiny::new(odd_sizes(), sizes).load(None))
}

/// Decoding at several depths beside prompts, one longer than what is computed at once.
fn asked() -> Vec<Asked> {
    [(0, 1), (5, 1), (63, 1), (0, 17), (9, 40), (0, 140), (1, 1), (30, 2)]
        .map(|(before, seq)| Asked { before, seq })
        .into()
}

#[test]
fn a_batch_has_the_bits_of_its_parts() {
    for model in models() {
        let hidden = model.info().hidden_dim;
        let never = CancelToken::default();
        let asked = asked();
        let inputs: Vec<Vec<f32>> = asked.iter().enumerate().map(|(n, asked)| input(&model, n, asked)).collect();
        let alone: Vec<(Box<dyn Cache>, Vec<f32>)> = std::iter::zip(&inputs, &asked)
            .map(|(input, asked)| {
                let mut cache = cache(&model, input, asked);
                let out = model.forward(cache.as_mut(), input[asked.before * hidden..].to_vec(), &never).unwrap();
                (cache, out)
            })
            .collect();
        for order in [(0..asked.len()).collect::<Vec<_>>(), (0..asked.len()).rev().collect(), vec![2, 0, 4]] {
            let mut caches: Vec<_> = order.iter().map(|n| cache(&model, &inputs[*n], &asked[*n])).collect();
            let parts = std::iter::zip(&mut caches, &order).map(|(cache, n)| ForwardPart {
                cache: cache.as_mut(),
                residuals: &inputs[*n][asked[*n].before * hidden..],
                cancel: &never,
            });
            let results = model.forward_batch(parts.collect()).unwrap();
            assert_eq!(results.len(), order.len());
            for ((n, result), cache) in order.iter().zip(results).zip(&caches) {
                let (expected_cache, expected) = &alone[*n];
                assert_eq!(bits(&result.unwrap()), bits(expected), "{n} of {order:?}");
                let len = asked[*n].before + asked[*n].seq;
                let held = |cache: &dyn Cache| bits(&model.export_cache(cache, len).unwrap());
                assert_eq!(cache.len(), len);
                assert_eq!(held(cache.as_ref()), held(expected_cache.as_ref()), "what {n} of {order:?} remembers");
            }
        }
    }
}

#[test]
fn a_batch_of_heads_has_the_bits_of_its_parts() {
    let model = Tiny::new(odd_sizes(), json!({})).load(None);
    let never = CancelToken::default();
    let wants = [Head::Token, Head::Logits, Head::TopK(5), Head::Token, Head::TopK(1)];
    // More positions than are held at once, in parts that begin and end anywhere.
    let inputs: Vec<Vec<f32>> = [1, 20, 3, 30, 1]
        .iter()
        .enumerate()
        .map(|(n, seq)| input(&model, n, &Asked { before: 0, seq: *seq }))
        .collect();
    let parts = std::iter::zip(&inputs, wants).map(|(residuals, want)| HeadPart { residuals, want, cancel: &never });
    let parts: Vec<_> = parts.collect();
    let results = model.head_batch(&parts).unwrap();
    assert_eq!(results.len(), parts.len());
    for (part, result) in parts.iter().zip(results) {
        let expected = model.head(part.residuals, part.want, &never).unwrap();
        match (result.unwrap(), expected) {
            (HeadOutput::Logits(got), HeadOutput::Logits(expected)) => assert_eq!(bits(&got), bits(&expected)),
            (got, expected) => assert_eq!(got, expected),
        }
    }
    let cancelled = CancelToken::default();
    cancelled.cancel();
    let parts = [HeadPart { cancel: &cancelled, ..parts[1] }, parts[0]];
    let results = model.head_batch(&parts).unwrap();
    assert!(matches!(results[0], Err(ModelError::Cancelled)));
    assert_eq!(*results[1].as_ref().unwrap(), model.head(parts[1].residuals, Head::Token, &never).unwrap());
}

#[test]
fn a_part_that_is_withdrawn_or_foreign_does_not_touch_the_others() {
    let model = Tiny::new(odd_sizes(), json!({})).load(None);
    let hidden = model.info().hidden_dim;
    let (never, cancelled) = (CancelToken::default(), CancelToken::default());
    cancelled.cancel();
    let asked = Asked { before: 12, seq: 150 };
    let inputs = [0, 1, 2].map(|n| input(&model, n, &asked));
    let mut expected = cache(&model, &inputs[1], &asked);
    let expected_out = model.forward(expected.as_mut(), inputs[1][12 * hidden..].to_vec(), &never).unwrap();
    let mut caches = [0, 1].map(|n| cache(&model, &inputs[n], &asked));
    let mut foreign = Identity::new(4, 4).new_cache();
    let [withdrawn, kept] = &mut caches;
    let parts = [(withdrawn, &cancelled), (kept, &never), (&mut foreign, &never)].into_iter().zip(&inputs);
    let parts = parts.map(|((cache, cancel), input)| ForwardPart {
        cache: cache.as_mut(),
        residuals: &input[12 * hidden..],
        cancel,
    });
    let results = model.forward_batch(parts.collect()).unwrap();
    assert!(matches!(results[0], Err(ModelError::Cancelled)), "{:?}", results[0]);
    assert_eq!(bits(results[1].as_ref().unwrap()), bits(&expected_out));
    assert!(matches!(results[2], Err(ModelError::ForeignCache)));
    assert_eq!((caches[0].len(), caches[1].len()), (12, 162));
    // The withdrawn one can be asked again.
    let again = model.forward(caches[0].as_mut(), inputs[0][12 * hidden..].to_vec(), &never).unwrap();
    let mut fresh = cache(&model, &inputs[0], &asked);
    assert_eq!(bits(&again), bits(&model.forward(fresh.as_mut(), inputs[0][12 * hidden..].to_vec(), &never).unwrap()));
}

#[test]
fn a_part_withdrawn_on_the_way_leaves_its_cache_as_it_was() {
    // Enough layers that the cancellation falls between two of them, whenever the other thread gets to run.
    let model = Tiny::new(odd_sizes(), json!({"num_hidden_layers": 60})).load(None);
    let hidden = model.info().hidden_dim;
    let asked = Asked { before: 3, seq: 100 };
    let inputs = [0, 1].map(|n| input(&model, n, &asked));
    let mut expected = cache(&model, &inputs[1], &asked);
    let expected_out = model.forward(expected.as_mut(), inputs[1][3 * hidden..].to_vec(), &CancelToken::default());
    let expected_out = expected_out.unwrap();
    let rounds = AtomicUsize::new(0);
    let mut was_withdrawn = false;
    while !was_withdrawn {
        assert!(rounds.fetch_add(1, Ordering::Relaxed) < 1000, "never cancelled on the way");
        let (never, cancel) = (CancelToken::default(), CancelToken::default());
        let mut caches = [0, 1].map(|n| cache(&model, &inputs[n], &asked));
        let results = std::thread::scope(|scope| {
            scope.spawn(|| cancel.cancel());
            let parts = caches.iter_mut().zip(&inputs).zip([&cancel, &never]).map(|((cache, input), cancel)| {
                ForwardPart { cache: cache.as_mut(), residuals: &input[3 * hidden..], cancel }
            });
            model.forward_batch(parts.collect()).unwrap()
        });
        assert_eq!(bits(results[1].as_ref().unwrap()), bits(&expected_out));
        assert_eq!(caches[1].len(), 103);
        was_withdrawn = matches!(results[0], Err(ModelError::Cancelled));
        assert_eq!(caches[0].len(), if was_withdrawn { 3 } else { 103 });
    }
}

#[test]
fn backends_without_batches_take_one_after_the_other() {
    let model = Identity::new(2, 10);
    assert_eq!(model.batch_positions(), None);
    let never = CancelToken::default();
    let mut caches = [model.new_cache(), model.new_cache()];
    let inputs = [[1.0, 0.0, 2.0, 0.0], [3.0, 0.0, 4.0, 0.0]];
    let parts = caches.iter_mut().zip(&inputs).map(|(cache, residuals)| ForwardPart {
        cache: cache.as_mut(),
        residuals,
        cancel: &never,
    });
    let results = model.forward_batch(parts.collect()).unwrap();
    assert!(results.iter().zip(&inputs).all(|(result, input)| result.as_ref().unwrap() == input));
    let parts = inputs.each_ref().map(|residuals| HeadPart { residuals, want: Head::Token, cancel: &never });
    let results = model.head_batch(&parts).unwrap();
    assert_eq!(results[1].as_ref().unwrap(), &HeadOutput::Tokens(vec![3, 4]));
}
