//! The synchronisation primitives of this crate: the standard library's, or shuttle's in its
//! models.
//!
//! Lock poisoning is ignored: every critical section leaves its data consistent before it can panic, and
//! memory must be freed even after a panic elsewhere.

use std::sync::PoisonError;

#[cfg(all(test, feature = "shuttle"))]
use shuttle::sync as real;
#[cfg(not(all(test, feature = "shuttle")))]
use std::sync as real;

pub(crate) use real::MutexGuard;

/// A mutex whose poisoning is ignored.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(real::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex(real::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
