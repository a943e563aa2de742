//! Requests that the kernel carries out straight from or to memory of another process, such as a guest's.

use std::io;

use ebb_block::{BlockError, ErrorKind, ForeignResult, ForeignVectors, Operation};
use ebb_io::Io;

use super::{FileStore, is_retry};

/// The longest transfer from or to a file in memory, bytes.
const AT_ONCE: usize = 256 << 10;

impl FileStore {
    /// Whether memory, offset and length are aligned as the file needs it. Buffered reads of block devices are left to
    /// those with a buffer: they run on a thread of the kernel.
    pub(super) fn transfers(&self, offset: u64, vectors: &ForeignVectors) -> bool {
        let aligned = (offset | vectors.remaining() as u64).is_multiple_of(self.alignment);
        let memory = usize::try_from(self.alignment).unwrap_or(usize::MAX);
        // A transfer from or to memory is carried out on the worker's thread.
        let short = !self.in_memory || vectors.remaining() <= AT_ONCE;
        // The zeroes beyond the end of a file need a buffer.
        let whole = self.padded_from.is_none();
        aligned
            && short
            && whole
            && (self.direct || !self.block_device)
            && vectors.is_aligned(memory)
    }

    pub(super) async fn read_vectors(
        &self,
        io: &Io,
        mut vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        let length = vectors.remaining();
        if !self.direct
            && !self.in_memory
            && let Some(count) = io.read_page_cache_foreign(&self.fd, &vectors, offset)
        {
            vectors.advance(count);
        }
        while vectors.remaining() > 0 {
            let at = offset + (length - vectors.remaining()) as u64;
            let result = if self.in_memory {
                io.read_foreign_now(&self.fd, &vectors, at)
            } else {
                let (result, returned) = io.read_foreign_at(&self.fd, vectors, at).await;
                vectors = returned;
                result
            };
            let range = (Operation::Read, offset, length as u64);
            if let Err(error) = self.note_transfer(&mut vectors, result, range) {
                return (Err(error), vectors);
            }
        }
        (Ok(()), vectors)
    }

    pub(super) async fn write_vectors(
        &self,
        io: &Io,
        mut vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> ForeignResult {
        let length = vectors.remaining();
        let _shared = match &self.unaligned {
            Some(lock) => Some(lock.read().await),
            None => None,
        };
        while vectors.remaining() > 0 {
            let at = offset + (length - vectors.remaining()) as u64;
            let result = if self.in_memory {
                io.write_foreign_now(&self.fd, &vectors, at)
            } else {
                let (result, returned) = io.write_foreign_at(&self.fd, vectors, at).await;
                vectors = returned;
                result
            };
            let range = (Operation::Write, offset, length as u64);
            if let Err(error) = self.note_transfer(&mut vectors, result, range) {
                return (Err(error), vectors);
            }
        }
        (Ok(()), vectors)
    }

    /// Notes what one operation has transferred.
    fn note_transfer(
        &self,
        vectors: &mut ForeignVectors,
        result: io::Result<usize>,
        (operation, offset, length): (Operation, u64, u64),
    ) -> Result<(), BlockError> {
        match result.map(|count| self.progress(count)) {
            Ok(0) => Err(BlockError::new(ErrorKind::Short, operation, offset, length)),
            Ok(count) => {
                vectors.advance(count);
                Ok(())
            }
            Err(error) if is_retry(&error) => Ok(()),
            Err(error) => Err(self.failure(error, operation, offset, length)),
        }
    }
}
