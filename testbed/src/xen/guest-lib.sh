# What scripts in a guest can call. Sourced with `set -eu`.

# Reports a result to the test: say KEY VALUE.
say() { echo "SAY $*"; }

# Waits until a disk is there and has a size.
wait_disk() {
    until [ "$(cat "/sys/block/$1/size" 2>/dev/null || echo 0)" -gt 0 ]; do sleep 0.05; done
}

# Waits until a shell condition holds: until_true 'CONDITION'.
until_true() { until eval "$1"; do sleep 0.05; done; }

# Mounts the disk with the programs of the test's machine, and puts them first.
tools() {
    wait_disk xvdy
    mkdir -p /tools
    mount -t ext4 -o ro,noload /dev/xvdy /tools
    export PATH=/tools/bin:$PATH LD_LIBRARY_PATH=/tools/lib
}

# Sends dom0 a request and waits until it has completed: ask WORD.
asked=0
ask() {
    asked=$((asked + 1))
    xenstore-write data/request "$asked $*"
    until [ "$(xenstore-read data/answer 2>/dev/null)" = "$asked" ]; do sleep 0.2; done
}
