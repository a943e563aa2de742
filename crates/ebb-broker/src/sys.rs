//! System calls that no safe library has.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use seccompiler::sock_filter;

/// A call of the daemon that waits for the broker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notice {
    /// What the kernel knows it by.
    pub id: u64,
    /// The thread that makes it.
    pub thread: u32,
    /// The number of the call.
    pub number: libc::c_long,
    pub arguments: [u64; 6],
}

/// Makes the calls that a filter marks notify a listener, in all threads of the process, for good.
///
/// # Errors
/// If the kernel is too old, or a listener is there already: a thread has at most one.
pub(crate) fn listen(filter: &[sock_filter]) -> io::Result<OwnedFd> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let program = libc::sock_fprog {
        len: filter.len().try_into().map_err(|_| invalid())?,
        filter: filter.as_ptr().cast_mut().cast(),
    };
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER
        | libc::SECCOMP_FILTER_FLAG_TSYNC
        | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH;
    // A signal does not interrupt a call that is being carried out (Linux 5.19): it would be made twice.
    for flags in [flags | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, flags] {
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        // SAFETY: the kernel reads the program, of which the length is given, and keeps no pointer to it.
        let made = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) };
        match i32::try_from(made) {
            // SAFETY: the kernel has just made this descriptor.
            Ok(number) if number >= 0 => return Ok(unsafe { OwnedFd::from_raw_fd(number) }),
            _ => {}
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
    }
    Err(io::Error::from_raw_os_error(libc::EINVAL))
}

/// The process can get no privileges by running a program; a filter needs that.
pub(crate) fn no_new_privileges() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

/// Waits for the next call of the daemon.
///
/// # Errors
/// `ENOENT` if the thread that made it has ended meanwhile.
pub(crate) fn receive(listener: BorrowedFd<'_>) -> io::Result<Notice> {
    // SAFETY: integers only, for which zeros are valid; the kernel wants them.
    let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    let request = libc::SECCOMP_IOCTL_NOTIF_RECV;
    // SAFETY: the kernel writes one notice, of the size in the number of the request.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), request, &raw mut notice) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let data = notice.data;
    Ok(Notice { id: notice.id, thread: notice.pid, number: data.nr.into(), arguments: data.args })
}

/// What a call returns in the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallReply {
    Value(i64),
    Error(i32),
    /// The daemon's thread makes the call itself.
    Continue,
}

/// Ends a call. That it has ended already, with its thread, is no error.
pub(crate) fn reply(listener: BorrowedFd<'_>, id: u64, reply: CallReply) {
    let (val, error, flags) = match reply {
        CallReply::Value(value) => (value, 0, 0),
        CallReply::Error(number) => (0, -number, 0),
        CallReply::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE),
    };
    let flags = u32::try_from(flags).unwrap_or(0);
    let response = libc::seccomp_notif_resp { id, val, error, flags };
    let request = libc::SECCOMP_IOCTL_NOTIF_SEND;
    // SAFETY: the kernel reads one response, of the size in the number of the request.
    unsafe { libc::ioctl(listener.as_raw_fd(), request, &raw const response) };
}

/// Puts a descriptor into the daemon, and returns its number there. With `ends` that ends the call.
///
/// # Errors
/// `EMFILE` if the daemon has no room for it, `ENOENT` if the call has ended.
pub(crate) fn give(
    listener: BorrowedFd<'_>,
    id: u64,
    fd: BorrowedFd<'_>,
    (close_on_exec, ends): (bool, bool),
) -> io::Result<i32> {
    let flags = if ends { libc::SECCOMP_ADDFD_FLAG_SEND } else { 0 };
    let flags = u32::try_from(flags).unwrap_or(0);
    let cloexec = u32::try_from(libc::O_CLOEXEC).unwrap_or(0);
    let wanted = libc::seccomp_notif_addfd {
        id,
        flags,
        srcfd: fd.as_raw_fd().unsigned_abs(),
        newfd: 0,
        newfd_flags: if close_on_exec { cloexec } else { 0 },
    };
    let request = libc::SECCOMP_IOCTL_NOTIF_ADDFD;
    // SAFETY: the kernel reads one structure, of the size in the number of the request.
    let number = unsafe { libc::ioctl(listener.as_raw_fd(), request, &raw const wanted) };
    if number < 0 { Err(io::Error::last_os_error()) } else { Ok(number) }
}

/// Which of two processes this is.
pub(crate) enum Forked {
    Parent(u32),
    Child,
}

/// Makes a copy of the process.
///
/// # Errors
/// If it has other threads: their locks would stay locked in the copy. Those of `fork`.
pub(crate) fn fork() -> io::Result<Forked> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("there are threads already"));
    }
    // SAFETY: no other thread exists, so that the copy is whole: no lock is held.
    match unsafe { libc::fork() } {
        0 => Ok(Forked::Child),
        number if number > 0 => Ok(Forked::Parent(number.unsigned_abs())),
        _ => Err(io::Error::last_os_error()),
    }
}

/// In the copy: signals that end or reload a daemon do nothing.
pub(crate) fn ignore_signals() {
    for signal in [
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGUSR1,
        libc::SIGUSR2,
        libc::SIGPIPE,
    ] {
        // SAFETY: replaces a handler by none.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// In the copy: as [`ignore_signals`], but programs that it runs have the signals as usual, which a
/// handler leaves to them.
pub(crate) fn survive_signals() {
    extern "C" fn nothing(_: libc::c_int) {}
    for signal in
        [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2]
    {
        let handler = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(signal, handler) };
    }
    // SAFETY: replaces a handler by none; programs get the usual one from the standard library.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// In the copy: closes all descriptors but those of standard error and `kept`, and puts `/dev/null` in the place of standard
/// input and output.
pub(crate) fn close_others(kept: [&dyn AsRawFd; 2]) {
    let mut kept = kept.map(|fd| fd.as_raw_fd().unsigned_abs());
    kept.sort_unstable();
    let mut first = 3;
    for last in kept.map(Some).into_iter().chain([None]) {
        let end = last.map_or(u32::MAX, |fd| fd.saturating_sub(1));
        if first <= end {
            // SAFETY: the copy uses none of these: it goes on with `kept` alone.
            unsafe { libc::syscall(libc::SYS_close_range, first, end, 0) };
        }
        first = last.map_or(u32::MAX, |fd| fd.saturating_add(1));
    }
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        for standard in [0, 1] {
            // SAFETY: replaces a descriptor that the copy does not use.
            unsafe { libc::dup2(null.as_raw_fd(), standard) };
        }
    }
}

/// Lets a child of the daemon take its descriptors where Yama restricts that to parents. Other
/// kernels know no such request.
pub(crate) fn allow_descriptors_to(child: u32) {
    let child = libc::c_ulong::from(child);
    // SAFETY: takes a number.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, child, 0, 0, 0) };
}

/// In the copy: the kernel kills this process when something is written to the other end of this
/// pipe, or when that is closed.
///
/// # Errors
/// Those of `fcntl`.
pub(crate) fn die_when_written_to(pipe: &impl AsRawFd) -> io::Result<()> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let set = |command, value: i32| {
        // SAFETY: takes numbers.
        match unsafe { libc::fcntl(pipe.as_raw_fd(), command, value) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    set(libc::F_SETOWN, own)?;
    // `F_SETSIG`, which libc has not for all C libraries.
    set(10, libc::SIGKILL)?;
    set(libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK)
}

/// Makes a ring that is disabled, and may do these operations only.
///
/// # Errors
/// Those of the two calls.
pub(crate) fn restricted_ring(
    entries: u32,
    parameters: &mut [u8; RING_PARAMETERS],
    restrictions: &[[u8; RING_RESTRICTION]],
) -> io::Result<OwnedFd> {
    let count = u32::try_from(restrictions.len()).unwrap_or(0);
    // SAFETY: the kernel reads and writes the parameters, of which it knows the size.
    let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, parameters.as_mut_ptr()) };
    let number = i32::try_from(made).ok().filter(|number| *number >= 0);
    let number = number.ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just made this descriptor.
    let ring = unsafe { OwnedFd::from_raw_fd(number) };
    let all = restrictions.as_ptr();
    // SAFETY: the kernel reads `count` restrictions.
    let done = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring.as_raw_fd(),
            REGISTER_RESTRICTIONS,
            all,
            count,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(ring) }
}

/// The sizes of `struct io_uring_params` and `struct io_uring_restriction`, bytes.
pub(crate) const RING_PARAMETERS: usize = 120;
pub(crate) const RING_RESTRICTION: usize = 16;
/// `IORING_REGISTER_RESTRICTIONS` of Linux's include/uapi/linux/io_uring.h.
const REGISTER_RESTRICTIONS: u32 = 11;
