# Writes on 23 disks: one after the other three times over, then on all at once.
tools
ask mode
if [ "$(xenstore-read data/persistent)" = off ]; then
    echo N >/sys/module/xen_blkfront/parameters/feature_persistent
fi
ask disks
names="b c d e f g h i j k l m n o p q r s t u v w x"
for letter in $names; do wait_disk xvd$letter; done
for squeeze in 0 1 10 100; do
    ask turns
    start=$(cut -d' ' -f1 /proc/uptime)
    for pass in 1 2 3; do
        for letter in $names; do guest-load /dev/xvd$letter rw 128k 32 600 >/dev/null; done
    done
    ask turns-end
    say seconds $squeeze turns $start $(cut -d' ' -f1 /proc/uptime)
    ask all
    start=$(cut -d' ' -f1 /proc/uptime)
    for letter in $names; do guest-load /dev/xvd$letter rw 128k 32 1500 >/dev/null & done
    wait
    ask all-end
    say seconds $squeeze all $start $(cut -d' ' -f1 /proc/uptime)
done
