//! The streams of a volume's sequential readers: what should be read ahead, and when.

use std::ops::Range;
use std::sync::atomic::AtomicU32;

use crate::pages::{FRAME_PAGES, PAGE};
use crate::sync::Mutex;

/// Streams remembered.
const STREAMS: usize = 8;
/// Pages of the first window and of the longest: 64 KiB and 1 MiB.
const WINDOW_MIN: u64 = 16;
pub(crate) const WINDOW_MAX: u64 = 256;
/// How far from its expected position a read of a stream may be, in pages: requests of one reader overtake
/// each other.
const SLACK: u64 = 64;
/// The same in lengths of the read, for a stream that is not established yet: single-page reads at random in
/// a small volume are often near an earlier one, and treating data in use as one-pass data would evict it
/// first.
const SLACK_READS: u64 = 2;
#[derive(Clone, Copy, Debug, Default)]
struct ReadStream {
    /// Where the next read is expected.
    next: u64,
    /// End of the data loaded for it.
    ahead: u64,
    /// Length of the last window; 0: not known to be sequential yet.
    window: u64,
    /// When it was last used, counted in reads.
    used: u64,
}

/// The streams of a volume. Pure bookkeeping: no clock, no I/O.
#[derive(Debug, Default)]
pub(crate) struct ReadStreams {
    list: [ReadStream; STREAMS],
    reads: u64,
}

/// How a read relates to the streams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadPattern {
    /// It continues a stream.
    pub(crate) sequential: bool,
    /// What should be loaded now, if anything.
    pub(crate) load: Option<Range<u64>>,
}

impl ReadStreams {
    /// Records a read of `pages` that was not wholly in memory, or met a mark.
    pub(crate) fn note(&mut self, pages: &Range<u64>, size: u64) -> ReadPattern {
        self.reads += 1;
        let used = self.reads;
        let near = SLACK.min(SLACK_READS * (pages.end - pages.start));
        let fits = |stream: &&mut ReadStream| {
            let slack = if stream.window > 0 { SLACK } else { near };
            // Reads served from memory are not recorded.
            let last = stream.next.max(stream.ahead) + slack;
            stream.used > 0 && (stream.next.saturating_sub(slack)..=last).contains(&pages.start)
        };
        let Some(stream) = self.list.iter_mut().find(fits) else {
            let fresh = ReadStream { next: pages.end, ahead: pages.end, window: 0, used };
            if let Some(oldest) = self.list.iter_mut().min_by_key(|stream| stream.used) {
                *oldest = fresh;
            }
            return ReadPattern::default();
        };
        stream.used = used;
        stream.next = stream.next.max(pages.end);
        let from = stream.ahead.max(pages.end);
        // The window before the last is not used up: enough is loaded.
        if stream.window > 0 && from > stream.next + stream.window + FRAME_PAGES {
            return ReadPattern { sequential: true, load: None };
        }
        stream.window = (stream.window * 2).clamp(WINDOW_MIN, WINDOW_MAX);
        let whole = (from + stream.window).next_multiple_of(FRAME_PAGES);
        stream.ahead = whole.min(size.div_ceil(PAGE));
        let load = (from < stream.ahead).then_some(from..stream.ahead);
        ReadPattern { sequential: true, load }
    }
}

/// Read-ahead state of a volume.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    pub(crate) streams: Mutex<ReadStreams>,
    /// Loads in flight.
    pub(crate) loading: AtomicU32,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 30;

    #[test]
    fn a_stream_is_detected_at_its_second_read_and_its_window_doubles() {
        let mut streams = ReadStreams::default();
        assert_eq!(streams.note(&(0..1), SIZE), ReadPattern::default());
        let noted = streams.note(&(1..2), SIZE);
        assert_eq!(noted, ReadPattern { sequential: true, load: Some(2..32) });
        // A read that meets the mark at the start of the last window starts the next one.
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
    fn random_reads_start_no_read_ahead() {
        let mut streams = ReadStreams::default();
        let mut at = 1u64;
        for _ in 0..1000 {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = at >> 20 & 0xffff_ffff;
            assert_eq!(streams.note(&(page..page + 1), u64::MAX), ReadPattern::default());
        }
    }

    #[test]
    fn random_reads_in_a_small_volume_form_no_stream() {
        let mut streams = ReadStreams::default();
        let (mut state, mut taken) = (7u64, 0);
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let page = (state >> 33) % 12_288;
            taken += u32::from(streams.note(&(page..page + 1), 12_288 * PAGE).sequential);
        }
        assert!(taken < 100, "{taken} of 10000 counted as part of a stream");
    }

    #[test]
    fn several_streams_coexist_and_stop_at_the_end_of_the_volume() {
        let mut streams = ReadStreams::default();
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
        let mut streams = ReadStreams::default();
        for (number, page) in [0, 32, 16, 48, 80, 64].into_iter().enumerate() {
            let noted = streams.note(&(page..page + 16), SIZE);
            assert_eq!(noted.sequential, number > 0, "{page}");
        }
    }
}
