//! The properties of an export that the server sent, and their checks.

use ebb_nbd_proto::TransmissionFlags;

use super::options::{LostWrites, NbdError, NbdOptions};

/// The largest READ or WRITE if the server names no limit ("Size constraints").
const PAYLOAD_DEFAULT: u32 = 32 << 20;
/// The name of a feature that has no flag.
const BLOCK_STATUS: &str = "block status (base:allocation)";
/// The remedy if the volume can be served with the export's present features.
const OPEN_AGAIN: &str =
    "restore that there; or remove the volume and add it again, to use the export as it is now";
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

    /// The features that requests of the store use if the export has them, and their names. A write
    /// with FUA is a write and a flush where there is one.
    fn features(
        &self,
        options: &NbdOptions,
    ) -> impl Iterator<Item = (TransmissionFlags, &'static str)> {
        let (writes, zeroes) =
            (!options.read_only, self.offers(TransmissionFlags::SEND_WRITE_ZEROES));
        let by_flag = writes && !self.offers(TransmissionFlags::SEND_FLUSH);
        let several = options.lost_writes == LostWrites::Flush;
        [
            (TransmissionFlags::SEND_FLUSH, "FLUSH", writes),
            (TransmissionFlags::SEND_FUA, "FUA", by_flag),
            (TransmissionFlags::SEND_TRIM, "TRIM", writes),
            (TransmissionFlags::SEND_WRITE_ZEROES, "WRITE_ZEROES", writes),
            (TransmissionFlags::SEND_FAST_ZERO, "fast WRITE_ZEROES", writes && zeroes),
            (TransmissionFlags::SEND_CACHE, "CACHE", true),
            (TransmissionFlags::CAN_MULTI_CONN, "several connections", several),
        ]
        .into_iter()
        .filter_map(|(flag, name, used)| used.then_some((flag, name)))
    }

    /// Whether `new` can replace this one, of which `served` bytes are in use: requests were validated against
    /// this one and that size.
    pub(crate) fn replaced_by(
        &self,
        new: &RemoteExport,
        served: u64,
        options: &NbdOptions,
    ) -> Result<(), NbdError> {
        let changed = |what: String, remedy: &'static str| {
            let (address, export) = (options.address.to_string(), options.export.clone());
            Err(NbdError::Changed { address, export, what, remedy })
        };
        if !options.read_only && new.offers(TransmissionFlags::READ_ONLY) {
            // Such an export also lacks the features of writes.
            return changed("no permission to write".to_owned(), "allow writes there again");
        }
        if new.size < served {
            let what = format!("{} bytes instead of {served}", new.size);
            return changed(what, "restore its size there");
        }
        let missing: Vec<&str> = self
            .features(options)
            .filter(|(flag, _)| self.offers(*flag) && !new.offers(*flag))
            .map(|(_, name)| name)
            .chain((self.allocation.is_some() && new.allocation.is_none()).then_some(BLOCK_STATUS))
            .collect();
        if !missing.is_empty() {
            return changed(format!("no {}", missing.join(", no ")), OPEN_AGAIN);
        }
        if new.min_block > self.min_block || new.max_block < self.max_block {
            let what = format!(
                "requests of {} to {} bytes instead of {} to {}",
                new.min_block, new.max_block, self.min_block, self.max_block
            );
            return changed(what, OPEN_AGAIN);
        }
        // What an export has grown by may be of any size: it is not used until the volume is resized.
        new.with_size(served).check(options)
    }
}

#[cfg(test)]
mod tests {
    use ebb_advice::full_text;

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
        assert!(text(&RemoteExport::new(1 << 20, 0b001)).contains("no FLUSH"));
        assert!(text(&RemoteExport::new(1 << 20, 0b111)).contains("no permission to write"));
    }

    #[test]
    fn lost_features_are_named_and_unused_ones_may_be_missing() {
        let all = |flags: &[TransmissionFlags]| {
            flags.iter().fold(TransmissionFlags::HAS_FLAGS, |sum, flag| sum.with(*flag)).0
        };
        let every = all(&[
            TransmissionFlags::SEND_FLUSH,
            TransmissionFlags::SEND_FUA,
            TransmissionFlags::ROTATIONAL,
            TransmissionFlags::SEND_TRIM,
            TransmissionFlags::SEND_WRITE_ZEROES,
            TransmissionFlags::SEND_DF,
            TransmissionFlags::CAN_MULTI_CONN,
            TransmissionFlags::SEND_CACHE,
            TransmissionFlags::SEND_FAST_ZERO,
        ]);
        let mut old = RemoteExport::new(1 << 20, every);
        (old.structured, old.allocation) = (true, Some(1));
        let with =
            |flags: u16| RemoteExport { allocation: Some(1), ..RemoteExport::new(1 << 20, flags) };
        let used = all(&[
            TransmissionFlags::SEND_FLUSH,
            TransmissionFlags::SEND_TRIM,
            TransmissionFlags::SEND_WRITE_ZEROES,
            TransmissionFlags::CAN_MULTI_CONN,
            TransmissionFlags::SEND_CACHE,
            TransmissionFlags::SEND_FAST_ZERO,
        ]);
        assert!(old.replaced_by(&with(used), old.size, &options()).is_ok());
        let bare = RemoteExport::new(1 << 20, 1);
        let text = full_text(&old.replaced_by(&bare, old.size, &options()).unwrap_err());
        let expected = "came back with no FLUSH, no TRIM, no WRITE_ZEROES, no fast WRITE_ZEROES, no CACHE, no several \
                        connections, no block status (base:allocation): restore that there; or remove the volume and \
                        add it again, to use the export as it is now";
        assert!(text.ends_with(expected), "{text}");
        let denied = with(used | all(&[TransmissionFlags::READ_ONLY]));
        let text = full_text(&old.replaced_by(&denied, old.size, &options()).unwrap_err());
        let expected = "came back with no permission to write: allow writes there again";
        assert!(text.ends_with(expected), "{text}");
        // A volume that is only read, and uses one connection, needs less.
        let reads = NbdOptions { read_only: true, lost_writes: LostWrites::Report, ..options() };
        let cache = all(&[TransmissionFlags::SEND_CACHE]);
        assert!(old.replaced_by(&with(cache), old.size, &reads).is_ok());
        let mut large = with(used);
        assert!(large.set_blocks(512, 4096, 1 << 20));
        let text = old.replaced_by(&large, old.size, &options()).unwrap_err().to_string();
        assert!(
            text.contains("requests of 512 to 1048576 bytes instead of 1 to 33554432"),
            "{text}"
        );
    }
}
