//! The store in this process: the conformance suite, locks, a fenced client, dropped and late requests, extents.

use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use ebb_block::{BlockStore, ErrorKind, Resize, ResizeError, Tracked, ZeroFlags, conformance};
use ebb_io::{Io, Worker};
use ebb_store_rbd::{RbdEncryption, RbdEncryptionFormat, RbdError, RbdOptions, RbdStore};
use testbed::harness::ceph::Ceph;
use testbed::harness::process::{self, PATIENCE};
use testbed::{Error, Result, check};

const MIB: u64 = 1 << 20;

/// Opens the libraries of the packages in this process, so that the store finds them instead of installed ones.
fn open_libraries(ceph: &Ceph) -> Result {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !*done {
        for path in ceph.libraries() {
            let flags = libc::RTLD_NOW | libc::RTLD_GLOBAL;
            let library = dlopen2::raw::Library::open_with_flags(&path, Some(flags));
            let library = library.map_err(|error| Error::unexpected(error.to_string()))?;
            // Their threads run until the process ends.
            std::mem::forget(library);
        }
        *done = true;
    }
    Ok(())
}

fn start() -> Result<Ceph> {
    let ceph = Ceph::start()?;
    open_libraries(&ceph)?;
    Ok(ceph)
}

fn options(ceph: &Ceph, image: &str) -> RbdOptions {
    RbdOptions { conf: Some(ceph.configuration()), ..RbdOptions::new("rbd", image) }
}

fn open(options: RbdOptions) -> Result<RbdStore> {
    RbdStore::open(options).map(|(store, _)| store).map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::unexpected(error.to_string())
}

/// Runs `work` on a worker of its own.
fn on_worker<F, Fut, T>(work: F) -> Result<T>
where
    F: FnOnce(Io) -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let worker = Worker::start_alone("rbd").map_err(Error::io("start a worker"))?;
    let done = worker.handle().block_on(work);
    done.ok_or_else(|| Error::unexpected("the worker ended: see the panic above"))
}

/// Writes `bytes` bytes of a value at an offset.
async fn write(
    store: &impl BlockStore,
    io: &Io,
    (at, bytes): (u64, usize),
    value: u8,
) -> Option<ErrorKind> {
    let mut buf = io.pool().take(bytes).await;
    buf.fill(value);
    store.write(io, buf, at, true).await.0.err().map(|error| error.kind)
}

/// The value of all bytes there, if they are equal.
async fn read(store: &impl BlockStore, io: &Io, (at, bytes): (u64, usize)) -> Option<u8> {
    let buf = io.pool().take(bytes).await;
    let (result, buf) = store.read(io, buf, at).await;
    result.ok()?;
    buf.iter().all(|byte| *byte == buf[0]).then_some(buf[0])
}

#[test]
fn an_image_a_snapshot_a_namespace_and_an_encrypted_image_conform() -> Result {
    let ceph = start()?;
    ceph.create_image("disk", 64)?;
    ceph.rbd(&["namespace", "create", "rbd/tenant"])?;
    ceph.rbd(&["create", "--size", "16M", "rbd/tenant/disk"])?;
    let mut in_namespace = options(&ceph, "disk");
    in_namespace.namespace = "tenant".into();
    let secret = ceph.dir().join("secret");
    std::fs::write(&secret, "right").map_err(Error::io("write a passphrase"))?;
    ceph.create_image("encrypted", 64)?;
    let passphrase = secret.display().to_string();
    ceph.rbd(&["encryption", "format", "rbd/encrypted", "luks1", &passphrase])?;
    let mut encrypted = options(&ceph, "encrypted");
    let format = RbdEncryptionFormat::Luks1;
    encrypted.encryption = Some(RbdEncryption { format, passphrase: secret });
    for options in [options(&ceph, "disk"), in_namespace, encrypted] {
        let store = Tracked(open(options)?);
        let checked = on_worker(|io| async move { conformance::check(&io, &store).await })?;
        check(checked == Ok(()), || format!("{checked:?}"))?;
    }
    // What the suite left in the image is what its snapshot has.
    let export = ceph.dir().join("export").display().to_string();
    ceph.rbd(&["snap", "create", "--no-progress", "rbd/disk@one"])?;
    ceph.rbd(&["export", "--no-progress", "rbd/disk@one", &export])?;
    let content = std::fs::read(&export).map_err(Error::io("read the export"))?;
    let content = content.get(..1 << 20).map(<[u8]>::to_vec).unwrap_or_default();
    let mut snapshot = options(&ceph, "disk");
    snapshot.snapshot = Some("one".into());
    let store = Tracked(open(snapshot)?);
    let checked =
        on_worker(|io| async move { conformance::check_read_only(&io, &store, &content).await })?;
    check(checked == Ok(()), || format!("{checked:?}"))
}

#[test]
fn what_is_missing_is_told_with_its_remedy() -> Result {
    let ceph = start()?;
    ceph.rbd(&["create", "--size", "8M", "--image-feature", "layering", "rbd/unlocked"])?;
    let error = |options: RbdOptions| RbdStore::open(options).map(drop).unwrap_err();
    let missing = error(options(&ceph, "absent"));
    check(matches!(missing, RbdError::Missing { what: "image", .. }), || missing.to_string())?;
    let mut other = options(&ceph, "unlocked");
    other.pool = "absent".into();
    let missing = error(other);
    check(matches!(missing, RbdError::Missing { what: "pool", .. }), || missing.to_string())?;
    let unlocked = error(options(&ceph, "unlocked"));
    check(matches!(unlocked, RbdError::NoLockFeature { .. }), || unlocked.to_string())?;
    let mut read_only = options(&ceph, "unlocked");
    read_only.read_only = true;
    open(read_only)?;
    let mut absent = options(&ceph, "unlocked");
    absent.conf = Some(Path::new("/nonexistent/ceph.conf").into());
    let configuration = error(absent);
    check(matches!(configuration, RbdError::Configuration { .. }), || configuration.to_string())
}

#[test]
fn a_second_writer_is_refused_and_a_fenced_one_is_offline_for_good() -> Result {
    let ceph = start()?;
    ceph.create_image("disk", 16)?;
    ceph.create_image("other", 16)?;
    let records = ceph.dir().join("records");
    let with_records =
        |image: &str| RbdOptions { records: Some(records.clone()), ..options(&ceph, image) };
    let store = open(with_records("disk"))?;
    let owner = ceph.lock_owner("disk")?.unwrap_or_default();
    // A client of this host that has the record, one without, and one that only asks for the lock when it writes.
    let second = RbdStore::open(with_records("disk")).map(drop);
    check(matches!(second, Err(RbdError::InUse { .. })), || format!("{second:?}"))?;
    let begun = Instant::now();
    let second = RbdStore::open(options(&ceph, "disk")).map(drop);
    println!("second writer refused after {:?}", begun.elapsed());
    check(matches!(&second, Err(RbdError::Locked { owner: told, .. }) if *told == owner), || {
        format!("{second:?} instead of {owner}")
    })?;
    let bench = ["bench", "--io-type", "write", "--io-total", "64K", "--io-size", "4K", "rbd/disk"];
    let bench = ceph.tool("rbd").args(bench).run()?;
    bench.check(!bench.status.success(), "the second writer to be refused")?;
    let state = on_worker(|io| async move {
        let ok = write(&store, &io, (0, 4096), 7).await;
        (store, ok)
    })?;
    let (store, ok) = state;
    check(ok.is_none() && ceph.lock_owner("disk")?.is_some_and(|now| now == owner), || {
        format!("the writer lost its lock: {ok:?}")
    })?;

    ceph.blocklist(&owner)?;
    let (store, kinds) = on_worker(|io| async move {
        let mut kinds = Vec::new();
        for number in 0..100 {
            kinds.push(write(&store, &io, (4096, 4096), number).await);
        }
        let flushed = store.flush(&io).await.map_err(|error| error.kind);
        kinds.push(flushed.err());
        (store, kinds)
    })?;
    check(kinds.iter().all(|kind| *kind == Some(ErrorKind::Offline)), || format!("{kinds:?}"))?;
    let offline = store.state().offline.unwrap_or_default();
    check(offline.contains("blocklist"), || format!("offline because of `{offline}`"))?;
    drop(store);
    // The handle is not used for further images, and what the fenced client wrote later is on no OSD.
    let store = open(with_records("disk"))?;
    let values = on_worker(|io| async move {
        [read(&store, &io, (0, 4096)).await, read(&store, &io, (4096, 4096)).await]
    })?;
    check(values == [Some(7), Some(0)], || format!("{values:?}"))
}

#[test]
fn dropped_and_late_requests_keep_their_buffers_until_librbd_is_done() -> Result {
    let ceph = start()?;
    ceph.create_image("disk", 16)?;
    let mut quick = options(&ceph, "disk");
    quick.timeout = Duration::from_secs(1);
    let store = open(quick)?;
    ceph.halt_osd(true)?;
    // In the same worker: one is dropped, one passes its time, one is ended by the abort.
    let (store, late, back) = on_worker(|io| async move {
        let mut buf = io.pool().take(65536).await;
        buf.fill(1);
        {
            let mut dropped = pin!(store.write(&io, buf, 0, false));
            let first = poll_fn(|cx| Poll::Ready(dropped.as_mut().poll(cx).is_pending())).await;
            assert!(first, "a halted OSD has answered");
        }
        let mut buf = io.pool().take(65536).await;
        buf.fill(2);
        let (late, back) = store.write(&io, buf, 65536, false).await;
        let back = back.iter().all(|byte| *byte == 2);
        // The memory of the dropped request is not used for another one meanwhile.
        let mut others = Vec::new();
        for _ in 0..64 {
            let mut buf = io.pool().take(65536).await;
            buf.fill(0xee);
            others.push(buf);
        }
        drop(others);
        (store, late.map_err(|error| error.full_text()), back)
    })?;
    check(back && late.clone().is_err_and(|text| text.contains("within 1 s")), || {
        format!("a late write: {late:?}, its buffer came back unchanged: {back}")
    })?;
    ceph.halt_osd(false)?;
    let mut patient = options(&ceph, "disk");
    patient.read_only = true;
    let store = (store, open(patient)?);
    let values = on_worker(|io| async move {
        // librbd carries both out, in order, before a later write of the same object.
        let ended = write(&store.0, &io, (131_072, 4096), 3).await;
        let values =
            [read(&store.1, &io, (0, 65536)).await, read(&store.1, &io, (65536, 65536)).await];
        (ended, values)
    })?;
    check(values.1 == [Some(1), Some(2)], || format!("{values:?}"))
}

#[test]
fn an_aborted_store_ends_its_requests_while_the_osd_does_not_answer() -> Result {
    let ceph = start()?;
    ceph.create_image("disk", 16)?;
    let store = open(RbdOptions { timeout: Duration::ZERO, ..options(&ceph, "disk") })?;
    ceph.halt_osd(true)?;
    let kinds = on_worker(|io| async move {
        let store = std::rc::Rc::new(store);
        let (one, two) = (store.clone(), io.clone());
        let waiting = io.spawn(async move { write(&*one, &two, (0, 4096), 1).await });
        let (one, two) = (store.clone(), io.clone());
        let flush = io.spawn(async move { one.flush(&two).await.err().map(|e| e.kind) });
        io.sleep(Duration::from_millis(50)).await;
        store.abort();
        [waiting.await, flush.await, write(&*store, &io, (0, 4096), 1).await]
    })?;
    ceph.halt_osd(false)?;
    check(kinds == [Some(ErrorKind::Closing); 3], || format!("{kinds:?}"))
}

#[test]
fn extents_are_those_of_rbd_diff_and_a_new_size_is_seen() -> Result {
    let ceph = start()?;
    ceph.create_image("parent", 64)?;
    let store = open(options(&ceph, "parent"))?;
    on_worker(|io| async move {
        for object in [1, 2, 7] {
            write(&store, &io, (object * 4 * MIB + 8192, 4096), 9).await;
        }
    })?;
    process::until("the image is closed", PATIENCE, || {
        Ok(ceph.lock_owner("parent")?.is_none().then_some(()))
    })?;
    ceph.rbd(&["snap", "create", "--no-progress", "rbd/parent@base"])?;
    ceph.rbd(&["snap", "protect", "rbd/parent@base"])?;
    ceph.rbd(&["clone", "rbd/parent@base", "rbd/clone"])?;
    let store = open(options(&ceph, "clone"))?;
    let (store, list) = on_worker(|io| async move {
        write(&store, &io, (11 * 4 * MIB, 4096), 9).await;
        let zeroes = ZeroFlags { may_unmap: true, fast_only: true };
        let zeroed = store.write_zeroes(&io, 8 * MIB, 4 * MIB, zeroes).await;
        assert!(zeroed.is_ok(), "{zeroed:?}");
        let list = store.extents(&io, 512, store.size() - 512, 100).await;
        (store, list.map_err(|error| error.full_text()))
    })?;
    let list = list.map_err(failed)?;
    let data: Vec<_> =
        list.iter().filter(|extent| !extent.hole).map(|e| (e.offset, e.length)).collect();
    let diff = ceph.rbd(&["diff", "--whole-object", "--format", "json", "rbd/clone"])?.json()?;
    let rows = diff.as_array().cloned().unwrap_or_default();
    let mut expected: Vec<(u64, u64)> = Vec::new();
    for row in rows.iter().filter(|row| row["exists"] == "true") {
        let number = |name: &str| row[name].as_u64().unwrap_or(0);
        match expected.last_mut() {
            Some(last) if last.0 + last.1 == number("offset") => last.1 += number("length"),
            _ => expected.push((number("offset"), number("length"))),
        }
    }
    let whole = list.iter().map(|extent| extent.length).sum::<u64>() == 64 * MIB - 512;
    check(data == expected && !data.is_empty() && whole, || {
        format!("{list:?}\ninstead of\n{expected:?}\n{}", diff)
    })?;

    // Both ways, by `rbd`, while the volume has the lock.
    // What its opening has changed does not count.
    store.take_changed();
    ceph.rbd(&["resize", "--no-progress", "--size", "80M", "rbd/clone"])?;
    process::until("the new size is noticed", PATIENCE, || Ok(store.take_changed().then_some(())))?;
    let (store, grown) = on_worker(|io| async move {
        let grown = store.resize(&io, Resize { to: None, shrink: false }).await;
        let end = write(&store, &io, (80 * MIB - 4096, 4096), 5).await;
        (store, (grown.map_err(|error| error.to_string()), end))
    })?;
    check(grown == (Ok(80 * MIB), None), || format!("{grown:?}"))?;
    let (store, own) = on_worker(|io| async move {
        let refused = store.resize(&io, Resize { to: Some(32 * MIB), shrink: false }).await;
        assert!(matches!(refused, Err(ResizeError::Shrinks { .. })), "{refused:?}");
        let own = store.resize(&io, Resize { to: Some(32 * MIB), shrink: true }).await;
        (store, own.map_err(|error| error.to_string()))
    })?;
    let info = ceph.rbd(&["info", "--format", "json", "rbd/clone"])?.json()?;
    check(own == Ok(32 * MIB) && info["size"].as_u64() == Some(32 * MIB), || {
        format!("{own:?} {info}")
    })?;
    ceph.rbd(&["resize", "--no-progress", "--allow-shrink", "--size", "16M", "rbd/clone"])?;
    let short = on_worker(|io| async move {
        let buf = io.pool().take(4096).await;
        store.read(&io, buf, 20 * MIB).await.0.err().map(|error| error.kind)
    })?;
    check(short == Some(ErrorKind::Short), || format!("beyond the end: {short:?}"))
}
