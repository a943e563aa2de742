#!/bin/sh
# Hotplug script of a `phy:` disk: all that the kernel's backend needs.
[ "$1" = add ] || exit 0
path=$(xenstore-read "$XENBUS_PATH/params")
xenstore-write "$XENBUS_PATH/physical-device" "$(stat -L -c %t:%T "$path")" \
    "$XENBUS_PATH/hotplug-status" connected
