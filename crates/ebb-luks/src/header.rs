//! [`LuksHeader`]: opens, makes and changes the header of an encrypted volume.

use std::io;

use crate::binary::{BINARY_BYTES, BinaryHeader, Copy, Magic, SIZES};
use crate::cipher::{KEY_BYTES, SectorCipher};
use crate::error::{KEY_BYTES_MAX, LuksError, Skipped, Unusable};
use crate::kdf::{Hash, Kdf};
use crate::metadata::{DataSegment, Digest, KeySlot, Metadata, SLOTS_MAX, Usable};
use crate::remembered;
use crate::secret::{Secret, random, scrub_stack};
use crate::split::{Merge, Split};

/// Where the data of a new volume begins, as with `cryptsetup`.
pub const DATA_OFFSET: u64 = 16 << 20;
/// Bytes of a copy of a new header.
const NEW_SIZE: u64 = 16 << 10;
/// Bytes of a sector of a new volume.
pub const NEW_SECTOR: u32 = 4096;
const STRIPES: usize = 4000;
/// Bytes of the area of a key slot: its stripes, and up to a multiple of 4 KiB.
const SLOT_BYTES: u64 = 258_048;
/// Bytes of key material that are held at once.
const PIECE: usize = 4096;
/// The most cost of all slots that are tried: see [`Kdf::cost`]. About two minutes of processor time.
const COST_MAX: u64 = 64 << 20;
/// Iterations for the digest of a key that is random: `cryptsetup` makes as many at least.
const DIGEST_ITERATIONS: u32 = 1000;

/// A store as the header sees it. Each call may block.
pub trait HeaderArea {
    /// Its size in bytes.
    fn size(&self) -> u64;
    /// Fills the buffer.
    ///
    /// # Errors
    /// Those of the store; also if it ends before.
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// Writes the bytes.
    ///
    /// # Errors
    /// Those of the store.
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes stable what was written.
    ///
    /// # Errors
    /// Those of the store.
    fn sync(&mut self) -> io::Result<()>;
}

/// The header of an encrypted volume.
#[derive(Clone, Debug)]
pub struct LuksHeader {
    binary: BinaryHeader,
    metadata: Metadata,
    /// Why the other copy is not used.
    other: Option<&'static str>,
    /// The copy that is valid and of before: a change was interrupted.
    stale: Option<Copy>,
    /// The copy that may be torn on the disk, although it was read as valid: after a sync that failed, the page cache has
    /// what was written and the disk may have part of it.
    unsure: Copy,
}

/// One copy, which is valid by its checksum.
struct Valid {
    binary: BinaryHeader,
    metadata: Vec<u8>,
}

fn load_copy(
    area: &mut impl HeaderArea,
    copy: Copy,
    offset: u64,
) -> Result<Result<Valid, &'static str>, LuksError> {
    if offset + BINARY_BYTES as u64 > area.size() {
        return Ok(Err("cut off"));
    }
    let mut bytes = vec![0; BINARY_BYTES];
    area.read(offset, &mut bytes)?;
    let binary = match BinaryHeader::parse(&bytes, copy, offset) {
        Ok(binary) => binary,
        Err(what) => return Ok(Err(what)),
    };
    if offset + binary.size > area.size() {
        return Ok(Err("cut off"));
    }
    let length = usize::try_from(binary.size).unwrap_or(0).saturating_sub(BINARY_BYTES);
    let mut metadata = vec![0; length];
    area.read(offset + BINARY_BYTES as u64, &mut metadata)?;
    Ok(binary.verify(&metadata).map(|()| Valid { binary, metadata }))
}

impl LuksHeader {
    /// Reads the header: the newer of its two copies that is valid.
    ///
    /// # Errors
    /// [`LuksError`], each with a remedy.
    pub fn load(area: &mut impl HeaderArea) -> Result<LuksHeader, LuksError> {
        crate::prepare()?;
        let mut start = [0; 8];
        if area.size() >= 512 {
            area.read(0, &mut start)?;
        }
        if Magic::of(&start) == Magic::Luks1 {
            return Err(LuksError::Luks1);
        }
        let primary = load_copy(area, Copy::Primary, 0)?;
        // Where the second copy is, the first says if it is valid.
        let mut secondary = Err("no magic number");
        match &primary {
            Ok(first) => secondary = load_copy(area, Copy::Secondary, first.binary.size)?,
            Err(_) => {
                for at in SIZES {
                    let found = load_copy(area, Copy::Secondary, at)?;
                    // The most telling reason is kept.
                    if secondary.is_err() && !matches!(found, Err("no magic number" | "cut off")) {
                        secondary = found;
                    }
                }
            }
        }
        let (valid, other, stale) = match (primary, secondary) {
            (Ok(first), Ok(second)) if second.binary.sequence > first.binary.sequence => {
                (second, None, Some(Copy::Primary))
            }
            (Ok(first), Ok(second)) => {
                let equal = second.binary.sequence == first.binary.sequence
                    && second.metadata == first.metadata;
                (first, None, (!equal).then_some(Copy::Secondary))
            }
            (Ok(first), Err(what)) => (first, Some(what), None),
            (Err(what), Ok(second)) => (second, Some(what), None),
            (Err(_), Err("no magic number")) if Magic::of(&start) == Magic::Other => {
                return Err(LuksError::NotLuks);
            }
            (Err(primary), Err(secondary)) => {
                return Err(LuksError::Damaged { primary, secondary });
            }
        };
        let metadata = Metadata::parse(&valid.metadata, valid.binary.size)?;
        let needed = metadata.segment.offset;
        let end = needed.saturating_add(metadata.segment.length.unwrap_or(0));
        if needed == area.size() {
            return Err(LuksError::DETACHED);
        }
        if end > area.size() {
            return Err(LuksError::Cut { size: area.size(), needed: end });
        }
        // Copies are written one after the other, the first one first.
        let unsure = match stale {
            Some(Copy::Secondary) => Copy::Primary,
            Some(Copy::Primary) | None => Copy::Secondary,
        };
        Ok(LuksHeader { binary: valid.binary, metadata, other, stale, unsure })
    }

    /// Makes the header of a new volume with one key slot, and writes it. What is in the first 16 MiB is lost. If that fails,
    /// what was written is overwritten with zeroes: the page cache might show a header that the disk has a part of.
    ///
    /// # Errors
    /// [`LuksError`], each with a remedy.
    pub fn format(
        area: &mut impl HeaderArea,
        passphrase: &[u8],
    ) -> Result<(LuksHeader, Secret), LuksError> {
        crate::prepare()?;
        check_passphrase(passphrase)?;
        if area.size() < DATA_OFFSET + u64::from(NEW_SECTOR) {
            return Err(LuksError::TooSmall(area.size()));
        }
        let key = Secret::random(KEY_BYTES)?;
        let mut salts = [0; 64];
        random(&mut salts)?;
        let kdf = Kdf::Pbkdf2 {
            hash: Hash::Sha256,
            iterations: DIGEST_ITERATIONS,
            salt: salts[..32].to_vec(),
        };
        let digest = kdf.derive(&key, 32)?.to_vec();
        let digest = Digest { name: "0".to_owned(), kdf, digest };
        let segment =
            DataSegment { offset: DATA_OFFSET, length: None, sector: NEW_SECTOR, first: 0 };
        let metadata = Metadata::new(NEW_SIZE, &segment, &digest)?;
        random(&mut salts)?;
        let binary = BinaryHeader::new(NEW_SIZE, &uuid()?, &salts);
        let mut header =
            LuksHeader { binary, metadata, other: None, stale: None, unsure: Copy::Secondary };
        if let Err(error) = header.add_slot(area, &key, passphrase) {
            header.wipe(area);
            return Err(error);
        }
        Ok((header, key))
    }

    /// Where the data is.
    pub fn segment(&self) -> &DataSegment {
        &self.metadata.segment
    }

    /// Its key slots.
    pub fn slots(&self) -> &[KeySlot] {
        &self.metadata.slots
    }

    /// Its UUID.
    pub fn uuid(&self) -> String {
        self.binary.uuid()
    }

    /// Its number, which grows with each change.
    pub fn sequence(&self) -> u64 {
        self.binary.sequence
    }

    /// A warning, if one of the two copies is damaged.
    pub fn warning(&self) -> Option<String> {
        self.other.map(|what| {
            format!(
                "one of the two copies of its LUKS header is damaged ({what}), the other is used: repair it with \
                 `cryptsetup repair`"
            )
        })
    }

    /// Finds the key of the volume by a passphrase, and the number of the slot that it opens.
    ///
    /// # Errors
    /// [`LuksError::WrongKey`], and others with remedies.
    pub fn unlock(
        &self,
        area: &mut impl HeaderArea,
        passphrase: &[u8],
    ) -> Result<(u32, Secret), LuksError> {
        self.unlock_one_of(&self.metadata.slots, area, passphrase)
    }

    /// As [`LuksHeader::unlock`], which has found slot `number`: tries only the slots that it has not
    /// tried.
    ///
    /// # Errors
    /// As [`LuksHeader::unlock`].
    pub fn unlock_behind(
        &self,
        number: u32,
        area: &mut impl HeaderArea,
        passphrase: &[u8],
    ) -> Result<(u32, Secret), LuksError> {
        let slots = &self.metadata.slots;
        let tried = slots.iter().position(|slot| slot.number == number);
        let untried = tried.and_then(|tried| slots.get(tried + 1..)).unwrap_or_default();
        self.unlock_one_of(untried, area, passphrase)
    }

    fn unlock_one_of(
        &self,
        slots: &[KeySlot],
        area: &mut impl HeaderArea,
        passphrase: &[u8],
    ) -> Result<(u32, Secret), LuksError> {
        check_passphrase(passphrase)?;
        let (mut tried, mut skipped, mut cost) = (0, Skipped::default(), 0_u64);
        let mut no_room = None;
        for slot in slots.iter().filter(|slot| !slot.ignored) {
            match &slot.usable {
                // The header may be made by an attacker: it has as many slots as it says.
                Ok(usable) if cost.saturating_add(usable.kdf.cost()) > COST_MAX => {
                    skipped.count(Unusable::Costly);
                }
                Ok(usable) => {
                    tried += 1;
                    cost = cost.saturating_add(usable.kdf.cost());
                    match self.open_slot(area, usable, passphrase) {
                        Ok(Some(key)) => return Ok((slot.number, key)),
                        Ok(None) => {}
                        // Another slot may take less.
                        Err(error @ LuksError::NoRoom { .. }) => no_room = Some(error),
                        Err(error) => return Err(error),
                    }
                }
                Err(why) => skipped.count(*why),
            }
        }
        match (no_room, tried) {
            (Some(error), _) => Err(error),
            (None, 0) => Err(LuksError::NoSlot(skipped)),
            (None, tried) => Err(LuksError::WrongKey { tried, skipped }),
        }
    }

    /// The key in a slot, if the passphrase is that of the slot.
    fn open_slot(
        &self,
        area: &mut impl HeaderArea,
        slot: &Usable,
        passphrase: &[u8],
    ) -> Result<Option<Secret>, LuksError> {
        let key_bytes = slot.key_bytes;
        let cipher = remembered::derive(&slot.kdf, passphrase, slot.area_key_bytes)?;
        let cipher = SectorCipher::new(cipher, 512, 0)?;
        let mut merge = Some(Merge::new(slot.hash, key_bytes)?);
        let mut piece = Secret::zeroed(PIECE)?;
        let (mut left, mut at) = (slot.stripes, 0);
        let mut key = None;
        while left > 0 {
            // Of whole sectors; the last one may be used in part.
            let bytes = PIECE.min((left * key_bytes).next_multiple_of(512));
            area.read(slot.area.start + at, &mut piece[..bytes])?;
            cipher.decrypt_in_place(at, &mut piece[..bytes])?;
            for stripe in piece[..bytes].chunks_exact(key_bytes).take(left.min(PIECE / key_bytes)) {
                left -= 1;
                if left > 0 {
                    merge.iter_mut().for_each(|merge| merge.add(stripe));
                } else {
                    key = merge.take().map(|merge| merge.end(stripe));
                }
            }
            at += bytes as u64;
        }
        let Some(key) = key else { return Ok(None) };
        Ok(self.is_key(&key)?.then_some(key))
    }

    /// Whether this is the key of the volume. Takes up to a second of processor time.
    ///
    /// # Errors
    /// [`LuksError`]: there is no memory.
    pub fn is_key(&self, key: &[u8]) -> Result<bool, LuksError> {
        let digest = &self.metadata.digest;
        let found = remembered::derive(&digest.kdf, key, digest.digest.len())?;
        scrub_stack();
        Ok(openssl::memcmp::eq(&found, &digest.digest))
    }

    /// Adds a key slot for a passphrase, and returns its number.
    ///
    /// # Errors
    /// [`LuksError`], each with a remedy. The header is unchanged unless it could not be written.
    pub fn add_key(
        &mut self,
        area: &mut impl HeaderArea,
        key: &Secret,
        passphrase: &[u8],
    ) -> Result<u32, LuksError> {
        check_passphrase(passphrase)?;
        self.make_copies_equal(area)?;
        self.add_slot(area, key, passphrase)
    }

    /// Writes the key material, and then the header that has its slot.
    fn add_slot(
        &mut self,
        area: &mut impl HeaderArea,
        key: &Secret,
        passphrase: &[u8],
    ) -> Result<u32, LuksError> {
        let used = |number| self.metadata.slots.iter().any(|slot| slot.number == number);
        let number = (0..SLOTS_MAX).find(|number| !used(*number)).ok_or(LuksError::Full)?;
        let start = self.free_area().ok_or(LuksError::Full)?;
        let slot = Usable {
            area: start..start + SLOT_BYTES,
            kdf: Kdf::new()?,
            hash: Hash::Sha256,
            stripes: STRIPES,
            key_bytes: key.len(),
            area_key_bytes: KEY_BYTES,
        };
        let metadata = self.metadata.with_slot(number, &slot, self.binary.size)?;
        let key_bytes = slot.key_bytes;
        let cipher = SectorCipher::new(slot.kdf.derive(passphrase, KEY_BYTES)?, 512, 0)?;
        let mut split = Split::new(slot.hash, key, STRIPES)?;
        let mut piece = Secret::zeroed(PIECE)?;
        let (mut left, mut at) = (STRIPES, 0);
        while left > 0 {
            let stripes = left.min(PIECE / key_bytes);
            let bytes = (stripes * key_bytes).next_multiple_of(512);
            for stripe in piece.chunks_exact_mut(key_bytes).take(stripes) {
                split.next(stripe)?;
            }
            cipher.encrypt_in_place(at, &mut piece[..bytes])?;
            area.write(start + at, &piece[..bytes])?;
            (left, at) = (left - stripes, at + bytes as u64);
        }
        area.sync()?;
        self.replace(area, &metadata)?;
        Ok(number)
    }

    /// Checks whether a key slot can be removed: the last one that can be opened stays.
    ///
    /// # Errors
    /// [`LuksError::NoSuchSlot`], [`LuksError::LastSlot`].
    pub fn check_removable(&self, number: u32) -> Result<(), LuksError> {
        let slots = &self.metadata.slots;
        if !slots.iter().any(|slot| slot.number == number) {
            return Err(LuksError::NoSuchSlot(number));
        }
        if !slots.iter().any(|slot| slot.number != number && slot.is_usable() && !slot.ignored) {
            return Err(LuksError::LastSlot(number));
        }
        Ok(())
    }

    /// Removes a key slot, and overwrites its key material. The last one that can be opened stays.
    ///
    /// # Errors
    /// [`LuksError`], each with a remedy.
    pub fn remove_key(&mut self, area: &mut impl HeaderArea, number: u32) -> Result<(), LuksError> {
        self.make_copies_equal(area)?;
        self.check_removable(number)?;
        let slot = self.metadata.slots.iter().find(|slot| slot.number == number);
        let slot = slot.ok_or(LuksError::NoSuchSlot(number))?;
        let wiped = slot.area.clone();
        let metadata = self.metadata.without_slot(number, self.binary.size)?;
        // The slot is listed until its key material is overwritten. It is ignored before that, so that a removal that was
        // interrupted leaves no slot that opens nothing and counts as one that does.
        let ignored = self.metadata.with_ignored_slot(number, self.binary.size)?;
        self.replace(area, &ignored)?;
        if let Some(wiped) = wiped {
            let mut noise = vec![0; PIECE];
            for at in wiped.clone().step_by(PIECE) {
                random(&mut noise)?;
                let bytes = usize::try_from(wiped.end - at).unwrap_or(PIECE).min(PIECE);
                area.write(at, &noise[..bytes])?;
            }
            area.sync()?;
        }
        self.replace(area, &metadata)
    }

    /// Makes both copies equal and stable, that one first which may be torn: a change before this one may have failed. A copy
    /// of before it might become the only one that is valid, and name a slot that is wiped meanwhile.
    fn make_copies_equal(&mut self, area: &mut impl HeaderArea) -> Result<(), LuksError> {
        if let Some(what) = self.other {
            return Err(LuksError::OneCopy(what));
        }
        let (binary, metadata) = (self.binary.clone(), self.metadata.clone());
        let first = self.unsure;
        self.write_copy(area, first, &binary, &metadata)?;
        if let Some(stale) = self.stale.filter(|stale| *stale != first) {
            self.write_copy(area, stale, &binary, &metadata)?;
        }
        self.stale = None;
        Ok(())
    }

    /// Overwrites both copies and the first key slot with zeroes, as far as the store can do that.
    fn wipe(&self, area: &mut impl HeaderArea) {
        let zeroes = [0; PIECE];
        let end = self.metadata.keyslots.start + SLOT_BYTES;
        for at in (0..end).step_by(PIECE) {
            // The next opening refuses what is left.
            let _ = area.write(at, &zeroes);
        }
        let _ = area.sync();
    }

    /// Where the area of another slot is free.
    fn free_area(&self) -> Option<u64> {
        let within = &self.metadata.keyslots;
        let used: Vec<_> =
            self.metadata.slots.iter().filter_map(|slot| slot.area.clone()).collect();
        let starts = std::iter::once(within.start)
            .chain(used.iter().map(|area| area.end.next_multiple_of(4096)));
        let mut starts: Vec<_> = starts.collect();
        starts.sort_unstable();
        starts.into_iter().find(|start| {
            let end = start + SLOT_BYTES;
            end <= within.end && used.iter().all(|area| area.end <= *start || area.start >= end)
        })
    }

    /// Writes both copies, one after the other: one of them is valid at any time, if both were before.
    fn replace(
        &mut self,
        area: &mut impl HeaderArea,
        metadata: &Metadata,
    ) -> Result<(), LuksError> {
        let mut binary = self.binary.clone();
        binary.sequence =
            binary.sequence.checked_add(1).ok_or(LuksError::Metadata("its number is the last"))?;
        self.write_copy(area, Copy::Primary, &binary, metadata)?;
        (self.binary, self.metadata) = (binary.clone(), metadata.clone());
        self.stale = Some(Copy::Secondary);
        self.write_copy(area, Copy::Secondary, &binary, metadata)?;
        self.stale = None;
        Ok(())
    }

    fn write_copy(
        &mut self,
        area: &mut impl HeaderArea,
        copy: Copy,
        binary: &BinaryHeader,
        metadata: &Metadata,
    ) -> Result<(), LuksError> {
        let mut salt = [0; 64];
        random(&mut salt)?;
        let text = metadata.to_area(binary.size)?;
        let bytes =
            binary.seal(copy, &text, &salt).ok_or(LuksError::Library("OpenSSL (checksum)"))?;
        let at = if copy == Copy::Primary { 0 } else { binary.size };
        self.unsure = copy;
        area.write(at, &bytes)?;
        area.sync()?;
        Ok(())
    }
}

fn check_passphrase(passphrase: &[u8]) -> Result<(), LuksError> {
    match passphrase.len() {
        0 => Err(LuksError::EmptyKey),
        length if length > KEY_BYTES_MAX => Err(LuksError::LongKey),
        _ => Ok(()),
    }
}

/// A random UUID.
fn uuid() -> Result<String, LuksError> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok([&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"))
}
