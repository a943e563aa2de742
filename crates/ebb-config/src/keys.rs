//! The one table of configuration keys.
//!
//! The check for unknown keys, the remedies, the manual page `ebbd.toml(5)` and the option list
//! of `ebbd-serve(1)` are made from this table. Tests compare it with the fields that serde accepts
//! ([`super::file`]), with the defaults of [`super::Config`] and with the options of the command
//! line, so that they cannot diverge.

mod limits;
mod volume;

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
                  address in brackets: \"tcp:[::1]:10809\", \"tcp:[fe80::1%eth0]:10809\"). A name stands \
                  for all of its addresses that this machine has. A unix path has at most 107 bytes. \
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
                  a volume of this file replaces one of the same name there. They cannot name a program \
                  for a key, nor a store or socket in the daemon's folders of this directory, at this file, or at a \
                  file of tokens, keys or certificates. For each volume of this file whose store ebbd \
                  created, created/NAME.toml has that store: if the store is missing at a later start, ebbd \
                  reports that and creates no other; remove the record to let it create one. The daemon creates \
                  and writes the files. Without the key no volume can be kept. If it is on a file \
                  system of its own, the unit needs RequiresMountsFor=DIR. A change needs a restart.",
        },
        ConfigKey {
            name: "web",
            value: "ADDRESS",
            expected: "write a TCP address: web = \"tcp:127.0.0.1:9477\"",
            default: "",
            doc: "The TCP address of the web page with plots of memory, cache and traffic (at /) and of the \
                  metrics for Prometheus (at /metrics), and of the interface below /v1. A name \
                  stands for all of its addresses that this machine has. What a client may do \
                  depends on its token, see web_tokens. Any other than a loopback address needs \
                  web_tokens and web_tls_certificates. To prevent DNS rebinding, requests are \
                  accepted only if their Host header is an IP address, localhost, a name of this \
                  machine or one of web_names. Without the key there is no page. A change needs a \
                  restart.",
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
                  view it may read everything, with operate also change everything, and add volumes on what the daemon's user can \
                  open; without a token it \
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
            name: "sandbox",
            value: "MODE",
            expected: "write a mode: sandbox = \"on\"",
            default: "on",
            doc: "Whether the daemon limits itself to the system calls that it needs: \"on\" (as far \
                  as the kernel can; `ebbd doctor` says what is in force) or \"off\" (for finding \
                  out whether a failure is due to it). A change needs a restart.",
        },
        ConfigKey {
            name: "open_paths",
            value: "[PATH...]",
            expected: "write a list of absolute paths: open_paths = [\"/srv/disks\"]",
            default: "",
            doc: "Files, devices and folders with all below them that the daemon may open, make and delete \
                  while it runs, beside those that the configuration names and others in the same folder. A volume that \
                  is added while the daemon runs needs its file there. The process ebbd-broker opens them for \
                  the daemon, and refuses others; it notices changes of the file by itself. Without the \
                  key it opens all that the daemon's user may open. With sandbox = \"off\" the key has \
                  no effect.",
        },
        ConfigKey {
            name: "connect_to",
            value: "[SERVER...]",
            expected: "write a list of servers: connect_to = [\"10.0.0.0/8\"]",
            default: "",
            doc: "Servers that the daemon may connect to while it runs, beside those that the configuration \
                  names: each a host's name, an address or a network as ADDRESS/BITS, the first two with or \
                  without a port, IPv6 addresses with a port in brackets. With it a Ceph cluster needs an \
                  entry with the network of its monitors and OSDs. The process ebbd-broker connects \
                  for the daemon; it notices changes of the file by itself. Without the key it connects to \
                  any address. With sandbox = \"off\" the key has no effect.",
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
            doc: "The largest payload of one READ or WRITE request that ebbd advertises, 4K to 64M. \
                  Longer requests of up to 32M are executed as well, in pieces if memory is short.",
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
            doc: "A directory with ca-cert.pem, server-cert.pem and server-key.pem, and, if certificates \
                  of clients were revoked, ca-crl.pem. A reload reads them again.",
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

pub use self::volume::VOLUME;

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
sandbox = "on"
open_paths = ["/var/lib/ebbd"]
connect_to = ["10.0.0.0/8"]
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
             max_buffer_pages, buffer_squeeze_duration_ms, idle_memory, sandbox, open_paths, connect_to, cache_max, cache_min, \
             nbd, bdi, limit_group, volume"
        );
    }
}
