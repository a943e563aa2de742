//! Hostile code in a thread of a process with a worker, for `tests/sandbox.rs`: `hostile ATTACK worker|thread on|off`. The exit
//! status is 0 if the attack has succeeded, 10 if the kernel has refused it.
//!
//! The process makes what an attack needs beforehand: another process, a socket that listens, one that is not connected.

use std::ffi::{CStr, CString, c_long};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, ExitCode, Stdio};

use ebb_io::{Fd, Io, Worker, fd_from};
use ebb_sandbox::{Unlisted, isolate_process, restrict_process};
use io_uring::{opcode, types};

const SUCCEEDED: u8 = 0;
const REFUSED: u8 = 10;
/// A file that everyone may read.
const FILE: &CStr = c"/etc/passwd";
/// A program that ends with 0.
const PROGRAM: &CStr = c"/bin/true";

/// What attacks use.
struct Target {
    process: libc::pid_t,
    /// By which signals can be sent to it.
    process_fd: OwnedFd,
    /// Memory of it that can be written to, and the file that all its memory is.
    memory: usize,
    memory_file: CString,
    /// A socket that is not connected, and where it could be.
    socket: Fd,
    address: libc::sockaddr_in,
    /// The terminal of this process, and memory that it shares by a number.
    terminal: OwnedFd,
    shared: c_long,
    _listener: TcpListener,
    /// Ends when its input is closed, with this process.
    _child: Child,
}

impl Target {
    fn make() -> io::Result<Target> {
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        let process = libc::pid_t::try_from(child.id()).map_err(io::Error::other)?;
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps"))?;
        let stack = maps.lines().find(|line| line.ends_with("[stack]"));
        let start = stack.and_then(|line| line.split('-').next());
        let memory = start.and_then(|text| usize::from_str_radix(text, 16).ok());
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let SocketAddr::V4(to) = listener.local_addr()? else {
            return Err(io::Error::other("not IPv4"));
        };
        // SAFETY: without arguments that point to memory; a new descriptor.
        let socket = unsafe { call_fd(libc::SYS_socket, [2, 1, 0, 0, 0, 0]) }?;
        // SAFETY: as above.
        let process_fd =
            unsafe { call_fd(libc::SYS_pidfd_open, [c_long::from(process), 0, 0, 0, 0, 0]) }?;
        let shared = shared_memory()?;
        Ok(Target {
            process,
            terminal: terminal()?,
            shared,
            process_fd,
            memory: memory.ok_or_else(|| io::Error::other("no stack"))?,
            memory_file: CString::new(format!("/proc/{process}/mem"))?,
            socket: fd_from(socket),
            address: libc::sockaddr_in {
                sin_family: 2,
                sin_port: to.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*to.ip()).to_be() },
                sin_zero: [0; 8],
            },
            _listener: listener,
            _child: child,
        })
    }
}

/// A terminal that is this process's.
fn terminal() -> io::Result<OwnedFd> {
    let main = std::fs::File::options().read(true).write(true).open("/dev/ptmx")?;
    let (fd, unlock, mut number) = (c_long::from(main.as_raw_fd()), 0_i32, 0_u32);
    let (unlock, at_number) = (at(&raw const unlock), at(&raw mut number));
    // SAFETY: the request reads one number.
    unsafe { call(libc::SYS_ioctl, [fd, 0x4004_5431, unlock, 0, 0, 0]) }?;
    // SAFETY: the request writes one number.
    unsafe { call(libc::SYS_ioctl, [fd, 0x8004_5430, at_number, 0, 0, 0]) }?;
    rustix::process::setsid()?;
    // The first one that the leader of a session opens is its own.
    let path = format!("/dev/pts/{}", number);
    let terminal = std::fs::File::options().read(true).write(true).open(path);
    // It lives as long as the process, and hangs up when another program takes its place.
    std::mem::forget(main);
    // SAFETY: changes what a signal does, with no code of this process.
    unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    Ok(terminal?.into())
}

/// Memory that other processes could attach, and that ends with this one.
fn shared_memory() -> io::Result<c_long> {
    // SAFETY: takes no pointer.
    let number = unsafe { call(libc::SYS_shmget, [0, 4096, 0o1600, 0, 0, 0]) }?;
    // SAFETY: maps new memory, which nothing uses.
    unsafe { call(libc::SYS_shmat, [number, 0, 0, 0, 0, 0]) }?;
    // SAFETY: the request reads and writes nothing here.
    unsafe { call(libc::SYS_shmctl, [number, 0, 0, 0, 0, 0]) }?;
    Ok(number)
}

/// A system call.
///
/// # Safety
/// As the call's.
unsafe fn call(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> io::Result<c_long> {
    // SAFETY: the caller's.
    match unsafe { libc::syscall(number, a, b, c, d, e, f) } {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// A system call that makes a descriptor.
///
/// # Safety
/// As the call's.
unsafe fn call_fd(number: c_long, arguments: [c_long; 6]) -> io::Result<OwnedFd> {
    // SAFETY: the caller's.
    let fd = unsafe { call(number, arguments) }?;
    // SAFETY: the kernel has just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).map_err(io::Error::other)?) })
}

fn at<T>(value: *const T) -> c_long {
    c_long::try_from(value.expose_provenance()).unwrap_or(c_long::MAX)
}

/// An attack by system calls.
fn by_call(attack: &str, target: &Target) -> Option<io::Result<()>> {
    let process = c_long::from(target.process);
    let byte = 7_u8;
    let (own, its) = (
        libc::iovec { iov_base: (&raw const byte).cast_mut().cast(), iov_len: 1 },
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(target.memory), iov_len: 1 },
    );
    let program = [PROGRAM.as_ptr(), std::ptr::null()];
    let length = c_long::try_from(size_of::<libc::sockaddr_in>()).unwrap_or(0);
    let (ring, limits, figures) = ([0_u32; 30], [0_u64; 2], [0_u64; 32]);
    // The priority of SCHED_IDLE, and the set of the first processor.
    let (idle, first) = (0_u32, 1_u64);
    let (number, arguments) = match attack {
        "open" => (libc::SYS_openat, [c_long::from(libc::AT_FDCWD), at(FILE.as_ptr()), 0, 0, 0, 0]),
        "open-memory" => {
            let path = at(target.memory_file.as_ptr());
            let flags = c_long::from(libc::O_RDWR);
            (libc::SYS_openat, [c_long::from(libc::AT_FDCWD), path, flags, 0, 0, 0])
        }
        "owner" => {
            let (fd, command) = (c_long::from(target.socket.as_raw_fd()), libc::F_SETOWN);
            (libc::SYS_fcntl, [fd, c_long::from(command), process, 0, 0, 0])
        }
        "socket-owner" => {
            let fd = c_long::from(target.socket.as_raw_fd());
            (libc::SYS_ioctl, [fd, 0x8901, at(&raw const target.process), 0, 0, 0])
        }
        "type" => {
            let fd = c_long::from(target.terminal.as_raw_fd());
            (libc::SYS_ioctl, [fd, 0x5412, at(&raw const byte), 0, 0, 0])
        }
        "open-by-handle" => {
            let fd = c_long::from(target.terminal.as_raw_fd());
            (libc::SYS_ioctl, [fd, 0xc038_586b, at(limits.as_ptr()), 0, 0, 0])
        }
        "attach" => (libc::SYS_shmat, [target.shared, 0, 0, 0, 0, 0]),
        "queues" => (libc::SYS_msgctl, [0, 12, at(figures.as_ptr()), 0, 0, 0]),
        "semaphores" => (libc::SYS_semctl, [0, 0, 19, at(figures.as_ptr()), 0, 0]),
        // NETLINK_KOBJECT_UEVENT: events of devices.
        "netlink" => (libc::SYS_socket, [16, 3, 15, 0, 0, 0]),
        "limits" => (libc::SYS_prlimit64, [process, 7, 0, at(limits.as_ptr()), 0, 0]),
        "priority" => (libc::SYS_setpriority, [0, process, 19, 0, 0, 0]),
        "user-priority" => (libc::SYS_setpriority, [2, 0, 19, 0, 0, 0]),
        "scheduler" => (libc::SYS_sched_setscheduler, [process, 5, at(&raw const idle), 0, 0, 0]),
        "processors" => (libc::SYS_sched_setaffinity, [process, 8, at(&raw const first), 0, 0, 0]),
        "io-priority" => (libc::SYS_ioprio_set, [1, process, 3 << 13, 0, 0, 0]),
        "socket" => (libc::SYS_socket, [1, 1, 0, 0, 0, 0]),
        "connect" => {
            let fd = c_long::from(target.socket.as_raw_fd());
            (libc::SYS_connect, [fd, at(&raw const target.address), length, 0, 0, 0])
        }
        "exec" => (libc::SYS_execve, [at(PROGRAM.as_ptr()), at(program.as_ptr()), 0, 0, 0, 0]),
        "ptrace" => (libc::SYS_ptrace, [c_long::from(libc::PTRACE_SEIZE), process, 0, 0, 0, 0]),
        "signal" => (libc::SYS_kill, [process, c_long::from(libc::SIGCONT), 0, 0, 0, 0]),
        "signal-thread" => {
            (libc::SYS_tgkill, [process, process, c_long::from(libc::SIGCONT), 0, 0, 0])
        }
        "signal-descriptor" => {
            let fd = c_long::from(target.process_fd.as_raw_fd());
            (libc::SYS_pidfd_send_signal, [fd, c_long::from(libc::SIGCONT), 0, 0, 0, 0])
        }
        "ring" => (libc::SYS_io_uring_setup, [1, at(ring.as_ptr()), 0, 0, 0, 0]),
        "write-memory" => {
            let (own, its) = (at(&raw const own), at(&raw const its));
            (libc::SYS_process_vm_writev, [process, own, 1, its, 1, 0])
        }
        "process" => (libc::SYS_clone, [c_long::from(libc::SIGCHLD), 0, 0, 0, 0, 0]),
        "namespace" => (libc::SYS_unshare, [c_long::from(libc::CLONE_FILES), 0, 0, 0, 0, 0]),
        "code" => {
            let protection = c_long::from(libc::PROT_READ | libc::PROT_EXEC);
            let flags = c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            (libc::SYS_mmap, [0, 4096, protection, flags, -1, 0])
        }
        "thread" => return Some(std::thread::Builder::new().spawn(|| {}).map(drop)),
        _ => return None,
    };
    // SAFETY: what the arguments point to lives to the end of this function; a new process ends at once, below.
    let result = unsafe { call(number, arguments) };
    if attack == "process" && matches!(result, Ok(0)) {
        // SAFETY: ends the new process without anything of this one.
        unsafe { libc::_exit(0) };
    }
    Some(match result {
        // This kernel, or this file system, has no such request: the filter is seen by its own
        // error.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::ENOTTY)) => Ok(()),
        result => result.map(drop),
    })
}

/// An attack by the worker's own ring.
async fn by_ring(io: &Io, attack: &str, target: &Target) -> Option<io::Result<()>> {
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_in>()).unwrap_or(0);
    let socket = types::Fd(target.socket.as_raw_fd());
    let entry = match attack {
        "ring-open" => opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), FILE.as_ptr()).build(),
        "ring-socket" => opcode::Socket::new(1, 1, 0).build(),
        "ring-connect" => {
            let address = (&raw const target.address).cast();
            opcode::Connect::new(socket, address, length).build()
        }
        _ => return None,
    };
    // SAFETY: what it points to is borrowed until it has completed.
    let result = unsafe { io.any_operation(&target.socket, entry) }.await;
    Some(if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) })
}

fn run() -> io::Result<u8> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [attack, place, sandbox] = &arguments[..] else {
        return Err(io::Error::other("usage: hostile ATTACK worker|thread on|off"));
    };
    let target = Target::make()?;
    let isolated = (sandbox == "on").then(isolate_process);
    let worker = match sandbox == "on" {
        true => Worker::start_alone_restricted("hostile")?,
        false => Worker::start_alone("hostile")?,
    };
    if sandbox == "on" {
        let process = restrict_process();
        let all = worker.restrict(Unlisted::Fails);
        if let Some(missing) =
            all.iter().chain([&process]).chain(&isolated).find(|one| !one.in_force)
        {
            return Err(io::Error::other(format!("{missing:?}")));
        }
    }
    let attack = attack.clone();
    let result = match place == "worker" {
        false => std::thread::spawn(move || by_call(&attack, &target)).join().ok().flatten(),
        true => {
            let run = |io: Io| async move {
                match by_ring(&io, &attack, &target).await {
                    Some(result) => Some(result),
                    None => by_call(&attack, &target),
                }
            };
            worker.handle().block_on(run).flatten()
        }
    };
    match result {
        Some(Ok(())) => Ok(SUCCEEDED),
        Some(Err(error)) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
            Ok(REFUSED)
        }
        Some(Err(error)) => Err(error),
        None => Err(io::Error::other("there is no such attack")),
    }
}

fn main() -> Result<ExitCode, io::Error> {
    run().map(ExitCode::from)
}
