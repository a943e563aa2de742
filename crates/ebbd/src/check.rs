//! `--check`: whether a configuration could be served, also beside the daemon that serves it now.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use ebb_export_nbd::ServerTls;

use crate::config::{Config, Listen, Tls};
use crate::daemon::tls_context;
use crate::stores::{Expected, FileIdentity, inspect, is_in_use, open_store, to_be_created};

/// The configuration names something that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("the configuration was checked and cannot be served")]
pub struct CheckFailed;

/// Opens what the configuration names and says `ok` for each on the way, without serving.
///
/// # Errors
/// The first thing that cannot be opened.
pub fn check(config: &Config, say: impl FnMut(String)) -> anyhow::Result<()> {
    open_all(config, say).map_err(|error| error.context(CheckFailed))
}

fn open_all(config: &Config, mut say: impl FnMut(String)) -> anyhow::Result<()> {
    tls_context(&config.nbd)?;
    if let (Some(folder), true) = (&config.nbd.tls_certificates, config.nbd.tls != Tls::Off) {
        ServerTls::check_dates(folder, config.nbd.tls_verify_peer).context("TLS")?;
    }
    check_sockets(config)?;
    let mut files = BTreeMap::new();
    for (name, volume) in &config.volumes {
        let file = FileIdentity::of(&volume.store).with_context(|| format!("volume {name}"))?;
        if let Some(file) = file
            && let Some((other, read_only)) = files.insert(file, (name, volume.read_only))
            && !(read_only && volume.read_only)
        {
            let remedy = "give each a file of its own, or set `read_only = true` for both";
            anyhow::bail!("volumes {other} and {name} are on the same file: {remedy}");
        }
        if let Some(size) = to_be_created(volume) {
            inspect(volume).with_context(|| format!("volume {name}"))?;
            say(format!("ok volume {name}: {size} bytes, to be created"));
            continue;
        }
        // That of a running daemon, most likely: the configuration is checked before it reloads.
        if is_in_use(volume) {
            inspect(volume).with_context(|| format!("volume {name}"))?;
            say(format!("ok volume {name}: in use"));
            continue;
        }
        let store =
            open_store(name, volume, &Expected::Any).with_context(|| format!("volume {name}"))?;
        let direct = if store.capabilities().direct { ", direct" } else { "" };
        say(format!("ok volume {name}: {} bytes{direct}", store.size()));
    }
    say("ok configuration".to_owned());
    Ok(())
}

/// Unix sockets need a folder.
fn check_sockets(config: &Config) -> anyhow::Result<()> {
    let unix = |address: &Listen| match address {
        Listen::Unix(path) => Some(path.clone()),
        Listen::Tcp(_) => None,
    };
    for path in config.listen.iter().filter_map(unix).chain(config.control.clone()) {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if !folder.unwrap_or(Path::new(".")).is_dir() {
            let path = path.display();
            anyhow::bail!("cannot listen at unix:{path}: its folder does not exist: make it");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_checked_beside_the_daemon_that_serves_it_and_sockets_need_folders() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let checked = |listen: &str| {
            let (at, path) = (folder.path().display(), path.display());
            let text = format!(
                "listen = ['unix:{at}/{listen}']\n[volume.disk]\nstore = 'file:{path}'\n\
                 size = '1M'\ncreate = true\n"
            );
            let overrides = crate::config::Overrides::default();
            let config = Config::parse(&text, Path::new("test"), &overrides).unwrap();
            let mut said = Vec::new();
            check(&config, |line| said.push(line)).map(|()| said)
        };
        assert_eq!(checked("s").unwrap()[0], "ok volume disk: 1048576 bytes, to be created");
        let options =
            ebb_store::OpenOptions { create: Some(1 << 20), ..ebb_store::OpenOptions::default() };
        let served = ebb_store::FileStore::open(&path, &options).unwrap();
        assert_eq!(checked("s").unwrap()[0], "ok volume disk: in use");
        drop(served);
        assert!(checked("s").unwrap()[0].starts_with("ok volume disk: 1048576 bytes"));
        let error = format!("{:#}", checked("none/s").unwrap_err());
        assert!(error.contains("its folder does not exist: make it"), "{error}");
    }
}
