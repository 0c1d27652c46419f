//! Hits that are not whole: between the client and a real station sits a relay that spoils the answers to REPLAY.

use aeon_proto::{
    bwah::encode_amplituhedron_reply,
    frame::{Flags, Frame},
    payload::{FrameWriter, Payload},
    route::Route,
};
use aeon_station::client::{ClientOptions, Pipeline, StationAddress};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use super::support::{Carrier::Tcp, models, prompt, run, start, unsplit};

/// What the relay makes of an answer: other frames, or the end of the connection.
type Spoil = fn(&str, &[u8]) -> Option<(Flags, String, Vec<u8>)>;

async fn frame(from: &mut OwnedReadHalf) -> Option<Vec<u8>> {
    let len = from.read_u32().await.ok()?;
    let mut bytes = vec![0; len as usize];
    from.read_exact(&mut bytes).await.ok()?;
    Some(bytes)
}

async fn pass(to: &mut OwnedWriteHalf, bytes: &[u8]) -> Option<()> {
    // In one write: two would wait for each other's acknowledgement.
    to.write_all(&[&(bytes.len() as u32).to_be_bytes(), bytes].concat()).await.ok()
}

async fn relay(station: String, spoil: Spoil) -> StationAddress {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_station, mut to_station) = TcpStream::connect(&station).await.unwrap().into_split();
            tokio::spawn(async move {
                while let Some(bytes) = frame(&mut from_client).await {
                    if pass(&mut to_station, &bytes).await.is_none() {
                        return;
                    }
                }
            });
            tokio::spawn(async move {
                while let Some(bytes) = frame(&mut from_station).await {
                    let answer = Frame::decode_exact(&bytes).unwrap();
                    let mut out = bytes.clone();
                    if answer.stream_id == Route::AMPLITUHEDRON_REPLAY.0 {
                        let payload = Payload::decode(answer.payload).unwrap();
                        let Some((flags, meta, body)) = spoil(payload.meta, payload.body) else { return };
                        out.clear();
                        let mut frame = FrameWriter::new(&mut out, answer.stream_id, answer.sequence, flags);
                        frame.meta_text(&meta);
                        frame.body().extend_from_slice(&body);
                        frame.finish().unwrap();
                    }
                    if pass(&mut to_client, &out).await.is_none() {
                        return;
                    }
                }
            });
        }
    });
    StationAddress::Tcp(address.to_string())
}

fn ok(meta: &str, body: Vec<u8>) -> Option<(Flags, String, Vec<u8>)> {
    Some((Flags::SUCCESS, meta.to_owned(), body))
}

fn hit(tail: Option<&[f32]>) -> Vec<u8> {
    encode_amplituhedron_reply(true, tail, None)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hit_that_is_not_whole_is_computed_again() {
    let model = &models()[0];
    let ids = prompt(model, 25, 11);
    let expected = unsplit(&*model.whole, &ids, 5);
    let spoils: [(&str, Spoil); 14] = [
        ("a miss", |_, _| ok(r#"{"status":204}"#, vec![])),
        ("no body", |meta, _| ok(meta, vec![])),
        ("half a body", |meta, body| ok(meta, body[..body.len() / 2].to_vec())),
        ("a byte less", |meta, body| ok(meta, body[..body.len() - 1].to_vec())),
        ("a byte more", |meta, body| ok(meta, [body, b"x"].concat())),
        ("a bit turned", |meta, body| {
            let mut body = body.to_vec();
            *body.last_mut().unwrap() ^= 4;
            ok(meta, body)
        }),
        ("a hit without a tail", |meta, _| ok(meta, hit(None))),
        ("an empty tail", |meta, _| ok(meta, hit(Some(&[])))),
        ("a NaN", |meta, _| ok(meta, hit(Some(&[f32::NAN; 128])))),
        ("another width", |meta, _| ok(&meta.replace("128", "64"), hit(Some(&[0.5; 64])))),
        ("another length", |meta, body| ok(&meta.replace("\"prefix_len\":25", "\"prefix_len\":24"), body.to_vec())),
        ("not in the session", |meta, body| ok(&meta.replace("\"spliced\":true", "\"spliced\":false"), body.to_vec())),
        ("no meta", |_, body| ok("", body.to_vec())),
        ("an error", |_, _| Some((Flags::FAILURE, r#"{"status":500,"error":"broken"}"#.to_owned(), vec![]))),
    ];
    let stations = start(model, &[Tcp, Tcp, Tcp], |_, _| ()).await;
    let mut direct = stations.pipeline(true).await;
    run(&mut direct, &ids, 1).await;
    direct.captured().await;
    for (name, spoil) in spoils {
        // The first station of three and the last: the tail of the last is used, that of the others is not.
        for spoilt in [0, 2] {
            let mut addresses = stations.addresses.clone();
            let StationAddress::Tcp(station) = addresses[spoilt].clone() else { panic!() };
            addresses[spoilt] = relay(station, spoil).await;
            let mut pipeline = Pipeline::connect(&addresses, &ClientOptions::default()).await.unwrap();
            pipeline.use_replay();
            assert_eq!(run(&mut pipeline, &ids, 5).await, expected, "{name}");
            assert_eq!(pipeline.replay_stats().skipped, 0, "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ends_under_a_replay_means_prefill_on_a_new_one() {
    let model = &models()[0];
    let ids = prompt(model, 25, 12);
    let stations = start(model, &[Tcp], |_, _| ()).await;
    let StationAddress::Tcp(station) = stations.addresses[0].clone() else { panic!() };
    let address = relay(station, |_, _| None).await;
    let mut pipeline = Pipeline::connect(&[address], &ClientOptions::default()).await.unwrap();
    pipeline.use_replay();
    assert_eq!(run(&mut pipeline, &ids, 5).await, unsplit(&*model.whole, &ids, 5));
    assert_eq!(pipeline.replay_stats().skipped, 0);
}
