//! A model that returns what it is given, for load tests and for trying out a mesh without weights.
//!
//! It has one layer (boundaries 0 and 1). EMBED gives `[token, 0, 0, …]`, LM_HEAD gives the token in element 0, and
//! sessions count positions like those of a real model.

use std::any::Any;

use super::{Cache, CancelToken, Head, HeadOutput, LayerRange, ModelError, ModelInfo, head::Collector};

/// The identity backend.
#[derive(Debug)]
pub struct Identity {
    info: ModelInfo,
}

impl Identity {
    /// A backend with residuals of `hidden_dim` values and `vocab` token ids (at most 2^24, so that every id is exact in
    /// an f32).
    #[must_use]
    pub fn new(hidden_dim: usize, vocab: usize) -> Self {
        let config = format!("{{\"family\":\"identity\",\"hidden_dim\":{hidden_dim},\"vocab\":{vocab}}}");
        let info = ModelInfo {
            name: format!("identity:{hidden_dim}"),
            hidden_dim,
            vocab,
            n_layers: 1,
            layers: 0..1,
            max_position: 1 << 24,
            bos: None,
            eos: Vec::new(),
            config_fp: super::fingerprint(config.as_bytes()),
            layers_fp: super::fingerprint(b"identity"),
        };
        Self { info }
    }
}

#[derive(Debug, Default)]
struct Count(usize);

impl Cache for Count {
    fn len(&self) -> usize {
        self.0
    }
    fn truncate(&mut self, len: usize) {
        self.0 = self.0.min(len);
    }
    fn bytes(&self) -> usize {
        0
    }
}

impl LayerRange for Identity {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn is_inline(&self) -> bool {
        true
    }

    fn new_cache(&self) -> Box<dyn Cache> {
        Box::new(Count::default())
    }

    fn cache_bytes_per_position(&self) -> usize {
        0
    }

    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        let mut residuals = vec![0.0; ids.len() * self.info.hidden_dim];
        for (row, id) in residuals.chunks_exact_mut(self.info.hidden_dim).zip(ids) {
            row[0] = *id as f32;
        }
        Ok(residuals)
    }

    fn forward(
        &self,
        cache: &mut dyn Cache,
        residuals: Vec<f32>,
        cancel: &CancelToken,
    ) -> Result<Vec<f32>, ModelError> {
        if cancel.is_cancelled() {
            return Err(ModelError::Cancelled);
        }
        let count = (cache as &mut dyn Any).downcast_mut::<Count>().ok_or(ModelError::ForeignCache)?;
        count.0 += residuals.len() / self.info.hidden_dim;
        Ok(residuals)
    }

    fn exported_per_position(&self) -> Option<usize> {
        Some(0)
    }

    fn export_cache(&self, cache: &dyn Cache, len: usize) -> Result<Vec<f32>, ModelError> {
        let count = (cache as &dyn Any).downcast_ref::<Count>().ok_or(ModelError::ForeignCache)?;
        if len > count.0 {
            return Err(ModelError::CacheLen { unit: "positions", expected: len, got: count.0 });
        }
        Ok(Vec::new())
    }

    fn import_cache(&self, len: usize, values: &[f32]) -> Result<Box<dyn Cache>, ModelError> {
        if !values.is_empty() {
            return Err(ModelError::CacheLen { unit: "values", expected: 0, got: values.len() });
        }
        Ok(Box::new(Count(len)))
    }

    fn head(&self, residuals: &[f32], want: Head, _: &CancelToken) -> Result<HeadOutput, ModelError> {
        // Anything that is no token id maps to the nearest one, so that noise in, noise out holds here too.
        let token = |row: &[f32]| row[0].round().clamp(0.0, (self.info.vocab - 1) as f32) as u32;
        let rows = residuals.chunks_exact(self.info.hidden_dim);
        if want == Head::Token {
            return Ok(HeadOutput::Tokens(rows.map(token).collect()));
        }
        let mut collector = Collector::new(want, rows.len(), self.info.vocab);
        let mut logits = vec![0.0; self.info.vocab];
        for row in rows {
            let token = token(row) as usize;
            logits[token] = 1.0;
            collector.push(&logits);
            logits[token] = 0.0;
        }
        Ok(collector.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_pass_through_and_positions_count() {
        let model = Identity::new(4, 100);
        let mut cache = model.new_cache();
        let cancel = CancelToken::default();
        let residuals = model.embed(&[7, 99]).unwrap();
        assert_eq!(residuals, [7.0, 0.0, 0.0, 0.0, 99.0, 0.0, 0.0, 0.0]);
        let residuals = model.forward(cache.as_mut(), residuals, &cancel).unwrap();
        assert_eq!(cache.len(), 2);
        assert_eq!(model.head(&residuals, Head::Token, &cancel).unwrap(), HeadOutput::Tokens(vec![7, 99]));
        let HeadOutput::TopK { ids, .. } = model.head(&residuals, Head::TopK(2), &cancel).unwrap() else { panic!() };
        assert_eq!(ids, [7, 0, 99, 0]);
        cancel.cancel();
        assert!(matches!(model.forward(cache.as_mut(), residuals, &cancel), Err(ModelError::Cancelled)));
        assert_eq!(cache.len(), 2);
    }
}
