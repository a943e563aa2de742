//! Rings: the broker makes one that is disabled and restricted, whatever the daemon does with it later.

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::sys::{RING_PARAMETERS, RING_RESTRICTION, restricted_ring};
use crate::target::GuardedDaemon;

/// `IORING_SETUP_R_DISABLED` of Linux's include/uapi/linux/io_uring.h, as all numbers here.
const DISABLED: u32 = 0x40;
/// The flags that rings of the daemon may have: `CQSIZE`, `CLAMP`, `R_DISABLED`, `SUBMIT_ALL`, `COOP_TASKRUN`, `TASKRUN_FLAG`,
/// `SINGLE_ISSUER` and `DEFER_TASKRUN`.
const FLAGS: u32 = 0x8 | 0x10 | DISABLED | 0x80 | 0x100 | 0x200 | 0x1000 | 0x2000;
/// `IORING_RESTRICTION_SQE_OP` and `IORING_RESTRICTION_SQE_FLAGS_ALLOWED`.
const OPERATION: u16 = 1;
const OPERATION_FLAGS: u16 = 2;
/// The flags of an operation: `IO_LINK`, `ASYNC` and `CQE_SKIP_SUCCESS`.
const ALLOWED_FLAGS: u8 = 0x4 | 0x10 | 0x40;

/// What a ring may do.
fn restrictions(operations: &[u8]) -> Vec<[u8; RING_RESTRICTION]> {
    let one = |kind: u16, value: u8| {
        let mut restriction = [0; RING_RESTRICTION];
        restriction[..2].copy_from_slice(&kind.to_ne_bytes());
        restriction[2] = value;
        restriction
    };
    let operations = operations.iter().map(|operation| one(OPERATION, *operation));
    operations.chain([one(OPERATION_FLAGS, ALLOWED_FLAGS)]).collect()
}

/// Makes the ring that the daemon has asked for, which may do these operations only.
///
/// # Errors
/// [`Errno::PERM`] if it is none that the daemon makes; those of making it.
pub(crate) fn make(
    target: &GuardedDaemon,
    [entries, address]: [u64; 2],
    operations: &[u8],
) -> Result<OwnedFd, Errno> {
    let mut parameters = [0; RING_PARAMETERS];
    target.read(address, &mut parameters)?;
    let mut flags = [0; 4];
    flags.copy_from_slice(&parameters[8..12]);
    let flags = u32::from_ne_bytes(flags);
    if flags & DISABLED == 0 || flags & !FLAGS != 0 {
        return Err(Errno::PERM);
    }
    let entries = u32::try_from(entries).map_err(|_| Errno::INVAL)?;
    let ring = restricted_ring(entries, &mut parameters, &restrictions(operations))
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    target.write(address, &parameters)?;
    Ok(ring)
}
