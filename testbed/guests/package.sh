# The life of the package on a Debian with systemd, as a service of testbed/src/guest/init.sh runs it: installed, used,
# reloaded, killed, upgraded, removed, purged. testbed/tests/it/packages.rs asserts what is said here and in the journal.
set -x

pid() { systemctl show -P MainPID ebbd; }
# Waits for a condition, for a minute at most: the machine is emulated.
await() {
    for _ in $(seq 120); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 0.5
    done
    echo "waited a minute in vain for: $*"
    systemctl status --no-pager ebbd
    return 1
}
another_pid() { [ "$(pid)" != "$1" ] && [ "$(pid)" != 0 ] && systemctl --quiet is-active ebbd; }
disk='nbd+unix:///disk?socket=/run/ebbd/nbd.sock'

# Installed: the service runs, and starts with the machine.
apt-get install -y ./data/ebbd-1.deb
await systemctl --quiet is-active ebbd
say installed "$(systemctl is-active ebbd) $(systemctl is-enabled ebbd)"
say type "$(systemctl show -P Type ebbd) $(systemctl show -P StartLimitIntervalUSec ebbd)"
say user "$(systemctl show -P User ebbd) $(getent passwd ebbd | cut -d : -f 6,7)"
say places "$(stat -c '%U:%G:%a' /run/ebbd /var/lib/ebbd /etc/ebbd/ebbd.toml | paste -s -d ' ')"
say socket "$(stat -c '%U:%G:%a' /run/ebbd/nbd.sock)"
ebbd stat >stat.txt
say manual "$(man -w ebbd ebbd-serve ebbd.toml | wc -l)"
say completion "$(bash -ic '. /usr/share/bash-completion/bash_completion; . /usr/share/bash-completion/completions/ebbd; complete -p ebbd' 2>/dev/null)"
say empty "$(systemctl show -P StatusText ebbd)"

# In a Xen dom0 the user has three devices more. Here another device stands for them: it gets the owner of
# the rule of udev, which this guest does not have, and the unit with the drop-in opens it, and cannot change its mode.
device=cpu_dma_latency
mkdir -p /dev/xen /etc/systemd/system/ebbd.service.d
rule=$(sed -n '/xen\/gntdev/p' /lib/udev/rules.d/60-ebbd.rules)
chown "$(sed 's/.*OWNER="\([^"]*\)".*/\1/' <<<"$rule")" "/dev/$device"
say device "$(stat -c '%U:%G:%a' "/dev/$device")"
for name in gntdev evtchn xenbus privcmd; do
    mknod -m 600 "/dev/xen/$name" c 10 "$(awk -v name="$device" '$2 == name { print $1 }' /proc/misc)"
    [ "$name" = privcmd ] || chown ebbd "/dev/xen/$name"
done
cp /usr/share/doc/ebbd/examples/ebbd-xen.conf /etc/systemd/system/ebbd.service.d/xen.conf
cat >try.sh <<'TRY'
cd /dev/xen
opened=opened
for name in gntdev evtchn xenbus; do : <>"$name" || opened="not opened: $name"; done
# In a shell of its own, which such an error ends.
touch=$(sh -c ': <>/dev/cpu_dma_latency' && echo allowed || echo refused)
mode=$(chmod 666 gntdev && echo changed || echo unchanged)
echo "$(id -un) $opened $touch $mode $(test -e privcmd && echo shown || echo hidden)" >/var/lib/ebbd/tried
TRY
install -m 755 try.sh /usr/bin/try-devices
systemctl stop ebbd
printf '[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart=/bin/sh /usr/bin/try-devices\n' >/etc/systemd/system/ebbd.service.d/zz.conf
systemctl daemon-reload
systemctl start ebbd
say dom0 "$(cat /var/lib/ebbd/tried)"
rm -r /var/lib/ebbd/tried /etc/systemd/system/ebbd.service.d /usr/bin/try-devices /dev/xen
systemctl daemon-reload
systemctl start ebbd
await systemctl --quiet is-active ebbd

# Reloaded with a volume.
cat >>/etc/ebbd/ebbd.toml <<'TOML'
[volume.disk]
store = "file:/var/lib/ebbd/disk.img"
size = "64M"
create = true
cache = "writeback"
TOML
systemctl reload ebbd
await nbdinfo --size "$disk"
say size "$(nbdinfo --size "$disk")"
full() { [ "$(systemctl show -P StatusText ebbd)" = '1 of 1 volume served' ]; }
await full
say status "$(systemctl show -P StatusText ebbd)"
dd if=/dev/urandom of=pattern bs=1M count=4 status=none
nbdcopy pattern "$disk"

# Killed: started again.
before=$(pid)
kill -9 "$before"
await another_pid "$before"
say killed "$(systemctl is-active ebbd)"
await nbdinfo --size "$disk"

# Upgraded: the old daemon writes everything, the new one serves it; the configuration stays.
nbdcopy pattern "$disk"
before=$(pid)
apt-get install -y ./data/ebbd-2.deb
await another_pid "$before"
say upgraded "$(dpkg-query -W -f '${Version}' ebbd) $(systemctl is-active ebbd)"
await nbdinfo --size "$disk"
nbdcopy "$disk" copy
say same "$(cmp -n 4194304 pattern copy && echo yes)"
say flushed "$(journalctl -u ebbd _PID="$before" | grep -c 'stopped: all volumes flushed')"

# Removed: stopped; configuration and disks are kept.
apt-get remove -y ebbd
say removed "$(systemctl is-active ebbd) $(test -e /usr/bin/ebbd || echo gone) $(test -e /etc/ebbd/ebbd.toml && echo kept)"

# Purged: the disks are still there, and that is said.
dpkg --purge ebbd >purged.txt 2>&1
cat purged.txt
say purged "$(test -e /etc/ebbd || echo gone) $(test -s /var/lib/ebbd/disk.img && echo kept) $(grep -c '/var/lib/ebbd is kept' purged.txt)"
cmp -n 4194304 pattern /var/lib/ebbd/disk.img

# Without disks a purge leaves nothing.
rm /var/lib/ebbd/disk.img
dpkg --install ./data/ebbd-2.deb
await systemctl --quiet is-active ebbd
dpkg --purge ebbd
say clean "$(ls -d /var/lib/ebbd /etc/ebbd /run/ebbd 2>/dev/null | wc -l) $(systemctl --failed --plain --no-legend | wc -l)"
