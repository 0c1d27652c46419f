#!/usr/bin/env bash
# tests/systemd/boot.sh COMMAND...: boots a systemd of its own and runs a command in it, as root, in this checkout.
#
# The root of that system is this machine's own, with a layer on top that is thrown away; its network is a loopback
# device alone, and no service of this machine is started in it. Exits with the status of the command; 77 if no such
# system can be made here, after saying why.
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=300

cannot() {
  echo "cannot boot a systemd here: $1" >&2
  exit 77
}
[ "$(id -u)" = 0 ] || cannot "not root"
command -v systemd-nspawn >/dev/null || cannot "no systemd-nspawn (package systemd-container)"
[ -x /lib/systemd/systemd ] || cannot "no systemd (package systemd)"

work=$(mktemp -d)
container=
finish() {
  if [ -n "$container" ] && kill -0 "$container" 2>/dev/null; then
    # Twice asks nspawn to end without waiting for the system in it.
    kill "$container" 2>/dev/null || true
    sleep 0.3
    kill "$container" 2>/dev/null || true
    wait "$container" 2>/dev/null || true
  fi
  umount "$work/layer/root" 2>/dev/null || true
  umount "$work/layer" 2>/dev/null || true
  rm -rf --one-file-system "$work"
  rmdir "/run/systemd/nspawn/propagate/aeon-test-$$" "/run/systemd/nspawn/unix-export/aeon-test-$$" 2>/dev/null || true
}
trap finish EXIT
trap 'exit 130' INT TERM

# The layer is in memory: it cannot lie in a folder of the system that it covers.
mkdir "$work/layer"
mount -t tmpfs -o mode=755 aeon-test "$work/layer" 2>/dev/null || cannot "mounting is not allowed"
mkdir "$work/layer"/{upper,scratch,root,io}
mount -t overlay aeon-test -o "lowerdir=/,upperdir=$work/layer/upper,workdir=$work/layer/scratch" "$work/layer/root" \
  2>/dev/null || cannot "no overlay file system"
root=$work/layer/root io=$work/layer/io

rm -rf "$root"/etc/systemd/system/*.wants "$root"/etc/systemd/system/*.requires
# A container image often forbids packages to start services; here they shall.
rm -f "$root/usr/sbin/policy-rc.d"
{
  printf 'cd %q || exit 1\n' "$PWD"
  printf '%q ' "$@"
} >"$io/command"
cat >"$root/etc/systemd/system/aeon-test.service" <<UNIT
[Unit]
After=basic.target
SuccessAction=exit
FailureAction=exit

[Service]
Type=exec
Environment=HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin
ExecStart=/bin/bash -c '/bin/bash /io/command; code=\$\$?; echo \$\$code >/io/code; exit \$\$code'
StandardOutput=append:/io/output
StandardError=append:/io/output
UNIT
cat >"$root/etc/systemd/system/aeon-test.target" <<'UNIT'
[Unit]
Requires=basic.target
Wants=aeon-test.service
After=basic.target
UNIT
touch "$io/output"
SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 systemd-nspawn --quiet --machine="aeon-test-$$" --register=no --keep-unit \
  --link-journal=no --resolv-conf=off --timezone=off --private-network --directory="$root" --bind="$io:/io" \
  --bind-ro="$PWD" --boot --console=pipe systemd.unit=aeon-test.target </dev/null >"$work/boot.log" 2>&1 &
container=$!
tail -n +1 -s 0.2 --pid="$container" -f "$io/output" &
reader=$!
waited=0
while kill -0 "$container" 2>/dev/null && [ $waited -lt $((limit * 5)) ]; do
  sleep 0.2
  waited=$((waited + 1))
done
if kill -0 "$container" 2>/dev/null; then
  echo "the command did not end within $limit s" >&2
  exit 124
fi
wait "$container" || true
container=
wait "$reader" || true
if [ ! -s "$io/code" ]; then
  tail -n 20 "$work/boot.log" >&2
  cannot "the system in the container did not come up"
fi
exit "$(cat "$io/code")"
