#!/bin/sh
# First process of dom0: starts Xen's daemons, unpacks the job from /dev/vda, runs it, packs
# what it left in /out onto /dev/vdb, tells its status on the console, powers off.
export PATH=/job/bin:/bin HOME=/root
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /run
mkdir -p /run/xen /run/xenstored /run/lock
rm -rf /var/run && ln -s /run /var/run
ln -s /proc/mounts /etc/mtab
exec </dev/hvc0 >/dev/hvc0 2>&1
echo "BED stage dom0"
status=0
for module in /modules/*; do
    insmod "$module" || { echo "cannot load $module"; status=125; }
done
mount -t xenfs xenfs /proc/xen
xenstored --pid-file /run/xenstored.pid || status=125
xen-init-dom0 || status=125
xenconsoled --log=guest --log-dir=/var/log/xen/console --pid-file=/run/xenconsoled.pid || status=125
ip link set lo up
mkdir -p /job /out
until [ -b /dev/vda ] && [ -b /dev/vdb ]; do sleep 0.1; done
tar x -f /dev/vda -C /job || status=125
echo "BED stage job"
cd /job
export LD_LIBRARY_PATH=/job/lib
if [ "$status" = 0 ]; then
    (set -eu; . /job/dom0-lib.sh; . /job/job.sh)
    status=$?
fi
echo "BED stage end"
unset LD_LIBRARY_PATH
cp -r /var/log/xen /out/xen
dmesg >/out/dmesg
tar c -C /out . >/dev/vdb
sync
echo "BED rc $status"
poweroff -f
