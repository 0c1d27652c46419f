#!/usr/bin/env bash
# tests/systemd/check.sh PACKAGE.deb: installs the package and does to its units what happens to them in operation.
# Runs inside boot.sh, as root of a system that is thrown away. Prints a line for each thing that it looks at.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
package=$1
passed=0 failed=0
socket=/run/aeon/flow.sock
tmp=$(mktemp -d)

check() { # check TEXT COMMAND...
  local text=$1
  shift
  if "$@" >"$tmp/out" 2>&1; then
    passed=$((passed + 1))
    echo "ok   $text"
  else
    failed=$((failed + 1))
    echo "FAIL $text: $*"
    sed 's/^/     /' "$tmp/out" | tail -n 20
  fi
}
until_true() { # until_true COMMAND...: at least 30 s
  local n
  for n in $(seq 300); do
    "$@" >/dev/null 2>&1 && return 0
    sleep 0.1
  done
  echo "did not come true: $*"
  return 1
}
show() { systemctl show --property "$1" --value "${2:-aeon-node.service}"; }
is() { # is PROPERTY VALUE [UNIT]
  local value
  value=$(show "$1" "${3:-aeon-node.service}")
  [ "$value" = "$2" ] || { echo "$1 is $value, expected $2"; return 1; }
}
status_has() { show StatusText | grep -qF -- "$1" || { echo "status: $(show StatusText)"; return 1; }; }
log_has() { journalctl --unit aeon-node.service --no-pager --output cat | grep -qF -- "$1"; }
log() { python3 "$here/load.py" "$@"; }
hello() { aeonctl --timeout 20 --station "$1" hello; }
not() { ! "$@"; }
nothing_left() { # of the package: no process, no socket, no unit
  local left
  left=$(pgrep -a 'aeon-node' || true)$(ls /run/aeon 2>/dev/null || true)$(systemctl list-units --no-legend 'aeon-node*')
  [ -z "$left" ] || { echo "$left"; return 1; }
}

echo "-- package"
check "dpkg installs the package" dpkg -i "$package"
[ $failed = 0 ] || exit 1
check "the socket unit listens, the station is not started" is ActiveState active aeon-node.socket
check "nothing runs before the first peer" is ActiveState inactive
check "the socket is for the group aeon" test "$(stat -c '%U %G %a %F' $socket)" = "root aeon 660 socket"
check "it is enabled for the next boot" systemctl is-enabled aeon-node.socket
check "the man page is there" test -s /usr/share/man/man1/aeon-node.1.gz
for unit in aeon-node.socket aeon-node-http.socket aeon-node@a.service aeon-node@a.socket aeon-node.service; do
  systemd-analyze verify --man=no "$unit" >"$tmp/verify" 2>&1
  check "systemd-analyze verify $unit says nothing" not grep . "$tmp/verify"
done
for unit in aeon-node.service aeon-node@a.service; do
  check "exposure of $unit is at most 1.5" \
    systemd-analyze security --offline=true --threshold=15 --no-pager "/usr/lib/systemd/system/${unit/a.service/.service}"
done

echo "-- start"
check "the first request starts the station and is answered" hello "uds:$socket"
check "it is active, by its own word" is ActiveState active
check "status says the layers" status_has "demo layers 0..6 of 6, 0 sessions, 0 bases"
check "UDP is served too" hello udp:127.0.0.1:7070
check "a dynamic user runs it" not test "$(stat -c %u "/proc/$(show MainPID)")" = 0
check "its state folder is there" test -d /var/lib/private/aeon
systemctl stop aeon-node.service
check "a second socket unit brings HTTP" systemctl start aeon-node-http.socket
systemctl start aeon-node.service
check "the ready line has all three" until_true log_has "ready uds=$socket udp=127.0.0.1:7070 http=127.0.0.1:7080"
check "HTTP answers" bash -c 'exec 3<>/dev/tcp/127.0.0.1/7080; printf "GET /ready HTTP/1.0\r\n\r\n" >&3; grep -q "200 OK" <&3'

echo "-- reload under load"
mkdir -p /etc/aeon/bases /etc/aeon/methodologies
cp -r "$root/bases/methodologies/demo" /etc/aeon/methodologies/
cp "$root/bases/demo/demo.pcab" /etc/aeon/bases/
sed -i 's/^# \(bases\|methodologies\) = /\1 = /' /etc/aeon/node.toml
systemctl restart aeon-node.service
check "the station starts with a basis" status_has "1 bases"
pid=$(show MainPID)
log requests $socket "$tmp/stop" >"$tmp/load" 2>&1 &
load=$!
sleep 0.5
head -c 1000 /etc/aeon/bases/demo.pcab >/etc/aeon/bases/cut.pcab
for _ in 1 2 3; do systemctl reload aeon-node.service; sleep 0.3; done
check "a bad file is named in the status" until_true status_has "cut.pcab"
check "and in the log" log_has "cut.pcab"
check "the old set stays" status_has "1 bases"
rm /etc/aeon/bases/cut.pcab
# Another basis: the same numbers under another time of making have another fingerprint.
python3 - <<'P'
import struct
data = bytearray(open("/etc/aeon/bases/demo.pcab", "rb").read())
# The metadata is JSON at the end, read by nothing but people: a space more makes another file.
meta_off, meta_len, file_len = struct.unpack_from("<QQQ", data, 24)
data += b" "
struct.pack_into("<QQ", data, 32, meta_len + 1, file_len + 1)
open("/etc/aeon/bases/new.pcab", "wb").write(data)
P
for _ in 1 2 3; do systemctl reload aeon-node.service; sleep 0.3; done
check "a good file is taken" until_true status_has "2 bases"
check "and the trouble is forgotten" not status_has "failed"
rm /etc/aeon/bases/new.pcab
systemctl reload aeon-node.service
check "a file that went is withdrawn" until_true status_has "1 bases"
touch "$tmp/stop"
wait $load
echo "     $(cat "$tmp/load")"
check "no request failed meanwhile" grep -qE '^requests=[1-9][0-9]* failed=0 ' "$tmp/load"
check "it is the same process" is MainPID "$pid"
check "and it is active" is ActiveState active

echo "-- restart and kill -9 under load"
rm -f "$tmp/stop"
log connections $socket "$tmp/stop" >"$tmp/connections" 2>&1 &
load=$!
log datagrams 7070 "$tmp/stop" >"$tmp/datagrams" 2>&1 &
udp=$!
sleep 0.5
pid=$(show MainPID)
check "a restart that systemd does" systemctl restart aeon-node.service
check "is a new process" not is MainPID "$pid"
pid=$(show MainPID)
inode=$(stat -c %i $socket)
kill -9 "$pid"
check "a killed station is started again" until_true is NRestarts 1
check "and serves" until_true is ActiveState active
check "on the same socket file" test "$(stat -c %i $socket)" = "$inode"
touch "$tmp/stop"
wait $load $udp
echo "     $(cat "$tmp/connections")"
echo "     datagrams: $(cat "$tmp/datagrams")"
check "no connection was refused" grep -qE '^answered=[1-9][0-9]* refused=0 ' "$tmp/connections"
check "no datagram was refused, every request was answered" \
  grep -qE '^answered=([1-9][0-9]*) refused=0 of=\1 ' "$tmp/datagrams"

echo "-- watchdog"
mkdir -p /run/systemd/system/aeon-node.service.d
printf '[Service]\nWatchdogSec=2s\n' >/run/systemd/system/aeon-node.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart aeon-node.service
sleep 5
check "an idle station is not suspected" is NRestarts 0
python3 "$here/load.py" hold "$(show MainPID)" >"$tmp/hold" 2>&1 &
hold=$!
check "one model thread is held still" until_true grep -q held "$tmp/hold"
check "the station answers all the same" hello "uds:$socket"
check "the watchdog ends it, and it is started again" until_true is NRestarts 1
wait $hold
check "because of the watchdog" log_has "Watchdog timeout"
check "which the station had told" log_has "a model thread does not move"
check "the next one serves" hello "uds:$socket"
rm -r /run/systemd/system/aeon-node.service.d
systemctl daemon-reload

echo "-- mistakes"
echo "nonsense = 1" >>/etc/aeon/node.toml
check "a bad configuration does not start" not systemctl restart aeon-node.service
check "and is given up after a few tries" until_true is ActiveState failed
check "its mistake is in the log" log_has "nonsense"
sed -i '/nonsense/d' /etc/aeon/node.toml
systemctl reset-failed aeon-node.service aeon-node.socket
systemctl start aeon-node.socket
check "a good one does" hello "uds:$socket"

echo "-- several stations"
printf '[model]\nmodel = "demo"\nlayers = "0..3"\n' >/etc/aeon/first.toml
printf '[model]\nmodel = "demo"\nlayers = "3..6"\n' >/etc/aeon/second.toml
check "two more stations" systemctl start aeon-node@first.socket aeon-node@second.socket
check "make one model" aeonctl --station uds:/run/aeon/first.sock --station uds:/run/aeon/second.sock \
  generate "Once" --max-tokens 4
check "with a state folder each" test -d /var/lib/private/aeon-first -a -d /var/lib/private/aeon-second

echo "-- drop-ins"
dropins=/run/systemd/system/aeon-node.service.d
mkdir -p $dropins
for example in "$root"/systemd/examples/*.conf; do
  rm -f $dropins/*
  cp "$example" $dropins/
  systemd-analyze verify --man=no aeon-node.service >"$tmp/verify" 2>&1
  check "systemd-analyze verify with ${example##*/} says nothing" not grep . "$tmp/verify"
done
rm -f $dropins/*
cp "$root/systemd/examples/network.conf" $dropins/
sed -i 's/^\[listen\]$/[listen]\ntcp = "127.0.0.1:7071"/' /etc/aeon/node.toml
systemctl daemon-reload
check "with network.conf the exposure is at most 1.5" systemd-analyze security --threshold=15 --no-pager aeon-node.service
systemctl restart aeon-node.service
check "and the station opens a listener of its own" hello tcp:127.0.0.1:7071
rm -r $dropins
sed -i '/^tcp = /d' /etc/aeon/node.toml
systemctl daemon-reload
systemctl restart aeon-node.service
check "without it, it reaches no network" not hello tcp:127.0.0.1:7071

echo "-- upgrade"
pid=$(show MainPID)
inode=$(stat -c %i $socket)
check "the package is installed over itself" dpkg -i "$package"
check "the station that runs is a new process" not is MainPID "$pid"
check "on the same socket file" test "$(stat -c %i $socket)" = "$inode"
check "with the configuration as it was changed" grep -q '^bases = ' /etc/aeon/node.toml

echo "-- stop"
rm -f "$tmp/stop"
log requests $socket "$tmp/stop" >"$tmp/load" 2>&1 &
load=$!
sleep 0.5
before=$SECONDS
check "stop" systemctl stop aeon-node.service
check "within the grace period" test $((SECONDS - before)) -le 11
check "by itself, not killed" is Result success
touch "$tmp/stop"
wait $load
check "the socket is still there for the next" test -S $socket
check "and starts it" hello "uds:$socket"

echo "-- removal"
check "dpkg removes the package" dpkg -r aeon-station
check "no process, socket or unit is left" nothing_left
check "the configuration is kept" test -e /etc/aeon/node.toml
check "dpkg purges it" dpkg -P aeon-station
check "then that is gone, and the state" not ls -d /etc/aeon/node.toml /var/lib/aeon /var/lib/private/aeon

echo "$passed passed, $failed failed"
[ $failed = 0 ]
