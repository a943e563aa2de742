#!/bin/sh
# First process of a guest: prepares the system, runs /job/run.sh, tells its status, sleeps.
export PATH=/job/bin:/own:/bin HOME=/tmp
/bin/busybox cp -a /bin /own
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
ln -s /proc/mounts /etc/mtab
for module in /modules/*; do
    insmod "$module" || echo "cannot load $module"
done
mount -t xenfs xenfs /proc/xen
(set -eu; . /job/guest-lib.sh; . /job/run.sh)
status=$?
echo "GUEST-RC $status"
xenstore-write data/rc "$status"
while :; do sleep 100; done
