//! Static tracepoints (USDT) of a volume's requests; `docs/tracing.md` has their arguments. Each is one `nop`
//! instruction until a tracer replaces it.

use std::time::Duration;

use ebb_block::Operation;
use probe::probe;

use crate::stats::index;

#[inline]
pub(crate) fn request_begin(volume: &str, operation: Operation, offset: u64, length: u64) {
    let (name, bytes) = (volume.as_ptr(), volume.len());
    probe!(ebbd, request_begin, name, bytes, index(operation), offset, length);
}

#[inline]
pub(crate) fn request_end(
    volume: &str,
    operation: Operation,
    (offset, length): (u64, u64),
    service: Duration,
    ok: bool,
) {
    let (name, bytes) = (volume.as_ptr(), volume.len());
    let nanos = u64::try_from(service.as_nanos()).unwrap_or(u64::MAX);
    probe!(ebbd, request_end, name, bytes, index(operation), offset, length, nanos, ok);
}

pub(crate) fn flush_begin(volume: &str) {
    probe!(ebbd, flush_begin, volume.as_ptr(), volume.len());
}

pub(crate) fn flush_end(volume: &str, ok: bool) {
    probe!(ebbd, flush_end, volume.as_ptr(), volume.len(), ok);
}
