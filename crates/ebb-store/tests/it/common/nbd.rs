//! Third-party NBD servers, for the tests of the remote store.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The time within which a server must listen.
const PATIENCE: Duration = Duration::from_secs(90);

/// A server on a unix socket; killed when dropped.
pub(crate) struct Server {
    program: &'static str,
    arguments: Vec<String>,
    socket: PathBuf,
    child: Option<Child>,
    _folder: Option<tempfile::TempDir>,
}

impl Server {
    /// `nbdkit` with these arguments; `SOCKET` stands for the path of the socket.
    pub(crate) fn nbdkit(arguments: &[&str]) -> Server {
        Server::start("nbdkit", &[&["-f", "-U", "SOCKET"], arguments].concat())
    }

    pub(crate) fn start(program: &'static str, arguments: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let arguments =
            arguments.iter().map(|a| a.replace("SOCKET", socket.to_str().unwrap())).collect();
        let mut server = Server { program, arguments, socket, child: None, _folder: Some(folder) };
        server.restart();
        server
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Starts it again. The calling thread must not end before the server does.
    pub(crate) fn restart(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
        let child = Command::new(self.program)
            .args(&self.arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}: run testbed/install", self.program));
        self.child = Some(child);
        let deadline = Instant::now() + PATIENCE;
        while UnixStream::connect(&self.socket).is_err() {
            assert!(Instant::now() < deadline, "{} does not listen", self.program);
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    pub(crate) fn change(&mut self, from: &str, to: &str) {
        for argument in &mut self.arguments {
            *argument = argument.replace(from, to);
        }
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// SIGTERM, and waits for the process.
    pub(crate) fn terminate(&mut self) {
        self.ask_to_end();
        if let Some(mut child) = self.child.take() {
            child.wait().unwrap();
        }
    }

    /// SIGTERM.
    pub(crate) fn ask_to_end(&mut self) {
        if let Some(child) = &self.child {
            let pid = rustix::process::Pid::from_child(child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        }
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| child.try_wait().unwrap().is_some())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
