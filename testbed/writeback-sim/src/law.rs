//! The laws that are compared, and their names in tables.

/// How thresholds are divided and writers are paced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Law {
    /// Linux 2.6.24 to 3.5: floating proportions counted in completed pages, with a period of 2^(`shift` +
    /// log2(limit in pages)) pages. Released kernels used +2; later proposals were +0 and −1.
    LinuxOld {
        /// Added to the exponent, −8 to 8; the proposals were +2, +0 and −1.
        shift: i8,
    },
    /// Linux since 3.6: flexible proportions that halve every 3 s, position control, estimated bandwidth,
    /// pauses, strict limits.
    Linux,
    /// That of the crate: measured rate × a horizon common to all devices, enforced from the first byte.
    Horizon,
}

/// The laws that are compared, that of the crate last.
pub const LAWS: [Law; 5] = [
    Law::LinuxOld { shift: 2 },
    Law::LinuxOld { shift: 0 },
    Law::LinuxOld { shift: -1 },
    Law::Linux,
    Law::Horizon,
];

/// A law's name in tables.
#[must_use]
pub fn name(law: Law) -> String {
    match law {
        Law::LinuxOld { shift } => format!("linux-old {shift:+}"),
        Law::Linux => "linux".to_owned(),
        Law::Horizon => "ours".to_owned(),
    }
}
