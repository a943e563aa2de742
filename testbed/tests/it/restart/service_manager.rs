//! A service manager with a store of descriptors, as systemd has one: sd_notify(3) and sd_listen_fds(3).

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use testbed::harness::process::PATIENCE;
use testbed::{Error, Result, check};

/// The descriptors in the store, with their names.
type Store = Arc<Mutex<Vec<(String, OwnedFd)>>>;

/// Receives notifications until it is dropped.
pub(crate) struct ServiceManager {
    path: PathBuf,
    store: Store,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ServiceManager {
    /// # Errors
    /// The socket cannot be bound.
    pub(crate) fn start(dir: &Path) -> Result<ServiceManager> {
        let path = dir.join("notify.sock");
        let socket = UnixDatagram::bind(&path).map_err(Error::io("bind"))?;
        let limit = Some(PATIENCE / 100);
        socket.set_read_timeout(limit).map_err(Error::io("set a time limit"))?;
        let (store, ended) = (Store::default(), Arc::<AtomicBool>::default());
        let (kept, over) = (store.clone(), ended.clone());
        let thread = std::thread::spawn(move || {
            while !over.load(Ordering::SeqCst) {
                receive(&socket, &kept);
            }
        });
        Ok(ServiceManager { path, store, ended, thread: Some(thread) })
    }

    /// The value of `NOTIFY_SOCKET`.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The number of descriptors in the store.
    pub(crate) fn stored(&self) -> usize {
        self.store.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// A program, with arguments, that runs another one with the descriptors of the store, which keeps them: as systemd
    /// starts a service again. The descriptors of the result are inherited by it, and to be closed after that.
    ///
    /// # Errors
    /// Of the system.
    pub(crate) fn launcher(&self) -> Result<(Vec<String>, Vec<OwnedFd>)> {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let mut redirections = String::new();
        let (mut names, mut inherited) = (Vec::new(), Vec::new());
        // Moved away first, so that none of the numbers is one of the store's.
        for (number, (name, fd)) in (3..).zip(&*store) {
            let high = rustix::io::fcntl_dupfd_cloexec(fd, 1000)
                .map_err(|e| Error::io("dup")(e.into()))?;
            let flags = rustix::io::FdFlags::empty();
            rustix::io::fcntl_setfd(&high, flags).map_err(|e| Error::io("dup")(e.into()))?;
            let from = high.as_raw_fd();
            redirections.push_str(&format!(" {number}<&{from} {from}<&-"));
            names.push(name.clone());
            inherited.push(high);
        }
        let (count, names) = (names.len(), names.join(":"));
        let script = match count {
            0 => "exec \"$@\"".to_owned(),
            _ => format!(
                "export LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES={names}; exec \"$@\"{redirections}"
            ),
        };
        Ok((["bash", "-c", &script, "bash"].map(str::to_owned).to_vec(), inherited))
    }
}

impl Drop for ServiceManager {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // It has nothing to return.
            let _ = thread.join();
        }
    }
}

/// Carries out one notification.
fn receive(socket: &UnixDatagram, store: &Store) {
    let mut bytes = [0; 4096];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let Ok(received) = rustix::net::recvmsg(socket, &mut parts, &mut control, flags) else {
        return;
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let text = String::from_utf8_lossy(&bytes[..received.bytes]).into_owned();
    let has = |line: &str| text.lines().any(|found| found == line);
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or("stored");
    let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
    if has("FDSTORE=1") {
        store.extend(fds.drain(..).map(|fd| (name.to_owned(), fd)));
    }
    if has("FDSTOREREMOVE=1") {
        store.retain(|(kept, _)| kept != name);
    }
    // `BARRIER=1` has a descriptor that is closed here.
    drop(fds);
}

/// Checks that the store was emptied.
///
/// # Errors
/// It was not.
pub(crate) fn is_empty(manager: &ServiceManager) -> Result {
    let stored = manager.stored();
    check(stored == 0, || format!("{stored} descriptors are still in the store"))
}
