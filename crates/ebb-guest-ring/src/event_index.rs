//! When the other side of a ring has requested an event (a notification): it names the index that it waits for, so that
//! one event is sent for many requests or completions.
//!
//! Xen's `RING_PUSH_RESPONSES_AND_CHECK_NOTIFY` (`xen/include/public/io/ring.h`) and virtio's `vring_need_event`
//! (`VIRTIO_F_EVENT_IDX`) are the same comparison: Xen names the index *after* the one that is waited for.

/// A free-running index of a ring: differences wrap.
pub trait RingIndex: Copy + PartialOrd {
    /// How far `self` is ahead of `earlier`.
    #[must_use]
    fn since(self, earlier: Self) -> Self;
}

impl RingIndex for u16 {
    #[inline]
    fn since(self, earlier: u16) -> u16 {
        self.wrapping_sub(earlier)
    }
}

impl RingIndex for u32 {
    #[inline]
    fn since(self, earlier: u32) -> u32 {
        self.wrapping_sub(earlier)
    }
}

/// Whether publishing moved the index from `old` to `new` up to or past `event`, in Xen's sense: `event` is reached when
/// the index is at least `event`. For virtio's `used_event` add one to it.
#[must_use]
#[inline]
pub fn is_event_due<I: RingIndex>(event: I, old: I, new: I) -> bool {
    new.since(event) < new.since(old)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The event is due exactly if one of the published indices is the requested one.
        #[test]
        fn an_event_is_due_when_its_index_is_published(old: u16, count in 0u16..300, ahead in 0u16..400) {
            let (new, event) = (old.wrapping_add(count), old.wrapping_add(ahead));
            let passed = (1..=count).any(|step| old.wrapping_add(step) == event);
            prop_assert_eq!(is_event_due(event, old, new), passed);
            let wrapped = |index: u16| (u32::MAX - 150).wrapping_add(u32::from(index.wrapping_sub(old)));
            prop_assert_eq!(is_event_due(wrapped(event), wrapped(old), wrapped(new)), passed);
        }
    }
}
