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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_digits_and_nothing_else() {
        assert_eq!(number("0"), Some(0));
        assert_eq!(number("4294967295"), Some(u32::MAX));
        for text in ["", "-1", "+1", " 1", "1 ", "0x1", "4294967296", "1e3", "٣", "12345678901"] {
            assert_eq!(number(text), None, "{text}");
        }
    }
}
