//! What the broker opens, connects to and binds.
//!
//! Paths are compared as they are written, component by component, so that a link that the administrator has made leads
//! where it leads; a path with `..` is refused. The daemon can make no link: see `filter`.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ebb_access::Network;
use ebb_sandbox::threads;

/// How long a name is not looked up again, how long its addresses count, and how long a call waits for look-ups.
const NAMES_LAST: Duration = Duration::from_secs(10);
const NAMES_COUNT: Duration = Duration::from_secs(600);
const NAMES_WAIT: Duration = Duration::from_secs(10);
/// How many names are looked up at a time for a call.
const LOOK_UPS_MAX: usize = 32;
/// How long a change of the configuration may go unnoticed.
const AGAIN: Duration = Duration::from_secs(1);
/// How long something that is to be refused waits for a look at the configuration.
const REFUSAL: Duration = Duration::from_secs(2);

/// What may be opened, connected to and bound.
#[derive(Clone, Debug, Default)]
pub struct BrokerRules {
    /// The paths; `None`: all that the user may open.
    pub paths: Option<PathRules>,
    /// The addresses; `None`: all.
    pub servers: Option<ServerRules>,
    /// Files that the broker itself reads: the configuration, which makes the rules. None is ever
    /// changed, by whatever name, nor is a folder or a link above one moved.
    pub kept: HashSet<PathBuf>,
}

/// Paths that may be opened.
#[derive(Clone, Debug, Default)]
pub struct PathRules {
    /// For reading, with all below.
    pub read: HashSet<PathBuf>,
    /// For reading and writing, with all below: files are made and deleted there, and sockets connected to and bound.
    pub write: HashSet<PathBuf>,
    /// Folders in which that is allowed, but not in folders below them.
    pub write_in: HashSet<PathBuf>,
}

/// Addresses that may be connected to or bound.
#[derive(Clone, Debug, Default)]
pub struct ServerRules {
    /// Networks, each with the port if it is not any.
    pub networks: HashSet<(Network, Option<u16>)>,
    /// Names of hosts, each with the port if it is not any.
    pub names: HashSet<(String, Option<u16>)>,
    /// Addresses to listen at, as `HOST:PORT`.
    pub listen: HashSet<String>,
}

/// What a path is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathAccess {
    Read,
    Write,
}

impl PathRules {
    fn allow(&self, path: &Path, access: PathAccess) -> bool {
        if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
            return false;
        }
        let among = |places: &HashSet<PathBuf>| path.ancestors().any(|at| places.contains(at));
        let within = path.parent().is_some_and(|folder| self.write_in.contains(folder));
        let reads =
            access == PathAccess::Read && (self.write_in.contains(path) || among(&self.read));
        reads || within || among(&self.write)
    }
}

/// What may be opened, if the configuration has changed since the last call and can be read.
pub type RulesSource = Box<dyn Fn() -> Option<BrokerRules> + Send + Sync>;

/// A file as the kernel knows it: device and inode.
pub(crate) type FileId = (u64, u64);

/// Rules, and the files that are kept, which other names may lead to.
struct InForce {
    rules: BrokerRules,
    /// The paths of kept files that were there.
    there: Vec<PathBuf>,
    files: HashSet<FileId>,
    above: HashSet<FileId>,
}

impl InForce {
    /// May block: it looks at the files.
    fn new(rules: BrokerRules) -> InForce {
        let id = |found: std::io::Result<std::fs::Metadata>| {
            found.ok().map(|found| (found.dev(), found.ino()))
        };
        let both = |path: &Path| [id(std::fs::metadata(path)), id(std::fs::symlink_metadata(path))];
        let files = rules.kept.iter().flat_map(|path| both(path)).flatten().collect();
        let above = rules.kept.iter().flat_map(|path| path.ancestors().skip(1));
        let above = above.flat_map(both).flatten().collect();
        let is_there = |path: &&PathBuf| std::fs::metadata(path).is_ok();
        let there = rules.kept.iter().filter(is_there).cloned().collect();
        InForce { rules, there, files, above }
    }

    fn has(&self, file: FileId, above: bool) -> bool {
        self.files.contains(&file) || above && self.above.contains(&file)
    }

    /// As [`InForce::has`], of the files that are there now: an editor replaces a file, and a new
    /// one may get the number of the old one. While a file is away, its number counts. Blocks.
    fn still_has(&self, file: FileId, above: bool) -> bool {
        let is_away = |path: &PathBuf| std::fs::metadata(path).is_err();
        self.there.iter().any(is_away) || InForce::new(self.rules.clone()).has(file, above)
    }
}

/// The rules in force, which follow the configuration.
pub(crate) struct CurrentRules {
    rules: RwLock<Arc<InForce>>,
    source: RulesSource,
    looking: Mutex<Looking>,
    /// Notified when a look at the configuration has ended.
    looked: Condvar,
    names: Mutex<HashMap<String, KnownName>>,
}

/// What is known of a name.
struct KnownName {
    looked_up: Instant,
    /// Its addresses, each with when it last had it: a name server may give others each time.
    addresses: Vec<(IpAddr, Instant)>,
}

/// Looking for a change of the configuration, which may hang with the file's disk: no call that is allowed waits for it.
struct Looking {
    begun: Instant,
    now: bool,
    /// How many looks have ended.
    ended: u64,
}

impl CurrentRules {
    pub(crate) fn new(rules: BrokerRules, source: RulesSource) -> Arc<CurrentRules> {
        Arc::new(CurrentRules {
            rules: RwLock::new(Arc::new(InForce::new(rules))),
            source,
            looking: Mutex::new(Looking { begun: Instant::now(), now: false, ended: 0 }),
            looked: Condvar::new(),
            names: Mutex::default(),
        })
    }

    fn now(&self) -> Arc<InForce> {
        self.rules.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the rules allow something, or do once a change of the configuration was looked for.
    fn ask(self: &Arc<Self>, allow: impl Fn(&BrokerRules) -> bool) -> bool {
        let rules = self.now();
        if lock(&self.looking).begun.elapsed() >= AGAIN {
            self.look();
        }
        if allow(&rules.rules) {
            return true;
        }
        self.wait_for_look();
        let later = self.now();
        !Arc::ptr_eq(&rules, &later) && allow(&later.rules)
    }

    /// Waits for the end of a look that begins now, but not for ever.
    fn wait_for_look(self: &Arc<Self>) {
        let looking = lock(&self.looking);
        // One that has begun before may have seen the file of before.
        let wanted = looking.ended + 1 + u64::from(looking.now);
        drop(looking);
        let end = Instant::now() + REFUSAL;
        loop {
            self.look();
            let left = end.saturating_duration_since(Instant::now());
            let goes_on = |looking: &mut Looking| looking.now;
            let waited = self.looked.wait_timeout_while(lock(&self.looking), left, goes_on);
            let (looking, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if looking.ended >= wanted || left.is_zero() {
                return;
            }
        }
    }

    /// Looks for a change of the configuration on a thread, unless one does.
    fn look(self: &Arc<Self>) {
        let mut looking = lock(&self.looking);
        if looking.now {
            return;
        }
        looking.now = true;
        looking.begun = Instant::now();
        drop(looking);
        let own = self.clone();
        let look = move || {
            if let Some(rules) = (own.source)() {
                let rules = Arc::new(InForce::new(rules));
                *own.rules.write().unwrap_or_else(PoisonError::into_inner) = rules;
            }
            own.end_look();
        };
        if threads::run(look).is_err() {
            self.end_look();
        }
    }

    fn end_look(&self) {
        let mut looking = lock(&self.looking);
        looking.now = false;
        looking.ended += 1;
        self.looked.notify_all();
    }

    pub(crate) fn path(self: &Arc<Self>, path: &Path, access: PathAccess) -> bool {
        self.ask(|rules| rules.paths.as_ref().is_none_or(|paths| paths.allow(path, access)))
    }

    /// Whether any path may be opened.
    pub(crate) fn any_path(self: &Arc<Self>) -> bool {
        self.now().rules.paths.is_none()
    }

    /// Whether a file, of this path without links, is one that is kept; with `above` also a folder
    /// or a link above one.
    pub(crate) fn keeps(&self, path: &Path, file: Option<FileId>, above: bool) -> bool {
        let now = self.now();
        let mut kept = now.rules.kept.iter();
        let named = kept.any(|kept| kept == path || above && kept.starts_with(path));
        named || file.is_some_and(|file| now.has(file, above) && now.still_has(file, above))
    }

    /// Whether this server may be connected to.
    pub(crate) fn server(self: &Arc<Self>, server: SocketAddr) -> bool {
        let address = server.ip().to_canonical();
        self.ask(|rules| {
            let Some(servers) = &rules.servers else { return true };
            let port = |wanted: &Option<u16>| wanted.is_none_or(|port| port == server.port());
            let names = servers.names.iter().filter(|(_, of)| port(of)).map(|(name, _)| name);
            servers.networks.iter().any(|(net, of)| port(of) && net.contains(address))
                || self.is_of(&names.cloned().collect(), address)
        })
    }

    /// Whether there may be unix sockets for datagrams: the service manager's is one. To whom they are sent cannot be decided.
    pub(crate) fn unix_datagrams(self: &Arc<Self>) -> bool {
        std::env::var_os("NOTIFY_SOCKET").is_some() || self.any_path()
    }

    /// Whether datagrams may be sent: only to look up names, so only if there are some. To whom cannot be decided.
    pub(crate) fn datagrams(self: &Arc<Self>) -> bool {
        self.ask(|rules| rules.servers.as_ref().is_none_or(|servers| !servers.names.is_empty()))
    }

    /// Whether this address may be listened at.
    pub(crate) fn listen(self: &Arc<Self>, at: SocketAddr) -> bool {
        self.ask(|rules| {
            let Some(servers) = &rules.servers else { return true };
            let is = |address: &String| {
                ebb_access::socket_addresses(address).is_ok_and(|found| found.contains(&at))
            };
            servers.listen.iter().any(is)
        })
    }

    /// Looks a name up: whether it has the address. Blocks for as long as the name service does.
    fn look_up(&self, name: String, address: IpAddr) -> bool {
        let found = (name.as_str(), 0).to_socket_addrs();
        let found: HashSet<_> =
            found.into_iter().flatten().map(|found| found.ip().to_canonical()).collect();
        let has = found.contains(&address);
        let now = Instant::now();
        let mut names = lock(&self.names);
        let known = names.entry(name);
        let known = known.or_insert_with(|| KnownName { looked_up: now, addresses: Vec::new() });
        known.looked_up = now;
        known.addresses.retain(|(old, when)| when.elapsed() < NAMES_COUNT && !found.contains(old));
        known.addresses.extend(found.into_iter().map(|found| (found, now)));
        has
    }

    /// Whether one of the names has the address, or has had it lately. Names are looked up at the same time: one whose name server does
    /// not respond delays no other.
    fn is_of(self: &Arc<Self>, names: &HashSet<String>, address: IpAddr) -> bool {
        let known = lock(&self.names);
        let lately = |name: &String| {
            known.get(name).is_some_and(|known| {
                let is = |(one, when): &(IpAddr, Instant)| {
                    *one == address && when.elapsed() < NAMES_COUNT
                };
                known.addresses.iter().any(is)
            })
        };
        if names.iter().any(lately) {
            return true;
        }
        let old = |name: &&String| {
            known.get(*name).is_none_or(|known| known.looked_up.elapsed() >= NAMES_LAST)
        };
        let old: Vec<String> = names.iter().filter(old).cloned().collect();
        drop(known);
        let (sender, found) = channel();
        let count = old.len().min(LOOK_UPS_MAX);
        let names = Arc::new(Mutex::new(old));
        for _ in 0..count {
            let (own, sender, names) = (self.clone(), sender.clone(), names.clone());
            let look_up = move || {
                while let Some(name) = next(&names) {
                    // The one who asked may not wait any more.
                    if sender.send(own.look_up(name, address)).is_err() {
                        return;
                    }
                }
            };
            // If there is no thread, others look up more names.
            let _ = threads::run(look_up);
        }
        drop(sender);
        let end = Instant::now() + NAMES_WAIT;
        loop {
            match found.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(false) => {}
                Ok(true) => return true,
                Err(_) => return false,
            }
        }
    }
}

fn next(names: &Mutex<Vec<String>>) -> Option<String> {
    lock(names).pop()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn current(rules: BrokerRules) -> Arc<CurrentRules> {
        CurrentRules::new(rules, Box::new(|| None))
    }

    #[test]
    fn paths_are_compared_by_components() {
        let paths = PathRules {
            read: HashSet::from(["/etc".into()]),
            write: HashSet::from(["/srv/a".into(), "/srv/c".into()]),
            write_in: HashSet::from(["/run".into()]),
        };
        let rules = current(BrokerRules { paths: Some(paths), ..BrokerRules::default() });
        let (read, write) = (PathAccess::Read, PathAccess::Write);
        for (path, access, allowed) in [
            ("/srv/a", write, true),
            ("/srv/a/b/c", write, true),
            ("/srv/a/b", read, true),
            ("/srv/ab", write, false),
            ("/srv", write, false),
            ("/srv/a/../b", write, false),
            ("/etc/ssl", read, true),
            ("/etc/ssl", write, false),
            ("srv/a", read, false),
            ("/srv/c/etc/file", write, true),
            ("/run/socket", write, true),
            ("/run", read, true),
            ("/run", write, false),
            ("/run/systemd/private", write, false),
            ("/run/systemd", write, true),
        ] {
            assert_eq!(rules.path(Path::new(path), access), allowed, "{path} {access:?}");
        }
        assert!(!rules.any_path() && current(BrokerRules::default()).any_path());
    }

    #[test]
    fn a_kept_file_is_known_by_any_name_and_with_what_is_above_it() {
        let folder = tempfile::tempdir().unwrap();
        let of = |path: &str| folder.path().join(path);
        std::fs::create_dir_all(of("real/etc")).unwrap();
        std::fs::write(of("real/etc/file"), "").unwrap();
        std::fs::write(of("real/etc/other"), "").unwrap();
        std::fs::hard_link(of("real/etc/file"), of("same")).unwrap();
        std::os::unix::fs::symlink("real/etc", of("etc")).unwrap();
        let kept = HashSet::from([of("etc/file")]);
        // Without any paths: the rules themselves are kept all the same.
        let rules = current(BrokerRules { kept, ..BrokerRules::default() });
        let keeps = |path: &str, above| {
            let found = std::fs::symlink_metadata(of(path)).unwrap();
            rules.keeps(Path::new("/another/name"), Some((found.dev(), found.ino())), above)
        };
        for (path, file, above) in [
            ("same", true, true),
            ("real/etc/file", true, true),
            ("real/etc/other", false, false),
            ("real/etc", false, true),
            ("etc", false, true),
        ] {
            assert_eq!([keeps(path, false), keeps(path, true)], [file, above], "{path}");
        }
        assert!(rules.keeps(&of("etc/file"), None, false), "by its name, where it is missing");
        // A new file may get the number of the one that an editor has replaced.
        std::fs::rename(of("real/etc/other"), of("real/etc/file")).unwrap();
        assert!(!keeps("same", false), "it is no longer the kept file");
        std::fs::remove_file(of("real/etc/file")).unwrap();
        assert!(keeps("same", false), "while that file is away, the other may be put back");
    }

    #[test]
    fn servers_are_networks_or_names_with_or_without_a_port() {
        let net = |text: &str| Network::parse(text).unwrap();
        let servers = ServerRules {
            networks: HashSet::from([(net("10.1.0.0/16"), None), (net("fd00::1"), Some(10809))]),
            names: HashSet::from([("localhost".into(), Some(99)), ("fe80::1%lo".into(), Some(97))]),
            listen: HashSet::from(["127.0.0.1:7000".into(), "[fe80::1%lo]:7000".into()]),
        };
        let rules = current(BrokerRules { servers: Some(servers), ..BrokerRules::default() });
        for (server, allowed) in [
            ("10.1.255.255:1", true),
            ("[::ffff:10.1.2.3]:1", true),
            ("10.2.0.0:1", false),
            ("[fd00::1]:10809", true),
            ("[fd00::1]:10810", false),
            ("127.0.0.1:99", true),
            ("127.0.0.1:98", false),
            ("[fe80::1%1]:97", true),
            ("[fe80::2%1]:97", false),
        ] {
            assert_eq!(rules.server(server.parse().unwrap()), allowed, "{server}");
        }
        assert!(rules.listen("127.0.0.1:7000".parse().unwrap()));
        assert!(rules.listen("[fe80::1%1]:7000".parse().unwrap()));
        assert!(!rules.listen("[fe80::1%2]:7000".parse().unwrap()));
        assert!(!rules.listen("127.0.0.1:7001".parse().unwrap()) && rules.datagrams());
        let none = current(BrokerRules {
            servers: Some(ServerRules::default()),
            ..BrokerRules::default()
        });
        assert!(!none.datagrams() && !none.server("127.0.0.1:1".parse().unwrap()));
    }

    #[test]
    fn an_address_that_a_name_had_a_moment_ago_counts() {
        let servers = ServerRules {
            names: HashSet::from([("localhost".into(), None)]),
            ..ServerRules::default()
        };
        let rules = current(BrokerRules { servers: Some(servers), ..BrokerRules::default() });
        let (old, now) = ("192.0.2.1".parse().unwrap(), Instant::now());
        let ago = |time| now.checked_sub(time).unwrap();
        let known = |when| KnownName { looked_up: now, addresses: vec![(old, when)] };
        let at = SocketAddr::new(old, 1);
        lock(&rules.names).insert("localhost".into(), known(now));
        assert!(rules.server(at));
        // Looking it up adds to what is known.
        assert!(
            rules.look_up("localhost".into(), "127.0.0.1".parse().unwrap()) && rules.server(at)
        );
        lock(&rules.names).insert("localhost".into(), known(ago(NAMES_COUNT)));
        assert!(!rules.server(at));
    }

    #[test]
    fn the_rules_follow_the_configuration() {
        let next: Arc<Mutex<Option<BrokerRules>>> = Arc::default();
        let source = next.clone();
        let none = || BrokerRules { paths: Some(PathRules::default()), ..BrokerRules::default() };
        let rules = CurrentRules::new(none(), Box::new(move || lock(&source).take()));
        let path = Path::new("/srv/new");
        assert!(!rules.path(path, PathAccess::Read));
        *lock(&next) = Some(BrokerRules::default());
        assert!(rules.path(path, PathAccess::Read), "looked for before it is refused");
        *lock(&next) = Some(none());
        assert!(rules.path(path, PathAccess::Read), "a change was looked for a moment ago");
        lock(&rules.looking).begun = Instant::now().checked_sub(AGAIN).unwrap();
        // It is looked for beside the call.
        while rules.path(path, PathAccess::Read) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_configuration_that_hangs_delays_nothing_that_is_allowed() {
        let (release, hang) = channel::<()>();
        let hang = Mutex::new(hang);
        let source = move || {
            let _ = lock(&hang).recv();
            None
        };
        let paths = PathRules { write: HashSet::from(["/srv".into()]), ..PathRules::default() };
        let rules = BrokerRules { paths: Some(paths), ..BrokerRules::default() };
        let rules = CurrentRules::new(rules, Box::new(source));
        assert!(!rules.path(Path::new("/other"), PathAccess::Read), "refused after some time");
        for _ in 0..100 {
            lock(&rules.looking).begun = Instant::now().checked_sub(AGAIN).unwrap();
            assert!(rules.path(Path::new("/srv/a"), PathAccess::Write));
        }
        drop(release);
    }
}
