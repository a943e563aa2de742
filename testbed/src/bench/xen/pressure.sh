# In dom0: little memory, swap in memory, a neighbour that goes over its own, and 23 disks used in
# turn, then all at once; what was swapped meanwhile, for each setting in /job/settings.
#
# A disk is a null_blk that takes 5 ms for a request, so that 32 requests of 128 KiB are under way at
# once and fill a pool of 1,024 pages; a store that answers at once would never have two buffers out.
mkdir -p /out/log
export EBBD_CONTROL=/run/ebbd/control.sock
modprobe null_blk nr_devices=23 queue_mode=2 irqmode=2 completion_nsec=5000000 hw_queue_depth=64 gb=1 bs=4096
volumes=
for i in $(seq 23); do volumes="$volumes --volume v$i=file:/dev/nullb$((i - 1))"; done
# shellcheck disable=SC2046,SC2086 # options
ebbd serve --xen --control "$EBBD_CONTROL" $(cat /job/options) $volumes >/out/log/ebbd 2>&1 &
daemon=$!
until_true 20 'ebbd stat >/dev/null 2>&1'
guest peer /job/pressure-guest.sh 1 512
asked peer 90 mode
# What only the making of guests needed is memory, too.
rm -r /vmlinux /domu.cpio /run/peer.cpio /modules
id=$(domid peer)
data=/local/domain/$id/data
xenstore-write "$data/persistent" "$(cat /job/persistent)"
answer peer
asked peer 60 disks
names="b c d e f g h i j k l m n o p q r s t u v w x"
i=0
for letter in $names; do
    i=$((i + 1))
    ebbd xen attach "$id" "xvd$letter" "v$i"
    connected ebbd "$id" "xvd$letter"
done
answer peer
free -m >/out/log/free-attached
modprobe zram
echo 300M >/sys/block/zram0/disksize
mkswap /dev/zram0 >/dev/null
swapon /dev/zram0
guest-load hog 330 100 &
hog=$!
sleep 4
free -m >/out/log/free-hog
swapped() { awk '$1 == "pswpin" { i = $2 } $1 == "pswpout" { o = $2 } END { print i, o }' /proc/vmstat; }
# Runs until the guest requests the end of a phase; prints what was swapped.
phase() {
    local before
    asked peer 400 "$2"
    # The pressure level decays by itself meanwhile: such an event is not counted.
    sleep 2
    before=$(swapped)
    answer peer
    asked peer 400 "$2-end"
    say swap "$1" "$2" $before $(swapped)
    ebbd stat --json >"/out/log/stat-$1-$2" || true
    answer peer
}
before=$(swapped)
sleep 10
say swap neighbour alone $before $(swapped)
while read -r setting squeeze pages; do
    ebbd set buffer_squeeze_duration_ms "$squeeze"
    ebbd set max_buffer_pages "$pages"
    xenstore-write "$data/setting" "$setting"
    asked peer 400 setting
    answer peer
    phase "$setting" turns
    phase "$setting" all
done </job/settings
xenstore-write "$data/setting" end
asked peer 60 setting
answer peer
kill "$hog"
guest_ok peer 60
ebbd stat >/out/log/stat || true
kill -TERM "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
