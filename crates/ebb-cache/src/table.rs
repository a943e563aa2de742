//! Tables that grow and shrink in small steps: slots by number, and frames by frame number.
//!
//! They change under a shard's lock, so no operation moves more than one chunk or bucket: [`Slab`] adds
//! chunks of [`CHUNK`] entries, [`FrameIndex`] is a linear hash table that splits or joins one bucket per
//! change.

/// Entries in a chunk.
const CHUNK: usize = 256;
/// No entry.
pub(crate) const NONE: u32 = u32::MAX;

/// An entry of a [`Slab`]: each has a link to another entry, which also chains free entries.
pub(crate) trait Linked: Default {
    fn link(&self) -> u32;
    fn set_link(&mut self, link: u32);
}

/// Entries by number. Numbers of freed entries are reused.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    chunks: Vec<Box<[T]>>,
    free: u32,
    used: u32,
}

fn place(entry: u32) -> (usize, usize) {
    let entry = usize::try_from(entry).unwrap_or(usize::MAX);
    (entry / CHUNK, entry % CHUNK)
}

impl<T: Linked> Slab<T> {
    pub(crate) fn new() -> Slab<T> {
        Slab { chunks: Vec::new(), free: NONE, used: 0 }
    }

    /// Entries in use.
    pub(crate) fn used(&self) -> u32 {
        self.used
    }

    /// One more than the highest number ever used.
    pub(crate) fn numbers(&self) -> u32 {
        u32::try_from(self.chunks.len() * CHUNK).unwrap_or(NONE)
    }

    #[inline]
    pub(crate) fn get(&self, entry: u32) -> Option<&T> {
        let (chunk, at) = place(entry);
        self.chunks.get(chunk)?.get(at)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, entry: u32) -> Option<&mut T> {
        let (chunk, at) = place(entry);
        self.chunks.get_mut(chunk)?.get_mut(at)
    }

    /// Allocates an entry for `value`; returns its number and the entry's previous content. `None` (and the
    /// value is dropped) beyond 2^32 - 1 entries.
    pub(crate) fn insert(&mut self, value: T) -> Option<(u32, T)> {
        if self.free == NONE {
            let first = u32::try_from(self.chunks.len() * CHUNK).ok()?;
            let chunk: Box<[T]> = (0..CHUNK).map(|_| T::default()).collect();
            self.chunks.push(chunk);
            for at in (0..u32::try_from(CHUNK).unwrap_or(0)).rev() {
                self.release(first + at);
            }
        }
        let entry = self.free;
        let slot = self.get_mut(entry)?;
        let left = std::mem::replace(slot, value);
        self.free = left.link();
        self.used += 1;
        Some((entry, left))
    }

    fn release(&mut self, entry: u32) -> T {
        let free = self.free;
        let Some(slot) = self.get_mut(entry) else { return T::default() };
        let value = std::mem::take(slot);
        slot.set_link(free);
        self.free = entry;
        value
    }

    /// Frees an entry that is in use.
    pub(crate) fn remove(&mut self, entry: u32) -> T {
        let value = self.release(entry);
        self.used = self.used.saturating_sub(1);
        value
    }
}

/// A frame that has cached pages.
#[derive(Debug)]
pub(crate) struct FrameEntry {
    /// Its number in the volume.
    pub(crate) number: u64,
    /// Next in its bucket.
    chain: u32,
    /// Its first slot.
    pub(crate) first: u32,
}

impl Default for FrameEntry {
    fn default() -> FrameEntry {
        FrameEntry { number: u64::MAX, chain: NONE, first: NONE }
    }
}

impl Linked for FrameEntry {
    fn link(&self) -> u32 {
        self.chain
    }
    fn set_link(&mut self, link: u32) {
        self.chain = link;
    }
}

/// Minimum number of buckets.
const BUCKETS_MIN: usize = 16;

/// Frames by frame number.
#[derive(Debug)]
pub(crate) struct FrameIndex {
    frames: Slab<FrameEntry>,
    heads: Vec<Box<[u32]>>,
    buckets: usize,
}

/// Spreads frame numbers: neighbours go to different buckets.
#[inline]
pub(crate) fn hash(number: u64) -> u64 {
    let mixed = (number ^ (number >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

impl FrameIndex {
    pub(crate) fn new() -> FrameIndex {
        FrameIndex { frames: Slab::new(), heads: Vec::new(), buckets: BUCKETS_MIN }
    }

    pub(crate) fn len(&self) -> u32 {
        self.frames.used()
    }

    #[inline]
    fn bucket(&self, number: u64) -> usize {
        let whole = self.buckets.next_power_of_two();
        // Other bits of the hash than those that choose the shard.
        let bucket = usize::try_from(hash(number) >> 8 & 0xffff_ffff).unwrap_or(0) & (whole - 1);
        if bucket < self.buckets { bucket } else { bucket & (whole / 2 - 1) }
    }

    #[inline]
    fn head(&self, bucket: usize) -> u32 {
        self.heads.get(bucket / CHUNK).map_or(NONE, |chunk| chunk[bucket % CHUNK])
    }

    fn set_head(&mut self, bucket: usize, entry: u32) {
        while self.heads.len() <= bucket / CHUNK {
            self.heads.push(vec![NONE; CHUNK].into());
        }
        self.heads[bucket / CHUNK][bucket % CHUNK] = entry;
    }

    #[inline]
    pub(crate) fn find(&self, number: u64) -> Option<u32> {
        let mut entry = self.head(self.bucket(number));
        loop {
            let frame = self.frames.get(entry)?;
            if frame.number == number {
                return Some(entry);
            }
            entry = frame.chain;
        }
    }

    #[inline]
    pub(crate) fn get(&self, entry: u32) -> Option<&FrameEntry> {
        self.frames.get(entry)
    }

    pub(crate) fn get_mut(&mut self, entry: u32) -> Option<&mut FrameEntry> {
        self.frames.get_mut(entry)
    }

    /// The frame's entry, created if it does not exist.
    pub(crate) fn ensure(&mut self, number: u64) -> Option<u32> {
        if let Some(entry) = self.find(number) {
            return Some(entry);
        }
        let bucket = self.bucket(number);
        let chain = self.head(bucket);
        let (entry, _) = self.frames.insert(FrameEntry { number, chain, first: NONE })?;
        self.set_head(bucket, entry);
        if usize::try_from(self.len()).is_ok_and(|len| len > self.buckets) {
            self.buckets += 1;
            let parent = (self.buckets - 1) & (self.buckets.next_power_of_two() / 2 - 1);
            self.rehash(parent);
        }
        Some(entry)
    }

    /// Removes a frame.
    pub(crate) fn remove(&mut self, entry: u32) {
        let Some(frame) = self.frames.get(entry) else { return };
        let (number, next) = (frame.number, frame.chain);
        let bucket = self.bucket(number);
        let mut at = self.head(bucket);
        if at == entry {
            self.set_head(bucket, next);
        } else {
            while let Some(frame) = self.frames.get_mut(at) {
                if frame.chain == entry {
                    frame.chain = next;
                    break;
                }
                at = frame.chain;
            }
        }
        self.frames.remove(entry);
        let len = usize::try_from(self.len()).unwrap_or(usize::MAX);
        if self.buckets > BUCKETS_MIN && len < self.buckets / 2 {
            self.buckets -= 1;
            self.rehash(self.buckets);
            self.heads.truncate(self.buckets / CHUNK + 1);
        }
    }

    /// Moves the frames of one bucket to where they belong now.
    fn rehash(&mut self, bucket: usize) {
        let mut entry = self.head(bucket);
        self.set_head(bucket, NONE);
        while let Some(frame) = self.frames.get(entry) {
            let (number, next) = (frame.number, frame.chain);
            let to = self.bucket(number);
            let chain = self.head(to);
            if let Some(frame) = self.frames.get_mut(entry) {
                frame.chain = chain;
            }
            self.set_head(to, entry);
            entry = next;
        }
    }

    /// The range of entry numbers: `0..entries()`.
    pub(crate) fn entries(&self) -> u32 {
        self.frames.numbers()
    }

    /// Size in memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.frames.bytes() + self.heads.len() * CHUNK * size_of::<u32>()
    }
}

impl<T> Slab<T> {
    /// Size in memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<T>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn the_index_agrees_with_a_map() {
        let (mut index, mut map) = (FrameIndex::new(), HashMap::new());
        let mut random = 12345u64;
        for step in 0..60_000u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = random >> 33 & 0x3fff;
            // It grows, then shrinks to nothing.
            if random & 3 != 0 && step < 40_000 || step < 3000 {
                let entry = index.ensure(number).unwrap();
                assert_eq!(*map.entry(number).or_insert(entry), entry);
            } else if let Some(entry) = map.remove(&number) {
                assert_eq!(index.find(number), Some(entry));
                index.remove(entry);
            }
            assert_eq!(index.find(number), map.get(&number).copied());
            assert_eq!(index.len() as usize, map.len());
        }
        for (number, entry) in &map {
            assert_eq!(index.find(*number), Some(*entry));
            assert_eq!(index.get(*entry).unwrap().number, *number);
        }
    }
}
