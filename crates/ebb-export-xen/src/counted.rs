//! A connection to xenstore that counts what is asked of it.

use std::os::fd::BorrowedFd;

use crate::platform::{Domain, StoreError, Transaction, XenStore};

/// See the module.
pub(crate) struct Counted {
    store: Box<dyn XenStore>,
    requests: u64,
}

impl Counted {
    pub(crate) fn new(store: Box<dyn XenStore>) -> Counted {
        Counted { store, requests: 0 }
    }

    /// Requests since this was asked the last time.
    pub(crate) fn take_count(&mut self) -> u64 {
        std::mem::take(&mut self.requests)
    }

    fn next(&mut self) -> &mut dyn XenStore {
        self.requests += 1;
        &mut *self.store
    }
}

impl XenStore for Counted {
    fn read(&mut self, within: Transaction, path: &str) -> Result<Vec<u8>, StoreError> {
        self.next().read(within, path)
    }

    fn write(&mut self, within: Transaction, path: &str, value: &str) -> Result<(), StoreError> {
        self.next().write(within, path, value)
    }

    fn list(&mut self, within: Transaction, path: &str) -> Result<Vec<String>, StoreError> {
        self.next().list(within, path)
    }

    fn remove(&mut self, within: Transaction, path: &str) -> Result<(), StoreError> {
        self.next().remove(within, path)
    }

    fn give(
        &mut self,
        within: Transaction,
        path: &str,
        owner: Domain,
        reader: Domain,
    ) -> Result<(), StoreError> {
        self.next().give(within, path, owner, reader)
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.next().watch(path, token)
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.next().unwatch(path, token)
    }

    fn begin(&mut self) -> Result<Transaction, StoreError> {
        self.next().begin()
    }

    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), StoreError> {
        self.next().end(transaction, commit)
    }

    fn event(&mut self) -> Result<Option<(String, String)>, StoreError> {
        self.store.event()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.store.fd()
    }
}
