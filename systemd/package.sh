#!/usr/bin/env bash
# Builds the Debian package and prints its path. `systemd/package.sh [PROFILE]`, release unless another is named.
# Needs cargo-deb (cargo install cargo-deb --locked).
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${1:-release}
folder=$profile
[ "$profile" = dev ] && folder=debug
cargo build --profile "$profile" --locked --bins >&2
bin=${CARGO_TARGET_DIR:-target}/$folder

# What the programs say of themselves; [package.metadata.deb] of Cargo.toml takes it from here.
out=target/package
rm -rf "$out"
mkdir -p "$out"/man "$out"/bash "$out"/zsh "$out"/fish
"$bin/aeonctl" man "$out/man"
for program in aeon-node fat-station-flow fat-station-flow-udp aeonctl; do
  [ "$program" = aeonctl ] || "$bin/$program" --man >"$out/man/$program.1"
  for shell in bash zsh fish; do
    case $shell in bash) file=$program ;; zsh) file=_$program ;; fish) file=$program.fish ;; esac
    if [ "$program" = aeonctl ]; then
      "$bin/aeonctl" completions "$shell" >"$out/$shell/$file"
    else
      "$bin/$program" --completions "$shell" >"$out/$shell/$file"
    fi
  done
done
# Only a package that is handed out is worth the time that good compression takes.
fast=$([ "$profile" = release ] || echo --fast)
cargo deb --quiet --no-build --locked $fast --profile "$profile" --output "$out/aeon-station.deb" >&2
echo "$out/aeon-station.deb"
