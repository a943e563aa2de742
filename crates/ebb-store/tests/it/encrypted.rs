//! Encrypted volumes: the contract of stores, an oracle, faults of the store below, and the file on disk.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use common::{Bench, MIB, file, folder, tmpfs_folder};
use ebb_advice::full_text;
use ebb_block::{BlockStore, Tracked, ZeroFlags, conformance};
use ebb_io::{Io, Worker};
use ebb_luks::{DATA_OFFSET, HeaderArea, LuksHeader, Secret};
use ebb_store::{
    Direct, EncryptedError, EncryptedStore, Faults, FileStore, HeaderOfFile, MemoryStore, OpenKeys,
    OpenOptions, Store, TestStore,
};
use proptest::prelude::*;

const KEY: &[u8] = b"the key of a test";

fn options(create: Option<u64>, direct: Direct) -> OpenOptions {
    OpenOptions { create, direct, ..OpenOptions::default() }
}

fn made(path: &std::path::Path, direct: Direct) -> EncryptedStore {
    EncryptedStore::open(path, &options(Some(4 * MIB), direct), KEY).unwrap().0
}

/// A header that is in no store: it takes a while to make, and all tests share it.
fn header() -> (LuksHeader, Secret) {
    struct Nowhere;
    impl HeaderArea for Nowhere {
        fn size(&self) -> u64 {
            1 << 40
        }
        fn read(&mut self, _: u64, bytes: &mut [u8]) -> std::io::Result<()> {
            bytes.fill(0);
            Ok(())
        }
        fn write(&mut self, _: u64, _: &[u8]) -> std::io::Result<()> {
            Ok(())
        }
        fn sync(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    static MADE: OnceLock<(LuksHeader, Secret)> = OnceLock::new();
    let (header, key) = MADE.get_or_init(|| LuksHeader::format(&mut Nowhere, KEY).unwrap());
    (header.clone(), Secret::copy_of(key).unwrap())
}

fn over<S: BlockStore>(store: S) -> EncryptedStore<S> {
    let (header, key) = header();
    EncryptedStore::over(store, &header, key).unwrap()
}

fn conforms<S: BlockStore + Send + 'static>(store: S) {
    let worker = Worker::start_alone("conformance").unwrap();
    let checked = worker
        .handle()
        .block_on(|io| async move { conformance::check(&io, &store).await })
        .expect("see the panic above");
    assert_eq!(checked, Ok(()));
}

#[test]
fn an_encrypted_file_conforms() {
    let (folder, tmpfs) = (folder(), tmpfs_folder());
    conforms(Tracked(made(&file(&folder, "page-cache"), Direct::Off)));
    conforms(Store::Encrypted(made(&file(&folder, "direct"), Direct::Auto)));
    conforms(Tracked(made(&file(&tmpfs, "tmpfs"), Direct::Auto)));
}

#[test]
fn encrypted_memory_and_an_encrypted_test_store_conform() {
    conforms(Tracked(over(MemoryStore::new(DATA_OFFSET + 4 * MIB))));
    let store = TestStore::new(DATA_OFFSET + 4 * MIB, 1);
    store.waits.store(2, Ordering::Relaxed);
    conforms(Tracked(over(store)));
}

#[test]
fn the_file_has_the_data_encrypted_and_it_is_there_after_opening_again() {
    let folder = folder();
    let path = file(&folder, "image");
    let secret: Vec<u8> = b"a word that is not found in the file".repeat(1000);
    let secret = &secret[..32768];
    {
        let bench = Bench::new(Store::Encrypted(made(&path, Direct::Auto)));
        assert_eq!(bench.store().size(), 4 * MIB);
        bench.write(MIB, secret).unwrap();
        bench.write(3 * MIB + 512, &secret[..1024]).unwrap();
        bench.flush().unwrap();
    }
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.len() as u64, DATA_OFFSET + 4 * MIB);
    assert!(!bytes.windows(16).any(|window| window == &secret[..16]));
    let bench = Bench::new(Store::Encrypted(made(&path, Direct::Off)));
    assert!(bench.read(MIB, 32768).unwrap() == secret);
    assert!(bench.read(3 * MIB + 512, 1024).unwrap() == secret[..1024]);
    assert!(bench.read(2 * MIB, 4096).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn zeroes_are_written_encrypted() {
    let folder = folder();
    let path = file(&folder, "image");
    let bench = Bench::new(Store::Encrypted(made(&path, Direct::Off)));
    bench.write(0, &[7; 65536]).unwrap();
    bench.zero(512, 16384, true, false).unwrap();
    assert!(bench.zero(0, 4096, true, true).is_err(), "they need a transfer");
    let expected = |at: usize| if (512..16896).contains(&at) { 0 } else { 7 };
    let found = bench.read(0, 65536).unwrap();
    assert!(found.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    bench.flush().unwrap();
    let start = usize::try_from(DATA_OFFSET).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    for sector in bytes[start..start + 65536].chunks(4096) {
        assert!(sector.iter().any(|byte| *byte != 0));
    }
}

#[test]
fn what_cannot_be_opened_is_refused_with_a_remedy_and_stays_as_it_is() {
    let folder = folder();
    let path = file(&folder, "image");
    drop(made(&path, Direct::Off));
    let failed = |path: &std::path::Path, create: Option<u64>, key: &[u8]| {
        let before = std::fs::read(path).unwrap();
        let opened = EncryptedStore::open(path, &options(create, Direct::Off), key);
        assert!(std::fs::read(path).unwrap() == before, "it is unchanged");
        full_text(&opened.unwrap_err())
    };
    let wrong = failed(&path, None, b"wrong");
    assert!(wrong.contains("opens none of its 1 key slots") && wrong.contains("image"), "{wrong}");
    let wrong = failed(&path, Some(4 * MIB), b"wrong");
    assert!(wrong.contains("opens none"), "never formatted again: {wrong}");
    let other = file(&folder, "other");
    let mut disk = vec![0; 32 << 20];
    disk[1 << 20] = 1;
    std::fs::write(&other, disk).unwrap();
    assert!(failed(&other, Some(4 * MIB), KEY).contains("something that is no LUKS volume"));
    assert!(failed(&other, None, KEY).contains("no LUKS header"));
    let cut = file(&folder, "cut");
    let image = std::fs::read(&path).unwrap();
    std::fs::write(&cut, &image[..1 << 20]).unwrap();
    assert!(failed(&cut, None, KEY).contains("cut off"));
    let damaged = file(&folder, "damaged");
    let mut image = image;
    (image[5000], image[16384 + 5000]) = (1, 1);
    std::fs::write(&damaged, image).unwrap();
    assert!(failed(&damaged, Some(4 * MIB), KEY).contains("both copies"));
}

#[test]
fn a_file_is_inspected_while_it_is_in_use_and_nothing_is_made() {
    let folder = folder();
    let path = file(&folder, "image");
    let create = options(Some(4 * MIB), Direct::Off);
    EncryptedStore::inspect(&path, &create, KEY).unwrap();
    assert!(!path.exists(), "it made the file");
    let missing = EncryptedStore::inspect(&path, &options(None, Direct::Off), KEY).unwrap_err();
    assert!(missing.to_string().contains("no such file"), "{missing}");
    std::fs::write(&path, vec![0; 20 << 20]).unwrap();
    // A file of zeroes that were written: whether they are data behind the header is not known.
    let used = EncryptedStore::inspect(&path, &create, KEY).unwrap_err();
    assert!(matches!(used, EncryptedError::NotBlank { .. }), "{used}");
    std::fs::File::create(&path).unwrap().set_len(20 << 20).unwrap();
    EncryptedStore::inspect(&path, &create, KEY).unwrap();
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0), "it made a header");
    let _open = made(&path, Direct::Off);
    EncryptedStore::inspect(&path, &create, KEY).unwrap();
    let wrong = full_text(&EncryptedStore::inspect(&path, &create, b"wrong").unwrap_err());
    assert!(wrong.contains("opens none of its 1 key slots"), "{wrong}");
}

#[test]
fn a_volume_of_another_size_than_configured_is_as_a_file_of_another_size() {
    let folder = folder();
    let path = file(&folder, "image");
    drop(made(&path, Direct::Off));
    let open = |size| EncryptedStore::open(&path, &options(Some(size), Direct::Off), KEY);
    let larger = full_text(&open(8 * MIB).unwrap_err());
    assert!(larger.contains("the volume in it is 4194304 bytes"), "{larger}");
    let (store, notes) = open(2 * MIB).unwrap();
    assert_eq!((store.size(), notes.len()), (4 * MIB, 1));
    assert!(notes[0].contains("served as it is"), "{notes:?}");
    drop(store);
    // An empty file that is too small gets no header.
    let small = file(&folder, "small");
    std::fs::File::create(&small).unwrap().set_len(18 << 20).unwrap();
    let refused = EncryptedStore::open(&small, &options(Some(4 * MIB), Direct::Off), KEY);
    let text = full_text(&refused.unwrap_err());
    assert!(text.contains("holds no data and has 18874368 bytes"), "{text}");
    assert!(text.contains("needs 20971520: remove the file, or grow it"), "{text}");
    assert!(std::fs::read(&small).unwrap().iter().all(|byte| *byte == 0));
    // An inspection finds the same, and of a new one, too, which needs whole sectors.
    let inspect = |path: &std::path::Path, size| {
        EncryptedStore::inspect(path, &options(Some(size), Direct::Off), KEY)
    };
    assert!(matches!(inspect(&path, 8 * MIB), Err(EncryptedError::OtherSize { .. })));
    assert!(inspect(&path, 2 * MIB).is_ok() && inspect(&path, 4 * MIB).is_ok());
    assert!(matches!(inspect(&small, 4 * MIB), Err(EncryptedError::TooSmall { .. })));
    std::fs::File::options().write(true).open(&small).unwrap().set_len(20 << 20).unwrap();
    inspect(&small, 4 * MIB).expect("as the message says");
    assert_eq!(made(&small, Direct::Off).size(), 4 * MIB);
    let new = file(&folder, "new");
    for (size, good) in [(512, false), (MIB + 512, false), (MIB, true)] {
        let inspected = inspect(&new, size);
        assert_eq!(inspected.is_ok(), good, "{size}");
        if let Err(error) = inspected {
            assert!(error.to_string().contains("a multiple of 4096 bytes"), "{error}");
        }
        let opened = EncryptedStore::open(&new, &options(Some(size), Direct::Off), KEY);
        assert_eq!(opened.is_ok(), good, "{size}");
        assert_eq!(new.exists(), good, "what cannot be served is not left");
    }
}

#[test]
fn keys_change_while_the_file_is_locked_and_not_while_it_is_in_use() {
    let folder = folder();
    let path = file(&folder, "image");
    drop(made(&path, Direct::Off));
    let mut open = HeaderOfFile::open(&path, true).unwrap();
    let (slot, key) = open.unlock(KEY).unwrap();
    assert_eq!((slot, open.add_key(&key, b"another").unwrap()), (0, 1));
    open.remove_key(0).unwrap();
    let refused = full_text(&open.remove_key(1).unwrap_err());
    assert!(refused.contains("add another key first"), "{refused}");
    let busy = EncryptedStore::open(&path, &options(None, Direct::Off), b"another").unwrap_err();
    assert!(matches!(busy, EncryptedError::File(_)), "{busy}");
    drop(open);
    let (store, notes) =
        EncryptedStore::open(&path, &options(None, Direct::Off), b"another").unwrap();
    assert_eq!((store.size(), notes.len()), (4 * MIB, 0));
}

/// A request of a client, meanwhile.
fn writes_and_reads(store: EncryptedStore, byte: u8) -> EncryptedStore {
    let worker = Worker::start_alone("keys").unwrap();
    let store = Arc::new(store);
    let on = store.clone();
    let found = worker.handle().block_on(move |io| async move {
        let mut buf = io.pool().take(4096).await;
        buf.set_len(4096);
        buf.fill(byte);
        let (written, buf) = on.write(&io, buf, MIB, true).await;
        let (read, buf) = on.read(&io, buf, MIB).await;
        drop(on);
        (written.is_ok() && read.is_ok(), buf.to_vec())
    });
    assert_eq!(found.unwrap(), (true, vec![byte; 4096]));
    drop(worker);
    Arc::into_inner(store).unwrap()
}

#[test]
fn keys_change_while_the_volume_is_open() {
    let folder = folder();
    let path = file(&folder, "image");
    let store = made(&path, Direct::Off);
    let keys = OpenKeys::of(&store);
    assert_eq!(keys.opened_by(KEY).unwrap(), 0);
    let wrong = full_text(&keys.opened_by(b"another").unwrap_err());
    assert!(wrong.contains("opens none of its 1 key slots"), "{wrong}");
    // With --force it would not be removed either.
    let last = full_text(&keys.remove(0, Some(KEY)).unwrap_err());
    assert!(last.contains("is the last one") && last.contains("`ebbd volume key add`"), "{last}");
    let store = writes_and_reads(store, 1);
    assert_eq!(keys.add(b"another").unwrap(), 1);
    let store = writes_and_reads(store, 2);
    assert_eq!((keys.opened_by(b"another").unwrap(), keys.slots().unwrap().0.len()), (1, 2));
    let kept = full_text(&keys.remove(0, Some(KEY)).unwrap_err());
    assert!(kept.contains("the configured key opens"), "{kept}");
    let wrong = full_text(&keys.remove(0, Some(b"wrong")).unwrap_err());
    assert!(wrong.contains("opens none of its 2 key slots"), "{wrong}");
    let none = full_text(&keys.remove(7, None).unwrap_err());
    assert!(none.contains("no key slot 7"), "{none}");
    // The same key in another slot opens the volume.
    assert_eq!(keys.add(KEY).unwrap(), 2);
    keys.remove(0, Some(KEY)).unwrap();
    let only = full_text(&keys.remove(2, Some(KEY)).unwrap_err());
    assert!(only.contains("the only one that the configured key opens"), "{only}");
    keys.remove(2, Some(b"another")).unwrap();
    let last = full_text(&keys.remove(1, None).unwrap_err());
    assert!(last.contains("add another key first"), "{last}");
    let store = writes_and_reads(store, 3);
    drop((store, keys));
    assert!(EncryptedStore::open(&path, &options(None, Direct::Off), KEY).is_err());
    let (store, notes) =
        EncryptedStore::open(&path, &options(None, Direct::Off), b"another").unwrap();
    assert_eq!(notes.len(), 0);
    drop(writes_and_reads(store, 4));
}

/// Who can write the file may put another header there; the key of the open volume is not given to it.
#[test]
fn a_header_that_was_replaced_under_an_open_volume_is_no_header_of_it() {
    let folder = folder();
    let (path, other) = (file(&folder, "image"), file(&folder, "other"));
    let store = made(&path, Direct::Off);
    drop(made(&other, Direct::Off));
    let keys = OpenKeys::of(&store);
    let header = std::fs::read(&other).unwrap()[..16 << 20].to_vec();
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&path).unwrap(),
        &header,
        0,
    )
    .unwrap();
    let refused = full_text(&keys.opened_by(KEY).unwrap_err());
    assert!(refused.contains("another volume"), "{refused}");
    let refused = full_text(&keys.add(b"another").unwrap_err());
    assert!(refused.contains("another volume"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap()[..16 << 20], header);
}

/// What a request does to a disk of 256 KiB.
#[derive(Clone, Debug)]
enum Action {
    Write {
        sector: u64,
        sectors: usize,
        byte: u8,
        fua: bool,
    },
    Read {
        sector: u64,
        sectors: usize,
    },
    Zero {
        sector: u64,
        sectors: u64,
    },
    Discard {
        sector: u64,
        sectors: u64,
    },
    Flush,
    /// The next requests of these kinds fail.
    Faults {
        reads: u32,
        writes: u32,
    },
}

const SECTORS: u64 = 512;

fn action() -> impl Strategy<Value = Action> {
    let range = || (0..SECTORS - 64, 1..64usize);
    prop_oneof![
        4 => (range(), 1..=255u8, any::<bool>()).prop_map(|((sector, sectors), byte, fua)| {
            Action::Write { sector, sectors, byte, fua }
        }),
        4 => range().prop_map(|(sector, sectors)| {
            Action::Read { sector, sectors }
        }),
        1 => range().prop_map(|(sector, sectors)| Action::Zero { sector, sectors: sectors as u64 }),
        1 => range().prop_map(|(sector, sectors)| Action::Discard { sector, sectors: sectors as u64 }),
        1 => Just(Action::Flush),
        1 => (0..2u32, 0..2u32).prop_map(|(reads, writes)| Action::Faults { reads, writes }),
    ]
}

/// Plays the actions on an encrypted store and on a model, in which `None` is unknown after a failed write.
async fn play(io: Io, disk: Arc<TestStore>, actions: Vec<Action>) {
    let (header, key) = header();
    let store = EncryptedStore::over(Store::Test(disk.clone()), &header, key).unwrap();
    let store = Tracked(store);
    let bytes = |sectors: u64| usize::try_from(sectors * 512).unwrap();
    let mut model: Vec<Option<u8>> = vec![Some(0); bytes(SECTORS)];
    for action in actions {
        match action {
            Action::Write { sector, sectors, byte, fua } => {
                let mut buf = io.pool().take(sectors * 512).await;
                buf.fill(byte);
                let (result, buf) = store.write(&io, buf, sector * 512, fua).await;
                assert!(buf.len() == sectors * 512 && buf.iter().all(|found| *found == byte));
                let range = bytes(sector)..bytes(sector) + sectors * 512;
                match result {
                    Ok(()) => model[range].fill(Some(byte)),
                    Err(error) => {
                        assert_eq!(
                            (error.offset, error.length),
                            (sector * 512, sectors as u64 * 512)
                        );
                        // A torn block is noise in all of its sectors.
                        let block = range.start / 4096 * 4096..range.end.next_multiple_of(4096);
                        model[block].fill(None);
                    }
                }
            }
            Action::Read { sector, sectors } => {
                let buf = io.pool().take(sectors * 512).await;
                let (result, buf) = store.read(&io, buf, sector * 512).await;
                if result.is_ok() {
                    let expected = &model[bytes(sector)..bytes(sector) + sectors * 512];
                    let same = buf
                        .iter()
                        .zip(expected)
                        .all(|(found, known)| known.is_none_or(|known| known == *found));
                    assert!(same, "{sectors} sectors at {sector}");
                }
            }
            Action::Zero { sector, sectors } => {
                let flags = ZeroFlags { may_unmap: true, fast_only: false };
                let range = bytes(sector)..bytes(sector + sectors);
                match store.write_zeroes(&io, sector * 512, sectors * 512, flags).await {
                    Ok(()) => model[range].fill(Some(0)),
                    Err(_) => {
                        let block = range.start / 4096 * 4096..range.end.next_multiple_of(4096);
                        model[block].fill(None);
                    }
                }
            }
            Action::Discard { sector, sectors } => {
                store.discard(&io, sector * 512, sectors * 512).await.unwrap();
            }
            Action::Flush => drop(store.flush(&io).await),
            Action::Faults { reads, writes } => {
                disk.faults(&Faults { reads, writes, ..Faults::default() });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn an_encrypted_store_matches_the_model(actions in prop::collection::vec(action(), 1..60), seed: u64) {
        let worker = Worker::start_alone("oracle").unwrap();
        let disk = Arc::new(TestStore::new(DATA_OFFSET + SECTORS * 512, seed));
        let done = worker.handle().block_on(move |io| play(io, disk, actions));
        prop_assert!(done.is_some(), "it panicked; see above");
    }
}

#[test]
fn a_file_with_large_sectors_below_is_read_and_written_by_whole_blocks() {
    let folder = folder();
    let path = file(&folder, "image");
    drop(made(&path, Direct::Off));
    let mut open = HeaderOfFile::open(&path, false).unwrap();
    let (_, key) = open.unlock(KEY).unwrap();
    let header = open.header().clone();
    drop(open);
    let below = FileStore::open(&path, &options(None, Direct::Auto)).unwrap().0;
    let below = below.assume_alignment(4096);
    conforms(Tracked(EncryptedStore::over(below, &header, key).unwrap()));
}
