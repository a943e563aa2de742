//! `nbdcopy` copies files into volumes and back, over several connections, and keeps holes.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use testbed::harness::pattern::{Random, content};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, Tool, check};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 96 * MIB;

/// Makes a file of [`SIZE`] with data in random places and holes between.
fn sparse_file(path: &Path) -> Result {
    let io = |e| Error::io(path.display().to_string())(e);
    let file = File::create_new(path).map_err(io)?;
    file.set_len(SIZE).map_err(io)?;
    let mut random = Random::new(seeded::seed("EBBD_TEST_SEED", 0x5ba5));
    for stamp in 1..40 {
        let length = 4096 * (1 + random.below(64));
        let offset = 4096 * random.below((SIZE - length) / 4096);
        let length = usize::try_from(length).unwrap_or(4096);
        file.write_all_at(&content(stamp, offset, length), offset).map_err(io)?;
    }
    // Data up to the very end, so that a lost tail is detected.
    file.write_all_at(&content(40, SIZE - MIB, 1 << 20), SIZE - MIB).map_err(io)
}

fn same(a: &Path, b: &Path) -> Result {
    Tool::new("cmp").arg(a).arg(b).ok().map(drop)
}

fn usage(path: &Path) -> Result<u64> {
    let meta = fs::metadata(path).map_err(Error::io(path.display().to_string()))?;
    Ok(meta.blocks() * 512)
}

fn round_trip(options: &[&str]) -> Result {
    let mut server = Server::with_disk(SIZE)?;
    let (source, back) = (server.dir().join("source"), server.dir().join("back"));
    sparse_file(&source)?;
    let uri = server.uri("disk");
    Tool::new("nbdcopy").args(options).arg("--flush").arg(&source).arg(&uri).ok()?;
    same(&source, &server.image_path("disk"))?;
    Tool::new("nbdcopy").args(options).arg(&uri).arg(&back).ok()?;
    same(&source, &back)?;
    let (data, image, copy) = (usage(&source)?, server.image_usage("disk")?, usage(&back)?);
    for (name, used) in [("the image", image), ("the copy", copy)] {
        check(used <= data + data / 4 + MIB, || {
            format!("{data} bytes of data in the source, but {name} uses {used}")
        })?;
    }
    server.healthy()?;
    server.stop()?;
    same(&source, &server.image_path("disk"))
}

#[test]
fn both_ways_with_four_connections() -> Result {
    round_trip(&["--connections=4", "--requests=32"])
}

#[test]
fn both_ways_with_one_connection_and_small_requests() -> Result {
    round_trip(&["--connections=1", "--requests=1", "--request-size=4096"])
}

#[test]
fn both_ways_with_the_largest_requests() -> Result {
    round_trip(&["--connections=2", "--requests=4", "--request-size=33554432"])
}

#[test]
fn both_ways_synchronously_without_extents() -> Result {
    let mut server = Server::with_disk(SIZE)?;
    let (source, back) = (server.dir().join("source"), server.dir().join("back"));
    sparse_file(&source)?;
    let copy = Tool::new("nbdcopy").args(["--synchronous", "--no-extents", "--allocated"]);
    copy.clone().arg(&source).arg(server.uri("disk")).ok()?;
    copy.arg(server.uri("disk")).arg(&back).ok()?;
    same(&source, &back)?;
    server.healthy()
}

#[test]
fn from_volume_to_volume() -> Result {
    let server = Setup::new()?
        .image("disk", SIZE)?
        .image("other", SIZE)?
        .volume("ram=memory:96M")
        .start()?;
    let (source, back) = (server.dir().join("source"), server.dir().join("back"));
    sparse_file(&source)?;
    let steps = [
        (source.as_os_str().to_owned(), server.uri("disk").into()),
        (server.uri("disk").into(), server.uri("ram").into()),
        (server.uri("ram").into(), server.uri("other").into()),
        (server.uri("other").into(), back.as_os_str().to_owned()),
    ];
    for (from, to) in steps {
        Tool::new("nbdcopy").arg("--flush").arg(from).arg(to).ok()?;
    }
    same(&source, &server.image_path("other"))?;
    same(&source, &back)
}

#[test]
fn a_volume_of_any_size_keeps_its_last_byte() -> Result {
    // Multiples of 512 that are not multiples of 4 KiB.
    for size in [512, 4096 + 512, 10 * MIB + 1536] {
        let setup = Setup::new()?;
        let path = setup.image_path("odd");
        let length = usize::try_from(size).unwrap_or(0);
        fs::write(&path, content(9, 0, length)).map_err(Error::io("write an image"))?;
        let server = setup.volume(&format!("odd=file:{}", path.display())).start()?;
        let back = server.dir().join("back");
        Tool::new("nbdcopy").arg(server.uri("odd")).arg(&back).ok()?;
        same(&path, &back)?;
        fs::write(&back, content(10, 0, length)).map_err(Error::io("write a file"))?;
        Tool::new("nbdcopy").arg("--flush").arg(&back).arg(server.uri("odd")).ok()?;
        same(&path, &back)?;
    }
    Ok(())
}
