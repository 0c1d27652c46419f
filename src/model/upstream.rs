//! Another station as a model: raw FORWARD and LM_HEAD are passed on to it.
//!
//! This puts a station of today's protocol in front of one that speaks only the raw routes. Its sessions are not known
//! here, so `session` and `pos` are passed along: a station that does not know them ignores them.

use std::{
    any::Any,
    ops::Range,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use aeon_proto::{payload::MetaWriter, residual, route::Route, status::Status};
use tokio::runtime::Handle;

use super::{Cache, CancelToken, Head, HeadOutput, LayerRange, ModelError, ModelInfo, session::random_name};
use crate::client::{Client, ClientError, ClientOptions, Reply, StationAddress, address::AddressError};

/// How often a waiting request looks whether it was cancelled.
const CANCEL_PERIOD: Duration = Duration::from_millis(10);

/// Why a station cannot be put in front of another.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    /// The address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// It does not answer.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// It says something else than the command line.
    #[error("{station} says {what} {got}, the command line {expected}")]
    Mismatch {
        /// Where it is.
        station: StationAddress,
        /// What differs.
        what: &'static str,
        /// On the command line.
        expected: String,
        /// By the station.
        got: String,
    },
    /// A station that does not say what it holds.
    #[error("{station} does not say which layers it holds; add --layers LO..HI")]
    LayersUnknown {
        /// Where it is.
        station: StationAddress,
    },
}

/// The original station may do one thing at a time, and answer HEALTH no sooner than what it is busy with.
fn options() -> ClientOptions {
    ClientOptions { health_interval: None, ..ClientOptions::default() }
}

/// The upstream backend.
#[derive(Debug)]
pub struct Upstream {
    info: ModelInfo,
    address: StationAddress,
    client: Mutex<Client>,
    runtime: Handle,
}

impl Upstream {
    /// Connects to the station behind this one. If it answers HELLO, the layers may be left out; a station that does not
    /// know HELLO is taken to hold the head if it holds any layer at all.
    ///
    /// # Errors
    /// See [`UpstreamError`].
    pub async fn connect(
        station: &str,
        hidden_dim: usize,
        vocab: usize,
        layers: Option<Range<u32>>,
    ) -> Result<Self, UpstreamError> {
        let address: StationAddress = station.parse()?;
        let client = Client::connect(&address, options()).await?;
        let info = match client.hello().await {
            Ok(hello) => {
                let mismatch = |what, expected: String, got: String| {
                    if expected == got {
                        return Ok(());
                    }
                    Err(UpstreamError::Mismatch { station: address.clone(), what, expected, got })
                };
                mismatch("hidden_dim", hidden_dim.to_string(), hello.model.hidden_dim.to_string())?;
                mismatch("vocab", vocab.to_string(), hello.model.vocab.to_string())?;
                if let Some(layers) = layers {
                    mismatch("layers", format!("{layers:?}"), format!("{:?}", hello.layers()))?;
                }
                ModelInfo {
                    layers: hello.layers(),
                    name: hello.model.name,
                    hidden_dim,
                    vocab,
                    n_layers: hello.model.n_layers,
                    max_position: hello.model.max_position,
                    bos: hello.model.bos,
                    eos: hello.model.eos,
                    config_fp: hello.model.config_fp,
                    layers_fp: hello.model.layers_fp,
                }
            }
            Err(ClientError::Vent {
                status: Status::NOT_FOUND | Status::NOT_IMPLEMENTED | Status::BAD_REQUEST,
                ..
            }) => {
                let layers = layers.ok_or_else(|| UpstreamError::LayersUnknown { station: address.clone() })?;
                let config = format!("{{\"family\":\"upstream\",\"hidden_dim\":{hidden_dim},\"vocab\":{vocab}}}");
                ModelInfo {
                    name: format!("upstream:{address}"),
                    hidden_dim,
                    vocab,
                    n_layers: layers.end,
                    layers,
                    max_position: 1 << 24,
                    bos: None,
                    eos: Vec::new(),
                    config_fp: super::fingerprint(config.as_bytes()),
                    layers_fp: super::fingerprint(address.to_string().as_bytes()),
                }
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Self { info, address, client: Mutex::new(client), runtime: Handle::current() })
    }

    /// Sends a request from a worker thread and waits for its answer.
    fn request(
        &self,
        route: Route,
        meta: &(impl Fn(&mut MetaWriter<'_, '_>) + Sync),
        body: &[u8],
        cancel: &CancelToken,
    ) -> Result<Reply, ModelError> {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let reply = self.runtime.block_on(async {
            let cancelled = async {
                while !cancel.is_cancelled() {
                    tokio::time::sleep(CANCEL_PERIOD).await;
                }
            };
            let exchange = async {
                match client.request(route, meta, body).await {
                    // The connection of an earlier request may have ended meanwhile: one new one is tried.
                    Err(ClientError::Closed { .. }) => {
                        let fresh = Client::connect(&self.address, options()).await?;
                        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = fresh.clone();
                        fresh.request(route, meta, body).await
                    }
                    reply => reply,
                }
            };
            tokio::select! {
                reply = exchange => Some(reply),
                () = cancelled => None,
            }
        });
        match reply {
            None => Err(ModelError::Cancelled),
            Some(Ok(reply)) => Ok(reply),
            Some(Err(error)) => {
                let expected_pos = error.vent_number("expected_pos").and_then(|pos| usize::try_from(pos).ok());
                match error {
                    ClientError::Vent { status, text, .. } => Err(ModelError::Upstream { status, text, expected_pos }),
                    error => Err(self.unreachable(error)),
                }
            }
        }
    }

    fn unreachable(&self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ModelError {
        ModelError::UpstreamUnreachable { address: self.address.to_string(), source: source.into() }
    }

    /// The f32 body of a reply, of the length that the request implies.
    fn floats(&self, reply: &Reply, expected: usize) -> Result<Vec<f32>, ModelError> {
        match residual::decode_f32s(&reply.body) {
            Ok(values) if values.len() == expected => Ok(values.into_owned()),
            _ => Err(self.unreachable(format!("{} f32 values expected, {} bytes came", expected, reply.body.len()))),
        }
    }

    fn words(&self, reply: &Reply, expected: usize) -> Result<Vec<u32>, ModelError> {
        match residual::decode_u32s(&reply.body) {
            Ok(values) if values.len() == expected => Ok(values.into_owned()),
            _ => Err(self.unreachable(format!("{} u32 values expected, {} bytes came", expected, reply.body.len()))),
        }
    }
}

/// The far station's session, and how many positions it holds as far as is known here.
#[derive(Debug)]
struct RemoteCache {
    session: String,
    len: usize,
}

impl Cache for RemoteCache {
    fn len(&self) -> usize {
        self.len
    }
    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
    fn bytes(&self) -> usize {
        self.session.len()
    }
}

impl LayerRange for Upstream {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn new_cache(&self) -> Box<dyn Cache> {
        Box::new(RemoteCache { session: random_name(), len: 0 })
    }

    fn cache_bytes_per_position(&self) -> usize {
        0
    }

    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        let mut body = Vec::new();
        residual::encode_u32s(ids, &mut body);
        let reply = self.request(Route::EMBED, &|_: &mut MetaWriter<'_, '_>| (), &body, &CancelToken::default())?;
        self.floats(&reply, ids.len() * self.info.hidden_dim)
    }

    fn forward(
        &self,
        cache: &mut dyn Cache,
        residuals: Vec<f32>,
        cancel: &CancelToken,
    ) -> Result<Vec<f32>, ModelError> {
        let cache = (cache as &mut dyn Any).downcast_mut::<RemoteCache>().ok_or(ModelError::ForeignCache)?;
        let mut body = Vec::new();
        residual::encode_f32s(&residuals, &mut body);
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            meta.string("session", &cache.session).unsigned("pos", cache.len as u64);
        };
        let reply = match self.request(Route::FORWARD, &meta, &body, cancel) {
            // The far station has lost the session, so nothing of it is held here either: whoever asks sends it again.
            Err(error @ ModelError::Upstream { expected_pos: Some(expected), .. }) => {
                cache.truncate(expected);
                return Err(error);
            }
            reply => reply?,
        };
        let output = self.floats(&reply, residuals.len())?;
        cache.len += residuals.len() / self.info.hidden_dim;
        Ok(output)
    }

    fn head(&self, residuals: &[f32], want: Head, cancel: &CancelToken) -> Result<HeadOutput, ModelError> {
        let seq = residuals.len() / self.info.hidden_dim;
        let mut body = Vec::new();
        residual::encode_f32s(residuals, &mut body);
        let meta = |meta: &mut MetaWriter<'_, '_>| {
            match want {
                Head::Token => meta,
                Head::TopK(k) => meta.string("return", "topk").unsigned("top_k", k as u64),
                Head::Logits => meta.string("return", "logits"),
            };
        };
        let reply = self.request(Route::LM_HEAD, &meta, &body, cancel)?;
        let kind = reply.string("body");
        match (want, kind.as_deref()) {
            (Head::Token, _) => Ok(HeadOutput::Tokens(self.words(&reply, seq)?)),
            (Head::Logits, Some("logits")) => Ok(HeadOutput::Logits(self.floats(&reply, seq * self.info.vocab)?)),
            (Head::TopK(k), Some("topk")) => {
                let words = self.words(&reply, seq * k * 2)?;
                let (mut ids, mut logits) = (Vec::new(), Vec::new());
                for row in words.chunks(2 * k) {
                    let (row_ids, row_logits) = row.split_at(k);
                    ids.extend_from_slice(row_ids);
                    logits.extend(row_logits.iter().map(|bits| f32::from_bits(*bits)));
                }
                Ok(HeadOutput::TopK { k, ids, logits })
            }
            // A station of the raw routes only returns tokens, whatever it is asked for.
            _ => Err(ModelError::Upstream {
                status: Status::NOT_IMPLEMENTED,
                text: "it returns tokens only; ask for \"return\":\"token\"".to_owned(),
                expected_pos: None,
            }),
        }
    }
}
