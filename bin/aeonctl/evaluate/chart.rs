//! Bytes against harm, as SVG. Colours come from the page's style sheet, so that it can be read on light and on dark.

use std::fmt::Write as _;

use aeon_station::evaluate::Report;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 56.0;
/// Divergences below this are drawn there.
const FLOOR: f64 = 1e-6;

/// An axis of powers of ten.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (1.0, 1.0) } else { (low, high) };
        // A little room on both sides.
        Self { low: low.log10() - 0.12, high: high.log10() + 0.12, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        self.from + (self.to - self.from) * (value.log10() - self.low) / (self.high - self.low)
    }

    /// 1, 2 and 5 times the powers of ten in range; the powers alone if those are many.
    fn ticks(&self) -> Vec<f64> {
        let all = |steps: &[f64]| -> Vec<f64> {
            let powers = self.low.floor() as i32..=self.high.ceil() as i32;
            let ticks = powers.flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)));
            ticks.filter(|tick| (self.low..=self.high).contains(&tick.log10())).collect()
        };
        let fine = all(&[1.0, 2.0, 5.0]);
        if fine.len() <= 9 { fine } else { all(&[1.0]) }
    }
}

struct Point {
    body: String,
    bytes: f64,
    kl: f64,
}

/// The curve: a point for each body on all cuts, faint ones for each boundary by itself.
pub(super) fn svg(report: &Report) -> String {
    let whole: Vec<Point> = report
        .settings
        .iter()
        .map(|setting| Point {
            body: setting.body.clone(),
            bytes: setting.bytes.max(1.0),
            kl: setting.whole.kl.max(FLOOR),
        })
        .collect();
    let alone: Vec<(f64, f64)> = report
        .settings
        .iter()
        .flat_map(|setting| &setting.hops)
        .filter(|_| report.cuts.len() > 1)
        .filter_map(|hop| Some((hop.bytes.max(1) as f64, hop.alone?.kl.max(FLOOR))))
        .collect();
    let every = || whole.iter().map(|point| (point.bytes, point.kl)).chain(alone.iter().copied());
    let x = Axis::over(every().map(|(bytes, _)| bytes), LEFT, WIDTH - RIGHT);
    let y = Axis::over(every().map(|(_, kl)| kl), HEIGHT - BOTTOM, TOP);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         aria-label=\"Divergence over bytes per token\">\n"
    );
    for tick in y.ticks() {
        let at = y.at(tick);
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text class=\"axis\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            at + 4.0,
            plain(tick)
        );
    }
    for tick in x.ticks() {
        let at = x.at(tick);
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{}\"/>\
             <text class=\"axis\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - BOTTOM,
            HEIGHT - BOTTOM + 18.0,
            plain(tick)
        );
    }
    let (middle, below) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 12.0);
    let upright = (TOP + HEIGHT - BOTTOM) / 2.0;
    let _ = writeln!(
        out,
        "<text class=\"axis\" x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">bytes per token and hop, without headers</text>\
         <text class=\"axis\" transform=\"translate(16 {upright}) rotate(-90)\" text-anchor=\"middle\">KL, nats per token</text>"
    );
    for (bytes, kl) in &alone {
        let _ = writeln!(out, "<circle class=\"alone\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.5\"/>", x.at(*bytes), y.at(*kl));
    }
    for (class, is_in) in [("pcar", true), ("plain", false)] {
        let mut line: Vec<&Point> = whole.iter().filter(|point| point.body.starts_with("pcar") == is_in).collect();
        line.sort_by(|a, b| a.bytes.total_cmp(&b.bytes));
        let points: Vec<String> =
            line.iter().map(|point| format!("{:.1},{:.1}", x.at(point.bytes), y.at(point.kl))).collect();
        let _ = writeln!(out, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
        for (index, point) in line.iter().enumerate() {
            let (cx, cy) = (x.at(point.bytes), y.at(point.kl));
            // Neighbours take turns, right above and left below, so that names do not cover each other.
            let (dx, dy, anchor) = match index % 2 == 0 && cx < WIDTH - RIGHT - 90.0 {
                true => (8.0, -6.0, "start"),
                false => (-8.0, 14.0, "end"),
            };
            let _ = writeln!(
                out,
                "<circle class=\"{class}\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"4\"><title>{0}: {1} bytes, KL {2}</title></circle>\
                 <text class=\"name\" x=\"{3:.1}\" y=\"{4:.1}\" text-anchor=\"{anchor}\">{0}</text>",
                crate::chart::escaped(&point.body),
                point.bytes,
                super::table::divergence(point.kl),
                cx + dx,
                cy + dy
            );
        }
    }
    out + "</svg>\n"
}

fn plain(tick: f64) -> String {
    match tick {
        tick if tick < 1e-3 => format!("{tick:e}"),
        // What powers of ten are in floating point, is rounded off.
        tick => format!("{}", (tick * 1e6).round() / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes() {
        let axis = Axis::over([32.0, 2304.0].into_iter(), 0.0, 100.0);
        assert!(axis.at(32.0) > 0.0 && axis.at(2304.0) < 100.0 && axis.at(300.0) > axis.at(200.0));
        assert_eq!(axis.ticks(), [50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0]);
        let wide = Axis::over([1e-6, 9.0].into_iter(), 100.0, 0.0);
        let ticks: Vec<String> = wide.ticks().into_iter().map(plain).collect();
        assert_eq!(ticks, ["1e-6", "1e-5", "1e-4", "0.001", "0.01", "0.1", "1", "10"]);
        assert!(Axis::over(std::iter::empty(), 0.0, 1.0).at(1.0).is_finite());
    }
}
