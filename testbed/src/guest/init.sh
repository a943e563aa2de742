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
    # Says something, and reads what is to be done; the line is open before, so that nothing is missed.
    echo 'ask() { exec 9</dev/ttyS1; say "$*"; read -r order <&9; exec 9<&-; }'
    cat /script
} >/tmp/script

# Debian with systemd on a disk: the script becomes a service of it, and the console has its journal.
boot_debian() {
    mount -t ext4 "$(cat /debian)" /mnt
    mount -t tmpfs -o mode=755 run /mnt/run
    mkdir -p /mnt/run/test /mnt/run/systemd/system/multi-user.target.wants
    cp /tmp/script /mnt/run/test/script
    [ ! -e /data ] || cp -r /data /mnt/run/test
    cat >/mnt/run/systemd/system/test.service <<'UNIT'
[Unit]
Description=The script of the test
Wants=dbus.service
After=dbus.service systemd-tmpfiles-setup.service network.target

[Service]
Type=simple
Environment=LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive HOME=/root
WorkingDirectory=/run/test
ExecStart=/bin/bash /run/test/script
ExecStopPost=/bin/sh -c 'if [ "$EXIT_CODE" = exited ]; then echo "exit $EXIT_STATUS"; else echo "exit 124"; fi >/dev/ttyS1'
ExecStopPost=/bin/systemctl --no-block poweroff
UNIT
    ln -s ../test.service /mnt/run/systemd/system/multi-user.target.wants/test.service
    exec switch_root /mnt /sbin/init
}

status=0
for module in /modules/*; do
    insmod "$module" || { echo "cannot load $module"; status=125; }
done
if [ -e /sys/class/net/eth0 ]; then
    ip link set lo up
    ip link set eth0 up
    ip addr add 10.0.2.15/24 dev eth0
fi
[ "$status" != 0 ] || [ ! -e /debian ] || boot_debian
echo "--- script"
[ "$status" != 0 ] || { sh /tmp/script; status=$?; }
echo "--- script ended with $status"
sync
echo "exit $status" >/dev/ttyS1
poweroff -f
