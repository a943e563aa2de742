//! The broker of a world's daemon: it opens files for the daemon, until it hangs or ends.

use std::sync::{Arc, Mutex};

use tokio::sync::oneshot;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Conduct {
    #[default]
    Works,
    Hangs,
    Ended,
}

#[derive(Default)]
struct Inner {
    conduct: Conduct,
    /// Calls that hang.
    calls: Vec<oneshot::Sender<()>>,
}

/// See the module.
#[derive(Clone, Default)]
pub(crate) struct SimBroker(Arc<Mutex<Inner>>);

/// The broker makes no further call.
pub(crate) struct BrokerEnded;

impl SimBroker {
    pub(crate) fn hangs(&self) -> bool {
        self.0.lock().unwrap().conduct == Conduct::Hangs
    }

    pub(crate) fn works(&self) -> bool {
        self.0.lock().unwrap().conduct == Conduct::Works
    }

    /// It makes no call from now on, and those that it gets hang.
    pub(crate) fn hang(&self) {
        self.0.lock().unwrap().conduct = Conduct::Hangs;
    }

    /// It has ended: all calls fail.
    pub(crate) fn end(&self) {
        let mut inner = self.0.lock().unwrap();
        inner.conduct = Conduct::Ended;
        let calls = std::mem::take(&mut inner.calls);
        drop(inner);
        drop(calls);
    }

    /// Another one works for the next daemon.
    pub(crate) fn start(&self) {
        *self.0.lock().unwrap() = Inner::default();
    }

    /// Makes a call, or waits until that fails.
    pub(crate) async fn call(&self) -> Result<(), BrokerEnded> {
        let hangs = {
            let mut inner = self.0.lock().unwrap();
            match inner.conduct {
                Conduct::Works => return Ok(()),
                Conduct::Ended => return Err(BrokerEnded),
                Conduct::Hangs => {
                    let (call, hangs) = oneshot::channel();
                    inner.calls.push(call);
                    hangs
                }
            }
        };
        let _ = hangs.await;
        Err(BrokerEnded)
    }
}
