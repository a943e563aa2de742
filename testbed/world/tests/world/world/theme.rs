//! The theme of a world: most may have any event; some concentrate on situations that are rare otherwise.

use std::time::{Duration, Instant};

use super::events::{EVENTS, Event};
use super::overlays;
use super::site::{Site, site};
use crate::daemon::Settings;
use crate::manner::Manner;
use crate::random::Random;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Theme {
    Any,
    /// Volumes are resized often while clients use their ends.
    Sizes,
    /// There is little memory, a disk does not complete requests, and its clients submit more than
    /// memory has room for.
    Crowd,
    /// Overlays above a base; their snapshots.
    Overlays,
}

const OVERLAYS: [(Event, u64); 20] = [
    (Event::Snapshot, 20),
    (Event::DeleteSnapshot, 10),
    (Event::OpenSnapshot, 10),
    (Event::ReadSnapshot, 20),
    (Event::Flush, 5),
    (Event::Flatten, 3),
    (Event::Commit, 5),
    (Event::Cancel, 3),
    (Event::BadSyncs, 2),
    (Event::Idle, 5),
    (Event::Resize, 8),
    (Event::Hang, 4),
    (Event::Pressure, 6),
    (Event::Leave, 12),
    (Event::Parameters, 3),
    (Event::Reload, 6),
    (Event::Opening, 2),
    (Event::Kill, 6),
    (Event::PowerCut, 5),
    (Event::Stop, 4),
];

const SIZES: [(Event, u64); 9] = [
    (Event::Resize, 50),
    (Event::Leave, 20),
    (Event::Faults, 8),
    (Event::Hang, 4),
    (Event::Pressure, 5),
    (Event::Reload, 3),
    (Event::Kill, 2),
    (Event::PowerCut, 2),
    (Event::Stop, 2),
];

const CROWD: [(Event, u64); 6] = [
    (Event::Hang, 20),
    (Event::Pressure, 10),
    (Event::Leave, 10),
    (Event::Reload, 5),
    (Event::Kill, 2),
    (Event::Stop, 2),
];

impl Theme {
    pub(super) fn draw(seed: u64, random: &mut Random) -> Theme {
        if seed % 5 == 4 {
            return Theme::Overlays;
        }
        match random.below(20) {
            0..3 => Theme::Sizes,
            3 => Theme::Crowd,
            _ => Theme::Any,
        }
    }

    fn volumes(self, random: &mut Random) -> u64 {
        let least = if self == Theme::Crowd { 2 } else { 1 };
        random.between(least, 4)
    }

    /// The volumes of a world.
    pub(super) fn sites(self, random: &mut Random) -> Vec<Site> {
        if self == Theme::Overlays {
            return overlays::sites(random);
        }
        (0..self.volumes(random)).map(|number| self.site(number, random)).collect()
    }

    /// A volume; it has a disk unless the theme is [`Theme::Any`].
    fn site(self, number: u64, random: &mut Random) -> Site {
        loop {
            let mut site = site(number, random);
            if self == Theme::Crowd {
                // Volumes that are configured to share a device share its limit when it does not
                // complete requests.
                site.config.bdi = None;
            }
            if self == Theme::Any || site.disk().is_some() {
                return site;
            }
        }
    }

    /// With [`Theme::Crowd`] the first disk does not complete requests from the beginning.
    pub(super) fn begin(self, sites: &mut [Site]) {
        if let (Theme::Crowd, Some(first)) = (self, sites.first_mut()) {
            first.disk().into_iter().for_each(|disk| disk.hang());
            (first.hangs, first.hung) = (true, true);
            first.judge(ebb_mem::clock::now());
        }
    }

    /// How many times the usual limit a request may take: with [`Theme::Crowd`], what was submitted
    /// to the disk that hung is written at the rate measured for it, which is unknown at first.
    pub(super) fn patience(self, site: usize) -> u32 {
        if (self, site) == (Theme::Crowd, 0) { 3 } else { 1 }
    }

    /// Its events, their mean interval in microseconds, and when they begin.
    pub(super) fn events(
        self,
        random: &mut Random,
        begin: Instant,
    ) -> (Vec<(Event, u64)>, u64, Instant) {
        match self {
            // Each world has only some of the events, so that in some worlds rare ones coincide.
            Theme::Any => {
                let events = EVENTS.into_iter().filter(|_| random.chance(60)).collect();
                (events, random.pick(&[200, 2_000, 20_000, 200_000]), begin)
            }
            Theme::Overlays => {
                let events = OVERLAYS.into_iter().filter(|_| random.chance(70)).collect();
                (events, random.pick(&[1_000, 5_000, 20_000]), begin)
            }
            Theme::Sizes => (SIZES.to_vec(), random.pick(&[200, 1_000, 5_000]), begin),
            // Longer than any request may wait.
            Theme::Crowd => (CROWD.to_vec(), 200_000, begin + Duration::from_secs(8)),
        }
    }

    pub(super) fn settings(self, random: &mut Random) -> Settings {
        match self {
            Theme::Any | Theme::Sizes | Theme::Overlays => Settings::draw(random),
            Theme::Crowd => Settings::draw_small(random),
        }
    }

    /// The behaviour of a client of this volume.
    pub(super) fn manner(self, site: usize, random: &mut Random, sectors: usize) -> Manner {
        match (self, site) {
            (Theme::Overlays, 0) => Manner::reader(random, sectors),
            (Theme::Overlays, _) => Manner::slow(random, sectors),
            (Theme::Any, _) => Manner::draw(random, sectors),
            (Theme::Sizes, _) => Manner::at_end(random, sectors),
            (Theme::Crowd, 0) => Manner::greedy(random, sectors),
            (Theme::Crowd, _) => Manner::modest(random, sectors),
        }
    }
}
