//! The base of an overlay responds late while the overlay is flattened, so that writes of clients
//! overtake the copy.

use crate::world::World;

impl World {
    /// Stops the base of the overlay `site` for some steps, in most of the operations that copy the
    /// layers below.
    pub(super) fn slow_down_base(&mut self, site: usize) {
        if self.calm || self.overlays.slow_base.is_some() || !self.apart.chance(80) {
            return;
        }
        let overlay = self.sites[site].overlay().expect("it is an overlay");
        let base = self.sites.iter().position(|site| site.config.name == overlay.base);
        let Some(base) = base.filter(|base| !self.sites[*base].hangs) else { return };
        self.set_hang(base, true);
        self.overlays.slow_base = Some((base, self.apart.between(100, 2000)));
    }

    /// Makes a step of that time, and lets the base respond at its end. Returns true if a base was
    /// stopped.
    pub(super) fn step_slow_base(&mut self) -> bool {
        let Some((base, left)) = &mut self.overlays.slow_base else { return false };
        *left -= 1;
        if *left > 0 && self.sites[*base].hangs {
            return true;
        }
        let base = *base;
        self.overlays.slow_base = None;
        self.set_hang(base, false);
        true
    }
}
