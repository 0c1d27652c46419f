#!/usr/bin/env bash
# Builds dist/: aeon-proto for wasm32-unknown-unknown, and the JavaScript that wasm-bindgen makes for it.
#
# With rustup, run `rustup target add wasm32-unknown-unknown` once. Where that target cannot be fetched, Debian's
# rustc-web and rust-web-src take its place: the standard library is then built here from source (minutes, once).
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
target=${CARGO_TARGET_DIR:-$PWD/target}
triple=wasm32-unknown-unknown
cargo=(cargo rustc --manifest-path "$root/Cargo.toml" --target-dir "$target" --locked -p aeon-proto --lib --features js
  --crate-type cdylib --profile wasm --target "$triple")

if [ -d "$(rustc --print target-libdir --target "$triple" 2>/dev/null)" ]; then
  "${cargo[@]}"
elif [ -x /usr/bin/rustc ] && [ -d /usr/lib/rustlib/src/rust/library/vendor ]; then
  sysroot=$(rustc --print sysroot)
  lld=$(find "$sysroot/lib/rustlib" -name rust-lld -type f 2>/dev/null | head -n 1)
  [ -n "$lld" ] || lld=$(command -v wasm-ld) || { echo "neither rust-lld nor wasm-ld found: apt-get install lld" >&2; exit 1; }
  # The sources are those of that compiler and of no other. build-std is unstable, hence the bootstrap variable.
  RUSTC=/usr/bin/rustc RUSTDOC=/usr/bin/rustdoc RUSTC_BOOTSTRAP=1 CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$lld \
    "${cargo[@]}" -Z build-std=std,panic_abort
else
  echo "no standard library for $triple: run 'rustup target add $triple'," >&2
  echo "or on Debian 'apt-get install --no-install-recommends rustc-web rust-web-src'" >&2
  exit 1
fi

cargo run --quiet --manifest-path bindgen/Cargo.toml --target-dir "$target/bindgen" --locked -- \
  "$target/$triple/wasm/aeon_proto.wasm" dist
cp src/*.js src/*.d.ts "$root"/LICENSE-* dist/
