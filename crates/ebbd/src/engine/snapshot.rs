//! Snapshots of an overlay while it is in use.
//!
//! The delta of the volume at PATH becomes PATH@NAME, and an empty delta above it takes its place.
//!
//! # What a crash in between leaves
//! - Before the new delta has the name PATH: the volume as it was, perhaps with a second name of
//!   its file, or an empty file next to it (`new_file`); the next attempt removes both.
//! - After that: the volume above the snapshot. Until the layers are exchanged the volume writes to
//!   the file of the snapshot, which then has writes from after the request. No acknowledged write
//!   is missing.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ebb_advice::Advised;
use ebb_api::Refusal;
use ebb_block::{BlockStore, nonce};
use ebb_cache::{CachedStore, Delta, NextLayers, SnapshotError};
use ebb_config::{CHAIN_MOST, NO_BASE, Size, StoreUri, VolumeConfig};
use ebb_control::Refused;
use ebb_image::DeltaHeader;
use ebb_io::Io;
use ebb_store::{is_without_links, sync_folder};
use ebb_volume::Volume;

use super::commit::must_have_ended_commit;
use super::manage::blocking;
use super::new_file::new_file;
use super::open::Opened;
use super::slot::VolumeSlot;
use super::{Engine, lock};
use crate::operations::LongOperation;
use crate::stores::{Expected, StoreError, StoreTarget, with_cache};

/// The most that a pause waits for writes in flight; new writes wait meanwhile.
pub(super) const WRITES_WITHIN: Duration = Duration::from_secs(1);

/// The files of a snapshot.
#[derive(Clone)]
pub(super) struct SnapshotFiles {
    /// The delta of the volume.
    pub(super) own: PathBuf,
    /// The new delta, before it has that name.
    pub(super) next: PathBuf,
    /// The delta of the snapshot.
    pub(super) frozen: PathBuf,
}

fn failed(action: &str, path: &Path, error: &std::io::Error) -> Refused {
    let message = format!("cannot {action} {}: {error}", path.display());
    Refused::new(Refusal::Failed, "not_made", message, "correct that, and make the snapshot again")
}

fn not_opened(error: &StoreError) -> Refused {
    Refused::new(
        Refusal::Failed,
        "not_made",
        error.full_text(),
        "correct that, and make the snapshot again",
    )
}

fn same_file(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let number = |path: &Path| {
        let found = std::fs::symlink_metadata(path).ok()?;
        Some((found.dev(), found.ino()))
    };
    number(one).is_some_and(|own| Some(own) == number(other))
}

impl SnapshotFiles {
    pub(super) fn of(config: &VolumeConfig, name: &str) -> Option<SnapshotFiles> {
        let StoreUri::File(path) = &config.store else { return None };
        let with = |end: &str| {
            let mut file = path.file_name()?.to_owned();
            file.push(end);
            Some(path.with_file_name(file))
        };
        let frozen = with(&format!("@{name}"))?;
        Some(SnapshotFiles { own: path.clone(), next: new_file(path, "next")?, frozen })
    }

    /// Removes the second name that an interrupted attempt has left, if the file that the volume
    /// has `open` is at its path, and checks that the file can have a second name. Blocks.
    fn prepare(&self, open: Option<&StoreTarget>) -> Result<(), Refused> {
        self.must_be_at_path(open, "make the snapshot")?;
        let own = std::fs::symlink_metadata(&self.own);
        let own = own.map_err(|error| failed("use", &self.own, &error))?;
        if !own.file_type().is_file() {
            let message = format!("{} is no regular file", self.own.display());
            let remedy = "name the file itself in `store`: a snapshot gives it another name";
            return Err(Refused::new(Refusal::Conflict, "no_file", message, remedy));
        }
        if std::fs::symlink_metadata(&self.frozen).is_ok() {
            if !same_file(&self.own, &self.frozen) {
                let message = format!("{} exists", self.frozen.display());
                let remedy = "choose another name for the snapshot";
                return Err(Refused::new(Refusal::Conflict, "exists", message, remedy));
            }
            std::fs::remove_file(&self.frozen)
                .map_err(|error| failed("remove", &self.frozen, &error))?;
        }
        // Before anything is made.
        std::fs::hard_link(&self.own, &self.frozen).map_err(|error| self.not_linked(&error))?;
        std::fs::remove_file(&self.frozen).map_err(|error| failed("remove", &self.frozen, &error))
    }

    /// Fails if the file that the volume has `open` is not at its path: a layer below that is made
    /// or merged now would be of no use without it. `repeat` says what the operator repeats.
    /// Blocks.
    pub(super) fn must_be_at_path(
        &self,
        open: Option<&StoreTarget>,
        repeat: &str,
    ) -> Result<(), Refused> {
        let found = StoreTarget::of(&StoreUri::File(self.own.clone()));
        if found.map_err(|error| not_opened(&error))?.as_ref() == open {
            return Ok(());
        }
        let message = format!("{} is not the file that the volume writes to", self.own.display());
        Err(Refused::new(Refusal::Conflict, "moved", message, self.not_at_path(repeat)))
    }

    /// The remedy if the path leads to another file than the volume has open, or to none.
    fn not_at_path(&self, repeat: &str) -> String {
        let own = self.own.display();
        match std::fs::symlink_metadata(&self.own) {
            Err(_) => format!(
                "move the file back to {own}, and {repeat} again; if it was deleted, copy the volume from a client \
                 before it is removed or the daemon stops"
            ),
            Ok(_) => format!(
                "if the file was moved, move it back to {own}; after a snapshot that could not be completed restart the \
                 daemon"
            ),
        }
    }

    fn not_linked(&self, error: &std::io::Error) -> Refused {
        if !is_without_links(error) {
            return failed("make", &self.frozen, error);
        }
        let message = format!("cannot give {} a second name: {error}", self.own.display());
        let remedy = "if `lsattr` shows that the file or its folder is immutable or append-only, change that with \
                      `chattr`; else its file system has no hard links: keep overlays with snapshots on one that has \
                      them, such as ext4 or xfs, and copy the volume there with `ebbd image export`";
        Refused::new(Refusal::Conflict, "unsupported", message, remedy)
    }

    /// Gives both files their names. Blocks.
    fn exchange(&self, sync: impl Fn(&Path) -> io::Result<()>) -> Result<(), NotExchanged> {
        let unchanged = |refused| NotExchanged { refused, is_stable: true };
        std::fs::hard_link(&self.own, &self.frozen)
            .map_err(|error| unchanged(failed("make", &self.frozen, &error)))?;
        let renamed = std::fs::rename(&self.next, &self.own);
        renamed.map_err(|error| {
            let _ = std::fs::remove_file(&self.frozen);
            unchanged(failed("replace", &self.own, &error))
        })?;
        let synced = sync(&self.own);
        synced
            .map_err(|error| self.take_back(failed("flush the folder of", &self.own, &error), sync))
    }

    /// Takes the exchange back, after the failure `cause`: the volume goes on with the file that
    /// has the name of the snapshot now. Returns `cause` with the names that the files have.
    /// Blocks.
    fn take_back(
        &self,
        mut cause: Refused,
        sync: impl Fn(&Path) -> io::Result<()>,
    ) -> NotExchanged {
        if let Err(error) = std::fs::rename(&self.frozen, &self.own) {
            return self.not_taken_back(cause, &error);
        }
        let body = &mut cause.body;
        let synced = sync(&self.own);
        let is_stable = synced.is_ok();
        body.message = match synced {
            Ok(()) => format!("{}; the volume goes on as before", body.message),
            Err(error) => format!(
                "{}; the volume goes on as before, and its flushes fail until its folder can be flushed: {error}",
                body.message
            ),
        };
        NotExchanged { refused: cause, is_stable }
    }

    /// Returns `cause`, with the `error` that has left the files exchanged.
    fn not_taken_back(&self, mut cause: Refused, error: &dyn std::fmt::Display) -> NotExchanged {
        let body = &mut cause.body;
        body.message = format!(
            "{}; cannot rename {} back: {error}: the volume goes on with the file of this name",
            body.message,
            self.frozen.display()
        );
        body.remedy = "see whether the file system fails; then restart the daemon, or remove the volume and add it \
                       again: it has all its data, above the file of the snapshot"
            .to_owned();
        NotExchanged { refused: cause, is_stable: false }
    }
}

/// An exchange of names that has failed.
struct NotExchanged {
    refused: Refused,
    /// The name of the file that the volume writes to is stable.
    is_stable: bool,
}

impl NotExchanged {
    /// Returns the error. If the name of the volume's file is not stable, the volume's next flush
    /// makes it stable first.
    fn of(self, volume: &Volume) -> Refused {
        if !self.is_stable {
            volume.layers().top().store().doubt_name();
        }
        self.refused
    }
}

/// Fails if the delta of a volume is on a device, a server or a cluster, where no new file can take
/// its place.
pub(super) fn must_be_in_a_file(volume: &Volume, why: &str) -> Result<(), Refused> {
    if volume.layers().top().store().is_regular_file() {
        return Ok(());
    }
    let (name, place) = (volume.name(), volume.layers().top().place());
    let message = format!("volume `{name}` has its delta at {place}, which is no file, and {why}");
    let remedy = "on such a store an overlay can be resized and flattened, and clones above it are possible while it is read-only; \
                  for snapshots and commits copy the delta into a file: remove the volume, run `ebbd image import STORE file:PATH \
                  --raw`, and add the volume again with that file and the same base";
    Err(Refused::new(Refusal::Conflict, "unsupported", message, remedy))
}

/// Returns the error of a snapshot that was made and is not served.
fn not_served(command: &str, mut refused: Refused) -> Refused {
    refused.body.message =
        format!("the snapshot was made, and is not served: {}", refused.body.message);
    refused.body.remedy = format!("correct that, and add it: `{command}`");
    refused
}

/// The command that adds a snapshot that was made and is not served.
fn add_command(title: &str, store: &StoreUri, base: Option<&str>, keep: bool) -> String {
    let (base, persist) = (base.unwrap_or(NO_BASE), if keep { " --persist" } else { "" });
    format!("ebbd volume add {title} {store} --base {base} --read-only{persist}")
}

/// Checks the name of a snapshot, which is a part of a file's name.
pub(super) fn check_name(name: &str) -> Result<(), Refused> {
    if !ebb_image::is_snapshot_name(name) {
        let message = "a snapshot cannot have this name";
        let remedy = match name.rsplit_once('@') {
            Some((_, name)) if check_name(name).is_ok() => {
                format!("write only what follows the `@`: `{name}`")
            }
            _ => "use up to 64 letters, digits, and . _ -".to_owned(),
        };
        return Err(Refused::new(Refusal::Invalid, "invalid_value", message, remedy));
    }
    Ok(())
}

impl Engine {
    /// Makes the snapshot `name` of a volume, and serves it as a read-only volume. With `keep` the
    /// next start also serves it.
    ///
    /// # Errors
    /// If it cannot be made; the volume goes on as before. If it was made and cannot be served, or
    /// is not stable yet, the message says so.
    pub(crate) async fn snapshot_volume(
        self: &Arc<Self>,
        io: &Io,
        volume: &str,
        (name, keep): (&str, bool),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        check_name(name)?;
        // Before anything is made.
        if !lock(&self.slots).contains_key(volume) {
            return Err(self.unknown(volume));
        }
        self.must_have_memory()?;
        let title = format!("{volume}@{name}");
        // Held to the end: nothing else gets this name before the snapshot is stable.
        let _title = self.reserve(&[title.as_str()])?;
        if self.definition(&title).is_some() {
            let message = format!("there is a volume `{title}` already");
            return Err(Refused::new(
                Refusal::Conflict,
                "exists",
                message,
                "choose another name for the snapshot",
            ));
        }
        if keep {
            self.state_for(&title).await?;
        }
        let served = {
            let _names = self.reserve(&[volume])?;
            let slot = lock(&self.slots).get(volume).cloned();
            let slot = slot.ok_or_else(|| self.unknown(volume))?;
            let _changing = self.unless_stopped(slot.changing.lock()).await?;
            let Some((served, config)) = slot.served() else {
                let message = format!("volume `{volume}` is not served at present");
                let remedy = "see `ebbd volume show`, and try again when it is";
                return Err(Refused::new(Refusal::Conflict, "not_served", message, remedy));
            };
            // Boxed, as elsewhere here: these futures are large, and the stacks of workers small.
            let files =
                Box::pin(self.files_of(&served, &config, (volume, name), slot.open_file())).await?;
            operation.step("exchanging the layers");
            let exchange = self.exchange_layers(io, &slot, (&served, &config), &files);
            let frozen = Box::pin(exchange).await?;
            operation.step("writing what the snapshot holds");
            operation.watch_writes(std::slice::from_ref(&served));
            let flushed = Box::pin(served.flush_unasked(io)).await;
            flushed.map_err(|error| {
                let store = StoreUri::File(files.frozen.clone());
                let command = add_command(&title, &store, config.base.as_deref(), keep);
                self.unstable_snapshot((volume, &command), &error)
            })?;
            // The flush has shared the lock, after the data was stable, and reports no error.
            let shared = frozen.store().share_lock();
            shared.map_err(|error| failed("share", &files.frozen, &error))?;
            tracing::info!(
                volume,
                snapshot = name,
                operation = operation.id(),
                by = operation.by(),
                "made a snapshot"
            );
            VolumeConfig {
                store: StoreUri::File(files.frozen),
                base: config.base.clone(),
                read_only: true,
                allow: self.list_of_snapshot(&slot, &config),
                create: false,
                size: None,
                cache: ebb_config::CacheMode::Writethrough,
                bdi: None,
                default: false,
                vhost_user: None,
                ..config
            }
        };
        let command = add_command(&title, &served.store, served.base.as_deref(), keep);
        let added = Box::pin(self.add_reserved(io, &title, (served, keep), operation)).await;
        added.map_err(|refused| not_served(&command, refused))
    }

    fn unstable_snapshot(
        &self,
        (volume, command): (&str, &str),
        error: &ebb_volume::BlockError,
    ) -> Refused {
        let why = error.full_text();
        let message =
            format!("the snapshot was made, and volume `{volume}` could not be flushed: {why}");
        let remedy = format!(
            "see whether its store is full or does not respond, flush the volume, and add the snapshot: `{command}`"
        );
        Refused::new(Refusal::Failed, "not_flushed", message, remedy)
    }

    /// Returns the files of a snapshot, if the volume can have that snapshot.
    async fn files_of(
        &self,
        served: &Arc<Volume>,
        config: &VolumeConfig,
        (volume, name): (&str, &str),
        open: Option<StoreTarget>,
    ) -> Result<SnapshotFiles, Refused> {
        let files = SnapshotFiles::of(config, name).filter(|_| config.base.is_some());
        if config.base.is_some() {
            must_be_in_a_file(served, "a snapshot needs a new file beside that of the delta")?;
        }
        let Some(files) = files.filter(|_| !config.read_only) else {
            let message = format!("volume `{volume}` is no writable overlay");
            let remedy = match config.read_only {
                _ if config.encryption.is_some() => {
                    "an encrypted volume has no overlays and no snapshots: copy the disk with an NBD client instead".to_owned()
                }
                true => format!(
                    "make an overlay above it: `ebbd volume add NAME file:PATH --base {volume} --create`"
                ),
                // A `base` for its own file would hide the data in it.
                false => format!(
                    "serve its file read-only as another volume, and make `{volume}` an overlay above that: ebbd.toml(5)"
                ),
            };
            return Err(Refused::new(Refusal::Conflict, "no_overlay", message, remedy));
        };
        must_have_ended_commit(served, "be given a snapshot")?;
        if served.layers().deltas().len() >= CHAIN_MOST {
            let message = format!(
                "volume `{volume}` has {CHAIN_MOST} deltas above each other, snapshots included, and no more are possible"
            );
            let remedy = "delete a snapshot (`ebbd volume delete-snapshot`), or flatten the volume (`ebbd volume flatten`)";
            return Err(Refused::new(Refusal::Conflict, "too_deep", message, remedy));
        }
        let prepared = files.clone();
        blocking(move || prepared.prepare(open.as_ref())).await?;
        self.remove_leftover(&files.next).await?;
        Ok(files)
    }

    /// Has exports record, for the guests of a volume, the layers that it is about to have. This
    /// comes before the step that a kill does not take back: the next daemon finds the former
    /// layers or the next ones, and guests go on with either.
    pub(super) fn note_next_layers(&self, volume: &Arc<Volume>, next: NextLayers<'_>) {
        volume.layers().note_next(next);
        self.guests.note_backing(volume);
    }

    /// Makes the new delta, and puts it above the others.
    async fn exchange_layers(
        self: &Arc<Self>,
        io: &Io,
        slot: &VolumeSlot,
        (volume, config): (&Arc<Volume>, &VolumeConfig),
        files: &SnapshotFiles,
    ) -> Result<Arc<CachedStore>, Refused> {
        let name = slot.name();
        let layers = volume.layers();
        let no_overlay = || {
            let remedy = "give it a `base`: ebbd.toml(5)";
            Refused::new(
                Refusal::Conflict,
                "no_overlay",
                SnapshotError::NoOverlay.to_string(),
                remedy,
            )
        };
        // Making the header stable may meet a loss of the volume's data: a client learns of it.
        let parent = Box::pin(volume.exchange_layers(io, layers.top_as_parent(io))).await;
        let mut parent = parent.map_err(|error| match error {
            SnapshotError::NoOverlay => no_overlay(),
            error => {
                let remedy = "see whether its store is full or does not respond, and make the snapshot again";
                let message = Advised(error).to_string();
                Refused::new(Refusal::Failed, "not_made", message, remedy)
            }
        })?;
        parent.place = files.frozen.display().to_string();
        let layout = ebb_image::Layout::new(volume.size()).map_err(|_| no_overlay())?;
        let size = layout.store_size();
        let next = VolumeConfig {
            store: StoreUri::File(files.next.clone()),
            create: true,
            size: Some(Size::new(size)),
            ..config.clone()
        };
        let opened = Box::pin(self.open_store(io, name, &next, Expected::None)).await;
        let Opened { store, claim, device, .. } = opened.map_err(|error| not_opened(&error))?;
        let top =
            with_cache(name, config, store, &self.cache).map_err(|error| not_opened(&error))?;
        let id = (u128::from(nonce()) << 64 | u128::from(nonce())).to_le_bytes();
        let lineage = layers.deltas().first().map_or([0; 16], |own| own.header.lineage);
        let header = DeltaHeader { lineage, ..DeltaHeader::new(1, id, layout, parent) };
        let delta = Box::pin(Delta::create_as(io, &top, header)).await;
        let delta = delta.map_err(|error| not_opened(&error.into()))?;
        self.note_next_layers(volume, NextLayers::Pushed(&top));
        let names = files.clone();
        let exchanged = blocking(move || Ok(names.exchange(sync_folder))).await?;
        exchanged.map_err(|failure| failure.of(volume))?;
        let began = ebb_mem::clock::now();
        let pushed =
            Box::pin(layers.push(io, (name, &self.bases), top, delta, WRITES_WITHIN)).await;
        let (frozen, delta) = match pushed {
            Ok(frozen) => frozen,
            Err(error) => {
                let (names, error) = (files.clone(), error.to_string());
                let cause = Refused::new(Refusal::Busy, "not_made", error, "try again later");
                let own = cause.clone();
                let undone = blocking(move || Ok(names.take_back(own, sync_folder))).await;
                // Without a thread the files stay exchanged.
                let undone = undone.unwrap_or_else(|error| files.not_taken_back(cause, &error));
                return Err(undone.of(volume));
            }
        };
        frozen.store().note_renamed(&files.frozen);
        layers.top().store().note_renamed(&files.own);
        self.guests.note_backing(volume);
        let held = ebb_mem::clock::now().saturating_duration_since(began);
        let milliseconds = (held.as_secs_f64() * 1e6).round() / 1e3;
        tracing::info!(
            volume = name,
            milliseconds,
            "new writes waited while the layers were exchanged"
        );
        slot.replace_file(claim, &delta);
        let started = Box::pin(self.start_writeback(config, device, volume)).await;
        started.map_err(|error| not_opened(&error))?;
        Ok(frozen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A delta, and the new one that is to take its place.
    fn two_files(folder: &Path) -> SnapshotFiles {
        let [own, next, frozen] =
            ["disk", ".disk.ebbd-next", "disk@one"].map(|name| folder.join(name));
        std::fs::write(&own, "old").unwrap();
        std::fs::write(&next, "new").unwrap();
        SnapshotFiles { own, next, frozen }
    }

    #[test]
    fn failed_exchange_says_which_names_the_files_have() {
        let fails = || Err(io::Error::from_raw_os_error(libc::EIO));
        let content = |path: &Path| std::fs::read_to_string(path).ok();
        for (failures, is_stable) in [(1, true), (2, false)] {
            let folder = tempfile::tempdir().unwrap();
            let files = two_files(folder.path());
            let left = std::cell::Cell::new(failures);
            let sync = |_: &Path| match left.get() {
                0 => Ok(()),
                more => {
                    left.set(more - 1);
                    fails()
                }
            };
            let failure = files.exchange(sync).err().unwrap();
            let text = failure.refused.to_string();
            assert_eq!(failure.is_stable, is_stable, "{text}");
            assert!(text.contains("the volume goes on as before"), "{text}");
            assert_eq!(text.contains("its flushes fail until"), !is_stable, "{text}");
            assert_eq!(content(&files.own).as_deref(), Some("old"));
            assert_eq!((content(&files.frozen), content(&files.next)), (None, None));
        }
        // It cannot be taken back: here since the name of the snapshot is gone.
        let folder = tempfile::tempdir().unwrap();
        let files = two_files(folder.path());
        let gone = |_: &Path| std::fs::remove_file(&files.frozen).and_then(|()| fails());
        let failure = files.exchange(gone).err().unwrap();
        let text = failure.refused.to_string();
        assert!(!failure.is_stable && text.contains("cannot rename"), "{text}");
        assert!(text.contains("restart the daemon") && !text.contains("as before"), "{text}");
        // Nor is it without a thread for that.
        let cause = || Refused::new(Refusal::Busy, "not_made", "no room", "try again later");
        let failure = files.not_taken_back(cause(), &"cannot start a thread");
        let text = failure.refused.to_string();
        assert!(!failure.is_stable && text.contains("no room; cannot rename"), "{text}");
        assert!(text.contains("restart the daemon") && !text.contains("later"), "{text}");
    }

    #[test]
    fn file_system_without_links_is_named() {
        let [own, next, frozen] = ["disk", ".disk.ebbd-next", "disk@one"].map(PathBuf::from);
        let files = SnapshotFiles { own, next, frozen };
        let refused = files.not_linked(&std::io::Error::from_raw_os_error(libc::EPERM));
        assert_eq!(refused.body.error, "unsupported");
        assert!(refused.body.message.contains("Operation not permitted"), "{refused}");
        let remedy = &refused.body.remedy;
        assert!(remedy.contains("lsattr") && remedy.contains("no hard links"), "{refused}");
        let refused = files.not_linked(&std::io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(refused.body.error, "not_made");
    }

    #[test]
    fn remedy_for_missing_delta_is_to_move_it_back() {
        let folder = tempfile::tempdir().unwrap();
        let [own, next, frozen] =
            ["disk", ".disk.ebbd-next", "disk@one"].map(|name| folder.path().join(name));
        let files = SnapshotFiles { own: own.clone(), next, frozen };
        let open = Some(StoreTarget::File(0, 0));
        let refused = files.prepare(open.as_ref()).unwrap_err();
        let remedy = &refused.body.remedy;
        assert!(remedy.contains("move the file back") && !remedy.contains("restart"), "{refused}");
        std::fs::write(&own, [0; 512]).unwrap();
        let refused = files.prepare(open.as_ref()).unwrap_err();
        let remedy = &refused.body.remedy;
        assert!(remedy.contains("move it back") && !remedy.contains("remove"), "{refused}");
    }

    #[test]
    fn names_that_could_leave_the_folder_are_refused() {
        for good in ["monday", "2026-11-25", "a.b_c"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "a/b", "a@b", "a b", "\u{e4}", "x\n", &"a".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        let remedy = check_name("web1@monday").unwrap_err().body.remedy;
        assert_eq!(remedy, "write only what follows the `@`: `monday`");
    }
}
