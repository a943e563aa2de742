//! Opening stores, which may block for as long as a device, a network file system or a server hangs.

use std::future::Future;
use std::pin::Pin;

use ebb_store::Store;

use crate::config::VolumeConfig;
use crate::stores::{StoreError, inspect, open_store, same_target};

/// A store that is being opened.
pub type Opening = Pin<Box<dyn Future<Output = Result<Store, StoreError>> + Send>>;
/// Two stores that are being compared.
pub type Comparing = Pin<Box<dyn Future<Output = Result<bool, StoreError>> + Send>>;

/// Opens stores for an engine.
pub trait Opener: Send + Sync {
    /// Opens the store of a volume. The future may be dropped: then the store, if it is opened after all, is closed.
    fn open(&self, name: &str, config: &VolumeConfig) -> Opening;

    /// Finds out whether `old`, which is open, and `new` are the same bytes: the same file or export. If so, `new` is
    /// looked at as far as that can be done without its lock, which `old` has, and without changing anything.
    ///
    /// # Errors
    /// Those of opening `new`.
    fn compare(&self, old: &VolumeConfig, new: &VolumeConfig) -> Comparing;
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
    fn open(&self, name: &str, config: &VolumeConfig) -> Opening {
        let (name, config) = (name.to_owned(), config.clone());
        Box::pin(on_a_thread(move || open_store(&name, &config)))
    }

    fn compare(&self, old: &VolumeConfig, new: &VolumeConfig) -> Comparing {
        let (old, new) = (old.clone(), new.clone());
        Box::pin(on_a_thread(move || {
            let same = same_target(&old.store, &new.store);
            if same {
                inspect(&new)?;
            }
            Ok(same)
        }))
    }
}
