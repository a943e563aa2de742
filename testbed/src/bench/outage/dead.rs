//! Stores that do not complete requests, each with a cause that occurs in practice.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::harness::nbd::wire;

use super::super::{Error, io_context};

/// Size of a dead store, bytes.
pub const SIZE: u64 = 1 << 30;

/// How a store is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An NBD server that completes handshakes and then does not reply.
    Silent,
    /// An NBD server that ended after the daemon had connected.
    Gone,
    /// A block device whose requests never complete.
    Device,
}

impl Kind {
    /// Part of a figure's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Silent => "silent",
            Kind::Gone => "gone",
            Kind::Device => "device",
        }
    }
}

/// A dead store; dropping it releases what hangs on it.
pub struct Dead {
    dir: tempfile::TempDir,
    device: Option<Frozen>,
    server: Option<SilentServer>,
}

impl Dead {
    /// Makes one that works until [`Dead::die`].
    ///
    /// # Errors
    /// A socket, mount or loop device that cannot be made.
    pub fn make(kind: Kind, place: &Path) -> Result<Dead, Error> {
        let dir = tempfile::tempdir_in(place).map_err(io_context("a directory"))?;
        let (mut device, mut server) = (None, None);
        match kind {
            Kind::Device => device = Some(Frozen::make(dir.path())?),
            Kind::Silent => server = Some(SilentServer::start(dir.path(), false)?),
            Kind::Gone => server = Some(SilentServer::start(dir.path(), true)?),
        }
        Ok(Dead { dir, device, server })
    }

    /// The store's URI for the daemon.
    #[must_use]
    pub fn uri(&self) -> String {
        match &self.device {
            Some(frozen) => format!("file:{}", frozen.device),
            None => format!("nbd+unix:///x?socket={}", self.dir.path().join("s").display()),
        }
    }

    /// From here on no request completes.
    ///
    /// # Errors
    /// The file system under the device cannot be frozen.
    pub fn die(&self) -> Result<(), Error> {
        if let Some(server) = &self.server {
            server.die();
        }
        self.device.as_ref().map_or(Ok(()), Frozen::freeze)
    }

    /// Lets a device complete requests again.
    pub fn revive(&self) {
        if let Some(frozen) = &self.device {
            frozen.thaw();
        }
    }
}

/// An NBD server that reads requests and does not reply to them after `die`; before, it completes
/// all of them, and reads return zeroes.
struct SilentServer {
    shared: Arc<Shared>,
}

struct Shared {
    socket: PathBuf,
    dead: AtomicBool,
    /// Also closes its connections and its socket when it dies.
    goes: bool,
    connections: Mutex<Vec<UnixStream>>,
}

impl SilentServer {
    fn start(dir: &Path, goes: bool) -> Result<SilentServer, Error> {
        let socket = dir.join("s");
        let listener = UnixListener::bind(&socket).map_err(io_context("a socket"))?;
        let shared = Arc::new(Shared {
            socket,
            dead: AtomicBool::new(false),
            goes,
            connections: Mutex::default(),
        });
        let server = shared.clone();
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if server.goes && server.dead.load(Ordering::SeqCst) {
                    return;
                }
                if let Ok(kept) = stream.try_clone() {
                    let mut all = server.connections.lock().unwrap_or_else(PoisonError::into_inner);
                    all.push(kept);
                }
                let server = server.clone();
                // The connection ends with the client, or when the server is dropped.
                std::thread::spawn(move || drop(serve(stream, &server)));
            }
        });
        Ok(SilentServer { shared })
    }

    fn die(&self) {
        self.shared.dead.store(true, Ordering::SeqCst);
        if self.shared.goes {
            self.hang_up();
        }
    }

    fn hang_up(&self) {
        let _ = std::fs::remove_file(&self.shared.socket);
        let mut all = self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in all.drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for SilentServer {
    fn drop(&mut self) {
        self.hang_up();
    }
}

fn serve(mut stream: UnixStream, server: &Shared) -> std::io::Result<()> {
    negotiate(&mut stream)?;
    let mut data = vec![0; 32 << 20];
    loop {
        let mut head = [0; 28];
        stream.read_exact(&mut head)?;
        let command = u16::from_be_bytes([head[6], head[7]]);
        let length = u32::from_be_bytes([head[24], head[25], head[26], head[27]]) as usize;
        if command == wire::CMD_DISC {
            return Ok(());
        }
        if command == wire::CMD_WRITE {
            stream.read_exact(&mut data[..length.min(32 << 20)])?;
        }
        if server.dead.load(Ordering::SeqCst) {
            continue;
        }
        let mut reply = [0; 16];
        reply[..4].copy_from_slice(&wire::SIMPLE_REPLY_MAGIC.to_be_bytes());
        reply[8..].copy_from_slice(&head[8..16]);
        stream.write_all(&reply)?;
        if command == wire::CMD_READ {
            let zeroes = vec![0; length];
            stream.write_all(&zeroes)?;
        }
    }
}

/// Fixed newstyle, simple replies, one option that is served: GO.
fn negotiate(stream: &mut UnixStream) -> std::io::Result<()> {
    stream.write_all(&wire::MAGIC.to_be_bytes())?;
    stream.write_all(&wire::OPTION_MAGIC.to_be_bytes())?;
    stream.write_all(&3u16.to_be_bytes())?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let option = u32::from_be_bytes([head[8], head[9], head[10], head[11]]);
        let length = u32::from_be_bytes([head[12], head[13], head[14], head[15]]) as usize;
        let mut data = vec![0; length.min(65536)];
        stream.read_exact(&mut data)?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = wire::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(option.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend(u32::try_from(data.len()).unwrap_or(0).to_be_bytes());
            bytes.extend(data);
            stream.write_all(&bytes)
        };
        if option != wire::OPT_GO && option != wire::OPT_INFO {
            reply(wire::REP_ERR_UNSUP, &[])?;
            continue;
        }
        let mut info = vec![0, 0];
        info.extend(SIZE.to_be_bytes());
        // Has flags; flush, FUA, trim, zeroes, several connections.
        info.extend((1u16 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8).to_be_bytes());
        reply(wire::REP_INFO, &info)?;
        reply(wire::REP_ACK, &[])?;
        if option == wire::OPT_GO {
            return Ok(());
        }
    }
}

/// A loop device over a file on a file system that can be frozen.
struct Frozen {
    mount: PathBuf,
    device: String,
    frozen: AtomicBool,
}

impl Frozen {
    fn make(dir: &Path) -> Result<Frozen, Error> {
        let (image, mount) = (dir.join("fs.img"), dir.join("mnt"));
        let make = |path: &Path, size: u64| File::create(path).and_then(|file| file.set_len(size));
        make(&image, SIZE + (256 << 20)).map_err(io_context("an image"))?;
        std::fs::create_dir(&mount).map_err(io_context("a mount point"))?;
        tool("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), image.as_os_str()])?;
        tool("mount", &["-o".as_ref(), "loop".as_ref(), image.as_os_str(), mount.as_os_str()])?;
        let mut frozen =
            Frozen { mount: mount.clone(), device: String::new(), frozen: AtomicBool::new(false) };
        let backing = mount.join("disk");
        make(&backing, SIZE).map_err(io_context("a backing file"))?;
        let name = tool("losetup", &["-f".as_ref(), "--show".as_ref(), backing.as_os_str()])?;
        name.trim().clone_into(&mut frozen.device);
        Ok(frozen)
    }

    fn freeze(&self) -> Result<(), Error> {
        self.frozen.store(true, Ordering::SeqCst);
        tool("fsfreeze", &["-f".as_ref(), self.mount.as_os_str()]).map(drop)
    }
}

impl Frozen {
    fn thaw(&self) {
        if self.frozen.swap(false, Ordering::SeqCst) {
            // What hangs on after a failure is found when it is unmounted.
            let _ = tool("fsfreeze", &["-u".as_ref(), self.mount.as_os_str()]);
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.thaw();
        if !self.device.is_empty() {
            let _ = tool("losetup", &["-d".as_ref(), self.device.as_ref()]);
        }
        for _ in 0..50 {
            if tool("umount", &[self.mount.as_os_str()]).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
}

fn tool(program: &str, arguments: &[&std::ffi::OsStr]) -> Result<String, Error> {
    let output = Command::new(program).args(arguments).output().map_err(|source| Error::Tool {
        program: program.to_owned(),
        remedy: "install util-linux and e2fsprogs, and run this as root",
        source,
    })?;
    if !output.status.success() {
        let what = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::Failed { program: program.to_owned(), what });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
