//! Shares of callers: what one caller takes, in event streams and in turns for long answers, leaves
//! some to others.
//!
//! A caller is the user at the control socket, or a token. Below the limit it may hold no more than
//! the others have left, so one caller takes half at most, and one more finds some. Those that may
//! only view leave a quarter to those that operate.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OwnedMutexGuard;

use crate::access::{Caller, Role};

/// Counts what callers hold of a limited number.
#[derive(Debug)]
pub(crate) struct CallerShares {
    most: usize,
    held: Mutex<BTreeMap<(Role, String), usize>>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct CallerShare {
    shares: Arc<CallerShares>,
    caller: (Role, String),
}

impl CallerShares {
    pub(crate) fn new(most: usize) -> Arc<CallerShares> {
        Arc::new(CallerShares { most, held: Mutex::default() })
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<(Role, String), usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more for this caller, if it may hold one more.
    pub(crate) fn enter(self: &Arc<Self>, caller: &Caller) -> Option<CallerShare> {
        let key = (caller.role, caller.identity.clone());
        let mut held = self.held();
        let all: usize = held.values().sum();
        let viewers = held.iter().filter(|((role, _), _)| *role < Role::Operate);
        let viewers: usize = viewers.map(|(_, count)| *count).sum();
        let own = held.get(&key).copied().unwrap_or_default();
        let left = self.most.saturating_sub(all);
        let admits = left > 0 && own < left;
        let views = caller.role < Role::Operate;
        if !admits || (views && viewers >= self.most - self.most / 4) {
            return None;
        }
        *held.entry(key.clone()).or_default() += 1;
        Some(CallerShare { shares: self.clone(), caller: key })
    }
}

impl Drop for CallerShare {
    fn drop(&mut self) {
        let mut held = self.shares.held();
        if let Some(count) = held.get_mut(&self.caller) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                held.remove(&self.caller);
            }
        }
    }
}

/// Turns for work that is done one at a time: a caller waits for one turn at a time, so that many
/// requests of one caller delay another one by one turn.
#[derive(Debug, Default)]
pub(crate) struct CallerTurns {
    callers: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
    all: Arc<tokio::sync::Mutex<()>>,
}

/// A turn, until it is dropped: the turn of all callers ends before the caller's.
#[derive(Debug)]
pub(crate) struct CallerTurn {
    _all: OwnedMutexGuard<()>,
    _own: OwnedMutexGuard<()>,
}

impl CallerTurns {
    /// Waits for the turn of a caller.
    pub(crate) async fn take(&self, caller: &str) -> CallerTurn {
        let own = {
            let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
            callers.retain(|_, turn| Arc::strong_count(turn) > 1);
            callers.entry(caller.to_owned()).or_default().clone()
        };
        let own = own.lock_owned().await;
        let all = self.all.clone().lock_owned().await;
        CallerTurn { _all: all, _own: own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(role: Role, identity: &str) -> Caller {
        Caller { role, identity: identity.to_owned() }
    }

    #[test]
    fn one_caller_takes_half_and_viewers_leave_some_to_operators() {
        let shares = CallerShares::new(16);
        let viewer = |name| caller(Role::View, name);
        let take_all = |caller: &Caller| -> Vec<CallerShare> {
            std::iter::from_fn(|| shares.enter(caller)).collect()
        };
        let one = take_all(&viewer("token:one"));
        assert_eq!(one.len(), 8);
        let two = take_all(&viewer("token:two"));
        assert_eq!(two.len(), 4);
        assert!(shares.enter(&viewer("token:three")).is_none(), "the rest is for operators");
        let root = take_all(&caller(Role::Operate, "uid:0"));
        assert_eq!(root.len(), 2);
        let owner = shares.enter(&caller(Role::Operate, "uid:970"));
        assert!(owner.is_some());
        drop((one, owner));
        assert_eq!(take_all(&viewer("token:three")).len(), 5);
    }

    #[tokio::test]
    async fn a_caller_waits_for_one_turn_of_each_other_caller() {
        let turns = Arc::new(CallerTurns::default());
        let (first, order) = (turns.take("a").await, Arc::new(Mutex::new(Vec::new())));
        let waiting: Vec<_> = ["a", "a", "a", "b"]
            .map(|name| {
                let (turns, order) = (turns.clone(), order.clone());
                tokio::spawn(async move {
                    let turn = turns.take(name).await;
                    order.lock().unwrap().push(name);
                    drop(turn);
                })
            })
            .into();
        tokio::task::yield_now().await;
        drop(first);
        for task in waiting {
            task.await.unwrap();
        }
        assert!(order.lock().unwrap()[..2].contains(&"b"), "{order:?}");
    }
}
