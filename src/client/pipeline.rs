//! A mesh as one model: token ids in at the first station, a token out of the last.
//!
//! A pipeline keeps the token history of its session, and for each station how many positions of it are held there. When a
//! station has lost the session (evicted, or started again) it says where to go on, and the history is sent again from
//! there, as far into the mesh as that station: requests are idempotent, so the stations before it simply do it twice. What
//! becomes of a station that is gone stands in the module `recovery`.

use std::{sync::Arc, time::Instant};

use aeon_proto::{
    payload::MetaWriter,
    pcar,
    qres::{self, Format},
    route::Route,
};

use super::{
    address::StationAddress,
    connection::{Client, ClientOptions},
    error::ClientError,
    hello::Hello,
    recovery::{Failover, PACKET_LEN, Standby, Trouble},
    replay::Replaying,
};
use crate::{
    basis::{BasisFile, quantiser::Norms},
    model::session::random_name,
};

/// Bytes that header and meta of a request or reply take at most.
pub(super) const FRAME_OVERHEAD: usize = 512;

/// Time after which a station that refused a basis is asked again what it has.
const ASK_AGAIN: std::time::Duration = std::time::Duration::from_secs(10);

/// In what form residuals travel between stations.
#[derive(Debug, Clone, Default)]
pub enum Wire {
    /// Raw f32: tokens identical to an unsplit run.
    #[default]
    Exact,
    /// PCA components, where the two stations of a hop have the same basis; raw elsewhere.
    Pcar(PcarWire),
    /// Few bits a coordinate, where the receiver of a hop takes them; raw elsewhere.
    Quantised(QuantisedWire),
    /// A form for the link behind each station but the last, in order; raw where none is given.
    Each(Vec<Self>),
}

impl Wire {
    /// The form on the link behind station `index`.
    pub(super) fn behind(&self, index: usize) -> &Self {
        const RAW: &Wire = &Wire::Exact;
        match self {
            Self::Each(wires) => wires.get(index).filter(|wire| !matches!(wire, Self::Each(_))).unwrap_or(RAW),
            wire => wire,
        }
    }
}

/// How residuals are sent as numbers of few bits.
#[derive(Debug, Clone)]
pub struct QuantisedWire {
    /// Bits, and whether the mean is taken off.
    pub format: Format,
    /// The mean only of the basis with this fingerprint; of any that both stations have if `None`. Where there is none,
    /// no mean is taken off.
    pub basis_fp: Option<u32>,
    /// A basis of this client's own, for stations that give raw residuals only.
    pub local: Option<Arc<BasisFile>>,
}

impl QuantisedWire {
    /// With the mean of any basis that both stations of a hop have.
    #[must_use]
    pub const fn new(format: Format) -> Self {
        Self { format, basis_fp: None, local: None }
    }
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
    /// Requests whose body was PCA components or quantised.
    pub compressed: u64,
    /// Bytes that those bodies would have had more as f32.
    pub saved: u64,
    /// Compressed requests that the station refused with 412, and that were repeated raw.
    pub refused: u64,
}

/// A station of a pipeline.
#[derive(Debug)]
pub struct Stage {
    pub(super) client: Client,
    /// Since when it gets raw residuals only, because it refused a basis.
    pub(super) raw_since: Option<Instant>,
    /// The session's name there. A new one where nobody can say what the station did with the last request.
    pub(super) session: String,
    /// Positions that it holds, as far as is known here.
    pub(super) held: usize,
    /// Whether its last request has no answer, so that the connection is not used any more.
    pub(super) is_lost: bool,
    /// Whether a request waits there, or did when its future was dropped.
    pub(super) is_waiting: bool,
    /// Whether the connection had ended, with nothing waiting, before the last request was sent.
    pub(super) was_closed: bool,
    /// Whether datagrams of several packets do not come through.
    pub(super) is_narrow: bool,
    /// What the station said of itself.
    pub hello: Hello,
    /// Norms of what this client quantised for it.
    pub(super) norms: Norms,
    /// What went over its link.
    pub traffic: HopTraffic,
}

impl Stage {
    /// Where the station is.
    #[must_use]
    pub fn address(&self) -> &StationAddress {
        self.client.address()
    }

    pub(super) fn new(client: Client, hello: Hello) -> Self {
        Self {
            client,
            raw_since: None,
            session: random_name(),
            held: 0,
            is_lost: false,
            is_waiting: false,
            was_closed: false,
            is_narrow: false,
            hello,
            norms: Norms::default(),
            traffic: HopTraffic::default(),
        }
    }
}

/// Several stations that hold all layers of one model, in order, and one session on them.
#[derive(Debug)]
pub struct Pipeline {
    pub(super) stages: Vec<Stage>,
    pub(super) options: ClientOptions,
    pub(super) wire: Wire,
    pub(super) session: String,
    /// The tokens, and behind them those that are on their way.
    pub(super) history: Vec<u32>,
    /// How many of them came through to the last station.
    done: usize,
    pub(super) replay: Replaying,
    pub(super) standbys: Vec<Standby>,
    pub(super) failovers: Vec<Failover>,
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
            stages.push(Stage::new(client, hello));
        }
        Self::of(stages, options)
    }

    /// A pipeline of stations that were asked what they hold.
    pub(super) fn of(mut stages: Vec<Stage>, options: &ClientOptions) -> Result<Self, ClientError> {
        check_mesh(&stages)?;
        let session = random_name();
        stages.iter_mut().for_each(|stage| stage.session.clone_from(&session));
        Ok(Self {
            stages,
            options: options.clone(),
            wire: Wire::Exact,
            session,
            history: Vec::new(),
            done: 0,
            replay: Replaying::default(),
            standbys: Vec::new(),
            failovers: Vec::new(),
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
        self.history.get(..self.done).unwrap_or_default()
    }

    /// The session's name on the stations; one that was lost from sight meanwhile has another.
    #[must_use]
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Puts `ids` behind the session's tokens and returns what comes next. A station that fails is replaced by a standby, if
    /// there is one ([`Pipeline::add_standbys`]), and gets the session from the tokens.
    ///
    /// Cancel safe: when the future is dropped, the station at work is told to stop, and the session is as it was before.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Hop`] says at which station. The session is then as it was before: the same call
    /// may be made again when the station is back.
    pub async fn extend(&mut self, ids: &[u32], want: Want) -> Result<Next, ClientError> {
        // A call that failed or was dropped has left its tokens.
        self.history.truncate(self.done);
        if self.stages.iter().any(|stage| stage.raw_since.is_some_and(|since| since.elapsed() >= ASK_AGAIN)) {
            // That a station is gone shows below, where something can be done about it.
            if let Err(error) = self.refresh().await
                && !error.is_unreachable()
            {
                return Err(error);
            }
        }
        let start = self.history.len();
        let mut least = start;
        for stage in &mut self.stages {
            stage.held = stage.held.min(start);
            least = least.min(stage.held);
        }
        if self.replay.is_about(least) {
            self.end_captures().await;
        }
        self.history.extend_from_slice(ids);
        let is_new = self.stages.iter().all(|stage| stage.held == 0);
        let next = match is_new && self.replay.is_enabled() {
            true => self.begin(want).await?,
            false => self.run(want).await?,
        };
        self.done = self.history.len();
        Ok(next)
    }

    /// Goes back to the first `len` tokens.
    pub fn rewind(&mut self, len: usize) {
        self.done = self.done.min(len);
        self.history.truncate(self.done);
    }

    /// Takes over the tokens of a session that an earlier pipeline began: the next [`Pipeline::extend`] sends them through
    /// the stations first. The tokens so far and sessions of this pipeline are forgotten.
    pub fn resume(&mut self, history: Vec<u32>) {
        self.done = history.len();
        self.history = history;
        for stage in &mut self.stages {
            stage.held = 0;
        }
    }

    /// Drops the session on all stations and begins a new one.
    ///
    /// # Errors
    /// The first station's error that is none of "unknown session"; the others are told all the same.
    pub async fn reset(&mut self) -> Result<(), ClientError> {
        self.history.clear();
        self.done = 0;
        self.session = random_name();
        let mut result = Ok(());
        for stage in &mut self.stages {
            stage.held = 0;
            let session = std::mem::replace(&mut stage.session, self.session.clone());
            let name = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("session", &session);
            };
            let dropped = stage.client.request(Route::RESET, name, &[]).await;
            result = result.and(dropped.map(|_| ()));
        }
        result
    }

    /// Brings the tokens to all stations, from where the first of them lacks some.
    pub(super) async fn run(&mut self, want: Want) -> Result<Next, ClientError> {
        let mut trouble = Trouble::default();
        let end = self.history.len();
        loop {
            let from = self.stages.iter().map(|stage| stage.held).min().unwrap_or(0);
            // The stations behind the last one that lacks these positions need not see them again.
            let mut last = self.stages.iter().rposition(|stage| stage.held == from).unwrap_or(0);
            let behind = self.stages.iter().skip(last + 1).map(|stage| stage.held).min();
            let to = end.min(from + self.chunk_len(want)).min(behind.unwrap_or(end));
            let is_end = to == end;
            if is_end {
                last = self.stages.len() - 1;
            }
            match self.pass((from, to), last, is_end.then_some(want)).await {
                Ok(Some(next)) => return Ok(next),
                Ok(None) => {}
                Err((index, error)) => self.recover(index, error, from, &mut trouble).await?,
            }
        }
    }

    /// Positions that one request may hold on every hop.
    pub(super) fn chunk_len(&self, want: Want) -> usize {
        let logits = match want {
            Want::Token => 4,
            Want::TopK(k) => 8 * k as usize,
        };
        let positions = |stage: &Stage| {
            let limits = stage.hello.limits;
            let max = match (stage.client.is_udp(), stage.is_narrow) {
                (true, true) => limits.max_datagram.min(PACKET_LEN),
                (true, false) => limits.max_datagram,
                (false, _) => limits.max_frame,
            };
            let room = max.saturating_sub(FRAME_OVERHEAD);
            // A residual crosses every link but that of a single station. With all its components it is no smaller, and
            // has a header.
            let (once, header) = match &self.wire {
                Wire::Exact => (0, 0),
                Wire::Pcar(_) => (0, pcar::HEADER_LEN),
                // All positions may be escaped, as f32; each has a bit that says so.
                Wire::Quantised(_) => (qres::HEADER_LEN + 1, 1),
                // What the most demanding of them takes.
                Wire::Each(_) => (qres::HEADER_LEN + 1, pcar::HEADER_LEN),
            };
            let room = room.saturating_sub(once);
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
