//! Times in which nobody uses any volume.

use std::time::Duration;

use crate::world::World;

/// After so long without requests a kill loses nothing. The manuals say "about 30 seconds".
pub(in crate::world) const IDLE: Duration = Duration::from_secs(60);

impl World {
    /// Nobody uses any volume for a while; then the daemon may be killed.
    pub(in crate::world) fn idle(&mut self) -> Result<(), String> {
        let kill = self.random.chance(70);
        self.note(format_args!("idle"));
        let calm = std::mem::replace(&mut self.calm, true);
        for client in self.client_slots.iter_mut().filter_map(|slot| slot.client.as_mut()) {
            (client.quiet, client.deaf) = (true, false);
        }
        self.quieten_kvm_guests(true);
        self.wait_until(self.now + IDLE / 10)?;
        for at in 0..self.sites.len() {
            let busy = self.has_requests(at) || !self.sites[at].orphans.is_empty();
            self.sites[at].before_idle = (!busy).then_some(self.now);
        }
        self.wait_until(self.now + IDLE)?;
        if kill {
            self.kill(false)?;
            self.start()?;
        }
        for client in self.client_slots.iter_mut().filter_map(|slot| slot.client.as_mut()) {
            client.quiet = false;
        }
        self.quieten_kvm_guests(false);
        self.sites.iter_mut().for_each(|site| site.before_idle = None);
        self.calm = calm;
        Ok(())
    }
}
