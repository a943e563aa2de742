//! Opening stores, which blocks for as long as a device, a network file system or a server hangs.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use ebb_config::VolumeConfig;
use ebb_sandbox::threads;
use ebb_store::{ForeignFormat, Store};

use super::claims::{StoreClaim, StoreClaims};
use crate::bdi::BdiKey;
use crate::stores::{
    Expected, StoreError, StoreTarget, foreign_format, inspect, must_not_be_configuration,
    open_store, same_target,
};

/// An opened store, with its claim and its backing device.
#[derive(Debug)]
pub struct Opened {
    pub(super) store: Store,
    /// Its claim to its file.
    pub(super) claim: Option<StoreClaim>,
    /// The backing device it is on.
    pub(super) device: BdiKey,
    /// What it looks like, if that is no raw disk.
    pub(super) format: Option<ForeignFormat>,
}

impl Opened {
    /// The store of a volume with a claim to its file. Finds the backing device, and so may block.
    pub fn new(
        name: &str,
        config: &VolumeConfig,
        store: Store,
        claim: Option<StoreClaim>,
    ) -> Opened {
        let device = BdiKey::of(name, config, &store);
        Opened { store, claim, device, format: None }
    }
}

/// A store that is being opened.
pub type Opening = Pin<Box<dyn Future<Output = Result<Opened, StoreError>> + Send>>;
/// Two stores that are being compared.
pub type Comparing = Pin<Box<dyn Future<Output = Result<bool, StoreError>> + Send>>;

/// Opens stores for an engine.
pub trait Opener: Send + Sync {
    /// Claims the file of a volume, checks that it is the expected one, and opens the store. The future may be dropped:
    /// a store that is opened afterwards is closed.
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
        claims: &Arc<StoreClaims>,
    ) -> Opening;

    /// Whether `old`, which has the file `open` open, and `new` are the same file or export. If so, `new` is checked as
    /// far as that is possible without its lock, which `old` holds, and without changing anything.
    ///
    /// # Errors
    /// Those of opening `new`; [`StoreError::Moved`] if the file is no longer at its path.
    fn compare(
        &self,
        old: &VolumeConfig,
        open: Option<StoreTarget>,
        new: &VolumeConfig,
    ) -> Comparing;
}

/// Opens each store on a helper thread: a store that hangs blocks only its thread.
#[derive(Clone, Debug, Default)]
pub struct HelperThreads {
    /// The workers, each of which may need a connection to a remote store.
    pub workers: usize,
    /// The state directory, for the records of locks.
    pub state: Option<PathBuf>,
    /// The configuration file, to which no volume may write.
    pub config_file: Option<PathBuf>,
}

/// Runs what may block on a helper thread.
pub(super) async fn on_a_thread<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    // If the receiver was dropped, the result is dropped, which closes the store.
    threads::run(move || drop(sender.send(call()))).map_err(StoreError::Thread)?;
    receiver.await.unwrap_or(Err(StoreError::Interrupted))
}

impl Opener for HelperThreads {
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
        claims: &Arc<StoreClaims>,
    ) -> Opening {
        let (name, config, claims) = (name.to_owned(), config.clone(), claims.clone());
        let HelperThreads { workers, state, config_file } = self.clone();
        Box::pin(on_a_thread(move || {
            must_not_be_configuration(&config, config_file.as_deref())?;
            let mut claim = claims.claim(&name, &config)?;
            let store = open_store(&name, &config, &expected, (workers, state.as_deref()))?;
            if let Some(claim) = &mut claim {
                claim.opened(&store)?;
            }
            let format = foreign_format(&config);
            if let Some(format) = format {
                tracing::warn!(volume = name, "{}", format.warning());
            }
            Ok(Opened { format, ..Opened::new(&name, &config, store, claim) })
        }))
    }

    fn compare(
        &self,
        old: &VolumeConfig,
        open: Option<StoreTarget>,
        new: &VolumeConfig,
    ) -> Comparing {
        let (old, new) = (old.clone(), new.clone());
        Box::pin(on_a_thread(move || {
            let same = same_target(&old.store, open.as_ref(), &new.store)?;
            if same {
                inspect(&new)?;
            }
            Ok(same)
        }))
    }
}
