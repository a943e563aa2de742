//! Files that cannot be opened as a store, and their error messages.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use common::{Bench, MIB, create, file, folder, open};
use ebb_advice::full_text;
use ebb_block::{BlockStore, ErrorKind};
use ebb_store::{Direct, FileStore, OpenError, OpenOptions};

const READ_ONLY: OpenOptions = OpenOptions {
    read_only: true,
    direct: Direct::Auto,
    create: None,
    existing: false,
    only_new: false,
    any_size: false,
};

fn refused(result: Result<FileStore, OpenError>) -> (OpenError, String) {
    let error = result.expect_err("the store was opened");
    let text = full_text(&error);
    (error, text)
}

#[test]
fn a_missing_file() {
    let folder = folder();
    let path = file(&folder, "absent");
    let (error, text) = refused(open(&path));
    assert!(matches!(error, OpenError::Missing { .. }), "{error:?}");
    assert!(text.contains("absent") && text.contains("set `create`"), "{text}");
    std::os::unix::fs::symlink(file(&folder, "nowhere"), &path).unwrap();
    let (error, text) = refused(open(&path));
    assert!(matches!(error, OpenError::Missing { .. }), "a dangling link: {error:?}");
    assert!(text.contains("is a link to") && !text.contains("create"), "{text}");
}

#[test]
fn a_file_that_must_be_new_replaces_none_and_follows_no_link() {
    let folder = folder();
    let (path, link) = (file(&folder, "image"), file(&folder, "link"));
    let options = OpenOptions { create: Some(MIB), only_new: true, ..OpenOptions::default() };
    let open = |path: &Path| FileStore::open(path, &options).map(|(store, _)| store);
    assert!(open(&path).unwrap().was_made());
    std::fs::write(&path, vec![7; 2 << 20]).unwrap();
    assert!(matches!(refused(open(&path)).0, OpenError::Exists { .. }));
    for target in [&path, &file(&folder, "nowhere")] {
        std::os::unix::fs::symlink(target, &link).unwrap();
        assert!(matches!(refused(open(&link)).0, OpenError::Exists { .. }));
        std::fs::remove_file(&link).unwrap();
    }
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 7));
}

#[test]
fn a_missing_folder() {
    let folder = folder();
    let path = file(&folder, "none/image");
    let options = OpenOptions { create: Some(MIB), ..OpenOptions::default() };
    let (error, text) = refused(FileStore::open(&path, &options).map(|(store, _)| store));
    assert!(matches!(error, OpenError::Io { .. }), "{error:?}");
    assert!(text.contains("make its folder"), "{text}");
    // Read-only creates nothing.
    let options = OpenOptions { read_only: true, ..options };
    let path = file(&folder, "image");
    let (error, _) = refused(FileStore::open(&path, &options).map(|(store, _)| store));
    assert!(matches!(error, OpenError::Missing { .. }));
    assert!(!path.exists());
}

/// Runs a function in a thread of its own, as a user whom file modes restrict.
fn without_root<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the call changes the identity of this thread alone, and only for files; it
            // has no effect without root.
            unsafe { libc::setfsuid(65534) };
            call()
        });
        thread.join().unwrap()
    })
}

#[test]
fn a_file_that_may_not_be_opened() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let path = file(&folder, "locked");
    std::fs::write(&path, [0; 4096]).unwrap();
    let mode = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o444);
    without_root(|| {
        let (error, text) = refused(open(&path));
        assert!(matches!(error, OpenError::Denied { read_only: false, .. }), "{error:?}");
        assert!(text.contains("or set `read_only = true`"), "{text}");
        assert!(FileStore::open(&path, &READ_ONLY).is_ok(), "as the message says");
    });
    mode(0o000);
    without_root(|| {
        let (error, text) = refused(open(&path));
        assert!(matches!(error, OpenError::Denied { .. }), "{error:?}");
        assert!(!text.contains("read_only"), "it cannot be read either: {text}");
        let (error, text) = refused(FileStore::open(&path, &READ_ONLY).map(|(store, _)| store));
        assert!(matches!(error, OpenError::Denied { read_only: true, .. }), "{error:?}");
        assert!(text.contains("give the daemon's user access"), "{text}");
        assert!(!text.contains("read_only"), "{text}");
    });
}

#[test]
fn a_file_that_is_in_use() {
    let folder = folder();
    let path = file(&folder, "image");
    let first = create(&path, MIB, Direct::Off);
    for options in [OpenOptions::default(), READ_ONLY] {
        let (error, text) = refused(FileStore::open(&path, &options).map(|(store, _)| store));
        assert!(matches!(error, OpenError::InUse { .. }), "{error:?}");
        assert!(text.contains("in use"), "{text}");
    }
    drop(first);
    let readers = [FileStore::open(&path, &READ_ONLY), FileStore::open(&path, &READ_ONLY)];
    assert!(readers.iter().all(Result::is_ok), "several readers are allowed");
    assert!(matches!(refused(open(&path)).0, OpenError::InUse { .. }));
    drop(readers);
    assert!(open(&path).is_ok(), "the lock is released with the store");
}

#[test]
fn what_is_no_file() {
    let folder = folder();
    let fifo = file(&folder, "fifo");
    let name = std::ffi::CString::new(fifo.as_os_str().as_bytes()).unwrap();
    // SAFETY: the name ends with a NUL and outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let socket = file(&folder, "socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let cases = [
        (fifo.as_path(), "a FIFO or socket"),
        (socket.as_path(), "a FIFO or socket"),
        (folder.path(), "a directory"),
        (Path::new("/dev/null"), "a character device"),
    ];
    for (path, expected) in cases {
        for create in [None, Some(MIB)] {
            let options = OpenOptions { create, ..OpenOptions::default() };
            let (error, text) = refused(FileStore::open(path, &options).map(|(store, _)| store));
            assert!(matches!(error, OpenError::WrongType { .. }), "{error:?}");
            assert!(text.contains(expected), "{text}");
        }
    }
}

#[test]
fn read_only_file_is_padded_to_whole_sectors() {
    let folder = folder();
    let path = file(&folder, "odd");
    for (bytes, size) in [(1, 512), (1000, 1024), (4097, 4608)] {
        std::fs::write(&path, vec![7; bytes]).unwrap();
        for direct in [Direct::Auto, Direct::Off] {
            let options = OpenOptions { read_only: true, direct, ..OpenOptions::default() };
            let (store, notes) = FileStore::open(&path, &options).unwrap();
            assert!(notes.iter().any(|note| note.contains("zero bytes at its end")), "{notes:?}");
            let bench = Bench::new(store);
            assert_eq!(bench.store().size(), size);
            let mut expected = vec![7; bytes];
            expected.resize(usize::try_from(size).unwrap(), 0);
            assert_eq!(bench.read(0, expected.len()).unwrap(), expected);
            assert_eq!(bench.read(size - 512, 512).unwrap(), expected[expected.len() - 512..]);
            let list = bench.extents(0, size, 9).unwrap();
            assert_eq!(list, [(0, size, false)]);
        }
        assert!(matches!(open(&path), Err(OpenError::Size { .. })), "a writable file is refused");
    }
}

#[test]
fn a_size_that_is_not_whole_sectors() {
    let folder = folder();
    let path = file(&folder, "odd");
    for size in [0, 1, 511, 513, 4097] {
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        let (error, text) = refused(open(&path));
        assert!(matches!(error, OpenError::Size { size: s, .. } if s == size), "{error:?}");
        assert!(text.contains(&format!("{size} bytes")) && text.contains("truncate -s"), "{text}");
        assert_eq!(text.contains("read_only"), size > 0, "{text}");
        if size == 0 {
            let (_, text) = refused(FileStore::open(&path, &READ_ONLY).map(|(store, _)| store));
            assert!(!text.contains("read_only"), "it is read-only already: {text}");
        }
    }
    for (start, has, has_not) in [
        (&b"EBBDELTA"[..], "truncated: restore it from a backup", "read_only"),
        (b"QFI\xfb", "`qcow2:` instead of `file:`; a raw disk: grow it", "restore it"),
    ] {
        let mut image = start.to_vec();
        image.resize(5000, 0);
        std::fs::write(&path, image).unwrap();
        let (_, text) = refused(open(&path));
        assert!(text.contains(has) && !text.contains(has_not), "{text}");
    }
    for size in [512, 1536] {
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
        assert_eq!(Bench::new(open(&path).unwrap()).store().size(), size);
    }
}

#[test]
fn an_image_that_has_grown_is_served_as_it_is_and_one_too_small_is_refused() {
    let folder = folder();
    let path = file(&folder, "image");
    drop(create(&path, MIB, Direct::Off));
    drop(create(&path, MIB, Direct::Off));
    let options = OpenOptions { create: Some(MIB / 2), ..OpenOptions::default() };
    let (store, notes) = FileStore::open(&path, &options).unwrap();
    assert_eq!(Bench::new(store).store().size(), MIB);
    assert!(notes.iter().any(|note| note.contains("524288") && note.contains("size")), "{notes:?}");
    let options = OpenOptions { create: Some(2 * MIB), ..OpenOptions::default() };
    let (error, text) = refused(FileStore::open(&path, &options).map(|(store, _)| store));
    assert!(matches!(error, OpenError::OtherSize { size: MIB, .. }), "{error:?}");
    assert!(text.contains("1048576") && text.contains("2097152"), "{text}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB, "the file is unchanged");
}

#[test]
fn a_created_file_is_sparse_and_private() {
    let folder = folder();
    let path = file(&folder, "image");
    drop(create(&path, 1 << 40, Direct::Auto));
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.blocks()), (1 << 40, 0));
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_file_that_cannot_be_created_leaves_nothing_at_its_path() {
    let folder = folder();
    let path = file(&folder, "image");
    // No file system supports files of that size.
    let options = OpenOptions { create: Some(u64::MAX - 511), ..OpenOptions::default() };
    let (error, text) = refused(FileStore::open(&path, &options).map(|(store, _)| store));
    assert!(matches!(error, OpenError::Io { .. }), "{error:?}");
    assert!(text.contains("correct `size`"), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    assert!(create(&path, MIB, Direct::Auto).was_made());
    assert!(!create(&path, MIB, Direct::Auto).was_made());
}

#[test]
fn a_new_file_has_its_size_from_the_moment_it_has_its_name() {
    let folder = folder();
    let paths: Vec<_> = (0..200).map(|number| file(&folder, &number.to_string())).collect();
    std::thread::scope(|scope| {
        let seen = scope.spawn(|| {
            let (mut sizes, begun) = (Vec::new(), std::time::Instant::now());
            for path in &paths {
                sizes.push(loop {
                    if let Ok(found) = std::fs::metadata(path) {
                        break found.len();
                    }
                    assert!(begun.elapsed().as_secs() < 120, "the file is not created");
                });
            }
            sizes
        });
        paths.iter().for_each(|path| drop(create(path, MIB, Direct::Off)));
        assert!(seen.join().unwrap().iter().all(|size| *size == MIB));
    });
}

#[test]
fn the_missing_file_of_an_existing_volume_is_not_created() {
    let folder = folder();
    let path = file(&folder, "image");
    let options = OpenOptions { create: Some(MIB), existing: true, ..OpenOptions::default() };
    let (error, _) = refused(FileStore::open(&path, &options).map(|(store, _)| store));
    assert!(matches!(error, OpenError::Missing { .. }), "{error:?}");
    assert!(matches!(ebb_store::inspect(&path, &options), Err(OpenError::Missing { .. })));
    assert!(!path.exists());
}

#[test]
fn a_file_in_an_inaccessible_directory_is_not_reported_as_missing() {
    let folder = folder();
    let inner = file(&folder, "inner");
    std::fs::create_dir(&inner).unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&inner, PermissionsExt::from_mode(0o000)).unwrap();
    let options = OpenOptions { create: Some(MIB), ..OpenOptions::default() };
    without_root(|| {
        let path = inner.join("image");
        assert!(matches!(ebb_store::inspect(&path, &options), Err(OpenError::Denied { .. })));
    });
}

/// The kernel's own files refuse direct I/O, on every machine.
#[test]
fn direct_io_where_there_is_none() {
    let path = Path::new("/proc/self/status");
    let options = OpenOptions { direct: Direct::On, ..READ_ONLY };
    let (error, text) = refused(FileStore::open(path, &options).map(|(store, _)| store));
    assert!(matches!(error, OpenError::NoDirect { .. }), "{error:?}");
    assert!(text.contains("direct = \"auto\""), "{text}");
}

#[test]
fn falling_back_to_the_page_cache_is_noted_and_a_file_that_lies_is_short() {
    // Any text file of sysfs serves; this one exists since Linux 2.6.
    let path = Path::new("/sys/kernel/uevent_seqnum");
    assert!(path.exists(), "sysfs is needed at /sys");
    let (store, notes) = FileStore::open(path, &READ_ONLY).unwrap();
    assert!(notes[0].contains("going through the page cache"), "{notes:?}");
    let bench = Bench::new(store);
    assert!(!bench.store().capabilities().direct);
    assert_eq!(bench.store().size(), 4096);
    assert_eq!(bench.read(0, 4096).unwrap_err().kind, ErrorKind::Short);
}

#[test]
fn the_direct_option_is_honoured() {
    let folder = folder();
    for (direct, expected) in [(Direct::On, true), (Direct::Auto, true), (Direct::Off, false)] {
        let path = file(&folder, &format!("{direct:?}"));
        let bench = Bench::new(create(&path, MIB, direct));
        // The build directory is on a file system with O_DIRECT (ext4, xfs, btrfs).
        assert_eq!(bench.store().capabilities().direct, expected, "{direct:?}");
        bench.write(512, &[7; 1024]).unwrap();
        assert_eq!(bench.read(0, 2048).unwrap()[512..1536], [7; 1024]);
    }
}
