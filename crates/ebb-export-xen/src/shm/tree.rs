//! xenstore in memory: nodes, watches, and transactions that fail if another change conflicts with them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use ebb_io::Fd;

use super::{eventfd, lock, ring};
use crate::platform::{Domain, Transaction, XenStore, XenstoreError};
use crate::shared_stores::is_dead;

#[derive(Default)]
struct TreeState {
    nodes: BTreeMap<String, Vec<u8>>,
    /// When each path, also a removed one, was last changed.
    changed: HashMap<String, u64>,
    time: u64,
    watches: Vec<(u64, String, String)>,
    mail: HashMap<u64, (VecDeque<(String, String)>, Fd)>,
    next: u64,
    /// The number of requests of all connections.
    requests: u64,
}

impl TreeState {
    fn touch(&mut self, path: &str) {
        self.time += 1;
        self.changed.insert(path.to_owned(), self.time);
        for (connection, watched, token) in &self.watches {
            if !is_within(path, watched) {
                continue;
            }
            let Some((mail, bell)) = self.mail.get_mut(connection) else { continue };
            let event = (path.to_owned(), token.clone());
            if !mail.contains(&event) {
                mail.push_back(event);
            }
            ring(bell);
        }
    }

    fn write(&mut self, path: &str, value: &[u8]) {
        let mut at = String::new();
        for part in path.split('/').skip(1) {
            at = format!("{at}/{part}");
            if at != path && !self.nodes.contains_key(&at) {
                self.nodes.insert(at.clone(), Vec::new());
            }
        }
        self.nodes.insert(path.to_owned(), value.to_owned());
        self.touch(path);
    }

    fn remove(&mut self, path: &str) {
        let below: Vec<_> =
            self.nodes.keys().filter(|node| is_within(node, path)).cloned().collect();
        for node in below {
            self.nodes.remove(&node);
            self.touch(&node);
        }
    }
}

fn is_within(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The tree. Cheap to clone.
#[derive(Clone, Default)]
pub struct Tree(Arc<Mutex<TreeState>>);

impl Tree {
    /// A connection to it.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn connect(&self) -> io::Result<TreeStore> {
        let mut state = lock(&self.0);
        state.next += 1;
        let (number, bell) = (state.next, eventfd()?);
        state.mail.insert(number, (VecDeque::new(), bell.clone()));
        drop(state);
        let transactions = HashMap::new();
        Ok(TreeStore { tree: self.clone(), number, bell, transactions, next: 0 })
    }

    /// The number of requests of its connections, without reads of events.
    pub fn requests(&self) -> u64 {
        lock(&self.0).requests
    }

    /// A node's value as text.
    pub fn get(&self, path: &str) -> Option<String> {
        let state = lock(&self.0);
        state.nodes.get(path).map(|value| String::from_utf8_lossy(value).into_owned())
    }

    /// Sets a node.
    pub fn set(&self, path: &str, value: &str) {
        lock(&self.0).write(path, value.as_bytes());
    }

    /// Removes a node and all below.
    pub fn remove_all(&self, path: &str) {
        lock(&self.0).remove(path);
    }

    /// All nodes below `path`.
    pub fn below(&self, path: &str) -> Vec<String> {
        let state = lock(&self.0);
        state.nodes.keys().filter(|node| is_within(node, path)).cloned().collect()
    }
}

enum NodeChange {
    Write(String, Vec<u8>),
    Remove(String),
}

struct OpenTransaction {
    begun: u64,
    seen: Vec<String>,
    changes: Vec<NodeChange>,
    nodes: BTreeMap<String, Vec<u8>>,
}

/// A connection.
pub struct TreeStore {
    tree: Tree,
    number: u64,
    bell: Fd,
    transactions: HashMap<Transaction, OpenTransaction>,
    next: Transaction,
}

impl Drop for TreeStore {
    fn drop(&mut self) {
        let mut state = lock(&self.tree.0);
        state.mail.remove(&self.number);
        let number = self.number;
        state.watches.retain(|(connection, ..)| *connection != number);
    }
}

impl TreeStore {
    fn count(&self) {
        lock(&self.tree.0).requests += 1;
    }

    fn change(&mut self, within: Transaction, change: NodeChange) -> Result<(), XenstoreError> {
        if is_dead() {
            return Ok(());
        }
        let Some(pending) = self.transactions.get_mut(&within) else {
            let mut state = lock(&self.tree.0);
            match change {
                NodeChange::Write(path, value) => state.write(&path, &value),
                NodeChange::Remove(path) if !state.nodes.contains_key(&path) => {
                    return Err(XenstoreError::Missing);
                }
                NodeChange::Remove(path) => state.remove(&path),
            }
            return Ok(());
        };
        match &change {
            NodeChange::Write(path, value) => {
                pending.nodes.insert(path.clone(), value.clone());
                pending.seen.push(path.clone());
            }
            NodeChange::Remove(path) if !pending.nodes.contains_key(path) => {
                return Err(XenstoreError::Missing);
            }
            NodeChange::Remove(path) => pending.nodes.retain(|node, _| !is_within(node, path)),
        }
        pending.changes.push(change);
        Ok(())
    }
}

impl XenStore for TreeStore {
    fn read(&mut self, within: Transaction, path: &str) -> Result<Vec<u8>, XenstoreError> {
        self.count();
        if let Some(pending) = self.transactions.get_mut(&within) {
            pending.seen.push(path.to_owned());
            return pending.nodes.get(path).cloned().ok_or(XenstoreError::Missing);
        }
        lock(&self.tree.0).nodes.get(path).cloned().ok_or(XenstoreError::Missing)
    }

    fn write(&mut self, within: Transaction, path: &str, value: &str) -> Result<(), XenstoreError> {
        self.count();
        self.change(within, NodeChange::Write(path.to_owned(), value.as_bytes().to_owned()))
    }

    fn list(&mut self, _within: Transaction, path: &str) -> Result<Vec<String>, XenstoreError> {
        self.count();
        let state = lock(&self.tree.0);
        let prefix = format!("{path}/");
        let mut names: Vec<String> = state
            .nodes
            .keys()
            .filter_map(|node| node.strip_prefix(&prefix))
            .filter_map(|rest| rest.split('/').next().map(str::to_owned))
            .collect();
        names.dedup();
        if names.is_empty() && !state.nodes.contains_key(path) {
            return Err(XenstoreError::Missing);
        }
        Ok(names)
    }

    fn remove(&mut self, within: Transaction, path: &str) -> Result<(), XenstoreError> {
        self.count();
        self.change(within, NodeChange::Remove(path.to_owned()))
    }

    fn set_permissions(
        &mut self,
        _within: Transaction,
        _path: &str,
        _owner: Domain,
        _reader: Domain,
    ) -> Result<(), XenstoreError> {
        self.count();
        Ok(())
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        self.count();
        let mut state = lock(&self.tree.0);
        state.watches.push((self.number, path.to_owned(), token.to_owned()));
        if let Some((mail, bell)) = state.mail.get_mut(&self.number) {
            mail.push_back((path.to_owned(), token.to_owned()));
            ring(bell);
        }
        Ok(())
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), XenstoreError> {
        self.count();
        let mut state = lock(&self.tree.0);
        let number = self.number;
        state.watches.retain(|(n, p, t)| !(*n == number && p == path && t == token));
        Ok(())
    }

    fn begin(&mut self) -> Result<Transaction, XenstoreError> {
        self.count();
        let state = lock(&self.tree.0);
        let (begun, nodes) = (state.time, state.nodes.clone());
        drop(state);
        self.next += 1;
        let pending = OpenTransaction { begun, seen: Vec::new(), changes: Vec::new(), nodes };
        self.transactions.insert(self.next, pending);
        Ok(self.next)
    }

    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), XenstoreError> {
        self.count();
        let Some(pending) = self.transactions.remove(&transaction) else {
            return Err(XenstoreError::Missing);
        };
        if !commit || is_dead() {
            return Ok(());
        }
        let mut state = lock(&self.tree.0);
        let newer = |path: &String| state.changed.get(path).is_some_and(|at| *at > pending.begun);
        if pending.seen.iter().any(newer) {
            return Err(XenstoreError::Again);
        }
        for change in pending.changes {
            match change {
                NodeChange::Write(path, value) => state.write(&path, &value),
                NodeChange::Remove(path) => state.remove(&path),
            }
        }
        Ok(())
    }

    fn event(&mut self) -> Result<Option<(String, String)>, XenstoreError> {
        super::take_event(&self.bell);
        let mut state = lock(&self.tree.0);
        let event = state.mail.get_mut(&self.number).and_then(|(mail, _)| mail.pop_front());
        Ok(event)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
