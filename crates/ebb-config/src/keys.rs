//! The one table of configuration keys.
//!
//! The check for unknown keys, the remedies, the manual page `ebbd.toml(5)` and the option list
//! of `ebbd-serve(1)` are made from this table. Tests compare it with the fields that serde accepts
//! ([`super::file`]), with the defaults of [`super::Config`] and with the options of the command
//! line, so that they cannot diverge.

mod limits;

use self::limits::LIMIT_KEYS;

/// One key of the configuration file.
#[derive(Clone, Copy, Debug)]
pub struct ConfigKey {
    /// The key as written in the file.
    pub name: &'static str,
    /// A placeholder for its value, for synopses.
    pub value: &'static str,
    /// The form of a valid value, as a remedy: "write ...".
    pub expected: &'static str,
    /// The default as it is written in the file; empty if there is none.
    pub default: &'static str,
    /// What the key does: sentences, with unit and range.
    pub doc: &'static str,
}

/// A table of the configuration file with its keys.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// The header as written in the file; empty for the top of the file.
    pub header: &'static str,
    /// What the table is for.
    pub doc: &'static str,
    /// The keys in it.
    pub keys: &'static [ConfigKey],
}

/// The keys at the top of the file, before any table.
pub const TOP: Section = Section {
    header: "",
    doc: "These keys are at the top of the file, before the first table.",
    keys: &[
        ConfigKey {
            name: "listen",
            value: "[ADDRESS, ...]",
            expected: "write a list of addresses: listen = [\"unix:/run/ebbd/nbd.sock\"]",
            default: "",
            doc: "The addresses to listen at, each \"unix:/path\" or \"tcp:HOST:PORT\" (an IPv6 \
                  address in brackets: \"tcp:[::1]:10809\"). A unix path has at most 107 bytes. \
                  The addresses of the command line are added to these. With sockets passed by the \
                  service manager (LISTEN_FDS) the key must be absent. A change needs a restart.",
        },
        ConfigKey {
            name: "workers",
            value: "N",
            expected: "write a whole number from 1 to 64: workers = 1",
            default: "1",
            doc: "The number of worker threads, each with its own io_uring, 1 to 64. A change \
                  needs a restart.",
        },
        ConfigKey {
            name: "log",
            value: "LEVEL",
            expected: "write a level: log = \"info\"",
            default: "info",
            doc: "The log level: \"error\", \"warn\", \"info\" or \"debug\". Each level includes \
                  the ones before it.",
        },
        ConfigKey {
            name: "log_format",
            value: "FORM",
            expected: "write a form: log_format = \"json\"",
            default: "text",
            doc: "The form of the log's lines on stderr: \"text\", or \"json\" with one object in each line: \
                  timestamp, level, message, and fields such as volume, client and error. Where stderr is \
                  the journal, each line has its priority, and text has no time of its own. A change needs a \
                  restart.",
        },
        ConfigKey {
            name: "control",
            value: "PATH",
            expected: "write a unix socket: control = \"unix:/run/ebbd/control.sock\"",
            default: "",
            doc: "The unix socket that ebbd get, set, stat, volume and others connect to, and that \
                  serves HTTP. Root and the daemon's user may use all of it, members of the daemon's \
                  group may read, others nothing. Without the key there is no control socket. With it there may be no volume in the file: volumes can be added \
                  with ebbd-volume(1). A change needs a restart.",
        },
        ConfigKey {
            name: "state",
            value: "DIR",
            expected: "write a directory: state = \"/var/lib/ebbd\"",
            default: "",
            doc: "The directory in which the daemon keeps the volumes that were added with ebbd volume \
                  add --persist, and the sizes of volumes of this file that were resized: one file \
                  volumes/NAME.toml for each volume, with the keys of a table [volume.NAME] or \
                  only its new size. They are read after this file, at the start and at a reload; \
                  a volume of this file replaces one of the same name there. The daemon creates \
                  and writes the files. Without the key no volume can be kept. If it is on a file \
                  system of its own, the unit needs RequiresMountsFor=DIR. A change needs a restart.",
        },
        ConfigKey {
            name: "web",
            value: "ADDRESS",
            expected: "write a TCP address: web = \"tcp:127.0.0.1:9477\"",
            default: "",
            doc: "The TCP address of the web page with plots of memory, cache and traffic (at /) and of the \
                  metrics for Prometheus (at /metrics), and of the interface below /v1. What a \
                  client may do depends on its token, see web_tokens. Any other than a loopback \
                  address needs web_tokens and web_tls_certificates. To prevent DNS rebinding, \
                  requests are accepted only if their Host header is an IP address, localhost, a name \
                  of this machine or one of web_names. Without the key there is no page. A change \
                  needs a restart.",
        },
        ConfigKey {
            name: "web_names",
            value: "[NAME, ...]",
            expected: "write a list of names: web_names = [\"storage.example\"]",
            default: "",
            doc: "Additional host names under which browsers reach the page, such as the name of a \
                  proxy. A change needs a restart.",
        },
        ConfigKey {
            name: "web_tokens",
            value: "FILE",
            expected: "write a path: web_tokens = \"/etc/ebbd/tokens\"",
            default: "",
            doc: "The file of the tokens for the page: lines ROLE:NAME:SHA256, as ebbd token prints them. \
                  A client sends its token in the header \"Authorization: Bearer TOKEN\"; with the role \
                  view it may read everything, with operate also change everything; without a token it \
                  gets the page's own files and /healthz only. Other users may not write to the file. \
                  Without the key every client that can connect may read everything, including the \
                  names of volumes, and change nothing. A reload reads the file again.",
        },
        ConfigKey {
            name: "web_tls_certificates",
            value: "DIR",
            expected: "write a path: web_tls_certificates = \"/etc/ebbd/web\"",
            default: "",
            doc: "The directory with server-cert.pem and server-key.pem, with which the page is served \
                  over HTTPS only. Without the key it is not encrypted. A reload reads the files again.",
        },
        ConfigKey {
            name: "xen",
            value: "BOOL",
            expected: "write true or false without quotes: xen = true",
            default: "false",
            doc: "Whether to serve disks of Xen guests: those attached with ebbd-xen(1) and, if the \
                  kernel's backend (xen-blkback) is not loaded, those with the script block-ebbd. \
                  Needs root in dom0 of a Xen host. With it listen may be absent. A change needs a \
                  restart.",
        },
        ConfigKey {
            name: "vhost_user",
            value: "DIR",
            expected: "write a directory: vhost_user = \"/run/ebbd/vhost-user\"",
            default: "",
            doc: "The directory of the sockets at which volumes are served over vhost-user-blk, to guests of \
                  QEMU, Cloud Hypervisor and the like: DIR/NAME.sock for each volume without a \
                  vhost_user of its own, with bytes of NAME other than letters, digits, -, _ and . \
                  written as %XX. The daemon's user and group may connect to a socket. The daemon makes the \
                  directory; the one above it must exist. After a reload that moves a socket, a frontend \
                  that is connected keeps its disk, and its VMM needs the new path to connect again. With \
                  it listen may be absent.",
        },
        ConfigKey {
            name: "max_buffer_pages",
            value: "N",
            expected: "write a whole number from 0 to 1048576: max_buffer_pages = 1024",
            default: "1024",
            doc: "The number of free pages of 4096 bytes that each queue keeps for later requests, \
                  0 to 1048576. Can be set at run time, see ebbd-set(1).",
        },
        ConfigKey {
            name: "buffer_squeeze_duration_ms",
            value: "N",
            expected: "write a whole number from 0 to 60000: buffer_squeeze_duration_ms = 10",
            default: "10",
            doc: "How long page pools keep no free pages after a sign of memory pressure, in \
                  milliseconds, 0 to 60000. Can be set at run time, see ebbd-set(1).",
        },
        ConfigKey {
            name: "idle_memory",
            value: "MODE",
            expected: "write a mode: idle_memory = \"lend\"",
            default: "lend",
            doc: "What happens to I/O memory that no request uses: \"lend\" (it is marked \
                  MADV_FREE, so that the kernel may take it at any time, and it is returned under \
                  memory pressure), \"drop\" (it is kept until memory pressure, then returned), \
                  \"keep\" (it is kept, even under memory pressure) or \"none\" (it is returned as \
                  soon as requests have completed). The modes other than \"lend\" are for \
                  comparison, and for hosts that run only ebbd. A change needs a restart.",
        },
        ConfigKey {
            name: "cache_max",
            value: "SIZE",
            expected: "write a size: cache_max = \"4G\"",
            default: "0",
            doc: "The maximum size of the cache of all volumes together, 1M to 1T. With 0 the cache \
                  grows while the host has free memory, up to four fifths of the memory of the host \
                  or of the daemon's control group. Can be set at run time, see ebbd-set(1).",
        },
        ConfigKey {
            name: "cache_min",
            value: "SIZE",
            expected: "write a size: cache_min = \"64M\"",
            default: "0",
            doc: "The size down to which the cache shrinks under memory pressure of the levels L1 \
                  and L2, 0 to 1T, at most cache_max. The last resort (L3) empties the cache. Can \
                  be set at run time, see ebbd-set(1).",
        },
    ],
};

/// The keys of the table `[nbd]`.
pub const NBD: Section = Section {
    header: "nbd",
    doc: "Limits and encryption of the NBD server.",
    keys: &[
        ConfigKey {
            name: "max_clients",
            value: "N",
            expected: "write a whole number from 1 to 65536: max_clients = 256",
            default: "256",
            doc: "The maximum number of NBD connections at a time, 1 to 65536. If several volumes are \
                  served, the connections to one volume are at most four times the number of \
                  connections that remain free.",
        },
        ConfigKey {
            name: "max_request",
            value: "SIZE",
            expected: "write a size: max_request = \"32M\"",
            default: "32M",
            doc: "The largest payload of one READ or WRITE request, 4K to 64M.",
        },
        ConfigKey {
            name: "connection_memory",
            value: "SIZE",
            expected: "write a size: connection_memory = \"64M\"",
            default: "64M",
            doc: "The memory that the requests of one connection may hold, max_request or more. A \
                  request that would need more waits.",
        },
        ConfigKey {
            name: "tls",
            value: "MODE",
            expected: "write a mode: tls = \"require\"",
            default: "off",
            doc: "Encryption: \"off\", \"on\" (clients may use it) or \"require\" (clients must use \
                  it). \"on\" and \"require\" need one of tls_certificates and tls_psk. A \
                  change of this or another tls key needs a restart.",
        },
        ConfigKey {
            name: "tls_certificates",
            value: "DIR",
            expected: "write a path: tls_certificates = \"/etc/ebbd/tls\"",
            default: "",
            doc: "A directory with ca-cert.pem, server-cert.pem and server-key.pem.",
        },
        ConfigKey {
            name: "tls_psk",
            value: "FILE",
            expected: "write a path: tls_psk = \"/etc/ebbd/keys.psk\"",
            default: "",
            doc: "A file of pre-shared keys, one \"name:hexadecimal key\" a line.",
        },
        ConfigKey {
            name: "tls_verify_peer",
            value: "BOOL",
            expected: "write true or false without quotes: tls_verify_peer = true",
            default: "false",
            doc: "Whether a client must show a certificate signed by ca-cert.pem. Needs \
                  tls_certificates.",
        },
    ],
};

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
                  and refuses clients of the volume meanwhile.",
        },
        ConfigKey {
            name: "base",
            value: "VOLUME",
            expected: "write the name of a volume: base = \"golden\"",
            default: "",
            doc: "The volume below this one, which is then an overlay: it reads as its base, and what is \
                  written goes to its own store, a delta in ebbd's format. The base has read_only = true, and may be an \
                  overlay itself; at most eight overlays may be above each other. All overlays of a base \
                  share one cached copy of it. An overlay is always cached. The delta records \
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
                  then it is that of the base.",
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

/// The keys of a table `[bdi.NAME]`.
pub const BDI: Section = Section {
    header: "bdi.NAME",
    doc: "A table for each backing device with limits of its own. Volumes with cache = \
          \"writeback\" share a backing device if they are on one disk, on one server, or have the \
          same value of the key bdi. NAME is the name that ebbd stat bdi shows: the value of bdi, \
          \"MAJOR:MINOR\" of a disk, or the address of a server. No key here needs to be set to suit \
          the hardware. All can be set at run time, see ebbd-set(1).",
    keys: &[
        ConfigKey {
            name: "min_ratio",
            value: "PERCENT",
            expected: "write a number of percent: min_ratio = 5",
            default: "0",
            doc: "The part of the limit of all dirty data that is reserved for the device, in \
                  percent, 0 to 100, with up to four digits after the point; at most max_ratio, and \
                  at most 100 for all devices together.",
        },
        ConfigKey {
            name: "max_ratio",
            value: "PERCENT",
            expected: "write a number of percent: max_ratio = 25",
            default: "100",
            doc: "The largest part of the limit of all dirty data that the device may have, in \
                  percent, 0.0001 to 100.",
        },
        ConfigKey {
            name: "max_bytes",
            value: "SIZE",
            expected: "write a size: max_bytes = \"16M\"",
            default: "0",
            doc: "The most data of the device that may be dirty or under writeback, 64K to 1T. With \
                  0 the only limit is what the device writes in two seconds.",
        },
        ConfigKey {
            name: "strict_limit",
            value: "BOOL",
            expected: "write true or false without quotes: strict_limit = true",
            default: "false",
            doc: "Whether every write must fit below the threshold of the device. Without it a write \
                  is admitted whole if at most half of the threshold is used.",
        },
    ],
};

/// The keys of a table `[limit_group.NAME]`.
pub const LIMIT_GROUP: Section = Section {
    header: "limit_group.NAME",
    doc: "A table for each group of volumes with limits in common: those with the key limit_group = \
          \"NAME\". Members that want more than the limits allow have equal parts, and what others leave \
          goes to them.",
    keys: &LIMIT_KEYS,
};

/// All tables, in the order people write them.
pub const SECTIONS: [Section; 5] = [TOP, NBD, BDI, LIMIT_GROUP, VOLUME];

/// The tables' names at the top of the file.
const TABLES: [&str; 4] = ["nbd", "bdi", "limit_group", "volume"];

/// A complete configuration file, for the manual; a test parses it.
pub const EXAMPLE: &str = r#"listen = ["unix:/run/ebbd/nbd.sock", "tcp:127.0.0.1:10809"]
workers = 1
log = "info"
control = "unix:/run/ebbd/control.sock"
state = "/var/lib/ebbd"
xen = false
vhost_user = "/run/ebbd/vhost-user"
max_buffer_pages = 1024
buffer_squeeze_duration_ms = 10
idle_memory = "lend"
cache_max = "4G"
cache_min = "64M"

[nbd]
max_clients = 256
max_request = "32M"
connection_memory = "64M"
tls = "require"
tls_certificates = "/etc/ebbd/tls"
tls_verify_peer = true

[bdi.stick]
max_bytes = "16M"

[limit_group.gold]
limit_iops = 20000
limit_bandwidth = "800M"

[volume.disk]
store = "file:/var/lib/ebbd/disk.img"
size = "1G"
create = true
default = true

[volume."install cd"]
store = "file:/srv/images/install.iso"
read_only = true

[volume.scratch]
store = "memory:256M"
max_buffer_pages = 64
limit_iops = 5000
limit_burst_ms = 2000
limit_group = "gold"

[volume.portable]
store = "file:/dev/disk/by-label/portable"
cache = "writeback"
bdi = "stick"
vhost_user = "/run/ebbd/portable.sock"
"#;

impl Section {
    /// The names of the keys.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + Clone + use<> {
        let keys = self.keys;
        keys.iter().map(|key| key.name)
    }

    /// The key called `name`.
    pub fn find(&self, name: &str) -> Option<&'static ConfigKey> {
        let keys = self.keys;
        keys.iter().find(|key| key.name == name)
    }
}

impl ConfigKey {
    /// The name as an option of `--volume`.
    pub fn option_name(&self) -> String {
        self.name.replace('_', "-")
    }
}

/// The keys and tables at the top of the file.
pub(super) fn top_names() -> impl Iterator<Item = &'static str> + Clone {
    TOP.names().chain(TABLES)
}

/// The form of a valid value for the key at `path`.
pub(super) fn expected(path: &[String]) -> &'static str {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let key = match path.as_slice() {
        ["nbd"] => return "write a table: [nbd] and its keys below",
        ["volume"] => return "write a table for each volume: [volume.disk] and its keys below",
        ["bdi"] => return "write a table for each device: [bdi.array] and its keys below",
        ["bdi", _] => return "write a table: [bdi.array] and below it max_bytes = \"16M\"",
        ["volume", _] => {
            return "write a table: [volume.disk] and below it store = \"file:/path/to/image\"";
        }
        [top] => TOP.find(top),
        ["nbd", name, ..] => NBD.find(name),
        ["bdi", _, name, ..] => BDI.find(name),
        ["volume", _, name, ..] => VOLUME.find(name),
        _ => None,
    };
    key.map_or("see ebbd.toml(5) for the keys and their values", |key| key.expected)
}

/// The remedy for the unknown key `given` in `section`.
pub(super) fn unknown_key_remedy(section: &Section, given: &str) -> String {
    let plain = given.replace('-', "_");
    for other in SECTIONS.iter().filter(|other| other.header != section.header) {
        if section.find(&plain).is_none() && other.find(&plain).is_some() {
            return match other.header {
                "" => format!("`{plain}` belongs at the top of the file, before any table"),
                header => format!("`{plain}` belongs in the table [{header}]"),
            };
        }
    }
    let near = if section.header.is_empty() {
        super::error::closest(given, top_names())
    } else {
        super::error::closest(given, section.names())
    };
    if let Some(name) = near {
        return format!("did you mean `{name}`?");
    }
    let all: Vec<&str> =
        if section.header.is_empty() { top_names().collect() } else { section.names().collect() };
    format!("the keys here are {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_is_a_sentence_and_every_name_is_unique() {
        for section in SECTIONS {
            assert!(section.doc.ends_with('.'), "{}", section.header);
            for key in section.keys {
                assert!(key.doc.ends_with('.'), "{}", key.name);
                assert!(key.expected.starts_with("write "), "{}", key.name);
                assert_eq!(section.names().filter(|name| *name == key.name).count(), 1);
            }
        }
    }

    #[test]
    fn the_remedy_for_an_unknown_key_names_the_likely_key_or_its_table() {
        assert_eq!(unknown_key_remedy(&NBD, "max-client"), "did you mean `max_clients`?");
        assert_eq!(unknown_key_remedy(&TOP, "volumes"), "did you mean `volume`?");
        assert_eq!(
            unknown_key_remedy(&TOP, "max_clients"),
            "`max_clients` belongs in the table [nbd]"
        );
        assert_eq!(
            unknown_key_remedy(&NBD, "workers"),
            "`workers` belongs at the top of the file, before any table"
        );
        assert_eq!(
            unknown_key_remedy(&TOP, "zebra"),
            "the keys here are listen, workers, log, log_format, control, state, web, web_names, web_tokens, \
             web_tls_certificates, xen, vhost_user, \
             max_buffer_pages, buffer_squeeze_duration_ms, idle_memory, cache_max, cache_min, \
             nbd, bdi, limit_group, volume"
        );
    }
}
