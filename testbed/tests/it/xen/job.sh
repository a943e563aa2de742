# In dom0: one daemon, and two guests with two queues each, synchronized with the guests' scripts. The
# disks of guest `one` come from xl, those of guest `two` from `ebbd xen attach`.
mkdir -p /out/log
export EBBD_CONTROL=/run/ebbd/control.sock
# Without the kernel's backend, disks whose configuration has a script are served by the daemon.
rmmod xen-blkback
cp /job/block-ebbd /etc/xen/scripts/
chmod 755 /etc/xen/scripts/block-ebbd
tools_disk='vdev=xvdy,access=r,script=block-ebbd,target=tools'
files_disk='vdev=xvdb,access=rw,script=block-ebbd,target=files'

# A device with a latency of a millisecond, below a cache: hits overtake misses.
modprobe null_blk nr_devices=1 queue_mode=2 irqmode=2 completion_nsec=1000000 memory_backed=1 gb=1 bs=4096

# The daemon runs as a user to whom the rule of udev gives the three devices, and the unit its directory. xenstored's socket
# is not open to it.
user=4242
chown "$user" /dev/xen/gntdev /dev/xen/evtchn /dev/xen/xenbus /dev/vdc /dev/nullb0
mkdir -p /run/ebbd /run/images
chown "$user" /run/ebbd /run/images
chmod 755 /job /job/bin /job/lib
serve() {
    # Not that of busybox, which comes first otherwise.
    /job/bin/setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
        ebbd serve "$@" --xen --control "$EBBD_CONTROL" \
        --volume tools=file:/dev/vdc,read-only=true \
        --volume files=file:/run/images/files.img,size=320M,create=true \
        --volume churn=file:/dev/nullb0,cache=writethrough \
        --volume barrier=file:/run/images/barrier.img,size=64M,create=true \
        --volume plain=memory:64M --volume counts=memory:64M >>/out/log/ebbd 2>&1 &
    daemon=$!
}
ready() { until_true 60 'ebbd stat >/dev/null 2>&1'; }
# A column of `ebbd stat` for a connected disk of a volume.
disk() { ebbd stat | awk -v volume="$1" -v column="$2" '$3 == volume && $4 == "connected" { print $column }'; }
mapped() { disk "$1" 6; }
# Flushes that reached the store of a volume.
flushes() { ebbd stat | awk -v volume="$1" '$1 == volume && $2 ~ /M$/ { print $(NF - 1); exit }'; }

serve
ready
say as "$(stat -c %u "/proc/$daemon") $(grep CapEff "/proc/$daemon/status" | tr -d '\t')" \
    "$(ls -l "/proc/$daemon/fd" | grep -c ' /dev/xen/xenbus$')"
create_options=
guest one /job/files.sh 2 320 "$files_disk"
create_options=-e
guest two /job/churn.sh 2 256
asked two 90 disk
one=$(domid one) two=$(domid two)
ebbd xen attach "$two" xvdb churn
connected ebbd "$two" xvdb
front() { node "/local/domain/$1/device/vbd/$(vdev "$2")/$3"; }
for id in "$one" "$two"; do
    say queues "$(front "$id" xvdb multi-queue-num-queues)"
    say persistent "$(front "$id" xvdb feature-persistent)"
done
xenstore-ls -f /local/domain/0/backend >/out/log/backend-nodes
answer two
stage verified load

# Starts a load in guest two; load_over ends it.
load() {
    asked two 300 "$1"
    xenstore-write "/local/domain/$two/data/load" "$1"
    answer two
}
load_over() {
    xenstore-write "/local/domain/$two/data/load" ""
    asked two 300 "$1-end"
    answer two
}
# From the journals of a killed daemon: the number of requests in flight, and whether later requests of a ring had
# completed. A journal has a head of 1024 bytes and entries of 128; see crates/ebb-export-xen/src/journal.rs.
overtaken() {
    for journal in /run/ebbd/xen/*; do
        od -An -v -tu4 -w128 "$journal" | awk '
            NR == 1 { taken = $2 }
            NR <= 8 { next }
            $1 != 0 && $2 != taken { open++; behind = (taken - $2 + 4294967296) % 4294967296; if (behind > most) most = behind }
            END { if (open) print open, most }'
    done | awk '{ open += $1; if ($2 > $1) overtaken = 1 } END { print open + 0, overtaken + 0 }'
}

# The daemon is killed under load, and its successor takes over the rings.
load kill
kills=0 open=0 disorder=0
while [ "$kills" -lt 20 ]; do
    sleep "0.$((kills % 4 + 1))"
    kill -9 "$daemon"
    wait "$daemon" || true
    read -r count overtaken <<END
$(overtaken)
END
    open=$((open + (count > 0))) disorder=$((disorder + overtaken))
    serve
    kills=$((kills + 1))
done
ready
stage killed $kills times
load_over kill
ebbd stat >/out/log/stat-killed
say kills "$kills $open $disorder"

# As `systemctl restart` does it: SIGTERM, wait, start.
load restart
for _ in 1 2 3; do
    sleep 0.3
    kill -TERM "$daemon"
    wait "$daemon" || fail "the daemon ended with $?"
    serve
    ready
done
stage restarted
# Beside the running daemon, which then exits.
takeovers=0
for _ in 1 2 3; do
    sleep 0.3
    before=$daemon
    serve --takeover
    wait "$before" || fail "the daemon that was taken over from ended with $?"
    ready
    takeovers=$((takeovers + 1))
done
kill -0 "$daemon" || fail "the last successor has ended"
say takeovers "$takeovers"
stage taken over
load_over restart

asked one 300 detach
stage detached
xl block-detach one xvdb
until_true 60 '[ -z "$(front "$one" xvdb state)" ]'
answer one
# Linux does not detect a disk whose nodes are created again before it has handled their removal.
asked one 60 attach
stage attached again
xl block-attach one "$files_disk"
connected vbd "$one" xvdb
answer one
asked one 120 trim

# Parameters are set while requests are in flight: `ebbd stat` shows the effect of each.
# The sum of a column of the pools.
pools() { ebbd stat | awk '$1 == "POOL" { pools = 1; next } pools && NF == 5 { sum += $COLUMN } END { print sum + 0 }' COLUMN="$1"; }
# Free pages of all pools, lent or not.
kept() { ebbd stat | awk '$1 == "POOL" { pools = 1; next } pools && NF == 5 { sum += $2 + $3 } END { print sum + 0 }'; }
# Hundredths of a second since boot.
clock() { cut -d' ' -f1 /proc/uptime | tr -d .; }
# Sets a parameter, runs a command if there is one, and waits until a condition holds:
# effect PARAMETER VALUE 'CONDITION' [COMMAND]... Says how long that took, in milliseconds.
effect() {
    local start name=$1 value=$2 condition=$3
    ebbd set "$name" "$value"
    shift 3
    "$@"
    start=$(clock)
    until eval "$condition"; do
        [ $(($(clock) - start)) -lt 3000 ] || fail "within 30 s of $name = $value not seen: $condition"
    done
    say effect "$name" $((($(clock) - start) * 10))
}
sleep 1.5
requests=$(disk churn 7)
load parameters
until_true 30 '[ "$(disk churn 7)" -gt $((requests + 500)) ] && [ "$(mapped churn)" -gt 100 ]'
# The disk of `files` has been idle for more than a second.
until_true 30 '[ "$(mapped files)" -gt 0 ]'
effect persistent_grant_unused_seconds 1 '[ "$(mapped files)" = 0 ]'
say busy "$(mapped churn)"
ebbd set persistent_grant_unused_seconds 60
effect max_persistent_grants 0 '[ "$(mapped churn)" = 0 ]'
copies=$(disk churn 9)
until_true 30 '[ "$(disk churn 9)" -gt "$copies" ]'
effect max_persistent_grants 200 '[ "$(mapped churn)" -gt 100 ]'
say capped "$(mapped churn)"
ebbd set max_persistent_grants 1056
effect max_buffer_pages 0 '[ "$(kept)" = 0 ]'
ebbd set max_buffer_pages 1024
until_true 30 '[ "$(kept)" -gt 0 ]'
squeezed=$(pools 5)
effect buffer_squeeze_duration_ms 2000 '[ "$(pools 5)" -gt "$squeezed" ]' ebbd pressure L1
ebbd set buffer_squeeze_duration_ms 10
ebbd set feature_persistent off
load_over parameters
say errors "$(disk churn 10)"
stage parameters

# Counted while the other guest is idle.
asked two 60 counts
# Not offered to any guest now, and offered again below.
ebbd xen attach "$two" xvde counts
connected ebbd "$two" xvde
say offered "$(node "/local/domain/0/backend/ebbd/$two/$(vdev xvde)/feature-persistent")"
ebbd xen detach "$two" xvde
ebbd set feature_persistent on
ebbd xen attach "$two" xvde counts
connected ebbd "$two" xvde
answer two
for phase in idle persistent; do
    asked two 120 "$phase"
    trace "$phase"
    answer two
    asked two 120 end
    untrace
    answer two
done

asked two 120 plain
ebbd xen attach "$two" xvdc plain
connected ebbd "$two" xvdc
say without "$(front "$two" xvdc feature-persistent)"
answer two
asked two 120 copy
trace copy
answer two
asked two 120 end
untrace
answer two

asked two 120 barrier
# The nodes are written by hand, so that the backend offers barriers and no flush.
vbd ebbd "$two" xvdd params barrier mode w dev xvdd flush-enable 0
connected ebbd "$two" xvdd
flushed=$(flushes barrier)
answer two
guest_ok two 200
say barriers "$(($(flushes barrier) - flushed))"
ebbd stat >/out/log/stat-two
stage second guest

say used-before "$(du -k /run/images/files.img | cut -f1)"
answer one
asked one 120 trimmed
say used-after "$(du -k /run/images/files.img | cut -f1)"
say flushes "$(flushes files)"
answer one
asked one 120 resize
ebbd volume resize files 384M
answer one

asked one 120 reboot
stage guest restarted
answer one
until_true 60 '[ "$(domid one 2>/dev/null || echo $one)" != $one ]'
guest_ok one 120
for disk in xvdb xvdc xvdd xvde; do ebbd xen detach "$two" "$disk"; done
ebbd stat >/out/log/stat-end
kill -TERM "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
