//! Feature bits: those of the virtio device, and those of the vhost-user protocol.
//!
//! Sources: virtio 1.2, sections 5.2.3 and 6; `interop/vhost-user.rst`, section "Protocol features".

/// A set of bits of 64, with names for the known ones.
macro_rules! feature_set {
    (
        $(#[$set_doc:meta])* $set:ident;
        $($(#[$bit_doc:meta])* $bit:ident = $shift:literal;)*
    ) => {
        $(#[$set_doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $set(pub u64);

        impl $set {
            /// No bit set.
            pub const NONE: Self = Self(0);
            $($(#[$bit_doc])* pub const $bit: Self = Self(1 << $shift);)*

            /// Whether every bit of `other` is set here.
            #[must_use]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// The bits of both.
            #[must_use]
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// The bits of both if `condition` holds, else these only.
            #[must_use]
            pub const fn with_if(self, condition: bool, other: Self) -> Self {
                if condition { self.with(other) } else { self }
            }

            /// The bits that are set in both.
            #[must_use]
            pub const fn common(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }

            /// The bits that are set here and not in `known`.
            #[must_use]
            pub const fn beyond(self, known: Self) -> Self {
                Self(self.0 & !known.0)
            }

            /// Whether no bit is set.
            #[must_use]
            pub const fn is_none(self) -> bool {
                self.0 == 0
            }
        }
    };
}

feature_set! {
    /// Features of a virtio-blk device, with the two bits that vhost puts among them.
    VirtioFeatures;
    /// `VIRTIO_BLK_F_SIZE_MAX`: `size_max` bounds a segment.
    BLK_SIZE_MAX = 1;
    /// `VIRTIO_BLK_F_SEG_MAX`: `seg_max` bounds the segments of a request.
    BLK_SEG_MAX = 2;
    /// `VIRTIO_BLK_F_GEOMETRY`
    BLK_GEOMETRY = 4;
    /// `VIRTIO_BLK_F_RO`: the device is read-only.
    BLK_READ_ONLY = 5;
    /// `VIRTIO_BLK_F_BLK_SIZE`: the logical block size is in the config space.
    BLK_BLOCK_SIZE = 6;
    /// `VIRTIO_BLK_F_FLUSH`
    BLK_FLUSH = 9;
    /// `VIRTIO_BLK_F_TOPOLOGY`
    BLK_TOPOLOGY = 10;
    /// `VIRTIO_BLK_F_CONFIG_WCE`: the driver reads and changes the cache mode in the config space.
    BLK_CONFIG_WCE = 11;
    /// `VIRTIO_BLK_F_MQ`: more than one queue.
    BLK_MULTI_QUEUE = 12;
    /// `VIRTIO_BLK_F_DISCARD`
    BLK_DISCARD = 13;
    /// `VIRTIO_BLK_F_WRITE_ZEROES`
    BLK_WRITE_ZEROES = 14;
    /// `VIRTIO_BLK_F_LIFETIME`
    BLK_LIFETIME = 15;
    /// `VIRTIO_BLK_F_SECURE_ERASE`
    BLK_SECURE_ERASE = 16;
    /// `VIRTIO_F_NOTIFY_ON_EMPTY`, of devices before virtio 1.0.
    NOTIFY_ON_EMPTY = 24;
    /// `VHOST_F_LOG_ALL`: writes to guest memory are logged.
    LOG_ALL = 26;
    /// `VIRTIO_F_ANY_LAYOUT`, of devices before virtio 1.0.
    ANY_LAYOUT = 27;
    /// `VIRTIO_F_INDIRECT_DESC`
    RING_INDIRECT_DESC = 28;
    /// `VIRTIO_F_EVENT_IDX`
    RING_EVENT_IDX = 29;
    /// `VHOST_USER_F_PROTOCOL_FEATURES`: the protocol's own features can be negotiated.
    PROTOCOL_FEATURES = 30;
    /// `VIRTIO_F_VERSION_1`
    VERSION_1 = 32;
    /// `VIRTIO_F_ACCESS_PLATFORM`: addresses are I/O virtual addresses (formerly `VIRTIO_F_IOMMU_PLATFORM`).
    ACCESS_PLATFORM = 33;
    /// `VIRTIO_F_RING_PACKED`
    RING_PACKED = 34;
    /// `VIRTIO_F_IN_ORDER`
    IN_ORDER = 35;
    /// `VIRTIO_F_ORDER_PLATFORM`
    ORDER_PLATFORM = 36;
    /// `VIRTIO_F_NOTIFICATION_DATA`
    NOTIFICATION_DATA = 38;
    /// `VIRTIO_F_NOTIF_CONFIG_DATA`
    NOTIF_CONFIG_DATA = 39;
    /// `VIRTIO_F_RING_RESET`
    RING_RESET = 40;
}

feature_set! {
    /// Features of the vhost-user protocol.
    ProtocolFeatures;
    /// `VHOST_USER_PROTOCOL_F_MQ`
    MQ = 0;
    /// `VHOST_USER_PROTOCOL_F_LOG_SHMFD`: `SET_LOG_BASE` carries a descriptor, and is answered.
    LOG_SHMFD = 1;
    /// `VHOST_USER_PROTOCOL_F_RARP`
    RARP = 2;
    /// `VHOST_USER_PROTOCOL_F_REPLY_ACK`: requests with `NEED_REPLY` are acknowledged.
    REPLY_ACK = 3;
    /// `VHOST_USER_PROTOCOL_F_MTU`
    NET_MTU = 4;
    /// `VHOST_USER_PROTOCOL_F_BACKEND_REQ`: a socket for requests of the backend.
    BACKEND_REQ = 5;
    /// `VHOST_USER_PROTOCOL_F_CROSS_ENDIAN`
    CROSS_ENDIAN = 6;
    /// `VHOST_USER_PROTOCOL_F_CRYPTO_SESSION`
    CRYPTO_SESSION = 7;
    /// `VHOST_USER_PROTOCOL_F_PAGEFAULT`
    PAGEFAULT = 8;
    /// `VHOST_USER_PROTOCOL_F_CONFIG`: `GET_CONFIG` and `SET_CONFIG`.
    CONFIG = 9;
    /// `VHOST_USER_PROTOCOL_F_BACKEND_SEND_FD`
    BACKEND_SEND_FD = 10;
    /// `VHOST_USER_PROTOCOL_F_HOST_NOTIFIER`
    HOST_NOTIFIER = 11;
    /// `VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`
    INFLIGHT_SHMFD = 12;
    /// `VHOST_USER_PROTOCOL_F_RESET_DEVICE`
    RESET_DEVICE = 13;
    /// `VHOST_USER_PROTOCOL_F_INBAND_NOTIFICATIONS`
    INBAND_NOTIFICATIONS = 14;
    /// `VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS`: regions of memory are added and removed one at a time.
    CONFIGURE_MEM_SLOTS = 15;
    /// `VHOST_USER_PROTOCOL_F_STATUS`
    STATUS = 16;
    /// `VHOST_USER_PROTOCOL_F_XEN_MMAP`: regions of memory have another, longer form.
    XEN_MMAP = 17;
    /// `VHOST_USER_PROTOCOL_F_SHARED_OBJECT`
    SHARED_OBJECT = 18;
    /// `VHOST_USER_PROTOCOL_F_DEVICE_STATE`
    DEVICE_STATE = 19;
    /// `VHOST_USER_PROTOCOL_F_GET_VRING_BASE_INFLIGHT`
    GET_VRING_BASE_INFLIGHT = 20;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operations_of_a_set_are_those_of_its_bits() {
        let both = ProtocolFeatures::MQ.with(ProtocolFeatures::CONFIG);
        assert_eq!(both.0, 0x201);
        assert!(both.contains(ProtocolFeatures::MQ));
        assert!(!ProtocolFeatures::MQ.contains(both));
        assert_eq!(both.common(ProtocolFeatures(0x3)), ProtocolFeatures::MQ);
        assert_eq!(both.beyond(ProtocolFeatures::MQ), ProtocolFeatures::CONFIG);
        assert_eq!(both.with_if(false, ProtocolFeatures(!0)), both);
        assert_eq!(both.with_if(true, ProtocolFeatures(!0)).0, !0);
        assert!(ProtocolFeatures::NONE.is_none() && !both.is_none());
    }

    #[test]
    fn bits_are_those_of_a_modern_device() {
        let bits = VirtioFeatures::VERSION_1
            .with(VirtioFeatures::PROTOCOL_FEATURES)
            .with(VirtioFeatures::RING_EVENT_IDX)
            .with(VirtioFeatures::RING_INDIRECT_DESC)
            .with(VirtioFeatures::BLK_MULTI_QUEUE)
            .with(VirtioFeatures::BLK_FLUSH)
            .with(VirtioFeatures::BLK_BLOCK_SIZE)
            .with(VirtioFeatures::BLK_SEG_MAX);
        assert_eq!(bits.0, 0x1_7000_1244);
        assert_eq!(VirtioFeatures::RING_PACKED.0, 0x4_0000_0000);
        assert_eq!(VirtioFeatures::LOG_ALL.0, 0x400_0000);
    }
}
