//! The picture: one row for each station, and what is known of the selected one below.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Cell, Paragraph, Row, Table, TableState},
};

use super::figures::Figures;

/// A station as far as it is known.
#[derive(Debug, Clone)]
pub(crate) struct Station {
    pub(crate) address: String,
    /// The last figures, or why there are none.
    pub(crate) state: Result<Figures, String>,
}

/// What is shown.
#[derive(Debug, Clone)]
pub(crate) struct Screen<'a> {
    pub(crate) stations: &'a [Station],
    pub(crate) selected: usize,
    /// Of the rates.
    pub(crate) span: String,
}

struct Column {
    title: &'static str,
    is_number: bool,
    text: fn(&Figures) -> String,
}

const fn column(title: &'static str, text: fn(&Figures) -> String) -> Column {
    Column { title, is_number: true, text }
}

/// Columns in the order in which they are left out, last first, where there is no room.
const COLUMNS: [Column; 15] = [
    Column { title: "state", is_number: false, text: |figures| state(figures).to_owned() },
    column("req/s", |figures| rate(figures.requests_per_second)),
    column("tok/s", |figures| option(figures.tokens_per_second, rate)),
    column("err/s", |figures| rate(figures.errors_per_second)),
    column("p50", |figures| option(figures.latency.p50, duration)),
    column("p99", |figures| option(figures.latency.p99, duration)),
    column("in B/tok", |figures| option(figures.bytes_in_per_token, rate)),
    column("out B/tok", |figures| option(figures.bytes_out_per_token, rate)),
    column("compr", |figures| option(figures.compression, |times| format!("{times:.2}x"))),
    column("sessions", |figures| figures.sessions.to_string()),
    column("replay", |figures| option(figures.replay_hit_rate, |share| format!("{:.0}%", share * 100.0))),
    column("queue", |figures| figures.queued.to_string()),
    column("oldest", |figures| option(figures.oldest_seconds.filter(|age| *age > 0.0), duration)),
    column("kv", |figures| bytes(figures.session_bytes as f64)),
    Column { title: "layers", is_number: false, text: |figures| figures.layers.clone() },
];

fn state(figures: &Figures) -> &'static str {
    match figures {
        Figures { is_draining: true, .. } => "draining",
        Figures { reload_failed: true, .. } => "bad reload",
        _ => "up",
    }
}

fn option<T>(value: Option<T>, text: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), text)
}

fn rate(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 1000.0 => format!("{value:.1}"),
        value if value < 1e6 => format!("{:.1}k", value / 1e3),
        value => format!("{:.1}M", value / 1e6),
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1e-3 => format!("{:.0}us", seconds * 1e6),
        seconds if seconds < 1.0 => format!("{:.1}ms", seconds * 1e3),
        seconds if seconds < 120.0 => format!("{seconds:.1}s"),
        seconds => format!("{:.0}min", seconds / 60.0),
    }
}

fn bytes(count: f64) -> String {
    match count {
        count if count < 1024.0 => format!("{count:.0}B"),
        count if count < 1024.0 * 1024.0 => format!("{:.1}KiB", count / 1024.0),
        count if count < 1024.0 * 1024.0 * 1024.0 => format!("{:.1}MiB", count / 1024.0 / 1024.0),
        count => format!("{:.2}GiB", count / 1024.0 / 1024.0 / 1024.0),
    }
}

/// The text of all cells, the titles first, for as many columns as fit into `width` behind the addresses.
struct Grid {
    rows: Vec<Vec<String>>,
    widths: Vec<usize>,
}

impl Grid {
    fn new(stations: &[Station], width: usize) -> Self {
        let mut rows = vec![vec!["station".to_owned()]];
        rows.extend(stations.iter().map(|station| vec![station.address.clone()]));
        let longest = rows.iter().map(|row| row.concat().chars().count()).max().unwrap_or(0);
        // An address may be long; the figures matter more than its end.
        let mut widths = vec![longest.min(40)];
        let mut used = longest.min(40);
        for Column { title, text, .. } in &COLUMNS {
            let cells: Vec<String> = stations
                .iter()
                .map(|station| match &station.state {
                    Ok(figures) => text(figures),
                    Err(_) if *title == "state" => "down".to_owned(),
                    Err(_) => "-".to_owned(),
                })
                .collect();
            let needed = cells.iter().map(|cell| cell.chars().count()).chain([title.len()]).max().unwrap_or(0);
            if used + 2 + needed > width {
                break;
            }
            used += 2 + needed;
            widths.push(needed);
            for (row, cell) in rows.iter_mut().zip([(*title).to_owned()].into_iter().chain(cells)) {
                row.push(cell);
            }
        }
        Self { rows, widths }
    }

    fn is_number(column: usize) -> bool {
        column.checked_sub(1).and_then(|column| COLUMNS.get(column)).is_some_and(|column| column.is_number)
    }

    /// A cell at its column's width: numbers to the right.
    fn padded(&self, column: usize, cell: &str) -> String {
        let width = self.widths.get(column).copied().unwrap_or(0);
        let cell: String = cell.chars().take(width).collect();
        if Self::is_number(column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
    }
}

/// The table as text, for pipes and files.
pub(crate) fn text(stations: &[Station]) -> String {
    let grid = Grid::new(stations, usize::MAX);
    let mut out = String::new();
    for row in &grid.rows {
        let cells: Vec<String> = row.iter().enumerate().map(|(column, cell)| grid.padded(column, cell)).collect();
        out += cells.join("  ").trim_end();
        out.push('\n');
    }
    for Station { address, state } in stations {
        if let Err(reason) = state {
            out += &format!("{address} is down: {reason}\n");
        }
    }
    out
}

/// Draws everything.
pub(crate) fn draw(frame: &mut Frame<'_>, screen: &Screen<'_>) {
    let [head, table, detail, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(u16::try_from(screen.stations.len()).unwrap_or(u16::MAX).saturating_add(1)),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let up = screen.stations.iter().filter(|station| station.state.is_ok()).count();
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let title = Line::from(vec![
        Span::styled("aeonctl top", bold),
        Span::raw(format!("  {up} of {} stations up, figures of {}", screen.stations.len(), screen.span)),
    ]);
    frame.render_widget(Paragraph::new(title), head);
    draw_table(frame, screen, table);
    if let Some(station) = screen.stations.get(screen.selected) {
        draw_detail(frame, station, detail);
    }
    let dim = Style::new().add_modifier(Modifier::DIM);
    frame.render_widget(Paragraph::new(Span::styled("q quit   up/down select a station", dim)), foot);
}

fn draw_table(frame: &mut Frame<'_>, screen: &Screen<'_>, area: Rect) {
    let grid = Grid::new(screen.stations, usize::from(area.width));
    let mut rows = grid
        .rows
        .iter()
        .map(|row| Row::new(row.iter().enumerate().map(|(column, cell)| Cell::from(grid.padded(column, cell)))));
    let head = rows.next().unwrap_or_default().style(Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED));
    let rows = rows.zip(screen.stations).map(|(row, station)| match &station.state {
        Err(_) => row.style(Style::new().fg(Color::Red)),
        Ok(figures) if figures.is_draining || figures.reload_failed => row.style(Style::new().fg(Color::Yellow)),
        Ok(_) => row,
    });
    let widths = grid.widths.iter().map(|width| Constraint::Length(u16::try_from(*width).unwrap_or(u16::MAX)));
    let table = Table::new(rows, widths)
        .header(head)
        .column_spacing(2)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::default().with_selected(Some(screen.selected));
    frame.render_stateful_widget(table, area, &mut state);
}

fn draw_detail(frame: &mut Frame<'_>, station: &Station, area: Rect) {
    let block = Block::bordered().title(format!(" {} ", station.address));
    let inside = block.inner(area);
    frame.render_widget(block, area);
    let figures = match &station.state {
        Ok(figures) => figures,
        Err(reason) => {
            let text = Paragraph::new(format!("down: {reason}\ntrying again")).style(Style::new().fg(Color::Red));
            frame.render_widget(text.wrap(ratatui::widgets::Wrap { trim: true }), inside);
            return;
        }
    };
    let [left, middle, right] =
        Layout::horizontal([Constraint::Length(34), Constraint::Length(36), Constraint::Min(0)]).areas(inside);
    let mut lines = vec![
        Line::raw(format!("model    {} layers {}", figures.model, figures.layers)),
        Line::raw(format!("sessions {} in {}", figures.sessions, bytes(figures.session_bytes as f64))),
        Line::raw(format!("replay   {}", bytes(figures.replay_bytes as f64))),
        Line::raw(""),
        Line::raw(format!("{:<10}{:>10}{:>10}", "stage", "p50", "p99")),
    ];
    for (stage, held) in &figures.stages {
        let (p50, p99) = (option(held.p50, duration), option(held.p99, duration));
        lines.push(Line::raw(format!("{stage:<10}{p50:>10}{p99:>10}")));
    }
    frame.render_widget(Paragraph::new(lines), left);
    let mut lines = vec![Line::raw(format!("{:<22}{:>10}", "bodies", "a second"))];
    lines.extend(figures.bodies.iter().map(|(name, rate)| Line::raw(format!("{name:<22}{:>10}", bytes(*rate)))));
    frame.render_widget(Paragraph::new(lines), middle);
    let mut lines = vec![Line::raw(format!("{:<26}{:>8}", "faults", "count"))];
    lines.extend(figures.faults.iter().map(|(name, count)| Line::raw(format!("{name:<26}{count:>8}"))));
    frame.render_widget(Paragraph::new(lines), right);
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ratatui::{Terminal, backend::TestBackend};

    use super::{super::figures::tests::metrics, *};

    fn stations() -> Vec<Station> {
        let start = Instant::now();
        let figures = Figures::new(Some(&metrics(100, start)), &metrics(300, start + Duration::from_secs(2)));
        let draining = Figures { is_draining: true, ..figures.clone() };
        let station = |address: &str, state| Station { address: address.to_owned(), state };
        vec![
            station("http://127.0.0.1:7080", Ok(figures)),
            station("http://node-2:7080", Ok(draining)),
            station("http://node-3:7080", Err("cannot reach http://node-3:7080: connection refused".to_owned())),
        ]
    }

    fn lines(width: u16, height: u16, selected: usize) -> Vec<String> {
        let stations = stations();
        let screen = Screen { stations: &stations, selected, span: "the last 2.0 s".to_owned() };
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &screen)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(row).collect()
    }

    #[test]
    fn all_is_seen_on_a_wide_terminal() {
        let lines = lines(150, 20, 0);
        let expected = [
            "aeonctl top  2 of 3 stations up, figures of the last 2.0 s",
            "station                state       req/s  tok/s  err/s    p50    p99  in B/tok  out B/tok  compr  sessions  replay  queue   oldest      kv  layers",
            "http://127.0.0.1:7080  bad reload  100.0  100.0   10.0  1.0ms  9.8ms      4.00      100.0  1.92x         2       -      1  250.0ms  3.0MiB  0..3",
            "http://node-2:7080     draining    100.0  100.0   10.0  1.0ms  9.8ms      4.00      100.0  1.92x         2       -      1  250.0ms  3.0MiB  0..3",
            "http://node-3:7080     down            -      -      -      -      -         -          -      -         -       -      -        -       -  -",
        ];
        assert_eq!(lines[..5], expected);
        let text = lines.join("\n");
        for part in [
            "model    de\"mo layers 0..3",
            "compute        500us     990us",
            "out unix pcar             9.8KiB",
            "dropped stale                  200",
            "q quit",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }

    #[test]
    fn a_narrow_terminal_loses_columns_not_the_picture() {
        let narrow = lines(60, 12, 2);
        assert_eq!(narrow[1], "station                state       req/s  tok/s  err/s");
        assert!(narrow.join("\n").contains("down: cannot reach http://node-3:7080"), "{narrow:?}");
        for (width, height) in [(1, 1), (2, 30), (300, 2), (10, 5)] {
            lines(width, height, 0);
        }
    }

    #[test]
    fn the_table_as_text_ends_with_what_is_wrong() {
        let text = text(&stations());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[0].starts_with("station ") && lines[0].ends_with("layers"));
        assert_eq!(lines[4], "http://node-3:7080 is down: cannot reach http://node-3:7080: connection refused");
    }

    #[test]
    fn figures_have_units() {
        let rates: Vec<String> = [0.0, 0.5, 99.99, 1234.0, 2.5e6].map(rate).to_vec();
        assert_eq!(rates, ["0", "0.50", "100.0", "1.2k", "2.5M"]);
        let durations: Vec<String> = [25e-6, 0.0025, 1.5, 600.0].map(duration).to_vec();
        assert_eq!(durations, ["25us", "2.5ms", "1.5s", "10min"]);
        let sizes: Vec<String> = [5.0, 2048.0, 3e6, 4e9].map(bytes).to_vec();
        assert_eq!(sizes, ["5B", "2.0KiB", "2.9MiB", "3.73GiB"]);
    }
}
