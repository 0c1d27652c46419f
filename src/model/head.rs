//! What comes out of a head: tokens, the best few, or all logits.

use std::cmp::Ordering;

/// What is wanted for each position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Head {
    /// The most likely token; ties go to the lower id.
    Token,
    /// This many ids and logits, in descending order; ties by id.
    TopK(usize),
    /// All logits.
    Logits,
}

/// What was found, position after position.
#[derive(Debug, Clone, PartialEq)]
pub enum HeadOutput {
    /// One id a position.
    Tokens(Vec<u32>),
    /// `k` ids and `k` logits a position.
    TopK {
        /// Entries a position.
        k: usize,
        /// `[seq, k]`.
        ids: Vec<u32>,
        /// `[seq, k]`, descending.
        logits: Vec<f32>,
    },
    /// `[seq, vocab]`.
    Logits(Vec<f32>),
}

/// Collects logits row by row into the output that was asked for, so that a backend never has to hold the logits of a
/// long sequence at once.
#[derive(Debug)]
pub struct Collector {
    output: HeadOutput,
    order: Vec<u32>,
}

impl Collector {
    /// Starts an output for `seq` positions of `vocab` logits.
    #[must_use]
    pub fn new(want: Head, seq: usize, vocab: usize) -> Self {
        let output = match want {
            Head::Token => HeadOutput::Tokens(Vec::with_capacity(seq)),
            Head::TopK(k) => {
                let k = k.min(vocab);
                HeadOutput::TopK { k, ids: Vec::with_capacity(k * seq), logits: Vec::with_capacity(k * seq) }
            }
            Head::Logits => HeadOutput::Logits(Vec::with_capacity(seq * vocab)),
        };
        Self { output, order: Vec::new() }
    }

    /// Adds the logits of the next position.
    pub fn push(&mut self, row: &[f32]) {
        match &mut self.output {
            HeadOutput::Tokens(tokens) => tokens.push(argmax(row)),
            HeadOutput::Logits(logits) => logits.extend_from_slice(row),
            HeadOutput::TopK { k, ids, logits } => {
                self.order.clear();
                self.order.extend(0..row.len() as u32);
                let by_rank = |a: &u32, b: &u32| rank(row, *a, *b);
                if *k < row.len() && *k > 0 {
                    self.order.select_nth_unstable_by(*k - 1, by_rank);
                }
                self.order.truncate(*k);
                self.order.sort_unstable_by(by_rank);
                ids.extend_from_slice(&self.order);
                logits.extend(self.order.iter().map(|id| row[*id as usize]));
            }
        }
    }

    /// The output of all positions pushed.
    #[must_use]
    pub fn finish(self) -> HeadOutput {
        self.output
    }
}

/// Higher logit first, then lower id.
fn rank(row: &[f32], a: u32, b: u32) -> Ordering {
    row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b))
}

/// The index of the largest value, the lowest of several.
#[must_use]
pub fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (id, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = id;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(want: Head, rows: &[&[f32]]) -> HeadOutput {
        let mut collector = Collector::new(want, rows.len(), rows[0].len());
        rows.iter().for_each(|row| collector.push(row));
        collector.finish()
    }

    #[test]
    fn ties_go_to_the_lower_id() {
        let rows: [&[f32]; 2] = [&[1.0, 3.0, 2.0, 3.0], &[-1.0, -1.0, -2.0, -1.0]];
        assert_eq!(collect(Head::Token, &rows), HeadOutput::Tokens(vec![1, 0]));
        let expected =
            HeadOutput::TopK { k: 3, ids: vec![1, 3, 2, 0, 1, 3], logits: vec![3.0, 3.0, 2.0, -1.0, -1.0, -1.0] };
        assert_eq!(collect(Head::TopK(3), &rows), expected);
    }

    #[test]
    fn more_than_the_vocabulary_gives_the_vocabulary() {
        let HeadOutput::TopK { k, ids, .. } = collect(Head::TopK(9), &[&[0.0, 2.0, 1.0]]) else { panic!() };
        assert_eq!((k, ids), (3, vec![1, 2, 0]));
        assert_eq!(collect(Head::Logits, &[&[0.5, 2.0]]), HeadOutput::Logits(vec![0.5, 2.0]));
    }
}
