//! The keys of a volume.

use super::limits::LIMIT_KEYS;
use super::{ConfigKey, Section};

/// The keys of a table `[volume.NAME]`. All but `store` are also options of `--volume`, with `-`
/// for `_`.
pub const VOLUME: Section = Section {
    header: "volume.NAME",
    doc: "A table for each volume. NAME is the export name that clients request: 1 to 255 bytes of \
          UTF-8 without control characters, in quotes if it has characters other than letters, \
          digits, - and _.",
    keys: &[
        ConfigKey {
            name: "store",
            value: "STORE",
            expected: "write where the data is: store = \"file:/var/lib/ebbd/disk.img\", \
                       \"memory:1G\" or \"null:1G\"",
            default: "",
            doc: "Where the data is; required. \"file:PATH\" is a regular file or a block device. \
                  \"qcow2:PATH\" is the disk in an image of QEMU's qcow2 format, read-only; images that are \
                  compressed or encrypted or have a backing file are refused: convert these with qemu-img. \
                  \"memory:SIZE\" is memory, lost when the daemon ends. \"null:SIZE\" reads as \
                  zeroes and discards writes. Sizes are multiples of 512. \
                  \"nbd://HOST:PORT/EXPORT\" and \"nbd+unix:///EXPORT?socket=PATH\" are an export of \
                  an NBD server; nbds:// and nbds+unix:// use TLS. Special characters are \
                  written as %XX. Parameters follow the ?, joined by &: tls-certificates=DIR (with \
                  ca-cert.pem and, if the server requires them, client-cert.pem and client-key.pem; \
                  without it the system's certificate authorities are used), tls-psk-file=FILE \
                  (with NAME@ before the host), tls-hostname=NAME, tls-verify-peer=false, \
                  reconnect=SECONDS (how long requests wait for a lost connection before they fail, \
                  0 to 86400, default 60), silence=SECONDS (how long a connected server may leave \
                  requests without a reply before its connection is closed and made anew, up to \
                  86400; without it ebbd waits without limit, because a server that is only slow may \
                  carry out old writes after newer ones), lost-writes=report (for a server that may \
                  lose acknowledged writes when it is killed: the next flush then fails, and the \
                  workers share one connection). If the \
                  server cannot be reached when the daemon starts, ebbd tries again until it can, \
                  and refuses clients of the volume meanwhile. \
                  \"rbd:POOL/IMAGE\", \"rbd:POOL/NAMESPACE/IMAGE\" and \"rbd:POOL/IMAGE@SNAPSHOT\" are an \
                  image of a Ceph cluster, or a snapshot of one, which is read-only; librbd has to be installed \
                  (Debian: librbd1). Its parameters: conf=FILE (ceph.conf), id=USER (without client.), \
                  keyring=FILE, encryption-format=luks1 or luks2 with encryption-passphrase-file=FILE, each as the \
                  option of rbd(8) of that name, where FILE may be credential:NAME, which systemd passes to the \
                  service with LoadCredential=NAME:PATH; connections=N (how many cluster \
                  handles the images of a cluster and user share, 1 to 64, default 1: more for many busy images, \
                  at sixteen threads each), timeout=SECONDS (how long requests wait for the cluster before \
                  they fail, 0 to 86400, default 60, 0 for no limit). A volume that is not read-only takes the \
                  exclusive lock of its image, and is refused if another client has it; with `state`, the lock \
                  of a daemon of this host that was killed is broken.",
        },
        ConfigKey {
            name: "base",
            value: "VOLUME",
            expected: "write the name of a volume: base = \"golden\"",
            default: "",
            doc: "The volume below this one, which is then an overlay: it reads as its base, and what is \
                  written goes to its own store, a delta in ebbd's format. The base has read_only = true, is \
                  not in memory (memory:), and may be an overlay itself; at most eight deltas may be \
                  above each other, snapshots included. All overlays of a base share one cached copy of it. An overlay is always cached. The delta records \
                  which base it was made for, and is refused above one with other content. \"none\" is for an overlay that \
                  was flattened: nothing is below it.",
        },
        ConfigKey {
            name: "size",
            value: "SIZE",
            expected: "write a size: size = \"1G\"",
            default: "",
            doc: "The size of the file to create, a multiple of 512. Needs create and a file \
                  store; a file that exists keeps its size. With base it is the size of the volume, and may be absent: \
                  then it is that of the base, whose end a smaller size cuts off.",
        },
        ConfigKey {
            name: "create",
            value: "BOOL",
            expected: "write true or false without quotes: create = true",
            default: "false",
            doc: "Whether to create a sparse file of the given size if the file does not exist, or with \
                  base an empty delta. Needs size, except with base.",
        },
        ConfigKey {
            name: "encryption",
            value: "KEY",
            expected: "write where the key is: encryption = \"key-file:/etc/ebbd/disk.key\"",
            default: "",
            doc: "Where the key of an encrypted volume is. The file or block device is then in the format LUKS2, that \
                  of cryptsetup, with the cipher aes-xts-plain64 and a key of 512 bits; clients, guests and the cache see \
                  plain data. \"key-file:PATH\" is a file, of which all bytes are the key, as with cryptsetup's option \
                  --key-file. \"credential:NAME\" is a credential of the systemd service, see LoadCredentialEncrypted= in \
                  systemd.exec(5). \"command:PROGRAM ARGUMENT...\" runs a program, by its whole path and without a shell, \
                  that writes the key to its standard output within 30 seconds; a volume that is added at run time cannot \
                  have one, and in the sandbox neither can one of a reload if no volume had one at the start. A key has at most 512 KiB. With create and size a file that does not exist or is empty gets a LUKS \
                  header, and so does a block device whose first 16 MiB are zeroes; the file is 16 MiB larger than the \
                  volume. Discards are not passed to the file. For file stores only, and neither for an overlay nor for a \
                  volume below one: a delta is not encrypted. Keys are listed and changed with ebbd volume key, or with ebbd image key while the volume is not open. Where a \
                  reload changes nothing else of the volume, the new key is tried and clients stay connected; a wrong one \
                  changes nothing.",
        },
        ConfigKey {
            name: "read_only",
            value: "BOOL",
            expected: "write true or false without quotes: read_only = true",
            default: "false",
            doc: "Whether clients may only read.",
        },
        ConfigKey {
            name: "shared",
            value: "BOOL",
            expected: "write true or false without quotes: shared = true",
            default: "false",
            doc: "Whether several Xen guests, or a guest and NBD clients, may have the volume open for \
                  writing at the same time. Only for software that coordinates its writes, such as \
                  cluster file systems. Without it a volume has one writer at a time: one guest, or \
                  the NBD clients, which together count as one writer. A second writer is refused; \
                  a guest may still attach the volume read-only.",
        },
        ConfigKey {
            name: "allow",
            value: "LIST",
            expected: "write a list of clients: allow = [\"uid:1000\"]",
            default: "",
            doc: "The clients that may open the volume; without the key all that its exports admit may, with an empty \
                  list none. A client may if one entry matches it: \"psk:NAME\" (the name of its pre-shared key), \
                  \"cn:PATTERN\" (the common name of its certificate, in which each * stands for one or more characters, \
                  also dots; case matters), \"uid:USER\" or \"gid:GROUP\" (by name or number: the user, or one of \
                  the groups, of a process that connects to a unix socket, also one of vhost-user), \
                  \"net:NETWORK\" (its address: net:10.0.0.0/8, net:fd00::/8 or one address; an IPv6 network has no IPv4 address in it) \
                  or \"xen:GUEST\" (a Xen guest by its name, UUID or the number of its domain). To other clients it is as if \
                  there were no such volume. Names of users and groups are looked up when the configuration is read; an entry whose user or group this host \
                  does not have then admits no client, with a warning, and the others are in force. A snapshot \
                  VOLUME@NAME follows the list of its volume unless it has one of its own; give it one before the entry of its volume \
                  is removed from the file while the daemon is stopped. A change takes effect \
                  at a reload, which disconnects clients that may no longer open the volume. As an option, entries are \
                  separated by two commas.",
        },
        ConfigKey {
            name: "direct",
            value: "MODE",
            expected: "write a mode: direct = \"auto\"",
            default: "auto",
            doc: "Whether a file is opened with O_DIRECT, which bypasses the kernel's page cache: \
                  \"auto\" (if the file system supports it), \"on\" (opening fails if it does not) \
                  or \"off\". For file stores only.",
        },
        ConfigKey {
            name: "cache",
            value: "MODE",
            expected: "write a mode: cache = \"writethrough\"",
            default: "none",
            doc: "The cache mode: \"none\" (each request goes to the store), \"writethrough\" (data \
                  that was read or written is cached in otherwise unused memory; a write is \
                  acknowledged when the store has completed it) or \"writeback\" (a write is \
                  acknowledged when it is in memory and is written to the store later, within about 30 \
                  seconds; a flush, or a write with FUA, waits for the store, as with a disk that \
                  has a volatile write cache). The default is \"writethrough\" for stores on another \
                  host and for overlays, and \"none\" for all others.",
        },
        ConfigKey {
            name: "bdi",
            value: "NAME",
            expected: "write a name: bdi = \"array\"",
            default: "",
            doc: "The backing device of a volume with cache = \"writeback\": volumes with the same \
                  name here share one limit of dirty data and are throttled together. Without the \
                  key, volumes on the same disk or on the same server share a backing device. At \
                  most 256 backing devices are possible.",
        },
        ConfigKey {
            name: "default",
            value: "BOOL",
            expected: "write true or false without quotes: default = true",
            default: "false",
            doc: "Whether the volume is also the default export, which clients get that request the \
                  empty export name. At most one volume; the only volume of a configuration is the \
                  default export in any case.",
        },
        ConfigKey {
            name: "vhost_user",
            value: "PATH",
            expected: "write a path: vhost_user = \"/run/ebbd/disk.sock\"",
            default: "",
            doc: "The unix socket at which the volume is served over vhost-user-blk, instead of the one in \
                  the directory vhost_user of the daemon, or \"none\" for none. The daemon's user and \
                  group may connect to it. The daemon creates it, and replaces one that no server listens \
                  at. It makes the socket's directory, too; the one above it must exist. With it listen may be absent.",
        },
        ConfigKey {
            name: "max_buffer_pages",
            value: "N",
            expected: "write a whole number from 0 to 1048576: max_buffer_pages = 64",
            default: "",
            doc: "The volume's own max_buffer_pages; without it the daemon's value is used.",
        },
        ConfigKey {
            name: "buffer_squeeze_duration_ms",
            value: "N",
            expected: "write a whole number from 0 to 60000: buffer_squeeze_duration_ms = 100",
            default: "",
            doc: "The volume's own buffer_squeeze_duration_ms; without it the daemon's value is used.",
        },
        LIMIT_KEYS[0],
        LIMIT_KEYS[1],
        LIMIT_KEYS[2],
        LIMIT_KEYS[3],
        LIMIT_KEYS[4],
        LIMIT_KEYS[5],
        LIMIT_KEYS[6],
        ConfigKey {
            name: "limit_group",
            value: "NAME",
            expected: "write a name: limit_group = \"gold\"",
            default: "none",
            doc: "The group whose limits (see [limit_group.NAME]) the volume shares with other volumes, or \
                  \"none\". Can be set at run time, see ebbd-limit(1).",
        },
    ],
};
