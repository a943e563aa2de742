#!/bin/bash
# Makes what the machine boots, from the packages that fetch.sh unpacked:
#   xen.elf, vmlinux     the hypervisor, and the kernel of dom0 and guests, unpacked here because
#                        emulated machines take seconds for it
#   dom0.cpio.gz         root of dom0: busybox, Xen's tools, modules, `init`, and the guests' root
#   qemu.tar             Xen's device model for dom0, for jobs that ask for it
# usage: build.sh PACKAGES DESTINATION SCRIPTS (PACKAGES as unpacked)
set -euo pipefail

packages=$(readlink -f "$1") destination=$2 scripts=$(readlink -f "$3")
release=$(cat "$packages/release")
libraries=$packages/usr/lib/x86_64-linux-gnu
modules=$packages/lib/modules/$release
work=$(mktemp -d "$destination.XXXXXX")
trap 'rm -rf "$work"' EXIT
made=$work/made
mkdir -p "$made"
command -v cpio >/dev/null || { echo "cpio is missing: run testbed/install" >&2; exit 1; }
command -v xz >/dev/null || { echo "xz is missing: run testbed/install" >&2; exit 1; }

gunzip -c "$packages"/boot/xen-4.17-amd64.gz >"$made/xen.elf"
image=$packages/boot/vmlinuz-$release
at=$(LC_ALL=C grep -abo -m1 -P '\xfd7zXZ\x00' "$image" | head -n 1 | cut -d: -f1)
[ -n "$at" ] || { echo "$image holds no xz stream" >&2; exit 1; }
# More follows in the image after the stream.
tail -c +$((at + 1)) "$image" | xz -dc --single-stream >"$made/vmlinux" 2>/dev/null || [ -s "$made/vmlinux" ]

# What a program of the packages needs, its own libraries first: paths, one a line.
needs() {
    LD_LIBRARY_PATH=$libraries:$libraries/xen ldd "$@" |
        sed -n 's/.*=> \(\/[^ ]*\).*/\1/p; s/^[[:space:]]*\(\/[^ :]*\) (.*/\1/p' | sort -u
}
# Copies libraries into ROOT/lib, and the loader to where programs look for it.
libraries_into() {
    local root=$1
    shift
    mkdir -p "$root/lib" "$root/lib64"
    needs "$@" | while read -r library; do cp -Ln "$library" "$root/lib/"; done
    cp -Ln /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
}
# The named modules and all they need, in the order in which to load them: paths below $modules.
load_order() {
    local name path
    for name in "$@"; do
        path=$(find "$modules/kernel" -name "$name.ko" -printf '%P\n' | head -n 1)
        [ -n "$path" ] || { echo "the kernel has no module $name" >&2; return 1; }
        sed -n "s|^kernel/$path: *||p" "$modules/modules.dep" | tr ' ' '\n' | grep . | tac | sed 's|^kernel/||' || true
        echo "$path"
    done | awk '!seen[$0]++'
}
modules_into() {
    local root=$1 place=100
    shift
    mkdir -p "$root/modules"
    load_order "$@" | while read -r path; do
        cp "$modules/kernel/$path" "$root/modules/$place-$(basename "$path")"
        place=$((place + 1))
    done
}
skeleton() {
    mkdir -p "$1"/{bin,dev,proc,sys,etc,tmp,run,var/run,var/log,var/lib,mnt,root,sbin}
    cp "$packages/bin/busybox" "$1/bin/busybox"
    ln -s busybox "$1/bin/sh"
}
xenstore_into() {
    for verb in chmod list ls read rm watch write exists; do
        cp -L "$packages/usr/bin/xenstore-$verb" "$1/bin/"
    done
}
pack() { (cd "$1" && find . | sort | cpio --quiet -o -H newc -R 0:0); }

[ -s "$modules/modules.dep" ] || busybox depmod -b "$packages" "$release"

# Guests.
guest=$work/guest
skeleton "$guest"
mkdir -p "$guest/job"
xenstore_into "$guest"
libraries_into "$guest" "$packages/usr/bin/xenstore-read"
modules_into "$guest" xen-blkfront crc32c_generic ext4 xenfs
cp "$scripts/domu-init.sh" "$guest/init"
chmod 755 "$guest/init"

# dom0.
dom0=$work/dom0
tools=(xl xenstored xenconsoled xen-init-dom0 libxl-save-helper xentrace)
skeleton "$dom0"
mkdir -p "$dom0"/{usr/lib/xen-4.17/bin,etc/xen/scripts,var/lib/xenstored,var/lib/xen,var/log/xen/console,run/xen}
for tool in "${tools[@]}"; do
    cp "$packages/usr/lib/xen-4.17/bin/$tool" "$dom0/usr/lib/xen-4.17/bin/"
    ln -s "/usr/lib/xen-4.17/bin/$tool" "$dom0/bin/$tool"
done
xenstore_into "$dom0"
libraries_into "$dom0" "${tools[@]/#/$packages/usr/lib/xen-4.17/bin/}" "$packages/usr/bin/xenstore-read"
# Loaded by name when a thread is cancelled.
cp -L /lib/x86_64-linux-gnu/libgcc_s.so.1 "$dom0/lib/"
modules_into "$dom0" virtio_pci virtio_blk xen-evtchn xen-gntdev xen-gntalloc xen-privcmd xenfs xen-blkback loop
# Loaded by jobs, with modprobe.
mkdir -p "$dom0/lib/modules/$release/kernel"
load_order brd null_blk zram nbd dm-mod ext4 crc32c_generic | while read -r path; do
    cp "$modules/kernel/$path" "$dom0/lib/modules/$release/kernel/"
done
cp "$modules"/modules.{order,builtin} "$dom0/lib/modules/$release/"
busybox depmod -b "$dom0" "$release"
cp "$scripts/dom0-init.sh" "$dom0/init"
cp "$scripts/hotplug.sh" "$dom0/etc/xen/scripts/block"
chmod 755 "$dom0/init" "$dom0/etc/xen/scripts/block"
echo 'autoballoon="off"' >"$dom0/etc/xen/xl.conf"
pack "$guest" >"$dom0/domu.cpio"
cp "$made/vmlinux" "$dom0/vmlinux"
pack "$dom0" | gzip -1 >"$made/dom0.cpio.gz"

# The device model.
qemu=$work/qemu
mkdir -p "$qemu/usr/libexec" "$qemu/usr/share/qemu/keymaps"
cp -L "$packages/usr/libexec/xen-qemu-system-i386" "$qemu/usr/libexec/"
cp "$packages/usr/share/qemu/keymaps/en-us" "$qemu/usr/share/qemu/keymaps/"
libraries_into "$qemu" "$packages/usr/libexec/xen-qemu-system-i386"
tar -C "$qemu" -c -f "$made/qemu.tar" usr lib

rm -rf "$destination"
mv "$made" "$destination"
