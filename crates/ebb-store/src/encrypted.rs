//! A volume whose store holds it encrypted, in the format LUKS2.
//!
//! What is above, the cache included, sees plain text; the file has a header and ciphertext. A read is decrypted in the
//! buffer of the request. A write is encrypted into a second buffer, piece by piece: its own stays plain, because it may
//! be a page of the cache, and callers write it again after an error. Requests for parts of sectors are widened, as for a
//! file with large sectors (`file.rs`).
//!
//! A sector that is all zeroes in the file reads as zeroes: it was never written, as ciphertext is not zero. So a
//! new volume reads as zeroes, as the contract of stores promises. dm-crypt reads such a sector as noise, so what relies on
//! zeroes writes them: zeroes are always written as data. Discards are not passed on, because they would show an observer
//! of the file which parts of the disk are in use.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ebb_advice::Advised;
use ebb_block::unaligned::{self, Blocks};
use ebb_block::{
    BlockError, BlockLock, BlockStore, Buf, BufResult, Capabilities, DeviceIdentity, ErrorKind,
    Identity, Io, LaterFlushes, Operation, Resize, ResizeError, SECTOR, Tracking,
    check_size_change,
};
use ebb_io::Fd;
use ebb_luks::{DATA_OFFSET, HeaderArea, LuksError, LuksHeader, NEW_SECTOR, Secret, SectorCipher};

use crate::encrypted_error::{EncryptedError, whole_sectors};
use crate::file::{FileNumber, FileStore};
use crate::open_options::{OpenError, OpenOptions};

/// Bytes that are encrypted and written at once: the most that a write takes beside its own buffer.
const PIECE: usize = 256 << 10;
/// Bytes that are encrypted or decrypted before the worker's other tasks run: 50 microseconds.
const AT_ONCE: usize = 128 << 10;

/// An encrypted volume in another store: a file or block device.
#[derive(Debug)]
pub struct EncryptedStore<S = FileStore> {
    store: S,
    cipher: Arc<SectorCipher>,
    /// Held by who reads or changes the key slots while the volume is open.
    slots: Arc<Mutex<()>>,
    /// Where the data begins in the store.
    start: u64,
    /// Its bytes if the header says so, and not the store.
    fixed: Option<u64>,
    /// Bytes of a block: the larger one of a sector of the cipher and a block of the store.
    block: u64,
    /// As in a file with large sectors; `None` where all requests are for whole blocks.
    unaligned: Option<BlockLock>,
}

impl EncryptedStore {
    /// Opens the volume in a file with a key; the notes are for the log. With [`OpenOptions::create`], which is the size
    /// of the disk, a new file gets a header, and so does an empty one: see [`EncryptedError::NotBlank`]. May block, and
    /// takes a second of processor time.
    ///
    /// # Errors
    /// [`EncryptedError`], each with a remedy.
    pub fn open(
        path: &Path,
        options: &OpenOptions,
        key: &[u8],
    ) -> Result<(EncryptedStore, Vec<String>), EncryptedError> {
        let (file, mut notes) = FileStore::open(path, &of_file(options))?;
        let failed = |source| EncryptedError::Luks { path: path.into(), source };
        let mut area = HeaderFile::of(&file, path, !options.read_only)?;
        let (header, key) = match header_in(&mut area, path, options)? {
            None => {
                let checked = match file.was_made() {
                    true => check_sectors(path, options),
                    false => check_room(path, &area, options),
                };
                let mut format = || LuksHeader::format(&mut area, key).map_err(failed);
                let made = checked.and_then(|()| format()).inspect_err(|_| {
                    if file.was_made() {
                        // Part of a header would be taken for data at the next try. It is still locked.
                        let _ = std::fs::remove_file(path);
                    }
                })?;
                if !file.was_made() {
                    notes.push(format!(
                        "it was empty, and has a LUKS header now: {}",
                        path.display()
                    ));
                }
                made
            }
            Some(header) => {
                notes.extend(header.warning());
                let (_, key) = header.unlock(&mut area, key).map_err(failed)?;
                (header, key)
            }
        };
        let store = EncryptedStore::over(file, &header, key).map_err(failed)?;
        check_size(path, store.size(), options, &mut notes)?;
        Ok((store, notes))
    }

    /// Checks whether [`EncryptedStore::open`] could open the volume with this key. Nothing is created or changed, and no
    /// lock is taken, so that the file may be in use. May block, and takes a second of processor time.
    ///
    /// # Errors
    /// As for opening it, without those of the lock.
    pub fn inspect(path: &Path, options: &OpenOptions, key: &[u8]) -> Result<(), EncryptedError> {
        crate::inspect(path, &of_file(options))?;
        let mut area = match std::fs::File::open(path) {
            Ok(file) => HeaderFile::new(file, path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound && options.makes().is_some() => {
                return check_sectors(path, options);
            }
            Err(error) => return Err(OpenError::of(path, "open its header", error).into()),
        };
        let Some(header) = header_in(&mut area, path, options)? else {
            return check_room(path, &area, options);
        };
        let failed = |source| EncryptedError::Luks { path: path.into(), source };
        header.unlock(&mut area, key).map(drop).map_err(failed)?;
        let segment = header.segment();
        let size = area.size.saturating_sub(segment.offset);
        let size = segment.length.unwrap_or(size - size % u64::from(segment.sector));
        check_size(path, size, options, &mut Vec::new())
    }

    /// Its file, its cipher, and what those hold who use its header while it is open.
    pub(crate) fn parts(&self) -> (&FileStore, &Arc<SectorCipher>, &Arc<Mutex<()>>) {
        (&self.store, &self.cipher, &self.slots)
    }

    /// Whether opening created the file.
    pub fn was_made(&self) -> bool {
        self.store.was_made()
    }

    /// Identifies the open file, even if it was renamed.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn number(&self) -> io::Result<FileNumber> {
        self.store.number()
    }
}

impl<S: BlockStore> EncryptedStore<S> {
    /// The volume in a store that has this header, with its key.
    ///
    /// # Errors
    /// [`LuksError`]: there is no memory for the key, or the store ends before its data.
    pub fn over(
        store: S,
        header: &LuksHeader,
        key: Secret,
    ) -> Result<EncryptedStore<S>, LuksError> {
        let segment = header.segment();
        let needed = segment.offset + segment.length.unwrap_or(u64::from(segment.sector));
        if store.size() < needed {
            return Err(LuksError::Cut { size: store.size(), needed });
        }
        let sector = usize::try_from(segment.sector).unwrap_or(usize::MAX);
        let block = u64::from(segment.sector).max(u64::from(store.capabilities().alignment));
        Ok(EncryptedStore {
            cipher: Arc::new(SectorCipher::new(key, sector, segment.first)?),
            slots: Arc::default(),
            start: segment.offset,
            fixed: segment.length,
            block,
            unaligned: (block > SECTOR).then(BlockLock::default),
            store,
        })
    }

    /// The volume in a store from `start` on, with this key and sectors of this size, and without
    /// a header: for tests, since deriving the key of a header takes a second.
    ///
    /// # Errors
    /// [`LuksError`]: there is no memory for the key.
    #[cfg(feature = "test-store")]
    pub fn without_header(
        store: S,
        key: Secret,
        start: u64,
        sector: u32,
    ) -> Result<EncryptedStore<S>, LuksError> {
        let block = u64::from(sector).max(u64::from(store.capabilities().alignment));
        let sector = usize::try_from(sector).unwrap_or(usize::MAX);
        Ok(EncryptedStore {
            cipher: Arc::new(SectorCipher::new(key, sector, 0)?),
            slots: Arc::default(),
            start,
            fixed: None,
            block,
            unaligned: (block > SECTOR).then(BlockLock::default),
            store,
        })
    }

    /// The store that it is in.
    #[cfg(feature = "test-store")]
    pub(crate) fn holder(&self) -> &S {
        &self.store
    }

    /// The size of a disk in a store of `size` bytes: whole blocks.
    fn size_in(&self, size: u64) -> u64 {
        let size = size.saturating_sub(self.start);
        size - size % self.block
    }

    /// Decrypts what was read at `offset`.
    async fn decrypt(&self, io: &Io, buf: &mut Buf, offset: u64) -> Result<(), LuksError> {
        let (length, mut done) = (buf.len(), 0);
        while done < length {
            let end = length.min(done + AT_ONCE);
            self.cipher.decrypt_written(offset + done as u64, &mut buf[done..end])?;
            done = end;
            if done < length {
                io.yield_now().await;
            }
        }
        Ok(())
    }

    /// Encrypts the part of a buffer from `from` on, which is to be written at `offset`, into another.
    async fn encrypt(
        &self,
        io: &Io,
        (plain, from): (&Buf, usize),
        into: &mut Buf,
        offset: u64,
    ) -> Result<(), LuksError> {
        let (length, mut done) = (into.len(), 0);
        while done < length {
            let end = length.min(done + AT_ONCE);
            let plain = &plain[from + done..from + end];
            self.cipher.encrypt(offset + done as u64, plain, &mut into[done..end])?;
            done = end;
            if done < length {
                io.yield_now().await;
            }
        }
        Ok(())
    }
}

/// An error of the store, as one of the request.
#[cold]
fn of_request(mut error: BlockError, offset: u64, length: usize) -> BlockError {
    (error.offset, error.length) = (offset, length as u64);
    error
}

/// An error of the cipher.
#[cold]
fn failed(error: LuksError, operation: Operation, offset: u64, length: usize) -> BlockError {
    let source = Some(io::Error::other(Advised(error)));
    BlockError::new(ErrorKind::Io, operation, offset, length as u64).caused_by(source)
}

impl<S: BlockStore> Blocks for EncryptedStore<S> {
    fn block(&self) -> u64 {
        self.block
    }

    async fn read_blocks(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        let length = buf.len();
        let (result, mut buf) = self.store.read(io, buf, self.start + offset).await;
        if let Err(error) = result {
            return (Err(of_request(error, offset, length)), buf);
        }
        let decrypted = self.decrypt(io, &mut buf, offset).await;
        (decrypted.map_err(|error| failed(error, Operation::Read, offset, length)), buf)
    }

    async fn write_blocks(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let (length, mut done) = (buf.len(), 0);
        let mut second = io.pool().take(length.min(PIECE)).await;
        while done < length {
            second.set_len(second.capacity().min(length - done).min(PIECE));
            let at = offset + done as u64;
            if let Err(error) = self.encrypt(io, (&buf, done), &mut second, at).await {
                return (Err(failed(error, Operation::Write, offset, length)), buf);
            }
            let count = second.len();
            let (result, back) = self.store.write(io, second, self.start + at, fua).await;
            second = back;
            if let Err(error) = result {
                return (Err(of_request(error, offset, length)), buf);
            }
            done += count;
        }
        (Ok(()), buf)
    }
}

impl<S: BlockStore> BlockStore for EncryptedStore<S> {
    #[inline]
    fn size(&self) -> u64 {
        self.fixed.unwrap_or_else(|| self.size_in(self.store.size()))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            discard: false,
            fast_zero: false,
            alignment: u32::try_from(self.block).unwrap_or(u32::MAX),
            ..self.store.capabilities()
        }
    }

    /// Another than that of the file, which is a disk of its own.
    fn identity(&self) -> Identity {
        let Identity { key, place } = self.store.identity();
        Identity { key: format!("luks {key}"), place }
    }

    fn place(&self) -> String {
        self.store.place()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        self.store.device_identity()
    }

    #[inline]
    fn tracking(&self) -> Option<&Tracking> {
        self.store.tracking()
    }

    #[inline]
    fn bounce_bytes(&self, offset: u64, length: usize) -> usize {
        unaligned::bounce_bytes(self.block, offset, length)
    }

    async fn read(&self, io: &Io, buf: Buf, offset: u64) -> BufResult {
        // Boxed, because it would enlarge the future of every request to any store.
        if unaligned::is_aligned(self.block, offset, buf.len()) {
            return Box::pin(self.read_blocks(io, buf, offset)).await;
        }
        let length = buf.len();
        let (result, buf) = Box::pin(unaligned::read(self, io, buf, offset)).await;
        (result.map_err(|error| of_request(error, offset, length)), buf)
    }

    async fn write(&self, io: &Io, buf: Buf, offset: u64, fua: bool) -> BufResult {
        let Some(lock) = &self.unaligned else {
            return Box::pin(self.write_blocks(io, buf, offset, fua)).await;
        };
        if unaligned::is_aligned(self.block, offset, buf.len()) {
            let _shared = lock.read().await;
            return Box::pin(self.write_blocks(io, buf, offset, fua)).await;
        }
        let _alone = lock.write().await;
        // Boxed, as in `read`.
        let length = buf.len();
        let (result, buf) = Box::pin(unaligned::write(self, io, buf, offset, fua)).await;
        (result.map_err(|error| of_request(error, offset, length)), buf)
    }

    async fn flush(&self, io: &Io) -> Result<(), BlockError> {
        self.store.flush(io).await
    }

    /// Writes encrypted zeroes over whole blocks.
    async fn zero_blocks(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let _shared = match &self.unaligned {
            Some(lock) => Some(lock.read().await),
            None => None,
        };
        let piece = usize::try_from(length).unwrap_or(usize::MAX).min(AT_ONCE);
        let mut buf = io.pool().take(piece).await;
        let mut at = offset;
        while at < offset + length {
            let left = usize::try_from(offset + length - at).unwrap_or(usize::MAX);
            buf.set_len(piece.min(left));
            buf.fill(0);
            let count = buf.len();
            let fail = |error| failed(error, Operation::WriteZeroes, at, count);
            self.cipher.encrypt_in_place(at, &mut buf).map_err(fail)?;
            let (result, back) = self.store.write(io, buf, self.start + at, false).await;
            result.map_err(|error| of_request(error, at, count))?;
            buf = back;
            at += count.max(1) as u64;
        }
        Ok(())
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let result = self.store.prefetch(io, self.start + offset, length).await;
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        result.map_err(|error| of_request(error, offset, length))
    }

    fn later_flushes(&self, error: &BlockError) -> LaterFlushes {
        self.store.later_flushes(error)
    }

    async fn has_no_unreported_error(&self, io: &Io) -> bool {
        self.store.has_no_unreported_error(io).await
    }

    async fn check_resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let size = self.store.check_resize(io, self.order(order)?).await?;
        Ok(self.size_in(size))
    }

    async fn resize(&self, io: &Io, order: Resize) -> Result<u64, ResizeError> {
        let size = self.store.resize(io, self.order(order)?).await?;
        Ok(self.size_in(size))
    }

    fn abort(&self) {
        self.store.abort();
    }

    fn release(&self) {
        self.store.release();
    }
}

impl<S: BlockStore> EncryptedStore<S> {
    /// The order for the store that the disk is in.
    fn order(&self, order: Resize) -> Result<Resize, ResizeError> {
        if self.fixed.is_some() {
            return Err(ResizeError::Unsupported {
                why: "its LUKS header fixes its size",
                remedy: "make a new volume of the size that you need, and copy the disk",
            });
        }
        if let Some(to) = order.to {
            check_size_change(self.size(), to, self.block, order.shrink)?;
        }
        let to = order.to.map(|to| to.saturating_add(self.start));
        Ok(Resize { to, ..order })
    }
}

/// The options of the file that holds the volume. The volume has its own size, which is checked when that is known.
fn of_file(options: &OpenOptions) -> OpenOptions {
    let create = options.create.map(|size| size.saturating_add(DATA_OFFSET));
    OpenOptions { create, any_size: true, ..options.clone() }
}

/// The header in a file; `None`: one is to be made there.
fn header_in(
    area: &mut HeaderFile,
    path: &Path,
    options: &OpenOptions,
) -> Result<Option<LuksHeader>, EncryptedError> {
    let failed = |source| EncryptedError::Luks { path: path.into(), source };
    match LuksHeader::load(area) {
        Err(LuksError::NotLuks) if options.makes().is_some() => {
            match is_blank(area).map_err(|error| failed(error.into()))? {
                true => Ok(None),
                false => Err(EncryptedError::NotBlank { path: path.into() }),
            }
        }
        loaded => loaded.map(Some).map_err(failed),
    }
}

/// The size that a new volume has in a file or device of `size` bytes.
fn new_size(size: u64) -> u64 {
    let size = size.saturating_sub(DATA_OFFSET);
    size - size % u64::from(NEW_SECTOR)
}

/// Fails if a new volume would not have whole sectors.
fn check_sectors(path: &Path, options: &OpenOptions) -> Result<(), EncryptedError> {
    match options.least_size() {
        Some(wanted) if !wanted.is_multiple_of(u64::from(NEW_SECTOR)) => {
            Err(EncryptedError::PartSector { path: path.into(), wanted })
        }
        _ => Ok(()),
    }
}

/// Fails if a new volume of the configured size does not fit into an existing file or device.
fn check_room(path: &Path, area: &HeaderFile, options: &OpenOptions) -> Result<(), EncryptedError> {
    let size = area.size;
    match options.least_size() {
        Some(wanted) if wanted > new_size(size) => {
            let is_device = area.file.metadata().is_ok_and(|found| !found.is_file());
            let needed = whole_sectors(wanted).saturating_add(DATA_OFFSET);
            let path = path.into();
            Err(EncryptedError::TooSmall { path, size, wanted, needed, is_device })
        }
        _ => Ok(()),
    }
}

/// Compares the size of the volume with the configured one, as that of a file is compared.
fn check_size(
    path: &Path,
    size: u64,
    options: &OpenOptions,
    notes: &mut Vec<String>,
) -> Result<(), EncryptedError> {
    match options.least_size() {
        Some(wanted) if wanted > size => {
            Err(EncryptedError::OtherSize { path: path.into(), size, wanted })
        }
        Some(wanted) if wanted < size => {
            notes.push(format!(
                "{}: the volume in it is {size} bytes and the configuration says {wanted}: served as it is; correct `size`, \
                 or remove it and `create`",
                path.display()
            ));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A file as headers are read and written: without direct I/O.
pub(crate) struct HeaderFile {
    file: std::fs::File,
    size: u64,
}

impl HeaderFile {
    fn of(file: &FileStore, path: &Path, write: bool) -> Result<HeaderFile, EncryptedError> {
        HeaderFile::again((file.descriptor(), file.size()), path, write)
    }

    /// Opens a file of this size again.
    pub(crate) fn again(
        (file, size): (&Fd, u64),
        path: &Path,
        write: bool,
    ) -> Result<HeaderFile, EncryptedError> {
        let again = format!("/proc/self/fd/{}", file.as_raw_fd());
        let opened = std::fs::OpenOptions::new().read(true).write(write).open(again);
        let opened = opened.map_err(|error| OpenError::of(path, "open its header", error))?;
        Ok(HeaderFile { file: opened, size })
    }

    fn new(file: std::fs::File, path: &Path) -> Result<HeaderFile, EncryptedError> {
        let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0));
        let size = size.map_err(|error| OpenError::of(path, "read its size", error.into()))?;
        Ok(HeaderFile { file, size })
    }
}

impl std::fmt::Debug for HeaderFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HeaderFile({} bytes)", self.size)
    }
}

impl HeaderArea for HeaderFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Whether a file holds nothing that a new header, or the volume behind it, would replace.
fn is_blank(area: &mut HeaderFile) -> io::Result<bool> {
    let mut bytes = vec![0; 1 << 20];
    for at in (0..DATA_OFFSET.min(area.size)).step_by(bytes.len()) {
        let count = usize::try_from(area.size - at).unwrap_or(bytes.len()).min(bytes.len());
        area.read(at, &mut bytes[..count])?;
        if bytes[..count].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    if !area.file.metadata()?.is_file() {
        return Ok(true);
    }
    match rustix::fs::seek(&area.file, rustix::fs::SeekFrom::Data(DATA_OFFSET)) {
        Ok(_) => Ok(false),
        // There is none.
        Err(rustix::io::Errno::NXIO) => Ok(true),
        Err(error) => Err(error.into()),
    }
}
