//! A published client of vhost-user-blk, the crate `blkio`, over all features it has: several queues, vectors, FUA, flushes,
//! zeroes, discards, memory regions that come and go, and a read-only volume.

use std::mem::MaybeUninit;

use blkio::{Blkio, BlkioStartOutcome, Blkioq, Completion, MemoryRegion, ReqFlags};
use testbed::harness::pattern::Random;
use testbed::{Error, Result, Server, Setup, check};

const SIZE: u64 = 64 << 20;

fn failed(error: impl std::fmt::Display) -> Error {
    Error::unexpected(format!("blkio: {error}"))
}

fn connect(server: &Server, volume: &str) -> Result<Blkio> {
    let mut client = Blkio::new("virtio-blk-vhost-user").map_err(failed)?;
    let path = server.vhost_socket(volume);
    client.set_str("path", &path.display().to_string()).map_err(failed)?;
    Ok(client)
}

/// Waits for one request; its result.
fn wait(queue: &mut Blkioq) -> Result<i32> {
    let mut done = [const { MaybeUninit::<Completion>::uninit() }];
    let count = queue.do_io(&mut done, 1, None, None).map_err(failed)?;
    check(count == 1, || format!("{count} completions"))?;
    // SAFETY: the call has filled as many as it returned.
    Ok(unsafe { done[0].assume_init_ref() }.ret)
}

fn succeed(queue: &mut Blkioq, what: &str) -> Result {
    let result = wait(queue)?;
    check(result == 0, || format!("{what}: {result}"))
}

/// The bytes of a region, while no request uses them.
fn bytes(region: &mut MemoryRegion) -> &mut [u8] {
    // SAFETY: the region is mapped, and no request is in flight.
    unsafe { std::slice::from_raw_parts_mut(region.addr as *mut u8, region.len) }
}

fn filled(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..length.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(length).collect()
}

#[test]
fn a_published_client_uses_every_feature_it_has() -> Result {
    let server = Setup::new()?.image("disk", SIZE)?.vhost_user().start()?;
    let mut client = connect(&server, "disk")?;
    client.connect().map_err(failed)?;
    check(client.get_u64("capacity").map_err(failed)? == SIZE, || "another capacity".into())?;
    for limit in ["max-discard-len", "max-write-zeroes-len"] {
        check(client.get_u64(limit).map_err(failed)? > 0, || format!("{limit} is 0"))?;
    }
    check(client.get_i32("max-queues").map_err(failed)? >= 4, || "fewer than 4 queues".into())?;
    check(client.get_bool("flush-needed").map_err(failed)?, || "no write cache is offered".into())?;
    client.set_i32("num-queues", 4).map_err(failed)?;
    let BlkioStartOutcome { mut queues, .. } = client.start().map_err(failed)?;
    // Regions are added after the queues were enabled, and removed again.
    for round in 0..3 {
        let mut region = client.alloc_mem_region(1 << 20).map_err(failed)?;
        client.map_mem_region(&region).map_err(failed)?;
        for (number, queue) in queues.iter_mut().enumerate() {
            let offset = (number as u64) << 20;
            let data = filled(round * 10 + number as u64, 65536);
            bytes(&mut region)[..65536].copy_from_slice(&data);
            let at = region.addr as *mut u8;
            queue.write(offset, at, 65536, 0, ReqFlags::empty());
            succeed(queue, "write")?;
            queue.write(offset + 65536, at, 4096, 0, ReqFlags::FUA);
            succeed(queue, "write with FUA")?;
            // Three pieces, in another order of addresses.
            let piece = |start: usize, length: usize| libc::iovec {
                iov_base: at.wrapping_add(start).cast(),
                iov_len: length,
            };
            let pieces = [piece(8192, 4096), piece(0, 512), piece(512, 3584)];
            queue.writev(offset + 131_072, pieces.as_ptr(), 3, 0, ReqFlags::empty());
            succeed(queue, "writev")?;
            queue.flush(0, ReqFlags::empty());
            succeed(queue, "flush")?;
            bytes(&mut region).fill(0);
            queue.read(offset, at, 65536, 0, ReqFlags::empty());
            succeed(queue, "read")?;
            check(bytes(&mut region)[..65536] == data, || "another content was read".into())?;
            bytes(&mut region).fill(0);
            let back = [piece(0, 4096), piece(65_536, 512), piece(66_048, 3584)];
            queue.readv(offset + 131_072, back.as_ptr(), 3, 0, ReqFlags::empty());
            succeed(queue, "readv")?;
            check(bytes(&mut region)[..4096] == data[8192..12288], || "readv: first piece".into())?;
            check(bytes(&mut region)[65_536..69_632] == data[..4096], || "readv: others".into())?;
            for flags in [ReqFlags::empty(), ReqFlags::NO_UNMAP] {
                queue.write_zeroes(offset, 8192, 0, flags);
                succeed(queue, "write zeroes")?;
            }
            queue.discard(offset + 65536, 4096, 0, ReqFlags::empty());
            succeed(queue, "discard")?;
            queue.read(offset, at, 65536, 0, ReqFlags::empty());
            succeed(queue, "read after zeroes")?;
            let mut expected = data.clone();
            expected[..8192].fill(0);
            check(bytes(&mut region)[..65536] == expected, || "zeroes are not there".into())?;
            queue.read(SIZE - 512, at, 1024, 0, ReqFlags::empty());
            check(wait(queue)? < 0, || "a read beyond the end succeeded".into())?;
        }
        client.unmap_mem_region(&region);
        client.free_mem_region(&region);
    }
    Ok(())
}

#[test]
fn a_published_client_reads_a_read_only_volume() -> Result {
    let setup = Setup::new()?.vhost_user();
    let path = setup.image_path("disk");
    let content = filled(7, 1 << 20);
    std::fs::write(&path, &content).map_err(Error::io("write the image"))?;
    let server = setup.volume(&format!("disk=file:{},read-only=true", path.display())).start()?;
    let mut client = connect(&server, "disk")?;
    client.set_bool("read-only", true).map_err(failed)?;
    client.connect().map_err(failed)?;
    let BlkioStartOutcome { mut queues, .. } = client.start().map_err(failed)?;
    let mut region = client.alloc_mem_region(1 << 20).map_err(failed)?;
    client.map_mem_region(&region).map_err(failed)?;
    let queue = queues.first_mut().ok_or_else(|| failed("no queue"))?;
    queue.read(0, region.addr as *mut u8, region.len, 0, ReqFlags::empty());
    succeed(queue, "read")?;
    check(bytes(&mut region)[..] == content, || "another content was read".into())?;
    queue.write(0, region.addr as *mut u8, 4096, 0, ReqFlags::empty());
    check(wait(queue)? < 0, || "a read-only disk was written to".into())
}
