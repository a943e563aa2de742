use std::cell::Cell;
use std::io::{Read, Write};

use super::*;

/// A store over one end of a pipe: the kernel transfers the available bytes only.
fn over(end: impl Into<std::os::fd::OwnedFd>) -> FileStore {
    FileStore {
        in_memory: false,
        path: std::sync::Mutex::new(Path::new("test").into()),
        tracking: Tracking::default(),
        fd: fd_from(end),
        size: AtomicU64::new(1 << 30),
        padded_from: None,
        block_device: false,
        alignment: 1,
        direct: false,
        read_only: false,
        made: false,
        unaligned: None,
        witness: None,
        covers_earlier: AtomicBool::new(false),
        name: FileName::new(Path::new("test"), true),
    }
}

#[test]
fn resize_of_a_read_only_file_names_both_steps() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let mut store = over(file);
    (store.size, store.read_only) = (AtomicU64::new(4096), true);
    let worker = ebb_io::Worker::start_alone("resize").unwrap();
    let resized = worker.handle().block_on(|io| async move {
        store.resize(&io, Resize { to: Some(8192), shrink: false }).await
    });
    let text = ebb_advice::full_text(&resized.unwrap().unwrap_err());
    assert!(text.contains("`truncate -s`, then resize the volume without a size"), "{text}");
}

#[test]
fn a_short_read_is_continued_and_the_end_is_short() {
    let (read_end, mut write_end) = std::io::pipe().unwrap();
    let feeder = std::thread::spawn(move || {
        for piece in 0..100u8 {
            write_end.write_all(&[piece; 1000]).unwrap();
            std::thread::yield_now();
        }
    });
    let store = over(read_end);
    let worker = ebb_io::Worker::start_alone("short-read").unwrap();
    let (whole, rest) = worker
        .handle()
        .block_on(|io| async move {
            let (result, buf) = store.read(&io, io.pool().get_for_test(90_000), 0).await;
            result.unwrap();
            let (rest, _) = store.read(&io, io.pool().get_for_test(20_000), 90_000).await;
            (buf.to_vec(), rest)
        })
        .unwrap();
    feeder.join().unwrap();
    for (piece, bytes) in whole.chunks(1000).enumerate() {
        assert!(bytes.iter().all(|b| usize::from(*b) == piece), "piece {piece}");
    }
    assert_eq!(rest.unwrap_err().kind, ErrorKind::Short);
}

#[test]
fn a_short_write_is_continued() {
    let (mut read_end, write_end) = std::io::pipe().unwrap();
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        read_end.read_to_end(&mut all).unwrap();
        all
    });
    let worker = ebb_io::Worker::start_alone("short-write").unwrap();
    worker
        .handle()
        .block_on(|io| async move {
            let store = over(write_end);
            let mut buf = io.pool().get_for_test(1 << 20);
            buf.iter_mut().zip(0u64..).for_each(|(b, at)| *b = u8::try_from(at % 251).unwrap());
            store.write(&io, buf, 0, false).await.0.unwrap();
        })
        .unwrap();
    let all = reader.join().unwrap();
    assert_eq!(all.len(), 1 << 20);
    assert!(all.iter().zip(0u64..).all(|(b, at)| u64::from(*b) == at % 251));
}

/// Direct I/O continues at a whole sector; bytes transferred beyond it are transferred again.
#[test]
fn only_whole_sectors_count_of_a_short_direct_transfer() {
    let (read_end, _write_end) = std::io::pipe().unwrap();
    let store = over(read_end).assume_alignment(512);
    let counted: Vec<_> = [0, 511, 512, 1000, 1024].map(|n| store.progress(n)).into();
    assert_eq!(counted, [0, 0, 512, 512, 1024]);
}

/// A pipe accepts little at a time.
#[test]
fn zeroes_take_no_memory_and_end_when_they_are_not_wanted() {
    let (mut read_end, write_end) = std::io::pipe().unwrap();
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        read_end.read_to_end(&mut all).unwrap();
        all
    });
    let worker = ebb_io::Worker::start_alone("zeroes").unwrap();
    worker
        .handle()
        .block_on(|io| async move {
            let store = over(write_end);
            let looks = Cell::new(0);
            let wanted = || {
                looks.set(looks.get() + 1);
                assert_eq!(io.pool().used_bytes(), 0, "memory for zeroes");
                looks.get() <= 2
            };
            let ended =
                ebb_block::write_zeroes_as_data(&store, &io, [0..1 << 40, 0..0], &wanted).await;
            let error = ended.unwrap_err();
            let (kind, at) = (ErrorKind::Closing, 2 << 20);
            assert_eq!((error.kind, error.offset, looks.get()), (kind, at, 3));
            let parts = [0..512, 1024..5120];
            ebb_block::write_zeroes_as_data(&store, &io, parts, &|| true).await.unwrap();
        })
        .unwrap();
    let all = reader.join().unwrap();
    assert_eq!(all.len(), (2 << 20) + 512 + 4096);
    assert!(all.iter().all(|byte| *byte == 0));
}

/// The sectors of a disk may become larger after its store was opened. An eventfd rejects transfers
/// of less than eight bytes as such a disk does, whatever file system the tests run on.
#[test]
fn rejected_alignment_has_its_own_kind_and_remedy() {
    let flags = rustix::event::EventfdFlags::empty();
    let store = FileStore { direct: true, ..over(rustix::event::eventfd(1, flags).unwrap()) };
    let worker = ebb_io::Worker::start_alone("misaligned").unwrap();
    let errors = worker.handle().block_on(|io| async move {
        let buf = || io.pool().get_for_test(4);
        let (read, _) = store.read(&io, buf(), 0).await;
        let (written, _) = store.write(&io, buf(), 0, false).await;
        [read, written].map(Result::unwrap_err)
    });
    for error in errors.unwrap() {
        assert_eq!(error.kind, ErrorKind::Misaligned, "{error:?}");
        assert!(error.to_string().contains("reopen the volume"), "{error}");
    }
}
