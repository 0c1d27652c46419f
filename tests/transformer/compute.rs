//! What the backend computes, and that it does not matter how it is asked.

use aeon_station::model::{
    Cache, CancelToken, Head, HeadOutput, LayerRange, ModelError, load::transformer_from_bytes,
    transformer::Transformer,
};
use serde_json::json;

use crate::{
    naive,
    tiny::{Tiny, odd_sizes},
};

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i * 7 % 37).collect()
}

fn forward(model: &Transformer, cache: &mut dyn Cache, residuals: &[f32]) -> Vec<f32> {
    model.forward(cache, residuals.to_vec(), &CancelToken::default()).unwrap()
}

fn logits(model: &Transformer, residuals: &[f32]) -> Vec<f32> {
    match model.head(residuals, Head::Logits, &CancelToken::default()).unwrap() {
        HeadOutput::Logits(logits) => logits,
        other => panic!("{other:?}"),
    }
}

/// Equality of bits: `==` would take -0 for 0.
fn assert_same(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}: bits differ");
}

#[test]
fn agrees_with_a_scalar_implementation() {
    for changes in [
        json!({}),
        json!({"tie_word_embeddings": false}),
        json!({"model_type": "qwen2"}),
        json!({"attention_bias": true, "mlp_bias": true}),
        json!({"num_key_value_heads": 6, "head_dim": 4, "rope_theta": 1e6}),
        json!({"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 38}),
    ] {
        let tiny = Tiny::new(odd_sizes(), changes.clone());
        let ids = ids(19);
        let (boundaries, expected_logits) = naive::run(&tiny, &ids);
        let near = |got: &[f32], expected: &[Vec<f64>], what: &str| {
            let expected = expected.concat();
            assert_eq!(got.len(), expected.len());
            let worst = got.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < 2e-4, "{changes}: {what} off by {worst}");
        };
        let mut residuals = tiny.load(Some(0..1)).embed(&ids).unwrap();
        near(&residuals, &boundaries[0], "embedding");
        for layer in 0..3 {
            let part = tiny.load(Some(layer..layer + 1));
            residuals = forward(&part, part.new_cache().as_mut(), &residuals);
            near(&residuals, &boundaries[layer as usize + 1], "residual");
        }
        near(&logits(&tiny.load(Some(2..3)), &residuals), &expected_logits, "logits");
    }
}

#[test]
fn bits_do_not_depend_on_cuts_or_ranges() {
    let tiny = Tiny::new(odd_sizes(), json!({"model_type": "qwen2"}));
    let whole = tiny.load(None);
    // Longer than the backend computes at once.
    let input = whole.embed(&ids(300)).unwrap();
    let hidden = whole.info().hidden_dim;
    let expected = forward(&whole, whole.new_cache().as_mut(), &input);
    for step in [1, 3, 128, 129] {
        let mut cache = whole.new_cache();
        let out: Vec<f32> = input.chunks(step * hidden).flat_map(|x| forward(&whole, cache.as_mut(), x)).collect();
        assert_same(&out, &expected, &format!("{step} at a time"));
        assert_eq!(cache.len(), 300);
    }
    let mut x = input;
    for layers in [0..2, 2..3] {
        let part = tiny.load(Some(layers));
        x = forward(&part, part.new_cache().as_mut(), &x);
    }
    assert_same(&x, &expected, "in two ranges");
    let at_once = logits(&whole, &x);
    let one_by_one: Vec<f32> = x.chunks(hidden).flat_map(|x| logits(&whole, x)).collect();
    assert_same(&at_once, &one_by_one, "logits");
}

#[test]
fn bits_do_not_depend_on_threads() {
    let sizes = json!({"hidden_size": 512, "intermediate_size": 1100, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 1});
    let model = Tiny::new(odd_sizes(), sizes).load(None);
    let input = model.embed(&ids(150)).unwrap();
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| forward(&model, model.new_cache().as_mut(), &input))
    };
    let expected = run(1);
    for threads in [2, 3, 7] {
        assert_same(&run(threads), &expected, &format!("{threads} threads"));
    }
    let mut cache = model.new_cache();
    let out: Vec<f32> = input.chunks(512).flat_map(|x| forward(&model, cache.as_mut(), x)).collect();
    assert_same(&out, &expected, "one at a time");
}

#[test]
fn a_rewound_cache_gives_the_same_bits() {
    let model = Tiny::new(odd_sizes(), json!({})).load(None);
    let input = model.embed(&ids(40)).unwrap();
    let hidden = model.info().hidden_dim;
    let mut cache = model.new_cache();
    let expected = forward(&model, cache.as_mut(), &input);
    for len in [40, 39, 17, 1, 0] {
        cache.truncate(len);
        assert_eq!(cache.len(), len);
        // Another continuation in between leaves no trace.
        forward(&model, cache.as_mut(), &input[..3 * hidden]);
        cache.truncate(len);
        let again = forward(&model, cache.as_mut(), &input[len * hidden..]);
        assert_same(&again, &expected[len * hidden..], &format!("from {len}"));
    }
    cache.truncate(1000);
    assert_eq!(cache.len(), 40);
    assert!(cache.bytes() >= 40 * model.cache_bytes_per_position());
    assert_eq!(model.cache_bytes_per_position(), 3 * 2 * 20 * 4);
}

#[test]
fn cancelled_work_leaves_the_cache_as_it_was() {
    let model = Tiny::new(odd_sizes(), json!({})).load(None);
    let input = model.embed(&ids(20)).unwrap();
    let half = input.len() / 2;
    let expected = forward(&model, model.new_cache().as_mut(), &input);
    let mut cache = model.new_cache();
    forward(&model, cache.as_mut(), &input[..half]);
    let cancel = CancelToken::default();
    cancel.cancel();
    let error = model.forward(cache.as_mut(), input[half..].to_vec(), &cancel).unwrap_err();
    assert!(matches!(error, ModelError::Cancelled));
    assert!(matches!(model.head(&input, Head::Token, &cancel), Err(ModelError::Cancelled)));
    assert_eq!(cache.len(), 10);
    assert_same(&forward(&model, cache.as_mut(), &input[half..]), &expected[half..], "after a cancellation");
}

#[test]
fn an_exported_cache_continues_elsewhere() {
    let model = Tiny::new(odd_sizes(), json!({})).load(None);
    let input = model.embed(&ids(20)).unwrap();
    let half = input.len() / 2;
    let expected = forward(&model, model.new_cache().as_mut(), &input);
    let mut cache = model.new_cache();
    forward(&model, cache.as_mut(), &input[..half]);
    // Any prefix of what is held can be taken, whatever came after it.
    forward(&model, cache.as_mut(), &model.embed(&ids(5)).unwrap());
    let values = model.export_cache(cache.as_ref(), 10).unwrap();
    assert_eq!(values.len() * 4, 10 * model.cache_bytes_per_position());
    assert_eq!(values.len(), 10 * model.exported_per_position().unwrap());
    let mut other = model.import_cache(10, &values).unwrap();
    assert_eq!(other.len(), 10);
    assert_same(&forward(&model, other.as_mut(), &input[half..]), &expected[half..], "after an import");
    assert_eq!(model.import_cache(0, &[]).unwrap().len(), 0);
}

#[test]
fn cache_contents_that_do_not_fit_are_refused() {
    let model = Tiny::new(odd_sizes(), json!({})).load(None);
    let mut cache = model.new_cache();
    forward(&model, cache.as_mut(), &model.embed(&ids(4)).unwrap());
    let values = model.export_cache(cache.as_ref(), 4).unwrap();
    let more = model.export_cache(cache.as_ref(), 5);
    assert!(matches!(more, Err(ModelError::CacheLen { unit: "positions", expected: 5, got: 4 })));
    for (len, values) in [(4, &values[1..]), (3, &values[..]), (5, &values[..]), (usize::MAX, &values[..]), (4, &[])] {
        assert!(matches!(model.import_cache(len, values), Err(ModelError::CacheLen { unit: "values", .. })), "{len}");
    }
    let mut bad = values;
    bad[7] = f32::NAN;
    assert!(matches!(model.import_cache(4, &bad), Err(ModelError::CacheNonFinite { index: 7 })));
}

#[test]
fn parts_that_are_elsewhere_are_refused() {
    let tiny = Tiny::new(odd_sizes(), json!({}));
    let (middle, last, whole) = (tiny.load(Some(1..2)), tiny.load(Some(2..3)), tiny.load(None));
    assert!(matches!(middle.embed(&[1]), Err(ModelError::NotHere { part: "embedding", lo: 1, hi: 2, n_layers: 3 })));
    // The tied head needs the embedding, but it does not make this the first station.
    assert!(matches!(last.embed(&[1]), Err(ModelError::NotHere { .. })));
    let x = vec![0.5; 20];
    assert!(matches!(
        middle.head(&x, Head::Token, &CancelToken::default()),
        Err(ModelError::NotHere { part: "head", .. })
    ));
    assert_same(&logits(&last, &x), &logits(&whole, &x), "logits of the last range");
    let mut foreign = whole.new_cache();
    assert!(matches!(middle.forward(foreign.as_mut(), x, &CancelToken::default()), Err(ModelError::ForeignCache)));
}

#[test]
fn tokens_and_the_best_few_come_from_the_logits() {
    let model = Tiny::new(odd_sizes(), json!({})).load(None);
    let x = forward(&model, model.new_cache().as_mut(), &model.embed(&ids(9)).unwrap());
    let all = logits(&model, &x);
    let cancel = CancelToken::default();
    let HeadOutput::Tokens(tokens) = model.head(&x, Head::Token, &cancel).unwrap() else { panic!() };
    let HeadOutput::TopK { k, ids, logits } = model.head(&x, Head::TopK(3), &cancel).unwrap() else { panic!() };
    assert_eq!((k, ids.len(), tokens.len()), (3, 27, 9));
    for (row, all) in all.chunks(37).enumerate() {
        assert_eq!(ids[row * 3], tokens[row]);
        for (id, logit) in ids[row * 3..][..3].iter().zip(&logits[row * 3..]) {
            assert_eq!(all[*id as usize], *logit);
        }
    }
}

#[test]
fn stretched_rotations() {
    let tiny = Tiny::new(odd_sizes(), json!({}));
    let frequencies = |changes: serde_json::Value| {
        let mut config = tiny.config.clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let model = transformer_from_bytes("tiny", &config.to_string(), &tiny.safetensors(), None).unwrap();
        (model.config().frequencies(), model.info().config_fp.clone())
    };
    let (plain, fp) = frequencies(json!({}));
    let (nested, nested_fp) =
        frequencies(json!({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}));
    assert_eq!((&plain, &fp), (&nested, &nested_fp));
    let (linear, linear_fp) = frequencies(json!({"rope_scaling": {"type": "linear", "factor": 4.0}}));
    assert!(plain.iter().zip(&linear).all(|(plain, linear)| plain / 4.0 == *linear));
    assert_ne!(fp, linear_fp);
    let (llama3, _) = frequencies(json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 100}}));
    // Waves of 6.3, 21.8, 75.5, 262 and 907 positions: short ones stay, long ones stretch, one lies between.
    assert_eq!(llama3[0], plain[0]);
    assert_eq!(llama3[1], plain[1]);
    assert!(llama3[2] < plain[2] && llama3[2] > plain[2] / 8.0);
    assert_eq!(llama3[3..], [plain[3] / 8.0, plain[4] / 8.0]);
}
