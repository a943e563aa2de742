//! [`LuksError`]: why an encrypted volume cannot be used.

use std::borrow::Cow;
use std::io;

use ebb_advice::Advice;

/// Why an encrypted volume cannot be opened or changed. No message has anything of a key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LuksError {
    /// There is no header.
    #[error("it has no LUKS header")]
    NotLuks,
    /// LUKS1.
    #[error("its header is LUKS1, which ebbd does not read")]
    Luks1,
    /// The store is shorter than its header.
    #[error("its LUKS header is cut off: the store has {size} bytes, and needs {needed}")]
    Cut {
        /// Bytes of the store.
        size: u64,
        /// Where its data begins, or ends if the header says so.
        needed: u64,
    },
    /// Both copies of the header are damaged.
    #[error("both copies of its LUKS header are damaged ({primary}; {secondary})")]
    Damaged {
        /// What is wrong with the first.
        primary: &'static str,
        /// What is wrong with the second.
        secondary: &'static str,
    },
    /// A change while one copy is damaged.
    #[error("one copy of its LUKS header is damaged ({0})")]
    OneCopy(&'static str),
    /// The header describes what this version cannot do.
    #[error("its LUKS header has {what}")]
    Unsupported {
        /// What it has.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// The metadata break the rules of the format.
    #[error("its LUKS header is valid by its checksum, and wrong: {0}")]
    Metadata(&'static str),
    /// No key slot is opened by the key.
    #[error("the key opens none of its {tried} key slots")]
    WrongKey {
        /// Slots that were tried.
        tried: usize,
        /// Why others were not.
        skipped: Skipped,
    },
    /// The header has no key slot that can be opened.
    #[error("it has no key slot that ebbd can open")]
    NoSlot(Skipped),
    /// No such slot.
    #[error("it has no key slot {0}")]
    NoSuchSlot(u32),
    /// The last key.
    #[error("key slot {0} is the last one, without which the data is lost")]
    LastSlot(u32),
    /// The configured key opens no other slot.
    #[error(
        "key slot {0} is the only one that the configured key opens, so that the volume could not be \
         opened again"
    )]
    SlotInUse(u32),
    /// A header with another key than that of the open volume.
    #[error("it has the LUKS header of another volume: it was replaced while the volume was open")]
    OtherVolume,
    /// No free slot.
    #[error("all of its key slots or their areas are in use")]
    Full,
    /// A key of no bytes.
    #[error("the key is empty")]
    EmptyKey,
    /// A key that is too long.
    #[error("the key is longer than {KEY_BYTES_MAX} bytes")]
    LongKey,
    /// A store that is too small.
    #[error("it has {0} bytes, and the LUKS header alone takes 16 MiB")]
    TooSmall(u64),
    /// Memory cannot be locked.
    #[error("cannot lock memory for keys")]
    Locked(#[source] io::Error),
    /// Memory for Argon2.
    #[error("cannot allocate {mib} MiB to derive a key")]
    Memory {
        /// How much.
        mib: u64,
        /// Why.
        source: io::Error,
    },
    /// The control group has too little memory for Argon2.
    #[error("deriving a key takes {mib} MiB of memory, and the control group leaves {left} MiB")]
    NoRoom {
        /// MiB that the derivation takes.
        mib: u64,
        /// MiB that the control group leaves.
        left: u64,
        /// MiB by which the setting has to be raised.
        more: u64,
        /// The setting of the service with the limit.
        setting: &'static str,
    },
    /// OpenSSL was in use before its memory was prepared for keys.
    #[error("OpenSSL was used before its memory was prepared for keys")]
    Late,
    /// A library has failed.
    #[error("{0} has failed, which it does only without memory")]
    Library(&'static str),
    /// The store has failed.
    #[error("cannot read or write its LUKS header")]
    Io(#[from] io::Error),
}

impl Advice for LuksError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            LuksError::NotLuks => {
                "correct the path; to make a new encrypted volume, name a file that does not exist, \
                 and set `create` and `size`"
            }
            LuksError::Luks1 => "convert it with `cryptsetup convert --type luks2`",
            LuksError::Cut { .. } => {
                "restore the store from a backup; if it is a detached header, open the volume with \
                 `cryptsetup open --header`, and serve the device"
            }
            LuksError::Damaged { .. } => {
                "restore them with `cryptsetup luksHeaderRestore` from a backup; without one the data \
                 is lost"
            }
            LuksError::OneCopy(_) => "repair it with `cryptsetup repair`, then change keys",
            LuksError::Unsupported { remedy, .. } => remedy,
            LuksError::Metadata(_) => {
                "restore it with `cryptsetup luksHeaderRestore` from a backup"
            }
            LuksError::WrongKey { skipped, .. } if *skipped == Skipped::default() => {
                "give the right key"
            }
            LuksError::WrongKey { skipped, .. } => {
                return Some(format!("give the right key; {skipped}").into());
            }
            LuksError::NoSlot(skipped) if *skipped == Skipped::default() => {
                "restore its header with `cryptsetup luksHeaderRestore` from a backup"
            }
            LuksError::NoSlot(skipped) => return Some(skipped.to_string().into()),
            LuksError::NoSuchSlot(_) => {
                "list those that it has, with `ebbd volume key list`, or `ebbd image key list` if it \
                 is not open"
            }
            LuksError::LastSlot(_) => {
                "add another key first, with `ebbd volume key add`, or `ebbd image key add` if it is \
                 not open"
            }
            LuksError::SlotInUse(_) => {
                "name the key of another slot first, in `encryption` or, for a volume that was added, \
                 with `ebbd volume key use` (`ebbd volume key add` adds one); or remove it with --force"
            }
            LuksError::OtherVolume => {
                "restore the header of before with `cryptsetup luksHeaderRestore`"
            }
            LuksError::Full => "remove a key first",
            LuksError::EmptyKey => "give a key of at least one byte",
            LuksError::LongKey => "give a shorter one",
            LuksError::TooSmall(_) => "make it larger",
            LuksError::Locked(_) => "raise LimitMEMLOCK of the service, or `ulimit -l`",
            LuksError::Memory { .. } => {
                "free memory, or give the key slot a smaller cost with `cryptsetup luksConvertKey \
                 --pbkdf-memory`"
            }
            LuksError::NoRoom { setting, more, .. } => {
                let remedy = format!(
                    "raise {setting} by {more}M or more, or give the key slot a smaller cost with \
                     `cryptsetup luksConvertKey --pbkdf-memory`"
                );
                return Some(remedy.into());
            }
            LuksError::Late => "this is a mistake of ebbd; report it",
            LuksError::Library(_) => "free memory and try again",
            LuksError::Io(_) => return None,
        }
        .into())
    }
}

impl LuksError {
    /// A header without data behind it.
    pub(crate) const DETACHED: LuksError = LuksError::Unsupported {
        what: "no data behind it, as a detached header, whose data is in another file",
        remedy: "open the volume with `cryptsetup open --header`, and serve the device",
    };
}

/// The longest key. `cryptsetup` takes up to 8 MiB from a key file.
pub const KEY_BYTES_MAX: usize = 512 << 10;

/// Why a key slot cannot be opened, whatever the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// Its cost is beyond the limits.
    Costly,
    /// It holds another key than the volume's.
    Unbound,
    /// The volume's key has a size that ebbd does not use.
    KeySize,
    /// It has an unknown cipher, hash or kind.
    Unknown,
}

impl Unusable {
    /// All reasons.
    const ALL: [Unusable; 4] =
        [Unusable::Costly, Unusable::Unbound, Unusable::KeySize, Unusable::Unknown];

    /// Returns the reason, after "because".
    pub fn reason(self) -> &'static str {
        match self {
            Unusable::Costly => "it takes more than 1 GiB of memory or minutes of processor time",
            Unusable::Unbound => "it holds another key than the volume's",
            Unusable::KeySize => "the volume's key has neither 256 nor 512 bits",
            Unusable::Unknown => "its cipher, hash or key derivation is unknown",
        }
    }

    /// Returns the remedy.
    pub fn remedy(self) -> &'static str {
        match self {
            Unusable::Costly => {
                "convert it with `cryptsetup luksConvertKey --pbkdf argon2id --pbkdf-memory 65536 \
                 --pbkdf-force-iterations 4`"
            }
            Unusable::Unbound => "use another key slot",
            Unusable::KeySize => {
                "give the volume another key with `cryptsetup reencrypt --key-size 512`"
            }
            Unusable::Unknown => {
                "convert it with `cryptsetup luksConvertKey --pbkdf argon2id --hash sha256 \
                 --keyslot-cipher aes-xts-plain64 --keyslot-key-size 512`"
            }
        }
    }
}

/// How many slots were passed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped([usize; Unusable::ALL.len()]);

impl Skipped {
    pub(crate) fn count(&mut self, why: Unusable) {
        for (count, reason) in self.0.iter_mut().zip(Unusable::ALL) {
            *count += usize::from(reason == why);
        }
    }
}

impl std::fmt::Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut separator = "";
        for (count, why) in self.0.into_iter().zip(Unusable::ALL).filter(|(count, _)| *count > 0) {
            let (reason, remedy) = (why.reason(), why.remedy());
            write!(f, "{separator}{count} passed over, because {reason}: {remedy}")?;
            separator = "; ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_named_as_passed_over_only_if_some_were() {
        let remedy = |error: LuksError| error.remedy().unwrap_or_default().into_owned();
        let mut skipped = Skipped::default();
        assert_eq!(remedy(LuksError::WrongKey { tried: 1, skipped }), "give the right key");
        assert!(remedy(LuksError::NoSlot(skipped)).starts_with("restore its header"));
        skipped.count(Unusable::Unbound);
        let text = remedy(LuksError::WrongKey { tried: 1, skipped });
        assert!(text.starts_with("give the right key; 1 passed over, because"), "{text}");
        assert!(remedy(LuksError::NoSlot(skipped)).starts_with("1 passed over"));
    }
}
