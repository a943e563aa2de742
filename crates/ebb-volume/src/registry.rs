//! The volumes that a daemon serves, by name: one registry for all exports.
//!
//! The owner of the volumes adds and removes them. An export looks a volume up when a client or a guest wants
//! it, and keeps what it needs for its connections itself. To take a volume away, the owner first removes it
//! here, and then calls and awaits `withdraw` of each export, which completes the requests in flight.
//!
//! It also has the clients that may open each volume (`allow`), by name, whether the volume is served or not: a volume that
//! is being opened or replaced is no secret less.
//!
//! # Invariants
//! - A client that may not open a volume finds neither the volume nor the reason for which it is refused:
//!   [`Volumes::admits`] is asked first.
//! - A name is either served or refused with a reason, or unknown.
//! - A volume that was removed is not found any more. An export that found it before checks again when it has
//!   recorded the connection, since its `withdraw` may have been called in between.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ebb_access::{AccessList, ClientIdentity};
use ebb_mem::PoolParameters;

use crate::Volume;

/// A volume that is served.
#[derive(Clone, Debug)]
pub struct ServedVolume {
    /// The volume.
    pub volume: Arc<Volume>,
    /// Limits the page pools of its connections and rings.
    pub pool: Arc<PoolParameters>,
}

#[derive(Debug, Default)]
struct Names {
    served: BTreeMap<Arc<str>, ServedVolume>,
    /// Names that are not served now, each with the reason for clients.
    refused: BTreeMap<Arc<str>, Arc<str>>,
    /// The clients that may open a volume, if not all may.
    allowed: BTreeMap<Arc<str>, AccessList>,
    /// Until a volume is taken away: the list of before must admit a client, too.
    until_removed: BTreeMap<Arc<str>, AccessList>,
    /// How often `served` has changed.
    changes: u64,
}

impl Names {
    /// The list that holds for a name: its own, or else, of the snapshot `VOLUME@NAME`, that of its volume.
    fn list_of(&self, name: &str) -> Option<&AccessList> {
        self.allowed.get(self.holder_of(name)?)
    }

    /// The name whose list holds for a name.
    fn holder_of<'a>(&self, mut name: &'a str) -> Option<&'a str> {
        while !self.allowed.contains_key(name) {
            (name, _) = name.rsplit_once('@')?;
        }
        Some(name)
    }

    fn admits(&self, mut name: &str, client: &ClientIdentity) -> bool {
        let holder = self.holder_of(name);
        loop {
            if self.until_removed.get(name).is_some_and(|list| !list.admits(client)) {
                return false;
            }
            match name.rsplit_once('@') {
                Some((above, _)) if holder != Some(name) => name = above,
                _ => break,
            }
        }
        holder.and_then(|name| self.allowed.get(name)).is_none_or(|list| list.admits(client))
    }

    fn set_allowed(&mut self, name: &str, allowed: Option<AccessList>) {
        self.until_removed.remove(name);
        match allowed {
            Some(list) => self.allowed.insert(name.into(), list),
            None => self.allowed.remove(name),
        };
    }

    /// Snapshots of `name` without a list of their own.
    fn followers(&self, name: &str) -> Vec<Arc<str>> {
        let names = self.served.keys().chain(self.refused.keys());
        let follows = |other: &&Arc<str>| {
            let of_it = other.strip_prefix(name).is_some_and(|rest| rest.starts_with('@'));
            of_it && self.holder_of(other) == Some(name)
        };
        names.filter(follows).cloned().collect()
    }
}

/// See the module. Cheap to clone; all clones are handles of the same registry.
#[derive(Clone, Debug, Default)]
pub struct Volumes(Arc<RwLock<Names>>);

impl Volumes {
    fn read(&self) -> RwLockReadGuard<'_, Names> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Names> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a volume under its name; `pool` limits the page pools of its connections.
    pub fn add(&self, volume: Arc<Volume>, pool: Arc<PoolParameters>) {
        let mut names = self.write();
        let name = volume.name().clone();
        names.refused.remove(&name);
        names.changes += 1;
        names.served.insert(name, ServedVolume { volume, pool });
    }

    /// Removes a name, served or refused, and returns the volume that was served.
    pub fn remove(&self, name: &str) -> Option<Arc<Volume>> {
        let mut names = self.write();
        names.refused.remove(name);
        names.until_removed.remove(name);
        names.changes += 1;
        names.served.remove(name).map(|served| served.volume)
    }

    /// Refuses a name that is not served, with the reason `why`, until it is added or removed.
    pub fn refuse(&self, name: &str, why: &str) {
        self.write().refused.insert(name.into(), why.into());
    }

    /// Sets the clients that may open the volume of this name; `None`: all that its exports admit. Those that are connected
    /// are not disconnected by this.
    pub fn set_allowed(&self, name: &str, allowed: Option<AccessList>) {
        self.write().set_allowed(name, allowed);
    }

    /// As [`Volumes::set_allowed`], of a volume that is to be replaced by one on another store: until it is removed, the list
    /// of before must admit a client, too.
    pub fn set_allowed_of_next(&self, name: &str, allowed: Option<AccessList>) {
        // Within one lock: no client may find the new list alone.
        let mut names = self.write();
        let before = names.until_removed.get(name).or_else(|| names.list_of(name)).cloned();
        names.set_allowed(name, allowed);
        if let Some(list) = before {
            names.until_removed.insert(name.into(), list);
        }
    }

    /// Until the volume of this name is removed, this list must admit a client, too.
    pub fn restrict(&self, name: &str, also: Option<AccessList>) {
        if let Some(list) = also {
            self.write().until_removed.insert(name.into(), list);
        }
    }

    /// Admits no client to a name of which no list is known.
    pub fn admit_none_unless_known(&self, name: &str) {
        let mut names = self.write();
        if names.list_of(name).is_none() {
            names.allowed.insert(name.into(), AccessList::default());
        }
    }

    /// The list that holds for a name: its own, or else that of the volume whose snapshot it is.
    pub fn list_of(&self, name: &str) -> Option<AccessList> {
        self.read().list_of(name).cloned()
    }

    /// The list that holds for a name, and the name whose list that is.
    pub fn list_and_holder(&self, name: &str) -> Option<(AccessList, String)> {
        let names = self.read();
        let holder = names.holder_of(name)?;
        Some((names.allowed.get(holder)?.clone(), holder.to_owned()))
    }

    /// As [`Volumes::list_of`], for the served volume: while a reload replaces it, its former list.
    pub fn list_of_served(&self, name: &str) -> Option<AccessList> {
        let names = self.read();
        names.until_removed.get(name).or_else(|| names.list_of(name)).cloned()
    }

    /// The snapshots of a volume that have its list, because they have none of their own.
    pub fn followers(&self, name: &str) -> Vec<(Arc<str>, AccessList)> {
        let names = self.read();
        let Some(list) = names.allowed.get(name) else { return Vec::new() };
        names.followers(name).into_iter().map(|other| (other, list.clone())).collect()
    }

    /// Forgets the clients of a volume that is gone. Its snapshots that follow it have its list from now on, so that they are
    /// not open to all; returns their names and the list.
    pub fn forget_allowed(&self, name: &str) -> Vec<(Arc<str>, AccessList)> {
        let mut names = self.write();
        let followers = names.followers(name);
        let Some(list) = names.allowed.remove(name) else { return Vec::new() };
        for other in &followers {
            names.allowed.insert(other.clone(), list.clone());
        }
        followers.into_iter().map(|other| (other, list.clone())).collect()
    }

    /// Whether the client may open the volume of this name, if there is one.
    pub fn admits(&self, name: &str, client: &ClientIdentity) -> bool {
        self.read().admits(name, client)
    }

    /// The volume of this name.
    pub fn get(&self, name: &str) -> Option<ServedVolume> {
        self.read().served.get(name).cloned()
    }

    /// Why a name that is not served is refused, if a reason was given.
    pub fn refusal(&self, name: &str) -> Option<String> {
        self.read().refused.get(name).map(|why| why.to_string())
    }

    /// Calls `visit` with each name that is served, in order.
    pub fn visit_names(&self, mut visit: impl FnMut(&str)) {
        self.read().served.keys().for_each(|name| visit(name));
    }

    /// As [`Volumes::visit_names`], with those that the client may open.
    pub fn visit_names_for(&self, client: &ClientIdentity, mut visit: impl FnMut(&str)) {
        let names = self.read();
        let admitted = |name: &&Arc<str>| names.admits(name, client);
        names.served.keys().filter(admitted).for_each(|name| visit(name));
    }

    /// All volumes that are served, ordered by name.
    pub fn list(&self) -> Vec<Arc<Volume>> {
        self.read().served.values().map(|served| served.volume.clone()).collect()
    }

    /// How often volumes were added or removed: while it stays the same, so does [`Volumes::list`].
    pub fn changes(&self) -> u64 {
        self.read().changes
    }

    /// The number of volumes that are served.
    pub fn count(&self) -> usize {
        self.read().served.len()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use ebb_store::{MemoryStore, Store};

    fn volume(name: &str) -> Arc<Volume> {
        let store = Store::Memory(MemoryStore::new(1 << 20));
        Volume::new(name, store, crate::VolumeOptions::default())
    }

    #[test]
    fn a_snapshot_follows_its_volume_unless_it_has_a_list_of_its_own() {
        use ebb_access::{AccessEntry, SocketCredentials};

        let list = |text: &str| AccessList::new(vec![AccessEntry::parse(text).unwrap()]).unwrap();
        let user = |uid| ClientIdentity {
            socket: Some(SocketCredentials { pid: 1, uid, gid: 9, groups: Box::default() }),
            ..ClientIdentity::default()
        };
        let (volumes, one, two) = (Volumes::default(), user(1), user(2));
        for name in ["a", "a@monday", "b"] {
            volumes.add(volume(name), Arc::default());
            assert!(volumes.admits(name, &one) && volumes.admits(name, &two), "no list: {name}");
        }
        let admitted = |client: &ClientIdentity| {
            let mut names = Vec::new();
            volumes.visit_names_for(client, |name| names.push(name.to_owned()));
            names.iter().for_each(|name| assert!(volumes.admits(name, client)));
            names.join(" ")
        };
        volumes.set_allowed("a", Some(list("uid:1")));
        assert_eq!((admitted(&one), admitted(&two)), ("a a@monday b".into(), "b".into()));
        volumes.set_allowed("a@monday", Some(list("uid:2")));
        assert_eq!((admitted(&one), admitted(&two)), ("a b".into(), "a@monday b".into()));
        // Whether it is served or not.
        volumes.remove("a");
        volumes.refuse("a", "it is being opened");
        assert!(volumes.admits("a", &one) && !volumes.admits("a", &two));
        volumes.set_allowed("a@monday", None);
        volumes.remove("a");
        let followers = volumes.forget_allowed("a");
        assert_eq!(followers, [("a@monday".into(), list("uid:1"))]);
        assert!(volumes.admits("a", &two));
        assert_eq!((admitted(&one), admitted(&two)), ("a@monday b".into(), "b".into()));
    }

    #[test]
    fn a_volume_that_is_to_be_replaced_admits_clients_of_both_lists_until_it_is_removed() {
        use ebb_access::{AccessEntry, SocketCredentials};

        let list = |texts: &[&str]| {
            let entries = texts.iter().map(|text| AccessEntry::parse(text).unwrap()).collect();
            Some(AccessList::new(entries).unwrap())
        };
        let admitted = |volumes: &Volumes, name: &str| {
            let user = |uid| ClientIdentity {
                socket: Some(SocketCredentials { pid: 1, uid, gid: 9, groups: Box::default() }),
                ..ClientIdentity::default()
            };
            [1, 2, 3].map(|uid| volumes.admits(name, &user(uid)))
        };
        let volumes = Volumes::default();
        volumes.add(volume("a"), Arc::default());
        volumes.add(volume("a@old"), Arc::default());
        volumes.set_allowed("a", list(&["uid:1", "uid:2"]));
        volumes.set_allowed_of_next("a", list(&["uid:2", "uid:3"]));
        for name in ["a", "a@old"] {
            assert_eq!(admitted(&volumes, name), [false, true, false], "{name}");
        }
        volumes.set_allowed_of_next("a", None);
        assert_eq!(admitted(&volumes, "a"), [true, true, false], "the first list still counts");
        volumes.set_allowed_of_next("a", list(&["uid:3"]));
        volumes.remove("a");
        assert_eq!(admitted(&volumes, "a"), [false, false, true]);
        // No list is known.
        volumes.admit_none_unless_known("a");
        volumes.admit_none_unless_known("b");
        assert_eq!(admitted(&volumes, "a"), [false, false, true]);
        assert_eq!((admitted(&volumes, "b"), admitted(&volumes, "b@s")), ([false; 3], [false; 3]));
    }

    #[test]
    fn a_name_is_served_or_refused_or_unknown() {
        let volumes = Volumes::default();
        volumes.refuse("a", "it is being opened");
        assert!(volumes.get("a").is_none());
        assert_eq!(volumes.refusal("a").as_deref(), Some("it is being opened"));
        let first = volume("a");
        volumes.add(first.clone(), Arc::default());
        assert!(Arc::ptr_eq(&volumes.get("a").unwrap().volume, &first));
        assert_eq!((volumes.refusal("a"), volumes.count()), (None, 1));
        let changes = volumes.changes();
        volumes.add(volume("b"), Arc::default());
        let mut names = Vec::new();
        volumes.visit_names(|name| names.push(name.to_owned()));
        assert_eq!(names, ["a", "b"]);
        assert_ne!(volumes.changes(), changes, "one was added");
        let changes = volumes.changes();
        assert!(Arc::ptr_eq(&volumes.remove("a").unwrap(), &first));
        assert!(volumes.get("a").is_none() && volumes.refusal("a").is_none());
        assert_ne!(volumes.changes(), changes, "one was removed");
        volumes.refuse("b", "never seen, since it is served");
        assert!(volumes.remove("b").is_some() && volumes.refusal("b").is_none());
        assert!(volumes.list().is_empty());
    }
}
