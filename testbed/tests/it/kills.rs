//! The daemon and its broker are killed (SIGKILL) at random moments under vhost-user guests, NBD
//! clients and operations, on overlays and plain volumes in all cache modes: no flushed byte is
//! lost, no flush succeeds over a loss, no request is carried out on a foreign store, and each
//! request of a guest is completed once.

mod client;
mod control;
mod disk;
mod guest;
mod operations;
mod vmm;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use testbed::harness::pattern::{Random, content};
use testbed::harness::process::{PATIENCE, broker_of, until};
use testbed::harness::server::Setup;
use testbed::{Error, Result, Server, check};

use client::NbdClient;
use control::{Control, Phase, count, obey};
use disk::{Cache, Disk, LOADED, SLOT, User};
use guest::GuestMember;
use operations::{GOLDEN, Operator};

/// The stamp of the base, as of a volume with the number 1.
const GOLDEN_STAMP: u64 = 1 << 40 | 1;
/// Rounds from one verification of everything to the next.
const ROUNDS: u64 = 4;

struct World<'a> {
    server: Server,
    config: PathBuf,
    control: &'a Control,
    disks: &'a [Disk],
    random: Random,
    killed: u64,
    brokers_killed: u64,
}

/// The configuration; `exchanged` exchanges the stores of the two guests of each cache mode.
fn configuration(folder: &Path, disks: &[Disk], exchanged: bool) -> String {
    let golden = folder.join("golden.raw");
    let mut text =
        format!("[volume.{GOLDEN}]\nstore = \"file:{}\"\nread_only = true\n", golden.display());
    for disk in disks {
        let user = match disk.user {
            User::Split if exchanged => User::Packed,
            User::Packed if exchanged => User::Split,
            user => user,
        };
        let on = disks.iter().find(|other| other.user == user && other.cache == disk.cache);
        let file = folder.join(format!("{}.img", on.map_or("", |on| &on.name)));
        text += &format!(
            "[volume.{}]\nstore = \"file:{}\"\ncache = \"{}\"\n",
            disk.name,
            file.display(),
            disk.cache.name()
        );
        if disk.is_overlay() {
            text += &format!("base = \"{GOLDEN}\"\ncreate = true\n");
        }
    }
    text
}

fn start(disks: &[Disk]) -> Result<(Server, PathBuf)> {
    let setup = Setup::new()?;
    let golden = content(GOLDEN_STAMP, 0, LOADED);
    let write =
        |name: &str| fs::write(setup.dir().join(name), &golden).map_err(Error::io("write a disk"));
    write("golden.raw")?;
    for disk in disks.iter().filter(|disk| !disk.is_overlay()) {
        write(&format!("{}.img", disk.name))?;
    }
    let state = setup.dir().join("state");
    fs::create_dir(&state).map_err(Error::io("make the state directory"))?;
    let config = setup.dir().join("ebbd.toml");
    fs::write(&config, configuration(setup.dir(), disks, false))
        .map_err(Error::io("write the configuration"))?;
    let setup = setup.log_level("warn").vhost_user().args(["--workers", "2", "--config"]);
    let server = setup.arg(&config).arg("--state").arg(state).start()?;
    Ok((server, config))
}

impl World<'_> {
    /// Lets all work for a while: until they connect, have requests completed, or an operation is
    /// on its way.
    fn work(&mut self) -> Result {
        let counts = &self.control.counts;
        let (counted, more) = match self.random.below(4) {
            0 => (&counts.requests, 0),
            1 => (&counts.requests, self.random.below(600)),
            _ if self.control.is_broker_killed() => (&counts.requests, self.random.below(200)),
            _ => (&counts.begun, 1 + self.random.below(3)),
        };
        let enough = count(counted) + more;
        until("requests and operations", PATIENCE, || {
            self.control.pause(Duration::ZERO)?;
            Ok((count(counted) >= enough).then_some(()))
        })?;
        self.control.pause(Duration::from_micros(self.random.below(100_000)))
    }

    /// Everyone notes what the daemon has acknowledged before it ended.
    fn note_end(&mut self) -> Result {
        self.control.carry_out(Phase::Down)?;
        for disk in self.disks.iter().filter(|disk| disk.user == User::Nbd) {
            let mut ledger = disk.ledger();
            if !self.control.is_stopped() {
                ledger.killed();
            }
            ledger.disconnected();
        }
        self.control.broker_killed.store(false, Ordering::SeqCst);
        self.control.ending.store(false, Ordering::SeqCst);
        self.control.stopped.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn kill_daemon(&mut self) -> Result {
        self.server.healthy()?;
        self.control.ending.store(true, Ordering::SeqCst);
        self.server.kill9()?;
        self.killed += 1;
        self.note_end()
    }

    /// The daemon says that its broker has ended, and serves on. Then it is stopped or killed.
    fn kill_broker(&mut self) -> Result {
        let broker = broker_of(self.server.pid()?)?;
        self.control.broker_killed.store(true, Ordering::SeqCst);
        kill_process(broker, Signal::KILL)
            .map_err(|error| Error::unexpected(format!("kill the broker: {error}")))?;
        self.brokers_killed += 1;
        until("the daemon says so", PATIENCE, || {
            self.control.pause(Duration::ZERO)?;
            let status = self.server.operator(&["status"])?.run()?;
            // A removal that was cut off is a failing volume besides.
            Ok(status.stdout.contains("restart the daemon").then_some(()))
        })?;
        self.work()?;
        self.server.healthy()?;
        self.control.ending.store(true, Ordering::SeqCst);
        if self.random.below(2) == 0 {
            self.server.kill9()?;
        } else {
            self.control.stopped.store(true, Ordering::SeqCst);
            self.server.stop()?;
        }
        self.note_end()
    }

    /// Starts the daemon on exchanged stores: no guest goes on there.
    fn exchange_stores(&mut self) -> Result {
        let (folder, disks) = (self.server.dir().to_owned(), self.disks);
        let config = self.config.clone();
        let write = |exchanged| {
            fs::write(&config, configuration(&folder, disks, exchanged))
                .map_err(Error::io("write the configuration"))
        };
        write(true)?;
        self.server.restart()?;
        self.control.carry_out(Phase::Foreign)?;
        self.server.kill9()?;
        self.killed += 1;
        write(false)
    }

    fn verify(&mut self) -> Result {
        self.control.carry_out(Phase::Settle)?;
        self.control.carry_out(Phase::Verify)?;
        self.server.healthy()
    }

    fn rounds(&mut self, kills: u64, broker_kills: u64) -> Result {
        self.control.order(Phase::Load);
        self.work()?;
        let mut round = 0;
        while self.killed < kills || self.brokers_killed < broker_kills {
            round += 1;
            let left = [kills, broker_kills]
                .into_iter()
                .zip([self.killed, self.brokers_killed])
                .map(|(all, done)| all.saturating_sub(done));
            let [daemons, brokers]: [u64; 2] =
                left.collect::<Vec<_>>().try_into().unwrap_or([0; 2]);
            self.work()?;
            if self.random.below(daemons + brokers) < daemons {
                self.kill_daemon()?;
            } else {
                self.kill_broker()?;
            }
            match self.random.below(8) {
                0 => self.exchange_stores()?,
                1 => {
                    // In the start.
                    self.server.begin_restart()?;
                    self.control.pause(Duration::from_micros(self.random.below(200_000)))?;
                    self.server.kill9()?;
                    self.killed += 1;
                }
                _ => {}
            }
            self.server.restart()?;
            self.control.order(Phase::Load);
            if round % ROUNDS == 0 {
                self.work()?;
                self.verify()?;
                self.control.order(Phase::Load);
            }
        }
        self.work()?;
        self.verify()?;
        self.server.stop()
    }
}

fn run(seed: u64, kills: u64, broker_kills: u64) -> Result {
    let mut disks = Vec::new();
    for cache in Cache::ALL {
        for user in [User::Nbd, User::Split, User::Packed] {
            disks.push(Disk::new(2 + disks.len() as u64, cache, user, GOLDEN_STAMP));
        }
    }
    let (server, config) = start(&disks)?;
    let mut random = Random::new(seed);
    let clients = disks.iter().filter(|disk| disk.user == User::Nbd).count();
    let control = Control::new(disks.len() + clients + 1);
    let folder = server.dir().to_owned();
    let (control, disks) = (&control, disks.as_slice());
    std::thread::scope(|scope| {
        for disk in disks {
            if disk.user == User::Nbd {
                let slots = LOADED / SLOT;
                for slots in [0..slots / 2, slots / 2..slots] {
                    let (socket, random) = (server.socket(), Random::new(random.next()));
                    let client = NbdClient::new(control, disk, socket, slots, random);
                    scope.spawn(move || obey(client, control));
                }
            } else {
                let (socket, random) =
                    (server.vhost_socket(&disk.name), Random::new(random.next()));
                let guest = GuestMember::new(control, disk, socket, random);
                scope.spawn(move || obey(guest, control));
            }
        }
        let random_of_operator = Random::new(random.next());
        let operator = Operator::new(control, disks, folder, random_of_operator, GOLDEN_STAMP);
        scope.spawn(move || obey(operator, control));
        let (killed, brokers_killed) = (0, 0);
        let mut world = World { server, config, control, disks, random, killed, brokers_killed };
        let done = world.rounds(kills, broker_kills);
        // Clients end with the daemon.
        let ended = world.server.kill9();
        control.order(Phase::End);
        done.and(ended)?;
        report(&world)
    })
}

#[expect(clippy::print_stdout, reason = "the summary, shown with --nocapture")]
fn report(world: &World<'_>) -> Result {
    let counts = &world.control.counts;
    println!(
        "{} kills of the daemon and {} of the broker: {} requests, {} of guests cut, {} sectors compared; {} operations, {} \
         cut; {} losses told, {} resets, {} flushes after kills, {} guests refused on foreign stores",
        world.killed,
        world.brokers_killed,
        count(&counts.requests),
        count(&counts.requests_cut),
        count(&counts.sectors),
        count(&counts.operations),
        count(&counts.operations_cut),
        count(&counts.losses),
        count(&counts.resets),
        count(&counts.flushes_after_kills),
        count(&counts.refused),
    );
    let promised: usize = world.disks.iter().map(|disk| disk.ledger().promised()).sum();
    // A test that did next to nothing proves nothing.
    check(promised > 1000 && count(&counts.requests_cut) > 0, || {
        format!("only {promised} sectors promised, {} requests cut", count(&counts.requests_cut))
    })
}

#[test]
fn kills_lose_nothing_flushed_and_reach_no_foreign_store() -> Result {
    let (kills, broker_kills) = (seeded::scaled(15).max(2), seeded::scaled(5));
    let seed = seeded::seed("EBBD_TEST_SEED", 0xebb_d00a);
    run(seed, kills, broker_kills)
        .map_err(|error| Error::unexpected(format!("EBBD_TEST_SEED={seed}: {error}")))
}
