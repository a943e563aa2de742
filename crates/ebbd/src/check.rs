//! `--check` and `ebbd config check`: whether a configuration can be served, also while a daemon serves it.
//!
//! # Invariants
//! - Everything is checked, whatever was found before: all mistakes are told in one run.
//! - Nothing is created or changed, and no lock is taken that a running daemon would notice. A
//!   daemon at the control socket is asked for its figures.

mod overlay;
mod running;
mod volumes;

use std::cell::Cell;
use std::path::Path;

use anyhow::Context;
use ebb_advice::Advised;
use ebb_config::{Config, Listen, ServeArgs, StateDir, TlsSetting, plural};
use ebb_export_nbd::ServerTls;

use crate::control::page_access;
use crate::descriptors;
use crate::key_files::exposed_keys;
use crate::listener::{self, directory_of};
use crate::log::reasons;
use crate::setup::tls_context;
use running::RunningDaemon;
use volumes::VolumeChecks;

/// What a check says about one part of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckLine {
    /// It can be served.
    Ok(String),
    /// It can be served, and is probably not what the operator wants.
    Warning(String),
    /// It cannot be served: the place, what is wrong, and what to do.
    Mistake(String),
}

impl CheckLine {
    /// Its level in one word, and its text.
    pub fn parts(&self) -> (&'static str, &str) {
        match self {
            Self::Ok(text) => ("ok", text),
            Self::Warning(text) => ("warning", text),
            Self::Mistake(text) => ("mistake", text),
        }
    }
}

/// The configuration has mistakes, which were reported.
#[derive(Debug, thiserror::Error)]
#[error("the configuration has {}{}", plural(*.mistakes as u64, "mistake"), match *.is_parsed {
    true => "",
    false => "; stores, addresses and certificates were not checked",
})]
pub struct CheckFailed {
    /// How many.
    pub mistakes: usize,
    /// Its syntax and values are right, so that stores and addresses were checked.
    pub is_parsed: bool,
}

/// Checks the configuration of a command line and its file: passes `say` a line for each part.
///
/// # Errors
/// [`CheckFailed`] if a line was a mistake.
pub fn check(args: &ServeArgs, mut say: impl FnMut(CheckLine)) -> Result<(), CheckFailed> {
    match Config::load(args) {
        Ok(config) => check_config(&config, args.config.as_deref(), say),
        Err(_) => {
            let mistakes = Config::mistakes(args);
            let count = mistakes.len();
            for mistake in mistakes {
                say(CheckLine::Mistake(mistake.to_string()));
            }
            Err(CheckFailed { mistakes: count, is_parsed: false })
        }
    }
}

/// Checks a configuration that was parsed from the file `own`: opens its certificates, addresses
/// and stores.
///
/// # Errors
/// [`CheckFailed`] if a line was a mistake.
pub fn check_config(
    config: &Config,
    own: Option<&Path>,
    mut say: impl FnMut(CheckLine),
) -> Result<(), CheckFailed> {
    let mut volumes = VolumeChecks::new(config, own);
    let mistakes = Cell::new(0);
    let mut say = |line: CheckLine| {
        mistakes.set(mistakes.get() + usize::from(matches!(line, CheckLine::Mistake(_))));
        say(line);
    };
    let mut report = |outcome: anyhow::Result<()>| {
        if let Err(error) = outcome {
            say(CheckLine::Mistake(reasons(&error)));
        }
    };
    report(check_tls(config));
    report(page_access(config).map(drop));
    report(check_page_certificate(config));
    let daemon = RunningDaemon::of(config);
    report(config.state.as_deref().map_or(Ok(()), check_state));
    report(daemon.check_state());
    for address in addresses(config) {
        report(listener::check(&address).map_err(|error| Advised(error).into()));
    }
    for (path, volume) in config.vhost_sockets() {
        let is_free = volumes.check_socket(&volume).map_err(anyhow::Error::msg);
        let checked = is_free.and_then(|()| check_socket(&path));
        report(checked.with_context(|| format!("volume {volume}: vhost_user")));
    }
    // A start serves the other volumes, and a reload reports these.
    for (name, why) in &config.broken {
        report(Err(anyhow::anyhow!(
            "volume {name}: its file in the state directory cannot be used: {why}"
        )));
    }
    for why in config.broken_groups.values() {
        report(Err(anyhow::anyhow!("{why}")));
    }
    let baseless: Vec<_> =
        config.volumes.keys().filter_map(|name| config.missing_base(name)).collect();
    // A daemon that serves such an overlay goes on, and none can start with it.
    let warnings = config.warnings.iter().filter(|text| !baseless.contains(text));
    warnings.for_each(|warning| say(CheckLine::Warning(warning.clone())));
    let too_few =
        descriptors::limit_of_daemon().and_then(|limit| descriptors::too_few(limit, config));
    for warning in exposed_keys(config).into_iter().chain(too_few) {
        say(CheckLine::Warning(warning));
    }
    for name in config.volumes.keys() {
        volumes.check(name, |line| say(daemon.compare(name, line)));
    }
    match mistakes.get() {
        0 => {
            say(CheckLine::Ok("configuration".to_owned()));
            Ok(())
        }
        mistakes => Err(CheckFailed { mistakes, is_parsed: true }),
    }
}

fn check_tls(config: &Config) -> anyhow::Result<()> {
    tls_context(&config.nbd)?;
    if let (Some(folder), true) = (&config.nbd.tls_certificates, config.nbd.tls != TlsSetting::Off)
    {
        let checked = ServerTls::check_dates(folder, config.nbd.tls_verify_peer);
        checked.map_err(Advised).context("TLS")?;
    }
    Ok(())
}

fn check_page_certificate(config: &Config) -> anyhow::Result<()> {
    if let (Some(folder), Some(_)) = (&config.web_tls_certificates, &config.web) {
        let checked = ServerTls::check_dates(folder, false).map_err(Advised);
        checked.context("web_tls_certificates")?;
    }
    Ok(())
}

/// The addresses of NBD, the control socket and the page.
fn addresses(config: &Config) -> impl Iterator<Item = Listen> {
    let control = config.control.clone().map(Listen::Unix);
    let page = config.web.clone().map(Listen::Tcp);
    config.listen.iter().cloned().chain(control).chain(page)
}

/// Checks that the state directory can be made, or be written.
fn check_state(state: &Path) -> anyhow::Result<()> {
    let state = StateDir::new(&std::path::absolute(state)?).folder().to_owned();
    // Also a link that leads nowhere: nothing can be made in its place.
    let exists = |path: &&Path| path.symlink_metadata().is_ok();
    let found = state.ancestors().find(exists).unwrap_or(Path::new("/"));
    anyhow::ensure!(
        found.is_dir(),
        "state: {} cannot be made: {} is no directory: name another one",
        state.display(),
        found.display()
    );
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    let usable = rustix::fs::access(found, access);
    usable.with_context(|| format!("state: nothing can be made in {}", found.display()))
}

/// Checks the socket of a volume for vhost-user. The daemon makes its directory, but not the one above.
fn check_socket(path: &Path) -> anyhow::Result<()> {
    let directory = directory_of(path).unwrap_or(Path::new("."));
    let is_new = !directory.exists();
    let writable =
        if is_new { directory_of(directory).unwrap_or(Path::new(".")) } else { directory };
    anyhow::ensure!(
        !is_new || writable.is_dir(),
        "the directory {} cannot be made: {} is no directory: make it",
        directory.display(),
        writable.display()
    );
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::access(writable, access)
        .with_context(|| format!("nothing can be made in the directory {}", writable.display()))?;
    if is_new { Ok(()) } else { Ok(listener::check(&Listen::Unix(path.into())).map_err(Advised)?) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_of_a_socket_for_guests_may_be_made_by_the_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let checked = |path: &str| {
            let text = format!(
                "vhost_user = '{}/{path}'\n[volume.disk]\nstore = 'null:1M'\n",
                folder.path().display()
            );
            let args = ebb_config::ServeArgs::default();
            let config = Config::parse(&text, Path::new("test"), &args).unwrap();
            let mut said = Vec::new();
            let outcome = check_config(&config, None, |line| said.push(line.parts().1.to_owned()));
            (outcome.is_ok(), said.join("\n"))
        };
        assert!(checked("new").0);
        assert!(!folder.path().join("new").exists(), "nothing is made");
        let (passed, said) = checked("none/new");
        assert!(!passed && said.contains("volume disk: vhost_user: the directory"), "{said}");
        std::fs::create_dir_all(folder.path().join("d/disk.sock")).unwrap();
        let (passed, said) = checked("d");
        assert!(!passed && said.contains("disk.sock: exists and is not a socket"), "{said}");
        std::fs::remove_dir(folder.path().join("d/disk.sock")).unwrap();
        let _running = std::os::unix::net::UnixListener::bind(folder.path().join("d/disk.sock"));
        assert!(checked("d").0, "a running daemon has it");
    }

    #[test]
    fn faults_of_the_state_directory_are_reported() {
        let text = "listen = ['unix:/tmp/s']\n[volume.disk]\nstore = 'null:1M'\n";
        let args = ebb_config::ServeArgs::default();
        let mut config = Config::parse(text, Path::new("test"), &args).unwrap();
        config.warnings.push("volume a: not served over vhost-user".to_owned());
        let mut said = Vec::new();
        check_config(&config, None, |line| said.push(line)).unwrap();
        assert!(said.contains(&CheckLine::Warning(config.warnings[0].clone())), "{said:?}");
        config.broken.insert("b".to_owned(), "the file is not TOML".to_owned());
        said.clear();
        check_config(&config, None, |line| said.push(line)).unwrap_err();
        let is_told = |line: &CheckLine| matches!(line, CheckLine::Mistake(text) if text.starts_with("volume b: "));
        assert!(said.iter().any(is_told), "{said:?}");
    }

    #[test]
    fn a_directory_in_which_nothing_can_be_made_is_found() {
        // Also root may make nothing there.
        let error = check_socket(Path::new("/proc/self/s")).unwrap_err();
        assert!(error.to_string().contains("nothing can be made"), "{error}");
    }

    /// What a check of this file says; `DIR` in it is `folder`.
    fn checked_in(folder: &Path, text: &str) -> (bool, String) {
        let text = text.replace("DIR", folder.to_str().unwrap());
        let args = ebb_config::ServeArgs::default();
        let config = Config::parse(&text, Path::new("test"), &args).unwrap();
        let mut said = Vec::new();
        let outcome = check_config(&config, None, |line| said.push(line.parts().1.to_owned()));
        (outcome.is_ok(), said.join("\n"))
    }

    #[test]
    fn state_directory_that_cannot_be_made_is_a_mistake() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let main = "listen = ['unix:DIR/s']\n[volume.disk]\nstore = 'null:1M'\n";
        for (state, part) in
            [("DIR/file/state", "is no directory"), ("/proc/self/state", "nothing can be made")]
        {
            let (passed, said) = checked_in(folder.path(), &format!("state = '{state}'\n{main}"));
            assert!(!passed && said.contains(part), "{said}");
        }
        let (passed, said) = checked_in(folder.path(), &format!("state = 'DIR/a/b'\n{main}"));
        assert!(passed && !folder.path().join("a").exists(), "{said}");
    }

    #[test]
    fn damaged_delta_is_a_mistake_with_its_own_remedy() {
        use ebb_image::{DeltaHeader, HEADER_SLOTS, Layout, Parent, map_page};
        use std::os::unix::fs::FileExt;
        let folder = tempfile::tempdir().unwrap();
        let text = "listen = ['unix:DIR/s']\n[volume.base]\nstore = 'null:1M'\nread_only = true\n\
            [volume.over]\nstore = 'file:DIR/over'\nbase = 'base'\ncreate = true\n";
        let layout = Layout::new(1 << 20).unwrap();
        let file = std::fs::File::create_new(folder.path().join("over")).unwrap();
        file.set_len(layout.store_size()).unwrap();
        let parent = Parent {
            size: 1 << 20,
            delta: [9; 16],
            place: "over@two".to_owned(),
            ..Parent::default()
        };
        let header = DeltaHeader::new(1, [7; 16], layout, parent);
        file.write_all_at(&header.encode(), HEADER_SLOTS[header.slot()]).unwrap();
        let mut page = vec![0; map_page::BYTES];
        map_page::seal(&mut page, 0, [7; 16], 1);
        file.write_all_at(&page, layout.map_slot(0, 0)).unwrap();
        let checked = || checked_in(folder.path(), text);
        let (passed, said) = checked();
        assert!(passed, "the base is on no file: {said}");
        file.set_len(layout.store_size() - 4096).unwrap();
        let (passed, said) = checked();
        assert!(!passed && said.contains("it was truncated"), "{said}");
        // Both slots of the header are gone, and the map is there.
        file.write_all_at(&[0xa5; 8192], 0).unwrap();
        let (passed, said) = checked();
        let remedy = "look at it with `ebbd image check`, and restore it from a backup";
        assert!(!passed && said.contains(remedy) && !said.contains("remove `base`"), "{said}");
    }

    #[test]
    fn note_of_a_store_is_a_warning_of_its_volume() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk"), [1; 6]).unwrap();
        let text = "listen = ['unix:DIR/s']\n[volume.disk]\nstore = 'file:DIR/disk'\n\
            read_only = true\n"
            .replace("DIR", folder.path().to_str().unwrap());
        let args = ebb_config::ServeArgs::default();
        let config = Config::parse(&text, Path::new("test"), &args).unwrap();
        let mut said = Vec::new();
        check_config(&config, None, |line| said.push(line)).unwrap();
        let is_it = |line: &CheckLine| {
            matches!(line, CheckLine::Warning(text)
            if text.starts_with("volume disk: ") && text.contains("506 zero bytes"))
        };
        assert!(said.iter().any(is_it), "{said:?}");
    }

    #[test]
    fn overlay_without_a_base_that_can_be_served_is_a_mistake() {
        let folder = tempfile::tempdir().unwrap();
        let over = "listen = ['unix:DIR/s']\n[volume.over]\nstore = 'file:DIR/over'\nbase = 'base'\n\
            create = true\n";
        let (passed, said) = checked_in(folder.path(), over);
        assert!(!passed, "{said}");
        assert_eq!(said.matches("its base `base` is not configured").count(), 1, "{said}");
        assert!(!said.contains("delta above") && !said.contains("\nconfiguration"), "{said}");
        let both = format!("{over}[volume.base]\nstore = 'file:DIR/base'\nread_only = true\n");
        let (passed, said) = checked_in(folder.path(), &both);
        assert!(!passed && said.contains("volume base: "), "{said}");
        assert!(said.contains("volume over: its base `base` cannot be served"), "{said}");
        assert!(!said.contains("delta above"), "{said}");
        std::fs::write(folder.path().join("base"), [0; 4096]).unwrap();
        let (passed, said) = checked_in(folder.path(), &both);
        assert!(passed && said.contains("volume over: a new delta above base"), "{said}");
    }

    #[test]
    fn missing_snapshot_below_an_overlay_is_named() {
        use ebb_image::{DeltaHeader, HEADER_SLOTS, Layout, Parent};
        use std::os::unix::fs::FileExt;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("base"), vec![1; 1 << 20]).unwrap();
        let layout = Layout::new(1 << 20).unwrap();
        let file = std::fs::File::create_new(folder.path().join("over")).unwrap();
        file.set_len(layout.store_size()).unwrap();
        let parent = Parent {
            size: 1 << 20,
            delta: [9; 16],
            place: "/x/over@two".to_owned(),
            ..Parent::default()
        };
        let header = DeltaHeader::new(1, [7; 16], layout, parent);
        file.write_all_at(&header.encode(), HEADER_SLOTS[header.slot()]).unwrap();
        let text = "listen = ['unix:DIR/s']\n[volume.base]\nstore = 'file:DIR/base'\nread_only = true\n\
            [volume.over]\nstore = 'file:DIR/over'\nbase = 'base'\n";
        let (passed, said) = checked_in(folder.path(), text);
        assert!(!passed && said.contains("over@two: no such file"), "{said}");
        assert!(!said.contains("name the right base") && !said.contains("`create`"), "{said}");
    }

    #[test]
    fn file_that_was_created_before_is_no_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let text = "listen = ['unix:DIR/s']\nstate = 'DIR/state'\n\
            [volume.base]\nstore = 'null:1M'\nread_only = true\n\
            [volume.disk]\nstore = 'file:DIR/disk'\nsize = '1M'\ncreate = true\n\
            [volume.over]\nstore = 'file:DIR/over'\nbase = 'base'\ncreate = true\n"
            .replace("DIR", folder.path().to_str().unwrap());
        let args = ebb_config::ServeArgs::default();
        let config = Config::parse(&text, Path::new("test"), &args).unwrap();
        let state = StateDir::new(&folder.path().join("state"));
        let _lock = state.prepare().unwrap();
        let checked = || {
            let mut said = Vec::new();
            let outcome = check_config(&config, None, |line| said.push(line.parts().1.to_owned()));
            (outcome.is_ok(), said.join("\n"))
        };
        let (passed, said) = checked();
        assert!(passed && said.contains("to be created") && said.contains("a new delta"), "{said}");
        for name in ["disk", "over"] {
            state.note_created(name, &config.volumes[name].store).unwrap();
        }
        let (passed, said) = checked();
        assert!(!passed && !said.contains("to be created") && !said.contains("a new delta"));
        for name in ["disk", "over"] {
            let record = format!("state/created/{name}.toml");
            assert!(said.contains(&record), "{said}");
        }
    }

    #[test]
    fn a_configuration_is_checked_while_a_daemon_serves_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let checked = |listen: &str| {
            let (at, path) = (folder.path().display(), path.display());
            let text = format!(
                "listen = ['unix:{at}/{listen}']\ncontrol = '{at}/control'\n[volume.disk]\nstore = 'file:{path}'\n\
                 size = '1M'\ncreate = true\n"
            );
            let args = ebb_config::ServeArgs::default();
            let config = Config::parse(&text, Path::new("test"), &args).unwrap();
            let mut said = Vec::new();
            let outcome = check_config(&config, None, |line| said.push(line));
            (outcome.is_ok(), said)
        };
        let ok = |text: &str| CheckLine::Ok(text.to_owned());
        let all = ["volume disk: 1048576 bytes, to be created", "configuration"].map(ok);
        assert_eq!(checked("s"), (true, all.into()));
        let options =
            ebb_store::OpenOptions { create: Some(1 << 20), ..ebb_store::OpenOptions::default() };
        let served = ebb_store::FileStore::open(&path, &options).unwrap();
        assert_eq!(
            checked("s").1[0],
            ok("volume disk: in use by a daemon or another process, and not opened")
        );
        drop(served);
        let sizes = ["1048576 bytes", "1048576 bytes, direct"]
            .map(|size| ok(&format!("volume disk: {size}")));
        assert!(sizes.contains(&checked("s").1[0]));
        // All mistakes are found, and a file of another format.
        std::fs::write(folder.path().join("control"), "").unwrap();
        let mut image = vec![0; 1 << 20];
        image[..4].copy_from_slice(b"QFI\xfb");
        std::fs::write(&path, image).unwrap();
        let (passed, said) = checked("none/s");
        let [
            CheckLine::Mistake(listen),
            CheckLine::Mistake(control),
            CheckLine::Ok(_),
            CheckLine::Warning(format),
        ] = &said[..]
        else {
            panic!("{said:?}");
        };
        assert!(!passed && listen.contains("its directory does not exist: create it"), "{listen}");
        assert!(
            control.contains("control: exists and is not a socket: listen at another path"),
            "{control}"
        );
        assert!(format.contains("`qcow2:`") && format.contains("qemu-img convert"), "{format}");
    }
}
