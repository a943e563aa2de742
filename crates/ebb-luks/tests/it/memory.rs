//! No key stays in memory that is dumped or swapped, nor anywhere after it was dropped.

use std::io::{Read, Seek, SeekFrom};

use ebb_luks::SectorCipher;

use crate::common::formatted;

/// The longest mapping that is searched: longer ones are only reserved.
const LONGEST: usize = 128 << 20;

/// Where a key is found, as flags of the mappings. The key is given with each byte inverted, so that the search finds no
/// copy of its own; nor does it search its buffer, which has a mapping of its own.
fn found(inverted: &[u8]) -> Vec<String> {
    let mut buffer = vec![0u8; LONGEST];
    let own = buffer.as_ptr() as u64;
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut memory = std::fs::File::open("/proc/self/mem").unwrap();
    let mut places = Vec::new();
    let mut range = None;
    for line in maps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let Some((start, end)) = range.take() else { continue };
            let bytes = &mut buffer[..usize::try_from(end - start).unwrap()];
            memory.seek(SeekFrom::Start(start)).unwrap();
            if memory.read_exact(bytes).is_err() {
                continue;
            }
            let same = |window: &[u8]| window.iter().zip(inverted).all(|(a, b)| *a == !*b);
            let many = bytes.windows(inverted.len()).filter(|window| same(window)).count();
            places.extend((0..many).map(|_| flags.to_owned()));
        } else if let Some((bounds, rest)) = line.split_once(' ')
            && let Some((start, end)) = bounds.split_once('-')
            && rest.starts_with("rw")
            && let (Ok(start), Ok(end)) =
                (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        {
            let searched = end - start <= LONGEST as u64 && !(start..end).contains(&own);
            range = searched.then_some((start, end));
        }
    }
    places
}

#[test]
fn a_key_is_only_in_locked_memory_that_no_core_has_and_nowhere_after_it_was_closed() {
    let (mut disk, header, key) = formatted(b"a passphrase that is searched for");
    drop(key);
    let (_, key) = header.unlock(&mut disk, b"a passphrase that is searched for").unwrap();
    let inverted: Vec<u8> = key.iter().map(|byte| !byte).collect();
    // Halves: a context has the two keys of XTS apart.
    let halves = [&inverted[..32], &inverted[32..]];
    let cipher = SectorCipher::new(key, 4096, 0).unwrap();
    let mut data = vec![1; 8192];
    cipher.encrypt_in_place(0, &mut data).unwrap();
    cipher.decrypt_in_place(0, &mut data).unwrap();
    for half in halves {
        let places = found(half);
        // The key itself, and the contexts for both directions.
        assert!(places.len() >= 2, "{places:?}");
        for flags in places {
            assert!(flags.contains(" lo") && flags.contains(" dd"), "a key in memory with {flags}");
        }
    }
    drop(cipher);
    for half in halves {
        assert_eq!(found(half), Vec::<String>::new());
    }
    // The search finds what is there.
    let plain: Vec<u8> = inverted.iter().map(|byte| !byte).collect();
    assert!(!found(&inverted).is_empty());
    drop(plain);
}
