//! A writeback volume recovers from a disk that failed for a while: the data of failed flushes is
//! still in memory, and is written again.
//!
//! A volume may lose data if there is no memory for that, if requests overlap, or before its first
//! successful flush. So one client has one request at a time here, after a flush.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_mem::pressure::Level;
use ebb_store::Faults;
use ebb_volume::{Mode, Volume};

use super::theme::Theme;
use super::{PATIENCE, World};
use crate::client::Client;
use crate::manner::Manner;

/// The time until other volumes have freed their memory, and a healthy disk is flushed.
const QUIET: Duration = Duration::from_secs(8);
/// More than twice what one client writes in an outage.
const MEMORY: u64 = 8 << 20;
/// Number of outages of a disk.
const OUTAGES: u64 = 3;

impl World {
    /// Has the disk of a writeback volume fail while one client uses the volume. Checks that the
    /// volume has lost nothing a while after that.
    pub(super) fn check_recovery(&mut self) -> Result<(), String> {
        let fits = |at: &usize| self.volume_alone(*at).is_some_and(|volume| !volume.is_lost());
        let all: Vec<usize> = (0..self.sites.len()).filter(fits).collect();
        // These worlds have too little memory.
        if all.is_empty() || self.theme == Theme::Crowd {
            return Ok(());
        }
        let at = self.apart.pick(&all);
        let name = self.sites[at].config.name.clone();
        let now = self.now;
        self.daemon().pressure(Level::L0, now);
        // Half of it may be unstable.
        if !self.daemon().set("cache_max", Some(MEMORY)) {
            return Err("cache_max cannot be set".to_owned());
        }
        self.wait_until(now + QUIET)?;
        let number = self.connect_alone(at)?;
        for _ in 0..OUTAGES {
            // The first one may report what an earlier life lost.
            if !self.flush_alone(number)? && !self.flush_alone(number)? {
                return Err(format!("volume {name} is healthy, but its flush fails"));
            }
            self.use_alone(number)?;
            let faults = Faults {
                flushes: 1000,
                writes: self.apart.pick(&[0, 0, 300]),
                ..Faults::default()
            };
            self.note(format_args!("the disk of {name} fails"));
            self.sites[at].set_faults(&faults, 20, 0);
            self.sites[at].fails = true;
            self.sites[at].judge(self.now);
            // Requests wait while writes are repeated.
            self.sites[at].healthy = None;
            for _ in 0..self.apart.between(1, 3) {
                self.use_alone(number)?;
                self.flush_alone(number)?;
            }
            self.sites[at].heal();
            self.sites[at].fails = false;
            self.sites[at].judge(self.now);
            self.note(format_args!("the disk of {name} is well"));
            self.wait_until(self.now + QUIET)?;
            // The first one may report writes that have failed in between.
            let flushed = self.flush_alone(number)? || self.flush_alone(number)?;
            if !flushed || self.volume_alone(at).is_none_or(|volume| volume.is_lost()) {
                return Err(format!(
                    "volume {name} does not recover: its flush succeeds {flushed}"
                ));
            }
        }
        self.leave(number);
        Ok(())
    }

    /// Returns a writeback volume that is served and has its own disk.
    fn volume_alone(&self, at: usize) -> Option<Arc<Volume>> {
        let site = &self.sites[at];
        site.disk().filter(|_| !site.config.read_only && site.listed)?;
        let volume = self.daemon.as_ref()?.volume(&site.config.name)?;
        (volume.cache_mode() == Mode::Writeback).then_some(volume)
    }

    /// Connects the only client of a volume.
    fn connect_alone(&mut self, at: usize) -> Result<usize, String> {
        let number = self.client_slots.iter().position(|slot| slot.site == at);
        let number = number.expect("every volume has a client");
        let sectors = self.sites[at].oracle.sectors();
        let drawn = Manner::draw(&mut self.apart, sectors);
        let longest = drawn.longest.min(32);
        let manner = Manner { depth: 1, pause_us: 1000, flushes: 2, longest, large: 0, ..drawn };
        let (stream, random) = (self.daemon().connect(), self.apart.fork());
        let name = &self.sites[at].config.name;
        let mut client = Client::new(stream, name, manner, random, self.now);
        client.quiet = true;
        self.client_slots[number].client = Some(client);
        let serving = |client: &Client| client.is_serving();
        self.await_client(number, serving)?;
        Ok(number)
    }

    /// Has the client send some requests.
    fn use_alone(&mut self, number: usize) -> Result<(), String> {
        let count = self.apart.between(1, 30);
        let client = self.client_slots[number].client.as_mut().expect("it is connected");
        client.quiet = false;
        let until = client.answered + count;
        self.await_client(number, |client| client.answered >= until)?;
        if let Some(client) = &mut self.client_slots[number].client {
            client.quiet = true;
        }
        self.await_client(number, |client| client.open() == 0)
    }

    /// Returns true if a flush succeeds.
    fn flush_alone(&mut self, number: usize) -> Result<bool, String> {
        let site = &mut self.sites[self.client_slots[number].site];
        let client = self.client_slots[number].client.as_mut().expect("it is connected");
        let before = client.succeeded;
        client.flush(&mut site.oracle, self.now);
        self.await_client(number, |client| client.open() == 0)?;
        let client = self.client_slots[number].client.as_ref();
        Ok(client.is_some_and(|client| client.succeeded > before))
    }

    fn await_client(
        &mut self,
        number: usize,
        done: impl Fn(&Client) -> bool,
    ) -> Result<(), String> {
        let end: Instant = self.now + PATIENCE;
        loop {
            match &self.client_slots[number].client {
                None => return Err(format!("client {number} was disconnected")),
                Some(client) if done(client) => return Ok(()),
                Some(client) if self.now > end => {
                    return Err(format!("a client waits too long: {}", client.describe()));
                }
                Some(_) => self.step()?,
            }
        }
    }
}
