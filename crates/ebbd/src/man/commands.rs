//! The commands with manual pages of their own.

/// A command with a page of its own.
pub(super) struct CommandPage {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    pub(super) file: &'static str,
    /// Examples: what for, and the lines.
    pub(super) examples: &'static [(&'static str, &'static str)],
    pub(super) see_also: &'static [&'static str],
}

/// The commands with pages of their own, in the order of the command line.
pub(super) const COMMANDS: &[CommandPage] = &[
    CommandPage {
        name: "serve",
        title: "ebbd-serve",
        file: "ebbd-serve.1",
        examples: &[],
        see_also: &[],
    },
    CommandPage {
        name: "vhost-user",
        title: "ebbd-vhost-user",
        file: "ebbd-vhost-user.1",
        examples: &[
            (
                "A file, for a guest of QEMU, and the guest:",
                "ebbd vhost-user --socket-path=/tmp/disk.sock --blk-file=/srv/disk.img &\n\
                 qemu-system-x86_64 -m 1G -object memory-backend-memfd,id=mem,size=1G,share=on \\\n\
                 \u{20}   -machine q35,memory-backend=mem -chardev socket,id=disk,path=/tmp/disk.sock,reconnect=1 \\\n\
                 \u{20}   -device vhost-user-blk-pci,chardev=disk,num-queues=1",
            ),
            (
                "An export of an NBD server, with a write-back cache:",
                "ebbd vhost-user --socket-path=/tmp/disk.sock --volume nbd://storage/disk,cache=writeback",
            ),
        ],
        see_also: &["ebbd(1)", "ebbd-serve(1)", "qemu(1)"],
    },
    CommandPage {
        name: "get",
        title: "ebbd-get",
        file: "ebbd-get.1",
        examples: &[(
            "All parameters, one parameter of a volume, and those of a backing device:",
            "ebbd get\nebbd get max_buffer_pages --volume disk\nebbd get --bdi stick",
        )],
        see_also: &["ebbd(1)", "ebbd-set(1)", "ebbd-stat(1)"],
    },
    CommandPage {
        name: "set",
        title: "ebbd-set",
        file: "ebbd-set.1",
        examples: &[
            (
                "Keep no free pages for one volume, then go back to the configuration:",
                "ebbd set max_buffer_pages 0 --volume disk\n\
              ebbd set max_buffer_pages --unset --volume disk",
            ),
            ("Log in more detail:", "ebbd set log debug"),
            (
                "Limit the dirty data of a backing device to 16 MiB:",
                "ebbd stat bdi\nebbd set max_bytes 16M --bdi stick",
            ),
        ],
        see_also: &["ebbd(1)", "ebbd-get(1)", "ebbd.toml(5)"],
    },
    CommandPage {
        name: "stat",
        title: "ebbd-stat",
        file: "ebbd-stat.1",
        examples: &[
            ("Statistics for a program:", "ebbd stat --json | jq '.volumes[] | {name, clients}'"),
            (
                "The metrics for Prometheus, with any HTTP client:",
                "curl --unix-socket /run/ebbd/control.sock http://ebbd/metrics",
            ),
        ],
        see_also: &["ebbd(1)", "ebbd-get(1)", "ebbd-pressure(1)", "vmstat(8)"],
    },
    CommandPage {
        name: "status",
        title: "ebbd-status",
        file: "ebbd-status.1",
        examples: &[
            ("In a script:", "ebbd status || mail -s \"ebbd on $(hostname)\" root </dev/null"),
            (
                "The volumes that are not served:",
                "ebbd status --json | jq -r '.reasons[] | select(.kind == \"volume_not_served\") | .volume'",
            ),
        ],
        see_also: &["ebbd(1)", "ebbd-doctor(1)", "ebbd-events(1)", "ebbd-top(1)"],
    },
    CommandPage {
        name: "top",
        title: "ebbd-top",
        file: "ebbd-top.1",
        examples: &[("The volumes with the slowest requests first:", "ebbd top --sort p99")],
        see_also: &["ebbd(1)", "ebbd-stat(1)", "ebbd-status(1)"],
    },
    CommandPage {
        name: "events",
        title: "ebbd-events",
        file: "ebbd-events.1",
        examples: &[(
            "What happens to one volume, from now on:",
            "ebbd events --follow --lines 0 --volume disk",
        )],
        see_also: &["ebbd(1)", "ebbd-status(1)", "journalctl(1)"],
    },
    CommandPage {
        name: "doctor",
        title: "ebbd-doctor",
        file: "ebbd-doctor.1",
        examples: &[("Everything that is not well:", "ebbd doctor | grep -v ^ok")],
        see_also: &["ebbd(1)", "ebbd-status(1)", "ebbd-config(1)"],
    },
    CommandPage {
        name: "config",
        title: "ebbd-config",
        file: "ebbd-config.1",
        examples: &[(
            "Check a change, see what it does, and apply it:",
            "ebbd config check && ebbd config diff && systemctl reload ebbd",
        )],
        see_also: &["ebbd(1)", "ebbd-serve(1)", "ebbd.toml(5)"],
    },
    CommandPage {
        name: "bench",
        title: "ebbd-bench",
        file: "ebbd-bench.1",
        examples: &[(
            "Reads, and then reads and writes of a volume without data:",
            "ebbd bench disk\nebbd bench scratch --destroy-data",
        )],
        see_also: &["ebbd(1)", "ebbd-stat(1)", "fio(1)"],
    },
    CommandPage {
        name: "pressure",
        title: "ebbd-pressure",
        file: "ebbd-pressure.1",
        examples: &[(
            "Return all free memory to the host before a large job, and for the next minute:",
            "ebbd pressure L2 --seconds 60",
        )],
        see_also: &["ebbd(1)", "ebbd-stat(1)"],
    },
    CommandPage {
        name: "volume",
        title: "ebbd-volume",
        file: "ebbd-volume.1",
        examples: &[
            (
                "Add a disk of 20 GiB that the next start serves, too, and enlarge it while a guest uses it:",
                "ebbd volume add disk file:/srv/disk.img --size 20G --create --persist\n\
                 ebbd volume resize disk 40G",
            ),
            (
                "After the block device of a volume was extended:",
                "lvextend -L +10G /dev/vg/disk && ebbd volume resize disk",
            ),
            ("Remove a volume, and show how its data is written:", "ebbd volume remove disk"),
            (
                "Make an overlay above an image, a snapshot of it, and a clone of that:",
                "ebbd volume add web1 file:/srv/web1.delta --base golden --create --persist\n\
                 ebbd volume snapshot web1 monday --persist\n\
                 ebbd volume add web2 file:/srv/web2.delta --base web1@monday --create --persist",
            ),
            (
                "List what a backup has to copy from web1@tuesday over a copy of web1@monday:",
                "ebbd volume changes web1 --since monday --until tuesday --json",
            ),
        ],
        see_also: &["ebbd(1)", "ebbd-operation(1)", "ebbd-stat(1)", "ebbd.toml(5)"],
    },
    CommandPage {
        name: "image",
        title: "ebbd-image",
        file: "ebbd-image.1",
        examples: &[
            (
                "Copy an image of QEMU into a raw file:",
                "ebbd image import qcow2:/srv/golden.qcow2 file:/srv/golden.raw",
            ),
            (
                "Verify the delta of an overlay that no daemon serves, and copy the disk out of it:",
                "ebbd image check file:/srv/web1.delta --base qcow2:/srv/golden.qcow2\n\
                 ebbd image export file:/srv/web1.delta file:/srv/web1.raw --base qcow2:/srv/golden.qcow2",
            ),
            (
                "Copy a volume to another server while it is in use:",
                "ebbd volume snapshot web1 monday\n\
                 ebbd image export 'nbd+unix:///web1@monday?socket=/run/ebbd/nbd.sock' nbd://backup/web1",
            ),
        ],
        see_also: &["ebbd(1)", "ebbd-volume(1)", "qemu-img(1)"],
    },
    CommandPage {
        name: "flush",
        title: "ebbd-flush",
        file: "ebbd-flush.1",
        examples: &[("Before the host is switched off:", "ebbd flush --all")],
        see_also: &["ebbd(1)", "ebbd-operation(1)"],
    },
    CommandPage {
        name: "reload",
        title: "ebbd-reload",
        file: "ebbd-reload.1",
        examples: &[("After the configuration file was changed:", "ebbd reload")],
        see_also: &["ebbd(1)", "ebbd-serve(1)", "ebbd.toml(5)"],
    },
    CommandPage {
        name: "operation",
        title: "ebbd-operation",
        file: "ebbd-operation.1",
        examples: &[(
            "Follow the oldest one:",
            "ebbd operation list\nebbd operation show 1 --wait",
        )],
        see_also: &["ebbd(1)", "ebbd-volume(1)"],
    },
    CommandPage {
        name: "limit",
        title: "ebbd-limit",
        file: "ebbd-limit.1",
        examples: &[
            ("Limit a volume:", "ebbd limit disk --iops 5000 --bandwidth 200M --burst 2s"),
            (
                "Limit two volumes together, in equal parts:",
                "ebbd limit --group gold --iops 20000\n\
                 ebbd limit disk --group gold\n\
                 ebbd limit other --group gold",
            ),
            (
                "See what is in force, and go back to the configuration:",
                "ebbd limit disk\nebbd limit disk --clear",
            ),
        ],
        see_also: &["ebbd(1)", "ebbd-set(1)", "ebbd.toml(5)"],
    },
    CommandPage {
        name: "client",
        title: "ebbd-client",
        file: "ebbd-client.1",
        examples: &[(
            "See who is connected, and disconnect a client:",
            "ebbd client list\nebbd client disconnect nbd-17",
        )],
        see_also: &["ebbd(1)", "ebbd-stat(1)"],
    },
    CommandPage {
        name: "xen",
        title: "ebbd-xen",
        file: "ebbd-xen.1",
        examples: &[
            (
                "Attach a disk to a guest, and detach it:",
                "ebbd serve --xen --volume disk=file:/var/lib/ebbd/disk.img\n\
                 ebbd xen attach guest xvdb disk\n\
                 ebbd xen detach guest xvdb",
            ),
            (
                "In a guest's configuration, where the module xen-blkback is not loaded:",
                "disk = [ 'vdev=xvdb,access=rw,script=block-ebbd,target=disk' ]",
            ),
        ],
        see_also: &["ebbd(1)", "ebbd-serve(1)", "xl(1)", "xl-disk-configuration(5)"],
    },
    CommandPage {
        name: "token",
        title: "ebbd-token",
        file: "ebbd-token.1",
        examples: &[(
            "Let alice change everything over the page, and put the line of her token into the file:",
            "ebbd token operate alice | sudo tee -a /etc/ebbd/tokens\n\
             ebbd reload",
        )],
        see_also: &["ebbd(1)", "ebbd-serve(1)", "ebbd.toml(5)"],
    },
    CommandPage {
        name: "completions",
        title: "ebbd-completions",
        file: "ebbd-completions.1",
        examples: &[
            ("In this shell (bash):", "source <(ebbd completions bash)"),
            (
                "In all shells of this user (fish):",
                "ebbd completions fish >~/.config/fish/completions/ebbd.fish",
            ),
        ],
        see_also: &["ebbd(1)"],
    },
];
