# In dom0: one daemon, two guests with two queues each; what the guests' scripts ask for.
mkdir -p /out/log
export EBBD_CONTROL=/run/ebbd/control.sock
serve() {
    ebbd serve --xen --control "$EBBD_CONTROL" \
        --volume files=file:/run/files.img,size=320M,create=true \
        --volume churn=file:/run/churn.img,size=64M,create=true \
        --volume plain=file:/run/plain.img,size=64M,create=true >>/out/log/ebbd 2>&1 &
    daemon=$!
}

serve
until_true 20 'ebbd stat >/dev/null 2>&1'
guest one /job/files.sh 2 320
guest two /job/churn.sh 2 256
asked one 90 disk
asked two 90 disk
one=$(domid one) two=$(domid two)
ebbd xen attach "$one" xvdb files
ebbd xen attach "$two" xvdb churn
connected ebbd "$one" xvdb
connected ebbd "$two" xvdb
for id in "$one" "$two"; do
    say queues "$(node "/local/domain/$id/device/vbd/$(vdev xvdb)/multi-queue-num-queues")"
    say persistent "$(node "/local/domain/$id/device/vbd/$(vdev xvdb)/feature-persistent")"
done
xenstore-ls -f /local/domain/0/backend/ebbd >/out/log/backend-nodes
answer one
answer two
stage verified load

# The daemon is killed under it, and its successor goes on with the same rings.
asked two 200 kill
answer two
kills=0
while [ "$kills" -lt 8 ]; do
    sleep 0.4
    kill -9 "$daemon"
    wait "$daemon" || true
    serve
    kills=$((kills + 1))
done
stage killed $kills times
asked two 300 killed
until_true 20 'ebbd stat >/dev/null 2>&1'
ebbd stat >/out/log/stat-killed
say kills $kills
answer two

asked one 300 again
stage detached and attached again
ebbd xen detach "$one" xvdb
until_true 20 '[ -z "$(node "/local/domain/$one/device/vbd/$(vdev xvdb)/state")" ]'
ebbd xen attach "$one" xvdb files
connected ebbd "$one" xvdb
answer one

asked one 120 trim
say used-before "$(du -k /run/files.img | cut -f1)"
answer one
asked one 120 trimmed
say used-after "$(du -k /run/files.img | cut -f1)"
ebbd stat >/out/log/stat-trimmed
say flushes "$(awk '$1 == "files" && $2 ~ /M$/ { print $(NF - 1) }' /out/log/stat-trimmed)"
answer one

stage without persistent grants
asked two 120 plain
ebbd xen attach "$two" xvdc plain
connected ebbd "$two" xvdc
say without "$(node "/local/domain/$two/device/vbd/$(vdev xvdc)/feature-persistent")"
answer two
guest_ok two 200
ebbd stat >/out/log/stat-plain

asked one 120 reboot
stage guest restarted
xl destroy one
next_cpu=1
guest more /job/more.sh 2 320
asked more 90 disk
more=$(domid more)
ebbd xen attach "$more" xvdb files
connected ebbd "$more" xvdb
answer more
guest_ok more 120
ebbd xen detach "$more" xvdb
ebbd xen detach "$two" xvdb
ebbd xen detach "$two" xvdc
ebbd stat >/out/log/stat-end
kill -TERM "$daemon"
wait "$daemon" || fail "the daemon ended with $?"
