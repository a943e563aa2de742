//! The servers of a world: their steps and events.

use std::rc::Rc;
use std::time::{Duration, Instant};

use ebb_mem::clock;

use super::World;
use super::site::Site;
use crate::daemon::Place;
use crate::random::Random;
use crate::remote::{Health, Pace, Remote};

/// The longest time for a client to reconnect: an attempt without a reply, and the longest pause
/// between two.
const RECONNECTED: Duration = Duration::from_secs(13);

/// A volume on a server, and the settings of its client.
pub(super) fn place(bytes: u64, random: &mut Random) -> Place {
    const WAYS: [&str; 4] = ["", "&reconnect=1", "&reconnect=5", "&reconnect=86400&silence=20"];
    let remote = Remote::new(usize::try_from(bytes).unwrap(), random);
    Place::Remote(remote, random.pick(&WAYS))
}

/// While the daemon waits in a handshake nothing else runs: only the servers are stepped then.
pub(super) fn step_in_handshakes(sites: &[Site]) {
    let remotes: Vec<Remote> = sites.iter().filter_map(Site::remote).cloned().collect();
    ebb_store::set_peer(Some(Rc::new(move || {
        for remote in &remotes {
            remote.step(clock::now());
        }
    })));
}

impl World {
    /// A step of each server.
    pub(super) fn serve_remotes(&mut self) -> Result<bool, String> {
        let mut busy = false;
        for site in &mut self.sites {
            let Some(remote) = site.remote().cloned() else { continue };
            busy |= remote.step(self.now);
            if let Some(wrong) = remote.wrong() {
                return Err(format!("volume {}: {wrong}", site.config.name));
            }
        }
        Ok(busy)
    }

    /// A daemon has ended: servers that are running notice that its connections are closed.
    pub(super) fn let_remotes_hear(&mut self) {
        for remote in self.sites.iter().filter_map(Site::remote) {
            remote.step(self.now);
        }
    }

    /// All are healthy from now on.
    pub(super) fn revive_remotes(&mut self) {
        let now = self.now;
        for site in &mut self.sites {
            if let Some(remote) = site.remote().cloned() {
                remote.set_pace(Pace::default());
                site.revive(&remote, now);
            }
        }
    }

    pub(super) fn apply_remote_event(&mut self) {
        let at = self.random.index(self.sites.len());
        let Some(remote) = self.sites[at].remote().cloned() else { return };
        let now = self.now;
        if remote.health() != Health::Well && self.random.chance(60) {
            self.sites[at].revive(&remote, now);
            return self.note(format_args!("server {at} is healthy again"));
        }
        let random = &mut self.random;
        match random.below(6) {
            0 | 1 => {
                let pace = Pace {
                    work_us: random.pick(&[0, 20, 500, 20_000]),
                    answer_us: random.pick(&[0, 0, 500, 20_000]),
                    bad_reads: random.pick(&[0, 0, 0, 100]),
                };
                remote.set_pace(pace);
                self.note(format_args!("server {at}: {pace:?}"));
            }
            2 => {
                remote.die(false);
                self.sites[at].strike(now);
                self.note(format_args!("server {at} is killed"));
            }
            3 => {
                remote.die(true);
                self.sites[at].strike(now);
                self.sites[at].oracle.host_crashed();
                self.note(format_args!("the host of server {at} crashes"));
            }
            4 if remote.health() == Health::Well => {
                remote.change_health(Health::Silent);
                self.sites[at].strike(now);
                self.note(format_args!("server {at} stops replying"));
            }
            5 if remote.health() == Health::Well => {
                remote.change_health(Health::Leaving);
                self.sites[at].strike(now);
                self.note(format_args!("server {at} shuts down"));
            }
            _ => {}
        }
    }
}

impl Site {
    fn strike(&mut self, now: Instant) {
        (self.hangs, self.hung) = (true, true);
        self.judge(now);
    }

    fn revive(&mut self, remote: &Remote, now: Instant) {
        let before = remote.health();
        remote.come_back();
        self.hangs = false;
        self.judge(if before == Health::Well { now } else { now + RECONNECTED });
    }
}
