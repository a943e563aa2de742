//! The keys of encrypted volumes while these are open: key slots are listed, added and removed, and a reload names another
//! key of the same volume.
//!
//! # Invariants
//! - Slots change under the lock of changes of the volume, so that no reload exchanges the configured key meanwhile: the slot
//!   that the next start needs is not removed unless that is forced.
//! - Closing the volume waits for a change of its header, and keeps the lock of the file until then.
//! - A request names where a key is, and the daemon reads it: no key is in a request, a reply or the log.
//!
//! # What a crash in between leaves
//! A header that opens with each key that had a slot before or has one after the change: see [`ebb_luks`].

use std::sync::Arc;

use ebb_advice::{Advice, full_text};
use ebb_api::{KeyChangeView, KeySlotView, KeySlotsView, Refusal};
use ebb_config::{KeySource, VolumeConfig, VolumeOrigin};
use ebb_control::Refused;
use ebb_io::Io;
use ebb_luks::{LuksError, Secret};
use ebb_store::{EncryptedError, OpenKeys, Store};
use ebb_volume::{RESIZE_LIMIT, Volume};
use futures_lite::future::or;

use super::change::Stopped;
use super::flatten::not_served;
use super::manage::{blocking, configured, stopping};
use super::open::on_a_thread;
use super::slot::VolumeSlot;
use super::{Engine, lock};
use crate::operations::{LongOperation, cancelled};
use crate::volume_key::{KeyError, read_key};

/// The key slots of a volume, if ebbd encrypts it.
fn keys_of(volume: &Volume) -> Option<OpenKeys> {
    match volume.layers().top().store() {
        Store::Encrypted(store) => Some(OpenKeys::of(store)),
        _ => None,
    }
}

fn not_encrypted(name: &str) -> Refused {
    let message = format!("volume `{name}` is not encrypted by ebbd");
    let remedy =
        "only a volume with `encryption` has key slots: `ebbd volume show` says whether it has";
    Refused::new(Refusal::Conflict, "not_encrypted", message, remedy)
}

fn refusal(error: &EncryptedError) -> Refused {
    let (refusal, kind) = match error {
        EncryptedError::Luks { source, .. } => match source {
            LuksError::NoSuchSlot(_) => (Refusal::Unknown, "unknown_slot"),
            LuksError::LastSlot(_) => (Refusal::Conflict, "last_key"),
            LuksError::SlotInUse(_) => (Refusal::Conflict, "key_in_use"),
            LuksError::Full => (Refusal::Conflict, "full"),
            LuksError::WrongKey { .. } | LuksError::NoSlot(_) => (Refusal::Conflict, "wrong_key"),
            LuksError::EmptyKey | LuksError::LongKey => (Refusal::Invalid, "invalid_value"),
            _ => (Refusal::Failed, "not_changed"),
        },
        EncryptedError::KeysInUse { .. } => (Refusal::Busy, "busy"),
        _ => (Refusal::Failed, "not_changed"),
    };
    match error.remedy() {
        Some(remedy) if refusal != Refusal::Failed => {
            Refused::new(refusal, kind, error.to_string(), remedy)
        }
        _ => {
            let remedy = "correct that, and list the key slots before you try again";
            Refused::new(refusal, kind, full_text(error), remedy)
        }
    }
}

fn not_read(error: &KeyError) -> Refused {
    let cause = std::error::Error::source(error).map(ToString::to_string);
    let mut message = error.to_string();
    if let Some(cause) = cause.filter(|cause| !message.contains(cause)) {
        message = format!("{message} ({cause})");
    }
    let remedy = error.remedy().unwrap_or(
        "name a file that the daemon's user may read, or a credential of its unit".into(),
    );
    Refused::new(Refusal::Invalid, "no_key", message, remedy)
}

/// Whether two definitions of an encrypted volume differ only in where its key is.
pub(super) fn is_other_key(old: &VolumeConfig, new: &VolumeConfig) -> bool {
    let same = VolumeConfig { encryption: old.encryption.clone(), ..new.clone() };
    old.encryption.is_some() && new.encryption.is_some() && old != new && same == *old
}

impl Engine {
    /// The key slots of a volume. Blocks: it reads the header.
    ///
    /// # Errors
    /// If it is not served, or not encrypted by ebbd, or its header cannot be read.
    pub(crate) fn key_slots(&self, name: &str) -> Result<KeySlotsView, Refused> {
        let (_, volume, _) = self.served_volume(name)?;
        let keys = keys_of(&volume).ok_or_else(|| not_encrypted(name))?;
        let (slots, warning) = keys.slots().map_err(|error| refusal(&error))?;
        let view = |slot: ebb_luks::KeySlot| KeySlotView {
            slot: slot.number,
            usable: slot.is_usable(),
            reason: slot.unusable().map(|why| why.reason().to_owned()),
            remedy: slot.unusable().map(|why| why.remedy().to_owned()),
            ignored: slot.ignored,
            kdf: slot.kdf,
        };
        let slots = slots.into_iter().map(view).collect();
        Ok(KeySlotsView { volume: name.to_owned(), slots, warning })
    }

    /// Adds a key slot for a key while the volume is in use.
    ///
    /// # Errors
    /// If the key cannot be read, the volume cannot have another, or its header cannot be written.
    pub(crate) async fn add_key(
        self: &Arc<Self>,
        io: &Io,
        (name, source): (&str, KeySource),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let read = move |_: &VolumeConfig| read_key(&source);
        let add = |keys: &OpenKeys, key: Secret| keys.add(&key);
        let slot = self.change_keys(io, name, operation, read, add).await?;
        operation.note_key_added(KeyChangeView { volume: name.to_owned(), slot });
        let (operation, by) = (operation.id(), operation.by());
        tracing::info!(volume = name, key_slot = slot, operation, by, "a key was added");
        Ok(())
    }

    /// Removes a key slot while the volume is in use; without `force` not the only one that the
    /// configured key opens.
    ///
    /// # Errors
    /// If it is the last slot, the configured key cannot be read or opens no other slot, or the
    /// header cannot be written.
    pub(crate) async fn remove_key(
        self: &Arc<Self>,
        io: &Io,
        (name, slot, force): (&str, u32, bool),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        let read = move |config: &VolumeConfig| {
            let configured = config.encryption.as_ref().filter(|_| !force);
            configured.map(read_key).transpose()
        };
        let remove =
            move |keys: &OpenKeys, kept: Option<Secret>| keys.remove(slot, kept.as_deref());
        self.change_keys(io, name, operation, read, remove).await?;
        let (operation, by) = (operation.id(), operation.by());
        tracing::info!(volume = name, key_slot = slot, operation, by, "a key was removed");
        Ok(())
    }

    /// Names the key that a volume that was added at run time is opened with, in its state file first.
    ///
    /// # Errors
    /// If the key does not open it, the configuration defines it, or it cannot be kept.
    pub(crate) async fn use_key(
        self: &Arc<Self>,
        io: &Io,
        (name, source): (&str, KeySource),
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        operation.step("waiting for another change of the volume");
        operation.allow_cancel();
        let _names = self.reserve_when_free(io, name, RESIZE_LIMIT).await?;
        let (slot, ..) = self.served_volume(name)?;
        let _changing = self.unless_cancelled(operation, slot.changing.lock()).await?;
        let (_, volume, _) = self.served_volume(name)?;
        let keys = keys_of(&volume).ok_or_else(|| not_encrypted(name))?;
        let configured = |place: &str| configured(name, place, "change `encryption` of");
        let Some((config, origin)) = self.definition(name) else {
            return Err(self.unknown(name));
        };
        if let VolumeOrigin::Configuration(place) = &origin {
            return Err(configured(place));
        }
        operation.step("trying the key");
        let key = source.clone();
        let tried = blocking(move || {
            let key = read_key(&key).map_err(|error| not_read(&error))?;
            keys.opened_by(&key).map_err(|error| refusal(&error))
        });
        let key_slot = self.unless_cancelled(operation, tried).await??;
        if !operation.commit() {
            return Err(cancelled());
        }
        operation.step("writing the state file");
        let with_key =
            |old: &VolumeConfig| VolumeConfig { encryption: Some(source.clone()), ..old.clone() };
        if origin == VolumeOrigin::State {
            self.write_state(&self.state_dir()?, name, with_key(&config)).await?;
        }
        let mut definitions = lock(&self.definitions);
        // A reload may have defined it in the configuration meanwhile.
        if let Some(VolumeOrigin::Configuration(place)) = definitions.origin(name) {
            return Err(configured(place));
        }
        if let Some(known) = &mut definitions.config
            && let Some(volume) = known.volumes.get_mut(name)
        {
            *volume = with_key(volume);
        }
        slot.redefine(with_key);
        let (operation, by) = (operation.id(), operation.by());
        tracing::info!(volume = name, key_slot, operation, by, "opened by another key from now on");
        Ok(())
    }

    fn served_volume(
        &self,
        name: &str,
    ) -> Result<(Arc<VolumeSlot>, Arc<Volume>, VolumeConfig), Refused> {
        let slot = lock(&self.slots).get(name).cloned();
        let slot = slot.ok_or_else(|| self.unknown(name))?;
        let (volume, config) = slot.served().ok_or_else(|| not_served(name))?;
        Ok((slot, volume, config))
    }

    /// Reads what a change needs, which can be cancelled, and then changes the header, which cannot.
    async fn change_keys<K: Send + 'static, T: Send + 'static>(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        operation: &LongOperation,
        read: impl FnOnce(&VolumeConfig) -> Result<K, KeyError> + Send + 'static,
        act: impl FnOnce(&OpenKeys, K) -> Result<T, EncryptedError> + Send + 'static,
    ) -> Result<T, Refused> {
        operation.step("waiting for another change of the volume");
        operation.allow_cancel();
        let _names = self.reserve_when_free(io, name, RESIZE_LIMIT).await?;
        let (slot, ..) = self.served_volume(name)?;
        let _changing = self.unless_cancelled(operation, slot.changing.lock()).await?;
        let (_, volume, config) = self.served_volume(name)?;
        let keys = keys_of(&volume).ok_or_else(|| not_encrypted(name))?;
        if config.read_only {
            let message =
                format!("volume `{name}` is read-only, so that its header is not written");
            let remedy = "remove `read_only`, or close it and use `ebbd image key`";
            return Err(Refused::new(Refusal::Conflict, "read_only", message, remedy));
        }
        operation.step("reading the key");
        let read = blocking(move || read(&config).map_err(|error| not_read(&error)));
        let given = self.unless_cancelled(operation, read).await??;
        if !operation.commit() {
            return Err(cancelled());
        }
        operation.step("deriving the key, and writing the header");
        let (sender, changed) = tokio::sync::oneshot::channel();
        let on = io.clone();
        // In a task of its own: a stop does not interrupt it, and closing the volume waits for it.
        let change = async move {
            let act = blocking(move || act(&keys, given).map_err(|error| refusal(&error)));
            let changed = volume.with_layers(&on, act).await;
            drop(volume);
            let _ = sender.send(changed);
        };
        io.spawn(change).detach();
        match or(async { changed.await.ok() }, self.stopped()).await {
            Some(Ok(changed)) => changed,
            Some(Err(_)) => Err(not_served(name)),
            None => Err(Refused::new(
                Refusal::Busy,
                "stopping",
                "the daemon is stopping, and the change of keys goes on until it has stopped",
                "list the key slots before you try again",
            )),
        }
    }

    /// Waits for something, until the operation is cancelled or the engine stops.
    async fn unless_cancelled<T>(
        &self,
        operation: &LongOperation,
        step: impl Future<Output = T>,
    ) -> Result<T, Refused> {
        let given_up = async {
            operation.cancelled().await;
            None
        };
        let done = or(async { Some(step.await) }, or(self.stopped(), given_up)).await;
        done.ok_or_else(|| if operation.is_cancelled() { cancelled() } else { stopping() })
    }

    /// Takes over where the key of a served volume is, if that key opens it: its clients stay connected.
    pub(super) async fn follow_key(
        &self,
        slot: &VolumeSlot,
        volume: &Volume,
        old: VolumeConfig,
        new: VolumeConfig,
    ) -> Result<(), Stopped> {
        let (Some(keys), Some(source)) = (keys_of(volume), new.encryption.clone()) else {
            return Ok(());
        };
        let tried = on_a_thread(move || Ok(keys.opened_by(&read_key(&source)?)?));
        match self.unless_stopped(tried).await? {
            Ok(key_slot) => {
                slot.redefine(|_| new.clone());
                tracing::info!(volume = slot.name(), key_slot, "opened by another key from now on");
            }
            Err(error) => {
                let reason = error.full_text();
                tracing::error!(
                    volume = slot.name(),
                    "not changed, and served as before, until the next reload: {reason}"
                );
                slot.want_instead(&new, old, &reason);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_place_of_the_key_leaves_a_volume_open() {
        let config = |text: &str| {
            let text = format!("listen = ['unix:/s']\n[volume.a]\nstore = 'file:/a'\n{text}\n");
            let (name, args) =
                (std::path::Path::new("ebbd.toml"), ebb_config::ServeArgs::default());
            ebb_config::Config::parse(&text, name, &args).unwrap().volumes["a"].clone()
        };
        let one = config("encryption = 'key-file:/one'");
        let two = config("encryption = 'key-file:/two'");
        assert!(is_other_key(&one, &two) && !is_other_key(&one, &one));
        assert!(!is_other_key(&one, &config("")) && !is_other_key(&config(""), &one));
        let more = config("encryption = 'key-file:/two'\nread_only = true");
        assert!(!is_other_key(&one, &more));
    }
}
