//! A mesh with replay caches gives exactly the tokens of an uninterrupted run, whatever is in the caches.

use aeon_proto::{methodology::MethodologySpec, pcab::PcabWriter, route::Route};
use aeon_station::{
    client::{
        Client, ClientError, ClientOptions, Pipeline, Want,
        pipeline::{PcarWire, Wire},
    },
    replay::key::{Conditions, PrefixKey, prefix_hash},
};

use super::support::{
    Carrier::{Tcp, Udp, Unix},
    models, prompt, run, start, unsplit,
};

const MESHES: &[&[super::support::Carrier]] =
    &[&[Unix], &[Udp], &[Tcp], &[Unix, Unix], &[Udp, Udp, Udp], &[Tcp, Tcp], &[Unix, Udp, Tcp]];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_continues_exactly_where_a_prefill_would() {
    for model in models() {
        // 61 positions leave a remainder of one in chunks of 3 and of 6; 1 is a prompt without a second position.
        for (prompt_len, count) in [(61, 12), (1, 4)] {
            let ids = prompt(&model, prompt_len, 1);
            let expected = unsplit(&*model.whole, &ids, count);
            for mesh in MESHES {
                let stations = start(&model, mesh, |_, _| ()).await;
                let mut first = stations.pipeline(true).await;
                assert_eq!(run(&mut first, &ids, count).await, expected, "{mesh:?}");
                first.captured().await;
                let stats = first.replay_stats();
                assert_eq!((stats.skipped, stats.prefilled, stats.captures), (0, 1, mesh.len() as u64));
                // The first session goes on as if nothing had been captured, and a new one begins where it began.
                let mut second = stations.pipeline(true).await;
                assert_eq!(run(&mut second, &ids, count).await, expected, "{mesh:?}");
                assert_eq!((second.replay_stats().skipped, second.replay_stats().prefilled), (1, 0), "{mesh:?}");
                let longer = unsplit(&*model.whole, &ids, count + 3);
                let more = run(&mut first, &[expected[count - 1]], 3).await;
                assert_eq!(more, longer[count..], "{mesh:?}");
                // What a session holds after a replay can be captured again, and rewound.
                second.rewind(prompt_len - 1);
                assert_eq!(run(&mut second, &ids[prompt_len - 1..], count).await, expected, "{mesh:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logits_after_a_replay_are_those_of_a_prefill_bit_for_bit() {
    let model = &models()[0];
    let ids = prompt(model, 40, 5);
    let stations = start(model, &[Unix, Udp], |_, _| ()).await;
    let mut plain = stations.pipeline(false).await;
    let expected = plain.extend(&ids, Want::TopK(16)).await.unwrap();
    for skipped in [0, 1] {
        let mut pipeline = stations.pipeline(true).await;
        let next = pipeline.extend(&ids, Want::TopK(16)).await.unwrap();
        assert_eq!(pipeline.replay_stats().skipped, skipped);
        assert_eq!(next.ids, expected.ids);
        assert!(next.logits.iter().zip(&expected.logits).all(|(a, b)| a.to_bits() == b.to_bits()));
        pipeline.captured().await;
    }
}

/// Two prompts that begin alike, in turns: what one leaves behind must not show in the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interleaved_prompts_keep_apart() {
    for model in models() {
        let shared = prompt(&model, 30, 2);
        let [a, b] = [3, 4].map(|seed| [shared.clone(), prompt(&model, 9, seed)].concat());
        let expected = [&a, &b].map(|ids| unsplit(&*model.whole, ids, 8));
        assert_ne!(expected[0], expected[1]);
        // With room for one entry alone each capture evicts the one before.
        for (mesh, tight) in
            [(&[Unix][..], false), (&[Unix], true), (&[Unix, Udp, Tcp], false), (&[Tcp, Udp, Unix], true)]
        {
            let stations = start(&model, mesh, |_, settings| {
                if tight {
                    settings.limits.max_replay_bytes = Some(130 << 10);
                }
            })
            .await;
            for late in [false, true] {
                let mut pipeline = stations.pipeline(true).await;
                for turn in [0, 0, 1, 0, 1, 0] {
                    let ids = [&a, &b][turn];
                    assert_eq!(run(&mut pipeline, ids, 8).await, expected[turn], "{mesh:?} tight {tight} late {late}");
                    if late {
                        // The same session, whose positions are replaced while captures are still on their way.
                        pipeline.rewind(0);
                    } else {
                        pipeline.captured().await;
                        pipeline.reset().await.unwrap();
                    }
                }
            }
            let tasks = [0, 0, 1, 0, 1, 0].map(|turn| {
                let (ids, expected) = ([&a, &b][turn].clone(), expected[turn].clone());
                let addresses = stations.addresses.clone();
                tokio::spawn(async move {
                    let mut pipeline = Pipeline::connect(&addresses, &ClientOptions::default()).await.unwrap();
                    pipeline.use_replay();
                    assert_eq!(run(&mut pipeline, &ids, 8).await, expected);
                    pipeline.captured().await;
                })
            });
            for task in tasks {
                task.await.unwrap();
            }
        }
    }
}

fn key(ids: &[u32], layers: std::ops::Range<u32>) -> PrefixKey {
    let (layer_lo, layer_hi) = (layers.start as u16, layers.end as u16);
    PrefixKey { prefix_hash: prefix_hash(ids), prefix_len: ids.len() as u32, layer_lo, layer_hi }
}

/// Makes one station forget an entry by capturing something else there, which takes its place.
async fn evict(pipeline: &Pipeline, index: usize, other: &[u32]) {
    let stage = &pipeline.stages()[index];
    let client = Client::connect(stage.address(), ClientOptions::default()).await.unwrap();
    let mut body = Vec::new();
    let width = stage.hello.model.hidden_dim;
    aeon_proto::residual::encode_f32s(&vec![0.25; width * other.len()], &mut body);
    for (chunk, body) in body.chunks(width * 4).enumerate() {
        let meta = |meta: &mut aeon_proto::payload::MetaWriter<'_, '_>| {
            meta.string("session", "evict").unsigned("pos", chunk as u64);
        };
        client.request(Route::FORWARD, meta, body).await.unwrap();
    }
    let key = key(other, stage.hello.layers());
    client.capture_session(&key, &Conditions::default(), "evict").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entry_evicted_at_one_station_means_prefill_at_all() {
    let model = &models()[0];
    let no_station = Pipeline::connect(&[], &ClientOptions::default()).await;
    assert!(matches!(no_station, Err(ClientError::Mesh { .. })));
    let ids = prompt(model, 33, 6);
    let expected = unsplit(&*model.whole, &ids, 6);
    for mesh in [&[Unix][..], &[Unix, Udp, Tcp]] {
        for victim in 0..mesh.len() {
            // Room for one prompt of 33 positions: keys and values of 64 numbers each in every layer.
            let layers = if mesh.len() == 1 { [6, 0, 0] } else { [2, 3, 1] };
            let room = |index: usize| 40 * layers[index] * 2 * 64 * 4 + 2048;
            let stations =
                start(model, mesh, |index, settings| settings.limits.max_replay_bytes = Some(room(index))).await;
            let mut first = stations.pipeline(true).await;
            run(&mut first, &ids, 1).await;
            first.captured().await;
            evict(&first, victim, &prompt(model, 33, 7)).await;
            let mut second = stations.pipeline(true).await;
            assert_eq!(run(&mut second, &ids, 6).await, expected);
            assert_eq!(second.replay_stats().skipped, 0, "victim {victim}");
            second.captured().await;
        }
    }
}

/// Between the answer to a replay and its use the session itself is lost at one station.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_lost_after_its_replay_is_computed_again() {
    let model = &models()[0];
    let ids = prompt(model, 33, 8);
    let expected = unsplit(&*model.whole, &ids, 6);
    for mesh in [&[Udp][..], &[Unix, Udp, Tcp]] {
        let stations = start(model, mesh, |_, _| ()).await;
        let mut first = stations.pipeline(true).await;
        run(&mut first, &ids, 1).await;
        first.captured().await;
        for victim in 0..mesh.len() {
            let mut second = stations.pipeline(true).await;
            let token = run(&mut second, &ids, 1).await;
            assert_eq!((token[0], second.replay_stats().skipped), (expected[0], 1));
            let client = Client::connect(&stations.addresses[victim], ClientOptions::default()).await.unwrap();
            let session = second.session().to_owned();
            let reset = |meta: &mut aeon_proto::payload::MetaWriter<'_, '_>| {
                meta.string("session", &session);
            };
            client.request(Route::RESET, reset, &[]).await.unwrap();
            assert_eq!(run(&mut second, &token, 5).await, expected[1..], "victim {victim}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_station_that_was_started_again_means_prefill() {
    let model = &models()[0];
    let ids = prompt(model, 20, 9);
    let expected = unsplit(&*model.whole, &ids, 4);
    let mut stations = start(model, &[Tcp, Tcp], |_, _| ()).await;
    let mut first = stations.pipeline(true).await;
    run(&mut first, &ids, 1).await;
    first.captured().await;
    drop(first);
    let address = stations.nodes[1].as_ref().unwrap().tcp();
    stations.nodes[1].take().unwrap().kill().await;
    let layers = format!("{}..6", model.cuts[1]);
    let mut settings = aeon_station::config::Settings::default();
    settings.model.layers = Some(layers);
    settings.listen.tcp = address;
    let config = aeon_station::config::Config::try_from(settings).unwrap();
    stations.nodes[1] = Some(aeon_station::daemon::Node::start(&config).await.unwrap());
    let mut second = stations.pipeline(true).await;
    assert_eq!(run(&mut second, &ids, 4).await, expected);
    assert_eq!(second.replay_stats().skipped, 0);
    second.captured().await;
    let mut third = stations.pipeline(true).await;
    assert_eq!(run(&mut third, &ids, 4).await, expected);
    assert_eq!(third.replay_stats().skipped, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_clients_that_miss_at_once_leave_one_entry() {
    let model = &models()[0];
    let ids = prompt(model, 24, 10);
    let expected = unsplit(&*model.whole, &ids, 3);
    let stations = start(model, &[Unix, Udp], |_, _| ()).await;
    let clients = (0..64).map(|number| {
        let (addresses, ids, expected) = (stations.addresses.clone(), ids.clone(), expected.clone());
        tokio::spawn(async move {
            let mut pipeline = Pipeline::connect(&addresses, &ClientOptions::default()).await.unwrap();
            pipeline.use_replay();
            let first = run(&mut pipeline, &ids, 1).await;
            // Every fourth goes away while its captures are on their way.
            if number % 4 == 0 {
                return;
            }
            let rest = run(&mut pipeline, &first, 2).await;
            assert_eq!([first, rest].concat(), expected);
            pipeline.captured().await;
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    for index in 0..2 {
        let health = stations.health(index).await;
        assert_eq!(health["replay"]["entries"], 1, "{health}");
        assert_eq!(health["replay"]["evictions"], 0, "{health}");
    }
    let mut after = stations.pipeline(true).await;
    assert_eq!(run(&mut after, &ids, 3).await, expected);
    assert_eq!(after.replay_stats().skipped, 1);
}

/// A basis of the demo model's first coordinates at boundary 2: it loses almost everything.
fn write_lossy_basis(folder: &std::path::Path) {
    let spec = r#"{"model":"demo","hidden_dim":128,"k_rule":{"fixed":16},"boundaries":[2]}"#;
    let spec = MethodologySpec::parse(spec).unwrap();
    let mut rows = vec![0.0; 16 * 128];
    (0..16).for_each(|row| rows[row * 128 + row] = 1.0);
    let variance: Vec<f32> = (0..17).map(|n| if n == 16 { 200.0 } else { 16.0 - n as f32 }).collect();
    let mut writer = PcabWriter::new(128, spec.id());
    writer.entry(2, &[0.0; 128], &rows, &variance).unwrap();
    std::fs::create_dir(folder.join("methodologies")).unwrap();
    std::fs::write(folder.join("methodologies/lossy.json"), spec.canonical()).unwrap();
    std::fs::write(folder.join("lossy.pcab"), writer.finish("{}").unwrap()).unwrap();
}

/// What came through a basis and what came raw have the same prompt, and must not be taken for each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_that_came_through_a_basis_keep_apart_from_raw_ones() {
    let model = &models()[0];
    let folder = tempfile::tempdir().unwrap();
    write_lossy_basis(folder.path());
    let ids = prompt(model, 40, 13);
    let stations =
        start(model, &[Unix, Udp], |_, settings| settings.model.bases = Some(folder.path().to_owned())).await;
    let wires =
        [Wire::Exact, Wire::Pcar(PcarWire::default()), Wire::Pcar(PcarWire { k: Some(3), ..PcarWire::default() })];
    let mut expected = Vec::new();
    for wire in &wires {
        let mut plain = stations.pipeline(false).await;
        plain.set_wire(wire.clone());
        expected.push(run(&mut plain, &ids, 8).await);
    }
    assert_eq!(expected[0], unsplit(&*model.whole, &ids, 8));
    assert!(expected[0] != expected[1] && expected[1] != expected[2]);
    for (turn, skipped) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (1, 0), (0, 0), (0, 1), (2, 0), (2, 1)] {
        let mut pipeline = stations.pipeline(true).await;
        pipeline.set_wire(wires[turn].clone());
        assert_eq!(run(&mut pipeline, &ids, 8).await, expected[turn], "{turn}");
        assert_eq!(pipeline.replay_stats().skipped, skipped, "{turn}");
        pipeline.captured().await;
    }
}
