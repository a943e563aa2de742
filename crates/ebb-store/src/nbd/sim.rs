//! Connecting in a simulation (feature `sim`): on the simulation's thread, where nothing else runs
//! meanwhile, so the server's side is run while the client waits. An attempt that times out takes
//! its time limit of simulated time.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use ebb_io::Io;
use rustix::net::RecvFlags;

use super::connect::{ATTEMPT, Connected};
use super::options::NbdError;

type Peer = Rc<dyn Fn()>;

thread_local! {
    static PEER: RefCell<Option<Peer>> = const { RefCell::new(None) };
}

/// Sets the function that runs the servers of this thread's simulation while a handshake waits for
/// one.
pub fn set_peer(peer: Option<Peer>) {
    PEER.set(peer);
}

/// Receives what is available, after running the servers once if nothing is. Nothing then means
/// that the server does not reply.
pub(crate) fn receive(fd: &OwnedFd, buf: &mut [u8]) -> io::Result<usize> {
    let mut turns = 0;
    loop {
        match rustix::net::recv(fd, &mut *buf, RecvFlags::DONTWAIT) {
            Ok((count, _)) => return Ok(count),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) if turns == 0 => {
                turns += 1;
                if let Some(peer) = PEER.with_borrow(Clone::clone) {
                    peer();
                }
            }
            Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// One attempt; if it timed out, its time passes.
pub(crate) async fn attempt(
    io: &Io,
    connect: impl FnOnce() -> Result<Connected, NbdError>,
) -> Result<Connected, NbdError> {
    let result = connect();
    match &result {
        Err(NbdError::Handshake { source, .. }) if source.kind() == io::ErrorKind::TimedOut => {
            io.sleep(ATTEMPT).await;
        }
        _ => io.yield_now().await,
    }
    result
}
