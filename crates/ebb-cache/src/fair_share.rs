//! Fair shares: what each volume may hold while other volumes want more, and which one is evicted from.
//!
//! # The rule
//! - All active volumes have the same share: the limit of the cache, divided by their number. A volume is active if
//!   one of its requests used the cache within the last ten seconds, in whichever of its layers. The share of an idle
//!   volume is 0.
//! - A layer that volumes share, a base, counts as no volume. Each active volume above it leaves to it what its other
//!   layers leave of its share: the share less what its own layer holds, less what it is charged for its other bases.
//!   The base may hold the sum; nothing if no read used it within the last ten seconds.
//! - So that own data cannot keep a base out of the cache, a volume leaves to the bases in use below it at least a quarter
//!   of its share, in equal parts. Its own layer may hold the share less what the bases use of that quarter.
//! - What a base holds is charged to the volumes above it in proportion to what each leaves to it.
//! - While the cache is at its limit, a volume or base that has what it may hold evicts its own pages to insert new
//!   ones; the others evict from the one that is most above. Nothing is evicted only because it is above its share.
//!
//! So volumes above a base hold together what they would hold if each had a copy of the base, and a page that two of
//! them read is held once.
//!
//! The reclaimer computes what each base may hold, four times a second ([`Cache::divide_shares`]), and requests read the
//! result. A base that has less, and finds nothing to evict from, says so ([`VolumeCache::note_short`]); then the volumes
//! above it may hold three quarters of their shares, and it evicts from those that hold more. A volume that has less than
//! that does the same: then its bases may hold only the quarter, so that own data has precedence over what exceeds it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::cache::Cache;
use crate::pages::PAGE;
use crate::volume::VolumeCache;

/// One part in this many of its share is what a volume leaves at least to the bases below it.
const BASE_PART: u64 = 4;

/// What a layer that volumes share may hold.
#[derive(Debug, Default)]
pub(crate) struct SharedLayer {
    /// Pages that the volumes above it leave to it, together.
    allowance: AtomicU64,
    /// The next allowance, while it is added up.
    sum: AtomicU64,
}

/// A base below a volume.
#[derive(Debug)]
struct StackBase {
    cache: Weak<VolumeCache>,
    /// Pages that the volume leaves to it.
    part: AtomicU64,
}

/// The share of a volume that is a stack of several layers.
#[derive(Debug)]
pub(crate) struct StackShare {
    volume: Weak<VolumeCache>,
    bases: Vec<StackBase>,
    /// The volume does not use them any more.
    left: AtomicBool,
}

/// `value * part / whole`, all in pages; 0 of nothing.
fn in_proportion(value: u64, part: u64, whole: u64) -> u64 {
    let product = u128::from(value) * u128::from(part);
    u64::try_from(product.checked_div(u128::from(whole)).unwrap_or(0)).unwrap_or(u64::MAX)
}

impl StackShare {
    /// The volume uses its bases no longer.
    pub(crate) fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
    }

    /// Divides the volume's share among its own layer and its bases.
    fn divide(&self, share: u64) {
        let Some(volume) = self.volume.upgrade() else { return };
        let has_left = self.left.load(Ordering::Relaxed) || !volume.is_active();
        let share = if has_left { 0 } else { share };
        let bases: Vec<_> =
            self.bases.iter().map(|base| (base.cache.upgrade(), &base.part)).collect();
        let bases = || bases.iter().filter_map(|(cache, part)| Some((cache.as_deref()?, *part)));
        let used = bases().filter(|(cache, _)| cache.is_active()).count() as u64;
        let least = share / BASE_PART / used.max(1);
        let charge = |cache: &VolumeCache, part: &AtomicU64| {
            let Some(shared) = &cache.shared else { return 0 };
            let whole = shared.allowance.load(Ordering::Relaxed);
            in_proportion(cache.held(), part.load(Ordering::Relaxed), whole)
        };
        let charges: Vec<u64> = bases().map(|(cache, part)| charge(cache, part)).collect();
        let all: u64 = charges.iter().sum();
        let is_short = volume.is_short.swap(false, Ordering::Relaxed);
        let mut pays = 0;
        for ((cache, part), charged) in bases().zip(charges) {
            let Some(shared) = &cache.shared else { continue };
            if !cache.is_active() {
                part.store(0, Ordering::Relaxed);
                continue;
            }
            let rest = share.saturating_sub(volume.held() + all - charged);
            let left = if is_short { least } else { rest.max(least) };
            part.store(left, Ordering::Relaxed);
            shared.sum.fetch_add(left, Ordering::Relaxed);
            let base_is_short = cache.is_short.load(Ordering::Relaxed);
            pays += if base_is_short { least } else { charged.min(least) };
        }
        volume.pays.store(pays, Ordering::Relaxed);
    }
}

impl VolumeCache {
    /// Pages that it may hold while other volumes want more, if it is in use.
    pub(crate) fn allowance(&self, share: u64) -> u64 {
        match &self.shared {
            Some(shared) => shared.allowance.load(Ordering::Relaxed),
            None => share.saturating_sub(self.pays.load(Ordering::Relaxed)),
        }
    }

    /// Pages above what it may hold; with a share of 0 all.
    fn above(&self, share: u64) -> u64 {
        let may_hold = match share {
            0 => 0,
            share if self.shared.is_some() || self.is_active() => self.allowance(share),
            _ => 0,
        };
        self.held().saturating_sub(may_hold)
    }

    /// It may hold more, and no other volume or base has more than it may hold.
    pub(crate) fn note_short(&self) {
        self.is_short.store(true, Ordering::Relaxed);
    }
}

impl Cache {
    /// Registers a volume above bases. Until the reclaimer divides the shares it leaves all of its share to each.
    pub(crate) fn add_stack(
        &self,
        volume: &Arc<VolumeCache>,
        bases: &[&Arc<VolumeCache>],
    ) -> Arc<StackShare> {
        let share = self.fair_share();
        let base = |cache: &&Arc<VolumeCache>| {
            if let Some(shared) = &cache.shared {
                shared.allowance.fetch_add(share, Ordering::Relaxed);
            }
            StackBase { cache: Arc::downgrade(cache), part: AtomicU64::new(share) }
        };
        let stack = Arc::new(StackShare {
            volume: Arc::downgrade(volume),
            bases: bases.iter().map(base).collect(),
            left: AtomicBool::new(false),
        });
        self.stacks.lock().push(Arc::downgrade(&stack));
        stack
    }

    /// Counts the active volumes, and divides the share of each that has bases.
    pub(crate) fn divide_shares(&self, volumes: &[Arc<VolumeCache>]) {
        let own = volumes.iter().filter(|volume| volume.shared.is_none());
        let active = own.filter(|volume| volume.is_active()).count();
        self.active.store(u32::try_from(active.max(1)).unwrap_or(u32::MAX), Ordering::Relaxed);
        let share = self.fair_share();
        let mut stacks = self.stacks.lock();
        stacks.retain(|stack| stack.strong_count() > 0);
        for shared in volumes.iter().filter_map(|volume| volume.shared.as_ref()) {
            shared.sum.store(0, Ordering::Relaxed);
        }
        stacks.iter().filter_map(Weak::upgrade).for_each(|stack| stack.divide(share));
        for volume in volumes {
            let Some(shared) = &volume.shared else { continue };
            shared.allowance.store(shared.sum.load(Ordering::Relaxed), Ordering::Relaxed);
            volume.is_short.store(false, Ordering::Relaxed);
        }
    }

    /// The share of an active volume, in pages.
    pub(crate) fn fair_share(&self) -> u64 {
        let active = u64::from(self.active.load(Ordering::Relaxed)).max(1);
        self.limit.load(Ordering::Relaxed) / active
    }

    /// The volume or base most above what it may hold, counting clean pages only, since dirty pages cannot be
    /// evicted. Skips those in `but`, which had nothing to evict.
    pub(crate) fn most_above_share(
        &self,
        share: u64,
        but: &[*const VolumeCache],
    ) -> Option<Arc<VolumeCache>> {
        let volumes = self.volumes.lock();
        let above = |volume: &Arc<VolumeCache>| {
            let clean = volume.held().saturating_sub(volume.dirty() / PAGE);
            if clean == 0 { 0 } else { volume.above(share).min(clean) }
        };
        let all = volumes.iter().filter_map(Weak::upgrade);
        let all = all.filter(|volume| !but.contains(&Arc::as_ptr(volume)));
        let all = all.map(|volume| (above(&volume), volume)).filter(|(above, _)| *above > 0);
        all.max_by_key(|(above, _)| *above).map(|(_, volume)| volume)
    }
}
