//! Explained variance against the number of components, for terminals and as SVG.

use std::fmt::Write as _;

use aeon_station::basis::{BasisFile, Boundary};

use crate::chart::{Axis, Chart, Scale, Series};

/// Columns of the terminal plot.
const COLUMNS: usize = 60;

/// A row of bars for each boundary: the share that the first k components explain, k growing to the right.
pub(crate) fn text(file: &BasisFile) -> String {
    const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = file.boundaries().map(|part| part.k).max().unwrap_or(0);
    if most == 0 {
        return String::new();
    }
    let mut out = "Explained variance by number of components (a full bar is 100 %):\n".to_owned();
    for part in file.boundaries().filter(|part| part.k > 0) {
        let bar = |column: usize| {
            let k = ((column + 1) * most).div_ceil(COLUMNS);
            match k <= part.k {
                true => BARS[(part.explained(k).clamp(0.0, 1.0) * 8.0).round() as usize],
                false => ' ',
            }
        };
        let bars: String = (0..COLUMNS).map(bar).collect();
        let _ = writeln!(out, "{:>8} {bars} {:>6.2}%", part.boundary, 100.0 * part.explained(part.k));
    }
    let last = format!("k = {most}");
    let _ = writeln!(out, "{:>8} {:<width$}{last}", "", "1", width = COLUMNS.saturating_sub(last.len()));
    out
}

/// A line for each boundary over the number of components.
pub(crate) fn svg(file: &BasisFile) -> String {
    let axis = |label: &str| Axis { label: label.to_owned(), scale: Scale::Linear };
    let series = |part: Boundary<'_>| Series {
        name: format!("boundary {}", part.boundary),
        points: (0..=part.k).map(|k| (k as f64, 100.0 * part.explained(k))).collect(),
        dashed: false,
    };
    let chart = Chart {
        title: format!("Explained variance, basis {:#010x}", file.basis_fp()),
        x: axis("components"),
        y: axis("%"),
        series: file.boundaries().filter(|part| part.k > 0).map(series).collect(),
    };
    chart.svg()
}
