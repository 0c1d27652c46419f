//! Explained variance against the number of components, for terminals and as SVG.

use std::fmt::Write as _;

use aeon_station::basis::{BasisFile, Boundary};

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
    const WIDTH: f64 = 760.0;
    const HEIGHT: f64 = 440.0;
    const LEFT: f64 = 56.0;
    const RIGHT: f64 = 120.0;
    const TOP: f64 = 40.0;
    const BOTTOM: f64 = 48.0;
    let most = file.boundaries().map(|part| part.k).max().unwrap_or(0).max(1);
    let x = |k: usize| LEFT + (WIDTH - LEFT - RIGHT) * k as f64 / most as f64;
    let y = |share: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share.clamp(0.0, 1.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"14\">Explained variance, basis {:#010x}</text>\n",
        file.basis_fp()
    );
    for percent in (0..=100).step_by(20) {
        let y = y(f64::from(percent) / 100.0);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{percent} %</text>",
            x(most),
            LEFT - 6.0,
            y + 4.0
        );
    }
    for k in ticks(most) {
        let (x, y) = (x(k), HEIGHT - BOTTOM + 18.0);
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{k}</text>");
    }
    let (middle, below) = (x(most / 2), HEIGHT - 10.0);
    let _ = writeln!(out, "<text x=\"{middle:.1}\" y=\"{below}\" text-anchor=\"middle\">components</text>");
    let parts: Vec<Boundary<'_>> = file.boundaries().filter(|part| part.k > 0).collect();
    for (index, part) in parts.iter().enumerate() {
        // From blue for the first boundary to red for the last.
        let hue = 220.0 - 220.0 * index as f64 / parts.len().max(2).saturating_sub(1) as f64;
        let points: Vec<_> = (0..=part.k).map(|k| format!("{:.1},{:.1}", x(k), y(part.explained(k)))).collect();
        let colour = format!("hsl({hue:.0},70%,45%)");
        let _ = writeln!(
            out,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" points=\"{}\"/>",
            points.join(" ")
        );
        let legend = TOP + 16.0 * index as f64;
        if legend < HEIGHT - BOTTOM {
            let _ = writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">boundary {}</text>",
                WIDTH - RIGHT + 12.0,
                legend + 4.0,
                part.boundary
            );
        }
    }
    out + "</svg>\n"
}

/// Round numbers from 0 to at most `most`, about eight of them.
fn ticks(most: usize) -> impl Iterator<Item = usize> {
    let steps = (0..9).flat_map(|power| [1, 2, 5].map(|step| step * 10_usize.pow(power)));
    let step = steps.into_iter().find(|step| most / step <= 8).unwrap_or(most);
    (0..=most).step_by(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(64).collect::<Vec<_>>(), [0, 10, 20, 30, 40, 50, 60]);
        assert_eq!(ticks(1).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(ticks(3584).last(), Some(3500));
    }
}
