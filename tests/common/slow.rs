//! A model that does nothing until the test lets it, so that what happens meanwhile can be seen without sleeping.

use std::{
    any::Any,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use aeon_station::{
    model::{Cache, CancelToken, Head, HeadOutput, LayerRange, ModelError, ModelInfo},
    net::{
        connection::ConnectionOptions,
        listener::Acceptor,
        peer::{AllowList, CredentialList},
        shutdown::Shutdown,
        tcp::TcpCarrier,
        udp::UdpCarrier,
        uds::{self, UdsListener, UdsOptions},
    },
    station::{Station, limits::Limits},
};
use tempfile::TempDir;

use super::{PATIENCE, until};

#[derive(Debug, Default)]
struct Gate {
    /// Steps that may still be taken; `None` is as many as are wanted.
    open: Option<usize>,
    waiting: usize,
    begun: Vec<f32>,
    finished: Vec<f32>,
}

/// What the test and the model share.
#[derive(Debug, Default)]
pub struct Control {
    gate: Mutex<Gate>,
    changed: Condvar,
}

impl Control {
    /// Lets `count` more pieces of work through.
    pub fn allow(&self, count: usize) {
        let mut gate = self.gate.lock().unwrap();
        gate.open = gate.open.map(|open| open + count);
        self.changed.notify_all();
    }

    /// Lets everything through from now on.
    pub fn open(&self) {
        self.gate.lock().unwrap().open = None;
        self.changed.notify_all();
    }

    /// First values of the bodies whose work has begun, in order.
    pub fn begun(&self) -> Vec<f32> {
        self.gate.lock().unwrap().begun.clone()
    }

    /// First values of the bodies whose work was done (not cancelled), in order.
    pub fn finished(&self) -> Vec<f32> {
        self.gate.lock().unwrap().finished.clone()
    }

    /// Whether no work is waiting at the gate.
    pub fn idle(&self) -> bool {
        self.gate.lock().unwrap().waiting == 0
    }

    /// Waits until so many pieces of work have begun.
    pub async fn until_begun(&self, count: usize) {
        until("work has begun", async || self.begun().len() >= count).await;
    }

    fn pass(&self, mark: f32, cancel: &CancelToken) -> Result<(), ModelError> {
        let started = Instant::now();
        let mut gate = self.gate.lock().unwrap();
        gate.begun.push(mark);
        gate.waiting += 1;
        loop {
            if cancel.is_cancelled() {
                gate.waiting -= 1;
                return Err(ModelError::Cancelled);
            }
            match &mut gate.open {
                None => break,
                Some(0) => {}
                Some(open) => {
                    *open -= 1;
                    break;
                }
            }
            assert!(started.elapsed() < 2 * PATIENCE, "the test never let the model go on");
            gate = self.changed.wait_timeout(gate, Duration::from_millis(5)).unwrap().0;
        }
        gate.waiting -= 1;
        gate.finished.push(mark);
        Ok(())
    }
}

/// Returns its input like the identity model, once its gate is open; sessions count positions.
#[derive(Debug)]
pub struct SlowModel {
    info: ModelInfo,
    control: Arc<Control>,
    /// Whether the head waits instead of the layers.
    slow_head: bool,
}

#[derive(Debug)]
struct Count(usize);

impl Cache for Count {
    fn len(&self) -> usize {
        self.0
    }
    fn truncate(&mut self, len: usize) {
        self.0 = self.0.min(len);
    }
    fn bytes(&self) -> usize {
        self.0 * 100
    }
}

impl LayerRange for SlowModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }
    fn new_cache(&self) -> Box<dyn Cache> {
        Box::new(Count(0))
    }
    fn cache_bytes_per_position(&self) -> usize {
        100
    }
    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        Ok(ids.iter().flat_map(|id| [*id as f32, 0.0]).collect())
    }
    fn forward(
        &self,
        cache: &mut dyn Cache,
        residuals: Vec<f32>,
        cancel: &CancelToken,
    ) -> Result<Vec<f32>, ModelError> {
        let count = (cache as &mut dyn Any).downcast_mut::<Count>().unwrap();
        // As a real backend may: the cache is half written when the work is cancelled.
        count.0 += 1;
        if !self.slow_head {
            self.control.pass(residuals[0], cancel)?;
        }
        count.0 += residuals.len() / 2 - 1;
        Ok(residuals)
    }
    fn head(&self, residuals: &[f32], _: Head, cancel: &CancelToken) -> Result<HeadOutput, ModelError> {
        if self.slow_head {
            self.control.pass(residuals[0], cancel)?;
        }
        Ok(HeadOutput::Tokens(residuals.chunks(2).map(|row| row[0] as u32).collect()))
    }
}

/// How a [`SlowLab`] differs from the usual.
#[derive(Debug, Clone)]
pub struct SlowOptions {
    pub workers: usize,
    pub slow_head: bool,
    pub is_shut: bool,
    pub connection: ConnectionOptions,
    pub limits: Limits,
    pub connection_session: bool,
}

impl Default for SlowOptions {
    fn default() -> Self {
        Self {
            workers: 1,
            slow_head: false,
            is_shut: true,
            connection: ConnectionOptions::default(),
            limits: Limits::default(),
            connection_session: false,
        }
    }
}

/// A station with a [`SlowModel`], 2 wide, on every carrier.
#[derive(Debug)]
pub struct SlowLab {
    pub station: Arc<Station>,
    pub control: Arc<Control>,
    pub shutdown: Shutdown,
    pub uds: PathBuf,
    pub tcp: SocketAddr,
    pub udp: SocketAddr,
    _dir: TempDir,
}

impl Drop for SlowLab {
    fn drop(&mut self) {
        // The workers are joined when the station goes.
        self.control.open();
        self.shutdown.kill();
    }
}

impl SlowLab {
    pub async fn start(options: SlowOptions) -> Self {
        let control = Arc::new(Control::default());
        control.gate.lock().unwrap().open = options.is_shut.then_some(0);
        let info = ModelInfo {
            name: "slow".into(),
            hidden_dim: 2,
            vocab: 1000,
            n_layers: 1,
            layers: 0..1,
            max_position: 1 << 20,
            bos: None,
            eos: Vec::new(),
            config_fp: "00".into(),
            layers_fp: "00".into(),
        };
        let model = SlowModel { info, control: Arc::clone(&control), slow_head: options.slow_head };
        let station = Station::new("slow".into(), Arc::new(model), options.limits, options.workers).unwrap();
        let station = Arc::new(station);
        let shutdown = Shutdown::default();
        let acceptor =
            Acceptor::new(Arc::clone(&station), options.connection, options.connection_session, 1000, shutdown.clone());
        let dir = tempfile::tempdir().unwrap();
        let uds = dir.path().join("s");
        let socket = uds::bind(&uds, &UdsOptions::default()).unwrap();
        shutdown.spawn(UdsListener::new(socket, CredentialList::default()).unwrap().run(acceptor.clone()));
        let carrier = TcpCarrier::bind(([127, 0, 0, 1], 0).into(), AllowList::default()).await.unwrap();
        let tcp = carrier.local_addr().unwrap();
        shutdown.spawn(carrier.run(acceptor));
        let carrier = UdpCarrier::bind(([127, 0, 0, 1], 0).into(), AllowList::default()).unwrap();
        let udp = carrier.local_addr().unwrap();
        shutdown.spawn(carrier.run(Arc::clone(&station), shutdown.clone()));
        Self { station, control, shutdown, uds, tcp, udp, _dir: dir }
    }
}
