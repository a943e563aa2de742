//! Read-ahead: sequential readers find their data in memory.
//!
//! A volume remembers a few **streams**, each with the position where its next read is expected. From the
//! second read that fits a stream, the window after it is loaded concurrently with the request. The first
//! buffer of a window carries a mark; a read that meets the mark starts loading the next window, twice as
//! long, up to [`WINDOW_MAX`](crate::read_streams::WINDOW_MAX). This data counts as one-pass data: it is lent
//! first and evicted first.
//!
//! A hit touches nothing of this except the mark. At most [`AT_ONCE`] loads of a volume are in flight.

use std::ops::Range;
use std::sync::atomic::Ordering;

use ebb_block::Io;

use crate::volume::StoreCache;

/// Concurrent loads of a volume.
const AT_ONCE: u32 = 4;

/// One load, counted while it exists.
struct ReadAheadLoad(StoreCache);

impl Drop for ReadAheadLoad {
    fn drop(&mut self) {
        self.0.ahead.loading.fetch_sub(1, Ordering::Relaxed);
    }
}

impl StoreCache {
    /// Records a read, and starts loading what will be wanted next. True if the read is part of a stream.
    pub(crate) fn start_read_ahead(&self, io: &Io, pages: &Range<u64>) -> bool {
        let noted = self.ahead.streams.lock().note(pages, self.size());
        if let Some(load) = noted.load
            && self.cache.has_room_ahead()
        {
            if self.ahead.loading.fetch_add(1, Ordering::Relaxed) < AT_ONCE {
                let loading = ReadAheadLoad(self.clone());
                let own = io.clone();
                let load = async move { loading.0.load(&own, load).await };
                io.spawn(load).detach();
            } else {
                self.ahead.loading.fetch_sub(1, Ordering::Relaxed);
            }
        }
        noted.sequential
    }
}
