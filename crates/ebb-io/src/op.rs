//! Operations as futures: each takes its buffer by value and returns it with the result.
//!
//! A result is that of the kernel: lengths may be short, and the caller (a store)
//! continues or reports an error. Errors are plain `io::Error`; the caller adds the volume and the offset.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use io_uring::{opcode, squeue, types};

use crate::buf::Buf;
use crate::foreign::ForeignVectors;
use crate::gather::Gather;
use crate::ring::file_queue::file_number;
use crate::ring::{Direction, OpClass, OpKey, OpMemory, POLLIN};
use crate::worker::Io;

/// A file descriptor shared with the operations on it: it is closed when the last of them has completed.
pub type Fd = Arc<OwnedFd>;

/// Wraps anything that owns a descriptor.
pub fn fd_from(owner: impl Into<OwnedFd>) -> Fd {
    Arc::new(owner.into())
}

/// Whether an operation was ended by [`Io::cancel_receives`] or [`Io::cancel_sends`].
pub fn was_cancelled(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ECANCELED)
}

/// Storage operations on buffers of this size or more are submitted at once, bytes.
const EAGER_BYTES: usize = 64 << 10;

/// Flags of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteFlags {
    /// Complete only when the data is stable (`RWF_DSYNC`).
    pub dsync: bool,
}

struct Op<'a> {
    io: &'a Io,
    entry: squeue::Entry,
    class: OpClass,
    parts: Option<(OpMemory, Option<Fd>)>,
    file: usize,
    ticket: u64,
    key: Option<OpKey>,
    /// Large: submitted at once, see [`crate::ring::IoRing::submit_now`].
    eager: bool,
    /// Entries submitted before it, see [`crate::ring::IoRing::start_chain`].
    before: Option<[squeue::Entry; 2]>,
}

impl<'a> Op<'a> {
    fn new(io: &'a Io, entry: squeue::Entry, class: OpClass, memory: OpMemory, fd: &Fd) -> Op<'a> {
        let parts = Some((memory, Some(fd.clone())));
        let file = file_number(Some(fd));
        Op { io, entry, class, parts, file, ticket: 0, key: None, eager: false, before: None }
    }

    /// The length and the message of an operation on a message.
    async fn with_its_message(self) -> (io::Result<usize>, Box<Gather>) {
        match self.await {
            (result, OpMemory::Gather(message)) => (length(result), message),
            _ => unreachable!("an operation returns the memory it was given"),
        }
    }

    /// The length and the list of an operation on foreign memory.
    async fn with_its_vectors(self) -> (io::Result<usize>, Box<ForeignVectors>) {
        match self.await {
            (result, OpMemory::Foreign(vectors)) => (length(result), vectors),
            _ => unreachable!("an operation returns the memory it was given"),
        }
    }

    /// The length and the buffer of an operation on a buffer.
    async fn with_its_buf(self) -> (io::Result<usize>, Buf) {
        match self.await {
            (result, OpMemory::Buf(buf)) => (length(result), buf),
            _ => unreachable!("an operation returns the memory it was given"),
        }
    }
}

impl Future for Op<'_> {
    type Output = (i32, OpMemory);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let ring = this.io.ring();
        if let Some(key) = this.key {
            return match ring.take(key, cx.waker()) {
                Some(output) => {
                    this.key = None;
                    Poll::Ready(output)
                }
                None => Poll::Pending,
            };
        }
        let Some((memory, fd)) = this.parts.take() else {
            unreachable!("an operation is not polled after it has completed")
        };
        if this.class == OpClass::Storage && ring.file_queues.must_queue(this.file, this.ticket) {
            this.parts = Some((memory, fd));
            this.ticket = ring.file_queues.enqueue(this.file, this.ticket, cx.waker());
            return Poll::Pending;
        }
        // An eager operation sets its waker below, if it has not completed after submission.
        let waker = if this.eager { Waker::noop() } else { cx.waker() };
        let started = match this.before.clone() {
            // SAFETY: as below; `exchange` checked that the kernel supports it.
            Some([first, second]) => unsafe {
                ring.start_chain([first, second, this.entry.clone()], memory, fd, waker)
            },
            // SAFETY: the constructors below build `entry` from the memory in `memory` (whose heap
            // address does not move) and the descriptor in `fd`.
            None => unsafe { ring.start(&this.entry, this.class, memory, fd, waker) },
        };
        match started {
            Ok(key) => {
                this.key = Some(key);
                ring.file_queues.remove(this.file, std::mem::take(&mut this.ticket));
                if this.eager {
                    ring.submit_now();
                    if let Some(output) = ring.take(key, cx.waker()) {
                        this.key = None;
                        return Poll::Ready(output);
                    }
                }
            }
            Err(parts) => {
                this.parts = Some(parts);
                this.ticket = ring.file_queues.enqueue(this.file, this.ticket, cx.waker());
            }
        }
        Poll::Pending
    }
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.io.ring().abandon(key);
        }
        self.io.ring().file_queues.remove(self.file, self.ticket);
    }
}

fn send_now(fd: &Fd, message: &mut Gather) -> io::Result<usize> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the header and all it points to belong to `message`, which is borrowed for the call.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), message.message(), flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// The arguments of a call on foreign memory.
fn call_parts(vectors: &ForeignVectors, offset: u64) -> io::Result<(*const libc::iovec, i32, i64)> {
    let list = vectors.vectors();
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let count = i32::try_from(list.len()).map_err(invalid)?;
    Ok((list.as_ptr(), count, i64::try_from(offset).map_err(invalid)?))
}

fn write_now(fd: &Fd, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the bytes are borrowed for the call.
    let count = unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
    if count < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn raw(fd: &Fd) -> types::Fd {
    types::Fd(fd.as_raw_fd())
}

fn length(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

fn whole(range: &Range<usize>, buf: &Buf) -> u32 {
    assert!(range.start <= range.end && range.end <= buf.len(), "range outside the buffer");
    // A Buf is at most 64 MiB.
    u32::try_from(range.len()).unwrap_or(u32::MAX)
}

/// The part of a buffer an operation uses.
fn part(buf: &Buf, range: &Range<usize>) -> (*mut u8, u32) {
    let len = whole(range, buf);
    (buf.addr().wrapping_add(range.start), len)
}

impl Io {
    async fn with_buf(
        &self,
        entry: squeue::Entry,
        class: OpClass,
        buf: Buf,
        fd: &Fd,
    ) -> (io::Result<usize>, Buf) {
        let eager = class == OpClass::Storage && buf.len() >= EAGER_BYTES;
        let mut op = Op::new(self, entry, class, OpMemory::Buf(buf), fd);
        op.eager = eager;
        op.with_its_buf().await
    }

    async fn plain(&self, entry: squeue::Entry, class: OpClass, fd: &Fd) -> io::Result<usize> {
        length(Op::new(self, entry, class, OpMemory::None, fd).await.0)
    }

    /// Reads into `buf[range]` from `offset` (bytes). May be short.
    pub async fn read_at(
        &self,
        fd: &Fd,
        buf: Buf,
        range: Range<usize>,
        offset: u64,
    ) -> (io::Result<usize>, Buf) {
        let (ptr, len) = part(&buf, &range);
        let entry = opcode::Read::new(raw(fd), ptr, len).offset(offset).build();
        self.with_buf(entry, OpClass::Storage, buf, fd).await
    }

    /// As [`Io::read_at`], on a thread of the kernel: for files whose reads may block the submitting thread.
    /// A block device's buffered reads take its inode's lock, and wait for it even with `RWF_NOWAIT`.
    pub async fn read_at_apart(
        &self,
        fd: &Fd,
        buf: Buf,
        range: Range<usize>,
        offset: u64,
    ) -> (io::Result<usize>, Buf) {
        let (ptr, len) = part(&buf, &range);
        let entry = opcode::Read::new(raw(fd), ptr, len).offset(offset).build();
        self.with_buf(entry.flags(squeue::Flags::ASYNC), OpClass::Storage, buf, fd).await
    }

    /// Reads into `buf[range]` from `offset` (bytes) what the page cache holds, without waiting and
    /// without the ring. `None` when it holds nothing, or when many requests are in flight: then
    /// the ring is cheaper, with several operations per system call. For regular files opened without O_DIRECT.
    pub fn read_page_cache(
        &self,
        fd: &Fd,
        buf: &mut Buf,
        range: Range<usize>,
        offset: u64,
    ) -> Option<usize> {
        if !self.take_direct() {
            return None;
        }
        let offset = i64::try_from(offset).ok()?;
        let target = &mut buf[range];
        let vector = libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: target.len() };
        // SAFETY: the one vector points into `target`, which is borrowed for the whole call.
        let count = unsafe {
            libc::preadv2(fd.as_raw_fd(), &raw const vector, 1, offset, libc::RWF_NOWAIT)
        };
        usize::try_from(count).ok().filter(|count| *count > 0)
    }

    /// Writes `buf[range]` at `offset` (bytes). May be short.
    pub async fn write_at(
        &self,
        fd: &Fd,
        buf: Buf,
        range: Range<usize>,
        offset: u64,
        flags: WriteFlags,
    ) -> (io::Result<usize>, Buf) {
        let (ptr, len) = part(&buf, &range);
        let rw_flags = if flags.dsync { libc::RWF_DSYNC } else { 0 };
        let entry = opcode::Write::new(raw(fd), ptr, len).offset(offset).rw_flags(rw_flags).build();
        self.with_buf(entry, OpClass::Storage, buf, fd).await
    }

    /// Writes the unsent part of a message at `offset` (bytes). May be short: `Gather::advance` by the result.
    pub async fn write_message_at(
        &self,
        fd: &Fd,
        mut message: Box<Gather>,
        offset: u64,
    ) -> (io::Result<usize>, Box<Gather>) {
        let vectors = message.vectors();
        // A Gather has a few hundred pieces at most.
        let count = u32::try_from(vectors.len()).unwrap_or(u32::MAX);
        let entry = opcode::Writev::new(raw(fd), vectors.as_ptr(), count).offset(offset).build();
        let eager = message.remaining() >= EAGER_BYTES;
        let mut op = Op::new(self, entry, OpClass::Storage, OpMemory::Gather(message), fd);
        op.eager = eager;
        op.with_its_message().await
    }

    /// Reads into foreign memory from `offset` (bytes). May be short: [`ForeignVectors::advance`] by the result.
    pub async fn read_foreign_at(
        &self,
        fd: &Fd,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> (io::Result<usize>, Box<ForeignVectors>) {
        let entry = match vectors.vectors() {
            // One piece is cheaper for the kernel.
            [one] if let Ok(len) = u32::try_from(one.iov_len) => {
                opcode::Read::new(raw(fd), one.iov_base.cast(), len).offset(offset).build()
            }
            many => {
                // At most `FOREIGN_PIECES_MAX`.
                let count = u32::try_from(many.len()).unwrap_or(u32::MAX);
                opcode::Readv::new(raw(fd), many.as_ptr(), count).offset(offset).build()
            }
        };
        self.with_vectors(entry, vectors, fd).await
    }

    /// Writes foreign memory at `offset` (bytes). May be short: [`ForeignVectors::advance`] by the result. What another
    /// process changes meanwhile is written as it is or as it was.
    pub async fn write_foreign_at(
        &self,
        fd: &Fd,
        vectors: Box<ForeignVectors>,
        offset: u64,
    ) -> (io::Result<usize>, Box<ForeignVectors>) {
        let entry = match vectors.vectors() {
            [one] if let Ok(len) = u32::try_from(one.iov_len) => {
                opcode::Write::new(raw(fd), one.iov_base.cast(), len).offset(offset).build()
            }
            many => {
                let count = u32::try_from(many.len()).unwrap_or(u32::MAX);
                opcode::Writev::new(raw(fd), many.as_ptr(), count).offset(offset).build()
            }
        };
        self.with_vectors(entry, vectors, fd).await
    }

    async fn with_vectors(
        &self,
        entry: squeue::Entry,
        vectors: Box<ForeignVectors>,
        fd: &Fd,
    ) -> (io::Result<usize>, Box<ForeignVectors>) {
        let eager = vectors.remaining() >= EAGER_BYTES;
        let mut op = Op::new(self, entry, OpClass::Storage, OpMemory::Foreign(vectors), fd);
        op.eager = eager;
        op.with_its_vectors().await
    }

    /// Reads into foreign memory on this thread, without the ring: for files in memory, of which the kernel reads nothing
    /// without waiting (`RWF_NOWAIT`), and which the ring would leave to another thread. May be short.
    ///
    /// # Errors
    /// The system's.
    pub fn read_foreign_now(
        &self,
        fd: &Fd,
        vectors: &ForeignVectors,
        offset: u64,
    ) -> io::Result<usize> {
        let (list, count, offset) = call_parts(vectors, offset)?;
        // SAFETY: the list is borrowed for the whole call, and so is the memory that it names, which is mapped
        // (`ForeignVectors::push`) and which the kernel alone accesses; what is not mapped any more is an error.
        let count = unsafe { libc::preadv2(fd.as_raw_fd(), list, count, offset, 0) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// As [`Io::read_foreign_now`], writes.
    ///
    /// # Errors
    /// The system's.
    pub fn write_foreign_now(
        &self,
        fd: &Fd,
        vectors: &ForeignVectors,
        offset: u64,
    ) -> io::Result<usize> {
        let (list, count, offset) = call_parts(vectors, offset)?;
        // SAFETY: as in `read_foreign_now`.
        let count = unsafe { libc::pwritev2(fd.as_raw_fd(), list, count, offset, 0) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// As [`Io::read_page_cache`], into foreign memory.
    pub fn read_page_cache_foreign(
        &self,
        fd: &Fd,
        vectors: &ForeignVectors,
        offset: u64,
    ) -> Option<usize> {
        if !self.take_direct() {
            return None;
        }
        let (list, count, offset) = call_parts(vectors, offset).ok()?;
        // SAFETY: the list is borrowed for the whole call, and so is the memory that it names, which is mapped
        // (`ForeignVectors::push`) and which the kernel alone accesses; what is not mapped any more is an error.
        let count = unsafe { libc::preadv2(fd.as_raw_fd(), list, count, offset, libc::RWF_NOWAIT) };
        usize::try_from(count).ok().filter(|count| *count > 0)
    }

    /// Makes written data stable (`fdatasync`).
    pub async fn fdatasync(&self, fd: &Fd) -> io::Result<()> {
        let entry = opcode::Fsync::new(raw(fd)).flags(types::FsyncFlags::DATASYNC).build();
        self.plain(entry, OpClass::Storage, fd).await.map(drop)
    }

    /// `fallocate(2)` with `mode` (`FALLOC_FL_*`) over `length` bytes at `offset`.
    pub async fn fallocate(&self, fd: &Fd, mode: i32, offset: u64, length: u64) -> io::Result<()> {
        let entry = opcode::Fallocate::new(raw(fd), length).offset(offset).mode(mode).build();
        self.plain(entry, OpClass::Storage, fd).await.map(drop)
    }

    /// Receives into `buf[range]` from a socket. 0 is the end of the stream.
    pub async fn recv(&self, fd: &Fd, buf: Buf, range: Range<usize>) -> (io::Result<usize>, Buf) {
        let (ptr, len) = part(&buf, &range);
        let entry = opcode::Recv::new(raw(fd), ptr, len).build();
        self.with_buf(entry, OpClass::Wait, buf, fd).await
    }

    /// Ends what tasks of this worker receive from a socket, without a loss of data: [`Io::recv`] returns data that has
    /// arrived, or ECANCELED ([`was_cancelled`]).
    pub fn cancel_receives(&self, fd: &Fd) {
        self.ring().cancel_on_socket(fd, Direction::Receive);
    }

    /// Ends what tasks of this worker send to a socket: [`Io::send`] returns the number of bytes that were sent, which a send
    /// that waits for room does not show, or ECANCELED ([`was_cancelled`]).
    pub fn cancel_sends(&self, fd: &Fd) {
        self.ring().cancel_on_socket(fd, Direction::Send);
    }

    /// Receives exactly `range.len()` bytes from a socket; an error if the stream ends before.
    pub async fn recv_exact(
        &self,
        fd: &Fd,
        mut buf: Buf,
        mut range: Range<usize>,
    ) -> (io::Result<()>, Buf) {
        while !range.is_empty() {
            let (ptr, len) = part(&buf, &range);
            let entry = opcode::Recv::new(raw(fd), ptr, len).flags(libc::MSG_WAITALL).build();
            let (result, returned) = self.with_buf(entry, OpClass::Wait, buf, fd).await;
            buf = returned;
            match result {
                Ok(0) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf),
                Ok(count) => range.start += count,
                Err(error) => return (Err(error), buf),
            }
        }
        (Ok(()), buf)
    }

    /// Sends the unsent part of a message. May be short: `Gather::advance` by the result.
    ///
    /// At light load, the message is sent by a direct system call if the socket has room. If the socket is
    /// full, and under load, it is sent through the ring: then the replies of several connections are sent with
    /// one system call.
    pub async fn send(
        &self,
        fd: &Fd,
        mut message: Box<Gather>,
    ) -> (io::Result<usize>, Box<Gather>) {
        if self.is_light() {
            match send_now(fd, &mut message) {
                Ok(count) => return (Ok(count), message),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return (Err(error), message),
            }
        }
        let entry = opcode::SendMsg::new(raw(fd), message.message())
            .flags(libc::MSG_NOSIGNAL.cast_unsigned() | libc::MSG_WAITALL.cast_unsigned())
            .build();
        Op::new(self, entry, OpClass::Wait, OpMemory::Gather(message), fd).with_its_message().await
    }

    /// Accepts a connection.
    pub async fn accept(&self, fd: &Fd) -> io::Result<OwnedFd> {
        let entry = opcode::Accept::new(raw(fd), std::ptr::null_mut(), std::ptr::null_mut())
            .flags(libc::SOCK_CLOEXEC)
            .build();
        let (accepted, _) = Op::new(self, entry, OpClass::Wait, OpMemory::Descriptor, fd).await;
        length(accepted)?;
        // SAFETY: the kernel has just created this descriptor; it is owned here only.
        Ok(unsafe { OwnedFd::from_raw_fd(accepted) })
    }

    /// Writes the first `bytes` of `buf` to `fd`, which must not block, waits until `fd` is readable, and
    /// reads at most `bytes` into the same part of `buf`. From Linux 5.17 on this needs one system call, which submits
    /// and waits. May be short, and may find nothing to read
    /// ([`io::ErrorKind::WouldBlock`]): then call it again with `write` false.
    pub async fn exchange(
        &self,
        fd: &Fd,
        buf: Buf,
        bytes: usize,
        write: bool,
    ) -> (io::Result<usize>, Buf) {
        let range = 0..bytes;
        let (ptr, len) = part(&buf, &range);
        let current = u64::MAX;
        let read = opcode::Read::new(raw(fd), ptr, len).offset(current).build();
        let poll = opcode::PollAdd::new(raw(fd), POLLIN).build();
        if !write || !self.ring().can_skip() {
            if write && let Err(error) = write_now(fd, &buf[range]) {
                return (Err(error), buf);
            }
            if let Err(error) = self.plain(poll, OpClass::Wait, fd).await {
                return (Err(error), buf);
            }
            return self.with_buf(read, OpClass::Wait, buf, fd).await;
        }
        let write = opcode::Write::new(raw(fd), ptr, len).offset(current).build();
        let mut op = Op::new(self, read, OpClass::Wait, OpMemory::Buf(buf), fd);
        op.before = Some([write, poll]);
        op.with_its_buf().await
    }

    /// An operation as a test of the sandbox has made it; its result is the kernel's.
    ///
    /// # Safety
    /// What the entry points to must be valid until the operation has completed: the future must not be dropped before.
    #[cfg(feature = "testing")]
    pub async unsafe fn any_operation(&self, fd: &Fd, entry: squeue::Entry) -> i32 {
        Op::new(self, entry, OpClass::Wait, OpMemory::None, fd).await.0
    }

    /// Waits until `fd` is readable (or its peer has hung up) without holding a buffer.
    pub async fn readable(&self, fd: &Fd) -> io::Result<()> {
        let entry = opcode::PollAdd::new(raw(fd), POLLIN).build();
        self.plain(entry, OpClass::Wait, fd).await.map(drop)
    }
}
