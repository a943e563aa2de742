//! `ebbd vhost-user`: one volume for one guest, by QEMU's conventions for back-end programs.
//!
//! Called as `ebbd-vhost-user`, the program is `ebbd vhost-user`: the files by which libvirt and similar programs find such programs
//! have a path and no arguments.
//!
//! Source: "Back-end program conventions" in QEMU's `interop/vhost-user.rst`.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::Context;
use ebb_config::ServeArgs;
use rustix::event::{PollFd, PollFlags, poll};

use crate::cli::VhostUserArgs;
use crate::daemon::PassedSocket;
use crate::listener;

/// What `--print-capabilities` prints.
pub const CAPABILITIES: &str =
    "{\n  \"type\": \"block\",\n  \"features\": [\"read-only\", \"blk-file\"]\n}\n";

/// The command.
const COMMAND: &str = "vhost-user";
/// The name by which the program is this command.
const PROGRAM: &str = "ebbd-vhost-user";
/// The option of a volume that is only read.
const READ_ONLY: &str = ",read-only=true";
/// The volume's name, for the log.
const VOLUME: &str = "disk";

/// The arguments, with the command if the program's name stands for it.
pub fn arguments(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = given.collect();
    let name = arguments.first().and_then(|program| Path::new(program).file_name());
    if name == Some(PROGRAM.as_ref()) {
        arguments.insert(1, COMMAND.into());
    }
    arguments
}

/// Whether the capabilities are to be printed, whatever the other arguments are.
pub fn asks_for_capabilities(arguments: &[OsString]) -> bool {
    let command = arguments.get(1).is_some_and(|command| command == COMMAND);
    command && arguments.iter().any(|argument| argument == "--print-capabilities")
}

impl VhostUserArgs {
    /// The options of `ebbd serve` that do the same, and the socket that was passed. To be called before anything is
    /// opened.
    ///
    /// # Errors
    /// If there is no such socket, or a path is not UTF-8.
    pub fn prepare(&self) -> anyhow::Result<(ServeArgs, Option<PassedSocket>)> {
        let passed = self.fd.map(listener::passed).transpose().context("--fd")?;
        if let Some(socket) = &passed {
            end_with(socket)?;
        }
        let store = match (&self.blk_file, &self.volume) {
            (Some(file), _) => format!("file:{}", option_text(file)?),
            (None, Some(volume)) => volume.clone(),
            // Refused by clap.
            (None, None) => String::new(),
        };
        let socket = match &self.socket_path {
            // Also a file that is called none.
            Some(path) => option_text(&std::path::absolute(path).context("--socket-path")?)?,
            None => "none".to_owned(),
        };
        // An option is refused if it is given twice.
        let given = self.volume.as_ref().is_some_and(|given| given.contains(READ_ONLY));
        let read_only = if self.read_only && !given { READ_ONLY } else { "" };
        let volume = format!("{VOLUME}={store},vhost-user={socket}{read_only}");
        let serve = ServeArgs {
            volumes: vec![volume],
            strict: true,
            drain: 60,
            control: self.control.clone(),
            sandbox: self.sandbox,
            ..ServeArgs::default()
        };
        let passed = passed.map(|socket| PassedSocket { socket, volume: VOLUME.to_owned() });
        Ok((serve, passed))
    }
}

/// A path as the value of an option of a volume.
fn option_text(path: &Path) -> anyhow::Result<String> {
    let text = path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?;
    Ok(text.replace(',', ",,"))
}

/// Stops the program, as SIGTERM does, when a connected socket is closed by its other end.
fn end_with(socket: &OwnedFd) -> anyhow::Result<()> {
    if rustix::net::sockopt::socket_acceptconn(socket).context("--fd")? {
        return Ok(());
    }
    let socket = socket.try_clone().context("--fd")?;
    let wait = move || {
        let mut closed = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::RDHUP)];
        while poll(&mut closed, None).is_err_and(|error| error == rustix::io::Errno::INTR) {}
        drop(socket);
        let process = rustix::process::getpid();
        let _ = rustix::process::kill_process(process, rustix::process::Signal::TERM);
    };
    let thread = std::thread::Builder::new().name("ebbd-end".to_owned()).stack_size(64 << 10);
    thread.spawn(wait).map(drop).context("cannot start a thread")
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use ebb_config::Config;

    use super::*;
    use crate::cli::{Cli, CliCommand};

    fn given(text: &str) -> Vec<OsString> {
        arguments(text.split(' ').map(OsString::from))
    }

    fn config(text: &str) -> Config {
        let CliCommand::VhostUser(args) = Cli::try_parse_from(given(text)).unwrap().command else {
            panic!("another command");
        };
        let (mut serve, passed) = args.prepare().unwrap();
        serve.inherited_sockets = usize::from(passed.is_some());
        Config::load(&serve).unwrap()
    }

    #[test]
    fn a_link_to_the_program_is_the_command() {
        let all = given("/usr/libexec/ebbd-vhost-user --fd 4");
        assert_eq!(all, ["/usr/libexec/ebbd-vhost-user", "vhost-user", "--fd", "4"]);
        assert_eq!(given("ebbd serve"), ["ebbd", "serve"]);
    }

    #[test]
    fn capabilities_are_printed_whatever_else_is_given() {
        let asks = |text| asks_for_capabilities(&given(text));
        assert!(asks("ebbd vhost-user --print-capabilities --unknown=9"));
        assert!(asks("/x/ebbd-vhost-user --print-capabilities"));
        assert!(!asks("ebbd vhost-user --fd 3") && !asks("ebbd serve --print-capabilities"));
        let said: serde_json::Value = serde_json::from_str(CAPABILITIES).unwrap();
        assert_eq!(said["type"], "block");
    }

    #[test]
    fn the_options_of_qemu_make_a_volume() {
        let config = config("ebbd-vhost-user --socket-path=/tmp/a,b --blk-file=/d,e --read-only");
        let volume = &config.volumes["disk"];
        assert_eq!(volume.store.to_string(), "file:/d,e");
        assert!(volume.read_only);
        assert_eq!(config.vhost_sockets().keys().next().unwrap(), Path::new("/tmp/a,b"));
    }

    #[test]
    fn a_store_has_options() {
        let config = config("ebbd vhost-user --socket-path /s --volume nbd://h/x,cache=writeback");
        assert_eq!(config.volumes["disk"].cache.to_string(), "writeback");
    }

    #[test]
    fn a_socket_may_be_called_none_and_reading_only_be_given_twice() {
        let read_only = config(
            "ebbd vhost-user --socket-path none --volume null:1M,read-only=true --read-only",
        );
        let at = std::env::current_dir().unwrap().join("none");
        assert_eq!(read_only.vhost_sockets().keys().next(), Some(&at));
        assert!(read_only.volumes["disk"].read_only);
    }

    #[test]
    fn a_descriptor_that_is_no_socket_is_refused() {
        use std::os::fd::AsRawFd;
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(listener::passed(file.as_raw_fd()).is_err());
        assert!(listener::passed(1 << 20).is_err());
        assert!(Cli::try_parse_from(given("ebbd vhost-user --fd 1 --blk-file /d")).is_err());
    }

    #[test]
    fn only_a_unix_stream_socket_that_listens_or_is_connected_is_accepted() {
        use rustix::net::{AddressFamily as Family, SocketFlags, SocketType as Type};
        use std::os::fd::IntoRawFd;
        let passed = |socket: OwnedFd| listener::passed(socket.into_raw_fd());
        let refused = |socket: OwnedFd| passed(socket).unwrap_err().to_string();
        let new = |family, kind| {
            rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap()
        };
        for (family, kind) in [
            (Family::UNIX, Type::DGRAM),
            (Family::UNIX, Type::SEQPACKET),
            (Family::INET, Type::DGRAM),
            (Family::INET, Type::STREAM),
            (Family::NETLINK, Type::RAW),
        ] {
            let text = refused(new(family, kind));
            assert!(text.contains("not a unix socket of the type SOCK_STREAM"), "{text}");
        }
        let text = refused(new(Family::UNIX, Type::STREAM));
        assert!(text.contains("neither listens nor is connected"), "{text}");
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(passed(one.into()).is_ok());
        drop(other);
        let folder = tempfile::tempdir().unwrap();
        let listening = std::os::unix::net::UnixListener::bind(folder.path().join("s")).unwrap();
        assert!(passed(listening.into()).is_ok());
    }
}
