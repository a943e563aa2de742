//! The one table of configuration keys.
//!
//! The check for unknown keys, the remedies, the manual page `ebbd.toml(5)` and the option list
//! of `ebbd-serve(1)` read this table. Tests hold it against the fields serde accepts
//! ([`super::file`]), against the defaults of [`super::Config`] and against the options of the
//! command line, so that none of them can drift from another.

/// One key of the configuration file.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The key as written in the file.
    pub name: &'static str,
    /// A placeholder for its value, for synopses.
    pub value: &'static str,
    /// What a right value looks like, as a remedy: "write ...".
    pub expected: &'static str,
    /// The default as one would write it; empty if there is none.
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
    pub keys: &'static [Key],
}

/// The keys at the top of the file, before any table.
pub const TOP: Section = Section {
    header: "",
    doc: "These keys stand at the top of the file, before the first table.",
    keys: &[
        Key {
            name: "listen",
            value: "[ADDRESS, ...]",
            expected: "write a list of addresses: listen = [\"unix:/run/ebbd/nbd.sock\"]",
            default: "",
            doc: "The addresses to listen at, each \"unix:/path\" or \"tcp:HOST:PORT\" (an IPv6 \
                  address in brackets: \"tcp:[::1]:10809\"). A unix path has at most 107 bytes. \
                  Addresses of the command line are added to these. With sockets passed by the \
                  service manager (LISTEN_FDS) the key must be absent. A change needs a restart.",
        },
        Key {
            name: "workers",
            value: "N",
            expected: "write a whole number from 1 to 64: workers = 1",
            default: "1",
            doc: "The number of worker threads, each with its own io_uring, 1 to 64. A change \
                  needs a restart.",
        },
        Key {
            name: "log",
            value: "LEVEL",
            expected: "write a level: log = \"info\"",
            default: "info",
            doc: "What goes to the log: \"error\", \"warn\", \"info\" or \"debug\", each with all \
                  before it.",
        },
        Key {
            name: "control",
            value: "PATH",
            expected: "write a unix socket: control = \"unix:/run/ebbd/control.sock\"",
            default: "",
            doc: "The unix socket that ebbd get, set, stat and pressure use, and that answers \
                  HTTP. Only the daemon's user may open it. Without the key there is none. A \
                  change needs a restart.",
        },
        Key {
            name: "web",
            value: "ADDRESS",
            expected: "write a TCP address: web = \"tcp:127.0.0.1:9477\"",
            default: "",
            doc: "Where a browser finds a page with plots of memory, cache and traffic, at /, and \
                  Prometheus its metrics, at /metrics. Everybody who can connect may look, names of \
                  volumes included; nothing can be changed there. It answers to addresses, localhost, the \
                  names of this machine and those of web_names, so that no other site can have a \
                  browser read it. Without the key there is none. A change needs a restart.",
        },
        Key {
            name: "web_names",
            value: "[NAME, ...]",
            expected: "write a list of names: web_names = [\"storage.example\"]",
            default: "",
            doc: "Further names under which browsers reach the page, such as those of a proxy. A \
                  change needs a restart.",
        },
        Key {
            name: "xen",
            value: "BOOL",
            expected: "write true or false without quotes: xen = true",
            default: "false",
            doc: "Whether disks of Xen guests are served: those of ebbd-xen(1), and where the \
                  kernel's own backend is not loaded those with the script block-ebbd. Needs Xen, \
                  and to be root in dom0. With it listen may be absent. A change needs a restart.",
        },
        Key {
            name: "max_buffer_pages",
            value: "N",
            expected: "write a whole number from 0 to 1048576: max_buffer_pages = 1024",
            default: "1024",
            doc: "The number of free pages of 4096 bytes each queue keeps for requests to come, \
                  0 to 1048576. Can be set at run time, see ebbd-set(1).",
        },
        Key {
            name: "buffer_squeeze_duration_ms",
            value: "N",
            expected: "write a whole number from 0 to 60000: buffer_squeeze_duration_ms = 10",
            default: "10",
            doc: "How long pools of free pages keep nothing after a sign of memory pressure, in \
                  milliseconds, 0 to 60000. Can be set at run time, see ebbd-set(1).",
        },
        Key {
            name: "idle_memory",
            value: "MODE",
            expected: "write a mode: idle_memory = \"lend\"",
            default: "lend",
            doc: "What becomes of I/O memory that no request uses: \"lend\" (the kernel may take \
                  it at any moment, and signs of memory pressure return it), \"drop\" (it stays \
                  until a sign of memory pressure, which returns it), \"keep\" (what the load \
                  once took stays, whatever the pressure) or \"none\" (it is returned as soon as \
                  requests are done). The others than \"lend\" are there for comparison, and for \
                  a host of its own. A change needs a restart.",
        },
        Key {
            name: "cache_max",
            value: "SIZE",
            expected: "write a size: cache_max = \"4G\"",
            default: "0",
            doc: "The most memory the cache of all volumes together may hold, 1M to 1T. 0 leaves \
                  it to the host: up to four fifths of what it, or the daemon's control group, \
                  has. Can be set at run time, see ebbd-set(1).",
        },
        Key {
            name: "cache_min",
            value: "SIZE",
            expected: "write a size: cache_min = \"64M\"",
            default: "0",
            doc: "What the cache keeps under memory pressure short of the last resort, 0 to 1T, \
                  at most cache_max. Can be set at run time, see ebbd-set(1).",
        },
    ],
};

/// The keys of the table `[nbd]`.
pub const NBD: Section = Section {
    header: "nbd",
    doc: "Limits and encryption of the NBD server.",
    keys: &[
        Key {
            name: "max_clients",
            value: "N",
            expected: "write a whole number from 1 to 65536: max_clients = 256",
            default: "256",
            doc: "The number of connections the daemon holds at a time, 1 to 65536. Where several volumes are served, \
                  those to one are at most four times as many as they leave free.",
        },
        Key {
            name: "max_request",
            value: "SIZE",
            expected: "write a size: max_request = \"32M\"",
            default: "32M",
            doc: "The largest payload of one READ or WRITE request, 4K to 64M.",
        },
        Key {
            name: "connection_memory",
            value: "SIZE",
            expected: "write a size: connection_memory = \"64M\"",
            default: "64M",
            doc: "The memory the requests of one connection may hold, max_request or more. A \
                  connection that would need more waits.",
        },
        Key {
            name: "tls",
            value: "MODE",
            expected: "write a mode: tls = \"require\"",
            default: "off",
            doc: "Encryption: \"off\", \"on\" (clients may ask for it) or \"require\" (clients \
                  must). \"on\" and \"require\" need one of tls_certificates and tls_psk. A \
                  change of this and the other tls keys needs a restart.",
        },
        Key {
            name: "tls_certificates",
            value: "DIR",
            expected: "write a path: tls_certificates = \"/etc/ebbd/tls\"",
            default: "",
            doc: "A directory with ca-cert.pem, server-cert.pem and server-key.pem.",
        },
        Key {
            name: "tls_psk",
            value: "FILE",
            expected: "write a path: tls_psk = \"/etc/ebbd/keys.psk\"",
            default: "",
            doc: "A file of pre-shared keys, one \"name:hexadecimal key\" a line.",
        },
        Key {
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
    doc: "A table for each volume. NAME is the export name clients ask for: 1 to 255 bytes of \
          UTF-8 without control characters, in quotes if it has other characters than letters, \
          digits, - and _.",
    keys: &[
        Key {
            name: "store",
            value: "STORE",
            expected: "write where the bytes live: store = \"file:/var/lib/ebbd/disk.img\", \
                       \"memory:1G\" or \"null:1G\"",
            default: "",
            doc: "Where the bytes live; must be given. \"file:PATH\" is a regular file or a \
                  block device, \"memory:SIZE\" is memory, lost when the daemon ends, \
                  \"null:SIZE\" reads as zeroes and forgets writes. Sizes are multiples of 512. \
                  \"nbd://HOST:PORT/EXPORT\" and \"nbd+unix:///EXPORT?socket=PATH\" are an export of \
                  an NBD server; nbds:// and nbds+unix:// go over TLS. Special characters are \
                  written as %XX. Parameters after the ?, joined by &: tls-certificates=DIR (with \
                  ca-cert.pem, and client-cert.pem and client-key.pem if the server asks; without \
                  it the system's authorities count), tls-psk-file=FILE (with NAME@ before the \
                  host), tls-hostname=NAME, tls-verify-peer=false, reconnect=SECONDS (how long \
                  requests wait for a lost server before they fail, 0 to 86400, else 60), \
                  silence=SECONDS (how long a server that is connected may owe answers and give \
                  none before its connection counts as lost, up to 86400; else it is waited for, \
                  since one that is only slow may carry out old writes after newer ones), \
                  lost-writes=report (for a server that may lose acknowledged writes when it is \
                  killed: the next flush then fails). A server that is not there when the daemon starts is \
                  tried again until it is; its volume is refused meanwhile.",
        },
        Key {
            name: "size",
            value: "SIZE",
            expected: "write a size: size = \"1G\"",
            default: "",
            doc: "The size of the file to create, a multiple of 512. Needs create and a file \
                  store; a file that exists keeps its own size.",
        },
        Key {
            name: "create",
            value: "BOOL",
            expected: "write true or false without quotes: create = true",
            default: "false",
            doc: "Whether to make a sparse file of the given size if there is no file. Needs size.",
        },
        Key {
            name: "read_only",
            value: "BOOL",
            expected: "write true or false without quotes: read_only = true",
            default: "false",
            doc: "Whether clients may only read.",
        },
        Key {
            name: "shared",
            value: "BOOL",
            expected: "write true or false without quotes: shared = true",
            default: "false",
            doc: "Whether several may write at the same time: Xen guests, or a guest and NBD clients, \
                  that expect each other, as cluster file systems do. Without it a volume has one \
                  writer at a time: one guest, or the NBD clients, who count as one; a second one \
                  is refused, and a guest may still attach the volume to read it.",
        },
        Key {
            name: "direct",
            value: "MODE",
            expected: "write a mode: direct = \"auto\"",
            default: "auto",
            doc: "Whether a file is opened with O_DIRECT, past the page cache of the kernel: \
                  \"auto\" (where it works), \"on\" (or fail) or \"off\". For file stores only.",
        },
        Key {
            name: "cache",
            value: "MODE",
            expected: "write a mode: cache = \"writethrough\"",
            default: "none",
            doc: "What the cache does for the volume: \"none\" (each request goes to the store), \
                  \"writethrough\" (what was read and written is kept in memory that nobody \
                  else needs; a write is acknowledged when the store has it) or \"writeback\" (a \
                  write is acknowledged from memory and reaches the store later, within about 30 \
                  seconds; a flush, or a write with FUA, waits for the store, as with a disk that \
                  has a volatile write cache). Without the key it is \
                  \"writethrough\" for stores on another host, \"none\" for all others.",
        },
        Key {
            name: "bdi",
            value: "NAME",
            expected: "write a name: bdi = \"array\"",
            default: "",
            doc: "The backing device of a volume with cache = \"writeback\": volumes that name the \
                  same one share what may be unwritten in memory, and are slowed together. Without \
                  the key volumes on the same disk, or on the same server, share one. There may be 256 of them.",
        },
        Key {
            name: "default",
            value: "BOOL",
            expected: "write true or false without quotes: default = true",
            default: "false",
            doc: "Whether the volume also answers to the empty export name, which clients use \
                  that ask for none. At most one volume; a volume that is the only one answers \
                  to it anyway.",
        },
        Key {
            name: "max_buffer_pages",
            value: "N",
            expected: "write a whole number from 0 to 1048576: max_buffer_pages = 64",
            default: "",
            doc: "The volume's own max_buffer_pages; without it the daemon's counts.",
        },
        Key {
            name: "buffer_squeeze_duration_ms",
            value: "N",
            expected: "write a whole number from 0 to 60000: buffer_squeeze_duration_ms = 100",
            default: "",
            doc: "The volume's own buffer_squeeze_duration_ms; without it the daemon's counts.",
        },
    ],
};

/// The keys of a table `[bdi.NAME]`.
pub const BDI: Section = Section {
    header: "bdi.NAME",
    doc: "A table for each backing device that is to be bounded: what volumes with cache = \
          \"writeback\" share because they are on one disk, on one server, or name it with their key \
          bdi. NAME is the name that ebbd stat bdi shows: that of the key, \"MAJOR:MINOR\" of a disk, \
          or the address of a server. Nothing here must be set for hardware. All can be set at run \
          time, see ebbd-set(1).",
    keys: &[
        Key {
            name: "min_ratio",
            value: "PERCENT",
            expected: "write a number of percent: min_ratio = 5",
            default: "0",
            doc: "The part of the limit of all dirty data that is kept for the device whatever \
                  others do, in percent, 0 to 100, with up to four digits after the point; at most \
                  max_ratio, and of all devices together at most 100.",
        },
        Key {
            name: "max_ratio",
            value: "PERCENT",
            expected: "write a number of percent: max_ratio = 25",
            default: "100",
            doc: "The largest part of the limit of all dirty data that the device may have, in \
                  percent, 0.0001 to 100.",
        },
        Key {
            name: "max_bytes",
            value: "SIZE",
            expected: "write a size: max_bytes = \"16M\"",
            default: "0",
            doc: "The most that may be dirty for the device, on its way included, 64K to 1T. 0 is \
                  no limit but the two seconds it takes to write.",
        },
        Key {
            name: "strict_limit",
            value: "BOOL",
            expected: "write true or false without quotes: strict_limit = true",
            default: "false",
            doc: "Whether not a single write may take the device above its threshold. Without it \
                  a write that finds at most half of the threshold used is taken whole.",
        },
    ],
};

/// All tables, in the order people write them.
pub const SECTIONS: [Section; 4] = [TOP, NBD, BDI, VOLUME];

/// The tables' names at the top of the file.
const TABLES: [&str; 3] = ["nbd", "bdi", "volume"];

/// A complete configuration file, for the manual; a test parses it.
pub const EXAMPLE: &str = r#"listen = ["unix:/run/ebbd/nbd.sock", "tcp:127.0.0.1:10809"]
workers = 1
log = "info"
control = "unix:/run/ebbd/control.sock"
xen = false
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

[volume.portable]
store = "file:/dev/disk/by-label/portable"
cache = "writeback"
bdi = "stick"
"#;

impl Section {
    /// The names of the keys.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + Clone + use<> {
        let keys = self.keys;
        keys.iter().map(|key| key.name)
    }

    /// The key called `name`.
    pub fn find(&self, name: &str) -> Option<&'static Key> {
        let keys = self.keys;
        keys.iter().find(|key| key.name == name)
    }
}

impl Key {
    /// The name as an option of `--volume`.
    pub fn option_name(&self) -> String {
        self.name.replace('_', "-")
    }
}

/// The keys and tables at the top of the file.
pub(super) fn top_names() -> impl Iterator<Item = &'static str> + Clone {
    TOP.names().chain(TABLES)
}

/// What a right value for the key at `path` looks like.
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
    let near = if section.header.is_empty() {
        super::error::closest(given, top_names())
    } else {
        super::error::closest(given, section.names())
    };
    if let Some(name) = near {
        return format!("did you mean `{name}`?");
    }
    for other in SECTIONS.iter().filter(|other| other.header != section.header) {
        if other.find(&plain).is_some() {
            return match other.header {
                "" => format!("`{plain}` belongs at the top of the file, before any table"),
                header => format!("`{plain}` belongs into the table [{header}]"),
            };
        }
    }
    let all: Vec<&str> =
        if section.header.is_empty() { top_names().collect() } else { section.names().collect() };
    format!("the keys here are {}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_sentences_and_names_unique() {
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
    fn unknown_keys() {
        assert_eq!(unknown_key_remedy(&NBD, "max-client"), "did you mean `max_clients`?");
        assert_eq!(unknown_key_remedy(&TOP, "volumes"), "did you mean `volume`?");
        assert_eq!(
            unknown_key_remedy(&TOP, "max_clients"),
            "`max_clients` belongs into the table [nbd]"
        );
        assert_eq!(
            unknown_key_remedy(&NBD, "workers"),
            "`workers` belongs at the top of the file, before any table"
        );
        assert_eq!(
            unknown_key_remedy(&TOP, "zebra"),
            "the keys here are listen, workers, log, control, web, web_names, xen, \
             max_buffer_pages, buffer_squeeze_duration_ms, idle_memory, cache_max, cache_min, \
             nbd, bdi, volume"
        );
    }
}
