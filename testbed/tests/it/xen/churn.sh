# Verified load on raw disks: fio with requests of many pages, then loads during which the daemon is killed and replaced
# and parameters change, disks without persistent grants and with barriers.
tools
ask disk
wait_disk xvdb
say segments "$(cat /sys/block/xvdb/queue/max_segments)"
fio --name=verify --filename=/dev/xvdb --rw=randwrite --bs=4k-256k --size=24m --direct=1 \
    --ioengine=libaio --iodepth=16 --verify=crc32c --verify_fatal=1 --minimal >/tmp/fio || {
    cat /tmp/fio
    exit 1
}
say fio ok
# Runs until dom0 ends the load; the next load starts with new content.
load() {
    ask "$1"
    while [ "$(xenstore-read data/load)" = "$1" ]; do say churn "$(guest-load /dev/xvdb churn 32 1 "$2")"; done
    ask "$1-end"
}
load kill 1
load restart 2
load parameters 3
ask counts
wait_disk xvde
count() {
    # Grants are mapped at their first use, and each processor has a ring of its own.
    taskset 1 guest-load "/dev/$2" rr 4k 32 1000
    ask "$1"
    taskset 1 guest-load "/dev/$2" rr 4k 32 20000
    ask end
}
ask idle
ask end
count persistent xvde
# Takes effect in the frontend when the next disk connects.
echo N >/sys/module/xen_blkfront/parameters/feature_persistent
ask plain
wait_disk xvdc
say plain "$(guest-load /dev/xvdc churn 32 1 4)"
count copy xvdc
ask barrier
wait_disk xvdd
# If the backend offers no flush, the frontend uses barriers.
say fua "$(cat /sys/block/xvdd/queue/fua)"
for i in 1 2 3 4 5; do
    dd if=/tools/bin/guest-load of=/dev/xvdd bs=64k seek=$i count=1 conv=fsync 2>/dev/null
    dd if=/tools/bin/guest-load of=/dev/xvdd bs=4k seek=$((i * 100)) count=1 oflag=direct conv=fsync 2>/dev/null
done
say barriers ok
