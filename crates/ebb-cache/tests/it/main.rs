//! Tests of the cache through its public interface.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

mod common;

mod accounting;
mod ahead;
mod bounded;
mod conformance;
mod crash;
mod dirty_reads;
mod discarded_pages;
mod full_store;
mod layer_faults;
mod layer_shares;
mod layers;
mod no_alloc;
mod oracle;
mod overlay;
mod overlay_doubt;
mod overlay_exchange;
mod overlay_faults;
mod overlay_first_flush;
mod overlay_large;
mod overlay_pressure;
mod overlay_resize;
mod overlay_storm;
mod partial_zeroes;
mod policy;
mod proactive_reclaim;
mod shared_reads;
mod shares;
mod workers;
mod writeback;
mod zeroes_beside_reads;
