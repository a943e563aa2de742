//! The theme of a world: most may have any event; some concentrate on situations that are rare otherwise.

use std::time::{Duration, Instant};

use ebb_volume::Mode;

use super::events::{EVENTS, Event};
use super::site::{Site, disk_site_of, site};
use super::{changes, encrypted, mounts, overlays};
use crate::daemon::{Place, Settings};
use crate::manner::Manner;
use crate::oracle::{Oracle, SECTOR};
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
    /// Large requests to disks that fail.
    Large,
    /// Overlays above a base; their snapshots.
    Overlays,
    /// Overlays that are added at run time and committed.
    Commits,
    /// KVM guests over vhost-user, whose daemons end often.
    Kvm,
    /// Volumes are added, renamed and removed.
    Changes,
    /// The same, with a broker that ends or hangs.
    Broker,
    /// Encrypted volumes.
    Encrypted,
    /// Daemons hand their clients over to successors.
    Handover,
    /// File systems come and go, and the configuration has mistakes.
    Mounts,
}

const KVM: [(Event, u64); 14] = [
    (Event::Kvm, 40),
    (Event::Faults, 8),
    (Event::Hang, 4),
    (Event::Remote, 6),
    (Event::Lose, 5),
    (Event::Pressure, 6),
    (Event::Leave, 5),
    (Event::Parameters, 3),
    (Event::Reload, 8),
    (Event::Resize, 4),
    (Event::Opening, 2),
    (Event::Kill, 12),
    (Event::PowerCut, 2),
    (Event::Stop, 6),
];

const OVERLAYS: [(Event, u64); 23] = [
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
    (Event::Faults, 6),
    (Event::Lose, 6),
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
    (Event::Clone, 30),
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

const LARGE: [(Event, u64); 9] = [
    (Event::Faults, 40),
    (Event::Parameters, 15),
    (Event::Lose, 6),
    (Event::Leave, 10),
    (Event::Pressure, 5),
    (Event::Reload, 5),
    (Event::Kill, 3),
    (Event::PowerCut, 3),
    (Event::Stop, 2),
];

const COMMITS: [(Event, u64); 10] = [
    (Event::Commit, 40),
    (Event::Cancel, 3),
    (Event::Flush, 5),
    (Event::Resize, 3),
    (Event::Faults, 4),
    (Event::Leave, 10),
    (Event::Pressure, 3),
    (Event::Kill, 3),
    (Event::PowerCut, 2),
    (Event::Stop, 1),
];

const CHANGES: [(Event, u64); 14] = [
    (Event::Names, 60),
    (Event::Damage, 4),
    (Event::OtherState, 3),
    (Event::State, 10),
    (Event::Reload, 8),
    (Event::Leave, 10),
    (Event::Faults, 4),
    (Event::Hang, 3),
    (Event::Lose, 2),
    (Event::Opening, 2),
    (Event::Pressure, 3),
    (Event::Kill, 8),
    (Event::PowerCut, 5),
    (Event::Stop, 4),
];

const MOUNTS: [(Event, u64); 10] = [
    (Event::Mount, 30),
    (Event::Mistake, 15),
    (Event::Health, 10),
    (Event::Reload, 12),
    (Event::Leave, 10),
    (Event::Faults, 4),
    (Event::Pressure, 3),
    (Event::Kill, 10),
    (Event::PowerCut, 5),
    (Event::Stop, 6),
];

const ENCRYPTED: [(Event, u64); 10] = [
    (Event::Faults, 20),
    (Event::Hang, 8),
    (Event::Lose, 8),
    (Event::Pressure, 8),
    (Event::Leave, 12),
    (Event::Reload, 8),
    (Event::Opening, 3),
    (Event::Kill, 8),
    (Event::PowerCut, 8),
    (Event::Stop, 5),
];

const HANDOVER: [(Event, u64); 14] = [
    (Event::Takeover, 40),
    (Event::Faults, 6),
    (Event::Hang, 4),
    (Event::Lose, 4),
    (Event::Remote, 6),
    (Event::Pressure, 5),
    (Event::Leave, 10),
    (Event::Deaf, 6),
    (Event::Parameters, 3),
    (Event::Reload, 6),
    (Event::Opening, 3),
    (Event::Kill, 4),
    (Event::PowerCut, 6),
    (Event::Stop, 3),
];

/// Volumes of which no two have the same writes.
fn handed_sites(random: &mut Random) -> Vec<Site> {
    let count = random.between(2, 4);
    let mut sites: Vec<Site> = (0..count).map(|number| own_site(number, random)).collect();
    if random.chance(60) {
        let bytes = (sites[0].oracle.sectors() * SECTOR) as u64;
        (sites[0].config.place, sites[0].config.mode) = (Place::Memory(bytes), Mode::None);
    }
    sites
}

/// A volume whose writes no other has.
fn own_site(number: u64, random: &mut Random) -> Site {
    let mut own = site(number, random);
    own.oracle = Oracle::new(&own.config.name, own.oracle.sectors()).numbered((number + 1) << 32);
    own
}

impl Theme {
    /// Whether its daemons have a state directory.
    pub(super) fn has_state(self) -> bool {
        matches!(self, Theme::Changes | Theme::Mounts | Theme::Broker)
    }

    pub(super) fn draw(seed: u64, random: &mut Random) -> Theme {
        if seed % 5 == 4 {
            return Theme::Overlays;
        }
        if seed % 7 == 3 {
            return Theme::Kvm;
        }
        // Few, so that other worlds stay the same.
        match seed % 40 {
            7 => return Theme::Changes,
            12 => return Theme::Large,
            17 => return Theme::Mounts,
            22 => return Theme::Encrypted,
            27 => return Theme::Handover,
            32 => return Theme::Commits,
            37 => return Theme::Broker,
            _ => {}
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
        match self {
            Theme::Overlays => overlays::sites(random),
            Theme::Commits => overlays::commit_sites(random),
            Theme::Changes | Theme::Broker => changes::sites(random),
            Theme::Mounts => mounts::sites(random),
            Theme::Encrypted => encrypted::sites(random),
            Theme::Handover => handed_sites(random),
            Theme::Large => {
                let sizes = [2055, 8192];
                let count = random.between(1, 2);
                let large = |number| disk_site_of(&format!("v{number}"), &sizes, random);
                (0..count).map(large).collect()
            }
            Theme::Kvm => {
                (0..self.volumes(random)).map(|number| own_site(number, random)).collect()
            }
            Theme::Any | Theme::Sizes | Theme::Crowd => {
                (0..self.volumes(random)).map(|number| self.site(number, random)).collect()
            }
        }
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
            Theme::Commits => (COMMITS.to_vec(), random.pick(&[100_000, 300_000]), begin),
            Theme::Kvm => {
                let events =
                    KVM.into_iter().filter(|(event, _)| *event == Event::Kvm || random.chance(70));
                (events.collect(), random.pick(&[500, 2_000, 10_000, 50_000]), begin)
            }
            Theme::Changes => (CHANGES.to_vec(), random.pick(&[500, 2_000, 10_000]), begin),
            Theme::Broker => {
                let events = CHANGES.iter().copied().chain([(Event::Broker, 10)]).collect();
                (events, random.pick(&[2_000, 20_000, 200_000]), begin)
            }
            Theme::Large => (LARGE.to_vec(), random.pick(&[500, 5_000, 50_000]), begin),
            Theme::Encrypted => (ENCRYPTED.to_vec(), random.pick(&[500, 5_000, 50_000]), begin),
            Theme::Handover => (HANDOVER.to_vec(), random.pick(&[500, 2_000, 10_000]), begin),
            Theme::Mounts => (MOUNTS.to_vec(), random.pick(&[2_000, 10_000, 50_000]), begin),
            Theme::Sizes => (SIZES.to_vec(), random.pick(&[200, 1_000, 5_000]), begin),
            // Longer than any request may wait.
            Theme::Crowd => (CROWD.to_vec(), 200_000, begin + Duration::from_secs(8)),
        }
    }

    pub(super) fn settings(self, random: &mut Random) -> Settings {
        match self {
            Theme::Crowd => Settings::draw_small(random),
            _ => Settings::draw(random),
        }
    }

    /// The behaviour of a client of this volume.
    pub(super) fn manner(self, site: usize, random: &mut Random, sectors: usize) -> Manner {
        match (self, site) {
            (Theme::Overlays | Theme::Commits, 0) => Manner::reader(random, sectors),
            // Most requests come from guests.
            (Theme::Overlays | Theme::Commits | Theme::Kvm, _) => Manner::slow(random, sectors),
            (Theme::Changes | Theme::Mounts | Theme::Broker, _) if random.chance(50) => {
                Manner::slow(random, sectors)
            }
            (Theme::Sizes, _) => Manner::at_end(random, sectors),
            (Theme::Crowd, 0) => Manner::greedy(random, sectors),
            (Theme::Crowd, _) => Manner::modest(random, sectors),
            (Theme::Encrypted | Theme::Large, _) if random.chance(40) => {
                Manner::draw(random, sectors).with_large(sectors)
            }
            _ => Manner::draw(random, sectors),
        }
    }
}
