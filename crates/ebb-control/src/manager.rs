//! The interface to the part of the daemon that changes volumes: it begins operations, and knows them.

use std::sync::Arc;

use ebb_api::{
    AddVolumeBody, ChangeVolumeBody, ConfigChange, ErrorBody, KeyBody, KeySlotsView, OperationView,
    Refusal, ResizeBody, SnapshotBody, TakeoverBody, VolumeView,
};
use ebb_volume::Stop;

/// A change of volumes.
#[derive(Clone, Debug)]
pub enum VolumeChange {
    /// Adds a volume.
    Add(AddVolumeBody),
    /// Removes a volume.
    Remove(String),
    /// Renames a volume.
    Rename(String, String),
    /// Makes a snapshot of a volume.
    Snapshot(String, SnapshotBody),
    /// Copies what is below an overlay into it.
    Flatten(String),
    /// Keeps a volume that was added at run time for the next start.
    Persist(String),
    /// Write what an overlay holds into its base.
    Commit(String),
    /// Delete a snapshot of a volume.
    DeleteSnapshot(String, String),
    /// Resizes a volume.
    Resize(String, ResizeBody),
    /// Changes who may open a volume.
    Change(String, ChangeVolumeBody),
    /// Adds a key slot to an encrypted volume.
    AddKey(String, KeyBody),
    /// Removes the key slot of this number from an encrypted volume; if it is true, also the only
    /// one that the configured key opens.
    RemoveKey(String, u32, bool),
    /// Names the key that an encrypted volume that was added at run time is opened with.
    UseKey(String, KeyBody),
    /// Checks that limits of a volume could be kept.
    CheckLimits(String),
    /// Checks that limits of a group could be kept.
    CheckGroupLimits,
    /// Keeps the limits of a volume.
    KeepLimits(String),
    /// Forgets the limits of a volume that were kept.
    ForgetLimits(String),
    /// Keeps the limits of a group.
    KeepGroupLimits(String),
    /// Forgets the limits of a group that were kept.
    ForgetGroupLimits(String),
    /// Flushes a volume.
    Flush(String),
    /// Flushes all volumes.
    FlushAll,
    /// Reads the configuration again.
    Reload,
    /// Hands over to a successor, and exits.
    Takeover(TakeoverBody),
}

/// An operation that has begun.
#[derive(Clone, Debug)]
pub struct BegunOperation {
    /// Its number.
    pub id: u64,
    /// Sent when it has ended.
    pub ended: Arc<Stop>,
}

/// A request that is refused, or has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}; {}", body.message, body.remedy)]
pub struct Refused {
    /// Why, for the caller's next step.
    pub refusal: Refusal,
    /// What is wrong, and a remedy.
    pub body: ErrorBody,
}

impl Refused {
    /// One with this kind, for programs, and a message and a remedy for people.
    pub fn new(
        refusal: Refusal,
        error: &str,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Refused {
        let (error, message, remedy) = (error.to_owned(), message.into(), remedy.into());
        Refused { refusal, body: ErrorBody { error, message, remedy } }
    }

    /// The status of HTTP.
    pub fn status(&self) -> u16 {
        match self.refusal {
            Refusal::Unknown => 404,
            Refusal::Conflict => 409,
            Refusal::Invalid => 422,
            Refusal::Failed => 500,
            Refusal::Busy => 503,
            Refusal::NoMemory => 507,
        }
    }
}

/// Changes volumes. No method blocks, except [`VolumeManager::key_slots`].
pub trait VolumeManager: Send + Sync {
    /// Begins a change that `by` requests: `uid:0`, `token:NAME`, or empty.
    ///
    /// # Errors
    /// A mistake in the request, or too many operations.
    fn begin(&self, change: VolumeChange, by: &str) -> Result<BegunOperation, Refused>;

    /// A volume, if there is one of this name.
    fn volume(&self, name: &str) -> Option<VolumeView>;

    /// The key slots of an encrypted volume. Blocks: it reads the header.
    ///
    /// # Errors
    /// If there is no such volume, it is not served or not encrypted, or its header cannot be read.
    fn key_slots(&self, name: &str) -> Result<KeySlotsView, Refused>;

    /// All operations, in order.
    fn operations(&self) -> Vec<OperationView>;

    /// An operation, and the status if it has failed.
    fn operation(&self, id: u64) -> Option<(OperationView, u16)>;

    /// Cancels an operation.
    ///
    /// # Errors
    /// If there is no such operation, or it has ended, or it cannot be cancelled.
    fn cancel(&self, id: u64) -> Result<OperationView, Refused>;
}

/// The configuration of the daemon.
pub trait ConfigSource: Send + Sync {
    /// The configuration in force, as the text of a file.
    fn text(&self) -> String;

    /// The keys whose value the state directory has instead of the configuration file.
    fn kept_keys(&self) -> Vec<String>;

    /// What a reload would change. Blocks: it reads the file.
    ///
    /// # Errors
    /// The mistakes of the file.
    fn changes(&self) -> Result<Vec<ConfigChange>, Refused>;
}
