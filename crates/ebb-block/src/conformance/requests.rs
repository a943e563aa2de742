//! The checks of each kind of request.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::task::Poll;

use ebb_io::Io;

use super::{AREA, Suite, Violation, all, ensure, fill, index};
use crate::error::{BlockError, ErrorKind};
use crate::store::{BlockStore, ZeroFlags};
use crate::{BLOCK, SECTOR};

/// How often futures are dropped.
const CANCELLED: u64 = 8;

/// Polls a future a few times, and drops it, complete or not.
pub(super) async fn begin_and_drop<F: Future>(io: &Io, future: F, polls: u64) {
    let mut future = Box::pin(future);
    for _ in 0..polls {
        if poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await {
            return;
        }
        io.yield_now().await;
    }
}

impl<S: BlockStore> Suite<'_, S> {
    /// Requests for whole blocks, parts of blocks, and more than a copying store does at once.
    pub(super) async fn lengths_and_offsets(&mut self) -> Result<(), Violation> {
        let lengths = [512, 1024, 4096, 4608, 8192, 65536, 66048, 262_144, 300_032];
        let offsets = [0, 512, 3584, 4096, 65_024, 131_072, 400_384];
        for length in lengths {
            for offset in offsets {
                self.write(offset, length, false).await?;
                self.compare(offset, length).await?;
                self.compare_around(offset, length).await?;
            }
        }
        self.compare(0, AREA).await
    }

    /// Writes anywhere, and reads it back.
    pub(super) async fn write_and_read(
        &mut self,
        offset: u64,
        length: u64,
    ) -> Result<(), Violation> {
        let (buf, seed) = self.buffer(length).await;
        let (result, mut data) = self.store.write(self.io, buf, offset, false).await;
        ensure!(result.is_ok(), "write of {length} at {offset}: {result:?}");
        fill(&mut data, seed);
        if !self.keeps {
            data.fill(0);
        }
        let read = self.read(offset, length).await?;
        ensure!(*read == *data, "a read of {length} at {offset} returned other data");
        if offset + length <= AREA {
            self.note(offset, length, Some(&read));
        }
        Ok(())
    }

    /// The last bytes of the store.
    pub(super) async fn the_end(&mut self) -> Result<(), Violation> {
        let size = self.store.size();
        for length in [BLOCK * 3, BLOCK, SECTOR] {
            // Known again by the reads of the whole area if the store is no larger than that.
            let covered = (size - length).min(AREA);
            self.note(covered, AREA - covered, None);
            self.write_and_read(size - length, length).await?;
        }
        if size < 2 * AREA {
            self.write(0, AREA, false).await?;
        }
        Ok(())
    }

    /// All requests with a range are refused, and change nothing.
    pub(super) async fn refused(
        &self,
        offset: u64,
        length: u64,
        kind: ErrorKind,
    ) -> Result<(), Violation> {
        let (io, store, size) = (self.io, self.store, self.store.size());
        let flags = ZeroFlags { may_unmap: true, fast_only: false };
        let mut buf = io.pool().take(index(length)).await;
        buf.fill(0xaa);
        let (read, buf) = store.read(io, buf, offset).await;
        let (written, buf) = store.write(io, buf, offset, false).await;
        ensure!(buf.len() as u64 == length, "a refused request returned {} bytes", buf.len());
        let results: [(&str, Result<(), BlockError>); 6] = [
            ("read", read),
            ("write", written),
            ("discard", store.discard(io, offset, length).await),
            ("write-zeroes", store.write_zeroes(io, offset, length, flags).await),
            ("extents", store.extents(io, offset, length, 1).await.map(|_| ())),
            ("prefetch", store.prefetch(io, offset, length).await),
        ];
        for (name, result) in results {
            let found = result.as_ref().err().map(|error| error.kind);
            ensure!(
                found == Some(kind),
                "{name} of {length} at {offset}: {result:?}, not {kind:?}"
            );
        }
        ensure!(store.size() == size, "a refused request changed the size");
        Ok(())
    }

    pub(super) async fn refused_ranges(&self) -> Result<(), Violation> {
        let size = self.store.size();
        let before = self.read(size - BLOCK, BLOCK).await?;
        let last = u64::MAX - (SECTOR - 1);
        for (offset, length) in [(size, 512), (size - 512, 1024), (last, 512), (last - 512, 2048)] {
            self.refused(offset, length, ErrorKind::OutOfRange).await?;
        }
        for (offset, length) in [(1, 512), (0, 100), (4095, 4097)] {
            self.refused(offset, length, ErrorKind::Invalid).await?;
        }
        let after = self.read(size - BLOCK, BLOCK).await?;
        ensure!(*before == *after, "a refused request changed the end of the store");
        self.compare(0, AREA).await
    }

    /// Flushes succeed, alone and together; a write with FUA is a write.
    pub(super) async fn flushes(&mut self) -> Result<(), Violation> {
        self.stable().await?;
        for (offset, length) in [(0, 4096), (512, 512), (65_024, 66_048)] {
            self.write(offset, length, true).await?;
            self.compare_around(offset, length).await?;
        }
        for result in all((0..4).map(|_| self.store.flush(self.io))).await {
            ensure!(result.is_ok(), "one of several flushes: {result:?}");
        }
        self.compare(0, AREA).await
    }

    pub(super) async fn zeroes(&mut self) -> Result<(), Violation> {
        let ranges = [(0, 4096), (4096, 65536), (512, 512), (3584, 9216), (70_144, 200_192)];
        for may_unmap in [true, false] {
            for (offset, length) in ranges {
                self.write(offset, length, false).await?;
                let flags = ZeroFlags { may_unmap, fast_only: false };
                let result = self.store.write_zeroes(self.io, offset, length, flags).await;
                ensure!(result.is_ok(), "zeroes, {length} at {offset}: {result:?}");
                self.note(offset, length, Some(&vec![0; index(length)]));
                self.compare_around(offset, length).await?;
            }
            self.fast_zeroes(may_unmap).await?;
        }
        // What is not wanted may remain.
        let (offset, length) = (131_072, 262_144);
        self.write(offset, length, false).await?;
        let asked = Cell::new(0);
        let wanted = || {
            asked.set(asked.get() + 1);
            false
        };
        let flags = ZeroFlags { may_unmap: true, fast_only: false };
        let result = self.store.write_zeroes_while(self.io, offset, length, flags, &wanted).await;
        let kind = result.as_ref().err().map(|error| error.kind);
        let ended = kind == Some(ErrorKind::Closing);
        ensure!(result.is_ok() || ended, "zeroes that are not wanted: {result:?}");
        ensure!(ended == (asked.get() > 0), "zeroes were written although they are not wanted");
        self.old_or_zero(offset, length).await
    }

    /// Either fast, or refused without a change.
    async fn fast_zeroes(&mut self, may_unmap: bool) -> Result<(), Violation> {
        let (offset, length) = (0, AREA / 2);
        self.write(offset, length, false).await?;
        let flags = ZeroFlags { may_unmap, fast_only: true };
        let result = self.store.write_zeroes(self.io, offset, length, flags).await;
        match &result {
            Ok(()) => {
                let fast = self.store.capabilities().fast_zero;
                ensure!(fast, "fast zeroes succeed, and the capabilities deny them");
                self.note(offset, length, Some(&vec![0; index(length)]));
            }
            Err(error) => {
                let kind = error.kind == ErrorKind::Unsupported;
                ensure!(kind, "fast zeroes: {result:?}, not Unsupported");
            }
        }
        self.compare(0, AREA).await
    }

    /// Each sector of the range is as before, or zero; the model learns it.
    async fn old_or_zero(&mut self, offset: u64, length: u64) -> Result<(), Violation> {
        let buf = self.read(offset, length).await?;
        let sector = index(SECTOR);
        for (at, now) in buf.chunks(sector).enumerate() {
            let position = index(offset) + at * sector;
            let old = *now == self.model[position..position + sector];
            let zero = now.iter().all(|byte| *byte == 0);
            ensure!(old || zero, "the sector at {position} holds neither old data nor zeroes");
        }
        self.note(offset, length, Some(&buf));
        self.compare_around(offset, length).await
    }

    pub(super) async fn discards(&mut self) -> Result<(), Violation> {
        for (offset, length) in [(0, 65536), (8704, 16384), (512, 512), (4096, 4096), (0, AREA)] {
            self.write(0, AREA, false).await?;
            let result = self.store.discard(self.io, offset, length).await;
            ensure!(result.is_ok(), "discard of {length} at {offset}: {result:?}");
            self.old_or_zero(offset, length).await?;
            self.write(offset, length, false).await?;
            self.compare_around(offset, length).await?;
        }
        Ok(())
    }

    pub(super) async fn extents(&mut self) -> Result<(), Violation> {
        self.write(0, AREA, false).await?;
        let flags = ZeroFlags { may_unmap: true, fast_only: false };
        for (offset, length) in [(65_536, 65_536), (200_704, 4096), (600_064, 512)] {
            let result = self.store.write_zeroes(self.io, offset, length, flags).await;
            ensure!(result.is_ok(), "zeroes, {length} at {offset}: {result:?}");
            self.note(offset, length, Some(&vec![0; index(length)]));
        }
        for (start, end) in [(0, AREA), (512, 300_032), (66_048, 66_560)] {
            for limit in [1, 2, 100] {
                let mut at = start;
                while at < end {
                    at = self.some_extents(at, end, limit).await?;
                }
            }
        }
        Ok(())
    }

    /// One call; returns where the list ends.
    pub(super) async fn some_extents(
        &self,
        start: u64,
        end: u64,
        limit: usize,
    ) -> Result<u64, Violation> {
        let list = self.store.extents(self.io, start, end - start, limit).await;
        let list = list.map_err(|error| format!("extents from {start}: {error:?}"))?;
        ensure!(!list.is_empty() && list.len() <= limit, "{} extents of {limit}", list.len());
        let mut at = start;
        for extent in list {
            ensure!(extent.offset == at, "an extent at {} and not at {at}", extent.offset);
            ensure!(extent.length > 0, "an empty extent at {at}");
            at += extent.length;
            ensure!(at <= end, "an extent beyond the range: {extent:?}");
            if extent.hole {
                let data = self.read(extent.offset, extent.length).await?;
                let zero = data.iter().all(|byte| *byte == 0);
                ensure!(zero, "a hole at {} that holds data", extent.offset);
            }
        }
        Ok(at)
    }

    pub(super) async fn prefetches(&self) -> Result<(), Violation> {
        for (offset, length) in [(0, AREA), (512, 512), (4096, 65536)] {
            let result = self.store.prefetch(self.io, offset, length).await;
            ensure!(result.is_ok(), "prefetch of {length} at {offset}: {result:?}");
        }
        self.compare(0, AREA).await
    }

    /// Access in place, where there is any.
    pub(super) async fn direct_access(&mut self) -> Result<(), Violation> {
        let direct = self.store.has_direct_access();
        for (offset, length) in [(0, 4096), (512, 1024), (3584, 70_144)] {
            let mut seen = Vec::new();
            let done =
                self.store.read_in_place(offset, length, |part| seen.extend_from_slice(part));
            ensure!(done == direct, "read in place: {done}, access: {direct}");
            ensure!(direct || seen.is_empty(), "read in place without direct access");
            let mut put = 0;
            self.seed += 1;
            let mut data = vec![0; index(length)];
            fill(&mut data, self.seed);
            let from = &data;
            let done = self.store.write_in_place(offset, length, |part| {
                part.copy_from_slice(&from[put..put + part.len()]);
                put += part.len();
            });
            ensure!(done == direct, "write in place: {done}, access: {direct}");
            ensure!(put as u64 == if direct { length } else { 0 }, "wrote {put} in place");
            if direct {
                let old = &self.model[index(offset)..index(offset + length)];
                ensure!(seen == *old, "a read in place at {offset} returned other data");
                self.note(offset, length, Some(&data));
            }
            self.compare_around(offset, length).await?;
        }
        Ok(())
    }

    /// Requests at the same time, for different ranges.
    pub(super) async fn concurrent_requests(&mut self) -> Result<(), Violation> {
        const EACH: u64 = 20_480;
        let mut writes = Vec::new();
        for number in 0..16 {
            let (buf, _) = self.buffer(EACH).await;
            // Neighbours share a block where blocks are larger than 512 bytes.
            let offset = 512 + number * EACH;
            self.note(offset, EACH, Some(&buf));
            writes.push(self.store.write(self.io, buf, offset, number % 4 == 0));
        }
        for (result, _) in all(writes).await {
            ensure!(result.is_ok(), "one of several writes: {result:?}");
        }
        let reads = (0..16).map(|number| self.compare(512 + number * EACH, EACH));
        for result in all(reads).await {
            result?;
        }
        self.compare(0, AREA).await
    }

    /// Each sector holds the data of one of two writes that overlap.
    pub(super) async fn overlapping_writes(&mut self) -> Result<(), Violation> {
        let (first, second) = ((4096, 40_960), (20_992, 40_960));
        let buffers = [self.buffer(first.1).await.0, self.buffer(second.1).await.0];
        let copies = buffers.each_ref().map(|buf| buf.to_vec());
        let offsets = [first.0, second.0];
        let (io, store) = (self.io, self.store);
        let writes = buffers.into_iter().zip(offsets);
        let writes = writes.map(|(buf, offset)| store.write(io, buf, offset, false));
        for (result, _) in all(writes).await {
            ensure!(result.is_ok(), "one of two writes: {result:?}");
        }
        let end = second.0 + second.1;
        let now = self.read(first.0, end - first.0).await?;
        for (sector, data) in now.chunks(index(SECTOR)).enumerate() {
            let at = first.0 + sector as u64 * SECTOR;
            let is = |which: usize| {
                let from = at.checked_sub(offsets[which]).map(index);
                from.and_then(|from| copies[which].get(from..from + index(SECTOR))) == Some(data)
            };
            let kept = if self.keeps { is(0) || is(1) } else { data.iter().all(|b| *b == 0) };
            ensure!(kept, "the sector at {at} is of neither of two writes that overlapped");
        }
        self.note(first.0, end - first.0, Some(&now));
        Ok(())
    }

    /// Requests whose future is dropped leave the store usable and change nothing outside their range, which is not
    /// known from then on.
    pub(super) async fn cancelled_requests(&mut self) -> Result<(), Violation> {
        let (offset, length) = (AREA / 2 + 512, AREA / 4);
        self.note(offset, length, None);
        let (io, store) = (self.io, self.store);
        for round in 0..CANCELLED {
            let (buf, _) = self.buffer(length).await;
            let own = io.pool().take(index(length)).await;
            let flags = ZeroFlags { may_unmap: round % 2 == 0, fast_only: false };
            let polls = 1 + round % 3;
            begin_and_drop(io, store.write(io, buf, offset, false), polls).await;
            begin_and_drop(io, store.read(io, own, offset), polls).await;
            begin_and_drop(io, store.write_zeroes(io, offset, length, flags), polls).await;
            begin_and_drop(io, store.discard(io, offset, length), polls).await;
            begin_and_drop(io, store.extents(io, offset, length, 8), polls).await;
            self.compare(0, AREA / 2).await?;
            self.write(0, 65_536, false).await?;
            self.compare(0, AREA / 2).await?;
            self.read(offset, length).await?;
        }
        Ok(())
    }
}
