//! Opening stores, which may block for as long as a device, a network file system or a server hangs.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use ebb_store::Store;

use super::claims::{Claim, Claims};
use crate::bdi::DeviceKey;
use crate::config::VolumeConfig;
use crate::stores::{Expected, FileIdentity, StoreError, inspect, open_store, same_target};

/// A store that was opened, and what had to be asked of its file system besides.
#[derive(Debug)]
pub struct Opened {
    pub(super) store: Store,
    /// Keeps other volumes off its file.
    pub(super) claim: Option<Claim>,
    /// The backing device it is on.
    pub(super) device: DeviceKey,
}

impl Opened {
    /// The store of a volume, whose file is claimed. Asks its file system for the backing device, and so may block.
    pub fn new(name: &str, config: &VolumeConfig, store: Store, claim: Option<Claim>) -> Opened {
        Opened { store, claim, device: DeviceKey::of(name, config) }
    }
}

/// A store that is being opened.
pub type Opening = Pin<Box<dyn Future<Output = Result<Opened, StoreError>> + Send>>;
/// Two stores that are being compared.
pub type Comparing = Pin<Box<dyn Future<Output = Result<bool, StoreError>> + Send>>;

/// Opens stores for an engine.
pub trait Opener: Send + Sync {
    /// Opens the store of a volume, once its file is claimed, if it is the one that is expected. The future may be
    /// dropped: then the store, if it is opened after all, is closed.
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
        claims: &Arc<Claims>,
    ) -> Opening;

    /// Finds out whether `old`, of which the file `open` is open, and `new` are the same bytes: the same file or
    /// export. If so, `new` is looked at as far as that can be done without its lock, which `old` has, and without
    /// changing anything.
    ///
    /// # Errors
    /// Those of opening `new`; [`StoreError::Moved`] if the file is no longer at its path.
    fn compare(
        &self,
        old: &VolumeConfig,
        open: Option<FileIdentity>,
        new: &VolumeConfig,
    ) -> Comparing;
}

/// Opens each store on a thread of its own: one that hangs takes a thread and nothing else.
#[derive(Clone, Copy, Debug, Default)]
pub struct HelperThreads;

/// Enough for a TLS handshake.
const STACK_BYTES: usize = 512 << 10;

async fn on_a_thread<T: Send + 'static>(
    call: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new().name("ebbd-open".into()).stack_size(STACK_BYTES);
    // What nobody waits for any more is dropped, and so closed.
    thread.spawn(move || drop(sender.send(call()))).map_err(StoreError::Thread)?;
    receiver.await.unwrap_or(Err(StoreError::Interrupted))
}

impl Opener for HelperThreads {
    fn open(
        &self,
        name: &str,
        config: &VolumeConfig,
        expected: Expected,
        claims: &Arc<Claims>,
    ) -> Opening {
        let (name, config, claims) = (name.to_owned(), config.clone(), claims.clone());
        Box::pin(on_a_thread(move || {
            let mut claim = claims.claim(&name, &config)?;
            let store = open_store(&name, &config, &expected)?;
            if let Some(claim) = &mut claim {
                claim.opened(&store)?;
            }
            Ok(Opened::new(&name, &config, store, claim))
        }))
    }

    fn compare(
        &self,
        old: &VolumeConfig,
        open: Option<FileIdentity>,
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
