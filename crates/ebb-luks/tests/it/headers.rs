//! Headers that are made, opened, changed, damaged and cut.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::io;

use common::{Disk, formatted};
use ebb_advice::full_text;
use ebb_luks::{DATA_OFFSET, HeaderArea, LuksError, LuksHeader};

/// A disk whose power is cut after this many writes: no sync follows the last one.
struct PowerCut<'d> {
    disk: &'d mut Disk,
    left: usize,
}

impl HeaderArea for PowerCut<'_> {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.disk.read(at, bytes)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.left = self.left.checked_sub(1).ok_or(io::ErrorKind::NotConnected)?;
        self.disk.write(at, bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.left == 0 {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.disk.sync()
    }
}

#[test]
fn what_was_formatted_opens_with_its_key_only() {
    let (mut disk, header, key) = formatted(b"one");
    let loaded = LuksHeader::load(&mut disk).unwrap();
    assert_eq!(loaded.segment(), header.segment());
    assert_eq!((loaded.uuid(), loaded.warning()), (header.uuid(), None));
    let (slot, found) = loaded.unlock(&mut disk, b"one").unwrap();
    assert_eq!((slot, &*found), (0, &*key));
    let wrong = loaded.unlock(&mut disk, b"two").unwrap_err();
    assert!(matches!(wrong, LuksError::WrongKey { tried: 1, .. }), "{wrong}");
    assert!(matches!(loaded.unlock(&mut disk, b""), Err(LuksError::EmptyKey)));
}

#[test]
fn keys_are_added_and_removed_but_not_the_last() {
    let (mut disk, mut header, key) = formatted(b"one");
    assert_eq!(header.add_key(&mut disk, &key, b"two").unwrap(), 1);
    assert!(matches!(header.remove_key(&mut disk, 7), Err(LuksError::NoSuchSlot(7))));
    header.remove_key(&mut disk, 0).unwrap();
    let mut loaded = LuksHeader::load(&mut disk).unwrap();
    assert_eq!(loaded.sequence(), 4);
    assert!(loaded.unlock(&mut disk, b"one").is_err());
    assert_eq!(*loaded.unlock(&mut disk, b"two").unwrap().1, *key);
    assert!(matches!(loaded.remove_key(&mut disk, 1), Err(LuksError::LastSlot(1))));
    // The free number and the free area are used again.
    assert_eq!(loaded.add_key(&mut disk, &key, b"three").unwrap(), 0);
    assert_eq!(*LuksHeader::load(&mut disk).unwrap().unlock(&mut disk, b"three").unwrap().1, *key);
}

#[test]
fn after_a_crash_at_any_write_of_a_change_the_old_key_or_both_open_it() {
    let (disk, header, key) = formatted(b"one");
    let mut whole = disk.clone();
    header.clone().add_key(&mut whole, &key, b"two").unwrap();
    let writes = whole.writes - disk.writes;
    assert!(writes > 60, "{writes}");
    for crash in [0, 1, 30, writes - 2, writes - 1, writes] {
        let mut disk = disk.clone();
        disk.most = disk.writes + crash;
        let added = header.clone().add_key(&mut disk, &key, b"two");
        assert_eq!(added.is_ok(), crash == writes);
        let loaded = LuksHeader::load(&mut disk).unwrap();
        assert_eq!(*loaded.unlock(&mut disk, b"one").unwrap().1, *key, "after {crash}");
        let second = loaded.unlock(&mut disk, b"two");
        assert_eq!(second.is_ok(), crash >= writes - 1, "after {crash}");
    }
}

#[test]
fn after_a_crash_at_any_write_of_a_removal_no_removal_takes_the_last_key() {
    let (mut disk, mut header, key) = formatted(b"one");
    assert_eq!(header.add_key(&mut disk, &key, b"two").unwrap(), 1);
    let mut whole = disk.clone();
    header.clone().remove_key(&mut whole, 1).unwrap();
    let writes = whole.writes - disk.writes;
    for crash in 0..=writes {
        let mut disk = disk.clone();
        disk.most = disk.writes + crash;
        let removed = header.clone().remove_key(&mut disk, 1);
        assert_eq!(removed.is_ok(), crash == writes);
        disk.most = usize::MAX;
        let other = LuksHeader::load(&mut disk).unwrap().remove_key(&mut disk, 0);
        let left: &[u8] = if other.is_ok() { b"two" } else { b"one" };
        let loaded = LuksHeader::load(&mut disk).unwrap();
        assert_eq!(*loaded.unlock(&mut disk, left).unwrap().1, *key, "after {crash} writes");
        assert!(other.is_ok() || matches!(other, Err(LuksError::LastSlot(0))), "{other:?}");
    }
}

/// The copy of before must not become the only one after a slot that it names was wiped.
#[test]
fn an_interrupted_change_is_completed_before_the_next_one() {
    let (disk, header, key) = formatted(b"one");
    let mut whole = disk.clone();
    header.clone().add_key(&mut whole, &key, b"two").unwrap();
    let mut begun = disk.clone();
    // The last write is that of the second copy.
    begun.most = whole.writes - 1;
    assert!(header.clone().add_key(&mut begun, &key, b"two").is_err());
    begun.most = usize::MAX;
    let mut whole = begun.clone();
    LuksHeader::load(&mut whole).unwrap().remove_key(&mut whole, 0).unwrap();
    let writes = whole.writes - begun.writes;
    for crash in [1, 2, 3, writes - 3, writes - 2, writes - 1] {
        for damaged in [0, 16 << 10] {
            let mut disk = begun.clone();
            disk.most = disk.writes + crash;
            assert!(LuksHeader::load(&mut disk).unwrap().remove_key(&mut disk, 0).is_err());
            // One of the copies is torn or lost.
            disk.bytes[damaged + 4200] ^= 1;
            let opened = LuksHeader::load(&mut disk).and_then(|left| {
                left.unlock(&mut disk, b"two").or_else(|_| left.unlock(&mut disk, b"one"))
            });
            // Until both copies are equal, only the damaged one may have named the second key; the first is there.
            assert_eq!(*opened.unwrap().1, *key, "after {crash}, {damaged}");
        }
    }
}

/// After a sync that failed, the page cache shows a copy as valid which is torn on the disk: it must be written anew before
/// the other one is touched.
#[test]
fn a_power_cut_in_the_change_after_a_failed_sync_leaves_a_header_that_opens() {
    let (disk, header, key) = formatted(b"one");
    let mut whole = disk.clone();
    header.clone().add_key(&mut whole, &key, b"two").unwrap();
    for failing in 1..=whole.syncs - disk.syncs {
        let mut failed = disk.clone();
        failed.failing_sync = failed.syncs + failing;
        let mut same = header.clone();
        assert!(same.add_key(&mut failed, &key, b"two").is_err());
        // The same object goes on, or another one that reads the header.
        for mut header in [same, LuksHeader::load(&mut failed).unwrap()] {
            let mut retried = failed.clone();
            header.clone().add_key(&mut retried, &key, b"three").unwrap();
            let writes = retried.writes - failed.writes;
            for cut in (0..writes).filter(|cut| *cut < 4 || *cut > writes - 4) {
                let mut disk = failed.clone();
                disk.failing_sync = usize::MAX;
                // The write at which the power is cut is begun, and not synced.
                let mut cut_off = PowerCut { disk: &mut disk, left: cut + 1 };
                assert!(header.clone().add_key(&mut cut_off, &key, b"three").is_err());
                let mut disk = disk.after_power_cut();
                let found = LuksHeader::load(&mut disk).unwrap_or_else(|error| {
                    panic!("sync {failing} failed, cut in write {cut}: {error}")
                });
                assert_eq!(*found.unlock(&mut disk, b"one").unwrap().1, *key);
            }
            header.add_key(&mut retried, &key, b"four").unwrap();
        }
    }
}

/// A header that could not be made stable is not there at the next look, so that nothing is written below it.
#[test]
fn a_format_that_has_failed_leaves_no_header() {
    let whole = formatted(b"one").0;
    for failing in 1..=whole.syncs {
        let mut disk = Disk::new(DATA_OFFSET + (1 << 20));
        disk.failing_sync = failing;
        assert!(LuksHeader::format(&mut disk, b"one").is_err());
        assert!(disk.bytes.iter().all(|byte| *byte == 0), "after sync {failing}");
        assert!(matches!(LuksHeader::load(&mut disk), Err(LuksError::NotLuks)));
        // And again, now that the disk works.
        let (_, key) = LuksHeader::format(&mut disk, b"two").unwrap();
        let mut disk = disk.after_power_cut();
        let found = LuksHeader::load(&mut disk).unwrap().unlock(&mut disk, b"two").unwrap().1;
        assert_eq!(*found, *key);
    }
}

#[test]
fn one_damaged_copy_is_said_and_not_repaired_and_two_are_refused() {
    let (disk, _, key) = formatted(b"one");
    for flipped in [20, 300, 5000, 16384 + 20, 16384 + 5000] {
        let mut disk = disk.clone();
        disk.bytes[flipped] ^= 4;
        let before = disk.bytes.clone();
        let mut header = LuksHeader::load(&mut disk).unwrap();
        assert!(header.warning().unwrap().contains("cryptsetup repair"), "{flipped}");
        assert_eq!(*header.unlock(&mut disk, b"one").unwrap().1, *key);
        let refused = header.add_key(&mut disk, &key, b"two").unwrap_err();
        assert!(matches!(refused, LuksError::OneCopy(_)), "{refused}");
        assert_eq!(disk.bytes, before);
    }
    let mut both = disk.clone();
    both.bytes[5000] ^= 1;
    both.bytes[16384 + 5000] ^= 1;
    let refused = full_text(&LuksHeader::load(&mut both).unwrap_err());
    assert!(refused.contains("both copies") && refused.contains("luksHeaderRestore"), "{refused}");
}

#[test]
fn a_cut_header_is_refused() {
    let (disk, ..) = formatted(b"one");
    let with_data = (16 << 20) + 4096;
    for (length, cut) in [(with_data, false), ((16 << 20) - 512, true), (40_960, true), (512, true)]
    {
        let mut short = Disk::of(disk.bytes[..length].to_vec());
        let loaded = LuksHeader::load(&mut short);
        assert_eq!(loaded.is_err(), cut, "{length}: {loaded:?}");
    }
    let mut detached = Disk::of(disk.bytes[..16 << 20].to_vec());
    let refused = full_text(&LuksHeader::load(&mut detached).unwrap_err());
    assert!(refused.contains("detached header"), "{refused}");
    assert!(matches!(LuksHeader::load(&mut Disk::of(Vec::new())), Err(LuksError::NotLuks)));
    assert!(matches!(LuksHeader::load(&mut Disk::new(1 << 20)), Err(LuksError::NotLuks)));
    let mut first = Disk::new(1 << 20);
    first.bytes[..8].copy_from_slice(b"LUKS\xba\xbe\0\x01");
    assert!(matches!(LuksHeader::load(&mut first), Err(LuksError::Luks1)));
}

#[test]
fn flipped_bits_in_key_material_open_nothing() {
    let (mut disk, header, _) = formatted(b"one");
    disk.bytes[32768 + 100_000] ^= 1;
    let refused = header.unlock(&mut disk, b"one").unwrap_err();
    assert!(matches!(refused, LuksError::WrongKey { .. }), "{refused}");
}
