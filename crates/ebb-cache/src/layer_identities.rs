//! The identity of a volume's layers before and after an exchange of them.
//!
//! An export records a volume's key for the next daemon. A kill between the exchange on disk and
//! that record would leave the old key there. So the new key is recorded before the exchange.
//!
//! Two snapshots of another volume may be merged while this volume has both below it. This volume
//! keeps the former files open, but the next daemon opens the merged file. So the key names the
//! merged file.
//!
//! # Invariants
//! - Each key here is one of the volume's own data. A new key names a file that an operation has
//!   made for this volume, leaves out layers that the volume no longer needs, or names a file with
//!   the content of two layers.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_block::BlockStore;

use crate::cached_store::CachedStore;

/// Number of former keys that are kept: a peer that was away for more exchanges is refused.
const FORMER_MOST: usize = 64;

/// The layers after an exchange.
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
        /// The top layer of those that take their place.
        merged: &'a CachedStore,
    },
}

/// Two layers and the file that takes their place, by their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergedPair {
    /// The upper one of the two layers.
    pub upper: String,
    /// The layer below it.
    pub lower: String,
    /// The file with the content of both.
    pub merged: String,
}

impl MergedPair {
    /// Replaces the two layers by the merged one. Returns false if they are not among the layers.
    fn apply(&self, keys: &mut Vec<String>) -> bool {
        let is_pair = |pair: &[String]| *pair == [self.upper.as_str(), self.lower.as_str()];
        let Some(at) = keys.windows(2).position(is_pair) else { return false };
        keys.splice(at..at + 2, [self.merged.clone()]);
        true
    }
}

#[derive(Debug, Default)]
struct Known {
    /// The merged files, oldest first, whose former layers are still in use here.
    merged: Vec<MergedPair>,
    /// The key before the expected exchange, and the key after it.
    expected: Option<(String, String)>,
    former: VecDeque<String>,
}

impl Known {
    /// The layers that the next daemon opens instead of these.
    fn named(&self, mut keys: Vec<String>) -> Vec<String> {
        for pair in &self.merged {
            pair.apply(&mut keys);
        }
        keys
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct LayerIdentities(Mutex<Known>);

impl LayerIdentities {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of layers with these keys, from the top on.
    pub(crate) fn key_of(&self, keys: Vec<String>) -> String {
        key_of(self.lock().named(keys))
    }

    /// Notes the next exchange of layers with these keys, from the top on.
    pub(crate) fn note_next(&self, keys: Vec<String>, next: NextLayers<'_>) {
        let mut known = self.lock();
        let keys = known.named(keys);
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
        known.expected = Some((key_of(keys), key_of(after)));
    }

    /// Returns true if layers with these keys have both of the pair.
    pub(crate) fn has_pair(&self, keys: Vec<String>, pair: &MergedPair) -> bool {
        pair.apply(&mut self.lock().named(keys))
    }

    /// Notes that a file is about to take the place of two layers that stay in use here.
    pub(crate) fn note_next_merge(&self, keys: Vec<String>, pair: &MergedPair) {
        let mut known = self.lock();
        let keys = known.named(keys);
        let mut after = keys.clone();
        if pair.apply(&mut after) {
            known.expected = Some((key_of(keys), key_of(after)));
        }
    }

    /// Notes that the file has taken the place of the two layers.
    pub(crate) fn note_merged(&self, pair: MergedPair) {
        self.lock().merged.push(pair);
        self.note_exchanged();
    }

    /// Notes that the layers were exchanged as expected.
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
fn key_of(layers: impl IntoIterator<Item = String>) -> String {
    layers.into_iter().collect::<Vec<_>>().join(" above ")
}
