//! Read-ahead: sequential readers find their data in memory before they ask.
//!
//! A volume remembers a few **streams**: where the next read of each is expected. From the second read
//! that fits on, a window beyond it is loaded beside the request; the first buffer of what was loaded
//! carries a mark, and who reads that has the next window loaded, twice as long, up to
//! [`WINDOW_MAX`]. All of it is taken for one-pass data: lent first and evicted first.
//!
//! Nothing here is touched by a hit but the mark. At most [`AT_ONCE`] loads of a volume are under way.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ebb_store::{Io, Store};

use crate::pages::{FRAME_PAGES, PAGE};
use crate::sync::Mutex;
use crate::volume::VolumeCache;

/// Streams remembered.
const STREAMS: usize = 8;
/// Pages of the first window and of the longest: 64 KiB and 1 MiB.
const WINDOW_MIN: u64 = 16;
pub(crate) const WINDOW_MAX: u64 = 256;
/// How far from where it is expected a read of a stream may be, pages: requests of one reader overtake each
/// other.
const SLACK: u64 = 64;
/// The same, in lengths of the read, of what may only become a stream: reads of a page all over a small
/// volume are often near an earlier one, and data in use that is taken for one-pass data is the first to go.
const SLACK_READS: u64 = 2;
/// Loads of a volume at a time.
const AT_ONCE: u32 = 4;

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Where the next read is expected.
    next: u64,
    /// End of what was loaded for it.
    ahead: u64,
    /// Length of the last window; 0: not seen to be sequential yet.
    window: u64,
    /// When it was last used, in reads noted.
    used: u64,
}

/// The streams of a volume. Pages in, pages out: no clock, no I/O.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    list: [Stream; STREAMS],
    reads: u64,
}

/// What a read is part of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Noted {
    /// It continues a stream.
    pub(crate) sequential: bool,
    /// What should be loaded now, if anything.
    pub(crate) load: Option<Range<u64>>,
}

impl Streams {
    /// A read of `pages` was asked for that was not wholly in memory, or has met a mark.
    pub(crate) fn note(&mut self, pages: &Range<u64>, size: u64) -> Noted {
        self.reads += 1;
        let used = self.reads;
        let near = SLACK.min(SLACK_READS * (pages.end - pages.start));
        let fits = |stream: &&mut Stream| {
            let slack = if stream.window > 0 { SLACK } else { near };
            // What is in memory was read without a note.
            let last = stream.next.max(stream.ahead) + slack;
            stream.used > 0 && (stream.next.saturating_sub(slack)..=last).contains(&pages.start)
        };
        let Some(stream) = self.list.iter_mut().find(fits) else {
            let fresh = Stream { next: pages.end, ahead: pages.end, window: 0, used };
            if let Some(oldest) = self.list.iter_mut().min_by_key(|stream| stream.used) {
                *oldest = fresh;
            }
            return Noted::default();
        };
        stream.used = used;
        stream.next = stream.next.max(pages.end);
        let from = stream.ahead.max(pages.end);
        // The window before the last is not used up: enough is loaded.
        if stream.window > 0 && from > stream.next + stream.window + FRAME_PAGES {
            return Noted { sequential: true, load: None };
        }
        stream.window = (stream.window * 2).clamp(WINDOW_MIN, WINDOW_MAX);
        let whole = (from + stream.window).next_multiple_of(FRAME_PAGES);
        stream.ahead = whole.min(size.div_ceil(PAGE));
        let load = (from < stream.ahead).then_some(from..stream.ahead);
        Noted { sequential: true, load }
    }
}

/// What a volume knows of its readers.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    streams: Mutex<Streams>,
    loading: AtomicU32,
}

/// One load, counted while it lasts.
struct Loading(Arc<VolumeCache>);

impl Drop for Loading {
    fn drop(&mut self) {
        self.0.ahead.loading.fetch_sub(1, Ordering::Relaxed);
    }
}

impl VolumeCache {
    /// Notes a read, and starts loading what will be wanted next. True if the read is part of a stream.
    pub(crate) fn look_ahead(
        self: &Arc<Self>,
        io: &Io,
        store: &Arc<Store>,
        pages: &Range<u64>,
    ) -> bool {
        let noted = self.ahead.streams.lock().note(pages, self.size());
        if let Some(load) = noted.load
            && self.cache.has_room_ahead()
        {
            if self.ahead.loading.fetch_add(1, Ordering::Relaxed) < AT_ONCE {
                let loading = Loading(self.clone());
                let (own, store) = (io.clone(), store.clone());
                let load = async move { loading.0.load(&own, &store, load).await };
                io.spawn(load).detach();
            } else {
                self.ahead.loading.fetch_sub(1, Ordering::Relaxed);
            }
        }
        noted.sequential
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 30;

    #[test]
    fn a_stream_is_seen_at_its_second_read_and_its_window_doubles() {
        let mut streams = Streams::default();
        assert_eq!(streams.note(&(0..1), SIZE), Noted::default());
        let noted = streams.note(&(1..2), SIZE);
        assert_eq!(noted, Noted { sequential: true, load: Some(2..32) });
        // Who reads the mark at the start of what was loaded last has the next window loaded.
        let (mut mark, mut end) = (2, 32);
        let mut lengths = Vec::new();
        for _ in 0..7 {
            let load = streams.note(&(mark..mark + 1), SIZE).load.unwrap();
            assert_eq!(load.start, end);
            assert_eq!(streams.note(&(mark + 1..mark + 2), SIZE).load, None, "enough is loaded");
            lengths.push(load.end - load.start);
            (mark, end) = (load.start, load.end);
        }
        assert_eq!(lengths, [32, 64, 128, 256, 256, 256, 256]);
    }

    #[test]
    fn random_reads_load_nothing() {
        let mut streams = Streams::default();
        let mut at = 1u64;
        for _ in 0..1000 {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = at >> 20 & 0xffff_ffff;
            assert_eq!(streams.note(&(page..page + 1), u64::MAX), Noted::default());
        }
    }

    #[test]
    fn reads_all_over_a_small_volume_are_no_stream() {
        let mut streams = Streams::default();
        let (mut state, mut taken) = (7u64, 0);
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = (state >> 33) % 12_288;
            taken += u32::from(streams.note(&(page..page + 1), 12_288 * PAGE).sequential);
        }
        assert!(taken < 100, "{taken} of 10000 were taken for part of a stream");
    }

    #[test]
    fn several_streams_go_on_beside_each_other_and_end_at_the_end() {
        let mut streams = Streams::default();
        for step in 0..100u64 {
            for reader in 0..6u64 {
                let page = (reader << 20) + step * 2;
                let noted = streams.note(&(page..page + 2), u64::MAX);
                assert_eq!(noted.sequential, step > 0);
            }
        }
        let end = 40 * PAGE;
        streams.note(&(30..32), end);
        let noted = streams.note(&(32..34), end);
        assert_eq!(noted.load, Some(34..40));
        assert_eq!(streams.note(&(38..40), end).load, None);
    }

    #[test]
    fn requests_may_overtake_each_other() {
        let mut streams = Streams::default();
        for (number, page) in [0, 32, 16, 48, 80, 64].into_iter().enumerate() {
            let noted = streams.note(&(page..page + 16), SIZE);
            assert_eq!(noted.sequential, number > 0, "{page}");
        }
    }
}
