//! The identities of a volume's layers around an exchange of them.
//!
//! An export records the identity of a volume where its successor finds it. A kill between the step
//! that exchanges the layers on disk and the record would leave the former identity there. So the
//! next one is known, and recorded, before that step.
//!
//! Invariant: each identity here is of the volume's own data. A next one names a file that an
//! operation has made for this volume, or leaves out layers that the volume does not need then.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_block::BlockStore;

use crate::cached_store::CachedStore;

/// Former identities that are kept: a peer that was away for more exchanges is refused.
const FORMER_MOST: usize = 64;

/// The layers that an exchange is going to leave.
#[derive(Clone, Copy, Debug)]
pub enum NextLayers<'a> {
    /// The layers after [`push`](crate::Layers::push) with this top layer.
    Pushed(&'a CachedStore),
    /// The layers after [`remove_next`](crate::Layers::remove_next).
    NextRemoved,
    /// The layers after [`detach`](crate::Layers::detach).
    Detached,
    /// The layers after [`replace_pair`](crate::Layers::replace_pair).
    PairReplaced {
        /// The upper one of the pair, counted from the top.
        number: usize,
        /// The top layer of what takes their place.
        merged: &'a CachedStore,
    },
}

#[derive(Debug, Default)]
struct Known {
    /// The identity before the exchange that is expected, and the one after it.
    expected: Option<(String, String)>,
    former: VecDeque<String>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct LayerIdentities(Mutex<Known>);

impl LayerIdentities {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes which exchange is about to be made of layers with these keys, from the top on.
    pub(crate) fn note_next(&self, keys: Vec<String>, next: NextLayers<'_>) {
        let mut after = keys.clone();
        match next {
            NextLayers::Pushed(top) => after.insert(0, top.identity().key),
            NextLayers::NextRemoved if after.len() > 1 => drop(after.remove(1)),
            NextLayers::Detached => after.truncate(1),
            NextLayers::PairReplaced { number, merged } if (1..after.len()).contains(&number) => {
                let end = after.len().min(number + 2);
                after.splice(number..end, [merged.identity().key]);
            }
            NextLayers::NextRemoved | NextLayers::PairReplaced { .. } => {}
        }
        self.lock().expected = Some((key_of(keys), key_of(after)));
    }

    /// The layers were exchanged as expected.
    pub(crate) fn note_exchanged(&self) {
        let mut known = self.lock();
        if let Some((former, _)) = known.expected.take() {
            known.former.push_back(former);
            let excess = known.former.len().saturating_sub(FORMER_MOST);
            known.former.drain(..excess);
        }
    }

    pub(crate) fn next(&self) -> Option<String> {
        self.lock().expected.as_ref().map(|(_, next)| next.clone())
    }

    pub(crate) fn former(&self) -> Vec<String> {
        self.lock().former.iter().cloned().collect()
    }
}

/// The key of layers, from the top on.
pub(crate) fn key_of(layers: impl IntoIterator<Item = String>) -> String {
    layers.into_iter().collect::<Vec<_>>().join(" above ")
}
