//! A rolling change of basis under load: each station gets the new one, clients move to it, each station gives the old one
//! up. Nobody notices.

use aeon_proto::{pcar::PcarBody, route::Route};
use aeon_station::client::{Pipeline, StationAddress, Want, Wire, pipeline::PcarWire};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::timeout,
};

use crate::{
    fallback::{addresses, bases, basis, connect, mesh, prompt},
    proxy::Proxy,
    support::{PATIENCE, TestNode, file},
};

const CLIENTS: u64 = 3;
const STEPS: usize = 4;

/// What clients are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Use the basis with this fingerprint.
    Use(u32),
    Stop,
}

fn wire(basis_fp: u32) -> Wire {
    Wire::Pcar(PcarWire { basis_fp: Some(basis_fp), ..PcarWire::default() })
}

/// A client that generates the same text again and again, and follows orders between the tokens.
struct Worker {
    pipeline: Pipeline,
    client: u64,
    basis_fp: u32,
    orders: watch::Receiver<Order>,
    steps: watch::Sender<u64>,
    moved: mpsc::UnboundedSender<u64>,
}

impl Worker {
    /// One text from the beginning.
    async fn text(&mut self) -> Vec<u32> {
        self.pipeline.reset().await.unwrap();
        let mut ids = prompt(self.client, 12);
        let mut tokens = Vec::new();
        for _ in 0..STEPS {
            let next = self.pipeline.extend(&ids, Want::Token).await.unwrap();
            tokens.push(next.ids[0]);
            ids = next.ids;
            self.steps.send_modify(|steps| *steps += 1);
            let order = *self.orders.borrow();
            match order {
                Order::Use(wanted) if wanted != self.basis_fp => {
                    self.pipeline.refresh().await.unwrap();
                    self.pipeline.set_wire(wire(wanted));
                    self.basis_fp = wanted;
                    self.moved.send(self.client).unwrap();
                }
                Order::Use(_) | Order::Stop => {}
            }
        }
        tokens
    }

    /// Texts until the order to stop; every one is compared if it is known what should come.
    async fn run(mut self, expected: Option<Vec<u32>>) -> Pipeline {
        while *self.orders.borrow() != Order::Stop {
            let tokens = self.text().await;
            if let Some(expected) = &expected {
                assert_eq!(&tokens, expected, "client {}", self.client);
            }
        }
        self.pipeline
    }
}

fn refused(pipeline: &Pipeline) -> Vec<u64> {
    pipeline.stages().iter().map(|stage| stage.traffic.refused).collect()
}

/// Waits until every client has made some more tokens.
async fn progress(clients: &mut [watch::Receiver<u64>]) {
    for steps in clients {
        let target = *steps.borrow() + 3;
        timeout(PATIENCE, steps.wait_for(|steps| *steps >= target)).await.unwrap().unwrap();
    }
}

async fn change_under_load(udp: bool) {
    let (old, new) = (basis(16, "old"), basis(16, "new"));
    let (old_fp, new_fp) = (file(&old).basis_fp(), file(&new).basis_fp());
    assert_ne!(old_fp, new_fp);
    let nodes = mesh([&[&old]; 3]).await;
    let proxy = Proxy::start(&nodes[2].socket);
    let mut stations: Vec<StationAddress> = nodes.iter().map(TestNode::udp).collect();
    if !udp {
        stations = addresses(&nodes);
        stations[2] = proxy.address();
    }
    let (orders, listen) = watch::channel(Order::Use(old_fp));
    let (moved, mut has_moved) = mpsc::unbounded_channel();
    let (mut workers, mut clients) = (JoinSet::new(), Vec::new());
    for client in 0..CLIENTS {
        let (steps, receiver) = watch::channel(0);
        let (orders, moved) = (listen.clone(), moved.clone());
        let pipeline = connect(&stations, wire(old_fp)).await;
        let mut worker = Worker { pipeline, client, basis_fp: old_fp, orders, steps, moved };
        let expected = worker.text().await;
        clients.push(receiver);
        workers.spawn(worker.run(Some(expected)));
    }
    progress(&mut clients).await;
    for node in &nodes {
        node.replace(bases(&[&old, &new]));
        progress(&mut clients).await;
    }
    orders.send(Order::Use(new_fp)).unwrap();
    for _ in 0..CLIENTS {
        timeout(PATIENCE, has_moved.recv()).await.unwrap().unwrap();
    }
    for node in &nodes {
        node.replace(bases(&[&new]));
        progress(&mut clients).await;
    }
    orders.send(Order::Stop).unwrap();
    let pipelines = timeout(PATIENCE, workers.join_all()).await.unwrap();
    assert_eq!(pipelines.len() as u64, CLIENTS);
    for pipeline in &pipelines {
        assert_eq!(refused(pipeline), [0, 0, 0]);
        for stage in &pipeline.stages()[1..] {
            assert_eq!(stage.traffic.compressed, stage.traffic.requests, "nothing was sent raw");
        }
    }
    for node in &nodes {
        assert_eq!(node.errors(), 0);
    }
    if !udp {
        let used: Vec<u32> = proxy
            .requests()
            .iter()
            .filter(|seen| seen.route == Route::FORWARD_PCA)
            .map(|seen| PcarBody::decode(&seen.body).unwrap().basis_fp())
            .collect();
        assert!(used.contains(&old_fp) && used.contains(&new_fp));
        assert_eq!(used.last(), Some(&new_fp));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_and_no_token_differs_while_the_basis_of_a_loaded_mesh_is_changed() {
    change_under_load(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_over_udp() {
    change_under_load(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_basis_that_is_withdrawn_under_load_is_raw_from_then_on_and_no_request_fails() {
    // What an operator should not do: the old basis goes while clients use it.
    let old = basis(16, "old");
    let nodes = mesh([&[&old]; 3]).await;
    let old_fp = file(&old).basis_fp();
    let ((steps, mut seen), (orders, listen)) = (watch::channel(0), watch::channel(Order::Use(old_fp)));
    let pipeline = connect(&addresses(&nodes), wire(old_fp)).await;
    let moved = mpsc::unbounded_channel().0;
    let worker = Worker { pipeline, client: 1, basis_fp: old_fp, orders: listen, steps, moved };
    let worker = tokio::spawn(worker.run(None));
    for node in nodes.iter().rev() {
        progress(std::slice::from_mut(&mut seen)).await;
        node.replace(bases(&[]));
    }
    progress(std::slice::from_mut(&mut seen)).await;
    orders.send(Order::Stop).unwrap();
    let pipeline = timeout(PATIENCE, worker).await.unwrap().unwrap();
    // One refusal for each station that got components; what it then gets is raw.
    let expected = [0, 1, 1];
    assert_eq!(refused(&pipeline), expected);
    assert_eq!(nodes.iter().map(TestNode::errors).collect::<Vec<_>>(), expected);
}
