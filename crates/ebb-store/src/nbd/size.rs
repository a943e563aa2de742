//! The size of a server's export, asked for on a connection of its own.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebb_advice::Advised;
use ebb_block::ResizeError;
use ebb_io::Io;

use super::connect::{ATTEMPT, connect_off_worker};
use super::{NbdError, NbdStore};

/// How often a resize looks whether a connection has learnt another size.
const LOOK: Duration = Duration::from_millis(20);
const CLOSING: ResizeError =
    ResizeError::Unsupported { why: "it is being closed", remedy: "try again when it is served" };
/// Why the size of an export is not known while the connection of its store is unused.
const ONE_CLIENT: ResizeError = ResizeError::Unsupported {
    why: "the server did not answer a second connection, and may serve one client at a time, so the \
          volume keeps its size",
    remedy: "start the server again with the new size, then resize the volume without a size",
};

impl NbdStore {
    /// The size of the server's export now, bytes. If the connections already know that it is
    /// another one than that in use, or learn it meanwhile, it is that; otherwise a new connection
    /// asks for it. (Some servers accept one connection at a time: a new one for requests keeps
    /// this one out.)
    pub(super) async fn size_of_export(&self, io: &Io) -> Result<u64, ResizeError> {
        let remote = &self.remote;
        let unknown = |error: NbdError| ResizeError::Remote(Box::new(Advised(error)));
        let seen = || {
            let seen = remote.size_seen.load(Ordering::SeqCst);
            (seen != remote.size()).then_some(seen)
        };
        let usable = |size| {
            let checked = remote.export.with_size(size).check(&remote.options);
            checked.map_err(unknown).map(|_| size)
        };
        if let Some(size) = seen() {
            return usable(size);
        }
        // It may have to wait for attempts of other volumes to connect.
        let asked = io.timeout(2 * ATTEMPT, connect_off_worker(io, remote.clone()));
        let learnt = async {
            loop {
                io.sleep(LOOK).await;
                if let Some(size) = seen() {
                    return Err(size);
                }
            }
        };
        let first = futures_lite::future::or(async { Ok(asked.await) }, learnt);
        let connected = match remote.shared.unless_closed(first).await {
            Some(Ok(connected)) => connected,
            Some(Err(size)) => return usable(size),
            None => return Err(CLOSING),
        };
        let late = || {
            let (address, kind) = (remote.options.address.to_string(), io::ErrorKind::TimedOut);
            Err(NbdError::Connect { address, source: kind.into() })
        };
        let connected = connected.unwrap_or_else(late).map_err(|error| match error {
            // Closing the unused connection may end the server.
            NbdError::Connect { .. } | NbdError::Handshake { .. } if remote.first.is_kept() => {
                ONE_CLIENT
            }
            error => unknown(error),
        })?;
        let (export, size) = (connected.export.clone(), connected.export.size);
        if size != remote.size() && remote.first.is_kept() {
            // The unused one does not know this size.
            let own = remote.clone();
            io.offload(move || own.first.exchange(connected)).await;
        } else {
            connected.disconnect();
        }
        remote.export.replaced_by(&export, size, &remote.options).map_err(unknown)?;
        Ok(size)
    }
}
