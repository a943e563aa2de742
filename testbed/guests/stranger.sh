#!/bin/bash
# What someone does who knows ebbd from --help, the manual pages, README.md and the book only: on a
# Debian with systemd, as root, with the package in ./data/ebbd-1.deb. No file is edited. Each step
# prints what it does; the first that fails ends the script.
set -euo pipefail
cd "$(dirname "$0")"

step() { printf '\n== %s\n' "$*"; }
fail() { printf 'stranger: %s\n' "$*" >&2; exit 1; }
# Waits for a condition, for three minutes at most: the machine is emulated.
await() {
    for _ in $(seq 360); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 0.5
    done
    fail "waited three minutes in vain for: $*"
}
# Expects a command to print a line that matches, and shows what it printed.
shows() {
    local pattern=$1 text
    shift
    text=$("$@" 2>&1) || true
    printf '$ %s\n%s\n' "$*" "$text"
    grep -q -- "$pattern" <<<"$text" || fail "no $pattern in what \`$*\` prints"
}
api() { curl --silent --show-error --fail --unix-socket /run/ebbd/control.sock "http://localhost$1"; }
# What the alerts know of a volume.
metrics_of() {
    api /metrics >/tmp/metrics
    grep "_up{volume=\"$1\"}" /tmp/metrics
}
page() { curl --silent --show-error --fail "http://127.0.0.1:9477$1"; }
alerts() { curl --silent --show-error --fail http://127.0.0.1:9090/api/v1/alerts; }
disk='nbd+unix:///disk?socket=/run/ebbd/nbd.sock'

step 'Install'
apt-get install -y ./data/ebbd-1.deb
await systemctl --quiet is-active ebbd
shows Usage ebbd --help
shows 'ebbd.*virtual disks' man -P cat ebbd
shows ok ebbd status

step 'Add a volume, and use it'
ebbd volume add disk file:/var/lib/ebbd/disk.img --size 64M --create --persist
shows disk ebbd volume list
shows 67108864 nbdinfo --size "$disk"
dd if=/dev/urandom of=/tmp/pattern bs=1M count=4 status=none
nbdcopy /tmp/pattern "$disk"

step 'Limit it, and watch it'
ebbd limit disk --iops 500
shows 500 ebbd limit disk
nbdcopy --request-size=4096 "$disk" null:
shows disk ebbd stat
shows disk ebbd stat --json
shows 'ebbd_volume_up{volume="disk"} 1' metrics_of disk
shows ok api /v1/health

step 'Let Prometheus read the metrics, with the alert rules of the package'
cat >/tmp/prometheus.yml <<'YAML'
global: { scrape_interval: 5s, evaluation_interval: 5s }
rule_files: [/usr/share/doc/ebbd/examples/prometheus-rules.yml]
scrape_configs:
  - job_name: ebbd
    static_configs: [{ targets: ["127.0.0.1:9477"] }]
YAML
prometheus --config.file=/tmp/prometheus.yml --storage.tsdb.path=/tmp/prometheus \
    --web.listen-address=127.0.0.1:9090 >/tmp/prometheus.log 2>&1 &
scraped() { curl --silent --fail 'http://127.0.0.1:9090/api/v1/query?query=ebbd_volume_up' | grep -q disk; }
await scraped
shows '"alerts":\[\]' alerts

step 'A volume on a server, which dies'
serve() {
    ebbd serve --volume far=file:/tmp/far.img,size=64M,create=true --listen tcp:127.0.0.1:10810 2>>/tmp/server.log &
    server=$!
    await nbdinfo --size nbd://127.0.0.1:10810/far
}
serve
ebbd volume add remote nbd://127.0.0.1:10810/far --persist
nbdcopy --flush /tmp/pattern 'nbd+unix:///remote?socket=/run/ebbd/nbd.sock'
shows ok ebbd status
kill -9 "$server"
wait "$server" || true
not_ok() { ! ebbd status; }
await not_ok
shows remote ebbd status
shows '<title>' page /
shows remote page /v1/health
shows 'ebbd_remote_up{volume="remote"} 0' metrics_of remote
firing() { alerts | grep -q '"state":"firing"'; }
await firing
shows '"alertname":"EbbdRemoteDown"' alerts

step 'The server is back'
serve
await ebbd status
quiet() { ! alerts | grep -q EbbdRemoteDown; }
await quiet
ebbd volume remove remote

step 'Resize, and restart: the size is remembered, the data is there'
ebbd volume resize disk 128M
systemctl restart ebbd
size_is_new() { [ "$(nbdinfo --size "$disk")" = 134217728 ]; }
await size_is_new
nbdcopy "$disk" /tmp/copy
cmp -n 4194304 /tmp/pattern /tmp/copy
shows 134217728 ebbd volume show disk

step 'Remove the volume, then the package'
ebbd volume remove disk
if ebbd volume list | grep -qw disk; then fail 'the volume is still there'; fi
apt-get remove -y ebbd
kill "$server" %1 2>/dev/null || true
echo 'stranger: all done'
