//! `aeonctl top`: stations as a picture that moves, or as one table.

mod figures;
mod view;

use std::{
    io::IsTerminal,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use aeon_proto::{payload::MetaWriter, route::Route};
use aeon_station::client::{
    Client, ClientOptions, StationAddress,
    admin::{AdminAddress, AdminError},
};
use anyhow::Context as _;
use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::Value;
use tokio::sync::mpsc;

use self::{
    figures::{Figures, Metrics},
    view::{Screen, Station},
};
use crate::{Context, admin};

/// Time that a station gets to answer one look. One that is slower shows as down, and is asked again.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often the keyboard thread looks whether it is still wanted.
const KEY_PERIOD: Duration = Duration::from_millis(100);

/// No station answered.
#[derive(Debug)]
pub(crate) struct Unreachable;

impl std::fmt::Display for Unreachable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no station answered")
    }
}

impl std::error::Error for Unreachable {}

/// Options of `aeonctl top`.
#[derive(Debug, Args)]
pub(crate) struct Top {
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    interval: f64,
    /// Print one table of figures since each station's start, and end; also without a terminal or with --json
    #[arg(long)]
    once: bool,
}

/// Where figures of a station come from.
#[derive(Debug, Clone)]
enum Source {
    Metrics(AdminAddress),
    Health(StationAddress),
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Metrics(address) => address.fmt(f),
            Self::Health(address) => address.fmt(f),
        }
    }
}

impl Source {
    async fn look(&self, options: &ClientOptions) -> Result<Metrics, String> {
        match tokio::time::timeout(PATIENCE, self.ask(options)).await {
            Ok(result) => result,
            Err(_) => Err(format!("no answer within {PATIENCE:?}")),
        }
    }

    async fn ask(&self, options: &ClientOptions) -> Result<Metrics, String> {
        match self {
            Self::Metrics(address) => match address.get("/metrics", PATIENCE).await {
                Ok(answer) if answer.status == 200 => Ok(Metrics::read(&answer.text, Instant::now())),
                Ok(answer) => Err(format!("/metrics answered with HTTP status {}", answer.status)),
                Err(error @ AdminError::Timeout { .. }) => Err(error.to_string()),
                Err(error) => Err(aeon_station::causes::with_causes(&error)),
            },
            Self::Health(address) => {
                let tell = |error: &dyn std::error::Error| match error.source() {
                    Some(source) => format!("{error}: {source}"),
                    None => error.to_string(),
                };
                let client = Client::connect(address, options.clone()).await.map_err(|error| tell(&error))?;
                let read = |text: &str| serde_json::from_str::<Value>(text).map_err(|error| error.to_string());
                // Over UDP the answer must be within three times the request's size unless the address is proven.
                let padding = if client.is_udp() { "0".repeat(400) } else { String::new() };
                let meta = |meta: &mut MetaWriter<'_, '_>| {
                    if !padding.is_empty() {
                        meta.string("pad", &padding);
                    }
                };
                let health = client.request(Route::HEALTH, meta, &[]).await.map_err(|error| tell(&error))?;
                let hello = client.hello_reply().await.map_err(|error| tell(&error))?;
                Ok(Metrics::from_health(&read(&health.meta)?, Some(&read(&hello.meta)?), Instant::now()))
            }
        }
    }
}

/// A station and what was seen of it.
struct Watched {
    source: Source,
    last: Option<Metrics>,
    shown: Station,
}

impl Watched {
    fn new(source: Source) -> Self {
        let shown = Station { address: source.to_string(), state: Err("not asked yet".to_owned()) };
        Self { source, last: None, shown }
    }

    fn take(&mut self, look: Result<Metrics, String>) {
        self.shown.state = look.map(|now| {
            let figures = Figures::new(self.last.as_ref(), &now);
            self.last = Some(now);
            figures
        });
    }
}

impl Top {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<()> {
        if !(self.interval.is_finite() && (0.1..=3600.0).contains(&self.interval)) {
            return Err(crate::usage("--interval takes 0.1 to 3600 seconds"));
        }
        let mut sources: Vec<Source> = context.admins.iter().cloned().map(Source::Metrics).collect();
        sources.extend(context.stations.iter().cloned().map(Source::Health));
        if sources.is_empty() {
            sources.extend(admin::addresses(context)?.into_iter().map(Source::Metrics));
        }
        let mut watched: Vec<Watched> = sources.into_iter().map(Watched::new).collect();
        look_at_all(&mut watched, &context.options).await;
        if self.once || context.json || !std::io::stdout().is_terminal() {
            return print(&watched, context.json);
        }
        self.watch(watched, &context.options).await
    }

    async fn watch(&self, mut watched: Vec<Watched>, options: &ClientOptions) -> anyhow::Result<()> {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        let mut terminal = ratatui::try_init().context("cannot draw on this terminal; try --once")?;
        let (keys, is_over) = read_keys();
        let mut keys = keys;
        let mut selected = 0_usize;
        let mut span = "the time since each station's start".to_owned();
        let mut ticks = tokio::time::interval(Duration::from_secs_f64(self.interval));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // The first tick comes at once, and the first look was just taken.
        ticks.tick().await;
        let result = loop {
            let stations: Vec<Station> = watched.iter().map(|watched| watched.shown.clone()).collect();
            let screen = Screen { stations: &stations, selected, span: span.clone() };
            if let Err(error) = terminal.draw(|frame| view::draw(frame, &screen)) {
                break Err(error.into());
            }
            tokio::select! {
                _ = ticks.tick() => {
                    look_at_all(&mut watched, options).await;
                    span = format!("the last {} s", self.interval);
                }
                key = keys.recv() => match key {
                    None | Some(Key::Quit) => break Ok(()),
                    Some(Key::Up) => selected = selected.saturating_sub(1),
                    Some(Key::Down) => selected = (selected + 1).min(watched.len().saturating_sub(1)),
                    Some(Key::Redraw) => {}
                },
                _ = terminate.recv() => break Ok(()),
            }
        };
        is_over.store(true, Ordering::Relaxed);
        ratatui::restore();
        result
    }
}

async fn look_at_all(watched: &mut [Watched], options: &ClientOptions) {
    let looks = watched.iter().map(|watched| {
        let (source, options) = (watched.source.clone(), options.clone());
        tokio::spawn(async move { source.look(&options).await })
    });
    let looks: Vec<_> = looks.collect();
    for (watched, look) in watched.iter_mut().zip(looks) {
        watched.take(look.await.unwrap_or_else(|error| Err(error.to_string())));
    }
}

/// Ends with 69 if no station answered at all.
fn print(watched: &[Watched], json: bool) -> anyhow::Result<()> {
    let stations: Vec<Station> = watched.iter().map(|watched| watched.shown.clone()).collect();
    if json {
        let rows = stations.iter().map(|Station { address, state }| match state {
            Ok(figures) => {
                let mut row = figures.to_json();
                row["address"] = address.as_str().into();
                row["up"] = true.into();
                row
            }
            Err(error) => serde_json::json!({ "address": address, "up": false, "error": error }),
        });
        println!("{}", Value::Array(rows.collect()));
    } else {
        print!("{}", view::text(&stations));
    }
    match stations.iter().any(|station| station.state.is_ok()) {
        true => Ok(()),
        false => Err(Unreachable.into()),
    }
}

/// What a key asks for.
enum Key {
    Quit,
    Up,
    Down,
    Redraw,
}

/// Reads the keyboard on a thread of its own, since the system has no other way, until the flag is set.
fn read_keys() -> (mpsc::UnboundedReceiver<Key>, Arc<AtomicBool>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    std::thread::spawn(move || {
        while !over.load(Ordering::Relaxed) {
            let key = match event::poll(KEY_PERIOD)
                .and_then(|ready| if ready { event::read().map(Some) } else { Ok(None) })
            {
                Ok(None) => continue,
                Ok(Some(Event::Key(key))) if key.kind == KeyEventKind::Press => match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => Key::Quit,
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Key::Quit,
                    KeyCode::Up | KeyCode::Char('k') => Key::Up,
                    KeyCode::Down | KeyCode::Char('j') => Key::Down,
                    _ => continue,
                },
                Ok(Some(Event::Resize(..))) => Key::Redraw,
                Ok(Some(_)) => continue,
                // The terminal is gone.
                Err(_) => Key::Quit,
            };
            if sender.send(key).is_err() {
                return;
            }
        }
    });
    (receiver, is_over)
}
