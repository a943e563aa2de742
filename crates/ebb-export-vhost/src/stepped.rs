//! The control thread of a simulation, which runs it on its own thread and with its own clock
//! (feature `sim`).

use std::time::{Duration, Instant};

use crate::area::crash;
use crate::control::FrontendControl;

/// Serves the sockets of frontends, one turn at a time. Dropping it closes them, as a kill does.
pub struct SteppedFrontends {
    /// `None` once it has ended.
    control: Option<FrontendControl>,
}

impl SteppedFrontends {
    pub(crate) fn new(mut control: FrontendControl) -> SteppedFrontends {
        control.begin();
        SteppedFrontends { control: Some(control) }
    }

    /// Handles the events that have happened, without waiting. False if there were none.
    pub fn run_once(&mut self) -> bool {
        let Some(control) = &mut self.control else { return false };
        let events = control.serve_events(Some(Duration::ZERO));
        if events.is_none() || control.has_ended() {
            control.end();
            self.control = None;
        }
        events != Some(0)
    }

    /// When the next turn is due if no event happens before.
    pub fn next_turn(&self) -> Option<Instant> {
        let pause = self.control.as_ref()?.timeout()?;
        Some(ebb_mem::clock::now() + pause)
    }
}

/// The death of this thread's process in the midst of its stores to rings and inflight regions.
#[derive(Debug)]
pub struct DeathAtStore(());

impl DeathAtStore {
    /// From now on, `stores` stores have effect, and later ones none, until this is dropped.
    pub fn after(stores: u64) -> DeathAtStore {
        crash::die_after(stores);
        DeathAtStore(())
    }

    /// Whether all of them were done.
    pub fn has_come(&self) -> bool {
        crash::is_dead()
    }
}

impl Drop for DeathAtStore {
    fn drop(&mut self) {
        crash::revive();
    }
}
