//! Volumes get other stores while guests and clients are attached to them: nobody may go on there.

use super::World;
use super::site::Site;
use super::theme::Theme;
use crate::daemon::Place;

impl World {
    /// Two volumes have exchanged their disks: each has the other's name.
    pub(super) fn exchange_names(&mut self, one: usize, other: usize) {
        let name = self.sites[one].config.name.clone();
        let former = std::mem::replace(&mut self.sites[other].config.name, name);
        self.sites[one].config.name = former;
        self.note(format_args!("volumes {one} and {other} exchange their disks"));
    }

    /// A daemon that starts may have a configuration in which two volumes of KVM guests have
    /// exchanged their disks.
    pub(super) fn exchange_under_guests(&mut self) {
        if self.theme != Theme::Kvm || self.calm {
            return;
        }
        let has_guests = |at: &usize| self.kvm.slots.iter().any(|slot| slot.site == *at);
        let is_disk = |at: &usize| self.sites[*at].disk().is_some();
        let all: Vec<usize> =
            (0..self.sites.len()).filter(|at| has_guests(at) && is_disk(at)).collect();
        if all.len() < 2 || self.apart.chance(75) {
            return;
        }
        self.exchange_names(all[0], all[1]);
        for at in 0..self.kvm.slots.len() {
            let slot = &mut self.kvm.slots[at];
            let guest = slot.guest.as_mut().filter(|_| all[..2].contains(&slot.site));
            let Some(guest) = guest else { continue };
            // After another exchange it is on its own disk again.
            let foreign = guest.volume() != self.sites[slot.site].config.name;
            // One that was not attached yet would use whatever has the name now.
            if !guest.set_displaced(foreign) {
                self.destroy_kvm_guest(at);
            }
        }
    }

    /// What was in the memory of a daemon has ended with it.
    pub(super) fn displace_guests_of_memory(&mut self) {
        let in_memory = |site: &Site| matches!(site.config.place, Place::Memory(_));
        let all: Vec<bool> = self.sites.iter().map(in_memory).collect();
        self.displace_kvm_guests(|site| all[site]);
    }

    /// The guests of some sites that are attached have to be refused from now on.
    pub(super) fn displace_kvm_guests(&mut self, of: impl Fn(usize) -> bool) {
        for slot in self.kvm.slots.iter_mut().filter(|slot| of(slot.site)) {
            if let Some(guest) = &mut slot.guest {
                guest.set_displaced(true);
            }
        }
    }
}
