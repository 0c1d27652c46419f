//! Rounds in which all variants take turns, ratios within each round, and the table of what came out.

use std::time::Duration;

use serde_json::{Value, json};

/// How long everything is measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) rounds: usize,
    /// Time of one variant in one round.
    pub(super) slice: Duration,
}

impl Plan {
    pub(super) const FULL: Self = Self { rounds: 21, slice: Duration::from_millis(40) };
    pub(super) const QUICK: Self = Self { rounds: 9, slice: Duration::from_millis(15) };
}

/// One variant of a measurement; a call runs it for a slice of time and returns its figures.
pub(super) type Variant<'a> = Box<dyn FnMut(Duration) -> anyhow::Result<Vec<f64>> + 'a>;

/// Runs the variants in turn, each round starting with the next one; returns `[variant][round][figure]`.
pub(super) fn interleave(plan: Plan, variants: &mut [Variant<'_>]) -> anyhow::Result<Vec<Vec<Vec<f64>>>> {
    let count = variants.len();
    let mut all = vec![Vec::with_capacity(plan.rounds); count];
    // The first round warms everything up and is not counted.
    for round in 0..=plan.rounds {
        for turn in 0..count {
            let index = (round + turn) % count;
            // The variant before left its own lines in the caches.
            variants[index](plan.slice / 8)?;
            let figures = variants[index](plan.slice)?;
            if round > 0 {
                all[index].push(figures);
            }
        }
    }
    Ok(all)
}

/// The middle of some numbers, and of their lower and upper half.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quartiles {
    pub(super) q1: f64,
    pub(super) median: f64,
    pub(super) q3: f64,
}

impl Quartiles {
    pub(super) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |quarter: usize| {
            let place = values.len().saturating_sub(1) * quarter;
            let (low, rest) = (place / 4, (place % 4) as f64 / 4.0);
            let value = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
            if rest == 0.0 { value(low) } else { value(low) * (1.0 - rest) + value(low + 1) * rest }
        };
        Self { q1: at(1), median: at(2), q3: at(3) }
    }
}

/// Which way is better, and where the bounds are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Bound {
    /// At most `limit` times the floor; `goal` is what we would like.
    AtMost { limit: f64, goal: f64 },
    /// At least `limit` times the peer.
    AtLeast { limit: f64, goal: f64 },
    /// Told without being judged.
    Noted,
}

/// What may pass on a busy machine: only a figure this many times worse than its limit is an error, or than what was
/// reached where the limit is not.
const REGRESSION: f64 = 2.0;

/// One line of the table.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) part: &'static str,
    pub(super) what: String,
    /// What ours and the floor are measured in.
    pub(super) unit: &'static str,
    pub(super) floor: f64,
    pub(super) ours: f64,
    pub(super) ratio: Quartiles,
    pub(super) bound: Bound,
    /// The ratio that was reached so far, where that is worse than the limit.
    pub(super) reached: Option<f64>,
}

impl Row {
    /// The row of figure `figure` of two variants; `ratio` makes one number of ours and the floor in one round.
    pub(super) fn of(
        (part, what, unit): (&'static str, String, &'static str),
        (floor, ours): (&[Vec<f64>], &[Vec<f64>]),
        figure: usize,
        bound: Bound,
    ) -> Self {
        let column = |rounds: &[Vec<f64>]| -> Vec<f64> {
            rounds.iter().map(|round| round.get(figure).copied().unwrap_or(f64::NAN)).collect()
        };
        let (floor, ours) = (column(floor), column(ours));
        let ratios = floor.iter().zip(&ours).map(|(floor, ours)| match bound {
            Bound::AtLeast { .. } => floor / ours,
            Bound::AtMost { .. } | Bound::Noted => ours / floor,
        });
        let ratio = Quartiles::of(ratios.collect());
        Self {
            part,
            what,
            unit,
            floor: Quartiles::of(floor).median,
            ours: Quartiles::of(ours).median,
            ratio,
            bound,
            reached: None,
        }
    }

    /// The same row, of a figure whose limit is not reached: what is reached then guards it.
    pub(super) fn reached(self, ratio: f64) -> Self {
        Self { reached: Some(ratio), ..self }
    }

    fn verdict(&self) -> &'static str {
        let ratio = self.ratio.median;
        match self.bound {
            Bound::Noted => "",
            _ if self.is_regression() => "REGRESSION",
            Bound::AtMost { goal, .. } if ratio <= goal => "goal",
            Bound::AtMost { limit, .. } if ratio <= limit => "within",
            Bound::AtLeast { goal, .. } if ratio >= goal => "goal",
            Bound::AtLeast { limit, .. } if ratio >= limit => "within",
            _ => "over the limit",
        }
    }

    /// Whether it is so far off that no busy neighbour explains it.
    pub(super) fn is_regression(&self) -> bool {
        let ratio = self.ratio.median;
        match self.bound {
            Bound::Noted => false,
            Bound::AtMost { limit, .. } => ratio.is_nan() || ratio > self.reached.unwrap_or(limit) * REGRESSION,
            Bound::AtLeast { limit, .. } => ratio.is_nan() || ratio < self.reached.unwrap_or(limit) / REGRESSION,
        }
    }

    pub(super) fn name(&self) -> String {
        format!("{}, {}", self.part, self.what)
    }

    pub(super) fn json(&self) -> Value {
        let (limit, goal, sense) = match self.bound {
            Bound::AtMost { limit, goal } => (Some(limit), Some(goal), "at most"),
            Bound::AtLeast { limit, goal } => (Some(limit), Some(goal), "at least"),
            Bound::Noted => (None, None, "noted"),
        };
        json!({
            "part": self.part, "what": self.what, "unit": self.unit, "floor": self.floor, "ours": self.ours,
            "ratio": self.ratio.median, "q1": self.ratio.q1, "q3": self.ratio.q3,
            "sense": sense, "limit": limit, "goal": goal, "reached": self.reached, "verdict": self.verdict(),
        })
    }
}

/// The rows for people.
pub(super) fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.what.chars().count()).max().unwrap_or(0);
    let mut out = format!(
        "{:<11} {:<width$} {:>8} {:>13} {:>12} {:>12} {:<6} {:>11} {:>6}\n",
        "part", "what", "ratio", "q1-q3", "floor", "ours", "unit", "limit", "goal"
    );
    for row in rows {
        let (limit, goal) = match row.bound {
            Bound::AtMost { limit, goal } => (format!("<= {limit}"), goal.to_string()),
            Bound::AtLeast { limit, goal } => (format!(">= {limit}"), goal.to_string()),
            Bound::Noted => Default::default(),
        };
        let spread = format!("{:.2}-{:.2}", row.ratio.q1, row.ratio.q3);
        out += &format!(
            "{:<11} {:<width$} {:>8.2} {spread:>13} {:>12.1} {:>12.1} {:<6} {limit:>11} {goal:>6}  {}\n",
            row.part,
            row.what,
            row.ratio.median,
            row.floor,
            row.ours,
            row.unit,
            row.verdict()
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ratio: f64, bound: Bound) -> Row {
        Row::of(("part", "what".to_owned(), "ns"), (&[vec![1.0]], &[vec![ratio]]), 0, bound)
    }

    #[test]
    fn quartiles_of_few_and_of_many() {
        let of = |values: &[f64]| {
            let Quartiles { q1, median, q3 } = Quartiles::of(values.to_vec());
            [q1, median, q3]
        };
        assert_eq!(of(&[3.0]), [3.0; 3]);
        assert_eq!(of(&[5.0, 1.0, 2.0, 4.0, 3.0]), [2.0, 3.0, 4.0]);
        assert_eq!(of(&[1.0, 2.0]), [1.25, 1.5, 1.75]);
        assert!(of(&[])[1].is_nan());
    }

    #[test]
    fn only_twice_the_limit_is_a_regression() {
        let most = Bound::AtMost { limit: 1.5, goal: 1.2 };
        for (ratio, verdict) in [(1.1, "goal"), (1.4, "within"), (2.9, "over the limit"), (3.1, "REGRESSION")] {
            assert_eq!(row(ratio, most).verdict(), verdict);
        }
        let least = Bound::AtLeast { limit: 30.0, goal: 45.0 };
        // Here the ratio is how many times the floor takes longer.
        for (ratio, verdict) in [(50.0, "goal"), (31.0, "within"), (16.0, "over the limit"), (14.0, "REGRESSION")] {
            assert_eq!(row(1.0 / ratio, least).verdict(), verdict);
        }
        assert!(row(f64::NAN, most).is_regression(), "nothing measured is no success");
        assert!(!row(100.0, Bound::Noted).is_regression());
        assert!(!row(5.9, most).reached(3.0).is_regression() && row(6.1, most).reached(3.0).is_regression());
    }

    #[test]
    fn variants_take_turns_and_the_first_round_is_not_counted() {
        let order = std::cell::RefCell::new(Vec::new());
        let variant = |name: usize| -> Variant<'_> {
            let order = &order;
            Box::new(move |_| {
                order.borrow_mut().push(name);
                Ok(vec![name as f64])
            })
        };
        let plan = Plan { rounds: 2, slice: Duration::ZERO };
        let figures = interleave(plan, &mut [variant(0), variant(1)]).unwrap();
        assert_eq!(figures, [[[0.0]; 2], [[1.0]; 2]]);
        assert_eq!(*order.borrow(), [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]);
    }
}
