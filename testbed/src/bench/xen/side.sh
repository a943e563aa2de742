# In dom0: one guest with a disk of each backend, all in memory; alternating loads, with hypercalls
# recorded.
mkdir -p /out/log
export EBBD_CONTROL=/run/ebbd/control.sock
modprobe brd rd_nr=2 rd_size=131072
ebbd serve --xen --control "$EBBD_CONTROL" --volume persistent=memory:128M --volume copy=memory:128M \
    >/out/log/ebbd 2>&1 &
daemon=$!
tar x -f /job/qemu.tar -C /
until_true 20 'ebbd stat >/dev/null 2>&1'
# The device model is started with a guest that has a disk of its.
guest peer /job/load.sh 1 512 'format=raw,backendtype=qdisk,vdev=xvdf,access=rw,target=/dev/ram1'
asked peer 90 disks
id=$(domid peer)
blkback "$id" /dev/ram0 xvdb
ebbd xen attach "$id" xvdd persistent
connected ebbd "$id" xvdd
answer peer
asked peer 60 copies
blkback "$id" /dev/ram0 xvdc
ebbd xen attach "$id" xvde copy
connected ebbd "$id" xvde
answer peer
# Each phase that the guest requests is recorded, until it requests the end.
for phase in idle xvdd.qd32 xvde.qd32; do
    asked peer 600 "$phase"
    trace "$phase"
    answer peer
    asked peer 120 end
    untrace
    answer peer
done
guest_ok peer 120
ebbd stat >/out/log/stat || true
kill -TERM "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
