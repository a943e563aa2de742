//! The properties of an export that the server sent, and their checks.

use ebb_nbd_proto::TransmissionFlags;

use super::options::{NbdError, NbdOptions};

/// The largest READ or WRITE if the server names no limit ("Size constraints").
const PAYLOAD_DEFAULT: u32 = 32 << 20;
/// The largest permitted minimum block ("Size constraints").
const MIN_BLOCK_MAX: u32 = 64 << 10;

/// An export, as negotiated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteExport {
    /// Bytes.
    pub(crate) size: u64,
    pub(crate) flags: TransmissionFlags,
    /// Offsets and lengths must be multiples of it: a power of two, 1 to 65536.
    pub(crate) min_block: u32,
    /// The most bytes of one READ or WRITE: a multiple of `min_block`.
    pub(crate) max_block: u32,
    /// Replies to reads are structured.
    pub(crate) structured: bool,
    /// The context ID of `base:allocation`, if negotiated.
    pub(crate) allocation: Option<u32>,
}

impl RemoteExport {
    /// An export of `size` bytes for which no block sizes were sent.
    pub(crate) fn new(size: u64, flags: u16) -> RemoteExport {
        let flags = TransmissionFlags(flags);
        let known = flags.contains(TransmissionFlags::HAS_FLAGS);
        RemoteExport {
            size,
            flags: if known { flags } else { TransmissionFlags::NONE },
            min_block: 1,
            max_block: PAYLOAD_DEFAULT,
            structured: false,
            allocation: None,
        }
    }

    /// Sets the block sizes; false if they are not valid.
    pub(crate) fn set_blocks(&mut self, min: u32, preferred: u32, max: u32) -> bool {
        let fits = min.is_power_of_two()
            && min <= MIN_BLOCK_MAX
            && preferred >= min
            && (max == u32::MAX || (max >= min && max.is_multiple_of(min)));
        if fits {
            self.min_block = min;
            self.max_block = max.min(PAYLOAD_DEFAULT);
        }
        fits
    }

    pub(crate) fn offers(&self, flag: TransmissionFlags) -> bool {
        self.flags.contains(flag)
    }

    /// The same with another size.
    pub(crate) fn with_size(&self, size: u64) -> RemoteExport {
        RemoteExport { size, ..self.clone() }
    }

    /// Whether the export can be a volume.
    pub(crate) fn check(&self, options: &NbdOptions) -> Result<(), NbdError> {
        let (address, export) = (options.address.to_string(), options.export.clone());
        let unit = u64::from(self.min_block).max(ebb_block::SECTOR);
        let size = self.size;
        if size == 0 || !size.is_multiple_of(unit) || i64::try_from(size).is_err() {
            return Err(NbdError::Size { address, export, size, unit });
        }
        if self.offers(TransmissionFlags::READ_ONLY) && !options.read_only {
            return Err(NbdError::ReadOnly { address, export });
        }
        Ok(())
    }

    /// Whether `new` can replace this one, of which `served` bytes are in use: requests were validated against
    /// this one and that size.
    pub(crate) fn replaced_by(
        &self,
        new: &RemoteExport,
        served: u64,
        options: &NbdOptions,
    ) -> Result<(), NbdError> {
        let changed = |what: String| {
            let (address, export) = (options.address.to_string(), options.export.clone());
            Err(NbdError::Changed { address, export, what })
        };
        if new.size < served {
            return changed(format!("{} bytes instead of {served}", new.size));
        }
        // ROTATIONAL does not affect requests; READ_ONLY does when it is set, which `check` tests.
        let other = TransmissionFlags::READ_ONLY.with(TransmissionFlags::ROTATIONAL);
        let missing = self.flags.beyond(new.flags).beyond(other);
        if !missing.is_none() {
            return changed(format!("fewer features (flags {:#x} are missing)", missing.0));
        }
        if new.min_block > self.min_block || new.max_block < self.max_block {
            return changed("a narrower range of block sizes".to_owned());
        }
        if self.allocation.is_some() && new.allocation.is_none() {
            return changed("without block status".to_owned());
        }
        // What an export has grown by may be of any size: it is not used until the volume is resized.
        new.with_size(served).check(options)
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::NbdAddress;
    use super::*;

    fn options() -> NbdOptions {
        NbdOptions::new(NbdAddress::Unix("/x".into()), "e")
    }

    #[test]
    fn sizes_a_volume_cannot_have_are_refused() {
        for size in [0, 1, 511, 513, u64::MAX, 1 << 63] {
            assert!(RemoteExport::new(size, 1).check(&options()).is_err(), "{size}");
        }
        let mut export = RemoteExport::new(512 * 9, 1);
        assert!(export.check(&options()).is_ok());
        assert!(export.set_blocks(4096, 4096, 1 << 20));
        let error = export.check(&options()).unwrap_err().to_string();
        assert!(error.contains("multiple of 4096"), "{error}");
    }

    #[test]
    fn block_sizes_by_value() {
        let mut export = RemoteExport::new(1 << 20, 1);
        for (min, preferred, max) in
            [(0, 1, 1), (3, 4, 6), (1 << 17, 1 << 17, 1 << 20), (512, 1, 512), (512, 512, 700)]
        {
            assert!(!export.set_blocks(min, preferred, max), "{min} {preferred} {max}");
        }
        assert!(export.set_blocks(512, 4096, u32::MAX));
        assert_eq!((export.min_block, export.max_block), (512, 32 << 20));
        assert!(export.set_blocks(1, 4096, 65536));
        assert_eq!(export.max_block, 65536);
    }

    #[test]
    fn a_lesser_export_is_no_replacement() {
        let old = RemoteExport::new(1 << 20, 0b101);
        let replaced = |new: &RemoteExport| old.replaced_by(new, old.size, &options());
        let text = |new: &RemoteExport| replaced(new).unwrap_err().to_string();
        assert!(replaced(&RemoteExport::new(1 << 20, 0b1101)).is_ok());
        assert!(
            text(&RemoteExport::new(1 << 19, 0b101)).contains("524288 bytes instead of 1048576")
        );
        // A larger one is served with the size in use, also if the part that was added ends within a sector.
        assert!(replaced(&RemoteExport::new(1 << 21, 0b101)).is_ok());
        assert!(replaced(&RemoteExport::new((1 << 21) + 1, 0b101)).is_ok());
        assert!(text(&RemoteExport::new(1 << 20, 0b001)).contains("flags 0x4"));
        assert!(text(&RemoteExport::new(1 << 20, 0b111)).contains("read-only"));
    }
}
