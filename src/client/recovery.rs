//! What a pipeline does when a station fails: reach it again, put a standby in its place, or say which one it was.
//!
//! A station that lost its session is told the tokens again. One that cannot be reached any more is replaced by a standby,
//! a station with the same layers of the same weights, so that the tokens are those of an undisturbed run; it gets the
//! session from its replay cache, if that is used and hits, and the rest from the tokens. Without a standby, one whose
//! connection ended is given the time that a connection may take to come back.
//!
//! Where a request was left without an answer, nobody can say what became of it: it may still be worked on, later, behind
//! newer ones. So the session gets a new name there.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use aeon_proto::{payload::MetaWriter, route::Route, status::Status};

use super::{
    address::StationAddress,
    connection::{Client, ClientOptions},
    error::ClientError,
    hello::Hello,
    pipeline::{Pipeline, Stage},
};
use crate::{causes::with_causes, model::session::random_name};

/// How often lost history is sent again for one step.
const MAX_CONFLICTS: usize = 8;
/// How often a request that an idle station does not answer is sent from a new port.
const MAX_UNANSWERED: usize = 3;
/// Pause between attempts to reach a station that is gone.
const RECONNECT_PERIOD: Duration = Duration::from_millis(50);
/// Bytes of a datagram that fit one packet on every link (IPv6: 1,280 less 40 and 8).
pub(super) const PACKET_LEN: usize = 1232;

/// A station that may take the place of one of the mesh.
#[derive(Debug, Clone)]
pub(super) struct Standby {
    address: StationAddress,
    /// The layers that it holds, once it has said so.
    layers: Option<Range<u32>>,
}

/// A station took another's place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    /// Number of the station in the mesh, from 1.
    pub number: usize,
    /// The one that failed.
    pub from: StationAddress,
    /// The one that took over.
    pub to: StationAddress,
    /// What happened to the first.
    pub reason: String,
}

/// What was done so far to bring one step through.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    conflicts: usize,
    unanswered: usize,
    revivals: usize,
}

impl Pipeline {
    /// Connects as [`Pipeline::connect`], with stations that may take the place of one that is not there, now or later. The
    /// standbys that cannot be reached now are returned too, with the reason; they are asked again when they are needed.
    ///
    /// # Errors
    /// As [`Pipeline::connect`] and [`Pipeline::add_standbys`].
    pub async fn connect_with_standbys(
        addresses: &[StationAddress],
        standbys: &[StationAddress],
        options: &ClientOptions,
    ) -> Result<(Self, Vec<(StationAddress, ClientError)>), ClientError> {
        let (mut standbys, mut failovers) = (standbys.to_vec(), Vec::new());
        let (mut stages, mut absent): (Vec<Stage>, Vec<Standby>) = (Vec::new(), Vec::new());
        for address in addresses {
            let error = match hello(address, options).await {
                Ok((client, hello)) => {
                    stages.push(Stage::new(client, hello));
                    continue;
                }
                Err(error) if error.is_unreachable() => error,
                Err(error) => return Err(error),
            };
            // It cannot say what it holds: that is whatever comes next.
            let next = stages.last().map_or(0, |stage| stage.hello.layers().end);
            let mut found = None;
            for (index, standby) in standbys.iter().enumerate() {
                if let Ok((client, hello)) = hello(standby, options).await
                    && hello.layers().start == next
                {
                    found = Some((index, Stage::new(client, hello)));
                    break;
                }
            }
            let Some((index, stage)) = found else { return Err(error) };
            let (number, to) = (stages.len() + 1, standbys.remove(index));
            tracing::warn!("standby {to} takes the place of station {number}, {address}: {}", with_causes(&error));
            absent.push(Standby { address: address.clone(), layers: Some(stage.hello.layers()) });
            failovers.push(Failover { number, from: address.clone(), to, reason: with_causes(&error) });
            stages.push(stage);
        }
        let mut pipeline = Self::of(stages, options)?;
        let missing = pipeline.add_standbys(&standbys).await?;
        pipeline.standbys.extend(absent);
        pipeline.failovers = failovers;
        Ok((pipeline, missing))
    }

    /// Names stations that may take the place of one of the mesh that fails. Each is asked what it holds; those that
    /// cannot be reached now are returned, and asked again when they are needed.
    ///
    /// # Errors
    /// [`ClientError::Mesh`] for one that could take nobody's place.
    pub async fn add_standbys(
        &mut self,
        addresses: &[StationAddress],
    ) -> Result<Vec<(StationAddress, ClientError)>, ClientError> {
        let mut missing = Vec::new();
        for address in addresses {
            let layers = match hello(address, &self.options).await {
                Ok((_, hello)) => {
                    let problems: Vec<String> =
                        self.stages.iter().filter_map(|stage| difference(&stage.hello, &hello)).collect();
                    if problems.len() == self.stages.len() {
                        let problem =
                            format!("standby {address} is none for any of the stations: {}", problems.join("; "));
                        return Err(ClientError::Mesh { problem });
                    }
                    Some(hello.layers())
                }
                Err(error) => {
                    missing.push((address.clone(), error));
                    None
                }
            };
            self.standbys.push(Standby { address: address.clone(), layers });
        }
        Ok(missing)
    }

    /// Who took over from whom so far.
    #[must_use]
    pub fn failovers(&self) -> &[Failover] {
        &self.failovers
    }

    /// Puts right what is wrong with a station, so that the step can be tried again from where it lacks positions.
    pub(super) async fn recover(
        &mut self,
        index: usize,
        error: ClientError,
        from: usize,
        trouble: &mut Trouble,
    ) -> Result<(), ClientError> {
        let expected = error.vent_number("expected_pos").and_then(|pos| usize::try_from(pos).ok());
        if let (Some(Status::CONFLICT), Some(expected)) = (error.status(), expected)
            && expected < from
            && trouble.conflicts < MAX_CONFLICTS
        {
            tracing::info!(%error, "sending the history again");
            trouble.conflicts += 1;
            self.stages[index].held = expected;
            self.rebuild(index).await;
            return Ok(());
        }
        if matches!(error, ClientError::Unanswered { .. }) && trouble.unanswered < MAX_UNANSWERED {
            trouble.unanswered += 1;
            let positions = self.chunk_len(super::Want::Token);
            let stage = &mut self.stages[index];
            if positions > 1 && !stage.is_narrow {
                tracing::warn!(%error, "sending no datagrams of more than one packet from now on");
                stage.is_narrow = true;
            }
            // A station that takes a request for an old one answers another sender.
            return self.reach_again(index, Duration::ZERO).await.map_err(|problem| self.failed(index, problem, ""));
        }
        if !error.is_unreachable() && error.status() != Some(Status::UNAVAILABLE) {
            return Err(self.failed(index, error, ""));
        }
        if trouble.revivals > self.standbys.len() + 1 {
            self.stages[index].is_lost |= error.is_unreachable();
            return Err(self.failed(index, error, ""));
        }
        trouble.revivals += 1;
        self.revive(index, error).await
    }

    /// Brings back a station that cannot be reached, or puts a standby in its place.
    async fn revive(&mut self, index: usize, mut error: ClientError) -> Result<(), ClientError> {
        let (number, count, stage) = (index + 1, self.stages.len(), &mut self.stages[index]);
        if error.is_unreachable() && !stage.was_closed {
            stage.is_lost = true;
            tracing::warn!("station {number} of {count} failed: {}", with_causes(&error));
        }
        // One that ended its connection may be there again at once, or soon. One that is silent was waited for already.
        let may_be_back = matches!(error, ClientError::Closed { .. } | ClientError::Connect { .. });
        let has_standby = self.standbys.iter().any(|standby| standby.fits(&self.stages[index]));
        let patience = self.options.connect_timeout;
        if may_be_back {
            match self.reach_again(index, if has_standby { Duration::ZERO } else { patience }).await {
                Ok(()) => return Ok(()),
                Err(problem) => error = problem,
            }
        }
        let mut problems = String::new();
        for number in 0..self.standbys.len() {
            if !self.standbys[number].fits(&self.stages[index]) {
                continue;
            }
            match self.take_over(index, number, &error).await {
                Ok(()) => {
                    self.rebuild(index).await;
                    return Ok(());
                }
                Err(problem) => problems += &format!(", and {problem}"),
            }
        }
        if may_be_back && has_standby && self.reach_again(index, patience).await.is_ok() {
            return Ok(());
        }
        Err(self.failed(index, error, &problems))
    }

    /// Makes a new connection to the same station, trying for so long.
    async fn reach_again(&mut self, index: usize, patience: Duration) -> Result<(), ClientError> {
        let stage = &mut self.stages[index];
        let address = stage.address().clone();
        // As long as it would take to find a silent one out.
        let longest = self.options.health_interval.map_or(patience, |interval| patience.min(interval * 3 / 2));
        let deadline = Instant::now() + longest;
        tracing::info!(station = %address, "connecting again");
        let (client, hello) = loop {
            match hello(&address, &self.options).await {
                Ok(reached) => break reached,
                Err(error) if !error.is_unreachable() || Instant::now() >= deadline => return Err(error),
                Err(_) => tokio::time::sleep(RECONNECT_PERIOD).await,
            }
        };
        if let Some(problem) = difference(&stage.hello, &hello) {
            let problem = format!("{address} was started again with something else: {problem}");
            return Err(ClientError::Mesh { problem });
        }
        stage.client = client;
        stage.hello = hello;
        if stage.was_closed && !stage.is_lost {
            return Ok(());
        }
        let old = stage.rename();
        let name = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("session", &old);
        };
        // Gives its memory back; if the station was started again there is nothing to give.
        let _ = stage.client.request(Route::RESET, name, &[]).await;
        self.rebuild(index).await;
        Ok(())
    }

    /// Puts a standby in a station's place, and the station among the standbys.
    async fn take_over(&mut self, index: usize, number: usize, reason: &ClientError) -> Result<(), String> {
        let address = self.standbys[number].address.clone();
        let (client, hello) = hello(&address, &self.options)
            .await
            .map_err(|error| format!("standby {address}: {}", with_causes(&error)))?;
        let (count, stage) = (self.stages.len(), &mut self.stages[index]);
        if let Some(problem) = difference(&stage.hello, &hello) {
            self.standbys[number].layers = Some(hello.layers());
            return Err(format!("standby {address}: {problem}"));
        }
        let (from, reason) = (stage.address().clone(), with_causes(reason));
        tracing::warn!("standby {address} takes the place of station {} of {count}, {from}", index + 1);
        // Last in the row: it may be back when the others have failed too.
        self.standbys.remove(number);
        self.standbys.push(Standby { address: from.clone(), layers: Some(stage.hello.layers()) });
        self.failovers.push(Failover { number: index + 1, from, to: address, reason });
        stage.client = client;
        stage.hello = hello;
        stage.raw_since = None;
        stage.is_narrow = false;
        stage.rename();
        Ok(())
    }

    /// Gives a station that lost its session what it can get without the other stations.
    async fn rebuild(&mut self, index: usize) {
        if self.stages[index].held == 0
            && let Some(len) = self.restore(index).await
        {
            self.stages[index].held = len;
        }
    }

    fn failed(&self, index: usize, error: ClientError, standbys: &str) -> ClientError {
        let stage = &self.stages[index];
        ClientError::Hop {
            number: index + 1,
            count: self.stages.len(),
            station: stage.address().clone(),
            layers: stage.hello.layers,
            standbys: standbys.to_owned(),
            source: Box::new(error),
        }
    }
}

impl Stage {
    /// A new session there, which holds nothing; returns the old one's name.
    fn rename(&mut self) -> String {
        self.held = 0;
        self.is_lost = false;
        self.was_closed = false;
        std::mem::replace(&mut self.session, random_name())
    }
}

impl Standby {
    /// Whether it may hold a station's layers.
    fn fits(&self, stage: &Stage) -> bool {
        self.layers.as_ref().is_none_or(|layers| *layers == stage.hello.layers())
    }
}

async fn hello(address: &StationAddress, options: &ClientOptions) -> Result<(Client, Hello), ClientError> {
    let client = Client::connect(address, options.clone()).await?;
    let hello = client.hello().await?;
    Ok((client, hello))
}

/// Why the second station would not give the results of the first; `None` if it would.
fn difference(wanted: &Hello, got: &Hello) -> Option<String> {
    let (range, theirs) = (wanted.layers(), got.layers());
    if got.model.config_fp != wanted.model.config_fp {
        return Some(format!("it serves {}, not {} (their config_fp differ)", got.model.name, wanted.model.name));
    }
    if theirs != range {
        return Some(format!("it holds layers {}..{}, not {}..{}", theirs.start, theirs.end, range.start, range.end));
    }
    if got.model.layers_fp != wanted.model.layers_fp {
        return Some(format!(
            "its weights of layers {}..{} are others (their layers_fp differ)",
            range.start, range.end
        ));
    }
    None
}
