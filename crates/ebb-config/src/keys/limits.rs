//! The keys of limits, of a volume and of a group.

use super::ConfigKey;

pub(super) const LIMIT_KEYS: [ConfigKey; 7] = [
    ConfigKey {
        name: "limit_iops",
        value: "N",
        expected: "write a whole number, 0 or 1 to 1000000000: limit_iops = 5000",
        default: "0",
        doc: "The most requests per second, reads and writes together: 1 to 1000000000, or 0 for no limit. Can be set at run time, see ebbd-limit(1).",
    },
    ConfigKey {
        name: "limit_read_iops",
        value: "N",
        expected: "write a whole number, 0 or 1 to 1000000000: limit_read_iops = 5000",
        default: "0",
        doc: "The most requests per second, reads: 1 to 1000000000, or 0 for no limit. Can be set at run time, see ebbd-limit(1).",
    },
    ConfigKey {
        name: "limit_write_iops",
        value: "N",
        expected: "write a whole number, 0 or 1 to 1000000000: limit_write_iops = 5000",
        default: "0",
        doc: "The most requests per second, writes: 1 to 1000000000, or 0 for no limit. Can be set at run time, see ebbd-limit(1).",
    },
    ConfigKey {
        name: "limit_bandwidth",
        value: "SIZE",
        expected: "write a size: limit_bandwidth = \"200M\"",
        default: "0",
        doc: "The most bytes per second, reads and writes together: 512 to 1T, or 0 for no limit. Can be set at run time, see ebbd-limit(1).",
    },
    ConfigKey {
        name: "limit_read_bandwidth",
        value: "SIZE",
        expected: "write a size: limit_read_bandwidth = \"200M\"",
        default: "0",
        doc: "The most bytes per second, reads: 512 to 1T, or 0 for no limit. Can be set at run time, see ebbd-limit(1).",
    },
    ConfigKey {
        name: "limit_write_bandwidth",
        value: "SIZE",
        expected: "write a size: limit_write_bandwidth = \"200M\"",
        default: "0",
        doc: "The most bytes per second, writes: 512 to 1T, or 0 for no limit. Can be set at run time, see ebbd-limit(1).",
    },
    ConfigKey {
        name: "limit_burst_ms",
        value: "N",
        expected: "write a whole number, 0 to 600000: limit_burst_ms = 2000",
        default: "100",
        doc: "The time, in milliseconds, whose requests and bytes may exceed the limits after an idle period: 0 to 600000. Can be set at run time, see ebbd-limit(1).",
    },
];
