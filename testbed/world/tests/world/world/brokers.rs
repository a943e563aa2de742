//! The end of the broker, and one that hangs. Volumes that are open are served as before; what
//! needs the broker fails before it has changed anything, as soon as the daemon knows; and a stop
//! waits for no call.

use std::time::{Duration, Instant};

use super::World;

/// The daemon looks every 5 s whether the broker makes calls, and gives it 10 s.
const NOTICED: Duration = Duration::from_secs(15);

/// What happens to a broker.
#[derive(Debug, Default)]
pub(super) struct BrokerFate {
    /// It is ended then, because it hangs.
    ends: Option<Instant>,
    /// The daemon learns of its end then.
    told: Option<Instant>,
    hung: bool,
    pub(super) is_known: bool,
}

impl World {
    pub(super) fn apply_broker_event(&mut self) -> Result<(), String> {
        let broker = self.disks.broker();
        if !broker.works() {
            // The daemon is restarted, as it tells the operator to.
            if self.broker.is_known && self.random.chance(30) {
                self.stop()?;
                self.start()?;
            }
            return Ok(());
        }
        let hung = self.random.chance(50);
        self.note(format_args!("the broker {}", if hung { "hangs" } else { "ends" }));
        self.broker.hung = hung;
        if hung {
            broker.hang();
            let after = self.random.between(10_000, NOTICED.as_millis() as u64);
            self.broker.ends = Some(self.now + Duration::from_millis(after));
        } else {
            self.end_broker();
        }
        Ok(())
    }

    fn end_broker(&mut self) {
        self.disks.broker().end();
        self.state.iter().for_each(|state| state.interrupt_after(0));
        let after = self.random.below(2_000);
        self.broker.told = Some(self.now + Duration::from_micros(after));
    }

    /// Ends a broker that hangs, and tells the daemon, when it is time.
    pub(super) fn serve_broker(&mut self) {
        if self.broker.ends.is_some_and(|at| at <= self.now) {
            self.broker.ends = None;
            self.end_broker();
        }
        if self.broker.told.is_some_and(|at| at <= self.now) {
            self.broker.told = None;
            self.broker.is_known = true;
            ebbd::sandbox::sim::set_fault(Some(self.broker.hung));
            self.note(format_args!("the daemon knows of the end of the broker"));
        }
    }

    /// The next daemon has another broker.
    pub(super) fn renew_broker(&mut self) {
        self.disks.broker().start();
        self.broker = BrokerFate::default();
        ebbd::sandbox::sim::set_fault(None);
    }

    /// When the next of this happens.
    pub(super) fn broker_wants(&self) -> Option<Instant> {
        self.broker.ends.into_iter().chain(self.broker.told).min()
    }
}
