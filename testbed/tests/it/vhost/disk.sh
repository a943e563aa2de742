# What a guest does with its disks: `vda` with a file system, `vdb` on a store that counts, `vdc` for loads.

# 200 MB of files that differ, and their sums; the seed is made anew for each disk.
fill() {
    say queues $(ls /sys/block/vda/mq | wc -l)
    mkfs.ext4 -q -E nodiscard /dev/vda 512M
    mount -t ext4 /dev/vda /mnt
    dd if=/dev/urandom of=/tmp/seed bs=1M count=4 2>/dev/null
    for i in $(seq 1 50); do { echo "$i"; cat /tmp/seed; } >/mnt/$i; done
    rm /tmp/seed
    # As they are in the guest's page cache, before they are read from the disk.
    (cd /mnt && md5sum [0-9]* >/tmp/SUMS && cp /tmp/SUMS SUMS)
    umount /mnt
}

verify() {
    mount -t ext4 /dev/vda /mnt
    (cd /mnt && md5sum -c SUMS >/tmp/checked) || { grep -v OK /tmp/checked; return 1; }
    say files $(grep -c OK /tmp/checked)
    umount /mnt
}

# Removes the last files of the sums.
trim() {
    mount -t ext4 /dev/vda /mnt
    for i in $(seq 11 50); do rm /mnt/$i; done
    (cd /mnt && head -n 50 /tmp/SUMS | while read -r sum file; do [ ! -e "$file" ] || echo "$sum  $file"; done >SUMS)
    sync
    say trimmed $(fstrim -v /mnt)
    umount /mnt
}

# The shell prefers applets of busybox to programs of the same name.
# Behind the file system: zeroes within data, then all of it discarded.
zeroes() {
    dd if=/dev/urandom of=/tmp/data bs=1M count=8 2>/dev/null
    dd if=/tmp/data of=/dev/vda bs=1M seek=600 oflag=direct 2>/dev/null
    /own/blkdiscard -f -z -o $((602 << 20)) -l $((4 << 20)) /dev/vda
    dd if=/dev/zero of=/tmp/data bs=1M seek=2 count=4 conv=notrunc 2>/dev/null
    dd if=/dev/vda bs=1M skip=600 count=8 iflag=direct 2>/dev/null | cmp - /tmp/data
    rm /tmp/data
}
discard() { /own/blkdiscard -f -o $((600 << 20)) -l $((8 << 20)) /dev/vda; }

# Selects a mode of the cache, and writes with flushes: 8 of the writes are followed by one.
cache() {
    echo "$1" >/sys/block/vdb/cache_type
    say cache $(cat /sys/block/vdb/cache_type)
    for i in $(seq 1 8); do dd if=/dev/urandom of=/dev/vdb bs=4k count=1 seek=$i conv=fsync 2>/dev/null; done
}

# Until a disk has this many bytes.
size() {
    for i in $(seq 1 6000); do
        [ "$(blockdev --getsize64 /dev/$1)" != "$2" ] || return 0
        usleep 50000
    done
    echo "/dev/$1 has $(blockdev --getsize64 /dev/$1) bytes, not $2"
    return 1
}

# Until the guest has more memory than this, or less, KiB.
memory() {
    for i in $(seq 1 6000); do
        [ "$(awk '/MemTotal/ { print $2 }' /proc/meminfo)" "$1" "$2" ] || { usleep 50000; continue; }
        return 0
    done
    cat /proc/meminfo
    return 1
}
# Pages of programs in memory that can be removed.
removable() { say removable $(awk '/^Node/ { movable = /Movable/ } movable && /nr_zone_.*active_anon/ { sum += $2 } END { print sum + 0 }' /proc/zoneinfo); }
total() { say total $(awk '/MemTotal/ { print $2 }' /proc/meminfo); }

# A verified load that runs in the background, for some seconds on a disk (vdc), and its end.
load() {
    guest-load "/dev/${2:-vdc}" churn 16 "$1" 7 >/tmp/load 2>&1 &
    loader=$!
}
loaded() {
    wait "$loader" || { cat /tmp/load; return 1; }
    say load $(cat /tmp/load)
}

# Writes into the file system and to the raw disk without an end.
busy() {
    mount -t ext4 /dev/vda /mnt
    (while :; do dd if=/dev/zero of=/mnt/junk bs=64k count=500 conv=fsync; done) >/dev/null 2>&1 &
    load 600
}

quiet() {
    if dmesg | grep -E 'I/O error|blocked for more'; then return 1; fi
}
