//! An image in QEMU's qcow2 format, read-only: its data is read from its file through the worker's io_uring.
//!
//! The header and the L1 table are loaded when the image is opened; parts of the L2 tables when a request needs them,
//! and some of these stay in memory ([`slices`]). A part is loaded into the request's own buffer, whose bytes are
//! not filled yet, so that a request needs no memory but that.
//!
//! What is not supported is refused when the image is opened: backing files and external data files (no path that an
//! image names is ever opened), encryption, compression, extended L2 entries, and images marked as dirty or corrupt.
//! Internal snapshots are ignored: what is read is the active state. A compressed or a wrong cluster that opening did not
//! look at fails the reads of its bytes, and no others.
//!
//! # Invariants
//! - Nothing is read outside of the file, and nothing is written. The last cluster may be cut
//!   short: the rest is zeroes.
//! - The memory of an image is bounded: its L1 table (32 MiB, and 1 MiB for 8 TiB with the usual clusters of 64 KiB), and
//!   1 MiB of L2 tables.
//! - An image does not change while it is open: others hold no lock against that but the file's (`flock`).
//!
//! Source: QEMU's specification, qcow2.txt among its interop documents. The mapping is our own ([`map`]). That of the crate
//! imago reads tables through a storage that is `Send` and lends its buffers, while a worker's I/O stays on its thread and
//! owns them; it returns a boxed future for each range; and it bounds its tables by number, which may be 2 MiB each.

pub(crate) mod check;
pub(crate) mod fault;
pub mod map;
mod slices;

use std::io;
use std::path::Path;

use ebb_advice::Advised;
use ebb_block::{
    BlockError, BlockStore, BufResult, Capabilities, DeviceIdentity, ErrorKind, Extent, Identity,
    Operation, Tracking, push_extent,
};
use ebb_io::{Buf, Io};

use self::check::{CheckedTables, Qcow2Info};
use self::fault::{Qcow2Error, Qcow2Fault};
use self::map::{LoadError, Lookup, Qcow2Map, Run, SLICE_BYTES, Slice, slice_entries};
use self::slices::Slices;
use crate::file::{FileNumber, FileStore};
use crate::open_options::{Direct, OpenOptions};
use crate::{COPY_BYTES, open};

/// Runs that one call of `extents` or `prefetch` looks at, at most: its list may end early.
const RUNS_MAX: usize = 1024;
/// Of these, how many may need a part of a table from the file.
const LOADS_MAX: usize = 128;
/// Runs that are read ahead for one hint.
const PREFETCHES_MAX: usize = 16;

/// A qcow2 image.
#[derive(Debug)]
pub struct Qcow2Store {
    file: FileStore,
    map: Qcow2Map,
    slices: Slices,
}

/// What is read next for a range.
enum Found {
    Run(Run),
    Missing(Slice),
}

fn options(direct: Direct) -> OpenOptions {
    OpenOptions { read_only: true, direct, existing: true, ..OpenOptions::default() }
}

/// How many bytes from an offset on are a hole of a file of `size` bytes; 0 where that is not known. Remembers what it was
/// told last.
fn holes(file: impl std::os::fd::AsFd, size: u64) -> impl FnMut(u64) -> u64 {
    use rustix::fs::{SeekFrom, seek};

    let mut known = (0..0, false);
    move |at| {
        if !known.0.contains(&at) {
            known = match seek(&file, SeekFrom::Data(at)) {
                Ok(data) if data > at => (at..data, true),
                Ok(_) => (at..seek(&file, SeekFrom::Hole(at)).unwrap_or(at), false),
                // No data up to the end.
                Err(rustix::io::Errno::NXIO) => (at..size, true),
                Err(_) => return 0,
            };
        }
        if known.1 { known.0.end.saturating_sub(at) } else { 0 }
    }
}

/// A reader of a file, as [`Qcow2Map::load`] needs it.
fn reader(file: impl std::os::fd::AsFd) -> impl FnMut(u64, &mut [u8]) -> io::Result<usize> {
    move |at, buffer: &mut [u8]| {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match rustix::io::pread(&file, rest, at + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error)),
            }
        }
        Ok(done)
    }
}

fn fail_to_load(path: &Path, error: LoadError) -> Qcow2Error {
    match error {
        LoadError::Io(source) => Qcow2Error::Unreadable { path: path.into(), source },
        LoadError::Fault(fault) => Qcow2Error::Image { path: path.into(), fault },
    }
}

fn load(path: &Path, size: u64, file: impl std::os::fd::AsFd) -> Result<Qcow2Map, Qcow2Error> {
    Qcow2Map::load(size, reader(file)).map_err(|error| fail_to_load(path, error))
}

impl Qcow2Store {
    /// Opens an image; the notes are for the log. Reads its header, its L1 table and at most 1 MiB of its L2 tables.
    ///
    /// # Errors
    /// [`Qcow2Error`], each with a remedy.
    pub fn open(path: &Path, direct: Direct) -> Result<(Qcow2Store, Vec<String>), Qcow2Error> {
        let (file, notes) = FileStore::open_image(path, &options(direct))?;
        let map = load(path, file.size(), file.descriptor())?;
        Ok((Qcow2Store { file, map, slices: Slices::new() }, notes))
    }

    /// Checks whether an image could be opened, as [`crate::inspect`] does it for a file: without its lock.
    ///
    /// # Errors
    /// As those of [`Qcow2Store::open`].
    pub fn inspect(path: &Path, direct: Direct) -> Result<(), Qcow2Error> {
        let size = open::inspect_image(path, &options(direct))?;
        let file = std::fs::File::open(path);
        let file = file.map_err(|source| Qcow2Error::Unreadable { path: path.into(), source })?;
        load(path, size, file).map(drop)
    }

    /// Says what the header of an image says, also of one that is not supported.
    ///
    /// # Errors
    /// [`Qcow2Error`]: the file cannot be opened or is locked, or it is no qcow2 image.
    pub fn info(path: &Path) -> Result<Qcow2Info, Qcow2Error> {
        let (file, _) = FileStore::open_image(path, &options(Direct::Off))?;
        let info = Qcow2Info::load(reader(file.descriptor()));
        let info = info.map_err(|source| Qcow2Error::Unreadable { path: path.into(), source })?;
        info.map_err(|fault| Qcow2Error::Image { path: path.into(), fault })
    }

    /// Verifies the tables of an image, as [`Qcow2Map::check`] does, while its file is locked. May block.
    ///
    /// # Errors
    /// [`Qcow2Error`]: it cannot be verified, or its header or L1 table is so damaged that nothing else can be looked at.
    pub fn check(
        path: &Path,
        found: &mut dyn FnMut(Qcow2Fault),
    ) -> Result<CheckedTables, Qcow2Error> {
        let (file, _) = FileStore::open_image(path, &options(Direct::Off))?;
        let map = Qcow2Map::load_unchecked(file.size(), reader(file.descriptor()));
        let map = map.map_err(|error| fail_to_load(path, error))?;
        let checked =
            map.check(reader(file.descriptor()), holes(file.descriptor(), file.size()), found);
        checked.map_err(|source| Qcow2Error::Unreadable { path: path.into(), source })
    }

    /// Identifies the open file, even if it was renamed.
    ///
    /// # Errors
    /// Those of `fstat`.
    pub fn number(&self) -> io::Result<FileNumber> {
        self.file.number()
    }

    /// Where the bytes from `at` on are, as far as that is known without the file.
    #[inline]
    fn find(&self, at: u64, most: u64) -> Result<Found, Qcow2Fault> {
        match self.map.find(at, most) {
            Lookup::Run(run) => Ok(Found::Run(run)),
            Lookup::Slice(slice) => {
                let look = |entries: &_| self.map.run(entries, at, most);
                match self.slices.look(slice.number, look) {
                    Some(run) => run.map(Found::Run),
                    None => Ok(Found::Missing(slice)),
                }
            }
        }
    }

    /// Reads from the file. It is aligned to no more than sectors, so that nothing passes a bounce buffer, whose code would
    /// enlarge the future of every request.
    fn read_part(&self, io: &Io, buf: Buf, place: u64) -> impl Future<Output = BufResult> {
        self.file.read_whole(io, buf, place)
    }

    /// Keeps a slice whose bytes were read, and returns the run that it has for the bytes from `at` on.
    fn keep(&self, slice: Slice, bytes: &[u8], at: u64, most: u64) -> Result<Run, Qcow2Fault> {
        let entries = slice_entries(bytes).ok_or(Qcow2Fault::L2Table { at })?;
        self.slices.keep(slice.number, &entries);
        self.map.run(&entries, at, most)
    }

    #[cold]
    fn fail(
        &self,
        fault: Qcow2Fault,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> BlockError {
        let fault = Qcow2Error::Image { path: self.file.place().into(), fault };
        let source = io::Error::new(io::ErrorKind::InvalidData, Advised(fault));
        BlockError::new(ErrorKind::Io, operation, offset, length).caused_by(Some(source))
    }

    /// The run from `at` on, for what has no buffer; `None` if it needs the file and `loads` are used up.
    async fn run(
        &self,
        io: &Io,
        at: u64,
        most: u64,
        loads: &mut usize,
    ) -> Result<Option<Run>, BlockError> {
        let fail = |fault| self.fail(fault, Operation::Extents, at, most);
        let slice = match self.find(at, most).map_err(fail)? {
            Found::Run(run) => return Ok(Some(run)),
            Found::Missing(_) if *loads == 0 => return Ok(None),
            Found::Missing(slice) => slice,
        };
        *loads -= 1;
        let buf = io.pool().take(SLICE_BYTES).await;
        let (result, buf) = self.file.read(io, buf, slice.offset).await;
        result?;
        self.keep(slice, &buf, at, most).map(Some).map_err(fail)
    }
}

impl BlockStore for Qcow2Store {
    #[inline]
    fn size(&self) -> u64 {
        self.map.size()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: true,
            discard: false,
            fast_zero: false,
            ..self.file.capabilities()
        }
    }

    /// Another than that of the file, which is a disk of its own.
    fn identity(&self) -> Identity {
        let Identity { key, place } = self.file.identity();
        Identity { key: format!("qcow2 {key}"), place }
    }

    fn place(&self) -> String {
        self.file.place()
    }

    fn device_identity(&self) -> Option<DeviceIdentity> {
        self.file.device_identity()
    }

    #[inline]
    fn tracking(&self) -> Option<&Tracking> {
        self.file.tracking()
    }

    async fn read(&self, io: &Io, mut buf: Buf, offset: u64) -> BufResult {
        let whole = buf.window();
        let mut done = 0;
        // What is left, as offset and length on the disk.
        let left = |done: usize| (offset + done as u64, (whole.len() - done) as u64);
        while done < whole.len() {
            let (at, most) = left(done);
            let run = match self.find(at, most) {
                Ok(Found::Run(run)) => Ok(run),
                Ok(Found::Missing(slice)) => {
                    // It is no longer than what is left of the buffer: that is at least one sector.
                    buf.set_window(whole, done..done + SLICE_BYTES);
                    let (result, returned) = self.read_part(io, buf, slice.offset).await;
                    buf = returned;
                    if let Err(error) = result {
                        buf.restore(whole);
                        return (Err(of_request(error, offset, whole.len())), buf);
                    }
                    let (at, most) = left(done);
                    let run = self.keep(slice, &buf, at, most);
                    buf.restore(whole);
                    run
                }
                Err(fault) => Err(fault),
            };
            let run = match run {
                Ok(run) => run,
                Err(fault) => {
                    let length = whole.len() as u64;
                    return (Err(self.fail(fault, Operation::Read, offset, length)), buf);
                }
            };
            let start = done;
            done += usize::try_from(run.length).unwrap_or(usize::MAX).min(whole.len() - done);
            if let Some(place) = run.place {
                buf.set_window(whole, start..done);
                let (result, returned) = self.read_part(io, buf, place).await;
                buf = returned;
                buf.restore(whole);
                if let Err(error) = result {
                    return (Err(of_request(error, offset, whole.len())), buf);
                }
                continue;
            }
            done = done.min(start + COPY_BYTES);
            if let Some(part) = buf.get_mut(start..done) {
                part.fill(0);
            }
            if done < whole.len() {
                io.yield_now().await;
            }
        }
        (Ok(()), buf)
    }

    async fn write(&self, _io: &Io, buf: Buf, offset: u64, _fua: bool) -> BufResult {
        let length = buf.len() as u64;
        (Err(BlockError::new(ErrorKind::ReadOnly, Operation::Write, offset, length)), buf)
    }

    async fn flush(&self, _io: &Io) -> Result<(), BlockError> {
        Ok(())
    }

    async fn extents(
        &self,
        io: &Io,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        let (mut list, mut at, end) = (Vec::new(), offset, offset + length);
        let mut loads = LOADS_MAX;
        for _ in 0..RUNS_MAX {
            if at >= end || list.len() >= limit {
                break;
            }
            let Some(run) = self.run(io, at, end - at, &mut loads).await? else { break };
            let hole = run.place.is_none();
            push_extent(&mut list, Extent { offset: at, length: run.length, hole });
            at += run.length;
        }
        Ok(list)
    }

    async fn prefetch(&self, io: &Io, offset: u64, length: u64) -> Result<(), BlockError> {
        let (mut at, end, mut loads) = (offset, offset + length, PREFETCHES_MAX);
        for _ in 0..PREFETCHES_MAX {
            if at >= end || self.file.capabilities().direct {
                break;
            }
            let run = self.run(io, at, end - at, &mut loads).await.map_err(|mut error| {
                error.operation = Operation::Prefetch;
                error
            })?;
            let Some(run) = run else { break };
            if let Some(place) = run.place {
                self.file.prefetch(io, place, run.length).await?;
            }
            at += run.length;
        }
        Ok(())
    }

    fn release(&self) {
        self.file.release();
    }
}

/// An error of reading the file, as one of the request.
#[cold]
fn of_request(mut error: BlockError, offset: u64, length: usize) -> BlockError {
    (error.offset, error.length) = (offset, length as u64);
    error
}
