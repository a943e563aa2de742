//! The conformance suite finds the faults that a store may have: each fault is planted in a store that conforms.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_block::{
    BlockError, BlockStore, Buf, BufResult, Capabilities, ErrorKind, Extent, Identity, Io,
    Operation, Remaining, Resize, ResizeError, Tracked, Tracking, ZeroFlags, conformance,
};
use ebb_io::Worker;

/// What a store does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// Only the requests that a disk of 512-byte sectors sees most.
    IgnoresSmallWrites,
    ReadsOneByteWrong,
    WritesBeyondTheRange,
    ChangesTheBuffer,
    CutsTheBuffer,
    FailsAFlush,
    IgnoresFua,
    DiscardsTheNeighbour,
    DiscardLeavesRubbish,
    ZeroesTooLittle,
    ZeroesSlowlyAlthoughFastOnly,
    DeniesFastZeroes,
    HidesDataInAHole,
    TooManyExtents,
    ExtentsWithAGap,
    ResizesToAnySize,
    ResizesAndKeepsItsSize,
    ChangesItsIdentity,
    BouncesWholeBlocks,
    ClaimsDirectAccess,
    ForgetsARangeAfterCancelling,
    /// Of a store that is read-only.
    DeniesThatItIsReadOnly,
    GrowsAlthoughReadOnly,
}

struct Faulty {
    fault: Fault,
    read_only: bool,
    bytes: Mutex<Vec<u8>>,
    calls: Mutex<u64>,
    tracking: Tracking,
}

impl Faulty {
    fn new(fault: Fault) -> Faulty {
        let bytes = Mutex::new(vec![0; 2 << 20]);
        let (calls, tracking) = (Mutex::default(), Tracking::default());
        Faulty { fault, read_only: false, bytes, calls, tracking }
    }

    /// With [`content`]. It leaves it to `Tracked` to refuse changes.
    fn read_only(fault: Fault) -> Faulty {
        let store = Faulty { read_only: true, ..Faulty::new(fault) };
        let content = content();
        store.bytes()[..content.len()].copy_from_slice(&content);
        store
    }

    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == fault
    }
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

/// What a read-only store holds.
fn content() -> Vec<u8> {
    (0..conformance::AREA).map(|at| u8::try_from((at / 7 + at / 512) % 251).unwrap()).collect()
}

/// Notes that a write was dropped before its end.
struct Unfinished<'a>(&'a Faulty, bool);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if self.1 && self.0.has(Fault::ForgetsARangeAfterCancelling) {
            self.0.bytes()[..65536].fill(0);
        }
    }
}

impl BlockStore for Faulty {
    fn size(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn capabilities(&self) -> Capabilities {
        let fast_zero = !self.has(Fault::DeniesFastZeroes);
        Capabilities {
            read_only: self.read_only && !self.has(Fault::DeniesThatItIsReadOnly),
            discard: true,
            fast_zero,
            alignment: 1,
            direct: false,
            read_piece: None,
        }
    }

    fn identity(&self) -> Identity {
        let mut calls = self.calls.lock().unwrap();
        *calls += u64::from(self.has(Fault::ChangesItsIdentity));
        Identity::of_key(format!("faulty {calls}"))
    }

    fn place(&self) -> String {
        "a test".to_owned()
    }

    fn tracking(&self) -> Option<&Tracking> {
        Some(&self.tracking)
    }

    fn bounce_bytes(&self, _offset: u64, _length: usize) -> usize {
        if self.has(Fault::BouncesWholeBlocks) { 1 } else { 0 }
    }

    async fn read(&self, _io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let at = index(offset);
        let length = buf.len();
        buf.copy_from_slice(&self.bytes()[at..at + length]);
        if self.has(Fault::ReadsOneByteWrong) && length == 66_048 {
            buf[66_000] ^= 1;
        }
        if self.has(Fault::CutsTheBuffer) && length > 65_536 {
            buf.set_len(65_536);
        }
        (Ok(()), buf)
    }

    async fn write(&self, io: &Io, mut buf: Buf, offset: u64, fua: bool) -> BufResult {
        let (at, length) = (index(offset), buf.len());
        let ignored = self.has(Fault::IgnoresSmallWrites) && length == 512
            || self.has(Fault::IgnoresFua) && fua;
        let mut unfinished = Unfinished(self, true);
        io.yield_now().await;
        unfinished.1 = false;
        if !ignored {
            self.bytes()[at..at + length].copy_from_slice(&buf);
        }
        if self.has(Fault::WritesBeyondTheRange) && length == 4608 {
            self.bytes()[at + length] ^= 1;
        }
        if self.has(Fault::ChangesTheBuffer) {
            buf[0] ^= 1;
        }
        (Ok(()), buf)
    }

    async fn flush(&self, _io: &Io) -> Result<(), BlockError> {
        let mut calls = self.calls.lock().unwrap();
        *calls += 1;
        if self.has(Fault::FailsAFlush) && *calls == 2 {
            let source = std::io::Error::from_raw_os_error(5);
            return Err(BlockError::from_io(source, Operation::Flush, 0, 0));
        }
        Ok(())
    }

    async fn discard(&self, _io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let (at, end) = (index(offset), index(offset + length));
        let mut bytes = self.bytes();
        bytes[at..end].fill(0);
        if self.has(Fault::DiscardsTheNeighbour) {
            bytes[end] = 0;
        }
        if self.has(Fault::DiscardLeavesRubbish) {
            bytes[at] = 1;
        }
        Ok(())
    }

    async fn zero_range(
        &self,
        _io: &Io,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<Remaining, BlockError> {
        let short = u64::from(self.has(Fault::ZeroesTooLittle) && length == 512);
        self.bytes()[index(offset)..index(offset + length - short)].fill(0);
        if self.has(Fault::ZeroesSlowlyAlthoughFastOnly) && flags.fast_only {
            return Err(BlockError::new(
                ErrorKind::Unsupported,
                Operation::WriteZeroes,
                offset,
                length,
            ));
        }
        Ok([0..0, 0..0])
    }

    async fn extents(
        &self,
        _io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let hole = self.has(Fault::HidesDataInAHole);
        let gap = if self.has(Fault::ExtentsWithAGap) { 512 } else { 0 };
        if self.has(Fault::TooManyExtents) && length > 512 {
            let first = Extent { offset, length: 512, hole };
            let second = Extent { offset: offset + 512, length: length - 512, hole };
            return Ok(vec![first, second]);
        }
        let _ = limit;
        Ok(vec![Extent { offset: offset + gap, length, hole }])
    }

    fn has_direct_access(&self) -> bool {
        self.has(Fault::ClaimsDirectAccess)
    }

    async fn check_resize(&self, _io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let to = order.to.unwrap_or(self.size());
        if self.has(Fault::ResizesToAnySize) {
            return Ok(to);
        }
        if self.read_only && !self.has(Fault::GrowsAlthoughReadOnly) {
            return Err(ResizeError::Unsupported { why: "it is read-only", remedy: "write" });
        }
        ebb_block::check_size_change(self.size(), to, 512, order.shrink).map(|()| to)
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let to = self.check_resize(io, order).await?;
        if !self.has(Fault::ResizesAndKeepsItsSize) {
            self.bytes().resize(index(to), 0);
        }
        Ok(to)
    }
}

#[test]
fn each_fault_of_a_store_is_found() {
    use Fault::{
        BouncesWholeBlocks, ChangesItsIdentity, ChangesTheBuffer, ClaimsDirectAccess,
        CutsTheBuffer, DeniesFastZeroes, DiscardLeavesRubbish, DiscardsTheNeighbour,
        ExtentsWithAGap, FailsAFlush, ForgetsARangeAfterCancelling, HidesDataInAHole, IgnoresFua,
        IgnoresSmallWrites, Nothing, ReadsOneByteWrong, ResizesAndKeepsItsSize, ResizesToAnySize,
        TooManyExtents, WritesBeyondTheRange, ZeroesSlowlyAlthoughFastOnly, ZeroesTooLittle,
    };
    let worker = Worker::start_alone("conformance").unwrap();
    for (fault, text) in [
        (IgnoresSmallWrites, "returned other data"),
        (ReadsOneByteWrong, "returned other data"),
        (WritesBeyondTheRange, "returned other data"),
        (ChangesTheBuffer, "changed its buffer"),
        (CutsTheBuffer, "returned 65536 bytes"),
        (FailsAFlush, "one of several flushes"),
        (IgnoresFua, "returned other data"),
        (DiscardsTheNeighbour, "returned other data"),
        (DiscardLeavesRubbish, "neither old data nor zeroes"),
        (ZeroesTooLittle, "returned other data"),
        (ZeroesSlowlyAlthoughFastOnly, "returned other data"),
        (DeniesFastZeroes, "the capabilities deny them"),
        (HidesDataInAHole, "that holds data"),
        (TooManyExtents, "2 extents of 1"),
        (ExtentsWithAGap, "an extent at 512 and not at 0"),
        (ResizesToAnySize, "resized to 0 bytes"),
        (ResizesAndKeepsItsSize, "a size of 2097152 bytes"),
        (ChangesItsIdentity, "the identity changes"),
        (BouncesWholeBlocks, "a bounce buffer for whole blocks"),
        (ClaimsDirectAccess, "read in place: false"),
        (ForgetsARangeAfterCancelling, "returned other data"),
    ] {
        let store = Tracked(Faulty::new(fault));
        let checked = worker
            .handle()
            .block_on(|io| async move { conformance::check(&io, &store).await })
            .unwrap();
        let violation = checked.expect_err(&format!("{fault:?} was not found"));
        assert!(violation.contains(text), "{fault:?}: {violation}");
    }
    let store = Tracked(Faulty::new(Nothing));
    let checked = worker
        .handle()
        .block_on(|io| async move { conformance::check(&io, &store).await })
        .unwrap();
    assert_eq!(checked, Ok(()));
}

#[test]
fn each_fault_of_a_read_only_store_is_found() {
    use Fault::{
        BouncesWholeBlocks, ClaimsDirectAccess, DeniesThatItIsReadOnly, ExtentsWithAGap,
        GrowsAlthoughReadOnly, HidesDataInAHole, Nothing, ReadsOneByteWrong, TooManyExtents,
    };
    let worker = Worker::start_alone("conformance").unwrap();
    for (fault, text) in [
        (DeniesThatItIsReadOnly, "does not say so"),
        (GrowsAlthoughReadOnly, "was resized"),
        (ReadsOneByteWrong, "returned other data"),
        (HidesDataInAHole, "that holds data"),
        (TooManyExtents, "2 extents of 1"),
        (ExtentsWithAGap, "an extent at 512 and not at 0"),
        (ClaimsDirectAccess, "read in place: false"),
        (BouncesWholeBlocks, "a bounce buffer for whole blocks"),
        (Nothing, ""),
    ] {
        let store = Tracked(Faulty::read_only(fault));
        let check = |io| async move { conformance::check_read_only(&io, &store, &content()).await };
        match worker.handle().block_on(check).unwrap() {
            Ok(()) => assert_eq!(fault, Nothing, "not found"),
            Err(violation) => {
                assert!(fault != Nothing && violation.contains(text), "{fault:?}: {violation}");
            }
        }
    }
}
