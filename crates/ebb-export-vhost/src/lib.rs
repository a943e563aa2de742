//! A vhost-user-blk backend over volumes, for guests of KVM.

mod area;
mod backend;
mod chain;
mod commands;
mod control;
mod cursor;
mod dirty_log;
mod disk_served;
mod disk_shared;
mod events;
mod features;
mod frontend_socket;
mod inflight;
mod inline_io;
mod memory;
mod packed_inflight;
mod packed_ring;
mod position;
mod queue;
mod request;
mod request_task;
mod ring_setup;
mod session;
mod split_inflight;
mod split_ring;
mod throttle;
mod virtqueue;
mod volume_socket;
mod vring;

pub use backend::{VhostBackend, VhostFigures, VhostOptions};
pub use disk_served::{DrainingFrontends, VhostDisk};
pub use disk_shared::VhostStats;
pub use volume_socket::VolumeSocket;

#[cfg(test)]
mod tests;
