# A guest made anew finds the files of the one before.
tools
ask disk
wait_disk xvdb
e2fsck -f -n /dev/xvdb
mkdir -p /mnt
mount -t ext4 -o ro /dev/xvdb /mnt
cd /mnt
say files "$(grep ' [2-9]$' SUMS | md5sum -c | grep -c ': OK$')"
