# What jobs in dom0 can call. Sourced with `set -eu`.

# Reports a result to the test: say KEY VALUE.
say() {
    echo "$*" >>/out/answers
    echo "BED say $*"
}
stage() { echo "BED stage $*"; }
fail() {
    echo "BED failed: $*"
    # What the toolstack, the guests and the daemon had agreed on by then.
    mkdir -p /out/log
    xenstore-ls -f /local/domain >/out/log/nodes-at-failure 2>&1 || true
    xl list >>/out/log/nodes-at-failure 2>&1 || true
    exit 1
}
# Seconds since the machine was switched on.
now() { cut -d' ' -f1 /proc/uptime; }

# Waits until a shell condition holds, at most SECONDS: until_true SECONDS 'CONDITION'.
until_true() {
    local end=$(($(date +%s) + $1))
    until eval "$2"; do
        [ "$(date +%s)" -lt "$end" ] || fail "within $1 s not seen: $2"
        sleep 0.1
    done
}

# Waits until a shell condition holds that depends on nodes below a path, at most SECONDS, without
# spending time on looking: watched SECONDS PATH 'CONDITION'.
watched() {
    local pipe="/run/watch.$2" seen=no watcher
    pipe=$(echo "$pipe" | tr / _) && pipe=/run/$pipe
    mkfifo "$pipe"
    timeout "$1" xenstore-watch "$2" >"$pipe" 2>/dev/null &
    watcher=$!
    # The first event comes at once.
    while read -r _; do
        if eval "$3"; then
            seen=yes
            break
        fi
    done <"$pipe"
    kill "$watcher" 2>/dev/null || true
    rm "$pipe"
    [ "$seen" = yes ] || fail "within $1 s not seen: $3"
}
node() { xenstore-read "$1" 2>/dev/null || true; }

# The next processors that no guest has: each has its own, and dom0 the first.
next_cpu=1
# The disk with programs for guests.
tools_disk='format=raw,backendtype=phy,vdev=xvdy,access=r,target=/dev/vdc'
# For `xl create`: no process stays behind. A guest that restarts needs one: then this is empty.
create_options=-e

# Starts a guest: guest NAME SCRIPT VCPUS MIB [DISK, as in xl's configuration]...
guest() {
    local name=$1 script=$2 vcpus=$3 mib=$4 first=$next_cpu disk
    shift 4
    if [ -b /dev/vdc ]; then set -- "$@" "$tools_disk"; fi
    next_cpu=$((next_cpu + vcpus))
    mkdir -p "/run/g/$name/job"
    cp "$script" "/run/g/$name/job/run.sh"
    cp /job/guest-lib.sh "/run/g/$name/job/"
    { cat /domu.cpio; (cd "/run/g/$name"; find job | cpio -o -H newc 2>/dev/null); } >"/run/$name.cpio"
    rm -r "/run/g/$name"
    {
        echo "name='$name'"
        echo "kernel='/vmlinux'"
        echo "ramdisk='/run/$name.cpio'"
        echo "extra='console=hvc0 quiet panic=-1'"
        echo "memory=$mib"
        echo "vcpus=$vcpus"
        echo "cpus='$first-$((next_cpu - 1))'"
        echo "tsc_mode='native'"
        echo "on_poweroff='preserve'"
        echo "on_reboot='restart'"
        echo "on_crash='preserve'"
        echo "disk=["
        for disk in "$@"; do echo "'$disk',"; done
        echo "]"
    } >"/run/$name.cfg"
    # shellcheck disable=SC2086 # none or one
    xl create -q $create_options "/run/$name.cfg"
}
guest_log() { echo "/var/log/xen/console/guest-$1.log"; }
domid() { xl domid "$1"; }

# Waits for a guest's script to end, at most SECONDS: guest_end NAME SECONDS. Gives its status.
guest_end() {
    local log data
    log=$(guest_log "$1")
    data=/local/domain/$(domid "$1")/data
    watched "$2" "$data" "[ -n \"\$(node $data/rc)\" ]"
    # The console's last lines may still be on their way.
    until_true 10 "grep -q GUEST-RC $log"
    sed -n 's/^.*SAY //p' "$log" | tr -d '\r' | sed "s/^/$1./" >>/out/answers
    return "$(node "$data/rc")"
}
# As guest_end, and fails unless the status is 0.
guest_ok() { guest_end "$@" || fail "guest $1 ended with $?: $(tail -n 40 "$(guest_log "$1")")"; }

# Waits until a guest sends WORD, at most SECONDS: asked NAME SECONDS WORD; `answer NAME` lets it
# continue.
asked() {
    local data
    data=/local/domain/$(domid "$1")/data
    watched "$2" "$data" "[ \"\$(node $data/request | cut -d' ' -f2-)\" = '$3' ] || [ -n \"\$(node $data/rc)\" ]"
    [ "$(node "$data/request" | cut -d' ' -f2-)" = "$3" ] ||
        fail "guest $1 ended before it asked for $3: $(tail -n 40 "$(guest_log "$1")")"
}
answer() {
    local data
    data=/local/domain/$(domid "$1")/data
    xenstore-write "$data/answer" "$(node "$data/request" | cut -d' ' -f1)"
}

# The device number of a disk by its name: xvda to xvdp, then the extended numbers.
vdev() {
    local letter index
    letter=$(printf %d "'${1#xvd}")
    index=$((letter - 97))
    if [ "$index" -lt 16 ]; then echo $((202 << 8 | index << 4)); else echo $((1 << 28 | index << 8)); fi
}

# Makes the nodes of a disk whose backend is a kind of its own, as a toolstack would:
# vbd KIND DOMID DISK [NODE VALUE]...
vbd() {
    local kind=$1 id=$2 number be fe
    number=$(vdev "$3")
    shift 3
    be=/local/domain/0/backend/$kind/$id/$number
    fe=/local/domain/$id/device/vbd/$number
    xenstore-write "$be" ""
    xenstore-chmod "$be" n0 "r$id"
    xenstore-write "$fe" ""
    xenstore-chmod "$fe" "n$id" r0
    while [ $# -gt 0 ]; do
        xenstore-write "$be/$1" "$2"
        shift 2
    done
    xenstore-write "$be/frontend" "$fe" "$be/frontend-id" "$id" "$be/online" 1 "$be/state" 1
    xenstore-write "$fe/backend" "$be" "$fe/backend-id" 0 "$fe/virtual-device" "$number" \
        "$fe/device-type" disk "$fe/state" 1
}

# Attaches a block device by the kernel's backend and waits for it: blkback DOMID PATH DISK [MODE]
blkback() {
    xl block-attach "$1" "format=raw,backendtype=phy,vdev=$3,access=${4:-rw},target=$2"
    connected vbd "$1" "$3"
}

# Waits until a disk is connected: connected KIND DOMID DISK
connected() {
    local be
    be=/local/domain/0/backend/$1/$2/$(vdev "$3")
    watched 30 "$be" "[ \"\$(node $be/state)\" = 4 ]"
}

# Records the hypercalls of a phase into /out/NAME.trace: trace NAME, then untrace.
trace() {
    xentrace -D -e 0x0020f000 -S 1024 "/out/$1.trace" >/dev/null 2>&1 &
    tracer=$!
    sleep 0.5
}
untrace() {
    sleep 0.5
    kill -INT "$tracer"
    wait "$tracer" || true
}
