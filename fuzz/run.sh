#!/usr/bin/env bash
# Builds the fuzz targets and runs each over its corpus: `fuzz/run.sh [SECONDS [TARGET...]]`.
#
# Does what `cargo fuzz run` does, without cargo-fuzz and on the stable toolchain. Inputs that the fuzzer finds go to a
# temporary folder, so that the committed corpus stays as it is; a crash is kept in fuzz/artifacts.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:-20}
[ $# -eq 0 ] || shift
host=$(rustc -vV | sed -n 's/^host: //p')
# With --target the flags reach the crates but not the build scripts, which could not link with them.
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0 \
  -Ccodegen-units=1 --cfg fuzzing" \
  cargo build --release --locked --bins --target "$host"
[ $# -gt 0 ] || set -- $(ls fuzz_targets | sed 's/\.rs$//')
found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT
for target in "$@"; do
  mkdir -p "$found/$target" "artifacts/$target"
  log=$found/$target.log
  if ! "target/$host/release/$target" "$found/$target" "corpus/$target" -max_total_time="$seconds" -max_len=4096 \
    -timeout=10 -rss_limit_mb=1024 -use_value_profile=1 -print_final_stats=1 \
    -artifact_prefix="artifacts/$target/" >"$log" 2>&1; then
    tail -n 60 "$log"
    echo "$target failed; the input is named above. Put it into fuzz/corpus/$target: cargo test runs what lies there" >&2
    exit 1
  fi
  stat() { sed -n "s/^stat::$1: *//p" "$log"; }
  echo "$target: $(stat number_of_executed_units) runs, $(stat average_exec_per_sec) a second," \
    "$(stat new_units_added) new inputs, at most $(stat peak_rss_mb) MiB"
done
