//! Xen within this process, for tests, fuzzing and benchmarks: a guest's memory is a memfd, an event channel
//! a pair of eventfds, xenstore a tree behind a lock. Mapping and unmapping are real: they change page
//! tables, and unmapping interrupts every processor that runs the process.
//!
//! [`frontend`] drives a ring as Linux's xen-blkfront does; [`hostile`] sends anything.

pub mod frontend;
pub mod hostile;
mod tree;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_io::{Fd, fd_from};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::abi::PAGE_BYTES;
use crate::platform::{Channel, CopyOp, Domain, Grants, Platform, XenStore};
use ebb_guest_ring::{Mapping, Unmap};

pub use tree::{Tree, TreeStore};

/// The backend's access to a page.
const NOT_GRANTED: u8 = 0;
const READ_ONLY: u8 = 1;
const READ_WRITE: u8 = 2;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One host: its guests and its xenstore. Cheap to clone.
#[derive(Clone, Default)]
pub struct World {
    guests: Arc<Mutex<HashMap<Domain, Arc<Guest>>>>,
    /// The xenstore.
    pub tree: Tree,
}

impl World {
    /// A guest with `pages` pages of memory; its grant references are the numbers of its pages.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn guest(&self, number: Domain, pages: u32) -> io::Result<Arc<Guest>> {
        let guest = Guest::new(number, pages)?;
        lock(&self.guests).insert(number, guest.clone());
        Ok(guest)
    }

    /// Destroys a guest: its memory and its channels can no longer be reached.
    pub fn destroy(&self, number: Domain) {
        lock(&self.guests).remove(&number);
        self.tree.remove_all(&format!("/local/domain/{number}/device"));
    }

    /// The guest with this number.
    pub fn find_guest(&self, number: Domain) -> Option<Arc<Guest>> {
        lock(&self.guests).get(&number).cloned()
    }

    fn find(&self, number: Domain) -> io::Result<Arc<Guest>> {
        self.find_guest(number).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Platform for World {
    fn grants(&self, guest: Domain) -> io::Result<Arc<dyn Grants>> {
        Ok(self.find(guest)?)
    }

    fn bind(&self, guest: Domain, port: u32) -> io::Result<Box<dyn Channel>> {
        let guest = self.find(guest)?;
        let channels = lock(&guest.channels);
        let found = usize::try_from(port).ok().and_then(|port| channels.get(port)).cloned();
        let ends = found.ok_or(io::ErrorKind::InvalidInput)?;
        // Xen raises an event at each bind.
        ring(&ends.to_backend);
        Ok(Box::new(BoundChannel(ends)))
    }

    fn xenstore(&self) -> io::Result<Box<dyn XenStore>> {
        Ok(Box::new(self.tree.connect()?))
    }
}

fn eventfd() -> io::Result<Fd> {
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    Ok(fd_from(rustix::event::eventfd(0, flags)?))
}

fn ring(fd: &Fd) {
    // A full counter means that an event is pending already.
    let _ = rustix::io::write(&**fd, &1u64.to_ne_bytes());
}

fn take_event(fd: &Fd) -> bool {
    let mut counter = [0; 8];
    rustix::io::read(&**fd, &mut counter).is_ok()
}

/// The two ends of an event channel.
#[derive(Clone, Debug)]
struct ChannelEnds {
    to_backend: Fd,
    to_guest: Fd,
}

#[derive(Debug)]
struct BoundChannel(ChannelEnds);

impl Channel for BoundChannel {
    fn fd(&self) -> Fd {
        self.0.to_backend.clone()
    }

    fn token(&self) -> &[u8] {
        // Events are not masked here: adding 0 to the counter changes nothing.
        &[0; 8]
    }

    fn notify(&self) -> io::Result<()> {
        ring(&self.0.to_guest);
        Ok(())
    }
}

/// A guest: memory, grants and channels.
pub struct Guest {
    number: Domain,
    memory: File,
    /// All of its memory, as the guest itself sees it.
    view: Mapping,
    grants: Vec<AtomicU8>,
    /// Pages mapped by the backend at the moment, rings included.
    mapped: AtomicU64,
    /// The mapped ranges.
    maps: Mutex<HashMap<usize, usize>>,
    channels: Mutex<Vec<ChannelEnds>>,
    /// Mapping pages fails, as when a process has as many mappings as it may.
    full: std::sync::atomic::AtomicBool,
    itself: std::sync::Weak<Guest>,
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guest").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The guest's own mapping is not counted.
struct GuestView;

impl Unmap for GuestView {
    fn unmap(&self, base: NonNull<u8>, bytes: usize, _cookie: u64) {
        // SAFETY: mapped as a whole by `Guest::new`, and its owner is being dropped.
        let _ = unsafe { munmap(base.as_ptr().cast(), bytes) };
    }
}

fn map_file(memory: &File, page: u32, pages: usize, writable: bool) -> io::Result<NonNull<u8>> {
    let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    let offset = u64::from(page) * PAGE_BYTES as u64;
    let bytes = pages * PAGE_BYTES;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let base =
        unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, memory, offset) }?;
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

impl Guest {
    fn new(number: Domain, pages: u32) -> io::Result<Arc<Guest>> {
        let name = format!("guest-{number}");
        let fd: OwnedFd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
        let memory = File::from(fd);
        memory.set_len(u64::from(pages) * PAGE_BYTES as u64)?;
        let count = usize::try_from(pages).map_err(io::Error::other)?;
        let base = map_file(&memory, 0, count, true)?;
        // SAFETY: just mapped, page aligned, and accessed through the `Mapping` only.
        let view = unsafe { Mapping::new(base, count * PAGE_BYTES, 0, Arc::new(GuestView)) };
        Ok(Arc::new_cyclic(|itself| Guest {
            number,
            memory,
            view,
            grants: (0..pages).map(|_| AtomicU8::new(NOT_GRANTED)).collect(),
            mapped: AtomicU64::new(0),
            maps: Mutex::default(),
            channels: Mutex::default(),
            full: std::sync::atomic::AtomicBool::new(false),
            itself: itself.clone(),
        }))
    }

    /// Its number.
    pub fn number(&self) -> Domain {
        self.number
    }

    /// Its memory, as the guest sees it.
    pub fn memory(&self) -> &Mapping {
        &self.view
    }

    /// Pages of memory.
    pub fn pages(&self) -> u32 {
        u32::try_from(self.grants.len()).unwrap_or(u32::MAX)
    }

    /// Lets the backend map a page, to write to it if `writable`.
    pub fn grant(&self, gref: u32, writable: bool) {
        self.set(gref, if writable { READ_WRITE } else { READ_ONLY });
    }

    /// Ends the grant of a page; existing mappings stay.
    pub fn revoke(&self, gref: u32) {
        self.set(gref, NOT_GRANTED);
    }

    fn set(&self, gref: u32, right: u8) {
        if let Some(cell) = usize::try_from(gref).ok().and_then(|gref| self.grants.get(gref)) {
            cell.store(right, Ordering::SeqCst);
        }
    }

    fn may(&self, gref: u32, write: bool) -> bool {
        let cell = usize::try_from(gref).ok().and_then(|gref| self.grants.get(gref));
        let right = cell.map_or(NOT_GRANTED, |cell| cell.load(Ordering::SeqCst));
        right == READ_WRITE || right == READ_ONLY && !write
    }

    /// Pages the backend has mapped, rings included.
    pub fn mapped(&self) -> u64 {
        self.mapped.load(Ordering::SeqCst)
    }

    /// Makes mapping fail for the backend, or not.
    pub fn fail_maps(&self, fail: bool) {
        self.full.store(fail, Ordering::SeqCst);
    }

    /// Opens an event channel; returns its port.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn open_channel(&self) -> io::Result<u32> {
        let ends = ChannelEnds { to_backend: eventfd()?, to_guest: eventfd()? };
        let mut channels = lock(&self.channels);
        channels.push(ends);
        u32::try_from(channels.len() - 1).map_err(io::Error::other)
    }

    /// Sends an event to the backend.
    pub fn notify(&self, port: u32) {
        if let Some(ends) = self.ends(port) {
            ring(&ends.to_backend);
        }
    }

    /// Waits for an event of the backend, at most `milliseconds`; true if there was one.
    pub fn wait(&self, port: u32, milliseconds: i64) -> bool {
        let Some(ends) = self.ends(port) else { return false };
        let timeout = rustix::time::Timespec {
            tv_sec: milliseconds / 1000,
            tv_nsec: milliseconds % 1000 * 1_000_000,
        };
        let mut fds = [rustix::event::PollFd::new(&*ends.to_guest, rustix::event::PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, Some(&timeout));
        take_event(&ends.to_guest)
    }

    fn ends(&self, port: u32) -> Option<ChannelEnds> {
        let channels = lock(&self.channels);
        usize::try_from(port).ok().and_then(|port| channels.get(port)).cloned()
    }
}

impl Grants for Guest {
    fn map(&self, grefs: &[u32], writable: bool) -> io::Result<Mapping> {
        if grefs.is_empty() || !grefs.iter().all(|gref| self.may(*gref, writable)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if self.full.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let bytes = grefs.len() * PAGE_BYTES;
        let base = match grefs {
            [one] => map_file(&self.memory, *one, 1, writable)?,
            many => self.map_many(many, writable)?,
        };
        let owner = self.itself.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        self.mapped.fetch_add(grefs.len() as u64, Ordering::SeqCst);
        lock(&self.maps).insert(base.addr().get(), grefs.len());
        // SAFETY: just mapped for this `Mapping` only, page aligned, and `unmap` below ends it.
        Ok(unsafe { Mapping::new(base, bytes, 0, owner) })
    }

    unsafe fn copy(&self, operations: &mut [CopyOp]) -> io::Result<()> {
        for operation in operations {
            let (gref, offset, len, near, to_guest) = operation.parts();
            let at = usize::try_from(gref).unwrap_or(usize::MAX).saturating_mul(PAGE_BYTES);
            let far = at.saturating_add(offset);
            let status = if !self.may(gref, to_guest) || offset + len > PAGE_BYTES {
                -3
            } else {
                // SAFETY: the local memory is valid for the length, as the caller promises.
                let near = unsafe { std::slice::from_raw_parts_mut(near, len) };
                let done = match to_guest {
                    true => self.view.write(far, near),
                    false => self.view.read(far, near),
                };
                if done { 0 } else { -1 }
            };
            operation.set_status(status);
        }
        Ok(())
    }
}

impl Guest {
    /// Maps pages that are not adjacent at consecutive addresses.
    fn map_many(&self, grefs: &[u32], writable: bool) -> io::Result<NonNull<u8>> {
        let bytes = grefs.len() * PAGE_BYTES;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE)
        }?;
        let protection =
            if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        for (number, gref) in grefs.iter().enumerate() {
            let place = base.wrapping_byte_add(number * PAGE_BYTES);
            let offset = u64::from(*gref) * PAGE_BYTES as u64;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: replaces a page of the mapping made above.
            let mapped =
                unsafe { mmap(place, PAGE_BYTES, protection, flags, &self.memory, offset) };
            if let Err(error) = mapped {
                // SAFETY: the mapping made above, which is not used yet.
                let _ = unsafe { munmap(base, bytes) };
                return Err(error.into());
            }
        }
        NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}

impl Unmap for Guest {
    fn unmap(&self, base: NonNull<u8>, bytes: usize, _cookie: u64) {
        let known = lock(&self.maps).remove(&base.addr().get());
        debug_assert_eq!(known, Some(bytes / PAGE_BYTES), "unmapped as it was mapped");
        // SAFETY: mapped by `map`, and its owner is being dropped.
        let _ = unsafe { munmap(base.as_ptr().cast(), bytes) };
        self.mapped.fetch_sub((bytes / PAGE_BYTES) as u64, Ordering::SeqCst);
    }
}
