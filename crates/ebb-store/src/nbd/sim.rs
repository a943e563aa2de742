//! Making connections in a simulation (feature `sim`): on its thread, where nothing else runs meanwhile, so
//! the server's side has its turns while the client's waits. What an attempt waits for in vain costs
//! the time of the simulation that it may take.

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

/// What gives the servers of this thread's simulation a turn: called when a handshake waits for one.
pub fn set_peer(peer: Option<Peer>) {
    PEER.set(peer);
}

/// What has come, or what comes when the server had a turn. Nothing then is a server that does not answer.
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

/// An attempt; one that timed out has taken its time.
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
