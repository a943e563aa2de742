//! Requests of sectors on stores with larger blocks: each byte is correct, up to the largest
//! request, and the memory used in addition to the request's own buffer is what the store declares.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;
use crate::server;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use common::{MIB, create, file, folder};
use ebb_block::{BlockStore, Io};
use ebb_io::{BufPool, MAX_BUF, Worker};
use ebb_store::{Direct, NbdAddress, NbdOptions, NbdStore, Store};
use server::Server;

const SIZE: u64 = 72 * MIB;

/// The result, and the most bytes that buffers held meanwhile.
async fn peak<T>(io: &Io, future: impl Future<Output = T>) -> (T, usize) {
    let (mut future, mut most) = (pin!(future), 0);
    std::future::poll_fn(|cx| {
        let poll = future.as_mut().poll(cx);
        most = most.max(io.pool().used_bytes());
        poll.map(|result| (result, most))
    })
    .await
}

fn place(offset: u64) -> usize {
    usize::try_from(offset).unwrap()
}

/// A store and its expected content.
struct Pair {
    store: Arc<Store>,
    expected: Vec<u8>,
    stamp: u64,
    /// Taken by requests of whole blocks, in addition to their buffers.
    usual: usize,
}

impl Pair {
    fn allowed(&self, offset: u64, length: usize) -> usize {
        let bounce = match self.store.bounce_bytes(offset, length) {
            0 => 0,
            bytes => BufPool::footprint(bytes),
        };
        assert!(bounce <= 2 * place(u64::from(self.store.capabilities().alignment)));
        BufPool::footprint(length) + bounce + self.usual
    }

    async fn write(&mut self, io: &Io, offset: u64, length: usize, fua: bool) {
        let mut buf = io.pool().take(length).await;
        for word in buf.chunks_mut(256) {
            self.stamp =
                self.stamp.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(offset | 1);
            word.fill(u8::try_from(self.stamp >> 56).unwrap());
        }
        let range = place(offset)..place(offset) + length;
        self.expected[range.clone()].copy_from_slice(&buf);
        let ((result, buf), most) = peak(io, self.store.write(io, buf, offset, fua)).await;
        result.unwrap();
        assert!(*buf == self.expected[range], "callers may write it again: {length} at {offset}");
        assert!(most <= self.allowed(offset, length), "{most} bytes: write {length} at {offset}");
    }

    async fn read(&self, io: &Io, offset: u64, length: usize) -> usize {
        let mut buf = io.pool().take(length).await;
        buf.fill(0xee);
        let ((result, buf), most) = peak(io, self.store.read(io, buf, offset)).await;
        result.unwrap();
        let range = place(offset)..place(offset) + length;
        assert!(*buf == self.expected[range], "read {length} at {offset}");
        most
    }

    async fn check(&self, io: &Io, offset: u64, length: usize) {
        let most = self.read(io, offset, length).await;
        assert!(most <= self.allowed(offset, length), "{most} bytes: read {length} at {offset}");
    }
}

async fn run(io: Io, store: Arc<Store>) {
    let block = u64::from(store.capabilities().alignment);
    let (expected, stamp) = (vec![0; place(SIZE)], 1);
    let mut pair = Pair { store, expected, stamp, usual: 0 };
    pair.usual = pair.read(&io, 0, 65536).await - 65536;
    // Around a few blocks, with all alignments.
    let sectors = block / 512;
    let step = if block == 4096 { 1 } else { sectors - 1 };
    let places = |from: u64| (from..from + 2 * sectors).step_by(place(step));
    for first in places(0) {
        for length in places(1).chain([3 * sectors + 1, 6 * sectors - 1]) {
            pair.write(&io, first * 512, place(length * 512), false).await;
            pair.check(&io, 0, place(10 * block)).await;
        }
        pair.check(&io, first * 512, place(block)).await;
        pair.check(&io, first * 512, place(2 * block)).await;
        pair.check(&io, first * 512, place(4 * block + 512)).await;
    }
    // The largest request.
    for offset in [512, 3584, SIZE - MAX_BUF as u64 - 512] {
        pair.write(&io, offset, MAX_BUF, true).await;
        pair.check(&io, offset, MAX_BUF).await;
        pair.check(&io, 512, MAX_BUF - 1024).await;
    }
    for from in (0..SIZE).step_by(1 << 20) {
        pair.check(&io, from, 1 << 20).await;
    }
}

fn test(store: Store) {
    let worker = Worker::start_alone("unaligned").unwrap();
    let done = worker.handle().block_on(move |io| run(io, Arc::new(store)));
    assert!(done.is_some(), "the run panicked; see above");
}

fn remote(block: &str) {
    let (size, block) = (SIZE.to_string(), format!("blocksize-minimum={block}"));
    let policy = ["--filter=blocksize-policy", "memory", &size, &block, "blocksize-preferred=64K"];
    let server = Server::nbdkit(
        &[&policy[..], &["blocksize-maximum=32M", "blocksize-error-policy=error"]].concat(),
    );
    let options = NbdOptions::new(NbdAddress::Unix(server.socket().into()), "");
    test(Store::Nbd(NbdStore::open(options).unwrap().0));
}

#[test]
fn the_largest_requests_on_a_server_with_blocks_of_4096_bytes() {
    remote("4096");
}

#[test]
fn the_largest_requests_on_a_server_with_blocks_of_64_kib() {
    remote("65536");
}

#[test]
fn the_largest_requests_on_a_file_with_sectors_of_4096_bytes() {
    let folder = folder();
    let store = create(&file(&folder, "image"), SIZE, Direct::Auto).assume_alignment(4096);
    test(Store::File(store));
}
