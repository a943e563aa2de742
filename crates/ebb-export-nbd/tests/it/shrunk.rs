//! A client that uses the size its disk had before it shrank.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use crate::common;

use common::{Rig, STYLES, TRIM, WRITE_ZEROES, memory, pattern};
use ebb_volume::Resize;

const MIB: u64 = 1 << 20;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

/// "NBD_ENOSPC if it receives a write request including one or more sectors beyond the size of the
/// device", and the same for zeroes; "NBD_EINVAL" for reads and trims.
#[test]
fn beyond_the_end_of_a_shrunken_disk_writes_find_no_space_and_reads_are_invalid() {
    for style in STYLES {
        let volume = memory("disk", 2 * MIB);
        let rig = Rig::with([volume.clone()]);
        let mut client = rig.client("disk", style);
        assert_eq!(client.write(0, MIB, &pattern(1, 4096)), 0);
        let order = Resize { to: Some(MIB), shrink: true };
        rig.run(move |_, io| async move { volume.resize(&io, order).await.unwrap() });
        assert_eq!(client.write(0, MIB, &pattern(1, 4096)), ENOSPC, "{style:?}");
        assert_eq!(client.ask(WRITE_ZEROES, 0, MIB - 4096, 8192), ENOSPC, "{style:?}");
        assert_eq!(client.read(MIB, 4096), Err(EINVAL), "{style:?}");
        assert_eq!(client.ask(TRIM, 0, MIB, 4096), EINVAL, "{style:?}");
        // The connection continues.
        assert_eq!(client.write(0, 0, &pattern(1, 4096)), 0);
        assert_eq!(client.read(0, 4096).unwrap(), pattern(1, 4096));
    }
}
