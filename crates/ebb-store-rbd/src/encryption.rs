//! Images that librbd encrypts: the passphrase, and the errors of opening one.
//!
//! # Invariants
//! - The passphrase is in memory of this process only from its reading until librbd has it, in one buffer that is
//!   overwritten with zeroes afterwards.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use zeroize::Zeroizing;

use crate::ffi::{FORMAT_LUKS1, FORMAT_LUKS2};
use crate::handles::ImageHandle;
use crate::options::{RbdEncryption, RbdEncryptionFormat, RbdError, RbdOptions};

/// The longest passphrase, bytes.
const PASSPHRASE_BYTES: usize = 4096;

/// A passphrase in a buffer that is not enlarged, since that would leave copies.
struct Passphrase {
    buffer: Zeroizing<Box<[u8]>>,
    length: usize,
}

impl Passphrase {
    /// What is in a file, without the end of its last line, as `rbd` reads it.
    fn read(path: &Path) -> io::Result<Passphrase> {
        let mut file = File::open(path)?;
        let mut buffer = Zeroizing::new(vec![0; PASSPHRASE_BYTES + 2].into_boxed_slice());
        let mut length = 0;
        loop {
            let place = &mut buffer[length..];
            match file.read(place) {
                Ok(0) => break,
                Ok(bytes) => length += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if buffer[..length].last() == Some(&b'\n') {
            length -= 1;
        }
        let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        match length {
            0 => Err(invalid("it is empty".to_owned())),
            1..=PASSPHRASE_BYTES => Ok(Passphrase { buffer, length }),
            _ => Err(invalid(format!("it has more than {PASSPHRASE_BYTES} bytes"))),
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[..self.length]
    }
}

/// Decrypts what is read from the image from now on, and encrypts what is written. Its size is smaller afterwards.
///
/// # Errors
/// [`RbdError::Passphrase`], [`RbdError::WrongPassphrase`], [`RbdError::NotEncrypted`], [`RbdError::NoEncryption`],
/// [`RbdError::Open`].
pub(crate) fn load(
    options: &RbdOptions,
    encryption: &RbdEncryption,
    handle: &ImageHandle,
) -> Result<(), RbdError> {
    let image = options.image_spec();
    let Some(call) = handle.library.optional.rbd_encryption_load else {
        return Err(RbdError::NoEncryption { image, version: handle.library.version() });
    };
    let path = &encryption.passphrase;
    let passphrase = Passphrase::read(path).map_err(|source| RbdError::Passphrase {
        image: image.clone(),
        path: path.display().to_string(),
        source,
    })?;
    let format = match encryption.format {
        RbdEncryptionFormat::Luks1 => FORMAT_LUKS1,
        RbdEncryptionFormat::Luks2 => FORMAT_LUKS2,
    };
    handle.load_encryption(call, format, passphrase.bytes()).map_err(|source| match source.code() {
        libc::EPERM => RbdError::WrongPassphrase { image, path: path.display().to_string() },
        libc::EINVAL => RbdError::NotEncrypted { image, format: encryption.format, source },
        _ => RbdError::Open { image, source },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passphrase_is_a_file_without_the_end_of_its_last_line() {
        let path = std::env::temp_dir().join(format!("ebbd-passphrase-{}", std::process::id()));
        let read = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            Passphrase::read(&path).map(|passphrase| passphrase.bytes().to_vec())
        };
        assert_eq!(read(b"secret").unwrap(), b"secret");
        assert_eq!(read(b"two words\n").unwrap(), b"two words");
        assert_eq!(read(b"\n\0\n\n").unwrap(), b"\n\0\n");
        assert_eq!(read(&[b'x'; PASSPHRASE_BYTES]).unwrap().len(), PASSPHRASE_BYTES);
        let longest = [vec![b'x'; PASSPHRASE_BYTES], vec![b'\n']].concat();
        assert_eq!(read(&longest).unwrap().len(), PASSPHRASE_BYTES);
        for content in
            [&b""[..], b"\n", &[b'x'; PASSPHRASE_BYTES + 1], &[b'x'; 3 * PASSPHRASE_BYTES]]
        {
            assert_eq!(read(content).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Passphrase::read(&path).map(drop).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
