#!/bin/bash
# Downloads Debian's packages of Ceph's daemons and tools, and unpacks them below a directory: nothing is installed on
# this machine. usage: fetch.sh DIRECTORY
# Done once: a directory whose `complete` lists the same packages is left as it is.
set -euo pipefail

directory=$1
packages=(
    ceph-mon ceph-osd ceph-common ceph-base librbd1 librados2 librgw2 libcephfs2 libradosstriper1
    python3-ceph-argparse python3-rados python3-prettytable python3-wcwidth
    libleveldb1d libsnappy1v5 libtcmalloc-minimal4 libgoogle-perftools4 liboath0 librabbitmq4
    libboost-context1.74.0 libfuse2 liblua5.3-0 libndctl6 libpmem1 libdaxctl1 libibverbs1 librdmacm1
)

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

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
mkdir -p "$directory"
work=$(mktemp -d "$directory/unpack.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
download() {
    # apt's download helper may not write here; it warns and continues, so this hides the warning.
    (cd "$work" && "${apt[@]}" download "${packages[@]}" 2>"$work/error")
}
# An index older than the mirror names files that no longer exist: update it and try once more.
if ! download; then
    update_now
    download || { echo "cannot download Ceph's packages: $(cat "$work/error")" >&2; exit 1; }
fi

for package in "$work"/*.deb; do dpkg -x "$package" "$work/tree"; done
rm -rf "$directory/tree"
mv "$work/tree" "$directory/tree"
echo "${packages[*]}" >"$directory/complete"
