# A file system with 80 MB of files and their checksums; detached and trimmed.
tools
ask disk
wait_disk xvdb
mkfs.ext4 -q -E nodiscard /dev/xvdb
mkdir -p /mnt
mount -t ext4 /dev/xvdb /mnt
dd if=/dev/urandom of=/tmp/base bs=1M count=4 2>/dev/null
for i in $(seq 20); do
    sum=$({ echo "$i"; cat /tmp/base; } | tee "/mnt/$i" | md5sum | cut -d' ' -f1)
    echo "$sum  $i" >>/mnt/SUMS
    [ $((i % 5)) != 0 ] || sync
done
umount /mnt
verify() {
    mount -t ext4 /dev/xvdb /mnt
    (cd /mnt && grep "$1" SUMS | md5sum -c | grep -vc ': OK$') && exit 1
    umount /mnt
}
verify .
ask again
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
ask reboot
sleep 1000
