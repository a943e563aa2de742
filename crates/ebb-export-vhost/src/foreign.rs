//! Guest memory as a list for operations of the kernel, which then read or write it directly.
//!
//! # Invariants
//! - The list keeps the regions mapped: it has their table.
//! - The pieces are those of spans that were resolved in the same table.

use std::sync::Arc;

use ebb_io::ForeignVectors;

use crate::memory::{GuestMemory, GuestSpan};

/// Makes a list of the `bytes` bytes behind the first `skip` of spans of this table. False if the spans have fewer, or are too
/// many for one operation; then the list is empty.
pub(crate) fn list(
    vectors: &mut ForeignVectors,
    memory: &Arc<GuestMemory>,
    spans: &[GuestSpan],
    mut skip: usize,
    bytes: usize,
) -> bool {
    vectors.begin(memory.clone());
    for span in spans {
        let left = bytes - vectors.remaining();
        if left == 0 {
            break;
        }
        let length = usize::try_from(span.len).unwrap_or(usize::MAX);
        let here = length.saturating_sub(skip).min(left);
        let offset = span.offset.saturating_add(skip.min(length));
        skip -= skip.min(length);
        if here == 0 {
            continue;
        }
        let region = memory.region(span.region);
        let address = region.and_then(|region| region.memory.address_of(offset, here));
        // SAFETY: the bytes are within the mapping of a region (`address_of`), which is mapped as long as its table exists;
        // the list has the table. There are no references into guest memory.
        if !address.is_some_and(|address| unsafe { vectors.push(address, here) }) {
            break;
        }
    }
    let complete = vectors.remaining() == bytes;
    if !complete {
        vectors.clear();
    }
    complete
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::testing::guest_memory;

    #[test]
    fn a_list_has_the_bytes_that_were_asked_for_or_none() {
        let memory = Arc::new(guest_memory(&[(0, 0x10_0000, 0x4000)]));
        let span = |offset, len| GuestSpan { region: 0, offset, len };
        let spans = [span(0, 16), span(0x1000, 0x1000), span(0x3000, 0x800)];
        let mut vectors = ForeignVectors::default();
        assert!(list(&mut vectors, &memory, &spans, 16, 0x1800));
        assert_eq!(vectors.remaining(), 0x1800);
        assert!(vectors.is_aligned(0x800) && !vectors.is_aligned(0x1000));
        assert_eq!(Arc::strong_count(&memory), 2);
        assert!(!list(&mut vectors, &memory, &spans, 16, 0x1801), "more than there is");
        assert_eq!((vectors.remaining(), Arc::strong_count(&memory)), (0, 1));
        let outside = [span(0x3800, 0x801)];
        assert!(!list(&mut vectors, &memory, &outside, 0, 0x801));
        assert!(list(&mut vectors, &memory, &spans, 17, 0x17ff) && !vectors.is_aligned(512));
    }
}
