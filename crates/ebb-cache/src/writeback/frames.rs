//! The frames that a flush has to look at, in order, and how it does some at a time, so that other tasks of
//! the worker come in between.
//!
//! There may be millions. They are copied from a shard at a time, sorted a few thousand at a time, and
//! merged as they are used.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use ebb_store::Io;

use crate::pages::within;
use crate::shard::few_frames;
use crate::volume::{SHARDS, VolumeCache};

/// Frames whose marks change, or that are sorted, between two looks at other tasks.
pub(super) const MARKED_AT_ONCE: usize = 1024;
/// Frames that one of a flush's writes takes without a wait between two looks at other tasks.
pub(super) const WRITTEN_AT_ONCE: usize = 2;
/// Lists of more frames are made one at a time for each volume.
const SHORT: usize = 16 << 10;

/// Counts work, and yields when it is much.
#[derive(Default)]
pub(super) struct Turns(usize);

impl Turns {
    /// So much was done; [`MARKED_AT_ONCE`] may be in one turn.
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
    /// Sorted parts of `all`, as far as they were not used: the next frame's place, and their ends.
    parts: BinaryHeap<Reverse<(u64, usize, usize)>>,
    last: Option<u64>,
    left: usize,
    turns: Turns,
}

impl Frames {
    /// Adds some, in any order.
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
            self.turns.done(io, end - at).await;
        }
    }

    fn put(&mut self, at: usize, end: usize) {
        if let Some(&frame) = self.all.get(at).filter(|_| at < end) {
            self.parts.push(Reverse((frame, at, end)));
        }
    }

    /// How many there are, those that are in it twice counted twice.
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
    /// Whether a list of what the store lacks of a range might be long.
    pub(super) fn lists_much(&self, pages: &Range<u64>) -> bool {
        few_frames(pages).is_none()
            && (0..SHARDS).map(|shard| self.lock(shard).listed()).sum::<usize>() > SHORT
    }

    /// Frames with pages of a range that the store does not have.
    pub(super) async fn unsaved_frames(&self, io: &Io, pages: &Range<u64>) -> Frames {
        let mut frames = Frames::default();
        if let Some(few) = few_frames(pages) {
            let unsaved = |frame: u64| self.lock(VolumeCache::shard_of(frame)).unsaved(frame);
            let few = few.filter(|&frame| unsaved(frame) & within(frame, pages) != 0);
            frames.add(io, few.collect()).await;
            return frames;
        }
        let mut turns = Turns::default();
        for shard in 0..SHARDS {
            let mut some = Vec::new();
            let looked = self.lock(shard).unsaved_frames(pages, &mut some);
            // To look at one is a fraction of what sorting it is.
            turns.done(io, looked / 16).await;
            frames.add(io, some).await;
        }
        frames
    }
}
