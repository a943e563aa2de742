# Writes on 23 disks: one after the other three times over, then on all at once; for each setting.
tools
ask mode
if [ "$(xenstore-read data/persistent)" = off ]; then
    echo N >/sys/module/xen_blkfront/parameters/feature_persistent
fi
ask disks
names="b c d e f g h i j k l m n o p q r s t u v w x"
for letter in $names; do wait_disk xvd$letter; done
# Every page a disk uses was mapped before anything counts.
for letter in $names; do guest-load /dev/xvd$letter rw 128k 32 128 >/dev/null; done
now() { cut -d' ' -f1 /proc/uptime; }
while :; do
    ask setting
    setting=$(xenstore-read data/setting)
    [ "$setting" != end ] || break
    ask turns
    start=$(now)
    for pass in 1 2 3; do
        for letter in $names; do guest-load /dev/xvd$letter rw 128k 32 128 >/dev/null; done
    done
    end=$(now)
    ask turns-end
    say seconds $setting turns $start $end
    ask all
    start=$(now)
    for letter in $names; do guest-load /dev/xvd$letter rw 128k 32 192 >/dev/null & done
    wait
    end=$(now)
    ask all-end
    say seconds $setting all $start $end
done
