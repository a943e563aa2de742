//! Commands that go on while the daemon is restarted: they say once that it does not reply, ask again each second, and say when it
//! replies again.

use std::io::{self, Write};
use std::time::Duration;

use super::{ClientError, DaemonClient};

/// The pause before a daemon that did not reply is asked again.
pub(super) const AGAIN: Duration = Duration::from_secs(1);

/// A client that does not give up.
pub(super) struct PersistentClient {
    daemon: DaemonClient,
    again: Duration,
}

impl PersistentClient {
    pub(super) fn new(daemon: DaemonClient) -> Self {
        Self { daemon, again: AGAIN }
    }

    /// The reply to `ask`, however long the daemon does not reply, and whether there was such a time: it may have been
    /// restarted.
    ///
    /// # Errors
    /// A refusal by the daemon.
    pub(super) fn ask<T>(
        &self,
        ask: impl Fn(&DaemonClient) -> Result<T, ClientError>,
    ) -> Result<(T, bool), ClientError> {
        let mut lost = false;
        loop {
            match ask(&self.daemon) {
                Ok(reply) => {
                    if lost {
                        say("the daemon replies again");
                    }
                    return Ok((reply, lost));
                }
                Err(error @ ClientError::Refused { .. }) => return Err(error),
                Err(error) => {
                    if !lost {
                        let why = crate::log::reasons(&error.into());
                        say(&format!("{why}; ebbd asks again each second"));
                    }
                    lost = true;
                    std::thread::sleep(self.again);
                }
            }
        }
    }
}

/// Standard error: what is said here is no part of the result.
fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "ebbd: {text}");
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_daemon_that_does_not_reply_is_asked_again_and_a_refusal_ends_it() {
        let daemon = DaemonClient::new(Some("/nonexistent")).unwrap();
        let client = PersistentClient { daemon, again: Duration::ZERO };
        let asked = Cell::new(0);
        let reply = client.ask(|daemon| {
            asked.set(asked.get() + 1);
            if asked.get() < 4 { Err(daemon.invalid("nothing")) } else { Ok(7) }
        });
        assert_eq!((reply.unwrap(), asked.get()), ((7, true), 4));
        assert_eq!(client.ask(|_| Ok(8)).unwrap(), (8, false));
        let refusal = || ClientError::Refused { message: "no".into(), remedy: "ask else".into() };
        assert!(client.ask(|_| Err::<(), _>(refusal())).is_err());
    }
}
