//! What a successor needs to resume a ring after this process was killed.
//!
//! Responses overwrite the slots of requests, and requests complete in any order: so the ring alone does
//! not show which requests have no response yet. The journal does. It is a small file in memory (tmpfs)
//! with one entry for each request that was consumed, written with plain stores:
//!
//! 1. a request is copied into a free entry, the entry is marked *running* with the request's number, and
//!    then `req_cons` is advanced in the journal;
//! 2. when the request has completed, its entry is marked *responding* with the number of its response,
//!    and only then is the response written to the ring, and some time later published;
//! 3. after that the entry is marked free.
//!
//! A process can be killed between any two of these stores (its earlier stores persist, in order):
//! - *running* with the number `req_cons`: the request was not consumed and is still in the ring;
//! - *responding* below the published number: the guest has the response;
//! - *responding* at or above it: the guest does not have the response.
//!
//! Requests that are *running*, or *responding* without a published response, are repeated. Repeating a
//! request before its response is harmless: until then its pages belong to the backend. Exactly
//! `req_cons - published` entries must remain; if not, journal and ring do not belong together, and the
//! ring is not resumed.
//!
//! [`RingIdentity`] keeps a journal from being used for another ring, another event channel or another
//! guest. [`Backing`] keeps requests from being carried out on another store under the volume's name, or
//! on one that is too small. The journal also keeps that a flush failed ([`Journal::note_broken`]): a
//! guest whose writes fail because of that must not see them succeed with a successor. And it keeps that
//! writes were acknowledged from memory ([`UnstableRecord`]): a kill loses them, and the guest
//! would take the successor's next flush as making them stable. Last, it keeps that the volume was
//! closed with all of them stable: a guest without that may have left some to the kernel.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::abi::{SLOT_WORDS, Slot};
use crate::shared_stores::{SharedStores, outlives_store};
use ebb_export::{Backing, BackingChange, RecordedBacking, UnstableRecord};
use ebb_guest_ring::{Mapping, Unmap, write_barrier};

const MAGIC: u32 = 0x6b62_6265;
/// The magic of journals that do not identify their store, as ebbd 0.1 and earlier wrote them.
const MAGIC_OLD: u32 = 0x6a62_6265;
const FORMAT: u32 = 2;
const HEADER: usize = 1024;
const ENTRY: usize = 128;
/// Offsets in the header.
const AT_MAGIC: usize = 0;
const AT_REQ_CONS: usize = 4;
const AT_FORMAT: usize = 8;
const AT_BROKEN: usize = 12;
const AT_SIZE: usize = 16;
const AT_DIGEST: usize = 24;
const AT_IDENTITY: usize = 32;
const AT_UNSTABLE: usize = 60;
/// Texts: their length, then as many bytes as there is room for.
const AT_VOLUME: usize = 64;
const AT_STORE: usize = 384;
/// The end of the texts; earlier versions have no more than a long text there.
const AT_NEXT: usize = HEADER - 8;
const AT_SETTLED: usize = AT_NEXT - 4;
const AT_END: usize = AT_SETTLED;
/// Offsets in an entry.
const AT_STATE: usize = 0;
const AT_NUMBER: usize = 4;
const AT_RESPONSE: usize = 8;
const AT_SLOT: usize = 16;

/// The value at [`AT_SETTLED`] of a settled volume: no part of a text.
const SETTLED: u32 = 0x7365_ff01;

const FREE: u32 = 0;
const RUNNING: u32 = 1;
const RESPONDING: u32 = 2;

/// The ring that a journal belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RingIdentity {
    /// The guest.
    pub guest: u32,
    /// Its device.
    pub device: u32,
    /// The queue of the device.
    pub queue: u32,
    /// The guest's event channel.
    pub port: u32,
    /// The first page of the ring.
    pub ring: u32,
    /// Slots of the ring.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u32,
}

impl RingIdentity {
    fn words(&self) -> [u32; 7] {
        let RingIdentity { guest, device, queue, port, ring, slots, slot_bytes } = *self;
        [guest, device, queue, port, ring, slots, slot_bytes]
    }
}

/// Why a ring cannot be taken over.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ResumeError {
    /// There is no journal of this ring.
    #[error("there is no journal of this ring: detach the disk and attach it again")]
    Foreign,
    /// The journal is of another format.
    #[error(
        "its journal was made by another version of ebbd and cannot be used while requests are in flight: \
                     start that version again until the guest is idle, or detach the disk and attach it again"
    )]
    Format,
    /// The journal is of another volume or store, or the volume is smaller than the size that the
    /// guest was given.
    #[error(
        "the guest cannot go on: {change}; {} and start again, or detach the disk and attach it again",
        .change.remedy()
    )]
    Backing {
        /// The difference.
        change: BackingChange,
    },
    /// The journal contradicts the ring.
    #[error(
        "the journal does not match the ring ({open} requests in flight, the ring has {expected}): \
                     detach the disk and attach it again"
    )]
    Contradiction {
        /// Requests without a response in the journal.
        open: u32,
        /// Requests without a response by the ring's indices.
        expected: u32,
    },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Journal {
    memory: SharedStores,
    slots: u32,
}

struct JournalFile(File);

impl Unmap for JournalFile {
    fn unmap(&self, base: NonNull<u8>, bytes: usize, _cookie: u64) {
        let _ = &self.0;
        // SAFETY: mapped by `map` below; the owner is being dropped, so there are no more accesses.
        let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), bytes) };
    }
}

fn map(file: File, bytes: usize) -> io::Result<SharedStores> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let base =
        unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) }?;
    let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: just mapped, page aligned, and accessed through the `Mapping` only.
    Ok(SharedStores(unsafe { Mapping::new(base, bytes, 0, Arc::new(JournalFile(file))) }))
}

fn bytes_for(slots: u32) -> usize {
    HEADER + ENTRY * usize::try_from(slots).unwrap_or_default()
}

fn word_pair(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

impl UnstableRecord for Journal {
    fn note_unstable(&self, unstable: bool) {
        self.memory.store(AT_UNSTABLE, unstable.into());
    }

    fn note_lost(&self) {
        self.note_broken();
    }

    fn note_settled(&self) {
        self.memory.store(AT_SETTLED, SETTLED);
    }

    fn note_backing(&self, backing: &Backing) {
        self.note_size(backing.size);
        self.note_layers(backing);
    }

    /// A kill in between leaves one of the two digests whole: a digest takes two stores.
    fn note_layers(&self, backing: &Backing) {
        let digest = backing.digest();
        if self.load_pair(AT_DIGEST) != digest {
            self.store_pair(AT_NEXT, digest);
            write_barrier();
            self.store_text(AT_VOLUME, AT_STORE, &backing.volume);
            self.store_text(AT_STORE, AT_END, &backing.store.to_string());
            write_barrier();
            self.store_pair(AT_DIGEST, digest);
            write_barrier();
        }
        self.store_pair(AT_NEXT, backing.next_digest());
    }
}

impl Journal {
    /// An empty journal in a file at `path`; without a path it ends with the process.
    ///
    /// # Errors
    /// Errors of the system.
    pub(crate) fn create(
        path: Option<&Path>,
        identity: &RingIdentity,
        backing: &Backing,
    ) -> io::Result<Journal> {
        let bytes = bytes_for(identity.slots);
        let file = match path {
            Some(path) => OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(path)?,
            None => {
                let flags = rustix::fs::MemfdFlags::CLOEXEC;
                File::from(rustix::fs::memfd_create("ebbd-journal", flags)?)
            }
        };
        file.set_len(bytes as u64)?;
        let memory = map(file, bytes)?;
        for (number, word) in identity.words().into_iter().enumerate() {
            memory.store(AT_IDENTITY + 4 * number, word);
        }
        let journal = Journal { memory, slots: identity.slots };
        journal.note_backing(backing);
        journal.memory.store(AT_FORMAT, FORMAT);
        write_barrier();
        journal.memory.store(AT_MAGIC, MAGIC);
        Ok(journal)
    }

    fn store_pair(&self, at: usize, value: u64) {
        let [low, high] = word_pair(value);
        self.memory.store(at, low);
        self.memory.store(at + 4, high);
    }

    fn load_pair(&self, at: usize) -> u64 {
        u64::from(self.memory.load(at)) | u64::from(self.memory.load(at + 4)) << 32
    }

    fn store_text(&self, at: usize, end: usize, text: &str) {
        let text = &text.as_bytes()[..text.len().min(end - at - 4)];
        self.memory.store(at, u32::try_from(text.len()).unwrap_or_default());
        let _ = self.memory.write(at + 4, text);
    }

    fn load_text(&self, at: usize, end: usize) -> String {
        let bytes = usize::try_from(self.memory.load(at)).unwrap_or(usize::MAX);
        let mut text = vec![0; bytes.min(end - at - 4)];
        let _ = self.memory.read(at + 4, &mut text);
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Records the size that the guest is given from now on.
    pub(crate) fn note_size(&self, size: u64) {
        self.store_pair(AT_SIZE, size);
    }

    /// Records that a flush failed: writes fail from now on, in this process and in a successor.
    pub(crate) fn note_broken(&self) {
        self.memory.store(AT_BROKEN, 1);
    }

    /// See [`Journal::note_broken`].
    pub(crate) fn is_broken(&self) -> bool {
        self.memory.load(AT_BROKEN) != 0
    }

    /// See [`UnstableRecord`].
    pub(crate) fn is_unstable(&self) -> bool {
        self.memory.load(AT_UNSTABLE) != 0
    }

    /// Returns true if all acknowledged writes were stable when the last daemon ended. New writes
    /// change that, so only the first call returns true.
    pub(crate) fn take_settled(&self) -> bool {
        let settled = self.memory.load(AT_SETTLED) == SETTLED;
        self.memory.store(AT_SETTLED, 0);
        settled
    }

    /// Opens the journal that a predecessor left at `path`.
    ///
    /// # Errors
    /// [`ResumeError::Foreign`] if there is none or it is of another ring; otherwise the reason why its
    /// requests cannot be carried out on `backing`.
    pub(crate) fn open(
        path: &Path,
        identity: &RingIdentity,
        backing: &Backing,
    ) -> Result<Journal, ResumeError> {
        let foreign = |_| ResumeError::Foreign;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .map_err(foreign)?;
        let (bytes, found) = (bytes_for(identity.slots), file.metadata().map_err(foreign)?.len());
        if found != bytes as u64 {
            let mut magic = [0; 4];
            let old =
                rustix::io::pread(&file, &mut magic, 0).is_ok() && magic == MAGIC_OLD.to_le_bytes();
            return Err(if old { ResumeError::Format } else { ResumeError::Foreign });
        }
        let memory = map(file, bytes).map_err(foreign)?;
        if memory.load(AT_MAGIC) != MAGIC {
            return Err(ResumeError::Foreign);
        }
        if memory.load(AT_FORMAT) != FORMAT {
            return Err(ResumeError::Format);
        }
        let mut words = identity.words().into_iter().enumerate();
        if !words.all(|(number, word)| memory.load(AT_IDENTITY + 4 * number) == word) {
            return Err(ResumeError::Foreign);
        }
        let journal = Journal { memory, slots: identity.slots };
        journal.compare(backing)?;
        Ok(journal)
    }

    /// Checks that its requests can be carried out on `backing`.
    fn compare(&self, backing: &Backing) -> Result<(), ResumeError> {
        let volume = self.load_text(AT_VOLUME, AT_STORE);
        let place = format!("volume `{volume}` on {}", self.load_text(AT_STORE, AT_END));
        let [digest, next, size] = [AT_DIGEST, AT_NEXT, AT_SIZE].map(|at| self.load_pair(at));
        let continues = backing.continues(&RecordedBacking { digest, next, size, place });
        continues.map_err(|change| ResumeError::Backing { change })
    }

    fn entry(number: u32) -> usize {
        HEADER + ENTRY * usize::try_from(number).unwrap_or_default()
    }

    /// Records that the request numbered `number` in the ring is consumed, at a free entry. `slot` has the
    /// words of the request that are in use.
    #[inline]
    pub(crate) fn take(&self, entry: u32, number: u32, slot: &[u64]) {
        let at = Self::entry(entry);
        let _ = self.memory.write_words(at + AT_SLOT, slot);
        self.memory.store(at + AT_NUMBER, number);
        write_barrier();
        self.memory.store(at + AT_STATE, RUNNING);
        write_barrier();
        self.memory.store(AT_REQ_CONS, number.wrapping_add(1));
    }

    /// The private copy of a consumed request. Words that it does not use are those of an earlier
    /// request.
    pub(crate) fn slot(&self, entry: u32) -> Slot {
        let mut slot = [0; SLOT_WORDS];
        let _ = self.memory.read_words(Self::entry(entry) + AT_SLOT, &mut slot);
        slot
    }

    /// Records that the response numbered `response` is about to be written.
    pub(crate) fn begin_response(&self, entry: u32, response: u32) {
        let at = Self::entry(entry);
        self.memory.store(at + AT_RESPONSE, response);
        write_barrier();
        self.memory.store(at + AT_STATE, RESPONDING);
        write_barrier();
    }

    /// Frees an entry whose response was published.
    pub(crate) fn free(&self, entry: u32) {
        self.memory.store(Self::entry(entry) + AT_STATE, FREE);
    }

    /// Begins with a new ring.
    pub(crate) fn reset(&self, req_cons: u32) {
        (0..self.slots).for_each(|entry| self.free(entry));
        self.memory.store(AT_REQ_CONS, req_cons);
    }

    /// What has to be resumed, if responses below `published` were published: the number of the next
    /// request to consume, and the entries to repeat, in the order in which they were consumed.
    ///
    /// # Errors
    /// [`ResumeError::Contradiction`] if ring and journal do not belong together.
    pub(crate) fn resume(&self, published: u32) -> Result<(u32, Vec<u32>), ResumeError> {
        let req_cons = self.memory.load(AT_REQ_CONS);
        let mut open = Vec::new();
        for entry in 0..self.slots {
            let at = Self::entry(entry);
            let number = self.memory.load(at + AT_NUMBER);
            let response = self.memory.load(at + AT_RESPONSE);
            let left = match self.memory.load(at + AT_STATE) {
                RUNNING => number != req_cons,
                RESPONDING => !is_before(response, published),
                _ => false,
            };
            if left {
                // It is repeated; the number of a response that was not published is reused.
                self.memory.store(at + AT_STATE, RUNNING);
                open.push((req_cons.wrapping_sub(number), entry));
            } else {
                self.free(entry);
            }
        }
        let expected = req_cons.wrapping_sub(published);
        if u32::try_from(open.len()) != Ok(expected) {
            let open = u32::try_from(open.len()).unwrap_or(u32::MAX);
            return Err(ResumeError::Contradiction { open, expected });
        }
        // The oldest first.
        open.sort_unstable_by(|a, b| b.cmp(a));
        Ok((req_cons, open.into_iter().map(|(_, entry)| entry).collect()))
    }
}

/// Records the size that the guest is given, in the journal at `path` that a ring of this process uses.
///
/// # Errors
/// Errors of the system.
pub(crate) fn note_size_at(path: &Path, size: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    if !outlives_store() {
        return Ok(());
    }
    rustix::io::pwrite(&file, &size.to_le_bytes(), AT_SIZE as u64)?;
    Ok(())
}

/// Whether one free-running index is before another.
fn is_before(a: u32, b: u32) -> bool {
    let ahead = b.wrapping_sub(a);
    ahead != 0 && ahead < 1 << 31
}

#[cfg(all(test, feature = "shm"))]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests;
