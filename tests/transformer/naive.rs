//! The same models one number at a time, in double precision and without a cache.

use crate::tiny::Tiny;

struct Naive<'a>(&'a Tiny);

/// Residuals at every boundary and the logits, for a whole prompt.
pub(crate) fn run(model: &Tiny, ids: &[u32]) -> (Vec<Vec<Vec<f64>>>, Vec<Vec<f64>>) {
    let naive = Naive(model);
    let embedding = naive.tensor("model.embed_tokens.weight");
    let hidden = model.size("hidden_size");
    let mut x: Vec<Vec<f64>> = ids.iter().map(|id| embedding[*id as usize * hidden..][..hidden].to_vec()).collect();
    let mut boundaries = vec![x.clone()];
    for layer in 0..model.size("num_hidden_layers") {
        x = naive.layer(layer, &x);
        boundaries.push(x.clone());
    }
    let head = if model.tensors.contains_key("lm_head.weight") { "lm_head" } else { "model.embed_tokens" };
    let logits = x.iter().map(|x| naive.linear(head, &naive.norm("model.norm", x))).collect();
    (boundaries, logits)
}

impl Naive<'_> {
    fn tensor(&self, name: &str) -> Vec<f64> {
        self.0.tensors[name].1.iter().map(|value| f64::from(*value)).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let eps = f64::from(self.0.config["rms_norm_eps"].as_f64().unwrap() as f32);
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let weight = self.tensor(&format!("{name}.weight"));
        x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.tensor(&format!("{name}.weight"));
        let mut out: Vec<f64> = weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
        let bias = format!("{name}.bias");
        if self.0.tensors.contains_key(&bias) {
            out.iter_mut().zip(self.tensor(&bias)).for_each(|(out, bias)| *out += bias);
        }
        out
    }

    fn rotate(&self, x: &mut [f64], position: usize) {
        let dim = self.0.size("head_dim");
        let theta = self.0.config["rope_theta"].as_f64().unwrap();
        for head in x.chunks_mut(dim) {
            for i in 0..dim / 2 {
                let angle = position as f64 * theta.powf(-2.0 * i as f64 / dim as f64);
                let (a, b) = (head[i], head[i + dim / 2]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + dim / 2] = b * angle.cos() + a * angle.sin();
            }
        }
    }

    fn layer(&self, layer: usize, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let dim = self.0.size("head_dim");
        let group = self.0.size("num_attention_heads") / self.0.size("num_key_value_heads");
        let mut queries = Vec::new();
        let mut keys = Vec::new();
        let mut values = Vec::new();
        for (position, x) in x.iter().enumerate() {
            let normed = self.norm(&name("input_layernorm"), x);
            let mut query = self.linear(&name("self_attn.q_proj"), &normed);
            let mut key = self.linear(&name("self_attn.k_proj"), &normed);
            self.rotate(&mut query, position);
            self.rotate(&mut key, position);
            queries.push(query);
            keys.push(key);
            values.push(self.linear(&name("self_attn.v_proj"), &normed));
        }
        let mut out = Vec::new();
        for (position, x) in x.iter().enumerate() {
            let mut attended = Vec::new();
            for (head, query) in queries[position].chunks(dim).enumerate() {
                let part = head / group * dim..(head / group + 1) * dim;
                let scores: Vec<f64> = keys[..=position]
                    .iter()
                    .map(|key| {
                        query.iter().zip(&key[part.clone()]).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
                    })
                    .map(f64::exp)
                    .collect();
                let sum: f64 = scores.iter().sum();
                for i in part {
                    attended.push(scores.iter().zip(&values).map(|(score, value)| score / sum * value[i]).sum());
                }
            }
            let attended = self.linear(&name("self_attn.o_proj"), &attended);
            let x: Vec<f64> = x.iter().zip(attended).map(|(a, b)| a + b).collect();
            let normed = self.norm(&name("post_attention_layernorm"), &x);
            let gate = self.linear(&name("mlp.gate_proj"), &normed);
            let up = self.linear(&name("mlp.up_proj"), &normed);
            let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let down = self.linear(&name("mlp.down_proj"), &inner);
            out.push(x.iter().zip(down).map(|(a, b)| a + b).collect());
        }
        out
    }
}
