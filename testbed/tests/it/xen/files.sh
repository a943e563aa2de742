# A file system with 200 MB of files and their checksums: verified after a detach, trimmed, resized, and verified again
# after a restart of the guest.
tools
wait_disk xvdb
mkdir -p /mnt
verify() {
    mount -t ext4 /dev/xvdb /mnt
    (cd /mnt && grep "$1" SUMS | md5sum -c | grep -vc ': OK$') && exit 1
    umount /mnt
}
# If the disk has the magic number of ext4, this is the second start.
if [ "$(dd if=/dev/xvdb bs=1 skip=1080 count=2 2>/dev/null | od -An -tx1)" = " 53 ef" ]; then
    e2fsck -f -n /dev/xvdb
    mount -t ext4 -o ro /dev/xvdb /mnt
    cd /mnt
    say found "$(grep ' [2-9]$' SUMS | md5sum -c | grep -c ': OK$')"
    exit 0
fi
mkfs.ext4 -q -E nodiscard /dev/xvdb
mount -t ext4 /dev/xvdb /mnt
dd if=/dev/urandom of=/tmp/base bs=1M count=4 2>/dev/null
for i in $(seq 50); do
    sum=$({ echo "$i"; cat /tmp/base; } | tee "/mnt/$i" | md5sum | cut -d' ' -f1)
    echo "$sum  $i" >>/mnt/SUMS
    [ $((i % 10)) != 0 ] || sync
done
umount /mnt
verify .
ask detach
until_true '[ ! -e /sys/bus/xen/devices/vbd-51728 ]'
ask attach
wait_disk xvdb
verify ' [12]$'
ask trim
mount -t ext4 /dev/xvdb /mnt
rm /mnt/1*
sync
fstrim /mnt
umount /mnt
ask trimmed
verify ' [2-9]$'
e2fsck -f -n /dev/xvdb
# The disk grows while the file system on it is in use.
mount -t ext4 /dev/xvdb /mnt
before=$(cat /sys/block/xvdb/size)
ask resize
until_true '[ "$(cat /sys/block/xvdb/size)" -gt $before ]'
say resized "$before $(cat /sys/block/xvdb/size)"
resize2fs /dev/xvdb >/dev/null 2>&1
say grown "$(df -m /mnt | awk 'END { print $2 }')"
umount /mnt
e2fsck -f -n /dev/xvdb
ask reboot
reboot -f
