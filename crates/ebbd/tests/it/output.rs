//! Standard output and error of the program when they are full or not read.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn run(arguments: &[&str], stdout: Stdio) -> Output {
    let program = env!("CARGO_BIN_EXE_ebbd");
    Command::new(program).args(arguments).stdout(stdout).stderr(Stdio::piped()).output().unwrap()
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let all: [&[&str]; 5] = [
        &["--version"],
        &["--help"],
        &["serve", "--help"],
        &["stat", "-h"],
        &["completions", "bash"],
    ];
    for arguments in all {
        let output = run(arguments, Stdio::null());
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = run(arguments, full.into());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("No space left on device"), "{arguments:?}: {said}");
    }
    // Usage mistakes are reported wherever the output goes.
    let full = File::options().write(true).open("/dev/full").unwrap();
    assert_eq!(run(&["--nonsense"], full.into()).status.code(), Some(2));
}

/// A client connects, reads a sector and disconnects.
fn read_a_sector(socket: &Path) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    // A time limit that only a hang exceeds.
    stream.set_read_timeout(Some(Duration::from_secs(90)))?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    // NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES, then NBD_OPT_EXPORT_NAME.
    let hello = [&3u32.to_be_bytes()[..], b"IHAVEOPT", &1u32.to_be_bytes(), &4u32.to_be_bytes()];
    stream.write_all(&[&hello.concat()[..], b"disk"].concat())?;
    stream.read_exact(&mut [0; 10])?;
    let mut request = [0; 28];
    request[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
    request[24..].copy_from_slice(&512u32.to_be_bytes());
    stream.write_all(&request)?;
    let mut reply = [0; 16 + 512];
    stream.read_exact(&mut reply)?;
    assert_eq!(reply[4..8], [0; 4], "an error");
    Ok(())
}

/// A daemon that is killed when dropped, also after a failed test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Standard error is a pipe that is never read, and holds far less than what is logged.
#[test]
fn a_log_that_is_not_read_blocks_no_request() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let mut daemon = Daemon(
        Command::new(env!("CARGO_BIN_EXE_ebbd"))
            .args(["serve", "--log", "debug", "--volume", "disk=memory:1M", "--listen"])
            .arg(format!("unix:{}", socket.display()))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let child = &mut daemon.0;
    let deadline = Instant::now() + Duration::from_secs(90);
    while UnixStream::connect(&socket).is_err() {
        assert!(child.try_wait().unwrap().is_none() && Instant::now() < deadline, "no start");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    for number in 0..3000 {
        read_a_sector(&socket).unwrap_or_else(|error| panic!("client {number}: {error}"));
    }
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let deadline = Instant::now() + Duration::from_secs(90);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "SIGTERM has no effect");
        std::thread::park_timeout(Duration::from_millis(5));
    };
    assert_eq!(status.code(), Some(0));
}

/// A client that connects and disconnects without end must not displace other lines of the journal.
#[test]
fn a_client_that_reconnects_often_gets_a_limited_number_of_lines() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, log) = (folder.path().join("s"), folder.path().join("log"));
    let mut daemon = Daemon(
        Command::new(env!("CARGO_BIN_EXE_ebbd"))
            .args(["serve", "--volume", "disk=memory:1M", "--listen"])
            .arg(format!("unix:{}", socket.display()))
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap(),
    );
    let child = &mut daemon.0;
    let deadline = Instant::now() + Duration::from_secs(90);
    while UnixStream::connect(&socket).is_err() {
        assert!(child.try_wait().unwrap().is_none() && Instant::now() < deadline, "no start");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let begun = Instant::now();
    for number in 0..1000 {
        read_a_sector(&socket).unwrap_or_else(|error| panic!("client {number}: {error}"));
    }
    // 20 in each 10 s, and a line for the end of each.
    let most = 40 * (begun.elapsed().as_secs() / 10 + 1);
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
    let log = std::fs::read_to_string(&log).unwrap();
    let lines = log.lines().filter(|line| line.contains("connection=")).count() as u64;
    assert!((2..=most).contains(&lines), "{lines} lines, and {most} at most\n{log}");
}
