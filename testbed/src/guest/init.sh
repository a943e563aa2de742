#!/bin/sh
# First process of a test guest: prepares the system, runs /script, tells its status, powers off.
export PATH=/bin HOME=/tmp
/bin/busybox mount -t devtmpfs dev /dev
exec </dev/ttyS0 >/dev/ttyS0 2>&1
/bin/busybox cp -al /bin /own # programs of the host come before busybox's of the same name
/bin/busybox --install -s /bin
export PATH=/own:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
ln -s /proc/mounts /etc/mtab
stty -F /dev/ttyS1 raw -echo

{
    echo 'set -eu'
    echo 'say() { echo "$*" >/dev/ttyS1; }'
    cat /script
} >/tmp/script

status=0
for module in /modules/*; do
    insmod "$module" || { echo "cannot load $module"; status=125; }
done
if [ -e /sys/class/net/eth0 ]; then
    ip link set lo up
    ip link set eth0 up
    ip addr add 10.0.2.15/24 dev eth0
fi
echo "--- script"
[ "$status" != 0 ] || { sh /tmp/script; status=$?; }
echo "--- script ended with $status"
sync
echo "exit $status" >/dev/ttyS1
poweroff -f
