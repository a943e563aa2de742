//! `ebbd image` with images of a cluster: copies to and from them, what is in them, and the lock of a destination.

use std::fs;

use testbed::harness::binary::{self, Build};
use testbed::harness::ceph::Ceph;
use testbed::harness::nbd::Client;
use testbed::{Error, Result, Setup, Tool, check};

/// `ebbd image`, which finds librbd among the packages.
fn image(ceph: &Ceph, arguments: &[&str]) -> Result<Tool> {
    let program = Tool::new(binary::ebbd(Build::AsTests)?).arg("image").args(arguments);
    Ok(program.env("LD_LIBRARY_PATH", ceph.library_path()))
}

#[test]
fn disks_are_copied_to_images_and_from_their_snapshots() -> Result {
    let ceph = Ceph::start()?;
    let path = |name: &str| ceph.dir().join(name).display().to_string();
    // Data at both ends, and holes between.
    let make = "head -c 3M /dev/urandom >in && truncate -s 29M in && head -c 3M /dev/urandom >>in";
    Tool::new("sh").args(["-c", make]).dir(ceph.dir()).ok()?;
    let (from, disk) = (format!("file:{}", path("in")), ceph.uri("disk"));
    ceph.create_image("small", 16)?;
    let small = image(&ceph, &["import", &from, &ceph.uri("small")])?.run()?;
    small.check(!small.status.success() && small.stderr.contains("enlarge"), "a remedy")?;
    ceph.create_image("disk", 32)?;
    image(&ceph, &["import", &from, &disk])?.ok()?;
    // The copy has ended in order: no lock and no watch is left.
    check(ceph.lock_owner("disk")?.is_none(), || "the copy has left its lock".to_owned())?;
    let status = ceph.rbd(&["status", "rbd/disk"])?;
    status.check(status.stdout.contains("Watchers: none"), "no watch to be left")?;
    ceph.rbd(&["export", "--no-progress", "rbd/disk", &path("exported")])?;
    Tool::new("cmp").args([path("in"), path("exported")]).ok()?;
    // Holes stay holes: the first object and the last two have data.
    let map = image(&ceph, &["map", "--json", &disk])?.ok()?.json()?;
    let data = map.as_array().into_iter().flatten().filter(|run| run["content"] == "data");
    let data: u64 = data.filter_map(|run| run["length"].as_u64()).sum();
    check(data > 0 && data <= 12 << 20, || format!("{data} bytes of data: {map}"))?;
    // What holds something is overwritten only if that was asked for.
    let again = image(&ceph, &["import", &from, &disk])?.run()?;
    again.check(!again.status.success() && again.stderr.contains("--force"), "a remedy")?;
    image(&ceph, &["import", "--force", &from, &disk])?.ok()?;
    ceph.rbd(&["snap", "create", "--no-progress", "rbd/disk@one"])?;
    let (snapshot, out) = (ceph.uri("disk@one"), format!("file:{}", path("out")));
    image(&ceph, &["export", &snapshot, &out])?.ok()?;
    Tool::new("cmp").args([path("exported"), path("out")]).ok()?;
    let info = image(&ceph, &["info", "--json", &snapshot])?.ok()?.json()?;
    check(info["virtual_size"] == 32 << 20 && info["format"] == "raw", || info.to_string())?;
    let refused = image(&ceph, &["import", "--force", &from, &snapshot])?.run()?;
    refused.check(!refused.status.success(), "a snapshot to be refused as a destination")
}

#[test]
fn an_image_that_a_client_writes_is_no_destination() -> Result {
    let ceph = Ceph::start()?;
    let from = ceph.dir().join("in");
    fs::write(&from, vec![7; 1 << 20]).map_err(Error::io("write the source"))?;
    ceph.create_image("disk", 8)?;
    let server = Setup::new()?
        .env("LD_LIBRARY_PATH", ceph.library_path())
        .volume(&format!("disk={}", ceph.uri("disk")))
        .start()?;
    let owner = ceph.lock_owner("disk")?.unwrap_or_default();
    let from = format!("file:{}", from.display());
    let refused = image(&ceph, &["import", "--force", &from, &ceph.uri("disk")])?.run()?;
    let told = refused.stderr.contains("has its lock") && refused.stderr.contains(&owner);
    refused.check(!refused.status.success() && told, "the owner of the lock to be named")?;
    let mut client = Client::open(&server.socket(), "disk")?;
    let data = client.read(0, 4096)?;
    check(data == [0; 4096], || "a copy has written to an image that another client has".to_owned())
}
