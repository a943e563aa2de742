//! Flattening: the blocks below an overlay are copied into its own delta while it is in use.
//!
//! # What a crash in between leaves
//! - Before the header of the delta says that nothing is below it: the overlay as it was. Copied
//!   blocks stay.
//! - After that: the delta needs no base. Its definition may still name one, which is opened and
//!   not used; flattening again corrects the definition.

use std::sync::Arc;

use ebb_advice::Advised;
use ebb_api::Refusal;
use ebb_block::{BlockError, ErrorKind, Operation};
use ebb_cache::{FillFrom, NextLayers};
use ebb_config::{NO_BASE, VolumeConfig, VolumeOrigin};
use ebb_control::Refused;
use ebb_image::Parent;
use ebb_io::Io;
use ebb_volume::Volume;

use super::commit::must_have_ended_commit;
use super::slot::VolumeSlot;
use super::snapshot::WRITES_WITHIN;
use super::{Engine, lock};
use crate::operations::{LongOperation, cancelled};

/// Bytes that are copied before the worker serves other tasks.
pub(super) const AT_ONCE: u64 = 256 << 10;

pub(super) fn not_served(name: &str) -> Refused {
    let message = format!("volume `{name}` is not served at present");
    let remedy = "see `ebbd volume show`, and try again when it is";
    Refused::new(Refusal::Conflict, "not_served", message, remedy)
}

/// Returns the error of a volume that has no base, or is read-only.
pub(super) fn no_overlay(name: &str, what: &str) -> Refused {
    let message = format!("volume `{name}` is no writable overlay");
    let remedy = format!(
        "only a writable volume with a `base` can be {what}: `ebbd volume show` says the base"
    );
    Refused::new(Refusal::Conflict, "no_overlay", message, remedy)
}

pub(super) fn failed(what: &str, why: &str) -> Refused {
    Refused::new(
        Refusal::Failed,
        "not_copied",
        format!("{what}: {why}"),
        "correct that, and try again",
    )
}

/// Copies a piece of the layers below a volume into its top layer, from `at` on. Returns the bytes
/// that it looked at. The copy is its own task: a stop must not interrupt its write, since requests
/// that wait for the same blocks would fail.
pub(super) async fn fill_piece(
    io: &Io,
    volume: &Arc<Volume>,
    at: u64,
    from: FillFrom,
) -> Result<u64, BlockError> {
    let (mut sender, filled) = tokio::sync::oneshot::channel();
    let (volume, on) = (volume.clone(), io.clone());
    let fill = async move {
        // A copy that waits for a hanging base ends with the operation: closing the volume would
        // wait for it.
        let range = (at, AT_ONCE);
        let fill = Box::pin(volume.layers().fill_until(&on, range, from, sender.closed()));
        let filled = volume.with_layers(&on, fill).await.flatten();
        drop(volume);
        let _ = sender.send(filled);
    };
    io.spawn(fill).detach();
    // The sender is dropped only when the worker ends.
    let ended = || BlockError::new(ErrorKind::Closing, Operation::Write, at, AT_ONCE);
    filled.await.unwrap_or_else(|_| Err(ended()))
}

/// Returns true if the lowest delta of a volume needs no base.
pub(super) fn is_flattened(volume: &Volume) -> bool {
    volume.layers().deltas().last().is_some_and(|delta| delta.header.parent == Parent::default())
}

/// Returns the configuration after a flatten. It has no `create`: an empty file must not take the
/// place of a missing one.
fn without_base(config: &VolumeConfig) -> VolumeConfig {
    VolumeConfig { base: Some(NO_BASE.to_owned()), create: false, size: None, ..config.clone() }
}

/// Returns true if `new` only takes the base out, of a served volume that was flattened already.
pub(super) fn is_base_left_out(volume: &Volume, old: &VolumeConfig, new: &VolumeConfig) -> bool {
    let size = new.size.filter(|size| size.bytes() != volume.size());
    let same =
        VolumeConfig { create: old.create, size: old.size, base: old.base.clone(), ..new.clone() };
    new.base.as_deref() == Some(NO_BASE) && size.is_none() && same == *old && is_flattened(volume)
}

impl Engine {
    /// Copies the blocks below an overlay into its own delta, and notes there and in its definition
    /// that it no longer needs a base. If the configuration defines the volume, the operator
    /// changes the definition.
    ///
    /// # Errors
    /// If it is not a writable overlay, a store fails, or the operation was cancelled: copied
    /// blocks stay. If it was flattened and its definition cannot be written.
    pub(crate) async fn flatten_volume(
        self: &Arc<Self>,
        io: &Io,
        name: &str,
        operation: &LongOperation,
    ) -> Result<(), Refused> {
        // Prevents a snapshot meanwhile: the copy would be in the layer below.
        let _names = self.reserve(&[name])?;
        let slot = lock(&self.slots).get(name).cloned();
        let slot = slot.ok_or_else(|| self.unknown(name))?;
        let (volume, config) = slot.served().ok_or_else(|| not_served(name))?;
        if config.base.is_none() || config.read_only {
            return Err(no_overlay(name, "flattened"));
        }
        must_have_ended_commit(&volume, "be flattened")?;
        let is_kept = matches!(self.definition(name), Some((_, VolumeOrigin::State)));
        if is_kept {
            self.must_keep(name).await?;
        }
        let what = format!("volume `{name}` was not flattened");
        let error_of = |error: BlockError| failed(&what, &error.full_text());
        operation.step("copying what is below");
        operation.allow_cancel();
        let fill = async |at| fill_piece(io, &volume, at, FillFrom::All).await;
        self.copy_all(io, volume.size(), operation, fill).await?.map_err(error_of)?;
        if !operation.commit() {
            return Err(cancelled());
        }
        if is_kept {
            // The copy may have taken hours, and filled the disk.
            self.must_keep(name).await?;
        }
        operation.step("taking the layers below away");
        self.note_next_layers(&volume, NextLayers::Detached);
        let detach = Box::pin(volume.layers().detach(io, name, WRITES_WITHIN));
        let detached = volume.exchange_layers(io, detach).await;
        detached.map_err(|error| failed(&what, &Advised(error).to_string()))?;
        self.guests.note_backing(&volume);
        slot.release_bases(|_| true);
        tracing::info!(volume = name, operation = operation.id(), by = operation.by(), "flattened");
        operation.step("writing its definition");
        self.leave_out_base(&slot).await.map_err(|mut refused| {
            let why = &refused.body.message;
            refused.body.message = format!(
                "volume `{name}` was flattened, and its definition still names the base: {why}"
            );
            refused.body.remedy = format!("{}, and flatten it again", refused.body.remedy);
            refused
        })
    }

    /// Defines a flattened volume as one without a base, also for the next start.
    async fn leave_out_base(&self, slot: &VolumeSlot) -> Result<(), Refused> {
        let name = slot.name();
        let Some((old, origin)) = self.definition(name) else { return Ok(()) };
        let new = without_base(&old);
        if new == old {
            return Ok(());
        }
        match (origin, &self.state) {
            (VolumeOrigin::Configuration(place), _) => {
                let made = if old.create { ", without `create` and `size`," } else { "" };
                tracing::warn!(
                    volume = name,
                    "it no longer needs a base: set `base = \"{NO_BASE}\"` for it at {place}{made} and reload"
                );
                return Ok(());
            }
            (VolumeOrigin::State, Some(state)) => self.write_state(state, name, new).await?,
            (VolumeOrigin::State, None) | (VolumeOrigin::RunTime, _) => {}
        }
        let mut definitions = lock(&self.definitions);
        let known = definitions.config.as_mut().and_then(|config| config.volumes.get_mut(name));
        if let Some(volume) = known {
            *volume = without_base(volume);
        }
        slot.redefine(without_base);
        Ok(())
    }

    /// Calls `copy` with each offset of a volume of `size` bytes; `copy` returns the bytes that it
    /// looked at. Returns early if a store fails. The future of a copy is dropped if the operation
    /// is cancelled.
    ///
    /// # Errors
    /// If the operation is cancelled, or the daemon stops.
    pub(super) async fn copy_all(
        &self,
        io: &Io,
        size: u64,
        operation: &LongOperation,
        copy: impl AsyncFn(u64) -> Result<u64, BlockError>,
    ) -> Result<Result<(), BlockError>, Refused> {
        let mut at = 0;
        while at < size {
            // A store may hang: a cancel does not wait for it.
            let is_cancelled = async {
                operation.cancelled().await;
                None
            };
            let copied = async { Some(self.unless_stopped(Box::pin(copy(at))).await) };
            let copied = futures_lite::future::or(is_cancelled, copied).await;
            match copied.ok_or_else(cancelled)?? {
                Ok(bytes) => at += bytes.max(1),
                Err(error) => return Ok(Err(error)),
            }
            operation.note_copied(at.min(size), size);
            io.yield_iteration().await;
        }
        Ok(Ok(()))
    }
}
