# Verified load on a raw disk: fio with requests of many pages, then content that survives its daemon.
tools
ask disk
wait_disk xvdb
fio --name=verify --filename=/dev/xvdb --rw=randwrite --bs=4k-256k --size=24m --direct=1 \
    --ioengine=libaio --iodepth=16 --verify=crc32c --verify_fatal=1 --minimal >/tmp/fio || {
    cat /tmp/fio
    exit 1
}
say fio ok
ask kill
say churn "$(guest-load /dev/xvdb churn 32 6 1)"
ask killed
say churn "$(guest-load /dev/xvdb churn 32 1 2)"
# Known to the frontend when the next disk connects.
echo N >/sys/module/xen_blkfront/parameters/feature_persistent
ask plain
wait_disk xvdc
say plain "$(guest-load /dev/xvdc churn 32 1 3)"
