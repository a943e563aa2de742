//! `--check`: checks whether a configuration can be served, also while a daemon serves it.

use anyhow::Context;
use ebb_block::BlockStore;
use ebb_config::{Config, Listen, TlsSetting};
use ebb_export_nbd::ServerTls;
use std::collections::BTreeMap;

use crate::listener;
use crate::setup::tls_context;
use crate::stores::{Expected, StoreTarget, inspect, is_in_use, open_store, to_be_created};

/// The configuration names something that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("the configuration was checked and cannot be served")]
pub struct CheckFailed;

/// Opens the stores of the configuration and prints `ok` for each, without serving.
///
/// # Errors
/// That of the first store, certificate or socket that cannot be used.
pub fn check(config: &Config, say: impl FnMut(String)) -> anyhow::Result<()> {
    open_all(config, say).map_err(|error| error.context(CheckFailed))
}

fn open_all(config: &Config, mut say: impl FnMut(String)) -> anyhow::Result<()> {
    tls_context(&config.nbd)?;
    if let (Some(folder), true) = (&config.nbd.tls_certificates, config.nbd.tls != TlsSetting::Off)
    {
        ServerTls::check_dates(folder, config.nbd.tls_verify_peer).context("TLS")?;
    }
    check_sockets(config)?;
    let mut files = BTreeMap::new();
    for (name, volume) in &config.volumes {
        let file = StoreTarget::of(&volume.store).with_context(|| format!("volume {name}"))?;
        if let Some(file) = file
            && let kind = file.kind()
            && let Some((other, read_only)) = files.insert(file, (name, volume.read_only))
            && !(read_only && volume.read_only)
        {
            let remedy = "give each one of its own, or set `read_only = true` for both";
            anyhow::bail!("volumes {other} and {name} are on the same {kind}: {remedy}");
        }
        if let Some(size) = to_be_created(volume) {
            inspect(volume).with_context(|| format!("volume {name}"))?;
            say(format!("ok volume {name}: {size} bytes, to be created"));
            continue;
        }
        // Most likely a running daemon serves it: the configuration is checked before a reload.
        if is_in_use(volume) {
            inspect(volume).with_context(|| format!("volume {name}"))?;
            say(format!("ok volume {name}: in use"));
            continue;
        }
        let store = open_store(name, volume, &Expected::Any, config.workers)
            .with_context(|| format!("volume {name}"))?;
        let direct = if store.capabilities().direct { ", direct" } else { "" };
        say(format!("ok volume {name}: {} bytes{direct}", store.size()));
    }
    say("ok configuration".to_owned());
    Ok(())
}

/// Checks the addresses of NBD, the control socket and the page.
fn check_sockets(config: &Config) -> anyhow::Result<()> {
    let control = config.control.clone().map(Listen::Unix);
    let page = config.web.clone().map(Listen::Tcp);
    for address in config.listen.iter().cloned().chain(control).chain(page) {
        listener::check(&address)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

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
            check(&config, |line| said.push(line)).map(|()| said)
        };
        let expected = "ok volume disk: 1048576 bytes, to be created";
        assert_eq!(checked("s").unwrap()[0], expected);
        let options =
            ebb_store::OpenOptions { create: Some(1 << 20), ..ebb_store::OpenOptions::default() };
        let served = ebb_store::FileStore::open(&path, &options).unwrap();
        assert_eq!(checked("s").unwrap()[0], "ok volume disk: in use");
        drop(served);
        assert!(checked("s").unwrap()[0].starts_with("ok volume disk: 1048576 bytes"));
        let error = format!("{:#}", checked("none/s").unwrap_err());
        assert!(error.contains("its directory does not exist: create it"), "{error}");
        std::fs::write(folder.path().join("control"), "").unwrap();
        let error = format!("{:#}", checked("s").unwrap_err());
        assert!(error.contains("control: exists and is not a socket: remove it"), "{error}");
    }
}
