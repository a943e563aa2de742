//! [`ListenError`]: why there is no socket, each kind with its remedy.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use ebb_advice::Advice;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are the words of the messages")]
pub enum ListenError {
    /// Another server listens there.
    #[error("{path}: in use by a running server")]
    InUse { path: PathBuf },
    /// A signal ended the daemon while it waited for another server to close the socket.
    #[error("stopped by a signal before the socket was open")]
    Interrupted,
    /// A file other than a socket has the path.
    #[error("{path}: exists and is not a socket")]
    NotASocket { path: PathBuf },
    /// With it open, too few descriptors would be left for clients and remote volumes.
    #[error("{path}: the limit of open files ({limit}) leaves no descriptor for the socket")]
    Descriptors { path: PathBuf, limit: u64 },
    /// The service manager has passed something that clients cannot connect to.
    #[error("cannot listen at {name}: it is {kind}")]
    Passed { name: String, kind: &'static str },
    /// The directory of the socket cannot be made.
    #[error("cannot make the directory {path}")]
    Directory { path: PathBuf, remedy: &'static str, source: io::Error },
    /// The system refused.
    #[error("cannot listen at {address}")]
    Bind { address: String, remedy: &'static str, source: io::Error },
    /// The socket of a key of the configuration other than `listen`.
    #[error("{key}: {source}")]
    OfKey { key: &'static str, source: Box<ListenError> },
}

impl ListenError {
    /// Returns true if another server listens there.
    pub(crate) fn is_in_use(&self) -> bool {
        match self {
            ListenError::OfKey { source, .. } => source.is_in_use(),
            other => matches!(other, ListenError::InUse { .. }),
        }
    }

    /// Names the key; not for the kinds that the start of the daemon handles.
    pub(crate) fn of_key(self, key: &'static str) -> ListenError {
        match self {
            ListenError::Interrupted => self,
            source => ListenError::OfKey { key, source: Box::new(source) },
        }
    }
}

impl Advice for ListenError {
    fn remedy(&self) -> Option<Cow<'_, str>> {
        let remedy = match self {
            ListenError::OfKey { source, .. } => return source.remedy(),
            ListenError::InUse { .. } => "stop that server, or listen at another path",
            ListenError::NotASocket { .. } => "listen at another path, or move it away",
            ListenError::Descriptors { .. } => "raise LimitNOFILE",
            ListenError::Passed { .. } => "use `ListenStream=` with `Accept=no` in the socket unit",
            ListenError::Directory { remedy: "", .. }
            | ListenError::Bind { remedy: "", .. }
            | ListenError::Interrupted => return None,
            ListenError::Directory { remedy, .. } | ListenError::Bind { remedy, .. } => remedy,
        };
        Some(remedy.into())
    }
}

/// The error of the system at the address `name`.
pub(super) fn bind_error(name: &str, source: io::Error) -> ListenError {
    let tcp = name.starts_with("tcp:");
    let remedy = match source.kind() {
        io::ErrorKind::NotFound => "its directory does not exist: create it",
        io::ErrorKind::PermissionDenied if tcp => "ports below 1024 need privileges",
        io::ErrorKind::PermissionDenied => {
            "give the daemon's user write access to its directory; if `open_paths` is set, add it there"
        }
        io::ErrorKind::AddrInUse if tcp => {
            "another server uses it: stop that server, or use another port"
        }
        _ if matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            "raise LimitNOFILE"
        }
        io::ErrorKind::AddrNotAvailable => "this host has no such address",
        // The resolver's errors have neither a kind nor a number.
        _ if tcp && source.raw_os_error().is_none() => {
            "its name has no address: correct it, or give an IP address"
        }
        _ => "",
    };
    ListenError::Bind { address: name.to_owned(), remedy, source }
}

#[cfg(test)]
mod tests {
    use ebb_advice::full_text;

    use super::*;

    #[test]
    fn keys_of_sockets_are_named_and_descriptors_have_a_remedy() {
        let used = || bind_error("tcp:127.0.0.1:9", io::Error::from_raw_os_error(libc::EADDRINUSE));
        let text = full_text(&used().of_key("web"));
        assert!(
            text.starts_with("web: cannot listen at tcp:127.0.0.1:9: another server"),
            "{text}"
        );
        let path = PathBuf::from("c.sock");
        let taken = ListenError::InUse { path }.of_key("control");
        assert!(taken.is_in_use() && !used().of_key("web").is_in_use());
        assert!(matches!(ListenError::Interrupted.of_key("web"), ListenError::Interrupted));
        let full = bind_error("unix:c.sock", io::Error::from_raw_os_error(libc::EMFILE));
        assert!(full_text(&full).contains("raise LimitNOFILE"));
    }
}
