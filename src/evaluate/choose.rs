//! The smallest bodies that keep a whole mesh within a budget.
//!
//! Divergences of cuts add up, nearly: three cuts cost 2.5 to 3 times what one does, 29 cost 28 times as much. So what is
//! left is to spend the budget where a nat buys most bytes.

use super::{codec::Setting, report::Report};

/// A body that a hop could have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Offer {
    /// The body.
    pub setting: Setting,
    /// Bytes of one generated token.
    pub bytes: usize,
    /// Divergence that it costs, nats per token.
    pub cost: f64,
}

/// What was chosen for a hop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The number of layers already applied.
    pub boundary: u32,
    /// The body.
    pub offer: Offer,
    /// Bytes of one generated token as f32.
    pub raw: usize,
}

/// What a budget in perplexity (0.01 for one per cent) is in nats per token: the mean growth of a text's surprise, which on
/// text like the model's own is the divergence.
#[must_use]
pub fn nats(budget: f64) -> f64 {
    budget.ln_1p()
}

/// Chooses a body for each of `boundaries` from an evaluation that judged each by itself; raw f32 is always on offer.
/// `None` if one of the boundaries was not judged so.
#[must_use]
pub fn choose(report: &Report, boundaries: &[u32], budget: f64) -> Option<Vec<Choice>> {
    let raw = Offer { setting: Setting::F32, bytes: 4 * report.hidden_dim, cost: 0.0 };
    let mut offers = Vec::new();
    for boundary in boundaries {
        let mut of_hop = vec![raw];
        for setting in &report.settings {
            let hop = setting.hops.iter().find(|hop| hop.boundary == *boundary)?;
            let (Ok(setting), Some(alone)) = (setting.body.parse(), hop.alone) else { return None };
            // Rounding can make a divergence of nothing negative; what is no number is no offer.
            if alone.kl.is_finite() {
                of_hop.push(Offer { setting, bytes: hop.body_bytes, cost: alone.kl.max(0.0) });
            }
        }
        offers.push(of_hop);
    }
    let chosen = spend(&offers, nats(budget));
    let choices = boundaries.iter().zip(offers.iter().zip(chosen));
    Some(
        choices
            .map(|(boundary, (offers, index))| Choice { boundary: *boundary, offer: offers[index], raw: raw.bytes })
            .collect(),
    )
}

/// For each hop the number of its offer: the fewest bytes in all for a cost of at most `allowed` in all, as good as one
/// step at a time finds it. The first offer of each must cost nothing.
fn spend(offers: &[Vec<Offer>], allowed: f64) -> Vec<usize> {
    // Of offers that cost no less and take no fewer bytes than another, nothing is ever chosen.
    let ladders: Vec<Vec<usize>> = offers.iter().map(|offers| ladder(offers)).collect();
    // All at the cheapest in bytes; then the step up that buys most divergence for a byte, until the budget holds.
    let mut at = vec![0; offers.len()];
    let offer = |hop: usize, rung: usize| ladders[hop].get(rung).map(|index| offers[hop][*index]);
    let total = |at: &[usize]| {
        at.iter().enumerate().filter_map(|(hop, rung)| offer(hop, *rung)).map(|offer| offer.cost).sum::<f64>()
    };
    while total(&at) > allowed {
        let gain = |hop: usize| {
            let (now, next) = (offer(hop, at[hop])?, offer(hop, at[hop] + 1)?);
            Some(((now.cost - next.cost) / (next.bytes - now.bytes).max(1) as f64, hop))
        };
        let Some((_, hop)) = (0..offers.len()).filter_map(gain).max_by(|a, b| a.0.total_cmp(&b.0)) else { break };
        at[hop] += 1;
    }
    // What the last steps bought too much, is given back where a whole step down still fits.
    for hop in 0..at.len() {
        while at[hop] > 0 {
            at[hop] -= 1;
            if total(&at) > allowed {
                at[hop] += 1;
                break;
            }
        }
    }
    at.iter().enumerate().map(|(hop, rung)| ladders[hop][*rung]).collect()
}

/// The offers worth having, from the fewest bytes on, each costing less than the one before.
fn ladder(offers: &[Offer]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..offers.len()).collect();
    let by_bytes = |a: &usize, b: &usize| {
        let (a, b) = (offers[*a], offers[*b]);
        a.bytes.cmp(&b.bytes).then(a.cost.total_cmp(&b.cost))
    };
    order.sort_by(by_bytes);
    let mut least = f64::INFINITY;
    order.retain(|index| {
        let is_better = offers[*index].cost < least;
        least = least.min(offers[*index].cost);
        is_better
    });
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::report::{Effect, HopReport, SettingReport};

    fn report(bodies: &[(&str, usize, [f64; 2])]) -> Report {
        let hop = |boundary, bytes, kl| HopReport {
            boundary,
            bytes,
            body_bytes: bytes,
            escaped: 0.0,
            cosine: 1.0,
            cosine_p1: 1.0,
            mean_cosine: None,
            centred_cosine: None,
            relative_error: 0.0,
            relative_error_p99: 0.0,
            alone: Some(Effect { kl, top1: 1.0, perplexity: 1.0, perplexity_ratio: 1.0 }),
        };
        let setting = |(body, bytes, kl): &(&str, usize, [f64; 2])| SettingReport {
            body: (*body).to_owned(),
            bytes: *bytes as f64,
            body_bytes: *bytes as f64,
            sent_bytes: *bytes as f64,
            whole: Effect::default(),
            acceptance: None,
            greedy: None,
            identical: None,
            hops: vec![hop(8, *bytes, kl[0]), hop(15, *bytes, kl[1])],
        };
        Report {
            model: String::new(),
            config_fp: String::new(),
            hidden_dim: 576,
            cuts: vec![8, 15],
            windows: 1,
            context: 128,
            positions: 126,
            perplexity: 8.0,
            drafts: [0, 5],
            greedy: [0, 64],
            settings: bodies.iter().map(setting).collect(),
        }
    }

    #[test]
    fn the_budget_is_kept_with_the_fewest_bytes() {
        let report = report(&[
            ("f16", 1152, [0.0, 0.0]),
            ("i8", 594, [0.0004, 0.0004]),
            ("q6", 434, [0.0008, 0.0007]),
            ("q5", 362, [0.0024, 0.0020]),
            ("q4", 290, [0.0095, 0.0080]),
            ("pcar:8", 32, [5.4, 5.2]),
        ]);
        let chosen = |budget| -> Vec<String> {
            let choices = choose(&report, &[8, 15], budget).unwrap();
            assert!(choices.iter().map(|choice| choice.offer.cost).sum::<f64>() <= nats(budget));
            choices.iter().map(|choice| choice.offer.setting.to_string()).collect()
        };
        // One per cent is 0.00995 nats: 4 bits on both hops cost 0.0175, on one of them 0.0100.
        assert_eq!(chosen(0.01), ["q5", "q5"]);
        assert_eq!(chosen(0.0105), ["q5", "q4"]);
        assert_eq!(chosen(0.02), ["q4", "q4"]);
        assert_eq!(chosen(0.001), ["i8", "i8"]);
        assert_eq!(chosen(0.0), ["f16", "f16"]);
        assert_eq!(chosen(1e6), ["pcar:8", "pcar:8"]);
        // Of the second hop alone all of the budget can be spent there.
        let [one] = *choose(&report, &[15], 0.01).unwrap() else { panic!() };
        assert_eq!((one.offer.setting.to_string().as_str(), one.raw), ("q4", 2304));
        assert_eq!(choose(&report, &[8, 23], 0.01), None);
    }

    #[test]
    fn raw_is_left_when_nothing_else_will_do() {
        let report = report(&[("q3", 218, [0.1, f64::NAN])]);
        let choices = choose(&report, &[8, 15], 0.01).unwrap();
        assert!(choices.iter().all(|choice| choice.offer.setting == Setting::F32));
    }
}
