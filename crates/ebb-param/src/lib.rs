//! The value in force of a run-time parameter, as the code that uses it holds it.
//!
//! A [`Parameter`] is a handle with two uses: [`Parameter::get`] reads the value, and [`Parameter::watch`]
//! registers a function that is called when it has changed. There is no other way from a parameter to its
//! user. The names, ranges, defaults and texts of all parameters are in `ebb-config` (`params/table.rs`),
//! which gives out the handles of a running daemon; a test or an example creates its own with
//! [`Parameter::new`].
//!
//! # Invariants
//! - Reading is one relaxed atomic load, without a lock: values are independent of each other and of other
//!   memory. Code that needs several values that fit together has to accept any mixture of old and new.
//! - A watcher is called after the value was stored, on the thread that changes it, one call at a time.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The type of a parameter's value, which fits into 64 bits.
pub trait ParameterValue: Copy + 'static {
    /// The value of `bits`; a number that is too large becomes the largest one.
    fn from_bits(bits: u64) -> Self;

    /// The inverse of [`ParameterValue::from_bits`].
    fn to_bits(self) -> u64;
}

impl ParameterValue for u64 {
    fn from_bits(bits: u64) -> u64 {
        bits
    }

    fn to_bits(self) -> u64 {
        self
    }
}

impl ParameterValue for u32 {
    fn from_bits(bits: u64) -> u32 {
        u32::try_from(bits).unwrap_or(u32::MAX)
    }

    fn to_bits(self) -> u64 {
        self.into()
    }
}

impl ParameterValue for usize {
    fn from_bits(bits: u64) -> usize {
        usize::try_from(bits).unwrap_or(usize::MAX)
    }

    fn to_bits(self) -> u64 {
        u64::try_from(self).unwrap_or(u64::MAX)
    }
}

impl ParameterValue for bool {
    fn from_bits(bits: u64) -> bool {
        bits != 0
    }

    fn to_bits(self) -> u64 {
        self.into()
    }
}

/// A function that is called after each change.
struct Watcher {
    /// It is called for as long as this exists.
    subject: Option<Weak<dyn Any + Send + Sync>>,
    call: Box<dyn Fn(u64) + Send + Sync>,
}

impl Watcher {
    fn is_over(&self) -> bool {
        self.subject.as_ref().is_some_and(|subject| subject.strong_count() == 0)
    }
}

struct Shared {
    bits: AtomicU64,
    watchers: Mutex<Vec<Watcher>>,
}

impl Shared {
    fn watchers(&self) -> MutexGuard<'_, Vec<Watcher>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a watcher. Those whose subjects are gone are removed whenever the list would grow, so that it has at most twice
    /// as many as subjects.
    fn add(&self, watcher: Watcher) {
        let mut watchers = self.watchers();
        if watchers.len() == watchers.capacity() {
            watchers.retain(|watcher| !watcher.is_over());
        }
        watchers.push(watcher);
    }
}

/// A handle to the value in force of one parameter. Cheap to clone; clones are handles to the same value.
pub struct Parameter<T> {
    shared: Arc<Shared>,
    value: PhantomData<fn() -> T>,
}

impl<T> Clone for Parameter<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), value: PhantomData }
    }
}

impl<T: ParameterValue + fmt::Debug> fmt::Debug for Parameter<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl<T: ParameterValue> Parameter<T> {
    /// A parameter of its own, which has this value until [`Parameter::set`] is called.
    pub fn new(value: T) -> Self {
        let bits = AtomicU64::new(value.to_bits());
        let shared = Arc::new(Shared { bits, watchers: Mutex::default() });
        Self { shared, value: PhantomData }
    }

    /// The value in force.
    #[inline]
    pub fn get(&self) -> T {
        T::from_bits(self.shared.bits.load(Ordering::Relaxed))
    }

    /// Calls `watcher` with the new value after each later change. It must not watch or set this parameter.
    pub fn watch(&self, watcher: impl Fn(T) + Send + Sync + 'static) {
        let call = Box::new(move |bits| watcher(T::from_bits(bits)));
        self.shared.add(Watcher { subject: None, call });
    }

    /// As [`Parameter::watch`], for as long as `subject` exists, which is passed to the watcher.
    pub fn watch_for<S: Send + Sync + 'static>(
        &self,
        subject: &Arc<S>,
        watcher: impl Fn(&S, T) + Send + Sync + 'static,
    ) {
        let weak = Arc::downgrade(subject);
        let subject: Weak<dyn Any + Send + Sync> = weak.clone();
        let call = move |bits| {
            weak.upgrade().iter().for_each(|subject| watcher(subject, T::from_bits(bits)));
        };
        self.shared.add(Watcher { subject: Some(subject), call: Box::new(call) });
    }

    /// Removes all watchers: to be called when the value changes no more. A watcher may have a handle of the parameter, which
    /// would keep it for ever.
    pub fn forget_watchers(&self) {
        // Dropped without the lock: what they have may have a lock of its own.
        drop(std::mem::take(&mut *self.shared.watchers()));
    }

    /// Changes the value and calls the watchers. In a running daemon only the set of all parameters does so, which
    /// checks the value first.
    pub fn set(&self, value: T) {
        self.store(value);
        self.notify();
    }

    /// Changes the value only: for values that change together, before [`Parameter::notify`] is called for each.
    pub fn store(&self, value: T) {
        self.shared.bits.store(value.to_bits(), Ordering::Relaxed);
    }

    /// Calls the watchers with the value in force.
    pub fn notify(&self) {
        let bits = self.shared.bits.load(Ordering::Relaxed);
        self.shared.watchers().retain(|watcher| {
            (watcher.call)(bits);
            !watcher.is_over()
        });
    }

    /// A handle to the same value that reads it as another type.
    pub fn read_as<U: ParameterValue>(&self) -> Parameter<U> {
        Parameter { shared: self.shared.clone(), value: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_and_other_types_read_one_value() {
        let pages = Parameter::new(7u64);
        let (clone, switch) = (pages.clone(), pages.read_as::<bool>());
        assert_eq!((clone.get(), switch.get()), (7, true));
        pages.set(1 << 40);
        assert_eq!((clone.get(), pages.read_as::<u32>().get()), (1 << 40, u32::MAX));
        switch.set(false);
        assert_eq!((pages.get(), format!("{pages:?}").as_str()), (0, "0"));
    }

    #[test]
    fn watchers_are_called_after_each_change_while_their_subject_exists() {
        let parameter = Parameter::new(1u32);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (reader, subject) = (parameter.clone(), Arc::new("a device"));
        let log = seen.clone();
        parameter.watch(move |value| {
            assert_eq!(reader.get(), value);
            log.lock().unwrap().push(("always", value));
        });
        let log = seen.clone();
        parameter
            .watch_for(&subject, move |subject, value| log.lock().unwrap().push((*subject, value)));
        parameter.set(2);
        parameter.store(3);
        assert_eq!(*seen.lock().unwrap(), [("always", 2), ("a device", 2)], "stored, not notified");
        drop(subject);
        parameter.notify();
        assert_eq!(*seen.lock().unwrap(), [("always", 2), ("a device", 2), ("always", 3)]);
        assert_eq!(parameter.shared.watchers().len(), 1, "the watcher of the device was removed");
    }

    #[test]
    fn watchers_without_a_subject_do_not_accumulate_and_a_cycle_is_broken() {
        let parameter = Parameter::new(1u32);
        for _ in 0..1000 {
            let (subject, itself) = (Arc::new(()), parameter.clone());
            parameter.watch_for(&subject, move |(), _| assert_eq!(itself.get(), 1));
        }
        assert!(parameter.shared.watchers().len() <= 4, "{}", parameter.shared.watchers().len());
        let weak = Arc::downgrade(&parameter.shared);
        parameter.forget_watchers();
        drop(parameter);
        assert!(weak.upgrade().is_none(), "a watcher keeps its parameter");
    }
}
