//! The frames that a flush has to visit, in order, and how it yields to other tasks of the worker in between.
//!
//! There may be millions. They are copied one shard at a time, sorted a few thousand at a time, and merged on
//! use.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use ebb_block::Io;

use crate::pages::within;
use crate::shard::{SHARDS, few_frames, shard_of};
use crate::volume::VolumeCache;

/// Frames that are marked or sorted before the task yields.
pub(super) const MARKED_AT_ONCE: usize = 1024;
/// Frames that one of a flush's writes takes without waiting before the task yields.
pub(super) const WRITTEN_AT_ONCE: usize = 2;
/// Longer lists are built by one flush of a volume at a time.
const SHORT: usize = 16 << 10;

/// Counts work and yields after enough of it.
#[derive(Default)]
pub(super) struct YieldCounter(usize);

impl YieldCounter {
    /// Records this much work; a task does [`MARKED_AT_ONCE`] between two yields.
    pub(super) async fn done(&mut self, io: &Io, work: usize) {
        self.0 += work;
        if self.0 >= MARKED_AT_ONCE {
            self.0 = 0;
            io.yield_now().await;
        }
    }
}

/// Frames in order, each once.
#[derive(Default)]
pub(super) struct Frames {
    all: Vec<u64>,
    /// Sorted sections of `all` that are not used up: position of the next frame, and the section's end.
    parts: BinaryHeap<Reverse<(u64, usize, usize)>>,
    last: Option<u64>,
    left: usize,
    yields: YieldCounter,
}

impl Frames {
    /// Adds frames, in any order.
    pub(super) async fn add(&mut self, io: &Io, some: Vec<u64>) {
        let first = self.all.len();
        self.left += some.len();
        if first == 0 {
            self.all = some;
        } else {
            self.all.extend(some);
        }
        let end = self.all.len();
        for at in (first..end).step_by(MARKED_AT_ONCE) {
            let end = end.min(at + MARKED_AT_ONCE);
            if let Some(part) = self.all.get_mut(at..end) {
                part.sort_unstable();
            }
            self.put(at, end);
            self.yields.done(io, end - at).await;
        }
    }

    fn put(&mut self, at: usize, end: usize) {
        if let Some(&frame) = self.all.get(at).filter(|_| at < end) {
            self.parts.push(Reverse((frame, at, end)));
        }
    }

    /// How many there are; duplicates count twice.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    pub(super) fn next(&mut self) -> Option<u64> {
        while let Some(Reverse((frame, at, end))) = self.parts.pop() {
            self.left = self.left.saturating_sub(1);
            self.put(at + 1, end);
            if self.last.replace(frame) != Some(frame) {
                return Some(frame);
            }
        }
        None
    }
}

impl VolumeCache {
    /// Whether a list of frames of a range that the store lacks might be long.
    pub(super) fn lists_many_frames(&self, pages: &Range<u64>) -> bool {
        few_frames(pages).is_none()
            && (0..SHARDS).map(|shard| self.lock(shard).listed()).sum::<usize>() > SHORT
    }

    /// Frames with pages of a range that the store does not have.
    pub(super) async fn unsaved_frames(&self, io: &Io, pages: &Range<u64>) -> Frames {
        let mut frames = Frames::default();
        if let Some(few) = few_frames(pages) {
            let unsaved = |frame: u64| self.lock(shard_of(frame)).unsaved(frame);
            let few = few.filter(|&frame| unsaved(frame) & within(frame, pages) != 0);
            frames.add(io, few.collect()).await;
            return frames;
        }
        let mut yields = YieldCounter::default();
        for shard in 0..SHARDS {
            let mut some = Vec::new();
            let visited = self.lock(shard).unsaved_frames(pages, &mut some);
            // Visiting a frame costs a fraction of sorting it.
            yields.done(io, visited / 16).await;
            frames.add(io, some).await;
        }
        frames
    }
}
