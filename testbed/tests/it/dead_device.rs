//! A block device whose requests hang, with as many of them in flight as its clients can send, and a
//! healthy volume on the same worker, which continues to be served. Needs root for the device.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;

use testbed::bench::outage::dead::{Dead, Kind};
use testbed::harness::nbd::{Client, Request, wire};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

const MIB: u64 = 1 << 20;

fn broken(error: &testbed::bench::Error) -> Error {
    Error::unexpected(format!("a device that hangs: {error}"))
}

/// A daemon with one worker, a volume on a device that hangs, and one on a file.
struct Rig {
    server: Server,
    dead: Dead,
    /// Connections whose requests never complete.
    waiting: Vec<UnixStream>,
}

impl Rig {
    fn new(options: &str) -> Result<Rig> {
        let setup = Setup::new()?;
        let path = setup.image_path("well");
        let made = File::create(&path).and_then(|file| file.set_len(MIB));
        made.map_err(Error::io("make an image"))?;
        let dead = Dead::make(Kind::Device, setup.dir()).map_err(|e| broken(&e))?;
        let server = setup
            .volume(&format!("dead={}{options}", dead.uri()))
            .volume(&format!("well=file:{}{options}", path.display()))
            .args(["--workers", "1", "--drain", "1"])
            .start()?;
        Ok(Rig { server, dead, waiting: Vec::new() })
    }

    /// Sends `count` requests to the device on each of `clients` connections; none completes.
    fn flood(&mut self, clients: usize, count: u64, command: u16, length: u32) -> Result {
        for client in 0..clients {
            let mut stream = Client::open(&self.server.socket(), "dead")?.into_stream();
            for number in 0..count {
                let cookie = number + 1;
                let offset = (client as u64 * count + number) * 4096;
                let mut bytes =
                    Request { flags: 0, command, cookie, offset, length }.bytes().to_vec();
                if command == wire::CMD_WRITE {
                    bytes.resize(bytes.len() + length as usize, 7);
                }
                stream.write_all(&bytes).map_err(Error::io("send a request"))?;
            }
            self.waiting.push(stream);
        }
        Ok(())
    }

    /// Carries out every kind of request on the healthy volume.
    fn well(&self, stamp: u8) -> Result {
        let mut client = Client::open(&self.server.socket(), "well")?;
        let told = |what: &'static str| {
            move |error: testbed::harness::nbd::Failure| {
                Error::unexpected(format!("{what}: {error}"))
            }
        };
        let data = vec![stamp; 64 << 10];
        client.write(0, &data, 0).map_err(told("write"))?;
        client.flush().map_err(told("flush"))?;
        client.write(0, &data, wire::FLAG_FUA).map_err(told("write with FUA"))?;
        client.command(wire::CMD_WRITE_ZEROES, 0, 128 << 10, 4096).map_err(told("zeroes"))?;
        client.command(wire::CMD_TRIM, 0, 256 << 10, 4096).map_err(told("trim"))?;
        client.command(wire::CMD_CACHE, 0, 0, 4096).map_err(told("cache"))?;
        let read = client.read(0, 64 << 10).map_err(told("read"))?;
        check(read == data, || "wrong data was read".to_owned())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // A daemon does not exit before its requests in the kernel have completed.
        self.dead.revive();
    }
}

fn changes_beside_a_device_that_hangs(options: &str) -> Result<Rig> {
    let mut rig = Rig::new(options)?;
    rig.well(1)?;
    rig.dead.die().map_err(|e| broken(&e))?;
    rig.flood(2, 40, wire::CMD_TRIM, 4096)?;
    rig.well(2)?;
    rig.flood(6, 256, wire::CMD_WRITE, 512)?;
    rig.well(3)?;
    rig.flood(2, 40, wire::CMD_FLUSH, 0)?;
    rig.flood(2, 40, wire::CMD_WRITE_ZEROES, 4096)?;
    rig.well(4)?;
    Ok(rig)
}

#[test]
fn requests_to_a_hanging_device_delay_no_other_volume() -> Result {
    let mut rig = changes_beside_a_device_that_hangs("")?;
    rig.flood(6, 256, wire::CMD_READ, 512)?;
    rig.well(5)
}

#[test]
fn buffered_requests_to_a_hanging_device_delay_no_other_volume() -> Result {
    let mut rig = changes_beside_a_device_that_hangs(",direct=off")?;
    // From 6.15 on Linux makes a read wait for the zeroes, even with RWF_NOWAIT.
    rig.flood(6, 256, wire::CMD_READ, 512)?;
    rig.well(5)
}
