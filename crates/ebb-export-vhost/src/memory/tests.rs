use std::collections::BTreeSet;
use std::os::fd::AsFd;

use proptest::prelude::*;
use rustix::fs::ftruncate;

use super::testing::{guest_memory, memfd, region_of};
use super::*;

/// A region as the oracle sees it: guest address, address in the VMM, bytes.
type Place = (u64, u64, usize);

fn table(places: &[Place]) -> Result<GuestMemory, GuestMemoryError> {
    let (fd, lost) = (memfd(4096), Arc::default());
    GuestMemory::new(places.iter().map(|place| region_of(&fd, *place, &lost)).collect())
}

/// Addresses that are often adjacent, or overlap, or are at the end of the address space.
fn addresses() -> impl Strategy<Value = u64> {
    prop_oneof![8 => (0..40u64).prop_map(|n| n * 8), 1 => (0..20u64).prop_map(|n| u64::MAX - 8 * n)]
}

fn places() -> impl Strategy<Value = Vec<Place>> {
    let bytes = (1..6usize).prop_map(|n| n * 8);
    prop::collection::vec((addresses(), addresses(), bytes), 0..6)
}

/// Regions that do not overlap: pairs of a gap and a length, in both address spaces.
fn apart() -> impl Strategy<Value = Vec<Place>> {
    let gap = || prop_oneof![Just(0), 1..40u64];
    let layout = prop::collection::vec((gap(), gap(), 1..40usize), 1..6);
    (layout, any::<bool>()).prop_map(|(layout, descending)| {
        let (mut guest, mut user, mut places) = (0, 0, vec![]);
        for (guest_gap, user_gap, bytes) in layout {
            (guest, user) = (guest + guest_gap, user + user_gap);
            places.push((guest, user, bytes));
            (guest, user) = (guest + bytes as u64, user + bytes as u64);
        }
        if descending {
            places.reverse();
        }
        places
    })
}

fn end(start: u64, bytes: usize) -> u128 {
    u128::from(start) + bytes as u128
}

fn overlap(a: (u64, usize), b: (u64, usize)) -> bool {
    u128::from(a.0) < end(b.0, b.1) && u128::from(b.0) < end(a.0, a.1)
}

/// What [`GuestMemory::new`] is to return.
fn oracle_of_new(places: &[Place]) -> Result<(), GuestMemoryError> {
    let beyond = |start, bytes| end(start, bytes) > u128::from(u64::MAX);
    if places.iter().any(|(guest, user, bytes)| beyond(*guest, *bytes) || beyond(*user, *bytes)) {
        return Err(GuestMemoryError::BadRange);
    }
    let before = |n: usize| places[..n].iter();
    let mut pairs = places.iter().enumerate().flat_map(|(n, a)| before(n).map(move |b| (a, b)));
    if pairs.any(|(a, b)| overlap((a.0, a.2), (b.0, b.2)) || overlap((a.1, a.2), (b.1, b.2))) {
        return Err(GuestMemoryError::Overlap);
    }
    Ok(())
}

/// Where `len` bytes at an address may be found: no bytes are at the end of one region and at the start of the next.
fn oracle_of_find(
    regions: &[Arc<Region>],
    start: fn(&Region) -> u64,
    address: u64,
    len: u32,
) -> Vec<GuestSpan> {
    let within = |region: &Arc<Region>| {
        start(region) <= address
            && end(address, len as usize) <= end(start(region), region.memory.bytes())
    };
    let span = |(index, region): (usize, &Arc<Region>)| {
        let (index, offset) = (u32::try_from(index).unwrap(), address - start(region));
        GuestSpan { region: index, offset: usize::try_from(offset).unwrap(), len }
    };
    regions.iter().enumerate().filter(|(_, region)| within(region)).map(span).collect()
}

fn agrees(found: Option<GuestSpan>, expected: &[GuestSpan]) -> bool {
    found.map_or(expected.is_empty(), |span| expected.contains(&span))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn tables_are_refused_as_by_an_oracle(places in places()) {
        prop_assert_eq!(table(&places).map(|_| ()), oracle_of_new(&places));
    }

    #[test]
    fn addresses_are_found_as_by_an_oracle(
        places in apart(),
        asked in prop::collection::vec((0..400u64, prop_oneof![0..60u32, Just(u32::MAX)]), 1..60),
        far in any::<u64>(),
        last in 0..8u32,
    ) {
        let memory = table(&places).unwrap();
        let last = Cell::new(last);
        for (address, len) in asked.into_iter().chain([(far, 1), (u64::MAX, u32::MAX)]) {
            let expected = oracle_of_find(memory.regions(), |region| region.guest, address, len);
            let found = memory.find(&last, address, len);
            prop_assert!(agrees(found, &expected), "{found:?} {expected:?}");
            if let Some(span) = found {
                prop_assert_eq!(last.get(), span.region);
            }
            let expected = oracle_of_find(memory.regions(), |region| region.user, address, len);
            let found = memory.find_user(address, len);
            prop_assert!(agrees(found, &expected), "{found:?} {expected:?}");
        }
    }

    #[test]
    fn copies_are_those_of_a_byte_by_byte_oracle(
        spans in prop::collection::vec((0..2u32, 0..9000usize, 0..6000u32), 0..6),
        skip in prop_oneof![0..40usize, 0..20_000usize],
        len in prop_oneof![0..40usize, 0..20_000usize],
    ) {
        let memory = guest_memory(&[(0x1000, 0, 12_288), (0x8000, 0x10_0000, 12_288)]);
        let bits = SharedMemory::map(memfd(8).as_fd(), 0, 8, Arc::default()).unwrap();
        let memory = memory.with_log(Some(Arc::new(DirtyLog::new(bits))));
        let fit = |(region, offset, len): (u32, usize, u32)| {
            let room = u32::try_from(12_288 - offset).unwrap();
            GuestSpan { region, offset, len: len.min(room) }
        };
        let spans: Vec<GuestSpan> = spans.into_iter().map(fit).collect();
        let places = spans.iter().flat_map(|span| {
            (0..span.len as usize).map(move |byte| (span.region, span.offset + byte))
        });
        let places: Vec<(u32, usize)> = places.skip(skip).take(len).collect();
        let data: Vec<u8> = (0..len).map(|n| u8::try_from(n % 251).unwrap() + 1).collect();

        prop_assert_eq!(memory.copy_in(&spans, skip, &data), places.len() == len);
        let mut expected = [vec![0u8; 12_288], vec![0u8; 12_288]];
        for ((region, at), byte) in places.iter().zip(&data) {
            expected[*region as usize][*at] = *byte;
        }
        for (index, expected) in expected.iter().enumerate() {
            let mut content = vec![0; 12_288];
            prop_assert!(memory.regions()[index].memory.read(0, &mut content));
            prop_assert!(&content == expected, "region {index}");
        }
        let page = |(region, at): &(u32, usize)| [1, 8][*region as usize] + at / 4096;
        let dirty: BTreeSet<usize> = places.iter().map(page).collect();
        let bits = memory.log().unwrap().bits().load_u64(0);
        prop_assert_eq!((0..64).filter(|page| bits >> page & 1 == 1).collect::<BTreeSet<_>>(), dirty);

        let mut back = vec![0; len];
        prop_assert_eq!(memory.copy_out(&spans, skip, &mut back), places.len() == len);
        for ((region, at), byte) in places.iter().zip(&back) {
            prop_assert_eq!(expected[*region as usize][*at], *byte);
        }
    }
}

#[test]
fn a_table_has_509_regions_at_most() {
    let place = |n: u64| (n * 8, n * 8, 8);
    let places: Vec<Place> = (0..509).map(place).collect();
    let memory = table(&places).unwrap();
    let last = Cell::new(0);
    assert_eq!(memory.find(&last, 508 * 8, 8), Some(GuestSpan { region: 508, offset: 0, len: 8 }));
    let places: Vec<Place> = (0..510).map(place).collect();
    assert_eq!(table(&places).unwrap_err(), GuestMemoryError::TooMany);
}

#[test]
fn spans_of_another_table_are_refused() {
    let memory = guest_memory(&[(0, 0, 64)]);
    for span in [
        GuestSpan { region: 1, offset: 0, len: 8 },
        GuestSpan { region: 0, offset: 60, len: 8 },
        GuestSpan { region: 0, offset: usize::MAX, len: 8 },
    ] {
        assert!(!memory.copy_out(&[span], 0, &mut [0; 8]) && !memory.copy_in(&[span], 1, &[0; 7]));
    }
    let span = GuestSpan { region: 0, offset: 0, len: 64 };
    assert!(!memory.copy_out(&[span; 3], usize::MAX, &mut [0; 8]));
    assert!(memory.copy_out(&[], usize::MAX, &mut []), "nothing is anywhere");
}

#[test]
fn copies_fail_from_a_truncation_on() {
    let (fd, kept, lost) = (memfd(8192), memfd(8192), Arc::default());
    let regions =
        vec![region_of(&fd, (0, 0, 8192), &lost), region_of(&kept, (8192, 8192, 8192), &lost)];
    let memory = GuestMemory::new(regions).unwrap();
    let span = |region, offset| GuestSpan { region, offset, len: 8 };
    ftruncate(&fd, 4096).unwrap();
    assert!(memory.copy_in(&[span(0, 0)], 0, &[7; 8]) && !memory.is_lost());
    let mut to = [1; 16];
    assert!(!memory.copy_out(&[span(0, 0), span(0, 4096)], 0, &mut to), "the copy that meets it");
    assert!(memory.is_lost() && memory.with_log(None).is_lost());
    assert!(!memory.copy_out(&[span(1, 0)], 0, &mut to), "another region of the VMM");
    assert!(!memory.copy_in(&[span(0, 4096)], 0, &[7; 8]));
}

#[test]
fn tables_share_regions() {
    let region = region_of(&memfd(4096), (0, 0, 4096), &Arc::default());
    let first = GuestMemory::new(vec![Arc::clone(&region)]).unwrap();
    let second = GuestMemory::new(vec![Arc::clone(&region)]).unwrap();
    drop(region);
    let span = GuestSpan { region: 0, offset: 8, len: 4 };
    assert!(first.copy_in(&[span], 0, b"kept"));
    drop(first);
    let mut back = [0; 4];
    assert!(second.copy_out(&[span], 0, &mut back));
    assert_eq!(&back, b"kept");
}
