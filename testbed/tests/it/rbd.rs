//! Volumes on images of a real Ceph cluster: the store in this process, and the daemon.

mod daemon;
mod encryption;
mod image;
mod kills;
mod lost;
mod store;

use testbed::harness::ceph::Ceph;
use testbed::{Result, Tool, check};

#[test]
fn the_cluster_of_the_tests_keeps_what_it_is_given() -> Result {
    let mut ceph = Ceph::start()?;
    let make = "head -c 8M /dev/urandom >in";
    Tool::new("sh").args(["-c", make]).dir(ceph.dir()).ok()?;
    let (from, to) = (ceph.dir().join("in"), ceph.dir().join("out"));
    let (from, to) = (from.display().to_string(), to.display().to_string());
    ceph.rbd(&["import", "--no-progress", &from, "rbd/copy"])?;
    ceph.stop_osd()?;
    ceph.start_osd()?;
    ceph.rbd(&["export", "--no-progress", "rbd/copy", &to])?;
    Tool::new("cmp").arg(&from).arg(&to).ok()?;
    check(ceph.lock_owner("copy")?.is_none(), || "an image has a lock that no client took".into())
}
