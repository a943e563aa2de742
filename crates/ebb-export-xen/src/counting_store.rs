//! A connection to xenstore that counts its requests, for the limit per guest (`allowance`).

use std::os::fd::BorrowedFd;

use crate::platform::{Domain, Transaction, XenStore, XenstoreError};

/// See the module.
pub(crate) struct CountingStore {
    store: Box<dyn XenStore>,
    requests: u64,
}

impl CountingStore {
    pub(crate) fn new(store: Box<dyn XenStore>) -> CountingStore {
        CountingStore { store, requests: 0 }
    }

    /// Requests since the last call of this.
    pub(crate) fn take_count(&mut self) -> u64 {
        std::mem::take(&mut self.requests)
    }

    fn next(&mut self) -> &mut dyn XenStore {
        self.requests += 1;
        &mut *self.store
    }
}

impl XenStore for CountingStore {
    fn read(&mut self, within: Transaction, path: &str) -> Result<Vec<u8>, XenstoreError> {
        self.next().read(within, path)
    }

    fn write(&mut self, within: Transaction, path: &str, value: &str) -> Result<(), XenstoreError> {
        self.next().write(within, path, value)
    }

    fn list(&mut self, within: Transaction, path: &str) -> Result<Vec<String>, XenstoreError> {
        self.next().list(within, path)
    }

    fn remove(&mut self, within: Transaction, path: &str) -> Result<(), XenstoreError> {
        self.next().remove(within, path)
    }

    fn set_permissions(
        &mut self,
        within: Transaction,
        path: &str,
        owner: Domain,
        reader: Domain,
    ) -> Result<(), XenstoreError> {
        self.next().set_permissions(within, path, owner, reader)
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        self.next().watch(path, token)
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        self.next().unwatch(path, token)
    }

    fn begin(&mut self) -> Result<Transaction, XenstoreError> {
        self.next().begin()
    }

    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), XenstoreError> {
        self.next().end(transaction, commit)
    }

    fn event(&mut self) -> Result<Option<(String, String)>, XenstoreError> {
        self.store.event()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.store.fd()
    }
}
