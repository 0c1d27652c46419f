//! A report for people.

use std::fmt::Write as _;

use aeon_station::evaluate::report::{HopReport, Report, SettingReport};

/// What the whole report is about.
pub(super) fn heading(report: &Report) -> String {
    let cuts: Vec<String> = report.cuts.iter().map(u32::to_string).collect();
    let at = if cuts.len() == 1 { "cut at" } else { "cuts at" };
    format!(
        "{}, {at} {}: {} positions judged, {} windows of up to {}, perplexity {:.3} without a codec",
        report.model,
        cuts.join(" "),
        report.positions,
        report.windows,
        report.context,
        report.perplexity
    )
}

/// The names of the columns of [`whole`].
pub(super) const WHOLE: [&str; 9] =
    ["body", "bytes", "body bytes", "KL", "top-1", "perplexity", "accepted", "greedy", "identical"];

/// The columns of one body for all cuts together.
pub(super) fn whole(setting: &SettingReport) -> [String; 9] {
    let or_none = |value: Option<f64>, show: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), show);
    [
        setting.body.clone(),
        bytes(setting.bytes),
        bytes(setting.body_bytes),
        divergence(setting.whole.kl),
        percent(setting.whole.top1),
        ratio(setting.whole.perplexity_ratio),
        or_none(setting.acceptance, |value| format!("{value:.2}")),
        or_none(setting.greedy, |value| format!("{value:.1}")),
        or_none(setting.identical, percent),
    ]
}

/// The names of the columns of [`hop`].
pub(super) const HOP: [&str; 12] = [
    "boundary",
    "body",
    "bytes",
    "cosine",
    "p1",
    "of mean",
    "centred",
    "rel.error",
    "p99",
    "escaped",
    "KL alone",
    "top-1",
];

/// The columns of one body at one boundary.
pub(super) fn hop(setting: &SettingReport, hop: &HopReport) -> [String; 12] {
    let four = |value: f64| format!("{value:.4}");
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    [
        hop.boundary.to_string(),
        setting.body.clone(),
        hop.bytes.to_string(),
        four(hop.cosine),
        four(hop.cosine_p1),
        or_none(hop.mean_cosine.map(four)),
        or_none(hop.centred_cosine.map(four)),
        four(hop.relative_error),
        four(hop.relative_error_p99),
        percent(hop.escaped),
        or_none(hop.alone.map(|effect| divergence(effect.kl))),
        or_none(hop.alone.map(|effect| percent(effect.top1))),
    ]
}

/// What the columns mean.
pub(super) fn legend(report: &Report) -> Vec<String> {
    let [drafts, draft_len] = report.drafts;
    let [greedy, greedy_len] = report.greedy;
    vec![
        "bytes: of an ordinary token on one hop without headers; body bytes: of the body of one generated token".to_owned(),
        "KL: divergence of the next-token distribution from the unsplit model's, nats per token; perplexity: times the unsplit model's".to_owned(),
        format!("accepted: mean accepted tokens over {draft_len}, of {drafts} drafts; greedy: tokens until the first difference, of {greedy} texts of {greedy_len}"),
        "of mean: the cosine of the stored mean alone, for nothing sent; centred: the cosine after the mean is taken off both".to_owned(),
    ]
}

/// The report.
pub(super) fn text(report: &Report) -> String {
    let mut out = format!("{}\n\n", heading(report));
    aligned(&mut out, &WHOLE, report.settings.iter().map(whole));
    out += "\nat each boundary, ordinary positions:\n";
    let hops = (0..report.cuts.len())
        .flat_map(|index| report.settings.iter().map(move |setting| hop(setting, &setting.hops[index])));
    aligned(&mut out, &HOP, hops);
    out += "\n";
    for line in legend(report) {
        let _ = writeln!(out, "{line}");
    }
    out
}

fn aligned<const N: usize>(out: &mut String, names: &[&str; N], rows: impl Iterator<Item = [String; N]>) {
    let rows: Vec<[String; N]> = std::iter::once(names.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    // The column of names is read from the left.
    let names_at = names.iter().position(|name| *name == "body");
    for row in &rows {
        for (index, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = match names_at == Some(index) {
                true => write!(out, "  {cell:<width$}"),
                false => write!(out, "  {cell:>width$}"),
            };
        }
        out.truncate(out.trim_end_matches(' ').len());
        out.push('\n');
    }
}

fn bytes(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value}") } else { format!("{value:.1}") }
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// Three significant digits.
pub(super) fn divergence(value: f64) -> String {
    match value.abs() {
        size if size < 5e-8 => "0".to_owned(),
        size => format!("{value:.*}", (2.0 - size.log10().floor()).clamp(2.0, 8.0) as usize),
    }
}

fn ratio(value: f64) -> String {
    match value {
        value if value < 10.0 => format!("x{value:.4}"),
        value if value < 1e6 => format!("x{value:.0}"),
        value => format!("x{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(divergence(0.02442), "0.0244");
        assert_eq!(divergence(5.449), "5.45");
        assert_eq!(divergence(0.000_021_4), "0.0000214");
        assert_eq!(divergence(-1e-9), "0");
        assert_eq!((ratio(1.0152), ratio(305.7), ratio(3e9)), ("x1.0152".into(), "x306".into(), "x3.0e9".into()));
        assert_eq!((bytes(290.0), bytes(290.5)), ("290".into(), "290.5".into()));
    }

    #[test]
    fn columns_are_aligned() {
        let mut out = String::new();
        let rows = [["1".to_owned(), "f32".to_owned()], ["100".to_owned(), "q4".to_owned()]];
        aligned(&mut out, &["n", "body"], rows.into_iter());
        assert_eq!(out, "    n  body\n    1  f32\n  100  q4\n");
    }
}
