//! Every store runs the conformance suite of `ebb-block`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;
use crate::server as nbd;

use std::sync::Arc;

use common::{MIB, create, file, folder, tmpfs_folder};
use ebb_block::{BlockStore, Tracked, conformance};
use ebb_io::Worker;
use ebb_store::{
    Direct, FileStore, MemoryStore, NbdAddress, NbdOptions, NbdStore, NullStore, OpenOptions,
    Store, TestStore,
};
use nbd::Server;

/// Runs the suite on a store, called as its users call it.
fn conforms<S: BlockStore + Send + 'static>(store: S) {
    let worker = Worker::start_alone("conformance").unwrap();
    let checked = worker
        .handle()
        .block_on(|io| async move { conformance::check(&io, &store).await })
        .expect("see the panic above");
    assert_eq!(checked, Ok(()));
}

fn file_of(folder: &tempfile::TempDir, direct: Direct) -> FileStore {
    create(&file(folder, "image"), 4 * MIB, direct)
}

#[test]
fn a_file_conforms_through_the_page_cache_and_with_direct_io() {
    let folder = folder();
    conforms(Tracked(file_of(&folder, Direct::Off)));
    conforms(Tracked(file_of(&folder, Direct::Auto)));
}

#[test]
fn a_file_with_large_sectors_conforms() {
    let folder = folder();
    conforms(Tracked(file_of(&folder, Direct::Auto).assume_alignment(4096)));
}

#[test]
fn a_read_only_file_conforms_and_refuses_changes_as_such() {
    let folder = folder();
    let path = file(&folder, "image");
    let size = usize::try_from(4 * MIB).unwrap();
    let content: Vec<u8> = (0..size).map(|at| u8::try_from(at / 512 % 251).unwrap()).collect();
    std::fs::write(&path, &content).unwrap();
    for direct in [Direct::Off, Direct::Auto] {
        let options =
            OpenOptions { read_only: true, direct, existing: true, ..OpenOptions::default() };
        let store = Store::File(FileStore::open(&path, &options).unwrap().0);
        let content = content[..usize::try_from(conformance::AREA).unwrap()].to_vec();
        let worker = Worker::start_alone("conformance").unwrap();
        // Boxed: the worker's stack is small for the unoptimized suite.
        let checked = worker.handle().block_on(|io| async move {
            Box::pin(conformance::check_read_only(&io, &store, &content)).await
        });
        assert_eq!(checked, Some(Ok(())), "{direct:?}");
    }
}

/// A tmpfs cannot zero a range.
#[test]
fn a_file_on_tmpfs_conforms() {
    let folder = tmpfs_folder();
    conforms(Tracked(file_of(&folder, Direct::Auto)));
}

#[test]
fn memory_and_the_test_store_conform() {
    conforms(Tracked(MemoryStore::new(4 * MIB)));
    // Requests that overlap in time interleave.
    let store = TestStore::new(4 * MIB, 1);
    store.waits.store(2, std::sync::atomic::Ordering::Relaxed);
    conforms(Tracked(store));
}

#[test]
fn a_null_store_conforms_but_for_keeping_data() {
    let worker = Worker::start_alone("conformance").unwrap();
    let checked = worker.handle().block_on(|io| async move {
        let store = Tracked(NullStore::new(4 * MIB));
        conformance::check_forgetful(&io, &store).await
    });
    assert_eq!(checked, Some(Ok(())));
}

fn remote(server: &Server) -> NbdStore {
    let address = NbdAddress::Unix(server.socket().into());
    NbdStore::open(NbdOptions::new(address, "")).unwrap().0
}

#[test]
fn a_remote_export_conforms() {
    let server = Server::nbdkit(&["memory", "4M"]);
    conforms(Tracked(remote(&server)));
}

/// Blocks of 4 KiB, requests of at most 8 KiB, simple replies.
#[test]
fn a_remote_export_with_large_blocks_conforms() {
    let server = Server::nbdkit(&[
        "--no-sr",
        "--filter=blocksize-policy",
        "memory",
        "4M",
        "blocksize-minimum=4096",
        "blocksize-preferred=4096",
        "blocksize-maximum=8192",
        "blocksize-error-policy=error",
    ]);
    conforms(Tracked(remote(&server)));
}

#[test]
fn a_remote_export_without_zeroes_and_extents_conforms() {
    let server = Server::nbdkit(&[
        "--filter=nozero",
        "--filter=fua",
        "--filter=noextents",
        "memory",
        "4M",
        "fuamode=discard",
        "zeromode=none",
    ]);
    conforms(Tracked(remote(&server)));
}

/// The enum that volumes use dispatches all of it.
#[test]
fn the_store_of_a_volume_conforms_with_each_variant() {
    let folder = folder();
    let server = Server::nbdkit(&["memory", "4M"]);
    conforms(Store::File(file_of(&folder, Direct::Auto)));
    conforms(Store::Memory(MemoryStore::new(4 * MIB)));
    conforms(Store::Nbd(remote(&server)));
    conforms(Store::Test(Arc::new(TestStore::new(4 * MIB, 2))));
}
