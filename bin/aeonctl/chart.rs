//! Line charts as SVG and pages that hold them: no script, nothing fetched, readable on light and dark screens.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 44.0;
/// Colours that differ for colour-blind eyes too, on white and on dark grey.
const COLOURS: [&str; 6] = ["#1f77b4", "#d95f02", "#2a9d5c", "#b0479a", "#8c6d1f", "#5f6b76"];

/// How values are laid out along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// From 0.
    Linear,
    /// Logarithmic; values must be above 0.
    Log,
}

#[derive(Debug, Clone)]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) scale: Scale,
}

/// Points joined by a line.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
    /// What others reached or what should be reached is dashed.
    pub(crate) dashed: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<Series>,
}

/// One axis with its ends.
struct Range {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Scale {
    fn can_show(self, value: f64) -> bool {
        value.is_finite() && (self == Self::Linear || value > 0.0)
    }
}

impl Range {
    /// Of values that the scale can show.
    fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Self {
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        match scale {
            _ if low > high => Self { scale, low: 1.0, high: 10.0 },
            Scale::Linear => Self { scale, low: low.min(0.0), high: if high > 0.0 { high * 1.05 } else { 1.0 } },
            // A little room, and at least a factor of two.
            Scale::Log => Self { scale, low: low / 1.15, high: (high * 1.15).max(low * 2.0) },
        }
    }

    /// From 0 at the low end to 1 at the high end.
    fn place(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        part.clamp(0.0, 1.0)
    }

    /// Round values within the range, at most ten or so.
    fn ticks(&self) -> Vec<f64> {
        let within = |value: &f64| (self.low..=self.high).contains(value);
        let decades = |steps: &'static [f64]| {
            let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
            (first..=last).flat_map(move |power| steps.iter().map(move |step| step * 10_f64.powi(power)))
        };
        match self.scale {
            Scale::Log => {
                let fine: Vec<f64> = decades(&[1.0, 2.0, 5.0]).filter(within).collect();
                if fine.len() <= 10 { fine } else { decades(&[1.0]).filter(within).collect() }
            }
            Scale::Linear => {
                let span = self.high - self.low;
                let power = 10_f64.powf((span / 8.0).log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| span / step <= 8.0);
                let step = step.unwrap_or(span);
                let first = (self.low / step).ceil() as i64;
                (first..).map(|index| index as f64 * step).take_while(within).collect()
            }
        }
    }
}

/// Text for SVG and HTML.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// `1200` as `1.2k`, three digits at most.
fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        1e9.. => (value / 1e9, "G"),
        1e6.. => (value / 1e6, "M"),
        1e3.. => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = match scaled.abs() {
        100.0.. => format!("{scaled:.0}"),
        10.0.. => format!("{scaled:.1}"),
        0.0995.. => format!("{scaled:.2}"),
        0.0 => "0".to_owned(),
        _ => return format!("{value:.0e}"),
    };
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

impl Chart {
    /// One of a few clear colours, or of many from blue to red.
    fn colour(&self, index: usize) -> String {
        match (COLOURS.get(index), self.series.len()) {
            (Some(colour), count) if count <= COLOURS.len() => (*colour).to_owned(),
            (_, count) => format!("hsl({:.0},70%,45%)", 220.0 - 220.0 * index as f64 / (count.max(2) - 1) as f64),
        }
    }

    /// The legend stands below, two entries a line.
    fn height(&self) -> f64 {
        HEIGHT + 18.0 * self.series.len().div_ceil(2) as f64 + 8.0
    }

    /// The chart as one `<svg>` element.
    pub(crate) fn svg(&self) -> String {
        let can_show = |point: &&(f64, f64)| self.x.scale.can_show(point.0) && self.y.scale.can_show(point.1);
        let points = || self.series.iter().flat_map(|series| &series.points).filter(can_show);
        let (x, y) = (
            Range::of(self.x.scale, points().map(|point| point.0)),
            Range::of(self.y.scale, points().map(|point| point.1)),
        );
        let at_x = |value: f64| LEFT + (WIDTH - LEFT - RIGHT) * x.place(value);
        let at_y = |value: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y.place(value);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {:.0}\" role=\"img\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"currentColor\">\n<title>{title}</title>\n\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{title}</text>\n",
            self.height(),
            title = escaped(&self.title)
        );
        for tick in y.ticks() {
            let at = at_y(tick);
            let _ = writeln!(
                out,
                "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"#888\" stroke-opacity=\"0.3\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0,
                short(tick)
            );
        }
        for tick in x.ticks() {
            let at = at_x(tick);
            let _ = writeln!(
                out,
                "<line x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{:.1}\" stroke=\"#888\"/>\
                 <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                HEIGHT - BOTTOM,
                HEIGHT - BOTTOM + 4.0,
                HEIGHT - BOTTOM + 17.0,
                short(tick)
            );
        }
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(14 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 10.0,
            escaped(&self.x.label),
            (TOP + HEIGHT - BOTTOM) / 2.0,
            escaped(&self.y.label)
        );
        for (index, series) in self.series.iter().enumerate() {
            let colour = self.colour(index);
            let dash = if series.dashed { " stroke-dasharray=\"5 4\"" } else { "" };
            let shown = || series.points.iter().filter(can_show);
            let line: Vec<String> = shown().map(|(x, y)| format!("{:.1},{:.1}", at_x(*x), at_y(*y))).collect();
            let _ = writeln!(
                out,
                "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"{dash} points=\"{}\"/>",
                line.join(" ")
            );
            // A single point has no line.
            if !series.dashed || shown().count() == 1 {
                for (x, y) in shown() {
                    let (at_x, at_y) = (at_x(*x), at_y(*y));
                    let _ = writeln!(
                        out,
                        "<circle cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: {} at {}</title>\
                         </circle>",
                        escaped(&series.name),
                        short(*y),
                        short(*x)
                    );
                }
            }
            let (column, row) = (index % 2, index / 2);
            let (left, top) = (LEFT + column as f64 * (WIDTH - LEFT - RIGHT) / 2.0, HEIGHT + 12.0 + 18.0 * row as f64);
            let _ = writeln!(
                out,
                "<line x1=\"{left:.1}\" y1=\"{top:.1}\" x2=\"{:.1}\" y2=\"{top:.1}\" stroke=\"{colour}\" \
                 stroke-width=\"2\"{dash}/><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                left + 26.0,
                left + 32.0,
                top + 4.0,
                escaped(&series.name)
            );
        }
        out + "</svg>\n"
    }
}

/// Several charts below each other as one SVG file.
pub(crate) fn stacked(charts: &[Chart]) -> String {
    let mut top = 0.0;
    let mut body = String::new();
    for chart in charts {
        let height = chart.height();
        let _ = write!(
            body,
            "{}",
            chart.svg().replacen("<svg", &format!("<svg y=\"{top:.0}\" width=\"{WIDTH}\" height=\"{height:.0}\""), 1)
        );
        top += height + 16.0;
    }
    format!("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {top:.0}\">\n{body}</svg>\n")
}

/// A whole HTML page of `body`.
pub(crate) fn page(title: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>{title}</title>\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<style>\n\
         :root {{ color-scheme: light dark; }}\n\
         body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 sans-serif; }}\n\
         svg {{ width: 100%; height: auto; margin: 1rem 0; }}\n\
         table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}\n\
         .wide {{ overflow-x: auto; }}\n\
         td, th {{ padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }}\n\
         td:first-child, th:first-child {{ text-align: left; }}\n\
         </style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n",
        title = escaped(title)
    )
}

/// A table of text; the first column is the name of the row.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let cells = |tag: &str, cells: &mut dyn Iterator<Item = &str>| -> String {
        cells.map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell))).collect()
    };
    let mut out = format!("<div class=\"wide\"><table>\n<tr>{}</tr>\n", cells("th", &mut head.iter().copied()));
    for row in rows {
        let _ = writeln!(out, "<tr>{}</tr>", cells("td", &mut row.iter().map(String::as_str)));
    }
    out + "</table></div>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: Scale, points: &[(f64, f64)]) -> Chart {
        let axis = |label: &str| Axis { label: label.to_owned(), scale };
        let series = Series { name: "a < b".to_owned(), points: points.to_vec(), dashed: false };
        Chart { title: "Title & more".to_owned(), x: axis("x"), y: axis("y"), series: vec![series] }
    }

    #[test]
    fn ticks_are_round_and_few() {
        let ticks = |scale, low, high| Range { scale, low, high }.ticks();
        assert_eq!(ticks(Scale::Linear, 0.0, 64.0), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
        assert_eq!(ticks(Scale::Log, 0.9, 30.0), [1.0, 2.0, 5.0, 10.0, 20.0]);
        assert_eq!(ticks(Scale::Log, 0.9, 2e6), [1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6]);
        assert_eq!(ticks(Scale::Linear, 0.0, 0.05).len(), 6);
    }

    #[test]
    fn numbers_are_short() {
        let cases = [(0.0, "0"), (14_336.0, "14.3k"), (1e6, "1M"), (0.25, "0.25"), (0.004, "4e-3"), (64.0, "64")];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn every_point_is_drawn_inside_and_names_are_escaped() {
        for scale in [Scale::Linear, Scale::Log] {
            let svg = chart(scale, &[(1.0, 5.0), (100.0, 0.001), (3.0, f64::NAN)]).svg();
            assert!(svg.contains("Title &amp; more") && svg.contains("a &lt; b"), "{svg}");
            let line = svg.split("points=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
            let numbers: Vec<f64> = line.split([' ', ',']).map(|one| one.parse().unwrap()).collect();
            assert_eq!(numbers.len(), 4, "a point that is no number is left out");
            assert!(numbers.iter().all(|at| (0.0..=WIDTH).contains(at)), "{line}");
        }
    }

    #[test]
    fn nothing_and_a_single_point_are_charts_too() {
        for points in [&[][..], &[(5.0, 5.0)]] {
            for scale in [Scale::Linear, Scale::Log] {
                assert!(!chart(scale, points).svg().contains("NaN"));
            }
        }
    }
}
