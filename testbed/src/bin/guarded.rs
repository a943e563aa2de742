//! A process that the broker guards, for `tests/broker.rs`: `guarded DEED FOLDER on|addresses|off`
//! does one thing as the daemon, or as code that has hijacked it. The exit status is 0 if it was
//! done, 10 if it was refused, and 11 if the kernel does not know the call: there is no broker.
//!
//! With `addresses` any path is allowed, as if only `connect_to` were set. Otherwise the rules
//! allow writing in FOLDER/in, reading in FOLDER/read and what every program reads, and connecting
//! to a server that the process starts. What needs to exist beforehand is made before the process
//! is guarded.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use ebb_access::Network;
use ebb_broker::{Broker, BrokerRules, PathRules, ProgramHelper, ServerRules};
use ebb_io::{RING_OPERATIONS, Worker};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink};

const DONE: u8 = 0;
const REFUSED: u8 = 10;
const NO_BROKER: u8 = 11;

/// What the deeds use.
struct Place {
    folder: PathBuf,
    /// The broker; `None`: the process is not guarded.
    broker: Option<Broker>,
    /// What runs programs for it.
    programs: Option<ProgramHelper>,
    /// A server that may be connected to, and one that may not.
    allowed: TcpListener,
    other: TcpListener,
    /// Sockets from before.
    early: OwnedFd,
    early_datagrams: UdpSocket,
    /// A file from before to which is only appended.
    appended: File,
}

impl Place {
    fn of(&self, path: &str) -> PathBuf {
        self.folder.join(path)
    }

    fn broker(&self) -> u32 {
        // Without one it is about this process, which may do that to itself.
        self.broker.as_ref().map_or(std::process::id(), Broker::process)
    }
}

type Done = io::Result<()>;

fn check(holds: bool, what: &str) -> Done {
    if holds { Ok(()) } else { Err(io::Error::other(what.to_owned())) }
}

fn text(path: &Path) -> io::Result<String> {
    fs::read_to_string(path)
}

/// Whatever the C library does not wrap.
fn raw(number: libc::c_long, arguments: [usize; 6]) -> io::Result<usize> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: callers pass pointers to what they own, or such as are not mapped.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn number(fd: &impl AsRawFd) -> usize {
    usize::try_from(fd.as_raw_fd()).unwrap_or(usize::MAX)
}

fn at<T: ?Sized>(value: *const T) -> usize {
    value.expose_provenance()
}

/// `struct sockaddr_in`.
fn address(to: SocketAddr) -> libc::sockaddr_in {
    let ip = match to {
        SocketAddr::V4(to) => u32::from(*to.ip()),
        SocketAddr::V6(_) => 0,
    };
    libc::sockaddr_in {
        sin_family: 2,
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr { s_addr: ip.to_be() },
        sin_zero: [0; 8],
    }
}

fn tcp() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?)
}

fn connect(socket: &OwnedFd, to: SocketAddr) -> Done {
    let (to, length) = (address(to), size_of::<libc::sockaddr_in>());
    raw(libc::SYS_connect, [number(socket), at(&raw const to), length, 0, 0, 0]).map(drop)
}

/// What the daemon does with files.
fn files(place: &Place) -> Done {
    let (one, two) = (place.of("in/one"), place.of("in/two"));
    let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o640).open(&one)?;
    made.write_all_at(b"data", 0)?;
    check(made.metadata()?.mode() & 0o7777 == 0o640, "the mode of the new file")?;
    let again = File::create_new(&one).map_err(|error| error.kind());
    check(again.err() == Some(io::ErrorKind::AlreadyExists), "the kernel's own error")?;
    fs::hard_link(&one, place.of("in/linked"))?;
    fs::rename(&one, &two)?;
    check(text(&two)? == "data", "it was renamed")?;
    check(fs::metadata(&two)?.mode() & 0o6000 == 0, "no program runs as another user")?;
    fs::create_dir(place.of("in/folder"))?;
    let folder = File::open(place.of("in"))?;
    let inside = rustix::fs::openat(&folder, "two", OFlags::RDONLY, Mode::empty())?;
    let mut read = String::new();
    File::from(inside).read_to_string(&mut read)?;
    check(read == "data", "opened from a folder")?;
    check(text(Path::new("in/two"))? == "data", "by a path from the current folder")?;
    // A file without a name that gets one.
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let unnamed = rustix::fs::open(place.of("in"), flags, Mode::RUSR)?;
    let link = format!("/proc/self/fd/{}", unnamed.as_raw_fd());
    rustix::fs::linkat(CWD, &link, CWD, place.of("in/named"), AtFlags::SYMLINK_FOLLOW)?;
    File::options().write(true).open(&link)?;
    for file in ["in/two", "in/linked", "in/named"] {
        fs::remove_file(place.of(file))?;
    }
    fs::remove_dir(place.of("in/folder"))?;
    check(text(&place.of("read/file"))? == "read", "a file for reading")?;
    let missing = File::open(place.of("in/missing")).map_err(|error| error.kind());
    check(missing.err() == Some(io::ErrorKind::NotFound), "a file that does not exist")
}

/// Files in a folder that is named without those below it, as beside a disk.
fn beside(place: &Place) -> Done {
    let (folder, new) = (place.of("flat"), place.of("flat/new"));
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let unnamed = rustix::fs::open(&folder, flags, Mode::RUSR)?;
    let link = format!("/proc/self/fd/{}", unnamed.as_raw_fd());
    rustix::fs::linkat(CWD, link, CWD, &new, AtFlags::SYMLINK_FOLLOW)?;
    File::open(&folder)?.sync_all()?;
    fs::rename(&new, place.of("flat/other"))?;
    fs::remove_file(place.of("flat/other"))
}

/// What the daemon reads of itself.
fn own_figures(_: &Place) -> Done {
    let process = text(Path::new("/proc/self/status"))?;
    check(process.contains(&format!("Pid:\t{}\n", std::process::id())), "its own status")?;
    let other = std::thread::spawn(|| text(Path::new("/proc/thread-self/comm")));
    let thread = other.join().map_err(|_| io::Error::other("a thread"))??;
    check(!thread.is_empty(), "the own thread's name")?;
    text(Path::new("/proc/meminfo")).map(drop)
}

/// What the daemon does with sockets.
fn sockets(place: &Place) -> Done {
    let client = TcpStream::connect(place.allowed.local_addr()?)?;
    let (mut server, _) = place.allowed.accept()?;
    drop(client);
    // The broker has it no more, either.
    server.set_read_timeout(Some(Duration::from_secs(20)))?;
    check(server.read(&mut [0])? == 0, "the end of the connection")?;
    for path in [place.of("in/socket"), place.of(&format!("in/{}", "long".repeat(19)))] {
        let listener = UnixListener::bind(&path)?;
        let mut client = UnixStream::connect(&path)?;
        let (mut server, _) = listener.accept()?;
        client.write_all(b"x")?;
        drop(client);
        check(server.read(&mut [0; 2])? == 1 && server.read(&mut [0])? == 0, "what was sent")?;
        drop(listener);
        let gone = UnixStream::connect(&path).map_err(|error| error.kind());
        check(gone.err() == Some(io::ErrorKind::ConnectionRefused), "a socket that is closed")?;
        fs::remove_file(&path)?;
    }
    let folder = rustix::fs::open(place.of("in"), OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
    let by_folder = format!("/proc/self/fd/{}/s", folder.as_raw_fd());
    drop(UnixListener::bind(by_folder)?);
    fs::remove_file(place.of("in/s"))?;
    let netlink = rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    rustix::net::bind(&netlink, &netlink::SocketAddrNetlink::new(0, 0))?;
    // Many that are never connected.
    for _ in 0..100 {
        drop(tcp()?);
    }
    Ok(())
}

/// Connects without waiting, and asks again whether it is connected, as librados does.
fn connect_twice(place: &Place) -> Done {
    let flags = SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    let to = place.allowed.local_addr()?;
    let first = connect(&socket, to).map_err(|error| error.raw_os_error());
    check(matches!(first, Ok(()) | Err(Some(libc::EINPROGRESS))), &format!("{first:?}"))?;
    let mut ready = [PollFd::new(&socket, PollFlags::OUT)];
    poll(&mut ready, None)?;
    for _ in 0..3 {
        let again = connect(&socket, to).map_err(|error| error.raw_os_error());
        check(matches!(again, Ok(()) | Err(Some(libc::EISCONN))), &format!("again: {again:?}"))?;
    }
    let (mut server, _) = place.allowed.accept()?;
    drop(socket);
    server.set_read_timeout(Some(Duration::from_secs(20)))?;
    check(server.read(&mut [0])? == 0, "the end of the connection")
}

/// A worker with a ring that the broker has made, as after a takeover that has failed.
fn ring(place: &Place) -> Done {
    let worker = Worker::start_alone_restricted("guarded")?;
    let file = File::open(place.of("read/file"))?;
    let read = worker.handle().block_on(move |io| async move {
        let opcode = io_uring::opcode::Nop::new().build();
        let fd = ebb_io::fd_from(file);
        // SAFETY: the operation has no memory.
        unsafe { io.any_operation(&fd, opcode) }.await
    });
    // It does only what the daemon does.
    check(read == Some(-libc::EACCES), &format!("an operation that is not allowed: {read:?}"))
}

/// A ring that takes any operation.
fn free_ring(_: &Place) -> Done {
    let parameters = [0_u32; 30];
    raw(libc::SYS_io_uring_setup, [4, at(&raw const parameters), 0, 0, 0, 0]).map(drop)
}

/// The link in `/proc` of a descriptor that only names a file.
fn by_name(place: &Place, path: &str) -> io::Result<String> {
    let named = rustix::fs::open(place.of(path), OFlags::PATH, Mode::empty())?;
    text(Path::new(&format!("/proc/self/fd/{}", named.as_raw_fd())))
}

/// A header by which packets go elsewhere than to the address that was connected to: `IPV6_RTHDR`, of the type for segments.
fn route() -> Done {
    let socket = rustix::net::socket(AddressFamily::INET6, SocketType::STREAM, None)?;
    let mut header = [0_u8; 24];
    header[1..5].copy_from_slice(&[2, 4, 0, 0]);
    header[8 + 15] = 1;
    let arguments = [number(&socket), 41, 57, at(header.as_ptr()), header.len(), 0];
    match raw(libc::SYS_setsockopt, arguments) {
        // This kernel has no such headers: the filter is seen by its own error.
        Err(error) if error.raw_os_error() != Some(libc::EPERM) => Ok(()),
        result => result.map(drop),
    }
}

/// A socket from before that has the number of a new one.
fn exchanged(place: &Place) -> Done {
    let mut new = tcp()?;
    rustix::io::dup2(&place.early, &mut new)?;
    connect(&new, place.allowed.local_addr()?)
}

/// Sends to a server that may not be connected to.
fn fast_open(place: &Place, plainly: bool) -> Done {
    let socket = tcp()?;
    let (to, byte) = (address(place.other.local_addr()?), 7_u8);
    let part = libc::iovec { iov_base: (&raw const byte).cast_mut().cast(), iov_len: 1 };
    // SAFETY: integers and pointers, for which zeros are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw const to).cast_mut().cast();
    message.msg_namelen = 16;
    message.msg_iov = (&raw const part).cast_mut();
    message.msg_iovlen = 1;
    let flags = 0x2000_0000;
    if plainly {
        let arguments = [number(&socket), at(&raw const byte), 1, flags, at(&raw const to), 16];
        return raw(libc::SYS_sendto, arguments).map(drop);
    }
    raw(libc::SYS_sendmsg, [number(&socket), at(&raw const message), flags, 0, 0, 0]).map(drop)
}

/// Arguments that are none: each fails with the error that the kernel has for it.
fn wrong_arguments(place: &Place) -> Done {
    let cwd = libc::AT_FDCWD.cast_unsigned() as usize;
    let long = CString::new(vec![b'a'; 5000])?;
    let socket = tcp()?;
    let to = address(place.allowed.local_addr()?);
    let null = c"/dev/null";
    let how = [0_u64; 3];
    let open_how = |size| [cwd, at(null.as_ptr()), at(&raw const how), size, 0, 0];
    let connect = |length| [number(&socket), at(&raw const to), length, 0, 0, 0];
    for (call, arguments, wanted) in [
        (libc::SYS_openat, [cwd, 1, 0, 0, 0, 0], libc::EFAULT),
        (libc::SYS_openat, [cwd, usize::MAX, 0, 0, 0, 0], libc::EFAULT),
        (libc::SYS_openat, [cwd, at(long.as_ptr()), 0, 0, 0, 0], libc::ENAMETOOLONG),
        (libc::SYS_openat, [cwd, at(c"".as_ptr()), 0, 0, 0, 0], libc::ENOENT),
        (libc::SYS_openat, [9999, at(c"a".as_ptr()), 0, 0, 0, 0], libc::EBADF),
        (libc::SYS_openat2, open_how(24), libc::ENOSYS),
        (libc::SYS_connect, connect(1), libc::EINVAL),
        (libc::SYS_connect, connect(200), libc::EINVAL),
        (libc::SYS_connect, [number(&socket), 1, 16, 0, 0, 0], libc::EFAULT),
        (libc::SYS_io_uring_setup, [4, 1, 0, 0, 0, 0], libc::EFAULT),
        (libc::SYS_socket, [2, 3, 0, 0, 0, 0], libc::EPERM),
        (libc::SYS_renameat2, [cwd, 1, cwd, 1, 0, 0], libc::EFAULT),
    ] {
        let result = raw(call, arguments).map_err(|error| error.raw_os_error());
        check(result == Err(Some(wanted)), &format!("call {call}: {result:?} and not {wanted}"))?;
    }
    File::open("/dev/null").map(drop)
}

/// A broker that cannot be put in charge, since there is one: it is reported, and changes nothing.
fn second_broker(place: &Place) -> Done {
    let source = (BrokerRules::default(), Box::new(|| None) as _);
    let second = Broker::start(source, &RING_OPERATIONS, || {}).map_err(io::Error::other)?;
    let refused = second.guard();
    check(refused.is_err_and(|error| !error.is_fatal()), "a refusal that is not fatal")?;
    while !second.has_ended() {
        std::thread::park_timeout(Duration::from_millis(5));
    }
    File::open(place.of("read/file")).map(drop)
}

/// Calls that hang delay no other: opening a FIFO that has no writer.
fn hanging(place: &Place) -> Done {
    let path = place.of("in/fifo");
    for _ in 0..50 {
        let path = path.clone();
        std::thread::spawn(move || File::open(path));
    }
    for _ in 0..100 {
        File::open("/dev/null")?;
    }
    Ok(())
}

/// What the daemon does.
fn work(name: &str, place: &Place) -> Option<Done> {
    Some(match name {
        "files" => files(place),
        "beside" => beside(place),
        "own-figures" => own_figures(place),
        "sockets" => sockets(place),
        "connect-twice" => connect_twice(place),
        "ring" => ring(place),
        "wrong-arguments" => wrong_arguments(place),
        "hanging" => hanging(place),
        "second-broker" => second_broker(place),
        "name-allowed" => by_name(place, "read/file").map(drop),
        _ => return None,
    })
}

/// Attacks by paths.
fn attack_by_path(name: &str, place: &Place) -> Option<Done> {
    let open = |path: &Path| File::open(path).map(drop);
    let write = |path: &Path| OpenOptions::new().write(true).open(path).map(drop);
    let of = |path: &str| place.of(path);
    let process = |of: u32, file: &str| PathBuf::from(format!("/proc/{of}/{file}"));
    Some(match name {
        "open" => open(&of("out/file")),
        "open-by-dots" => open(&of("in/../out/file")),
        "open-from-folder" => File::open(of("in")).and_then(|folder| {
            let flags = OFlags::RDONLY;
            Ok(rustix::fs::openat(folder, "../out/file", flags, Mode::empty()).map(drop)?)
        }),
        "open-by-name" => by_name(place, "out/file").map(drop),
        "write-again" => File::open(of("read/file"))
            .and_then(|file| write(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))),
        "write" => write(&of("read/file")),
        "make" => File::create(of("read/new")).map(drop),
        "make-below" => File::create(of("flat/folder/new")).map(drop),
        "delete" => fs::remove_file(of("out/file")),
        "link-in" => fs::hard_link(of("out/file"), of("in/stolen")),
        "rename-in" => fs::rename(of("out/file"), of("in/stolen")),
        "rename-out" => fs::rename(of("in/kept"), of("out/kept")),
        "rename-folder" => fs::rename(of("flat/folder"), of("in/folder")),
        "rename-link" => fs::rename(of("in/deep/link"), of("in/link")),
        "link-link" => fs::hard_link(of("in/deep/link"), of("in/link")),
        "exchange-folder" => {
            let (from, to) = (of("in/kept"), of("flat/folder"));
            let how = RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, from, CWD, to, how).map_err(Into::into)
        }
        "rules" => write(&of("in/rules")),
        "rename-rules" => fs::rename(of("in/kept"), of("in/rules")),
        "rules-by-dots" => write(&of("in/deep/../rules")),
        "rules-by-link" => write(&of("in/deep/rules")),
        "rules-by-number" => File::open(of("in/rules"))
            .and_then(|file| write(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))),
        "link-rules" => fs::hard_link(of("in/rules"), of("in/same")),
        "delete-rules" => fs::remove_file(of("in/./rules")),
        "move-rules" => fs::rename(of("in"), of("elsewhere")),
        "append-only" => {
            let number = place.appended.as_raw_fd();
            write(Path::new(&format!("/proc/self/fd/{number}")))
        }
        "times" => {
            let now = rustix::fs::Timespec { tv_sec: 1, tv_nsec: 0 };
            let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
            rustix::fs::utimensat(CWD, of("out/file"), &times, AtFlags::empty()).map_err(Into::into)
        }
        "route" => route(),
        "unix-datagrams" => UnixDatagram::unbound().map(drop),
        "pair-of-datagrams" => UnixDatagram::pair().map(drop),
        "symbolic-link" => std::os::unix::fs::symlink(of("out"), of("in/link")),
        "mode" => {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
            fs::set_permissions(of("out/file"), mode)
        }
        "folder" => fs::create_dir(of("out/folder")),
        "change-folder" => std::env::set_current_dir(of("out")),
        "own-memory" => open(Path::new("/proc/self/mem")),
        "broker-memory" => open(&process(place.broker(), "mem")),
        "broker-descriptor" => open(&process(place.broker(), "fd/2")),
        "descriptor-folder" => open(Path::new("/dev/fd/2")),
        "other-process" => open(&process(std::os::unix::process::parent_id(), "environ")),
        "kernel-setting" => write(Path::new("/proc/sys/kernel/core_pattern")),
        _ => return None,
    })
}

/// Attacks by sockets, rings and what processes share.
fn attack(name: &str, place: &Place) -> Option<Done> {
    let of = |path: &str| place.of(path);
    Some(match name {
        "connect" => tcp().and_then(|socket| connect(&socket, place.other.local_addr()?)),
        "connect-early" => place.allowed.local_addr().and_then(|to| connect(&place.early, to)),
        "connect-exchanged" => exchanged(place),
        "connect-unix" => UnixStream::connect(of("out/socket")).map(drop),
        "connect-abstract" => {
            let name = rustix::net::SocketAddrUnix::new_abstract_name(b"guarded").ok()?;
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).ok()?;
            match rustix::net::connect(socket, &name) {
                Ok(()) | Err(rustix::io::Errno::CONNREFUSED) => Ok(()),
                Err(error) => Err(error.into()),
            }
        }
        "fast-open" => fast_open(place, false),
        "fast-open-at-once" => fast_open(place, true),
        "send-early" => place
            .other
            .local_addr()
            .and_then(|to| place.early_datagrams.send_to(b"x", to))
            .map(drop),
        "datagrams" => UdpSocket::bind("127.0.0.1:0").map(drop),
        "listen" => TcpListener::bind("127.0.0.1:0").map(drop),
        "listen-unix" => UnixListener::bind(of("out/listener")).map(drop),
        "free-ring" => free_ring(place),
        "after-the-broker" => {
            let process =
                i32::try_from(place.broker()).ok().and_then(rustix::process::Pid::from_raw)?;
            if place.broker.is_some() {
                rustix::process::kill_process(process, rustix::process::Signal::KILL).ok()?;
            }
            while place.broker.as_ref().is_some_and(|broker| !broker.has_ended()) {
                std::thread::park_timeout(Duration::from_millis(5));
            }
            File::open(of("read/file")).map(drop)
        }
        "hung-broker" => hung_broker(place),
        "key-program" => program(place, &["/bin/echo", "key"]),
        "other-program" => program(place, &["/bin/true"]),
        "other-arguments" => program(place, &["/bin/echo", "other"]),
        "own-program" => {
            let restricted = place.broker.as_ref().map(|_| ebb_sandbox::restrict_process());
            if restricted.is_some_and(|restricted| !restricted.in_force) {
                return Some(Err(io::Error::other("no filter")));
            }
            Command::new("/bin/true").status().map(drop)
        }
        _ => return None,
    })
}

/// Runs a program that prints something.
fn program(place: &Place, words: &[&str]) -> Done {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let Some(programs) = &place.programs else {
        return Command::new(&words[0]).args(&words[1..]).status().map(drop);
    };
    let mut program = match programs.run(&words) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        program => program?,
    };
    let mut printed = String::new();
    program.output.read_to_string(&mut printed)?;
    let status = program.wait(std::time::Instant::now() + Duration::from_secs(20))?;
    check(printed == "key\n" && status.success(), &format!("{printed:?} {status}"))
}

/// A broker that is stopped by a signal: calls wait for it until the daemon ends it.
fn hung_broker(place: &Place) -> Done {
    let Some(broker) = &place.broker else { return Ok(()) };
    let process = i32::try_from(broker.process()).ok().and_then(rustix::process::Pid::from_raw);
    let process = process.ok_or_else(|| io::Error::other("no broker"))?;
    rustix::process::kill_process(process, rustix::process::Signal::STOP)?;
    let path = place.of("read/file");
    let opening = std::thread::spawn(move || File::open(path).map(drop));
    broker.kill();
    opening.join().map_err(|_| io::Error::other("a thread"))?
}

fn run() -> io::Result<u8> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [name, folder, guard] = &arguments[..] else {
        return Err(io::Error::other("usage: guarded DEED FOLDER on|addresses|off"));
    };
    let folder = PathBuf::from(folder);
    std::env::set_current_dir(&folder)?;
    let _listening = UnixListener::bind(folder.join("out/socket"))?;
    let (allowed, other) = (TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
    let (early, early_datagrams) = (tcp()?, UdpSocket::bind("127.0.0.1:0")?);
    let appended = OpenOptions::new().append(true).open(folder.join("out/file"))?;
    let named = |words: &[String]| words == ["/bin/echo", "key"];
    let programs = (guard != "off").then(|| ProgramHelper::start(Box::new(named)));
    let programs = programs.transpose().map_err(io::Error::other)?;
    let broker = match guard != "off" {
        true => {
            let server = allowed.local_addr()?;
            let (network, port) = (Network::from(server.ip()), Some(server.port()));
            let read = ["/usr", "/etc", "/lib", "/lib64", "/proc", "/dev"];
            let read = read.map(PathBuf::from).into_iter().chain([folder.join("read")]).collect();
            let rules = BrokerRules {
                paths: Some(PathRules {
                    read,
                    write: HashSet::from([folder.join("in"), "/proc/sys".into()]),
                    write_in: HashSet::from([folder.join("flat")]),
                }),
                servers: Some(ServerRules {
                    networks: HashSet::from([(network, port)]),
                    ..ServerRules::default()
                }),
                kept: HashSet::from([folder.join("in/rules")]),
            };
            let rules = match guard == "addresses" {
                true => BrokerRules { paths: None, ..rules },
                false => rules,
            };
            let source = (rules, Box::new(|| None) as _);
            let broker =
                Broker::start(source, &RING_OPERATIONS, || {}).map_err(io::Error::other)?;
            broker.guard().map_err(io::Error::other)?;
            Some(broker)
        }
        false => None,
    };
    let place =
        Place { folder, broker, programs, allowed, other, early, early_datagrams, appended };
    let done = work(name, &place)
        .or_else(|| attack_by_path(name, &place))
        .or_else(|| attack(name, &place));
    match done {
        Some(Ok(())) => Ok(DONE),
        Some(Err(error)) => match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES | libc::ELOOP) => Ok(REFUSED),
            Some(libc::ENOSYS) => Ok(NO_BROKER),
            _ => Err(error),
        },
        None => Err(io::Error::other("there is no such deed")),
    }
}

fn main() -> Result<ExitCode, io::Error> {
    run().map(ExitCode::from)
}
