//! A real daemon where the kernel charges for all writable memory, used or not, as with
//! `vm.overcommit_memory=2`. Here by `RLIMIT_DATA`, a limit on this process and its children, which counts the
//! same memory and does not affect the rest of the machine.

use rustix::process::{Resource, Rlimit, setrlimit};
use testbed::harness::nbd::Client;
use testbed::harness::pattern::content;
use testbed::harness::server::Setup;
use testbed::{Error, Result, check};

const MIB: u64 = 1 << 20;
const LIMIT: u64 = 128 * MIB;
const SIZE: u64 = 256 * MIB;

fn charged(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).map_err(Error::io(path))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| Error::unexpected("no VmData".to_owned()))
}

/// The daemon starts, and serves more data than its limit through a cache that would have room for
/// all of it; the memory charged to it stays within the limit.
#[test]
fn a_daemon_serves_where_little_memory_is_promised() -> Result {
    let limit = Rlimit { current: Some(LIMIT), maximum: None };
    setrlimit(Resource::Data, limit)
        .map_err(|error| Error::unexpected(format!("RLIMIT_DATA: {error}")))?;
    let setup = Setup::new()?;
    let image = setup.dir().join("cached.img");
    let made = std::fs::File::create(&image).and_then(|file| file.set_len(SIZE));
    made.map_err(Error::io("make an image"))?;
    let cached = format!("cached=file:{},cache=writethrough", image.display());
    let mut server = setup.volume(&cached).volume("null=null:1G").start()?;
    let idle = charged(server.pid()?)?;
    check(idle < 32 * MIB, || format!("{idle} bytes are charged while idle"))?;
    let mut client = Client::open(&server.socket(), "cached")?;
    let mut null = Client::open(&server.socket(), "null")?;
    let length = 1 << 20;
    for offset in (0..SIZE).step_by(1 << 20) {
        client.write(offset, &content(7, offset, 1 << 20), 0)?;
    }
    for round in 0..2 {
        for offset in (0..SIZE).step_by(1 << 20) {
            let data = client.read(offset, length)?;
            check(data == content(7, offset, 1 << 20), || {
                format!("round {round}: wrong data at {offset}")
            })?;
            // Meanwhile requests of other sizes get memory.
            null.read(0, 4096 << (offset / MIB % 9))?;
        }
        let now = charged(server.pid()?)?;
        check(now <= LIMIT, || format!("{now} bytes are charged"))?;
    }
    client.disconnect()?;
    null.disconnect()?;
    server.healthy()?;
    server.stop()
}
