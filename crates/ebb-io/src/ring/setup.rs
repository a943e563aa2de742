//! Makes a ring, and restricts it.

use std::io;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue};

/// Entries of the submission queue.
pub(super) const SQ_ENTRIES: u32 = 256;
/// Entries of the completion queue.
const CQ_ENTRIES: u32 = 1024;
/// Kernel threads for the blocking calls of one worker. The kernel starts one when all existing ones block; its default
/// limit is four per processor, all of which the requests to one device that hangs would occupy.
const BLOCKING_MAX: u32 = 4096;

/// The operations that this crate submits, and the only ones that a restricted ring takes: none of them opens, connects or
/// makes anything but a connection to a socket that listens already.
pub const OPERATIONS: [u8; 12] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::Recv::CODE,
    opcode::SendMsg::CODE,
    opcode::Accept::CODE,
    opcode::PollAdd::CODE,
    opcode::Timeout::CODE,
    opcode::AsyncCancel::CODE,
];

/// Makes a ring, which is restricted to [`OPERATIONS`] if that is wanted. Otherwise, and if the kernel refuses that, the
/// reason is returned, too.
///
/// # Errors
/// When there can be none; the message names the remedy.
pub(super) fn make(restrict: bool) -> io::Result<(IoUring, Option<String>)> {
    let uring = build(restrict)?;
    if !uring.params().is_feature_nodrop() || !uring.params().is_feature_ext_arg() {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this kernel's io_uring is too old: Linux 5.15 or newer is required",
        ));
    }
    prepare(&uring);
    if !restrict {
        return Ok((uring, Some("the worker was started without restrictions".to_owned())));
    }
    match enable_restricted(&uring) {
        Ok(()) => Ok((uring, None)),
        Err(error) => {
            // It is not enabled, or not restricted.
            let uring = build(false)?;
            prepare(&uring);
            Ok((uring, Some(format!("io_uring_register: {error}"))))
        }
    }
}

/// What only makes a ring cheaper, as far as the kernel supports it. To be called before the ring is restricted.
fn prepare(uring: &IoUring) {
    // Saves a file look-up per system call (5.18).
    let _ = uring.submitter().register_ring_fd();
    // 0 leaves the limit of unbounded workers unchanged.
    let _ = uring.submitter().register_iowq_max_workers(&mut [BLOCKING_MAX, 0]);
}

fn enable_restricted(uring: &IoUring) -> io::Result<()> {
    let flags = squeue::Flags::ASYNC | squeue::Flags::IO_LINK | squeue::Flags::SKIP_SUCCESS;
    let operations = OPERATIONS.into_iter().map(Restriction::sqe_op);
    let mut all: Vec<Restriction> =
        operations.chain([Restriction::sqe_flags_allowed(flags.bits())]).collect();
    match uring.submitter().register_restrictions(&mut all) {
        // The broker, which makes the rings of a daemon that it guards, has done it.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
        done => done?,
    }
    uring.submitter().register_enable_rings()
}

fn build(disabled: bool) -> io::Result<IoUring> {
    let mut modern = IoUring::builder();
    modern.setup_cqsize(CQ_ENTRIES).setup_clamp().setup_submit_all();
    modern.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    if disabled {
        modern.setup_r_disabled();
    }
    let modern = modern.build(SQ_ENTRIES);
    let Err(error) = modern else { return modern };
    if error.raw_os_error() == Some(libc::EINVAL) {
        // Linux before 6.1 does not support deferred task work: slower, otherwise equivalent.
        let mut plain = IoUring::builder();
        plain.setup_cqsize(CQ_ENTRIES).setup_clamp();
        if disabled {
            plain.setup_r_disabled();
        }
        return plain.build(SQ_ENTRIES);
    }
    let remedy = match error.raw_os_error() {
        Some(libc::EPERM) => {
            "io_uring is disabled: set the sysctl kernel.io_uring_disabled to 0, \
             or allow io_uring_setup in the container's seccomp profile"
        }
        Some(libc::ENOSYS) => "this kernel has no io_uring: Linux 5.15 or newer is required",
        Some(libc::ENOMEM) => "no memory for an io_uring: raise the memlock limit (ulimit -l)",
        _ => "cannot create an io_uring",
    };
    Err(io::Error::new(error.kind(), format!("{remedy} ({error})")))
}
