//! Text out of a mesh, token by token.

use std::time::{Duration, Instant};

use super::{
    error::ClientError,
    pipeline::{Pipeline, Want},
    sampler::{Sampler, Sampling},
};

/// How a text is generated.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Tokens at most.
    pub max_tokens: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Candidates that are fetched for each token when sampling.
    pub top_k: u32,
    /// Tokens that end the text, beside those of the model.
    pub stop: Vec<u32>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The model ended it with this token.
    EndOfText(u32),
    /// As many tokens as were asked for.
    MaxTokens,
    /// The model has no more positions.
    ContextFull {
        /// Positions it has.
        context_len: usize,
    },
    /// The receiver of the tokens wanted no more.
    Interrupted,
}

impl std::fmt::Display for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::EndOfText(token) => write!(f, "end of text (token {token})"),
            Self::MaxTokens => f.write_str("as many tokens as asked for"),
            Self::ContextFull { context_len } => write!(f, "context of {context_len} positions is full"),
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}

/// What was generated, and how fast.
#[derive(Debug, Clone)]
pub struct Generated {
    /// The new tokens, without one that ends the text.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub stop: Stop,
    /// From the start to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decoding: Duration,
}

impl Generated {
    /// Tokens a second after the first; `None` if there are fewer than two.
    #[must_use]
    pub fn tokens_per_second(&self) -> Option<f64> {
        let steps = self.tokens.len().checked_sub(1).filter(|steps| *steps > 0)?;
        Some(steps as f64 / self.decoding.as_secs_f64())
    }
}

/// Puts `prompt` behind the session's tokens and generates until something ends it. `on_token` gets each token as it comes
/// and says whether to go on.
///
/// # Errors
/// See [`ClientError`]; what came before the error went to `on_token`. [`resume`] goes on from there.
pub async fn generate(
    pipeline: &mut Pipeline,
    prompt: &[u32],
    options: &GenerateOptions,
    on_token: impl FnMut(u32) -> bool,
) -> Result<Generated, ClientError> {
    run(pipeline, prompt, options, 0, on_token).await
}

/// Goes on with a text that was not finished, in a pipeline of its own or in the one that failed: `prompt` and `tokens`
/// were all of it so far. The rest is what [`generate`] would have given, `max_tokens` counting what was there before. Only
/// the new tokens go to `on_token` and into the result.
///
/// # Errors
/// See [`ClientError`].
pub async fn resume(
    pipeline: &mut Pipeline,
    prompt: &[u32],
    tokens: &[u32],
    options: &GenerateOptions,
    on_token: impl FnMut(u32) -> bool,
) -> Result<Generated, ClientError> {
    let mut history = [prompt, tokens].concat();
    // The last token was not sent yet; of a prompt alone nothing was.
    let last = if tokens.is_empty() { std::mem::take(&mut history) } else { history.split_off(history.len() - 1) };
    pipeline.resume(history);
    run(pipeline, &last, options, tokens.len(), on_token).await
}

/// `before` is how many tokens of the text there are already.
async fn run(
    pipeline: &mut Pipeline,
    prompt: &[u32],
    options: &GenerateOptions,
    before: usize,
    mut on_token: impl FnMut(u32) -> bool,
) -> Result<Generated, ClientError> {
    let mut sampler = Sampler::new(options.sampling);
    sampler.skip(before);
    let want = if sampler.is_greedy() { Want::Token } else { Want::TopK(options.top_k.max(1)) };
    let context_len = pipeline.model().max_position;
    let eos = pipeline.model().eos.clone();
    let started = Instant::now();
    let mut tokens = Vec::new();
    let mut first_token = None;
    let mut input = prompt.to_vec();
    let stop = loop {
        if before + tokens.len() >= options.max_tokens {
            break Stop::MaxTokens;
        }
        if before + tokens.len() > 0 && pipeline.history().len() >= context_len {
            break Stop::ContextFull { context_len };
        }
        let next = pipeline.extend(&input, want).await?;
        first_token.get_or_insert_with(|| started.elapsed());
        let token = match want {
            Want::Token => next.ids.first().copied(),
            Want::TopK(_) => sampler.choose(&next.ids, &next.logits),
        };
        // The pipeline has checked that there is at least one id.
        let Some(token) = token else { break Stop::Interrupted };
        if eos.contains(&token) || options.stop.contains(&token) {
            break Stop::EndOfText(token);
        }
        tokens.push(token);
        if !on_token(token) {
            break Stop::Interrupted;
        }
        input = vec![token];
    };
    let first_token = first_token.unwrap_or_default();
    Ok(Generated { tokens, stop, first_token, decoding: started.elapsed().saturating_sub(first_token) })
}
