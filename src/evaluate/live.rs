//! Running stations as a mesh whose boundaries are in this process: each residual comes here raw, is changed, and goes on.

use aeon_proto::{payload::MetaWriter, residual, route::Route};
use tokio::runtime::Handle;

use super::{
    error::EvaluateError,
    mesh::{Mesh, MeshInfo, Slot},
};
use crate::{
    client::{Client, ClientOptions, Pipeline, StationAddress},
    model::session::random_name,
};

/// Bytes that header and meta of a request or reply take at most.
const FRAME_OVERHEAD: usize = 512;

/// Stations that hold all layers of one model.
#[derive(Debug)]
pub struct Live {
    runtime: Handle,
    info: MeshInfo,
    stations: Vec<Station>,
    /// Of the reference and the candidate.
    sessions: [String; 2],
}

#[derive(Debug)]
struct Station {
    client: Client,
    boundary: u32,
    /// Bytes of a body at most.
    room: usize,
    max_seq: usize,
}

impl Live {
    /// Connects to stations, in the order of their layers. To be called in a runtime of several threads, and used in
    /// [`tokio::task::block_in_place`].
    ///
    /// # Errors
    /// [`EvaluateError::Client`]; [`EvaluateError::NoCut`] for one station.
    pub async fn connect(addresses: &[StationAddress], options: &ClientOptions) -> Result<Self, EvaluateError> {
        // It knows what stations make a mesh.
        let pipeline = Pipeline::connect(addresses, options).await?;
        if pipeline.stages().len() < 2 {
            return Err(EvaluateError::NoCut);
        }
        let mut stations = Vec::new();
        for stage in pipeline.stages() {
            let client = Client::connect(stage.address(), options.clone()).await?;
            let limits = stage.hello.limits;
            let max = if client.is_udp() { limits.max_datagram } else { limits.max_frame };
            let room = max.saturating_sub(FRAME_OVERHEAD);
            stations.push(Station { client, boundary: stage.hello.layers[0], room, max_seq: limits.max_seq.max(1) });
        }
        let model = pipeline.model();
        let info = MeshInfo {
            name: model.name.clone(),
            hidden_dim: model.hidden_dim.max(1),
            vocab: model.vocab,
            n_layers: model.n_layers,
            max_position: model.max_position,
            bos: model.bos,
            config_fp: model.config_fp.clone(),
            cuts: stations.iter().skip(1).map(|station| station.boundary).collect(),
        };
        Ok(Self { runtime: Handle::current(), info, stations, sessions: [random_name(), random_name()] })
    }

    /// Lets the stations forget both sequences. That one cannot is of no consequence: it forgets them in time.
    pub async fn end(self) {
        for station in &self.stations {
            for session in &self.sessions {
                let name = |meta: &mut MetaWriter<'_, '_>| {
                    meta.string("session", session);
                };
                let _ = station.client.request(Route::RESET, name, &[]).await;
            }
        }
    }

    /// One request with f32 values in the answer, as many as `expected`.
    fn ask(
        &self,
        station: &Station,
        route: Route,
        meta: impl Fn(&mut MetaWriter<'_, '_>),
        body: &[u8],
        expected: usize,
    ) -> Result<Vec<f32>, EvaluateError> {
        let reply = self.runtime.block_on(station.client.request(route, meta, body))?;
        let wrong = |problem: String| EvaluateError::Client(station.client.bad_reply(route, problem));
        let values = residual::decode_f32s(&reply.body).map_err(|error| wrong(error.to_string()))?;
        if values.len() != expected {
            return Err(wrong(format!("{expected} values expected, {} came", values.len())));
        }
        residual::check_finite_values(&values).map_err(|error| wrong(error.to_string()))?;
        Ok(values.into_owned())
    }
}

impl Station {
    /// Positions of a request, when each takes so many bytes on the way there or back.
    fn positions(&self, bytes: usize) -> usize {
        (self.room / bytes.max(1)).clamp(1, self.max_seq)
    }
}

impl Mesh for Live {
    fn info(&self) -> &MeshInfo {
        &self.info
    }

    fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>, EvaluateError> {
        let d = self.info.hidden_dim;
        let first = &self.stations[0];
        let mut out = Vec::with_capacity(ids.len() * d);
        for ids in ids.chunks(first.positions(4 * d)) {
            let mut body = Vec::new();
            residual::encode_u32s(ids, &mut body);
            out.extend(self.ask(first, Route::EMBED, |_| {}, &body, ids.len() * d)?);
        }
        Ok(out)
    }

    fn forward(&mut self, part: usize, slot: Slot, pos: usize, residuals: Vec<f32>) -> Result<Vec<f32>, EvaluateError> {
        let d = self.info.hidden_dim;
        let station = &self.stations[part];
        let positions = station.positions(4 * d);
        let mut out = Vec::with_capacity(residuals.len());
        for (index, rows) in residuals.chunks(positions * d).enumerate() {
            let mut body = Vec::new();
            residual::encode_f32s(rows, &mut body);
            let meta = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("session", &self.sessions[slot.index()])
                    .unsigned("pos", (pos + index * positions) as u64)
                    .unsigned("boundary", u64::from(station.boundary))
                    .string("config_fp", &self.info.config_fp);
            };
            out.extend(self.ask(station, Route::FORWARD, meta, &body, rows.len())?);
        }
        Ok(out)
    }

    fn logits(&mut self, residuals: &[f32]) -> Result<Vec<f32>, EvaluateError> {
        let (d, vocab) = (self.info.hidden_dim, self.info.vocab);
        let last = &self.stations[self.stations.len() - 1];
        if 4 * vocab > last.room {
            let got = last.room / 4;
            let station = last.client.address().to_string();
            return Err(EvaluateError::NoRoom { station, vocab, got });
        }
        let mut out = Vec::with_capacity(residuals.len() / d * vocab);
        for rows in residuals.chunks(last.positions(4 * vocab.max(d)) * d) {
            let mut body = Vec::new();
            residual::encode_f32s(rows, &mut body);
            let meta = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("return", "logits");
            };
            out.extend(self.ask(last, Route::LM_HEAD, meta, &body, rows.len() / d * vocab)?);
        }
        Ok(out)
    }
}
