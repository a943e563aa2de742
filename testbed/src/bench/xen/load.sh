# Loads on each disk, alternating.
tools
ask disks
# Known to the frontend when the next disks connect.
echo N >/sys/module/xen_blkfront/parameters/feature_persistent
ask copies
disks="xvdb xvdc xvdd xvde xvdf"
for disk in $disks; do
    wait_disk $disk
    # Every block is written once before anything is measured, and every grant was used.
    guest-load /dev/$disk sw 1m 4 128 >/dev/null
done
for round in 1 2; do
    for disk in $disks; do
        say load $disk $(guest-load /dev/$disk rr 4k 32 20000)
        say load $disk $(guest-load /dev/$disk rw 4k 32 20000)
        say load $disk $(guest-load /dev/$disk rr 4k 1 3000)
        say load $disk $(guest-load /dev/$disk sr 1m 4 256)
        say load $disk $(guest-load /dev/$disk sw 1m 4 256)
    done
done
ask idle
ask end
for disk in xvdd xvde; do
    ask $disk.qd32
    guest-load /dev/$disk rr 4k 32 20000
    ask end
done
