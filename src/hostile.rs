//! Any bytes, and valid ones with a few faults, through what reads bytes and texts of others in this crate. The checks and
//! the seeds are those of the fuzz targets.

#[path = "../fuzz/src/http_body.rs"]
mod http_body;
#[path = "../proto/tests/support/judge.rs"]
mod judge;
#[path = "../fuzz/src/settings.rs"]
mod settings;
#[path = "../fuzz/src/stream.rs"]
mod stream;

use std::path::Path;

use proptest::{collection::vec, option::of, prelude::*};

use crate::config::{Config, LimitSettings, ListenSettings, LogSettings, ModelSettings, Settings};

fn judge(target: &str, reader: fn(&[u8])) {
    judge::judge(&Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus"), target, reader);
}

#[test]
fn a_stream_reads_the_same_however_it_is_cut() {
    judge("frame_stream", stream::chunks);
}

#[test]
fn configuration_files() {
    judge("config", settings::file);
}

#[test]
fn bodies_and_keys_over_http() {
    judge("http_body", http_body::body);
}

/// A number of any size, often one at an edge.
fn number() -> impl Strategy<Value = Option<usize>> {
    of(prop_oneof![
        4 => 0_usize..3000,
        1 => any::<usize>(),
        1 => prop::sample::select(vec![usize::MAX, i64::MAX as usize, u32::MAX as usize, u32::MAX as usize + 1]),
    ])
}

fn text(examples: &'static [&'static str]) -> impl Strategy<Value = Option<String>> {
    of(prop_oneof![prop::sample::select(examples).prop_map(str::to_owned), any::<String>()])
}

prop_compose! {
    fn limits()(
        bytes in vec(number(), 9),
        counts in vec(number(), 5),
        seconds in vec(number(), 4),
    ) -> LimitSettings {
        let second = |n: usize| seconds[n].map(|value: usize| value as u64);
        LimitSettings {
            max_frame: bytes[0],
            max_datagram: bytes[1],
            max_seq: bytes[2],
            max_queued: bytes[3],
            max_queued_bytes: bytes[4],
            max_buffered_bytes: bytes[5],
            max_session_bytes: bytes[6],
            max_replay_bytes: bytes[7],
            max_shard_bytes: bytes[8],
            max_connections: counts[0],
            max_in_flight: counts[1],
            max_sessions: counts[2],
            max_shard_entries: counts[3],
            max_batch: counts[4],
            session_idle: second(0),
            frame_timeout: second(1),
            idle_timeout: second(2),
            grace: second(3),
        }
    }
}

prop_compose! {
    fn any_settings()(
        name in text(&["n"]),
        model in text(&["demo", "identity:8", "identity:8:9", "upstream:uds:/a,1,2", "a.gguf", ""]),
        layers in text(&["0..1", "3..2", "0..4294967296"]),
        mode in text(&["660", "777", "1000", "+7", ""]),
        allow in of(vec(text(&["10.0.0.0/8", "::1", "fd00::/129"]).prop_map(Option::unwrap_or_default), 0..3)),
        uds in text(&["/run/a.sock", "", "a\0b"]),
        log_level in text(&["warn", "warn,aeon_station=debug", "a=b=c", "[x{y=1}]=info"]),
        (workers, auth_window) in (number(), number()),
        stock_clients in of(any::<bool>()),
        limits in limits(),
    ) -> Settings {
        Settings {
            name,
            model: ModelSettings { model, layers, workers, ..ModelSettings::default() },
            listen: ListenSettings {
                uds: uds.map(Into::into),
                uds_mode: mode,
                admin_allow: allow.clone(),
                allow,
                auth_window: auth_window.map(|seconds| seconds as u64),
                stock_clients,
                ..ListenSettings::default()
            },
            limits,
            log: LogSettings { log_level, ..LogSettings::default() },
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Also those that no file can hold, from flags and the environment.
    #[test]
    fn settings_are_refused_or_can_be_served_with(settings in any_settings()) {
        if let Ok(text) = settings.to_toml() {
            prop_assert_eq!(Settings::parse(&text).ok(), Some(settings.clone()));
        }
        match Config::try_from(settings) {
            Err(error) => drop(crate::causes::with_causes(&error)),
            Ok(config) => {
                // What panics with numbers that are out of its range.
                let now = std::time::Instant::now();
                let longest = config.connection.half_frame_timeout.saturating_mul(17);
                prop_assert!(now.checked_add(longest).is_some());
                prop_assert!(now.checked_add(config.connection.idle_timeout).is_some());
                prop_assert!(config.max_connections <= tokio::sync::Semaphore::MAX_PERMITS);
                prop_assert!((1..=1024).contains(&config.workers));
                prop_assert!(config.uds_options.mode <= 0o777);
            }
        }
    }
}
