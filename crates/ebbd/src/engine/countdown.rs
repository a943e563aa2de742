//! Counts pending work, such as the first attempts of a start to open its volumes.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ebb_io::{Io, Signal};

use crate::stores::is_unlocking;

/// Counts down the completion of several tasks of one worker.
#[derive(Default)]
pub(super) struct Countdown {
    left: Cell<usize>,
    stepped: Signal,
}

impl Countdown {
    pub(super) fn new(left: usize) -> Countdown {
        Countdown { left: Cell::new(left), stepped: Signal::default() }
    }

    /// One more.
    pub(super) fn add(&self) {
        self.left.set(self.left.get() + 1);
    }

    pub(super) fn count(&self) {
        self.left.set(self.left.get().saturating_sub(1));
        self.stepped.set();
    }

    pub(super) fn left(&self) -> usize {
        self.left.get()
    }

    /// Waits for the next task to complete. One task may wait at a time.
    pub(super) async fn step(&self) {
        self.stepped.wait().await;
    }

    /// Waits until the count is 0. One task may wait at a time.
    pub(super) async fn over(&self) {
        while self.left.get() > 0 {
            self.step().await;
        }
    }
}

/// The first attempts of a start to open its volumes.
pub(crate) struct FirstTries(pub(super) Rc<Countdown>);

impl FirstTries {
    /// Waits until all were made, or none was for `patience`; for the first one `waited` of that
    /// has passed. While a key is read or derived it waits on, for `keys` in all unless that is
    /// zero; true if a key still is then.
    pub(super) async fn wait(
        &self,
        io: &Io,
        waited: Duration,
        patience: Option<Duration>,
        keys: Duration,
    ) -> bool {
        let keys_until = (!keys.is_zero()).then(|| ebb_mem::clock::now() + keys);
        let mut left = patience.map(|patience| patience.saturating_sub(waited));
        while self.0.left() > 0 {
            if keys_until.is_some_and(|until| ebb_mem::clock::now() >= until) && is_unlocking() {
                return true;
            }
            match left {
                None => self.0.step().await,
                Some(left) if io.timeout(left, self.0.step()).await.is_none() => {
                    if keys_until.is_none() || !is_unlocking() {
                        return false;
                    }
                }
                Some(_) => left = patience,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use ebb_io::Worker;
    use futures_lite::future::or;

    use super::*;
    use crate::stores::Unlocking;

    /// Each step restarts the patience; a predecessor waits for so long only.
    #[test]
    fn a_wait_for_keys_ends_however_many_volumes_are_opened_meanwhile() {
        let _unlocking = Unlocking::begin();
        let worker = Worker::start_alone("keys").unwrap();
        let late = worker.handle().block_on(|io| async move {
            let tries = FirstTries(Rc::new(Countdown::new(usize::MAX)));
            let steps = async {
                loop {
                    io.sleep(Duration::from_millis(1)).await;
                    tries.0.count();
                }
            };
            let (patience, keys) = (Some(Duration::from_secs(60)), Duration::from_millis(20));
            or(tries.wait(&io, Duration::ZERO, patience, keys), steps).await
        });
        assert_eq!(late, Some(true));
    }
}
