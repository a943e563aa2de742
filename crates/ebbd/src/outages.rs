//! Outages are told: a look at each volume's store once a second, and a line in the log when its server is lost,
//! when it does not answer, when requests fail, and when that is over. Requests pay two counters for it.
//!
//! Each kind of trouble of a volume has a limit of lines, and all together have one, so that neither a broken
//! disk nor a server of a thousand volumes fills the log; the next line says how many were left out.

mod story;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ebb_export_nbd::Server;
use ebb_io::WorkerHandle;
use ebb_volume::{FailedKind, LogLimit, Volume};

use story::{Look, Story, Tale};

/// How often a look is taken.
const PERIOD: Duration = Duration::from_secs(1);
/// Lines of all volumes together.
const ALL_LINES: u32 = 50;
const ALL_PERIOD: Duration = Duration::from_secs(10);

/// Tells of outages of the server's volumes from a worker, as long as that lives.
pub(crate) fn tell(worker: &WorkerHandle, server: Server) {
    worker.spawn(move |io| async move {
        let mut teller = Teller::default();
        loop {
            io.sleep(PERIOD).await;
            teller.look(server.volumes().into_iter().map(|(volume, _)| volume));
        }
    });
}

struct Teller {
    stories: BTreeMap<Arc<str>, (Weak<Volume>, Story)>,
    limit: LogLimit,
}

impl Default for Teller {
    fn default() -> Teller {
        let limit = LogLimit::new(ALL_LINES, ALL_PERIOD);
        Teller { stories: BTreeMap::new(), limit }
    }
}

impl Teller {
    fn look(&mut self, volumes: impl Iterator<Item = Arc<Volume>>) {
        let now = ebb_io::clock::now();
        for volume in volumes {
            let Some(watched) = volume.watched() else { continue };
            let look = Look {
                now,
                unanswered: watched.unanswered(),
                failures: watched.failures(),
                remote: volume.store_state(),
            };
            let fresh = || (Arc::downgrade(&volume), Story::new(now));
            let (known, story) = self.stories.entry(volume.name().clone()).or_insert_with(fresh);
            if !is_same(known, &volume) {
                (*known, *story) = fresh();
            }
            for tale in story.look(&look) {
                if tale.is_good() {
                    say(&volume, &look, &tale, 0);
                } else if let Some(left_out) = self.limit.admit(now) {
                    say(&volume, &look, &tale, left_out);
                }
            }
        }
        self.stories.retain(|_, (volume, _)| volume.strong_count() > 0);
    }
}

fn is_same(known: &Weak<Volume>, volume: &Arc<Volume>) -> bool {
    std::ptr::eq(known.as_ptr(), Arc::as_ptr(volume))
}

/// One line.
fn say(volume: &Volume, look: &Look, tale: &Tale, left_out: u64) {
    let (name, store) = (&**volume.name(), volume.place());
    let left_out = (left_out > 0).then_some(left_out);
    let reason = || {
        let last = look.remote.as_ref().and_then(|remote| remote.last_error.clone());
        last.unwrap_or_else(|| "no reason is known".to_owned())
    };
    match tale {
        Tale::Lost { earlier } => tracing::warn!(
            volume = name,
            store,
            earlier,
            left_out,
            reason = reason(),
            "the connection to the server was lost, and requests wait as long as `reconnect` says: \
             see whether the server runs and can be reached"
        ),
        Tale::LostForAMoment { times, earlier } => tracing::warn!(
            volume = name,
            store,
            times,
            earlier,
            left_out,
            reason = reason(),
            "the connection to the server was lost and made again at once: see the server's log"
        ),
        Tale::Back { after } => tracing::warn!(
            volume = name,
            store,
            seconds = after.as_secs(),
            "connected to the server again"
        ),
        Tale::Silent { requests, waited, earlier } => {
            let seconds = waited.as_secs();
            if look.remote.is_some() {
                tracing::warn!(
                    volume = name,
                    store,
                    requests,
                    earlier,
                    left_out,
                    "no answer for {seconds} s: see whether the server hangs; with `silence` set, a \
                     connection without answers is made anew"
                );
            } else {
                tracing::warn!(
                    volume = name,
                    store,
                    requests,
                    earlier,
                    left_out,
                    "no answer for {seconds} s: see the kernel's log (dmesg) for the device of this file"
                );
            }
        }
        Tale::Answers { after, failed } => tracing::warn!(
            volume = name,
            store,
            seconds = after.as_secs(),
            failed,
            "what had no answer has ended"
        ),
        Tale::Fails { kind, count } => {
            let reason = volume.watched().and_then(|watched| watched.take_error(*kind));
            let (what, remedy) = match kind {
                FailedKind::Read => ("reading failed", "see the log of the kernel or the server"),
                FailedKind::Write => (
                    "writing failed",
                    "see whether there is space, and the log of the kernel or the server",
                ),
                FailedKind::Flush => (
                    "a flush failed, and what was written before it may be lost",
                    "see the log of the kernel or the server, and check the data",
                ),
            };
            tracing::warn!(
                volume = name,
                store,
                count,
                left_out,
                reason = reason.unwrap_or_default(),
                "{what}: {remedy}"
            );
        }
        Tale::FailsNoMore { failed } => tracing::warn!(
            volume = name,
            store,
            failed,
            "no request has failed for {} s",
            story::QUIET.as_secs()
        ),
    }
}
