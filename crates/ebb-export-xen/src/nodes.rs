//! The xenstore nodes of a device: validates what the frontend writes, and publishes what the backend
//! offers (`blkif.h`, "XenStore nodes"; Xen's `docs/misc/xenstore.txt`).

use std::collections::BTreeMap;

use crate::abi::{Abi, UnknownProtocol};
use crate::platform::{Transaction, XenStore, XenstoreError};

/// The largest ring, as an order of pages: 1 << 4 pages, 512 slots.
pub(crate) const MAX_RING_ORDER: u32 = 4;
/// Values of this length or more are not valid numbers or words.
const MAX_VALUE_BYTES: usize = 64;
/// How often a transaction that conflicts with other changes is repeated.
const TRIES: u32 = 32;

/// What is wrong with the nodes, or with xenstore.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum NodeError {
    /// A required node is missing.
    #[error("{0} is missing")]
    Missing(String),
    /// A node's value is invalid.
    #[error("{0} is not a number, or out of range")]
    Value(String),
    /// See [`UnknownProtocol`].
    #[error(transparent)]
    Protocol(#[from] UnknownProtocol),
    /// See [`XenstoreError`].
    #[error(transparent)]
    Store(#[from] XenstoreError),
}

/// The nodes of one ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueNodes {
    /// The grants of its pages.
    pub ring: Vec<u32>,
    /// The event channel.
    pub port: u32,
}

/// The nodes of a frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FrontendNodes {
    /// The layout of its rings.
    pub abi: Abi,
    /// It uses the same grants again (`feature-persistent`).
    pub persistent: bool,
    /// Its rings.
    pub queues: Vec<QueueNodes>,
}

/// Parses a decimal number as the toolstack and Linux write it: only digits.
pub(crate) fn number(text: &str) -> Option<u32> {
    let plain = !text.is_empty() && text.len() <= 10 && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

/// A node's value as text; `None` if there is no such node.
///
/// # Errors
/// See [`XenstoreError`].
pub(crate) fn optional(
    store: &mut dyn XenStore,
    within: Transaction,
    path: &str,
) -> Result<Option<String>, XenstoreError> {
    match store.read(within, path) {
        Ok(value) => Ok(Some(String::from_utf8_lossy(&value).into_owned())),
        Err(XenstoreError::Missing) => Ok(None),
        Err(error) => Err(error),
    }
}

struct Reader<'a> {
    store: &'a mut dyn XenStore,
    within: Transaction,
    base: &'a str,
}

impl Reader<'_> {
    fn text(&mut self, name: &str) -> Result<Option<String>, NodeError> {
        let text = optional(self.store, self.within, &format!("{}/{name}", self.base))?;
        match text {
            Some(text) if text.len() >= MAX_VALUE_BYTES => Err(NodeError::Value(name.to_owned())),
            text => Ok(text),
        }
    }

    fn number(&mut self, name: &str) -> Result<Option<u32>, NodeError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        number(&text).map(Some).ok_or_else(|| NodeError::Value(name.to_owned()))
    }

    fn needed(&mut self, name: &str) -> Result<u32, NodeError> {
        self.number(name)?.ok_or_else(|| NodeError::Missing(name.to_owned()))
    }

    fn ranged(&mut self, name: &str, least: u32, most: u32) -> Result<Option<u32>, NodeError> {
        match self.number(name)? {
            Some(value) if value < least || value > most => Err(NodeError::Value(name.to_owned())),
            value => Ok(value),
        }
    }
}

impl FrontendNodes {
    /// Reads the nodes of the frontend at `base`; at most `max_queues` rings are allowed.
    ///
    /// # Errors
    /// The first node that is invalid.
    pub(crate) fn read(
        store: &mut dyn XenStore,
        within: Transaction,
        base: &str,
        max_queues: u32,
    ) -> Result<FrontendNodes, NodeError> {
        let mut at = Reader { store, within, base };
        let abi = Abi::from_protocol(at.text("protocol")?.as_deref())?;
        let persistent = at.number("feature-persistent")?.is_some_and(|value| value != 0);
        let order = at.ranged("ring-page-order", 0, MAX_RING_ORDER)?;
        let count = at.ranged("multi-queue-num-queues", 1, max_queues)?.unwrap_or(1);
        let mut queues = Vec::new();
        for number in 0..count {
            let folder = if count == 1 { String::new() } else { format!("queue-{number}/") };
            let mut ring = Vec::new();
            let numbered = format!("{folder}ring-ref0");
            let many = order.is_some_and(|order| order > 0) || at.text(&numbered)?.is_some();
            if many {
                for page in 0..1u32 << order.unwrap_or(0) {
                    ring.push(at.needed(&format!("{folder}ring-ref{page}"))?);
                }
            } else {
                ring.push(at.needed(&format!("{folder}ring-ref"))?);
            }
            let port = at.needed(&format!("{folder}event-channel"))?;
            queues.push(QueueNodes { ring, port });
        }
        Ok(FrontendNodes { abi, persistent, queues })
    }
}

/// Does `act` within a transaction, which is repeated if it conflicts with another change.
///
/// # Errors
/// Errors of `act` and of xenstore.
pub(crate) fn transact<T>(
    store: &mut dyn XenStore,
    mut act: impl FnMut(&mut dyn XenStore, Transaction) -> Result<T, XenstoreError>,
) -> Result<T, XenstoreError> {
    for _ in 0..TRIES {
        let transaction = store.begin()?;
        match act(store, transaction) {
            Ok(value) => match store.end(transaction, true) {
                Ok(()) => return Ok(value),
                Err(XenstoreError::Again) => {}
                Err(error) => return Err(error),
            },
            Err(error) => {
                // The transaction is aborted; a second error of the connection adds nothing.
                let _ = store.end(transaction, false);
                if !matches!(error, XenstoreError::Again) {
                    return Err(error);
                }
            }
        }
    }
    Err(XenstoreError::Again)
}

/// Sets the state, unless the directory was removed: writing would create it again.
///
/// # Errors
/// See [`XenstoreError`].
pub(crate) fn show_state(
    store: &mut dyn XenStore,
    base: &str,
    state: &str,
) -> Result<(), XenstoreError> {
    let path = format!("{base}/state");
    transact(store, |store, within| match store.read(within, &path) {
        Ok(_) => store.write(within, &path, state),
        Err(XenstoreError::Missing) => Ok(()),
        Err(error) => Err(error),
    })
}

/// Nodes that are written in one transaction.
pub(crate) type Nodes = BTreeMap<&'static str, String>;

/// Writes nodes below `base` in one transaction, unless `base` was removed.
///
/// # Errors
/// See [`XenstoreError`].
pub(crate) fn publish(
    store: &mut dyn XenStore,
    base: &str,
    nodes: &Nodes,
) -> Result<(), XenstoreError> {
    let state = format!("{base}/state");
    transact(store, |store, within| {
        match store.read(within, &state) {
            Ok(_) => {}
            Err(XenstoreError::Missing) => return Ok(()),
            Err(error) => return Err(error),
        }
        for (name, value) in nodes {
            store.write(within, &format!("{base}/{name}"), value)?;
        }
        Ok(())
    })
}

/// Removes a node and all below it, also if there is no such node.
///
/// # Errors
/// See [`XenstoreError`].
pub(crate) fn remove_all(
    store: &mut dyn XenStore,
    within: Transaction,
    path: &str,
) -> Result<(), XenstoreError> {
    match store.remove(within, path) {
        Ok(()) | Err(XenstoreError::Missing) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes the directory of a device at `base`, unless its frontend at `frontend` exists. One transaction: the
/// toolstack may attach the disk again at the same time.
///
/// # Errors
/// See [`XenstoreError`].
pub(crate) fn remove_without_frontend(
    store: &mut dyn XenStore,
    base: &str,
    frontend: &str,
) -> Result<(), XenstoreError> {
    let state = format!("{frontend}/state");
    transact(store, |store, within| match optional(store, within, &state)? {
        Some(_) => Ok(()),
        None => remove_all(store, within, base),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::BorrowedFd;

    use crate::platform::Domain;
    use crate::shm::{Tree, TreeStore};

    const BASE: &str = "/local/domain/0/backend/ebbd/1/51728";
    const FRONTEND: &str = "/local/domain/1/device/vbd/51728";

    /// A connection after whose first read another connection attaches the disk.
    struct AttachedAfterRead {
        store: TreeStore,
        other: Option<TreeStore>,
    }

    impl XenStore for AttachedAfterRead {
        fn read(&mut self, within: Transaction, path: &str) -> Result<Vec<u8>, XenstoreError> {
            let value = self.store.read(within, path);
            if let Some(mut other) = self.other.take() {
                let disk =
                    crate::attach::DiskSpec { name: "xvdb", volume: "disk", read_only: false };
                crate::attach::attach(&mut other, 1, &disk).unwrap();
            }
            value
        }
        fn write(
            &mut self,
            within: Transaction,
            path: &str,
            to: &str,
        ) -> Result<(), XenstoreError> {
            self.store.write(within, path, to)
        }
        fn list(&mut self, within: Transaction, path: &str) -> Result<Vec<String>, XenstoreError> {
            self.store.list(within, path)
        }
        fn remove(&mut self, within: Transaction, path: &str) -> Result<(), XenstoreError> {
            self.store.remove(within, path)
        }
        fn set_permissions(
            &mut self,
            within: Transaction,
            path: &str,
            owner: Domain,
            reader: Domain,
        ) -> Result<(), XenstoreError> {
            self.store.set_permissions(within, path, owner, reader)
        }
        fn watch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
            self.store.watch(path, token)
        }
        fn unwatch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
            self.store.unwatch(path, token)
        }
        fn begin(&mut self) -> Result<Transaction, XenstoreError> {
            self.store.begin()
        }
        fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), XenstoreError> {
            self.store.end(transaction, commit)
        }
        fn event(&mut self) -> Result<Option<(String, String)>, XenstoreError> {
            self.store.event()
        }
        fn fd(&self) -> BorrowedFd<'_> {
            self.store.fd()
        }
    }

    #[test]
    fn a_disk_that_is_attached_while_its_nodes_are_removed_keeps_them() {
        let tree = Tree::default();
        tree.set(&format!("{BASE}/state"), "6");
        let (store, other) = (tree.connect().unwrap(), tree.connect().unwrap());
        let mut store = AttachedAfterRead { store, other: Some(other) };
        remove_without_frontend(&mut store, BASE, FRONTEND).unwrap();
        assert_eq!(tree.get(&format!("{BASE}/state")).as_deref(), Some("1"));
        tree.remove_all(FRONTEND);
        remove_without_frontend(&mut store, BASE, FRONTEND).unwrap();
        assert!(tree.below(BASE).is_empty());
    }

    #[test]
    fn numbers_are_digits_and_nothing_else() {
        assert_eq!(number("0"), Some(0));
        assert_eq!(number("4294967295"), Some(u32::MAX));
        for text in ["", "-1", "+1", " 1", "1 ", "0x1", "4294967296", "1e3", "٣", "12345678901"] {
            assert_eq!(number(text), None, "{text}");
        }
    }
}
