//! A report as one page that needs nothing else.

use std::fmt::Write as _;

use aeon_station::evaluate::Report;

use super::{chart, table};
use crate::chart::escaped;

const STYLE: &str = "\
:root { color-scheme: light dark; --back: #fff; --text: #1c1e21; --dim: #5f6570; --grid: #dfe2e7; --one: #0b62c4; --two: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --back: #16181c; --text: #e6e8eb; --dim: #a0a6b0; --grid: #343840; --one: #6cb1ff; --two: #ff9a5c; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; } p, li { color: var(--dim); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--grid); } th { color: var(--dim); font-weight: 600; }
th.left, td.left { text-align: left; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.grid { stroke: var(--grid); } .axis { fill: var(--dim); } .name { fill: var(--text); }
polyline { fill: none; stroke-width: 1.5; } polyline.plain { stroke: var(--one); } polyline.pcar { stroke: var(--two); }
circle.plain { fill: var(--one); } circle.pcar { fill: var(--two); } circle.alone { fill: var(--dim); opacity: .45; }
.key-plain { color: var(--one); } .key-pcar { color: var(--two); }
";

/// The page.
pub(super) fn page(report: &Report) -> String {
    let heading = escaped(&table::heading(report));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>What residuals cost: {}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>What each form of residuals costs</h1>\n<p>{heading}</p>\n{}",
        escaped(&report.model),
        chart::svg(report)
    );
    out += "<p><span class=\"key-plain\">●</span> f32, f16, i8 and qN on all cuts, \
            <span class=\"key-pcar\">●</span> PCA components on all cuts, small: each boundary by itself. \
            Lower and further left is better. What changes nothing is drawn at 1e-6.</p>\n";
    out += "<h2>All cuts together</h2>\n";
    html_table(&mut out, &table::WHOLE, report.settings.iter().map(table::whole));
    out += "<h2>At each boundary, ordinary positions</h2>\n";
    let hops = (0..report.cuts.len())
        .flat_map(|index| report.settings.iter().map(move |setting| table::hop(setting, &setting.hops[index])));
    html_table(&mut out, &table::HOP, hops);
    out += "<ul>\n";
    for line in table::legend(report) {
        let _ = writeln!(out, "<li>{}</li>", escaped(&line));
    }
    let _ = writeln!(out, "</ul>\n<p>aeonctl {}</p>\n</body>\n</html>", env!("CARGO_PKG_VERSION"));
    out
}

fn html_table<const N: usize>(out: &mut String, names: &[&str; N], rows: impl Iterator<Item = [String; N]>) {
    let class = |index: usize| if names[index] == "body" { " class=\"left\"" } else { "" };
    *out += "<div class=\"wide\"><table>\n<tr>";
    for (index, name) in names.iter().enumerate() {
        let _ = write!(out, "<th{}>{name}</th>", class(index));
    }
    *out += "</tr>\n";
    for row in rows {
        *out += "<tr>";
        for (index, cell) in row.iter().enumerate() {
            let _ = write!(out, "<td{}>{}</td>", class(index), escaped(cell));
        }
        *out += "</tr>\n";
    }
    *out += "</table></div>\n";
}

#[cfg(test)]
mod tests {
    use aeon_station::evaluate::report::{Effect, HopReport, SettingReport};

    use super::*;

    #[test]
    fn a_page_holds_everything_and_fetches_nothing() {
        let hop = |boundary| HopReport {
            boundary,
            bytes: 290,
            body_bytes: 323,
            escaped: 0.01,
            cosine: 0.9975,
            cosine_p1: 0.99,
            mean_cosine: Some(0.7),
            centred_cosine: None,
            relative_error: 0.07,
            relative_error_p99: 0.1,
            alone: Some(Effect { kl: 0.0099, top1: 0.945, perplexity: 8.0, perplexity_ratio: 1.015 }),
        };
        let setting = |body: &str, bytes, kl| SettingReport {
            body: body.to_owned(),
            bytes,
            body_bytes: bytes + 33.0,
            sent_bytes: bytes + 9.0,
            whole: Effect { kl, top1: 0.911, perplexity: 8.1, perplexity_ratio: 1.02 },
            acceptance: Some(0.9),
            greedy: None,
            identical: None,
            hops: vec![hop(8), hop(15)],
        };
        let report = Report {
            model: "a<b>&\"c\"".to_owned(),
            config_fp: "0".to_owned(),
            hidden_dim: 576,
            cuts: vec![8, 15],
            windows: 8,
            context: 128,
            positions: 962,
            perplexity: 8.0,
            drafts: [30, 5],
            greedy: [0, 64],
            settings: vec![setting("f32", 2304.0, 0.0), setting("q4", 290.0, 0.0244), setting("pcar:8", 32.0, 6.57)],
        };
        let page = page(&report);
        for text in ["a&lt;b&gt;&amp;&quot;c&quot;", ">q4<", "0.0244", "6.57", "<svg", "prefers-color-scheme: dark"] {
            assert!(page.contains(text), "{text}");
        }
        for text in ["a<b>", "http://", "https://", "src=", "href=", "NaN", "inf"] {
            let page = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!page.contains(text), "{text}");
        }
    }
}
