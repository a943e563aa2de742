//! Committing an overlay: its blocks are written into its base, and an empty delta replaces its
//! own.
//!
//! Both are closed meanwhile: a client of the base would see it change, and its cache would hold
//! the old data.
//!
//! # What a crash in between leaves
//! - Before an empty delta has the name of the old one: the overlay reads as before, also above a
//!   base into which a part was copied. The header of the old delta says that a commit has begun
//!   (`Parent::is_mixed`), so that it accepts the base as it is. The base by itself may be a mix of
//!   old and new data; committing again completes it.
//! - After that: the base has all data, and is stable.
//!
//! The commit checks its stores and makes the empty delta before it closes either volume. After
//! that only the disks can fail; then both volumes are opened again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebb_api::Refusal;
use ebb_block::{BlockError, BlockStore, nonce};
use ebb_cache::{CachedStore, Delta, DeltaError, Layers, plain_parent};
use ebb_config::{CacheMode, NO_BASE, Size, StoreUri, VolumeConfig};
use ebb_control::Refused;
use ebb_image::{Layout, Parent};
use ebb_io::Io;
use ebb_store::sync_folder;
use ebb_volume::Volume;
use futures_lite::future::or;

use super::claims::StoreClaim;
use super::delta_users::{ChangedBase, snapshot_of};
use super::flatten::{AT_ONCE, is_flattened, no_overlay};
use super::manage::{blocking, in_use};
use super::new_file::remove_file;
use super::open::Opened;
use super::slot::VolumeSlot;
use super::snapshot::{SnapshotFiles, must_be_in_a_file};
use super::{Engine, lock};
use crate::delta_file;
use crate::operations::{LongOperation, cancelled};
use crate::stores::{Expected, StoreError, StoreTarget, with_cache};

/// The most that the flush of the base may take: all copied data may still be in the page cache.
const FLUSH_WITHIN: Duration = Duration::from_secs(300);

fn refused(kind: &str, message: String, remedy: &str) -> Refused {
    Refused::new(Refusal::Conflict, kind, message, remedy)
}

fn failed(name: &str, why: &str) -> Refused {
    let message = format!("volume `{name}` was not committed: {why}");
    Refused::new(Refusal::Failed, "not_committed", message, "correct that, and commit it again")
}

/// Returns the error of a commit that failed after the base was written to.
fn failed_halfway(name: &str, why: &str) -> Refused {
    let mut refused = failed(name, why);
    refused.body.remedy.push_str(": until then its base may be a mix of old and new data");
    refused
}

/// Returns the base into which a commit of a volume has begun and not ended, if there is one.
pub(super) fn half_committed_base(volume: &Volume) -> Option<String> {
    // Its own delta: one below it belongs to another volume.
    let parent = volume.layers().deltas().into_iter().next()?.header.parent;
    parent.is_mixed().then(|| parent.shown_place())
}

/// What a commit that has begun and not ended means for the base at a place.
pub(super) fn half_committed(base: &str) -> String {
    format!("a commit of it has not ended, and its base {base} alone is a mix of old and new data")
}

/// What ends the commit of a volume.
pub(super) fn repeat_commit(name: &str) -> String {
    format!("repeat the commit: `ebbd volume commit {name}`; correct first what prevents it")
}

/// Fails if a commit of a volume has begun and not ended: only its delta says that the base is a
/// mix of old and new data, and only that commit corrects the base.
pub(super) fn must_have_ended_commit(volume: &Volume, what: &str) -> Result<(), Refused> {
    match half_committed_base(volume) {
        Some(base) => Err(commit_unfinished(volume.name(), &base, what)),
        None => Ok(()),
    }
}

/// As [`must_have_ended_commit`], of a volume that may be removed while it is not served: its file
/// says it, unless it is encrypted or cannot be read.
pub(super) async fn may_be_removed(slot: &VolumeSlot) -> Result<(), Refused> {
    let what = "be removed";
    if let Some((volume, _)) = slot.served() {
        return must_have_ended_commit(&volume, what);
    }
    let Some(config) = slot.wanted().filter(|wanted| wanted.base.is_some()) else { return Ok(()) };
    let StoreUri::File(path) = config.store else { return Ok(()) };
    let base = blocking(move || Ok(delta_file::half_committed_base(&path))).await?;
    let Some(base) = base else { return Ok(()) };
    let mut refused = commit_unfinished(slot.name(), &base, what);
    refused.body.remedy.push_str(" (to give up the base, remove the file of the volume)");
    Err(refused)
}

fn commit_unfinished(name: &str, base: &str, what: &str) -> Refused {
    let message = format!("volume `{name}` cannot {what}: {}", half_committed(base));
    refused("commit_unfinished", message, &repeat_commit(name))
}

/// Returns the refusal of a commit that would make another volume above the base unreadable.
fn lost_by_commit(slots: &[Arc<VolumeSlot>], other: &VolumeSlot, commit: (&str, &str)) -> Refused {
    let ((name, base), title) = (commit, other.name());
    let message = format!(
        "`{title}` has the same base `{base}`, and would be unreadable after the commit of `{name}`"
    );
    let wanted = other.wanted().filter(|wanted| wanted.read_only);
    let snapshot = wanted.as_ref().and_then(|wanted| match &wanted.store {
        StoreUri::File(path) => snapshot_of(slots, path),
        _ => None,
    });
    let remedy = match (wanted, snapshot) {
        (None, _) => format!(
            "flatten it first (`ebbd volume flatten {title}`); if its data is not needed, remove it and its file"
        ),
        (Some(_), Some((overlay, snapshot))) => {
            format!(
                "delete that snapshot first: `ebbd volume delete-snapshot {overlay} {snapshot}`"
            )
        }
        (Some(_), None) => format!(
            "remove it (`ebbd volume remove {title}`), add it again without --read-only, and flatten it; if its data is not needed, remove it and its file"
        ),
    };
    refused("in_use", message, &remedy)
}

/// Returns why an overlay and its base are not served during a commit.
fn closed_while(name: &str, base: &str, operation: &LongOperation) -> String {
    format!("closed while {name} is committed into {base} (operation {})", operation.id())
}

/// An overlay and its base, both closed.
struct CommitPair<'a> {
    overlay: (&'a str, VolumeConfig),
    base: (&'a str, VolumeConfig),
    files: SnapshotFiles,
}

impl Engine {
    /// Writes the blocks of an overlay into its base, and empties the overlay. Both are closed
    /// meanwhile.
    ///
    /// # Errors
    /// If a client uses one of them, another overlay needs the base, a store fails, or the
    /// operation was cancelled. The overlay reads as before then.
    pub(crate) async fn commit_volume(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let base = self.base_to_commit_into(name)?;
        let _names = self.reserve(&[name, &base])?;
        let slots = [name, &base].map(|name| lock(&self.slots).get(name).cloned());
        let [Some(own), Some(below)] = slots else { return Err(self.unknown(name)) };
        let _changing = self.unless_stopped(own.changing.lock()).await?;
        let _changing_base = self.unless_stopped(below.changing.lock()).await?;
        let not_served = |slot: &Arc<VolumeSlot>| {
            let message = format!("volume `{}` is not served at present", slot.name());
            refused("not_served", message, "see `ebbd volume show`, and try again when it is")
        };
        let (volume, config) = own.served().ok_or_else(|| not_served(&own))?;
        let (base_volume, base_config) = below.served().ok_or_else(|| not_served(&below))?;
        let on = (&base_volume, &base_config);
        self.may_commit((&volume, &config), on, below.open_file().as_ref())?;
        // While both are served: the store may hang.
        // Boxed, as elsewhere here: these futures are large, and the stacks of workers small.
        let not_flushed = |error: BlockError| {
            let message = format!("volume `{name}` was not committed: {}", error.full_text());
            let remedy = "see whether its store is full or does not respond, and commit it again";
            Refused::new(Refusal::Failed, "not_flushed", message, remedy)
        };
        Box::pin(self.flush_before(io, &volume, operation, not_flushed)).await?;
        if !operation.commit() {
            return Err(cancelled());
        }
        // Another client, or an overlay, may have come meanwhile.
        let on = (&base_volume, &base_config);
        self.may_commit((&volume, &config), on, below.open_file().as_ref())?;
        operation.step("looking at the stores");
        let new_base = writable(&base_config);
        for (slot, config) in [(&own, &config), (&below, &new_base)] {
            let can_reopen = Box::pin(self.must_reopen(slot, config)).await?;
            can_reopen.map_err(|error| failed(name, &error.full_text()))?;
        }
        let files = self.may_commit((&volume, &config), on, below.open_file().as_ref())?;
        let parent = self.unless_stopped(Box::pin(parent_of(io, &volume, &base_volume))).await?;
        let parent = parent.map_err(|error| failed(name, &error.full_text()))?;
        let others = changed_base((&volume, parent), (&base, &base_config), &files);
        blocking(move || others.must_have_no_other()).await?;
        let pair = CommitPair { overlay: (name, config), base: (&base, base_config), files };
        // The last step that needs room: nothing is closed yet.
        let empty = Box::pin(self.make_empty(io, &pair, &volume)).await?;
        let on = (&base_volume, &pair.base.1);
        let still = self.may_commit((&volume, &pair.overlay.1), on, below.open_file().as_ref());
        if let Err(refused) = still {
            empty.discard(&pair).await;
            return Err(refused);
        }
        // No other volume gets the files before these have them again.
        let _held = (own.hold_own_file(name), below.hold_own_file(name));
        let why = closed_while(name, &base, operation);
        [&own, &below].iter().for_each(|slot| slot.wait_for(Some(why.clone())));
        operation.step("completing requests and writing dirty data");
        let withdraw = Box::pin(self.withdraw(io, &own, &volume));
        let left = or(withdraw, self.follow_withdrawal(io, &own, operation));
        let left = Box::pin(left).await?;
        drop(volume);
        let committed = match (left, self.must_have_no_client(&base)) {
            (Some(left), _) => Err(failed(name, &left.why)),
            (None, Err(refused)) => Err(refused),
            (None, Ok(())) => {
                let withdraw = Box::pin(self.withdraw(io, &below, &base_volume));
                Box::pin(or(withdraw, self.follow_withdrawal(io, &below, operation))).await?;
                drop(base_volume);
                let committed = Box::pin(self.commit_closed(io, &pair, &empty, operation)).await;
                Box::pin(self.bring_up(io, &below)).await?;
                committed.map_err(|refused| self.or_not_served(&below, refused))
            }
        };
        [&own, &below].iter().for_each(|slot| slot.wait_for(None));
        own.forget_file();
        let claim = match committed.is_ok() {
            true => empty.close(),
            false => {
                empty.discard(&pair).await;
                None
            }
        };
        Box::pin(self.bring_up(io, &own)).await?;
        drop(claim);
        committed.map_err(|refused| self.or_not_served(&own, refused))?;
        let (id, by) = (operation.id(), operation.by());
        tracing::info!(volume = name, base, operation = id, by, "committed");
        Ok(())
    }

    /// The base of an overlay, if it is one.
    fn base_to_commit_into(&self, name: &str) -> Result<String, Refused> {
        let (config, _) = self.definition(name).ok_or_else(|| self.unknown(name))?;
        let base = config.base.filter(|base| base != NO_BASE && !config.read_only);
        base.ok_or_else(|| no_overlay(name, "committed"))
    }

    fn must_have_no_client(&self, name: &str) -> Result<(), Refused> {
        match self.server.connections(name) + self.guests.disks_of(name) {
            0 => Ok(()),
            users => Err(in_use("volume", name, users)),
        }
    }

    /// Fails if the overlay cannot be committed into the base.
    fn may_commit(
        &self,
        (volume, config): (&Arc<Volume>, &VolumeConfig),
        (base, base_config): (&Arc<Volume>, &VolumeConfig),
        base_file: Option<&StoreTarget>,
    ) -> Result<SnapshotFiles, Refused> {
        let (name, base_name) = (volume.name(), base.name());
        // First: nothing that another refusal asks for makes this commit possible.
        if is_flattened(volume) {
            let message =
                format!("volume `{name}` was flattened, and is no longer above `{base_name}`");
            let remedy = "set `base = \"none\"` where it is defined: `ebbd volume show`";
            return Err(refused("unsupported", message, remedy));
        }
        if base_config.base.is_some() || !matches!(base_config.store, StoreUri::File(_)) {
            let message = format!("its base `{base_name}` is no plain file or device");
            let remedy = "flatten the volume instead: `ebbd volume flatten`";
            return Err(refused("unsupported", message, remedy));
        }
        if volume.size() > base.size() {
            let message = format!("volume `{name}` is larger than its base `{base_name}`");
            let remedy = match half_committed_base(volume) {
                None => {
                    "make the volume as small as its base (`ebbd volume resize --shrink`), or \
                     flatten it instead"
                }
                Some(_) => "make the volume as small as its base: `ebbd volume resize --shrink`",
            };
            return Err(refused("unsupported", message, remedy));
        }
        must_be_in_a_file(volume, "a commit puts a new file in its place")?;
        let no_overlay = || {
            let message = format!("volume `{name}` is no overlay in a file");
            refused("unsupported", message, "`ebbd volume show` says its store")
        };
        let files = SnapshotFiles::of(config, "").ok_or_else(no_overlay)?;
        self.must_have_no_client(name)?;
        self.must_have_no_client(base_name)?;
        let snapshots = volume.snapshots();
        if let Some(snapshot) = snapshots.first() {
            let message = format!("volume `{name}` has the snapshot `{snapshot}`");
            return Err(refused("in_use", message, "delete its snapshots first"));
        }
        let slots: Vec<_> = lock(&self.slots).values().cloned().collect();
        let needs_base = |slot: &&Arc<VolumeSlot>| {
            slot.name() != &**name
                && slot.wanted().is_some_and(|wanted| wanted.base.as_deref() == Some(base_name))
                && !slot.served().is_some_and(|(volume, _)| is_flattened(&volume))
        };
        if let Some(other) = slots.iter().find(needs_base) {
            return Err(lost_by_commit(&slots, other, (name, base_name)));
        }
        let other = self.other_volume_on(&[base_name], &base_config.store, base_file);
        if let Some(other) = other {
            let message = format!("volume `{other}` is on the same file as its base `{base_name}`");
            return Err(refused("in_use", message, "remove that volume and those above it first"));
        }
        if volume.layers().depth() != 2 {
            let message = format!("volume `{name}` is not directly above `{base_name}`");
            return Err(refused(
                "unsupported",
                message,
                "`ebbd volume show` says what is below it",
            ));
        }
        Ok(files)
    }

    /// Commits while both volumes are closed.
    async fn commit_closed(
        &self,
        io: &Io,
        pair: &CommitPair<'_>,
        empty: &EmptyDelta,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let (name, config) = (pair.overlay.0, &pair.overlay.1);
        let store_failed = |error: StoreError| failed(name, &error.full_text());
        let block_failed = |error: BlockError| failed(name, &error.full_text());
        let base = writable(&pair.base.1);
        let opened = Box::pin(self.open_store(io, pair.base.0, &base, Expected::Any)).await;
        let Opened { store, claim: _base_claim, .. } = opened.map_err(store_failed)?;
        let base = CachedStore::from(store);
        let opened = Box::pin(self.open_store(io, name, config, Expected::Any)).await;
        let Opened { store, claim: _claim, .. } = opened.map_err(store_failed)?;
        let top = with_cache(name, config, store, &self.cache).map_err(store_failed)?;
        let delta = Box::pin(Delta::open(io, &top)).await;
        let delta = delta.map_err(|error| store_failed(error.into()))?;
        let found = Box::pin(plain_parent(io, &base)).await.map_err(block_failed)?;
        delta.check_parent(&top, &found).map_err(|error| store_failed(error.into()))?;
        operation.step("copying into the base");
        operation.allow_cancel();
        if operation.is_cancelled() {
            return Err(cancelled());
        }
        let mixed = Parent { place: found.place.clone(), ..found.mixed() };
        let all = (mixed, u64::MAX);
        Box::pin(delta.set_parent(io, &top, all)).await.map_err(block_failed)?;
        let halfway = |error: BlockError| failed_halfway(name, &error.full_text());
        let size = delta.header().layout.size();
        let layers = Layers::overlay(name, top, Vec::new(), vec![Arc::new(delta)], true);
        let layers = layers.map_err(|error| store_failed(error.into()))?;
        let mut at = 0;
        while at < size {
            if operation.is_cancelled() {
                return Err(cancelled());
            }
            let copied = Box::pin(layers.copy_held(io, (at, AT_ONCE), (&base, true)));
            at += self.unless_stopped(copied).await?.map_err(halfway)?.max(1);
            operation.note_copied(at.min(size), size);
            io.yield_iteration().await;
        }
        let cancel = async {
            operation.cancelled().await;
            Err(cancelled())
        };
        let flush = async {
            let flushed = io.timeout(FLUSH_WITHIN, Box::pin(base.flush(io))).await;
            let late = || failed_halfway(name, "its base could not be flushed in time");
            flushed.ok_or_else(late)?.map_err(halfway)
        };
        self.unless_stopped(or(flush, cancel)).await??;
        if !operation.commit() {
            return Err(cancelled());
        }
        operation.step("emptying the overlay");
        let parent = Box::pin(plain_parent(io, &base)).await.map_err(block_failed)?;
        Box::pin(empty.delta.set_parent(io, &empty.store, (parent, u64::MAX)))
            .await
            .map_err(block_failed)?;
        let (next, own) = (pair.files.next.clone(), pair.files.own.clone());
        let title = name.to_owned();
        blocking(move || {
            let renamed = std::fs::rename(&next, &own).and_then(|()| sync_folder(&own));
            renamed.map_err(|error| failed(&title, &format!("cannot replace its file: {error}")))
        })
        .await?;
        layers.release();
        base.release();
        Ok(())
    }

    /// Makes the empty delta that takes the place of the overlay's delta.
    async fn make_empty(
        &self,
        io: &Io,
        pair: &CommitPair<'_>,
        volume: &Volume,
    ) -> Result<EmptyDelta, Refused> {
        let (name, config) = (pair.overlay.0, &pair.overlay.1);
        let store_failed = |error: StoreError| failed(name, &error.full_text());
        let layout =
            Layout::new(volume.size()).map_err(|error| failed(name, &error.to_string()))?;
        self.remove_leftover(&pair.files.next).await?;
        let empty = VolumeConfig {
            store: StoreUri::File(pair.files.next.clone()),
            create: true,
            size: Some(Size::new(layout.store_size())),
            cache: CacheMode::None,
            ..config.clone()
        };
        let opened = Box::pin(self.open_store(io, name, &empty, Expected::None)).await;
        let Opened { store, claim, .. } = opened.map_err(store_failed)?;
        let store = CachedStore::from(store);
        let id = (u128::from(nonce()) << 64 | u128::from(nonce())).to_le_bytes();
        // The base has another identity when it has the data. Both header slots are written now.
        let parent = volume.layers().deltas().first().map(|own| own.header.parent.clone());
        let parent = parent.unwrap_or_default();
        let made = async {
            let delta = Delta::create(io, &store, volume.size(), parent.clone(), id).await?;
            delta.set_parent(io, &store, (parent, u64::MAX)).await?;
            Ok::<_, DeltaError>(delta)
        };
        let delta = match Box::pin(made).await {
            Ok(delta) => delta,
            Err(error) => {
                discard(&pair.files.next).await;
                return Err(store_failed(error.into()));
            }
        };
        Ok(EmptyDelta { delta, store, claim })
    }
}

/// Returns the base of an overlay as the header of a delta above it describes it.
async fn parent_of(io: &Io, volume: &Volume, base: &Volume) -> Result<Parent, BlockError> {
    let own = volume.layers().deltas().first().map(|own| own.header.parent.clone());
    match own.filter(|own| !own.is_mixed()) {
        Some(own) => Ok(own),
        // The header of its own delta no longer says it.
        None => plain_parent(io, &base.layers().top()).await,
    }
}

/// The base of a volume that is committed into it.
fn changed_base(
    (volume, parent): (&Volume, Parent),
    (name, config): (&str, &VolumeConfig),
    files: &SnapshotFiles,
) -> ChangedBase {
    let file = match &config.store {
        StoreUri::File(path) => path.clone(),
        _ => PathBuf::new(),
    };
    ChangedBase {
        name: name.to_owned(),
        parent,
        is_mixed: half_committed_base(volume).is_some(),
        file,
        own: vec![files.own.clone(), files.next.clone()],
    }
}

/// Removes a file that is not needed. If that fails, the next commit removes it.
async fn discard(path: &Path) {
    let path = path.to_owned();
    let _ = blocking(move || remove_file(&path)).await;
}

/// The base while data is written into it.
fn writable(base: &VolumeConfig) -> VolumeConfig {
    VolumeConfig {
        read_only: false,
        cache: CacheMode::None,
        create: false,
        size: None,
        ..base.clone()
    }
}

/// The empty delta of a commit.
struct EmptyDelta {
    delta: Delta,
    store: CachedStore,
    claim: Option<StoreClaim>,
}

impl EmptyDelta {
    /// Closes the delta, and returns the claim to its file.
    fn close(self) -> Option<StoreClaim> {
        self.store.release();
        self.claim
    }

    /// Closes the delta, and removes its file.
    async fn discard(self, pair: &CommitPair<'_>) {
        drop(self.close());
        discard(&pair.files.next).await;
    }
}
