//! Recognises image files of other programs, which would be served as they are: the guest would see their headers and
//! tables instead of a disk. And the deltas of ebbd and encrypted volumes, which are no disks either.
//!
//! Only the first 1,024 and the last 512 bytes are compared. A raw disk can have such bytes too, since its guest may
//! write anything, so that they are a reason to warn and not to refuse.
//!
//! Sources: QEMU's specifications of qcow2 and QED; the vendors' specifications of VHD (footer `conectix`), VHDX and VMDK;
//! VirtualBox's header of VDI; the file formats of gzip, xz and Zstandard.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

/// The format of an image that is not a raw disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignFormat {
    /// QEMU's qcow and qcow2.
    Qcow,
    /// QEMU's QED.
    Qed,
    /// VHD, of fixed or dynamic size.
    Vhd,
    /// VHDX.
    Vhdx,
    /// VMDK, or its descriptor file.
    Vmdk,
    /// VirtualBox's VDI.
    Vdi,
    /// The store of an overlay.
    Delta,
    /// A volume encrypted in the format LUKS.
    Luks,
    /// A file compressed with gzip, xz or Zstandard.
    Compressed,
}

impl ForeignFormat {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            ForeignFormat::Qcow => "qcow2",
            ForeignFormat::Qed => "QED",
            ForeignFormat::Vhd => "VHD",
            ForeignFormat::Vhdx => "VHDX",
            ForeignFormat::Vmdk => "VMDK",
            ForeignFormat::Vdi => "VDI",
            ForeignFormat::Delta => "delta",
            ForeignFormat::Luks => "LUKS",
            ForeignFormat::Compressed => "compressed",
        }
    }

    /// How to get the raw disk out of an image.
    pub fn to_raw(self) -> &'static str {
        match self {
            ForeignFormat::Compressed => "decompress it",
            ForeignFormat::Luks => {
                "serve it with `encryption`, and copy the volume from the daemon as `nbd+unix:///VOLUME?socket=PATH`"
            }
            _ => "convert it with `qemu-img convert -O raw`",
        }
    }

    /// A warning for the operator, with a remedy.
    pub fn warning(self) -> String {
        let convert = match self {
            ForeignFormat::Delta => {
                "it is the store of an overlay, which a write destroys: set `base` to the volume that it was made above, or to `none` if it was flattened"
            }
            ForeignFormat::Luks => "set `encryption` to where its key is, so that ebbd decrypts it",
            ForeignFormat::Qcow => {
                "serve the disk in it read-only with `qcow2:` instead of `file:`, or convert it with `qemu-img convert -O raw`"
            }
            other => other.to_raw(),
        };
        format!(
            "the file looks like a {} image, and is served as a raw disk: {convert}, unless a guest wrote these bytes itself",
            self.name()
        )
    }

    /// The format of a file that begins with `head` (1,024 bytes, if it has that many) and ends with `tail` (512).
    pub fn of(head: &[u8], tail: &[u8]) -> Option<ForeignFormat> {
        let starts: [(&[u8], ForeignFormat); 12] = [
            (b"QFI\xfb", ForeignFormat::Qcow),
            (b"QED\0", ForeignFormat::Qed),
            (b"EBBDELTA", ForeignFormat::Delta),
            (b"LUKS\xba\xbe", ForeignFormat::Luks),
            (b"conectix", ForeignFormat::Vhd),
            (b"vhdxfile", ForeignFormat::Vhdx),
            (b"KDMV", ForeignFormat::Vmdk),
            (b"COWD", ForeignFormat::Vmdk),
            (b"# Disk DescriptorFile", ForeignFormat::Vmdk),
            (b"\x1f\x8b\x08", ForeignFormat::Compressed),
            (b"\xfd7zXZ\0", ForeignFormat::Compressed),
            (b"\x28\xb5\x2f\xfd", ForeignFormat::Compressed),
        ];
        if let Some((_, format)) = starts.iter().find(|(magic, _)| head.starts_with(magic)) {
            return Some(*format);
        }
        if head.get(0x40..0x44) == Some(&[0x7f, 0x10, 0xda, 0xbe]) {
            return Some(ForeignFormat::Vdi);
        }
        tail.starts_with(b"conectix").then_some(ForeignFormat::Vhd)
    }

    /// The format of the file or block device at `path`; `None` also for a file that is neither. May block.
    ///
    /// # Errors
    /// Those of reading it.
    pub fn of_path(path: &Path) -> io::Result<Option<ForeignFormat>> {
        // Opening a pipe would block.
        let kind = std::fs::metadata(path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Ok(None);
        }
        ForeignFormat::of_file(&File::open(path)?)
    }

    /// The format of an open file or block device, which must not be open for direct I/O.
    ///
    /// # Errors
    /// Those of reading it.
    pub fn of_file(mut file: &File) -> io::Result<Option<ForeignFormat>> {
        let mut head = [0; 1024];
        let found = read(file, &mut head, 0)?;
        // The end of a block device is not in its metadata.
        let end = io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
        let mut tail = [0; 512];
        if let Some(at) = end.checked_sub(512) {
            read(file, &mut tail, at)?;
        }
        Ok(ForeignFormat::of(head.get(..found).unwrap_or_default(), &tail))
    }
}

/// Reads until the buffer is full or the file ends, and returns the number of bytes.
fn read(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn of(bytes: &[u8]) -> Option<ForeignFormat> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        ForeignFormat::of_path(file.path()).unwrap()
    }

    #[test]
    fn images_of_other_programs_are_recognised() {
        let disk = |at: usize, magic: &[u8]| {
            let mut bytes = vec![0; 1 << 20];
            bytes[at..at + magic.len()].copy_from_slice(magic);
            bytes
        };
        for (at, magic, format) in [
            (0, &b"QFI\xfb\0\0\0\x03"[..], ForeignFormat::Qcow),
            (0, b"vhdxfile", ForeignFormat::Vhdx),
            (0, b"KDMV\x01", ForeignFormat::Vmdk),
            (0x40, b"\x7f\x10\xda\xbe", ForeignFormat::Vdi),
            (0, b"conectix", ForeignFormat::Vhd),
            (0, b"EBBDELTA", ForeignFormat::Delta),
            (0, b"LUKS\xba\xbe\0\x02", ForeignFormat::Luks),
            ((1 << 20) - 512, b"conectix", ForeignFormat::Vhd),
            (0, b"\x1f\x8b\x08", ForeignFormat::Compressed),
        ] {
            assert_eq!(of(&disk(at, magic)), Some(format), "{magic:?}");
            assert!(format.warning().contains(format.name()));
        }
        assert_eq!(of(&disk(512, b"QFI\xfb")), None);
        assert_eq!(of(&disk(0, b"\xeb\x63\x90")), None);
        for short in [&b""[..], b"Q", b"QFI"] {
            assert_eq!(of(short), None);
        }
        assert_eq!(ForeignFormat::of_path(Path::new("/dev/null")).unwrap(), None);
    }
}
