//! What crosses the boundaries between the stations of a mesh: the residuals that a basis is fitted to.

use aeon_proto::{payload::MetaWriter, residual, route::Route};
use bytes::Bytes;

use super::{
    error::ClientError,
    pass::{Link, check_reply},
    pipeline::{FRAME_OVERHEAD, Pipeline, Stage},
};
use crate::model::session::random_name;

/// The residuals of one boundary for some positions, `[seq, d]` row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Crossing {
    /// The number of layers already applied.
    pub boundary: u32,
    /// The residuals.
    pub values: Vec<f32>,
}

impl Pipeline {
    /// The boundaries that residuals cross here: 0, and the upper end of each station.
    pub fn boundaries(&self) -> impl Iterator<Item = u32> {
        std::iter::once(0).chain(self.stages.iter().map(|stage| stage.hello.layers().end))
    }

    /// Runs `ids` through the mesh as a text of their own and returns what crossed each boundary, raw, in increasing order.
    /// The pipeline's own session is not touched.
    ///
    /// # Errors
    /// See [`ClientError`]; the stations then keep the session until it expires.
    pub async fn residuals(&mut self, ids: &[u32]) -> Result<Vec<Crossing>, ClientError> {
        let session = random_name();
        let mut crossings: Vec<_> =
            self.boundaries().map(|boundary| Crossing { boundary, values: Vec::new() }).collect();
        let chunk = self.stages.iter().map(positions_per_request).min().unwrap_or(1);
        for (index, ids) in ids.chunks(chunk).enumerate() {
            self.cross(&session, ids, index * chunk, &mut crossings).await?;
        }
        for stage in &self.stages {
            let name = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("session", &session);
            };
            stage.client.request(Route::RESET, name, &[]).await?;
        }
        Ok(crossings)
    }

    /// One request to each station, and an EMBED before them.
    async fn cross(
        &mut self,
        session: &str,
        ids: &[u32],
        pos: usize,
        crossings: &mut [Crossing],
    ) -> Result<(), ClientError> {
        let mut body = Vec::new();
        residual::encode_u32s(ids, &mut body);
        let mut body = Bytes::from(body);
        let mut keep = |index: usize, stage: &Stage, body: &Bytes| {
            let values = residual::decode_f32s(body).map_err(|error| bad(stage, error.to_string()))?;
            residual::check_finite_values(&values).map_err(|error| bad(stage, error.to_string()))?;
            crossings.get_mut(index).into_iter().for_each(|crossing| crossing.values.extend_from_slice(&values));
            Ok::<(), ClientError>(())
        };
        for (index, stage) in self.stages.iter_mut().enumerate() {
            let hello = &stage.hello;
            if index == 0 {
                let meta = |meta: &mut MetaWriter<'_, '_>| {
                    meta.string("config_fp", &hello.model.config_fp);
                };
                let reply = stage.client.request(Route::EMBED, meta, &body).await?;
                let (expected, got) = (4 * ids.len() * hello.model.hidden_dim, reply.body.len());
                if expected != got {
                    return Err(bad(stage, format!("bytes of embedding {expected} expected, {got} came")));
                }
                keep(0, stage, &reply.body)?;
            }
            let hello = &stage.hello;
            let meta = |meta: &mut MetaWriter<'_, '_>| {
                meta.string("session", session)
                    .unsigned("pos", pos as u64)
                    .unsigned("boundary", u64::from(hello.layers[0]))
                    .string("config_fp", &hello.model.config_fp);
                if index == 0 {
                    meta.string("in", "ids");
                }
            };
            let reply = stage.client.request(Route::FORWARD, meta, &body).await?;
            stage.traffic.requests += 1;
            stage.traffic.positions += ids.len() as u64;
            stage.traffic.sent += body.len() as u64;
            stage.traffic.received += reply.body.len() as u64;
            check_reply(stage, &reply, &["f32"], (pos, ids.len()), Link::Raw)?;
            keep(index + 1, stage, &reply.body)?;
            body = reply.body;
        }
        Ok(())
    }
}

fn bad(stage: &Stage, problem: String) -> ClientError {
    stage.client.bad_reply(Route::FORWARD, problem)
}

/// Positions whose residuals fit a request and a reply of a station.
fn positions_per_request(stage: &Stage) -> usize {
    let limits = stage.hello.limits;
    let max = if stage.client.is_udp() { limits.max_datagram } else { limits.max_frame };
    let room = max.saturating_sub(FRAME_OVERHEAD) / (4 * stage.hello.model.hidden_dim.max(1));
    room.min(limits.max_seq).max(1)
}
