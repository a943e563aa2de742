//! Encryption of volumes in the format LUKS2, that of `cryptsetup` and dm-crypt.
//!
//! A volume begins with a header: two copies of metadata, each with a checksum and a number that grows, and the areas of
//! key slots. Each slot holds the key of the volume, encrypted with a key that is derived from a passphrase or key file.
//! Behind the header are the sectors, encrypted with AES-256-XTS. The crate reads, makes and changes headers
//! ([`LuksHeader`]), and encrypts sectors ([`SectorCipher`]). It does no I/O of its own: its users give it an [`HeaderArea`].
//!
//! # Invariants
//! - A header may be made by an attacker. Whatever it holds, reading it takes bounded memory and time, and nothing
//!   panics; a key slot of more than 1 GiB or minutes of processor time is passed over.
//! - A header with a checksum that is right and content that is wrong is refused as a whole.
//! - Keys are in memory that is locked, in no core, and wiped when it is freed ([`Secret`]); those in contexts of OpenSSL,
//!   too (`openssl_memory.rs`). They are in no error and no `Debug`.
//! - A change of the header writes one copy after the other, each stable before the next is touched.

mod binary;
mod cipher;
mod error;
mod header;
mod kdf;
mod metadata;
mod openssl_memory;
mod remembered;
mod secret;
mod split;

pub use binary::Magic;
pub use cipher::{KEY_BYTES, SectorCipher};
pub use error::{KEY_BYTES_MAX, LuksError, Skipped, Unusable};
pub use header::{DATA_OFFSET, HeaderArea, LuksHeader, NEW_SECTOR};
pub use kdf::{KeyRoom, limit_memory};
pub use metadata::{DataSegment, KeySlot};
pub use openssl_memory::prepare;
pub use remembered::RememberedKeys;
pub use secret::Secret;
