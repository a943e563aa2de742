#!/bin/bash
# Downloads Debian's packages of Xen, its tools and a kernel, and unpacks them below a directory:
# nothing is installed on this machine. usage: fetch.sh DIRECTORY
# Done once: a directory whose `complete` lists the same packages is left as it is.
set -euo pipefail

directory=$1
packages=(
    xen-hypervisor-4.17-amd64 xen-utils-4.17 xenstore-utils
    libxenmisc4.17 libxencall1 libxendevicemodel1 libxenevtchn1 libxenforeignmemory1 libxengnttab1
    libxenhypfs1 libxenstore4 libxentoolcore1 libxentoollog1
    libyajl2 libuuid1 libzstd1 liblzma5 zlib1g busybox-static
    # Its device model serves disks too (qdisk), as a peer.
    qemu-system-xen qemu-system-data libglib2.0-0 libjpeg62-turbo libpixman-1-0 libspice-server1
    libusb-1.0-0
)

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

[ "$(dpkg --print-architecture)" = amd64 ] || { echo "Xen guests are amd64 only" >&2; exit 1; }
if [ "$(cat "$directory/complete" 2>/dev/null)" = "${packages[*]}" ]; then exit 0; fi

# Another apt may be at work, as one that updates the machine by itself: wait for it, ten minutes at most. The
# option is for installing; `update` of apt before 2.9 fails at once, and is tried again.
apt=(apt-get -qq -o DPkg::Lock::Timeout=600)
update_now() {
    local deadline=$((SECONDS + 600)) error
    until error=$(as_root "${apt[@]}" update 2>&1 >/dev/null); do
        case "$error" in
            *'Could not get lock'* | *'Unable to lock'*) ;;
            *) printf '%s\n' "$error" >&2; return 1 ;;
        esac
        [ "$SECONDS" -lt "$deadline" ] || { printf '%s\n' "$error" >&2; return 1; }
        sleep 2
    done
}
kernel() {
    apt-cache depends --important linux-image-amd64 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1
}
mkdir -p "$directory"
work=$(mktemp -d "$directory/unpack.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
download() {
    local image
    image=$(kernel)
    [ -n "$image" ] || { echo "apt knows no linux-image-amd64" >"$work/error"; return 1; }
    # apt's download helper may not write here; it warns and continues, so this hides the warning.
    (cd "$work" && "${apt[@]}" download "$image" "${packages[@]}" 2>"$work/error")
}
# An index older than the mirror names files that no longer exist: update it and try once more.
if ! download; then
    update_now
    download || { echo "cannot download Xen's packages: $(cat "$work/error")" >&2; exit 1; }
fi

for package in "$work"/*.deb; do dpkg -x "$package" "$work/tree"; done
ls "$work/tree/lib/modules" >"$work/tree/release"
rm -rf "$directory/tree"
mv "$work/tree" "$directory/tree"
echo "${packages[*]}" >"$directory/complete"
