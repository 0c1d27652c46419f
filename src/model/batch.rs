//! What several requests give to a model at once, so that its weights are fetched once for all of them.

use super::{Cache, CancelToken, Head};

/// One sequence in [`super::LayerRange::forward_batch`].
#[derive(Debug)]
pub struct ForwardPart<'a> {
    /// What is remembered of it.
    pub cache: &'a mut dyn Cache,
    /// Its next positions, `[seq, hidden_dim]`.
    pub residuals: &'a [f32],
    /// Withdraws this part alone.
    pub cancel: &'a CancelToken,
}

/// One request in [`super::LayerRange::head_batch`].
#[derive(Debug, Clone, Copy)]
pub struct HeadPart<'a> {
    /// `[seq, hidden_dim]`.
    pub residuals: &'a [f32],
    /// What is wanted for each position.
    pub want: Head,
    /// Withdraws this part alone.
    pub cancel: &'a CancelToken,
}
