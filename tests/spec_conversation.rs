//! The conversation in `proto/SPEC.md`, held with a station: every request there is sent, every answer must be the bytes
//! that stand there.

#![allow(clippy::unwrap_used, reason = "a test stops at its first failure")]

mod common;

use common::{Lab, within};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

/// The frames under the heading, as the hex says, without the prefix that the first one is shown with.
fn frames() -> Vec<Vec<u8>> {
    let text = include_str!("../proto/SPEC.md");
    let (_, conversation) = text.split_once("\n## A conversation\n").unwrap();
    let (conversation, _) = conversation.split_once("\n## ").unwrap();
    let mut found = Vec::new();
    for part in conversation.split("```frame ").skip(1) {
        let (info, rest) = part.split_once('\n').unwrap();
        let (hex, _) = rest.split_once("```").unwrap();
        let digits: Vec<u8> = hex.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
        let mut bytes: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        if info.starts_with("prefixed ") {
            bytes.drain(..4);
        }
        found.push(bytes);
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_station_answers_as_the_specification_shows() {
    let lab = Lab::start("identity:2", |_| ()).await;
    let mut stream = UnixStream::connect(&lab.uds).await.unwrap();
    let (mut asked, mut answered) = (0, 0);
    for frame in frames() {
        if frame[6] & 0x20 == 0 {
            stream.write_all(&(frame.len() as u32).to_be_bytes()).await.unwrap();
            stream.write_all(&frame).await.unwrap();
            asked += 1;
            continue;
        }
        let mut answer = vec![0; 4 + frame.len()];
        within("an answer", stream.read_exact(&mut answer)).await.unwrap();
        assert_eq!(answer[..4], (frame.len() as u32).to_be_bytes());
        assert_eq!(answer[4..], frame, "{}", String::from_utf8_lossy(&answer));
        answered += 1;
    }
    // The cancel of nothing has no answer.
    assert_eq!((asked, answered), (9, 8));
}
