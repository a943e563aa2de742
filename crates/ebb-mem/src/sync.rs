//! The synchronisation this crate uses: the standard library's, or shuttle's in its models.
//!
//! A poisoned lock is acquired all the same: every critical section here leaves its data consistent
//! before it can panic, and memory must be freed even after a panic elsewhere.

#[cfg(all(test, feature = "shuttle"))]
use shuttle::sync as real;
#[cfg(not(all(test, feature = "shuttle")))]
use std::sync as real;

pub(crate) use real::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use real::{Condvar, MutexGuard};
use std::sync::PoisonError;

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

    /// The lock if it is free. A failure counts as contention.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}

/// Waits on `condvar`, ignoring poison.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
