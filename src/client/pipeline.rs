//! A mesh as one model: token ids in at the first station, a token out of the last.
//!
//! A pipeline keeps the token history of its session. When a station has lost the session (evicted, or started again) it
//! says where to go on, and the history is sent again from there: requests are idempotent, so the other stations simply
//! do it twice. A station that is gone is waited for as long as a connection may take.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aeon_proto::{payload::MetaWriter, pcar, route::Route, status::Status};

use super::{
    address::StationAddress,
    connection::{Client, ClientOptions, Reply},
    error::ClientError,
    hello::Hello,
    replay::Replaying,
};
use crate::{basis::BasisFile, model::session::random_name};

/// Bytes that header and meta of a request or reply take at most.
pub(super) const FRAME_OVERHEAD: usize = 512;
/// How often lost history is sent again for one step.
const MAX_RECOVERIES: usize = 4;
/// Pause between attempts to reach a station that is gone.
const RECONNECT_PERIOD: Duration = Duration::from_millis(50);

/// Time after which a station that refused a basis is asked again what it has.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// In what form residuals travel between stations.
#[derive(Debug, Clone, Default)]
pub enum Wire {
    /// Raw f32: tokens identical to an unsplit run.
    #[default]
    Exact,
    /// PCA components, where the two stations of a hop have the same basis; raw elsewhere.
    Pcar(PcarWire),
}

/// How residuals are sent as PCA components.
#[derive(Debug, Clone, Default)]
pub struct PcarWire {
    /// Only the basis with this fingerprint; any that both stations have if `None`.
    pub basis_fp: Option<u32>,
    /// Components at most; as many as the basis has if `None`.
    pub k: Option<u32>,
    /// A basis of this client's own, for stations that give raw residuals only.
    pub local: Option<Arc<BasisFile>>,
}

/// What is wanted after the last position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// The most likely token.
    Token,
    /// The best few ids and logits.
    TopK(u32),
}

/// What came out.
#[derive(Debug, Clone, PartialEq)]
pub struct Next {
    /// Ids in descending order of their logits; the most likely one alone for [`Want::Token`].
    pub ids: Vec<u32>,
    /// Their logits; empty for [`Want::Token`].
    pub logits: Vec<f32>,
}

/// What went over the link to one station and back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HopTraffic {
    /// Requests.
    pub requests: u64,
    /// Positions.
    pub positions: u64,
    /// Body bytes sent to the station.
    pub sent: u64,
    /// Body bytes that came back.
    pub received: u64,
    /// Requests whose body was PCA components.
    pub compressed: u64,
    /// Compressed requests that the station refused with 412, and that were repeated raw.
    pub refused: u64,
}

/// A station of a pipeline.
#[derive(Debug)]
pub struct Stage {
    pub(super) client: Client,
    /// Since when it gets raw residuals only, because it refused a basis.
    pub(super) raw_since: Option<Instant>,
    /// What the station said of itself.
    pub hello: Hello,
    /// What went over its link.
    pub traffic: HopTraffic,
}

impl Stage {
    /// Where the station is.
    #[must_use]
    pub fn address(&self) -> &StationAddress {
        self.client.address()
    }

    /// Sends a FORWARD or FORWARD_PCA. If the station is gone, it is given the time to come back, and asked again.
    pub(super) async fn forward(
        &mut self,
        options: &ClientOptions,
        route: Route,
        meta: impl Fn(&mut MetaWriter<'_, '_>),
        body: &[u8],
    ) -> Result<Reply, ClientError> {
        match self.client.request(route, &meta, body).await {
            Err(ClientError::Closed { .. } | ClientError::Connect { .. }) => {
                self.reconnect(options).await?;
                self.client.request(route, &meta, body).await
            }
            reply => reply,
        }
    }

    async fn reconnect(&mut self, options: &ClientOptions) -> Result<(), ClientError> {
        let address = self.address().clone();
        let deadline = Instant::now() + options.connect_timeout;
        tracing::info!(station = %address, "connecting again");
        let (client, hello) = loop {
            let error = match Client::connect(&address, options.clone()).await {
                Ok(client) => match client.hello().await {
                    Ok(hello) => break (client, hello),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            if !error.is_unreachable() || Instant::now() >= deadline {
                return Err(error);
            }
            tokio::time::sleep(RECONNECT_PERIOD).await;
        };
        if hello.model.config_fp != self.hello.model.config_fp || hello.layers != self.hello.layers {
            let problem = format!("{address} was started again with another model or other layers");
            return Err(ClientError::Mesh { problem });
        }
        self.client = client;
        self.hello = hello;
        Ok(())
    }
}

/// Several stations that hold all layers of one model, in order, and one session on them.
#[derive(Debug)]
pub struct Pipeline {
    pub(super) stages: Vec<Stage>,
    pub(super) options: ClientOptions,
    pub(super) wire: Wire,
    pub(super) session: String,
    pub(super) history: Vec<u32>,
    pub(super) replay: Replaying,
}

impl Pipeline {
    /// Connects to the stations and checks that they are one model, in order.
    ///
    /// # Errors
    /// [`ClientError::Mesh`] with what does not fit; others if a station cannot be reached.
    pub async fn connect(addresses: &[StationAddress], options: &ClientOptions) -> Result<Self, ClientError> {
        let mut stages = Vec::new();
        for address in addresses {
            let client = Client::connect(address, options.clone()).await?;
            let hello = client.hello().await?;
            stages.push(Stage { client, raw_since: None, hello, traffic: HopTraffic::default() });
        }
        check_mesh(&stages)?;
        Ok(Self {
            stages,
            options: options.clone(),
            wire: Wire::Exact,
            session: random_name(),
            history: Vec::new(),
            replay: Replaying::default(),
        })
    }

    /// Sets in what form residuals travel from now on.
    pub fn set_wire(&mut self, wire: Wire) {
        self.wire = wire;
    }

    /// Asks all stations again what they have; those that refused a basis are tried anew.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn refresh(&mut self) -> Result<(), ClientError> {
        for stage in &mut self.stages {
            stage.hello = stage.client.hello().await?;
            stage.raw_since = None;
        }
        check_mesh(&self.stages)
    }

    /// The stations, in order.
    #[must_use]
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The model that they hold together.
    #[must_use]
    pub fn model(&self) -> &super::hello::RemoteModel {
        // `check_mesh` refused a pipeline without a station.
        &self.stages[0].hello.model
    }

    /// Tokens of the session so far.
    #[must_use]
    pub fn history(&self) -> &[u32] {
        &self.history
    }

    /// The session's name on the stations.
    #[must_use]
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Puts `ids` behind the session's tokens and returns what comes next.
    ///
    /// # Errors
    /// See [`ClientError`]; the session is then as it was before.
    pub async fn extend(&mut self, ids: &[u32], want: Want) -> Result<Next, ClientError> {
        if self.stages.iter().any(|stage| stage.raw_since.is_some_and(|since| since.elapsed() >= ASK_AGAIN)) {
            self.refresh().await?;
        }
        let start = self.history.len();
        self.history.extend_from_slice(ids);
        if self.replay.is_about(start) {
            self.end_captures().await;
        }
        let result = match start == 0 && self.replay.is_enabled() {
            true => self.begin(want).await,
            false => self.run(start, want).await,
        };
        if result.is_err() {
            self.history.truncate(start);
        }
        result
    }

    /// Goes back to the first `len` tokens.
    pub fn rewind(&mut self, len: usize) {
        self.history.truncate(len);
    }

    /// Drops the session on all stations and begins a new one.
    ///
    /// # Errors
    /// The first station's error that is none of "unknown session".
    pub async fn reset(&mut self) -> Result<(), ClientError> {
        self.history.clear();
        let session = std::mem::replace(&mut self.session, random_name());
        for stage in &self.stages {
            stage
                .client
                .request(
                    Route::RESET,
                    |meta| {
                        meta.string("session", &session);
                    },
                    &[],
                )
                .await?;
        }
        Ok(())
    }

    pub(super) async fn run(&mut self, start: usize, want: Want) -> Result<Next, ClientError> {
        let mut pos = start;
        let mut recoveries = 0;
        let chunk = self.chunk_len(want);
        loop {
            let end = self.history.len().min(pos + chunk);
            let is_last = end == self.history.len();
            match self.pass(pos, end, is_last.then_some(want)).await {
                Ok(Some(next)) => return Ok(next),
                Ok(None) => pos = end,
                Err(error) => {
                    let expected = error.vent_number("expected_pos").and_then(|pos| usize::try_from(pos).ok());
                    match expected {
                        Some(expected)
                            if error.status() == Some(Status::CONFLICT)
                                && expected < pos
                                && recoveries < MAX_RECOVERIES =>
                        {
                            tracing::info!(%error, "sending the history again");
                            recoveries += 1;
                            pos = expected;
                        }
                        _ => return Err(error),
                    }
                }
            }
        }
    }

    /// Positions that one request may hold on every hop.
    fn chunk_len(&self, want: Want) -> usize {
        let logits = match want {
            Want::Token => 4,
            Want::TopK(k) => 8 * k as usize,
        };
        let positions = |stage: &Stage| {
            let limits = stage.hello.limits;
            let max = if stage.client.is_udp() { limits.max_datagram } else { limits.max_frame };
            let room = max.saturating_sub(FRAME_OVERHEAD);
            // A residual crosses every link but that of a single station. With all its components it is no smaller, and
            // has a header.
            let header = if matches!(self.wire, Wire::Pcar(_)) { pcar::HEADER_LEN } else { 0 };
            let width = if self.stages.len() == 1 { 4 } else { 4 * stage.hello.model.hidden_dim + header };
            let fits = if logits > room { 0 } else { room / width };
            fits.min(limits.max_seq)
        };
        self.stages.iter().map(positions).min().unwrap_or(1).max(1)
    }
}

/// Checks that stations hold one model, all of it, in order.
fn check_mesh(stages: &[Stage]) -> Result<(), ClientError> {
    let wrong = |problem: String| Err(ClientError::Mesh { problem });
    let Some(first) = stages.first() else {
        return wrong("no station was named; add --station uds:PATH or the like".to_owned());
    };
    let mut next = 0;
    for stage in stages {
        let (address, layers) = (stage.address(), stage.hello.layers());
        if stage.hello.model.config_fp != first.hello.model.config_fp {
            let (theirs, ours) = (&stage.hello.model.name, &first.hello.model.name);
            return wrong(format!(
                "{address} serves {theirs}, {} serves {ours} (their config_fp differ); start all with the same model",
                first.address()
            ));
        }
        if layers.start != next {
            return wrong(format!(
                "{address} holds layers {}..{}, but layer {next} is next; name the stations in the order of their layers \
                 and start one for those that are missing",
                layers.start, layers.end
            ));
        }
        next = layers.end;
    }
    let n_layers = first.hello.model.n_layers;
    if next != n_layers {
        return wrong(format!(
            "layers {next}..{n_layers} are held by none of them; start a station with --layers {next}..{n_layers}"
        ));
    }
    Ok(())
}
