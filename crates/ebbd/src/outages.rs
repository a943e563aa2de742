//! Logs outages of stores: once a second it samples the store of each volume, and writes a line when the connection to
//! its server is lost, when it does not reply, when requests fail, and when each of these ends. A request only updates
//! two counters for it.
//!
//! A local store without requests and without an outage is at rest (`StoreHealth::rest`) and not sampled: of thousands of
//! idle volumes a sample costs nothing. All are sampled when a store was woken, when volumes were added or removed, and
//! once a minute in any case.
//!
//! Each kind of outage of a volume has a limit of lines, and all volumes together have one, so that neither a broken
//! disk nor a server of a thousand volumes fills the log; the next line counts the omitted ones.

mod store_outage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ebb_api::stat::OutageStat;
use ebb_control::figures::worst_remote;
use ebb_volume::{FailedKind, LogLimit, Store, StoreHealth, StoreState, Volume, Volumes};

use crate::engine::StableFailure;
use store_outage::{OutageEvent, StoreHistory, StoreSample};

/// How many samples leave out stores at rest until one has all.
const SAMPLES: u32 = 60;
/// Limit of the lines of all volumes together, and its period.
const ALL_LINES: u32 = 50;
const ALL_PERIOD: Duration = Duration::from_secs(10);

/// The outages of the last sample, by volume.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outages(Arc<Mutex<BTreeMap<String, OutageStat>>>);

impl Outages {
    fn set(&self, outages: BTreeMap<String, OutageStat>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = outages;
    }

    /// That of a volume, if its store has one.
    pub(crate) fn of(&self, volume: &str) -> Option<OutageStat> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(volume).cloned()
    }
}

/// A volume, and the history of its stores: an overlay has several, and fails with each of them.
struct KnownVolume {
    volume: Weak<Volume>,
    history: StoreHistory,
    /// The failures of the store of each layer, from the top on.
    failures: Vec<u64>,
    /// The layer whose store has failed last.
    failing: usize,
}

impl KnownVolume {
    fn new(volume: &Arc<Volume>, now: Instant) -> KnownVolume {
        let (volume, history) = (Arc::downgrade(volume), StoreHistory::new(now));
        KnownVolume { volume, history, failures: Vec::new(), failing: 0 }
    }

    /// Notes the failures of each layer, and which layer has failed last.
    fn note_failures(&mut self, failures: Vec<u64>) {
        let known = |layer: usize| self.failures.get(layer).copied().unwrap_or(0);
        let failed = failures.iter().enumerate().find(|(layer, count)| **count > known(*layer));
        if let Some((layer, _)) = failed {
            self.failing = layer;
        }
        self.failures = failures;
    }
}

/// The stores of one sample: volumes may have lower layers in common, and each store is checked
/// once.
#[derive(Default)]
struct SampledStores {
    unanswered: BTreeMap<usize, u64>,
    rest: BTreeMap<usize, bool>,
}

impl SampledStores {
    fn unanswered(&mut self, health: &StoreHealth) -> u64 {
        *self.unanswered.entry(Self::key(health)).or_insert_with(|| health.check_unanswered())
    }

    fn rest(&mut self, health: &StoreHealth) -> bool {
        *self.rest.entry(Self::key(health)).or_insert_with(|| health.rest())
    }

    fn key(health: &StoreHealth) -> usize {
        std::ptr::from_ref(health).addr()
    }
}

/// The remote stores of a volume as one: the worst of them, with the connections that all have lost
/// and made again.
fn remote_of(volume: &Volume) -> Option<StoreState> {
    let states = volume.layer_states();
    let sum = |of: fn(&StoreState) -> u64| states.iter().map(of).sum::<u64>();
    let (lost, reconnects) = (sum(|state| state.lost), sum(|state| state.reconnects));
    let offline = volume.is_offline();
    worst_remote(volume).map(|worst| StoreState { lost, reconnects, offline, ..worst })
}

/// Logs outages of the volumes, and shows them in [`Outages`].
pub(crate) struct OutageMonitor {
    histories: BTreeMap<Arc<str>, KnownVolume>,
    /// The volumes of the last sample whose stores are not at rest.
    active: BTreeSet<Arc<str>>,
    /// `StoreHealth::woken` and `Volumes::changes` before the last sample of all stores; `None` before the first.
    seen: Option<(u64, u64)>,
    /// Samples since that one.
    samples: u32,
    limit: LogLimit,
    outages: Outages,
}

impl OutageMonitor {
    /// A monitor that shows outages in `outages`.
    pub(crate) fn new(outages: Outages) -> OutageMonitor {
        OutageMonitor {
            histories: BTreeMap::new(),
            active: BTreeSet::new(),
            seen: None,
            samples: 0,
            limit: LogLimit::new(ALL_LINES, ALL_PERIOD),
            outages,
        }
    }

    /// Takes a sample; due each second.
    pub(crate) fn sample(&mut self, volumes: &Volumes) {
        // Before the sample: a store that is woken meanwhile is in the next one.
        let seen = Some((StoreHealth::woken(), volumes.changes()));
        self.samples += 1;
        if seen != self.seen || self.samples >= SAMPLES {
            (self.seen, self.samples) = (seen, 0);
            self.sample_these(volumes.list().into_iter());
            self.histories.retain(|_, known| known.volume.strong_count() > 0);
        } else if !self.active.is_empty() {
            let active = std::mem::take(&mut self.active);
            self.sample_these(active.iter().filter_map(|name| Some(volumes.get(name)?.volume)));
        }
    }

    fn sample_these(&mut self, volumes: impl Iterator<Item = Arc<Volume>>) {
        let now = ebb_io::clock::now();
        let mut stores = SampledStores::default();
        self.active.clear();
        for volume in volumes {
            let layers = volume.each_health(|health| {
                health.map(|health| (stores.unanswered(health), health.failures()))
            });
            if layers.iter().all(Option::is_none) {
                continue;
            }
            let (mut unanswered, mut failures) = (0, [0; 3]);
            for (waiting, failed) in layers.iter().flatten() {
                unanswered += waiting;
                failures.iter_mut().zip(failed).for_each(|(sum, count)| *sum += count);
            }
            let sample = StoreSample { now, unanswered, failures, remote: remote_of(&volume) };
            if sample.remote.as_ref().is_some_and(|remote| remote.offline) {
                volume.refuse_offline();
            }
            let fresh = || KnownVolume::new(&volume, now);
            let known = self.histories.entry(volume.name().clone()).or_insert_with(fresh);
            if !is_same(&known.volume, &volume) {
                *known = fresh();
            }
            let of_layer = |layer: Option<(u64, [u64; 3])>| {
                layer.map_or(0, |(_, failed)| failed.iter().sum::<u64>())
            };
            known.note_failures(layers.into_iter().map(of_layer).collect());
            for event in known.history.sample(&sample) {
                let on = SampledVolume { volume: &volume, sample: &sample, failing: known.failing };
                if event.is_end() {
                    on.log_event(&event, 0);
                } else if let Some(left_out) = self.limit.admit(now) {
                    on.log_event(&event, left_out);
                }
            }
            // The connections of a remote store may be lost without a request.
            let may_rest = sample.remote.is_none() && known.history.is_clear();
            // Each store of it is put to rest.
            let rest = |health: Option<&StoreHealth>| health.is_none_or(|one| stores.rest(one));
            let rests = may_rest && volume.each_health(rest).into_iter().all(|rests| rests);
            if !rests {
                self.active.insert(volume.name().clone());
            }
        }
        let present = self.active.iter().filter_map(|name| {
            let known = self.histories.get(name)?;
            let mut outage = known.history.outage(now)?;
            if outage.failed > 0 {
                let volume = known.volume.upgrade();
                if let Some(volume) = volume {
                    let remedy = remedy_of(&volume, known.failing);
                    outage.remedy = remedy.unwrap_or_default().to_owned();
                    if volume.layers().depth() > 1 {
                        outage.place = failing_place(&volume, known.failing);
                    }
                }
            }
            Some((name.to_string(), outage))
        });
        self.outages.set(present.collect());
    }
}

fn is_same(known: &Weak<Volume>, volume: &Arc<Volume>) -> bool {
    std::ptr::eq(known.as_ptr(), Arc::as_ptr(volume))
}

/// The remedy for requests that fail because their server is not connected, if it is not.
fn unconnected_remedy(remote: &StoreState) -> Option<&'static str> {
    let is_down = remote.connections == 0 && remote.last_error.is_some();
    is_down.then_some(match remote.is_reached {
        true => "correct the server or its export, as the reason says",
        false => "start the server, or restore the network",
    })
}

/// The remedy of the last failure of a layer's store, if its kind has one.
fn remedy_of(volume: &Volume, layer: usize) -> Option<&'static str> {
    let remedies = volume.each_health(|health| health.and_then(StoreHealth::remedy));
    remedies.into_iter().nth(layer).flatten()
}

/// The file or server of the layer of a volume that has failed last.
fn failing_place(volume: &Volume, failing: usize) -> String {
    let below = || volume.layers().below().into_iter().nth(failing.checked_sub(1)?);
    below().map_or_else(|| volume.place(), |layer| layer.place)
}

/// The text and the remedy of requests that have failed, of a volume all of whose acknowledged data
/// may be stable.
fn failure_text(kind: FailedKind, is_stable: bool) -> (&'static str, &'static str) {
    match (kind, is_stable) {
        (FailedKind::Read, _) => ("reading failed", "check the log of the kernel or the server"),
        (FailedKind::Write, _) => {
            ("writing failed", "check the free space, and the log of the kernel or the server")
        }
        (FailedKind::Flush, true) => (
            "a flush failed; all data that this daemon has acknowledged is stable",
            "check the log of the kernel or the server",
        ),
        (FailedKind::Flush, false) => (
            "a flush failed, and data written before it may be lost",
            "check the log of the kernel or the server, and the data",
        ),
    }
}

/// A volume with an event.
struct SampledVolume<'a> {
    volume: &'a Volume,
    sample: &'a StoreSample,
    /// The layer whose store has failed last.
    failing: usize,
}

impl SampledVolume<'_> {
    /// Writes the line of an event.
    fn log_event(&self, event: &OutageEvent, left_out: u64) {
        let SampledVolume { volume, sample, .. } = self;
        let name = &**volume.name();
        let store = match &sample.remote {
            // The one below an overlay in a file.
            Some(remote) if volume.store_state().is_none() => remote.address.clone(),
            _ => volume.place(),
        };
        let left_out = (left_out > 0).then_some(left_out);
        let reason = || {
            let last = sample.remote.as_ref().and_then(|remote| remote.last_error.clone());
            last.unwrap_or_else(|| "unknown".to_owned())
        };
        match event {
            OutageEvent::Lost { .. }
                if sample.remote.as_ref().is_some_and(|remote| remote.offline) =>
            {
                tracing::error!(
                    volume = name,
                    store,
                    left_out,
                    reason = reason(),
                    "the volume is offline: its requests fail, and what was not flushed is not written: check which client \
                 writes to the image, then remove and add the volume, or restart ebbd"
                );
            }
            OutageEvent::Lost { earlier } => tracing::warn!(
                volume = name,
                store,
                earlier,
                left_out,
                reason = reason(),
                "the connection to the server was lost; requests wait for it for the time set with `reconnect`: \
             check that the server runs and can be reached"
            ),
            OutageEvent::LostBriefly { times, earlier } => tracing::warn!(
                volume = name,
                store,
                times,
                earlier,
                left_out,
                reason = reason(),
                "the connection to the server was lost and made again at once: check the server's log"
            ),
            OutageEvent::Reconnected { after } => tracing::warn!(
                volume = name,
                store,
                seconds = after.as_secs(),
                "connected to the server again"
            ),
            OutageEvent::NotConnected { requests, waited, earlier } => tracing::warn!(
                volume = name,
                store,
                requests,
                seconds = waited.as_secs(),
                earlier,
                left_out,
                reason = reason(),
                "cannot connect to the server; requests wait for it for the time set with `reconnect`: \
             check that the server runs and can be reached"
            ),
            OutageEvent::NoReply { requests, waited, earlier } => {
                let seconds = waited.as_secs();
                let remedy = match &sample.remote {
                    Some(_) if store.starts_with("rbd:") => "check `ceph status`",
                    Some(_) => {
                        "check whether the server hangs; with `?silence=SECONDS` in the address of the store, ebbd makes a \
                     connection without replies anew"
                    }
                    None => "check the kernel's log (dmesg) for the device of this file",
                };
                tracing::warn!(
                    volume = name,
                    store,
                    requests,
                    earlier,
                    left_out,
                    "no reply for {seconds} s: {remedy}"
                );
            }
            OutageEvent::RepliesAgain { after, failed } => tracing::warn!(
                volume = name,
                store,
                seconds = after.as_secs(),
                failed,
                "the requests without a reply have completed"
            ),
            OutageEvent::Fails { kind, count } => self.log_failures(*kind, *count, left_out),
            OutageEvent::FailsNoMore { failed } => tracing::warn!(
                volume = name,
                store,
                failed,
                "no request has failed for {} s",
                store_outage::QUIET_AFTER.as_secs()
            ),
        }
    }

    /// Writes the line of requests that have failed.
    fn log_failures(&self, kind: FailedKind, count: u64, left_out: Option<u64>) {
        let SampledVolume { volume, failing, .. } = self;
        let of_layer = |health: Option<&StoreHealth>| health.and_then(|one| one.recent_error(kind));
        let reason = volume.each_health(of_layer).into_iter().nth(*failing).flatten();
        let remote = volume.layers().each_store(Store::state).into_iter().nth(*failing).flatten();
        let is_stable = StableFailure::is_it(volume);
        // Data that a flush should have made stable is to be checked, whatever the cause.
        let remote = remote.filter(|_| kind != FailedKind::Flush || is_stable);
        let unconnected = || unconnected_remedy(remote.as_ref()?);
        let (what, remedy) = failure_text(kind, is_stable);
        let remedy = remedy_of(volume, *failing).or_else(unconnected).unwrap_or(remedy);
        tracing::warn!(
            volume = &**volume.name(),
            store = failing_place(volume, *failing),
            count,
            left_out,
            reason = reason.unwrap_or_default(),
            "{what}: {remedy}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_flush_without_data_at_risk_reports_no_loss() {
        let (what, remedy) = failure_text(FailedKind::Flush, true);
        assert!(!what.contains("lost") && !remedy.contains("data"), "{what}: {remedy}");
        let (what, remedy) = failure_text(FailedKind::Flush, false);
        assert!(what.contains("may be lost") && remedy.contains("the data"), "{what}: {remedy}");
    }

    #[test]
    fn remedy_of_a_lost_connection_is_the_server_and_not_its_space() {
        let error = Some("cannot connect".to_owned());
        let down = StoreState { last_error: error, ..StoreState::default() };
        assert!(unconnected_remedy(&down).unwrap().starts_with("start the server"));
        let reached = StoreState { is_reached: true, ..down.clone() };
        assert!(unconnected_remedy(&reached).unwrap().contains("its export"));
        for up in [StoreState { connections: 1, ..down }, StoreState::default()] {
            assert_eq!(unconnected_remedy(&up), None);
        }
    }
}
