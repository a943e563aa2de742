//! The file of an overlay is moved away while no daemon runs, and a new volume takes its name.
//!
//! The snapshots stay where they are. The moved file needs them, and they do not belong to the new
//! volume. The header of a new file may be torn when its disk fails or the power is cut; then the
//! file is removed, and made again.

use super::Snapshot;
use crate::world::World;
use crate::world::theme::Theme;

/// The numbers of the writes of the first new volume follow this one.
const NUMBERS: u64 = 2000;

impl World {
    /// Moves files away between two daemons, in some worlds.
    pub(in crate::world) fn move_files_away(&mut self) {
        if self.theme != Theme::Overlays {
            return;
        }
        self.remove_torn_files();
        let is_done = self.overlays.snapshots.iter().any(|one| one.is_foreign);
        if is_done || self.calm || !self.apart.chance(10) {
            return;
        }
        let has_own = |at: usize| {
            let own = |one: &&Snapshot| one.site == at && one.sure && !one.is_foreign;
            self.overlays.snapshots.iter().any(|one| own(&one))
        };
        // A guest would be on another disk.
        let has_guest = |at: usize| self.kvm.slots.iter().any(|slot| slot.site == at);
        let fits = |at: &usize| self.sites[*at].listed && has_own(*at) && !has_guest(*at);
        let all: Vec<usize> = (0..self.sites.len()).filter(fits).collect();
        if all.is_empty() {
            return;
        }
        let at = self.apart.pick(&all);
        let (folder, file) = self.file_of(at);
        folder.take_away(&file);
        folder.forget_unnamed();
        for one in self.overlays.snapshots.iter_mut().filter(|one| one.site == at) {
            one.is_foreign = true;
        }
        self.overlays.next += 1;
        let numbers = (NUMBERS + u64::from(self.overlays.next)) << 32;
        let base = self.sites[at].overlay().expect("it is an overlay").base.clone();
        let base = self.sites.iter().find(|site| site.config.name == base);
        let new = base.expect("it has a base").oracle.overlay("", numbers);
        let own = &mut self.sites[at];
        own.oracle.begin_anew(new);
        (own.before, own.ended, own.filled) = (own.oracle.sectors(), own.oracle.sectors(), 0);
        own.is_anew = true;
        for site in self.sites.iter_mut().filter(|site| site.overlay().is_some()) {
            site.forgive_losses();
        }
        self.note(format_args!("{file} is moved away"));
    }

    /// Removes files with torn headers, as an operator does if their volume was never served.
    fn remove_torn_files(&mut self) {
        for at in 0..self.sites.len() {
            if self.sites[at].overlay().is_none() || !self.sites[at].is_anew {
                continue;
            }
            let (folder, file) = self.file_of(at);
            if folder.exists(&file) && folder.size_in_header(&file).is_none() {
                folder.take_away(&file);
                self.note(format_args!("{file} is torn"));
            }
        }
    }
}
