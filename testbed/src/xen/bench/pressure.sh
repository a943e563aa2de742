# In dom0: little memory, swap in memory, a neighbour that goes over its own, and 23 disks used in
# turn, then all at once; what was swapped meanwhile, for each length of a squeeze.
mkdir -p /out/log
export EBBD_CONTROL=/run/ebbd/control.sock
volumes=
for i in $(seq 23); do volumes="$volumes --volume v$i=null:64M"; done
# shellcheck disable=SC2086 # options
ebbd serve --xen --control "$EBBD_CONTROL" $volumes >/out/log/ebbd 2>&1 &
daemon=$!
until_true 20 'ebbd stat >/dev/null 2>&1'
guest peer /job/pressure-guest.sh 1 512
asked peer 90 mode
id=$(domid peer)
xenstore-write "/local/domain/$id/data/persistent" "$(cat /job/persistent)"
answer peer
asked peer 60 disks
names="b c d e f g h i j k l m n o p q r s t u v w x"
i=0
for letter in $names; do
    i=$((i + 1))
    ebbd xen attach "$id" "xvd$letter" "v$i"
    connected ebbd "$id" "xvd$letter"
done
modprobe zram
echo 300M >/sys/block/zram0/disksize
mkswap /dev/zram0 >/dev/null
swapon /dev/zram0
guest-load hog 330 100 &
hog=$!
sleep 4
answer peer
swapped() { awk '$1 == "pswpin" { i = $2 } $1 == "pswpout" { o = $2 } END { print i, o }' /proc/vmstat; }
for squeeze in 0 1 10 100; do
    for phase in turns all; do
        ebbd set buffer_squeeze_duration_ms "$squeeze"
        asked peer 400 "$phase"
        before=$(swapped)
        answer peer
        asked peer 400 "$phase-end"
        say swap "$squeeze" "$phase" $before $(swapped)
        answer peer
    done
done
kill "$hog"
guest_ok peer 60
ebbd stat >/out/log/stat || true
kill -TERM "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
