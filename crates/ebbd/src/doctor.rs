//! `ebbd doctor`: what limits or threatens a daemon on this host.
//!
//! Each check is a function of what it has read, so that a test can pass any host. Nothing is changed.
//!
//! Sources: io_uring_setup(2), proc(5), the kernel's documentation of `vm.max_map_count`, `vm.overcommit_memory` and
//! pressure stall information.

mod host;

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ebb_api::stat::{SandboxStat, Stat};
use ebb_api::{HealthState, HealthView};
use ebb_config::{Config, RbdUri, ServeArgs, StoreUri, VolumeConfig, plural};
use ebb_mem::pressure::{Limit, Roots, limit_of_process};
use ebb_store::{RbdError, RbdLibrary};
use rustix::fs::{StatVfs, StatVfsMountFlags};

use crate::budget::DaemonLoad;
use crate::check::{CheckFailed, CheckLine, check};
use crate::cli::DoctorArgs;
use crate::client::{ClientError, DaemonClient};
use crate::exit_status;
use crate::listener::directory_of;

/// Where the package puts the configuration.
const USUAL_CONFIG: &str = "/etc/ebbd/ebbd.toml";
/// The space of the largest file of the state directory, bytes.
const STATE_FILE: u64 = 64 << 10;
/// The least free space of the state directory, bytes: room for hundreds of files.
const STATE_FREE: u64 = 1 << 20;

/// Passes `say` a line for each check, and returns the exit status.
pub fn doctor(args: &DoctorArgs, mut say: impl FnMut(&CheckLine)) -> u8 {
    let mut worst = exit_status::DONE;
    let mut say = |line: CheckLine| {
        worst = worst.max(match line {
            CheckLine::Ok(_) => exit_status::DONE,
            CheckLine::Warning(_) => exit_status::DEGRADED,
            CheckLine::Mistake(_) => exit_status::FAILING,
        });
        say(&line);
    };
    let usual = Some(PathBuf::from(USUAL_CONFIG)).filter(|path| path.exists());
    let file = args.config.clone().or(usual);
    let config = file.map(|path| ServeArgs { config: Some(path), ..ServeArgs::default() });
    let loaded = config.as_ref().and_then(|args| Config::load(args).ok());
    for line in host::checks(loaded.as_ref()) {
        say(line);
    }
    if let Some(args) = &config {
        // Its lines say what failed.
        let (Ok(()) | Err(CheckFailed { .. })) = check(args, &mut say);
    }
    let config = loaded;
    if let Some(config) = &config
        && let Some(path) = config.state.as_deref()
    {
        say(state(path, DaemonUser::configured(config, args)));
    }
    for line in config.iter().flat_map(|config| rbd(config, RbdLibrary::find())) {
        say(line);
    }
    if config.as_ref().is_some_and(|config| config.xen) {
        say(xen(Path::new("/")));
    }
    for line in config.iter().flat_map(|config| vhost_user(config, args)) {
        say(line);
    }
    for line in daemon(args, config.as_ref()) {
        say(line);
    }
    worst
}

fn ok(text: impl Into<String>) -> CheckLine {
    CheckLine::Ok(text.into())
}

fn warning(text: impl Into<String>) -> CheckLine {
    CheckLine::Warning(text.into())
}

fn mistake(text: impl Into<String>) -> CheckLine {
    CheckLine::Mistake(text.into())
}

/// The user and the group that a daemon runs as.
#[derive(Clone, Copy, Debug)]
struct DaemonUser {
    user: u32,
    group: u32,
}

impl DaemonUser {
    /// Those that own the control socket; without one those of this process.
    fn of(control: Option<&Path>) -> DaemonUser {
        let owner = control.and_then(|path| std::fs::metadata(path).ok());
        owner.map_or_else(
            || DaemonUser {
                user: rustix::process::geteuid().as_raw(),
                group: rustix::process::getegid().as_raw(),
            },
            |owner| DaemonUser { user: owner.uid(), group: owner.gid() },
        )
    }

    fn configured(config: &Config, args: &DoctorArgs) -> DaemonUser {
        let control = args.control.as_deref().map(Path::new);
        DaemonUser::of(control.or(config.control.as_deref()))
    }

    /// Whether the mode of a directory lets the user make files in it.
    fn may_write(self, directory: &Metadata) -> bool {
        let shift = match self {
            DaemonUser { user: 0, .. } => return true,
            DaemonUser { user, .. } if user == directory.uid() => 6,
            DaemonUser { group, .. } if group == directory.gid() => 3,
            DaemonUser { .. } => 0,
        };
        directory.mode() >> shift & 0o3 == 0o3
    }

    /// The command that lets the user make files in a directory.
    fn grant(self, directory: &Metadata, path: &Path) -> String {
        let (user, path) = (self.user, path.display());
        match directory.uid() == user {
            true => format!("chmod u+rwx {path}"),
            false => format!("chown {user} {path}"),
        }
    }
}

/// The state directory: whether it is there, and the daemon can write to it.
fn state(path: &Path, daemon: DaemonUser) -> CheckLine {
    let name = format!("the state directory {}", path.display());
    let DaemonUser { user, .. } = daemon;
    let volumes = path.join("volumes");
    for directory in [path, &volumes] {
        match std::fs::metadata(directory) {
            Ok(found) if !found.is_dir() => {
                let it = directory.display();
                return mistake(format!(
                    "{name}: {it} is not a directory: remove it, or change `state`"
                ));
            }
            Ok(found) if !daemon.may_write(&found) => {
                let it = directory.display();
                return mistake(format!(
                    "{name}: user {user}, as whom the daemon runs, may not write to {it}: run `{}`",
                    daemon.grant(&found, directory)
                ));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound && directory == path => {
                return mistake(format!(
                    "{name} does not exist: make it for user {user}, as whom the daemon runs, or mount it"
                ));
            }
            // The daemon makes it.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return warning(format!(
                    "{name} cannot be checked by this user: run `ebbd doctor` as user {user}, or as root"
                ));
            }
            Err(error) => return mistake(format!("{name} cannot be looked at: {error}")),
        }
    }
    match rustix::fs::statvfs(path) {
        Ok(found) => free_space(&name, &found),
        Err(error) => warning(format!("{name}: its free space is not known: {error}")),
    }
}

fn free_space(name: &str, found: &StatVfs) -> CheckLine {
    let free = found.f_bavail.saturating_mul(found.f_frsize);
    if found.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return mistake(format!(
            "{name} is on a file system that is mounted read-only: remount it"
        ));
    }
    // File systems without a table of inodes say 0 of 0.
    if free < STATE_FILE || (found.f_favail == 0 && found.f_files > 0) {
        return mistake(format!(
            "{name}: its file system is full ({free} bytes and {} inodes are free): volumes that are added or resized cannot \
             be kept; free some space",
            found.f_favail
        ));
    }
    if free < STATE_FREE {
        return warning(format!(
            "{name}: its file system has only {free} bytes free: free some space before volumes that are added or resized \
             cannot be kept"
        ));
    }
    ok(format!("{name} can be written"))
}

/// What volumes on images of Ceph clusters need, if there are any.
fn rbd(config: &Config, library: Result<RbdLibrary, RbdError>) -> Vec<CheckLine> {
    let images = |of: fn(&RbdUri, &VolumeConfig) -> bool| {
        let volumes = config.volumes.iter().filter_map(|(name, volume)| match &volume.store {
            StoreUri::Rbd(uri) => of(uri, volume).then_some(name.as_str()),
            _ => None,
        });
        volumes.collect::<Vec<_>>()
    };
    let all = images(|_, _| true);
    if all.is_empty() {
        return Vec::new();
    }
    let count = plural(all.len() as u64, "volume");
    let encrypted = images(|uri, _| uri.encryption.is_some());
    let mut lines = vec![match library {
        Err(error) => {
            let why = ebb_advice::Advised(error);
            mistake(format!("{count} on images of Ceph clusters cannot be opened: {why}"))
        }
        Ok(RbdLibrary { version, encryption: false }) if !encrypted.is_empty() => mistake(format!(
            "librbd {version} cannot open the encrypted images of {}: install librbd of Ceph 16 or later (Debian's package is \
             librbd1)",
            encrypted.join(", ")
        )),
        Ok(library) => ok(format!("librbd {} can be used, for {count}", library.version)),
    }];
    let written = images(|uri, volume| uri.snapshot.is_none() && !volume.read_only);
    if config.state.is_none() && !written.is_empty() {
        lines.push(warning(format!(
            "`state` is not set, so that a daemon that was killed leaves its locks in the Ceph cluster, and the next one cannot \
             recognise them: {} would be refused until the locks are removed with `rbd lock rm`; set `state`",
            written.join(", ")
        )));
    }
    lines
}

/// What a daemon in dom0 needs.
fn xen(root: &Path) -> CheckLine {
    let missing = ["dev/xen/evtchn", "dev/xen/gntdev", "dev/xen/xenbus"];
    match missing.iter().find(|path| !root.join(path).exists()) {
        Some(path) => mistake(format!(
            "there is no /{path}: load xen-evtchn and xen-gntdev, and run in dom0 of a Xen host"
        )),
        None if root.join("sys/module/xen_blkback").exists() => ok(
            "the devices of Xen are there; xen-blkback is loaded, so that only disks attached with `ebbd xen` are served",
        ),
        None => ok("the devices of Xen are there"),
    }
}

/// The directories of the sockets for vhost-user: whether the daemon can make sockets in them. A running daemon says which
/// sockets have failed (`daemon`).
fn vhost_user(config: &Config, args: &DoctorArgs) -> Vec<CheckLine> {
    let sockets = config.vhost_sockets();
    let directories: BTreeMap<&Path, usize> =
        sockets.keys().fold(BTreeMap::new(), |mut found, path| {
            *found.entry(directory_of(path).unwrap_or(Path::new("."))).or_default() += 1;
            found
        });
    if directories.is_empty() {
        return vec![ok("vhost-user is not configured: no volume has a socket for guests of KVM")];
    }
    let user = DaemonUser::configured(config, args);
    directories.into_iter().map(|(path, count)| socket_directory(path, count, user)).collect()
}

fn socket_directory(path: &Path, sockets: usize, daemon: DaemonUser) -> CheckLine {
    let name = format!("the directory {} of vhost-user", path.display());
    let DaemonUser { user, .. } = daemon;
    let missing = |error: &std::io::Error| error.kind() == ErrorKind::NotFound;
    let above = directory_of(path).unwrap_or(Path::new("."));
    let (found, it) = match std::fs::metadata(path) {
        Err(error) if missing(&error) => (std::fs::metadata(above), above),
        found => (found, path),
    };
    match found {
        Err(error) if missing(&error) => mistake(format!(
            "{name} cannot be made, since {} does not exist: make it for user {user}, as whom the daemon runs",
            above.display()
        )),
        Err(error) => mistake(format!("{name} cannot be looked at: {error}")),
        Ok(found) if !found.is_dir() => mistake(format!(
            "{name}: {} is not a directory: remove it, or change `vhost_user`",
            it.display()
        )),
        Ok(found) if !daemon.may_write(&found) => mistake(format!(
            "{name}: user {user}, as whom the daemon runs, may not write to {}: run `{}`",
            it.display(),
            daemon.grant(&found, it)
        )),
        Ok(_) if it == above => ok(format!("{name} is made by the daemon")),
        Ok(_) => ok(format!("{name} can be written, for {}", plural(sockets as u64, "socket"))),
    }
}

/// The checks of a running daemon.
fn daemon(args: &DoctorArgs, config: Option<&Config>) -> Vec<CheckLine> {
    let asked = || -> Result<_, ClientError> {
        let daemon = DaemonClient::new(args.control.as_deref())?;
        let stat: Stat = daemon.json("GET", "/v1/stat", None)?;
        let health: HealthView = daemon.json("GET", "/v1/health", None)?;
        Ok((stat, health, daemon.process()))
    };
    match asked() {
        Ok((stat, health, process)) => {
            let mut lines = of_daemon(&stat, &health, config);
            let limit = process.and_then(|pid| limit_of_process(&Roots::default(), pid));
            lines.extend(limit.and_then(|limit| group(&limit, &stat)));
            lines
        }
        Err(error) => {
            let source = std::error::Error::source(&error)
                .map_or_else(String::new, |source| format!(": {source}"));
            vec![warning(format!("{error}{source}"))]
        }
    }
}

fn of_daemon(stat: &Stat, health: &HealthView, config: Option<&Config>) -> Vec<CheckLine> {
    let own = env!("CARGO_PKG_VERSION");
    let mut lines = vec![if stat.version == own {
        ok(format!("the daemon replies, version {own}"))
    } else {
        warning(format!(
            "the daemon is version {}, this program {own}: restart the daemon",
            stat.version
        ))
    }];
    lines.extend(stat.sandbox.iter().map(sandbox));
    for reason in &health.reasons {
        let volume =
            reason.volume.as_ref().map_or_else(String::new, |name| format!("volume {name}: "));
        let text = format!("{volume}{}; {}", reason.message, reason.remedy);
        let is_failing = reason.state == HealthState::Failing;
        lines.push(if is_failing { mistake(text) } else { warning(text) });
    }
    for volume in &stat.volumes {
        let definition = config.and_then(|config| config.volumes.get(&volume.name));
        // The files of deltas and of encrypted volumes are larger than the volumes.
        let plain = definition.filter(|it| it.base.is_none() && it.encryption.is_none());
        if let Some(StoreUri::File(path)) = plain.map(|volume| &volume.store)
            && let Ok(found) = std::fs::metadata(path)
            && found.is_file()
            && volume.size_bytes > 0
            && found.len() != volume.size_bytes
        {
            lines.push(warning(format!(
                "volume {}: its file has {} bytes, and it is served with {}: adopt the size with `ebbd volume resize {}`",
                volume.name,
                found.len(),
                volume.size_bytes,
                volume.name
            )));
        }
    }
    lines
}

/// The control group of a running daemon, if that has a limit.
fn group(limit: &Limit, stat: &Stat) -> Option<CheckLine> {
    let setting = limit.source.setting()?;
    let clients = usize::try_from(stat.clients).unwrap_or(usize::MAX);
    let (workers, volumes) = (stat.workers.len(), stat.volumes.len());
    let load = DaemonLoad::of_volumes(workers, volumes, clients);
    let (needed, clients) = (load.needed(), load.clients);
    let mib = |bytes: u64| bytes >> 20;
    let has = format!(
        "the daemon's control group may use {} MiB ({setting}); {} MiB are needed for {volumes} volumes and {clients} \
         clients",
        mib(limit.bytes),
        mib(needed)
    );
    Some(match limit.bytes < needed {
        true => warning(format!("{has}: raise {setting} to {}M", mib(needed))),
        false => ok(has),
    })
}

/// A part of the sandbox of a running daemon.
fn sandbox(part: &SandboxStat) -> CheckLine {
    let SandboxStat { mechanism, in_force, detail, .. } = part;
    match in_force {
        true => ok(format!("sandbox, {mechanism}: {detail}")),
        false => warning(format!("sandbox, {mechanism}: not in force: {detail}")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use ebb_api::HealthReason;
    use ebb_api::stat::VolumeStat;
    use ebb_mem::pressure::LimitSource;

    use super::*;

    pub(super) fn is_bad(line: &CheckLine, words: &[&str]) -> bool {
        let (CheckLine::Warning(text) | CheckLine::Mistake(text)) = line else { return false };
        words.iter().all(|word| text.contains(word))
    }

    #[test]
    fn host_without_devices_of_xen_is_told() {
        let root = tempfile::tempdir().unwrap();
        assert!(is_bad(&xen(root.path()), &["/dev/xen/evtchn", "dom0"]));
    }

    #[test]
    fn a_state_directory_that_the_daemon_cannot_use_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let me = DaemonUser::of(None);
        let other = DaemonUser { user: me.user + 1, group: me.group + 1 };
        let user = other.user.to_string();
        assert!(is_bad(&state(&path, other), &["does not exist", &user]));
        std::fs::create_dir_all(path.join("volumes")).unwrap();
        let chmod = |name: &str, mode| {
            let permissions = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path.join(name), permissions).unwrap();
        };
        chmod("", 0o755);
        chmod("volumes", 0o755);
        assert!(matches!(state(&path, me), CheckLine::Ok(_)), "{:?}", state(&path, me));
        assert!(is_bad(&state(&path, other), &["may not write", &format!("chown {user}")]));
        chmod("", 0o777);
        assert!(is_bad(&state(&path, other), &["may not write", "state/volumes"]));
        chmod("volumes", 0o777);
        assert!(matches!(state(&path, other), CheckLine::Ok(_)));
        let group = DaemonUser { group: me.group, ..other };
        chmod("volumes", 0o707);
        assert!(is_bad(&state(&path, group), &["may not write"]), "the group's bits count");
        let full = StatVfs { f_bavail: 0, ..rustix::fs::statvfs(&path).unwrap() };
        assert!(is_bad(&free_space("it", &full), &["is full", "free some space"]));
        let little = StatVfs { f_bavail: 200, f_frsize: 4096, ..full };
        let warned = free_space("it", &little);
        assert!(
            matches!(&warned, CheckLine::Warning(text) if !text.contains("full")),
            "{warned:?}"
        );
        let flags = StatVfsMountFlags::RDONLY;
        let read_only = StatVfs { f_flag: flags, ..rustix::fs::statvfs(&path).unwrap() };
        assert!(is_bad(&free_space("it", &read_only), &["read-only"]));
        std::fs::remove_dir(path.join("volumes")).unwrap();
        std::fs::write(path.join("volumes"), "").unwrap();
        assert!(is_bad(&state(&path, me), &["is not a directory"]));
    }

    #[test]
    fn the_control_group_of_the_daemon_is_checked() {
        let dir = PathBuf::from("/sys/fs/cgroup/memory/ebbd");
        let limit = |mib: u64, source| Limit { bytes: mib << 20, source };
        let of = |file| LimitSource::Cgroup { dir: dir.clone(), file };
        let stat = Stat { clients: 10, ..Stat::default() };
        let small = group(&limit(16, of("memory.high")), &stat).unwrap();
        assert!(is_bad(&small, &["16 MiB", "raise MemoryHigh to 2"]), "{small:?}");
        let enough = group(&limit(64, of("memory.max")), &stat).unwrap();
        assert!(matches!(&enough, CheckLine::Ok(text) if text.contains("64 MiB (MemoryMax)")));
        assert!(group(&limit(16, LimitSource::Ram), &stat).is_none(), "{enough:?}");
    }

    #[test]
    fn what_volumes_on_ceph_clusters_need_is_told() {
        let config = |text: &str| {
            let text = format!("listen = ['unix:/s']\n{text}");
            Config::parse(&text, Path::new("f"), &ServeArgs::default()).unwrap()
        };
        let volume = |store: &str| format!("[volume.a]\nstore = '{store}'\n");
        let old = RbdLibrary { version: "1.12.0".into(), encryption: false };
        let found = || Ok(RbdLibrary { version: "1.16.0".into(), encryption: true });
        assert!(rbd(&config(&volume("null:1M")), found()).is_empty());
        let missing = RbdError::Library { what: "no such file".into() };
        let lines = rbd(&config(&volume("rbd:p/i@s")), Err(missing));
        assert!(is_bad(&lines[0], &["1 volume", "no such file", "librbd1"]), "{lines:?}");
        assert_eq!(lines.len(), 1, "a snapshot has no lock: {lines:?}");
        let lines = rbd(&config(&volume("rbd:p/i")), found());
        assert_eq!(lines[0].parts(), ("ok", "librbd 1.16.0 can be used, for 1 volume"));
        assert!(is_bad(&lines[1], &["`state` is not set", "a would be refused"]), "{lines:?}");
        let kept = format!("state = '/s'\n{}", volume("rbd:p/i"));
        assert_eq!(rbd(&config(&kept), found()).len(), 1);
        let luks = "rbd:p/i?encryption-format=luks1&encryption-passphrase-file=/p";
        let lines = rbd(&config(&volume(luks)), Ok(old));
        assert!(is_bad(&lines[0], &["encrypted", "1.12.0", "of a:"]), "{lines:?}");
    }

    #[test]
    fn the_directories_of_sockets_for_guests_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let config = |text: &str| {
            let volumes = "[volume.a]\nstore = 'null:1M'\n[volume.b]\nstore = 'null:1M'\n";
            let text = format!("listen = ['unix:/s']\n{text}\n{volumes}");
            Config::parse(&text, Path::new("f"), &ServeArgs::default()).unwrap()
        };
        let args = DoctorArgs { control: Some(at.display().to_string()), ..DoctorArgs::default() };
        let [none] = &vhost_user(&config(""), &args)[..] else { panic!("one line") };
        assert_eq!(
            none.parts(),
            ("ok", "vhost-user is not configured: no volume has a socket for guests of KVM")
        );
        let config = config(&format!("vhost_user = '{}/new'", at.display()));
        let [new] = &vhost_user(&config, &args)[..] else { panic!("one line") };
        assert!(new.parts().1.ends_with("new of vhost-user is made by the daemon"), "{new:?}");
        std::fs::create_dir(at.join("new")).unwrap();
        let [there] = &vhost_user(&config, &args)[..] else { panic!("one line") };
        assert!(there.parts().1.ends_with("can be written, for 2 sockets"), "{there:?}");
        let me = DaemonUser::of(None);
        let other = DaemonUser { user: me.user + 1, group: me.group + 1 };
        let line = socket_directory(&at.join("new"), 1, other);
        assert!(is_bad(&line, &["may not write", &format!("chown {}", other.user)]), "{line:?}");
        let line = socket_directory(&at.join("other"), 1, other);
        assert!(is_bad(&line, &["may not write", "chown"]), "{line:?}");
        let line = socket_directory(&at.join("none/other"), 1, me);
        assert!(is_bad(&line, &["cannot be made", "none does not exist"]), "{line:?}");
        std::fs::write(at.join("file"), "").unwrap();
        let line = socket_directory(&at.join("file"), 1, me);
        assert!(is_bad(&line, &["is not a directory"]), "{line:?}");
    }

    #[test]
    fn a_daemon_that_is_not_ok_and_sizes_that_differ_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, vec![0; 4096]).unwrap();
        let text = format!("listen = ['unix:/s']\n[volume.a]\nstore = 'file:{}'\n", path.display());
        let config = Config::parse(&text, Path::new("f"), &ServeArgs::default()).unwrap();
        let volume = VolumeStat { name: "a".into(), size_bytes: 512, ..VolumeStat::default() };
        let parts = [("ring", true, "rings take few"), ("worker_paths", false, "no Landlock")];
        let sandbox = parts.map(|(mechanism, in_force, detail)| SandboxStat {
            mechanism: mechanism.into(),
            in_force,
            detail: detail.into(),
            ..SandboxStat::default()
        });
        let stat = Stat { volumes: vec![volume], sandbox: sandbox.into(), ..Stat::default() };
        let reason = HealthReason {
            state: HealthState::Failing,
            volume: Some("b".into()),
            message: "not served".into(),
            remedy: "make its file".into(),
            ..HealthReason::default()
        };
        let health = HealthView { reasons: vec![reason], ..HealthView::default() };
        let lines = of_daemon(&stat, &health, Some(&config));
        assert!(is_bad(&lines[0], &["restart the daemon"]), "{lines:?}");
        assert_eq!(lines[1].parts(), ("ok", "sandbox, ring: rings take few"));
        assert!(is_bad(&lines[2], &["worker_paths", "not in force", "no Landlock"]), "{lines:?}");
        assert!(is_bad(&lines[3], &["volume b: not served; make its file"]), "{lines:?}");
        assert!(
            is_bad(&lines[4], &["volume a", "4096 bytes", "512", "ebbd volume resize a"]),
            "{lines:?}"
        );
    }
}
