//! Why an image of QEMU's qcow2 format is not served, each with what to do about it.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use ebb_advice::Advice;

use crate::open_options::OpenError;

/// Why an image could not be opened, or a part of it not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum Qcow2Error {
    /// It does not exist.
    #[error("{path}: no such file")]
    Missing { path: PathBuf },
    /// The file that it is in.
    #[error(transparent)]
    File(OpenError),
    /// Its header or a table could not be read.
    #[error("{path}: cannot read the image's header and tables")]
    Unreadable { path: PathBuf, source: io::Error },
    /// What is in it.
    #[error("{path}: {fault}")]
    Image { path: PathBuf, fault: Qcow2Fault },
}

impl Advice for Qcow2Error {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        match self {
            Qcow2Error::Missing { .. } => {
                Some("correct the path, or make the image with `qemu-img convert -O qcow2`".into())
            }
            Qcow2Error::File(error) => error.remedy(),
            Qcow2Error::Unreadable { .. } => None,
            Qcow2Error::Image { fault, .. } => fault.remedy(),
        }
    }
}

impl From<OpenError> for Qcow2Error {
    fn from(error: OpenError) -> Qcow2Error {
        match error {
            OpenError::Missing { path, .. } => Qcow2Error::Missing { path },
            other => Qcow2Error::File(other),
        }
    }
}

/// What is wrong with an image, or what of it is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum Qcow2Fault {
    /// The magic number is missing.
    #[error("this is no qcow2 image")]
    Magic,
    /// A version other than 2 and 3.
    #[error("qcow version {0}: only 2 and 3 are supported")]
    Version(u32),
    /// The file ends within its header, or the header is larger than a cluster.
    #[error("the header is cut off or has a wrong length")]
    HeaderLength,
    /// A cluster size outside of 512 bytes to 2 MiB.
    #[error("clusters of 2^{0} bytes: they have 2^9 to 2^21")]
    ClusterBits(u32),
    /// Another image below it.
    #[error("the image has a backing file, and ebbd opens no file that an image names")]
    BackingFile,
    /// AES or LUKS.
    #[error("the image is encrypted")]
    Encrypted,
    /// The data is in another file.
    #[error("the data of the image is in another file, and ebbd opens no file that an image names")]
    ExternalData,
    /// Subclusters.
    #[error("extended L2 entries (subclusters) are not supported")]
    ExtendedL2,
    /// Open by another program, or not closed by it.
    #[error("the image is marked as dirty: a program has it open, or did not close it")]
    Dirty,
    /// Damaged, as QEMU has found.
    #[error("the image is marked as corrupt")]
    Corrupt,
    /// Unknown bits among the incompatible features.
    #[error("the image needs features that are not supported (bits {0:#x})")]
    Features(u64),
    /// No size, or parts of sectors.
    #[error(
        "the disk in the image has {0} bytes: a volume needs a multiple of 512, and at least 512"
    )]
    Size(u64),
    /// Larger than 64 TiB, or than L1 tables of 32 MiB allow.
    #[error(
        "the disk in the image has {size} bytes, more than the {most} bytes that are supported with \
         its cluster size"
    )]
    TooLarge { size: u64, most: u64 },
    /// An L1 table that is too short, not at a cluster, or not in the file.
    #[error("the L1 table is too short, misplaced or cut off")]
    L1Table,
    /// An L2 table that is not at a cluster, or not in the file.
    #[error("the table for the bytes from {at} on is misplaced or beyond the end of the file")]
    L2Table { at: u64 },
    /// A compressed cluster.
    #[error("the image has compressed clusters (at {at})")]
    Compressed { at: u64 },
    /// A cluster that is not at a multiple of its size.
    #[error("the cluster of the bytes at {at} is misplaced")]
    Misplaced { at: u64 },
    /// Data beyond the end of the file.
    #[error(
        "the bytes at {at} are beyond the end of the file: it is cut off, or a table of it is damaged"
    )]
    BeyondEnd { at: u64 },
    /// The zero flag in an image of version 2, which has none.
    #[error("the entry of the bytes at {at} is not one of version 2")]
    ZeroFlag { at: u64 },
    /// Two entries lead to one L2 table. Only [`Qcow2Map::check`](super::map::Qcow2Map::check) finds this and the next one.
    #[error("the table for the bytes from {at} on is also in use for other bytes")]
    SharedTable { at: u64 },
    /// A cluster of data that is one of the header or of a table.
    #[error("the cluster of the bytes at {at} is one of a table")]
    Overlap { at: u64 },
}

impl Qcow2Fault {
    /// Whether the image is damaged; else it is one that is not supported, or none, or in use.
    pub fn is_damage(self) -> bool {
        match self {
            Qcow2Fault::HeaderLength
            | Qcow2Fault::ClusterBits(_)
            | Qcow2Fault::Corrupt
            | Qcow2Fault::L1Table
            | Qcow2Fault::L2Table { .. }
            | Qcow2Fault::Misplaced { .. }
            | Qcow2Fault::BeyondEnd { .. }
            | Qcow2Fault::ZeroFlag { .. }
            | Qcow2Fault::SharedTable { .. }
            | Qcow2Fault::Overlap { .. } => true,
            Qcow2Fault::Magic
            | Qcow2Fault::Version(_)
            | Qcow2Fault::BackingFile
            | Qcow2Fault::Encrypted
            | Qcow2Fault::ExternalData
            | Qcow2Fault::ExtendedL2
            | Qcow2Fault::Dirty
            | Qcow2Fault::Features(_)
            | Qcow2Fault::Size(_)
            | Qcow2Fault::TooLarge { .. }
            | Qcow2Fault::Compressed { .. } => false,
        }
    }
}

impl Advice for Qcow2Fault {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            Qcow2Fault::Magic => "a raw disk is `file:` and its path",
            // QEMU reads this one, by the name of `qcow`.
            Qcow2Fault::Version(1) => "convert it with `qemu-img convert -f qcow -O qcow2`",
            Qcow2Fault::Version(_) => {
                "restore the file if `qemu-img info` cannot read it either, else convert it with \
                 `qemu-img convert -O qcow2`"
            }
            Qcow2Fault::Features(_) => "convert it with `qemu-img convert -O qcow2`",
            Qcow2Fault::BackingFile => {
                "join them with `qemu-img convert -O qcow2`, or serve the lowest image and put an \
                 overlay of ebbd above it"
            }
            Qcow2Fault::Encrypted => {
                "convert it with `qemu-img convert -O qcow2` to one that is not, or encrypt within \
                 the guest"
            }
            Qcow2Fault::ExternalData => "join them with `qemu-img convert -O qcow2`",
            Qcow2Fault::ExtendedL2 => {
                "convert it with `qemu-img convert -O qcow2 -o extended_l2=off`"
            }
            Qcow2Fault::Dirty => "stop that one, then `qemu-img check -r all`",
            Qcow2Fault::Corrupt => "repair it with `qemu-img check -r all`, or restore it",
            Qcow2Fault::Size(_) => "see `qemu-img resize`",
            Qcow2Fault::TooLarge { .. } => "convert it with `qemu-img convert -O raw`",
            Qcow2Fault::Compressed { .. } => {
                "expand it with `qemu-img convert -O qcow2` (without -c)"
            }
            Qcow2Fault::HeaderLength
            | Qcow2Fault::ClusterBits(_)
            | Qcow2Fault::L1Table
            | Qcow2Fault::L2Table { .. }
            | Qcow2Fault::Misplaced { .. }
            | Qcow2Fault::BeyondEnd { .. }
            | Qcow2Fault::ZeroFlag { .. }
            | Qcow2Fault::SharedTable { .. }
            | Qcow2Fault::Overlap { .. } => "restore the file, and see `qemu-img check`",
        };
        Some(remedy.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_version_that_qemu_reads_is_to_be_converted_by_it() {
        let remedy =
            |version| Qcow2Fault::Version(version).remedy().unwrap_or_default().into_owned();
        assert!(remedy(1).contains("convert -f qcow -O qcow2"), "{}", remedy(1));
        assert!(remedy(9).starts_with("restore the file if `qemu-img info`"), "{}", remedy(9));
    }
}
