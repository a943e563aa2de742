//! The volume and store that a guest or client is attached to, which its export records where a
//! successor finds it.
//!
//! A peer that stays attached across a restart has requests in flight, and caches data, of one
//! store. A successor compares the record with the volume that it serves: if that is on another
//! store, nothing that the peer asked for is carried out. All exports compare with the same
//! function, [`Backing::continues`].
//!
//! While the layers of a volume are exchanged a kill leaves either the former ones or the next ones
//! on disk: both are recorded before. A peer that was away meanwhile is recognised by what the
//! volume's layers were since it was opened.

use ebb_volume::{Identity, Volume};

/// The volume, its store, and the size that the peer was told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backing {
    /// The volume's name.
    pub volume: String,
    /// Its store.
    pub store: Identity,
    /// Its size, bytes.
    pub size: u64,
    /// The key of its store after the exchange of layers that is under way.
    pub next: Option<String>,
    /// The keys that its store has had since it was opened.
    pub former: Vec<String>,
}

/// A [`Backing`] as a predecessor has recorded it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordedBacking {
    /// [`Backing::digest`].
    pub digest: u64,
    /// [`Backing::next_digest`].
    pub next: u64,
    /// The size that the peer was told, bytes.
    pub size: u64,
    /// Volume and store, for the operator.
    pub place: String,
}

/// Why a peer cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackingChange {
    /// The volume is on another store.
    #[error("it was attached to {before}; now the disk is {now}")]
    OtherStore {
        /// The former volume and store.
        before: String,
        /// The present ones.
        now: String,
    },
    /// The volume has lost its end.
    #[error("the volume has {now} bytes, but it was attached with {size}")]
    Smaller {
        /// The size that the peer was told, bytes.
        size: u64,
        /// The volume's size, bytes.
        now: u64,
    },
}

impl BackingChange {
    /// The remedy, as far as it is the operator's.
    #[must_use]
    pub const fn remedy(&self) -> &'static str {
        match self {
            BackingChange::OtherStore { .. } => "configure the former volume and store",
            BackingChange::Smaller { .. } => "restore the store's size",
        }
    }
}

impl Backing {
    /// The present one of a volume, to compare with a record.
    #[must_use]
    pub fn of(volume: &Volume) -> Backing {
        let layers = volume.layers();
        // The next one first: an exchange that ends now makes it the present one.
        let next = layers.next_identity();
        Backing {
            volume: volume.name().to_string(),
            store: volume.store_identity(),
            size: volume.size(),
            next,
            former: layers.former_identities(),
        }
    }

    /// As [`Backing::of`], to be recorded: if this daemon is killed while the volume shrinks, a
    /// successor finds either size.
    #[must_use]
    pub fn to_record(volume: &Volume) -> Backing {
        // The size that the volume has in any case: a peer may be attached while it is being shrunk.
        Backing { size: volume.least_size(), ..Backing::of(volume) }
    }

    /// A digest (FNV-1a) of what must not change. It need not resist attacks: the operator chooses
    /// all of it.
    #[must_use]
    pub fn digest(&self) -> u64 {
        digest(&self.volume, &self.store.key)
    }

    /// As [`Backing::digest`], after the exchange of layers that is under way; 0: there is none.
    #[must_use]
    pub fn next_digest(&self) -> u64 {
        self.next.as_ref().map_or(0, |next| digest(&self.volume, next))
    }

    /// Volume and store, for the operator.
    #[must_use]
    pub fn place(&self) -> String {
        format!("volume `{}` on {}", self.volume, self.store)
    }

    /// The record of it.
    #[must_use]
    pub fn recorded(&self) -> RecordedBacking {
        let (digest, next) = (self.digest(), self.next_digest());
        RecordedBacking { digest, next, size: self.size, place: self.place() }
    }

    /// Checks that a peer that was attached to `before` may go on with this volume.
    ///
    /// # Errors
    /// [`BackingChange`].
    pub fn continues(&self, before: &RecordedBacking) -> Result<(), BackingChange> {
        let keys = std::iter::once(&self.store.key).chain(&self.former);
        let mut own = keys.map(|key| digest(&self.volume, key));
        if !own.any(|own| own == before.digest || (before.next != 0 && own == before.next)) {
            let (before, now) = (before.place.clone(), self.place());
            return Err(BackingChange::OtherStore { before, now });
        }
        if before.size > self.size {
            return Err(BackingChange::Smaller { size: before.size, now: self.size });
        }
        Ok(())
    }
}

fn digest(volume: &str, key: &str) -> u64 {
    let bytes = volume.bytes().chain([0]).chain(key.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backing(volume: &str, key: &str, size: u64) -> Backing {
        let store = Identity::of_key(key.to_owned());
        Backing { volume: volume.to_owned(), store, size, ..Backing::default() }
    }

    #[test]
    fn only_the_same_store_with_at_least_the_same_size_continues() {
        let before = backing("a", "file 1", 8).recorded();
        assert_eq!(backing("a", "file 1", 8).continues(&before), Ok(()));
        assert_eq!(backing("a", "file 1", 9).continues(&before), Ok(()));
        let smaller = backing("a", "file 1", 7).continues(&before);
        assert_eq!(smaller, Err(BackingChange::Smaller { size: 8, now: 7 }));
        for other in [backing("a", "file 2", 8), backing("b", "file 1", 8), backing("", "a\0", 8)] {
            let change = other.continues(&before).unwrap_err();
            assert!(matches!(&change, BackingChange::OtherStore { .. }), "{change}");
            assert!(change.to_string().contains("volume `a` on file 1"), "{change}");
        }
    }

    /// A kill leaves either layers; a peer that was away may know earlier ones.
    #[test]
    fn exchanged_layers_continue_and_no_others() {
        let under_way = Backing { next: Some("b above a".into()), ..backing("v", "a", 8) };
        let record = under_way.recorded();
        for (key, continues) in [("a", true), ("b above a", true), ("c above a", false)] {
            assert_eq!(backing("v", key, 8).continues(&record).is_ok(), continues, "{key}");
        }
        assert!(backing("w", "b above a", 8).continues(&record).is_err());
        let former = vec!["b above a".to_owned()];
        let later = Backing { former, ..backing("v", "c above b above a", 8) };
        assert_eq!(later.continues(&record), Ok(()));
        assert_eq!(later.continues(&backing("v", "b above a", 8).recorded()), Ok(()));
        assert!(later.continues(&backing("v", "a", 8).recorded()).is_err());
        // What is only expected is no store of its own.
        assert!(under_way.continues(&backing("v", "b above a", 8).recorded()).is_err());
    }
}
