//! The health of the daemon, from its statistics: a pure function, so that each reason can be tested.

use ebb_api::stat::{
    CertificateKind, DaemonPhase, FailingGuests, OutageStat, PressureStat, RemoteCondition,
    RemoteStat, SandboxStat, Stat, VolumeCondition, VolumeStat,
};
use ebb_api::{HealthReason, HealthState, HealthView};
use ebb_config::plural;
use ebb_mem::pressure::Cause;

/// A certificate that expires within this time is a reason, seconds: 14 days.
const EXPIRES_SOON: i64 = 14 * 86_400;
/// The level of memory pressure from which it is a reason.
const PRESSURE: u8 = 2;

/// The health of the daemon with these statistics at `now`, seconds since 1970.
pub(crate) fn health(stat: &Stat, now: i64) -> HealthView {
    let stopping = stat.phase == DaemonPhase::Stopping;
    let of_volume = |volume| of_volume(volume, stopping);
    let mut reasons: Vec<HealthReason> = stat.volumes.iter().flat_map(of_volume).collect();
    reasons.extend(of_daemon(stat, now));
    // Stable, so that reasons of the same kind stay in the order of volumes.
    reasons.sort_by_key(|reason| reason.state != HealthState::Failing);
    let state = reasons.first().map_or(HealthState::Ok, |worst| {
        if worst.state == HealthState::Failing {
            HealthState::Failing
        } else {
            HealthState::Degraded
        }
    });
    // A volume whose store does not work is no good to its clients, although they may connect to it.
    let serving = |volume: &&VolumeStat| volume.state == VolumeCondition::Serving;
    let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    let more = reasons.len().saturating_sub(HealthView::MAX_REASONS);
    reasons.truncate(HealthView::MAX_REASONS);
    HealthView {
        state,
        reasons,
        more: count(more),
        serving: count(stat.volumes.iter().filter(serving).count()),
        volumes: count(stat.volumes.len()),
    }
}

/// Why the daemon is not ready, if it is not: each volume was tried once, and the sockets listen.
pub(crate) fn not_ready(stat: &Stat) -> Option<String> {
    if let Some(failed) = stat.sandbox.iter().find(|part| part.remedy.is_some()) {
        return Some(failed.detail.clone());
    }
    let opening =
        stat.volumes.iter().filter(|volume| volume.state == VolumeCondition::Opening).count();
    match (stat.phase, opening) {
        (DaemonPhase::Stopping, _) => Some("the daemon is stopping".to_owned()),
        (DaemonPhase::Starting, _) => Some("the daemon is starting".to_owned()),
        (_, 0) => None,
        (_, 1) => Some("1 volume is being opened for the first time".to_owned()),
        (_, opening) => Some(format!("{opening} volumes are being opened for the first time")),
    }
}

fn reason(
    state: HealthState,
    kind: &str,
    message: impl Into<String>,
    remedy: &str,
) -> HealthReason {
    HealthReason {
        state,
        kind: kind.to_owned(),
        message: message.into(),
        remedy: remedy.to_owned(),
        ..HealthReason::default()
    }
}

fn of_volume(volume: &VolumeStat, stopping: bool) -> Vec<HealthReason> {
    let (failing, degraded) = (HealthState::Failing, HealthState::Degraded);
    let mut found = Vec::new();
    if let Some(failure) = &volume.failure {
        let message = format!("it is not served: {}", failure.reason);
        let name = &volume.name;
        let remedy = match failure.next_seconds {
            None if failure.removed => {
                format!("run `ebbd volume remove {name}` again, or the next start serves it")
            }
            Some(_) => "correct the cause: it is tried again by itself; a corrected configuration needs `ebbd reload`"
                    .to_owned(),
            // Its file in the state directory cannot be used.
            None => format!(
                "correct the file and run `ebbd reload`, or remove it with `ebbd volume remove {name}`"
            ),
        };
        let since_seconds = Some(failure.since_seconds);
        found.push(HealthReason {
            since_seconds,
            ..reason(failing, "volume_not_served", message, &remedy)
        });
    } else if volume.state == VolumeCondition::Opening {
        let (message, remedy) = match &volume.waits_for {
            Some(what) => (format!("it is not served yet: {what}"), "check that if this lasts"),
            None => {
                let message = "its store is being opened, and has not replied yet";
                (message.to_owned(), "check its store if this lasts")
            }
        };
        found.push(reason(degraded, "volume_opening", message, remedy));
    } else if volume.state == VolumeCondition::Closing {
        let dirty = volume.cache.as_ref().map_or(0, |cache| cache.dirty_bytes);
        let message = format!(
            "it is being closed: {dirty} bytes of dirty data are not written yet, and {} of its requests are in flight",
            volume.in_flight
        );
        found.push(match &volume.waits_for {
            Some(why) => {
                let message = format!("{message}; writing it has failed: {why}");
                let remedy = "correct that: it is tried again until it succeeds";
                reason(failing, "volume_closing", message, remedy)
            }
            None => {
                let (end, remedy) = match stopping {
                    true => {
                        let end = "the daemon is stopping, or hands over to its successor: ";
                        (end, "wait for that; check its store if this lasts")
                    }
                    false => ("", "check its store if this lasts"),
                };
                reason(degraded, "volume_closing", format!("{end}{message}"), remedy)
            }
        });
    }
    if let Some(loss) = &volume.loss {
        let message = format!("acknowledged writes may be lost: {}", loss.error);
        let since_seconds = Some(loss.since_seconds);
        found.push(HealthReason {
            since_seconds,
            ..reason(failing, "data_lost", message, &loss.remedy)
        });
    }
    found.extend(volume.remote.as_ref().and_then(of_remote));
    if let Some(outage) = &volume.outage {
        // A lost connection, or a silent server, is told above.
        let told =
            found.iter().any(|reason| ["remote_down", "store_silent"].contains(&&*reason.kind));
        if outage.silent_seconds > 0.0 && !told {
            let message = format!("its store has not replied for {:.0} s", outage.silent_seconds);
            let remedy = "check the disk or server: requests wait for it";
            let since_seconds = Some(outage.silent_seconds);
            found.push(HealthReason {
                since_seconds,
                ..reason(failing, "store_silent", message, remedy)
            });
        }
        if outage.failed > 0 {
            let verb = if outage.failed == 1 { "has" } else { "have" };
            let requests = plural(outage.failed, "request");
            let at = match &*outage.place {
                "" => String::new(),
                place => format!(" at {place}"),
            };
            let message = format!(
                "{requests} to its store {verb} failed{at}, the last {:.0} s ago (shown until {} s without a failure, also if it works again)",
                outage.last_failed_seconds,
                OutageStat::SHOWN_SECONDS
            );
            let remedy = match &*outage.remedy {
                "" => "see the log for the error, and check the disk or server",
                remedy => remedy,
            };
            found.push(reason(failing, "requests_fail", message, remedy));
        }
    }
    found.extend(of_guests(volume.failing_guests));
    found.iter_mut().for_each(|reason| reason.volume = Some(volume.name.clone()));
    found
}

fn of_guests(guests: FailingGuests) -> Option<HealthReason> {
    let verb = match guests.count() {
        0 => return None,
        1 => "fails",
        _ => "fail",
    };
    let count = plural(guests.count(), "guest");
    let message = format!(
        "{count} {verb} until a reset: acknowledged writes were lost, or the disk is another one"
    );
    let remedy = "see the log for the cause, check the guest's file systems, and reset the guest";
    Some(reason(HealthState::Failing, "guest_fails", message, remedy))
}

#[allow(clippy::cast_precision_loss, reason = "seconds")]
fn of_remote(remote: &RemoteStat) -> Option<HealthReason> {
    let address = &remote.address;
    if remote.condition() == RemoteCondition::Down {
        let why = remote.last_error.as_deref().unwrap_or("requests wait for the first connection");
        let message = format!("its server {address} is not connected: {why}");
        let remedy = match remote.is_reached {
            // The error has its own remedy.
            true => "correct that: ebbd connects by itself",
            false => "start the server, or restore the network: ebbd connects by itself",
        };
        return Some(HealthReason {
            since_seconds: Some(remote.since_seconds as f64),
            ..reason(HealthState::Failing, "remote_down", message, remedy)
        });
    }
    (remote.condition() == RemoteCondition::Silent).then(|| {
        let seconds = remote.silent_seconds;
        let message = format!("its server {address} has not replied for {seconds} s");
        let remedy = "check the server and its disks: requests wait for it";
        HealthReason {
            since_seconds: Some(seconds as f64),
            ..reason(HealthState::Failing, "store_silent", message, remedy)
        }
    })
}

fn of_daemon(stat: &Stat, now: i64) -> Vec<HealthReason> {
    let (failing, degraded) = (HealthState::Failing, HealthState::Degraded);
    let failed = |part: &SandboxStat| {
        let remedy = part.remedy.as_deref()?;
        Some(reason(degraded, "sandbox_failed", part.detail.as_str(), remedy))
    };
    let mut found: Vec<_> = stat.sandbox.iter().filter_map(failed).collect();
    for worker in stat.workers.iter().filter(|worker| !worker.answers) {
        let message = format!("worker {} does not answer", worker.worker);
        let remedy =
            "see whether a store hangs; if not, report this as a bug and restart the daemon";
        found.push(reason(failing, "worker_stuck", message, remedy));
    }
    for bdi in stat.bdis.iter().filter(|bdi| bdi.stuck && bdi.dirty_bytes > 0) {
        let bytes = bdi.dirty_bytes;
        let volumes = match bdi.volumes.as_slice() {
            [] => String::new(),
            [one] => format!(" of volume {one}"),
            [first, ..] => format!(" of {} volumes, as {first},", bdi.volumes.len()),
        };
        let message =
            format!("{bytes} bytes of dirty data{volumes} cannot be written (device {})", bdi.name);
        let remedy = "free space on the store, or check the disk or server: until then flushes \
                      wait or fail";
        found.push(reason(degraded, "writeback_stuck", message, remedy));
    }
    for certificate in &stat.certificates {
        let left = certificate.expires.saturating_sub(now);
        let path = &certificate.path;
        let (state, kind, message) = match left {
            i64::MIN..=0 => {
                // Some clients do not verify certificates.
                let (state, effect) = match certificate.kind {
                    CertificateKind::Authority | CertificateKind::RevocationList => {
                        (failing, "ebbd refuses every client")
                    }
                    _ => (degraded, "clients refuse it"),
                };
                (state, "certificate_expired", format!("{path} has expired: {effect}"))
            }
            1..EXPIRES_SOON => {
                let days = plural(left.unsigned_abs() / 86_400, "day");
                (degraded, "certificate_expires", format!("{path} expires in {days}"))
            }
            _ => continue,
        };
        found.push(reason(state, kind, message, "replace it, and reload the daemon"));
    }
    for path in &stat.lost_sockets {
        let message = format!("the file of the socket {path} was removed or replaced");
        let remedy = "restart the daemon: until then no client can connect there";
        found.push(reason(failing, "socket_lost", message, remedy));
    }
    for problem in &stat.problems {
        let remedy = match &*problem.remedy {
            "" => "correct it, and reload: `ebbd reload`",
            remedy => remedy,
        };
        let kind = match &*problem.kind {
            "" => "not_in_force",
            kind => kind,
        };
        found.push(HealthReason {
            volume: problem.volume.clone(),
            ..reason(degraded, kind, problem.message.as_str(), remedy)
        });
    }
    if let Some(reload) = stat.reload.as_ref().filter(|reload| !reload.success) {
        let why = reload.error.as_deref().unwrap_or("see the log");
        let message = format!("the last reload failed: {why}");
        let remedy = match &*reload.remedy {
            "" => "correct that, and reload again: `ebbd reload`",
            remedy => remedy,
        };
        found.push(reason(degraded, "reload_failed", message, remedy));
    }
    if let Some(pressure) = stat.pressure.as_ref().filter(|pressure| pressure.level >= PRESSURE) {
        let PressureStat { level, cause, .. } = pressure;
        let why = if cause.is_empty() { String::new() } else { format!(" ({cause})") };
        let message =
            format!("memory pressure L{level}{why}: caches are returned, and requests are slower");
        let is = |known: Cause| cause == known.as_str();
        let remedy = match (is(Cause::Injected), is(Cause::Easing)) {
            (true, _) => "wait until the requested time has passed, or end it: `ebbd pressure L0`",
            (_, true) => "wait until it has fallen to L0",
            _ => "free memory on this host",
        };
        found.push(HealthReason {
            since_seconds: Some(pressure.since_seconds),
            ..reason(degraded, "memory_pressure", message, remedy)
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use ebb_api::stat::{
        BdiStat, CertificateStat, FailureStat, LossStat, ProblemStat, ReloadStat, VolumeCacheStat,
        WorkerStat,
    };

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn volume(name: &str) -> VolumeStat {
        VolumeStat { name: name.into(), state: VolumeCondition::Serving, ..VolumeStat::default() }
    }

    fn well() -> Stat {
        Stat {
            volumes: vec![volume("a"), volume("b")],
            workers: vec![WorkerStat { answers: true, ..WorkerStat::default() }],
            phase: DaemonPhase::Serving,
            ..Stat::default()
        }
    }

    /// The health after one change of a healthy daemon: its state, and kind and volume of the only reason.
    fn after(change: impl FnOnce(&mut Stat)) -> (HealthState, String, Option<String>) {
        let mut stat = well();
        change(&mut stat);
        let view = health(&stat, NOW);
        let [reason] = &view.reasons[..] else { panic!("{view:?}") };
        assert_eq!(view.state, reason.state);
        assert!(!reason.message.is_empty() && !reason.remedy.is_empty(), "{reason:?}");
        (view.state, reason.kind.clone(), reason.volume.clone())
    }

    #[track_caller]
    fn assert_reason(
        state: HealthState,
        kind: &str,
        volume: Option<&str>,
        change: impl FnOnce(&mut Stat),
    ) {
        let expected = (state, kind.to_owned(), volume.map(str::to_owned));
        assert_eq!(after(change), expected);
    }

    #[test]
    fn volumes_whose_data_cannot_be_written_are_named() {
        let mut stat = well();
        let volumes = vec!["wb".to_owned()];
        let bdi = BdiStat { name: "7:0".to_owned(), volumes, ..BdiStat::default() };
        stat.bdis = vec![BdiStat { stuck: true, dirty_bytes: 9, ..bdi }];
        let view = health(&stat, NOW);
        let said = &view.reasons[0];
        assert!(said.message.contains("dirty data of volume wb cannot be written"), "{said:?}");
        assert!(said.remedy.starts_with("free space on the store"), "{said:?}");
    }

    #[test]
    fn volumes_that_close_with_the_daemon_say_so() {
        for (phase, says) in [(DaemonPhase::Stopping, true), (DaemonPhase::Serving, false)] {
            let mut stat = well();
            stat.phase = phase;
            stat.volumes[0].state = VolumeCondition::Closing;
            let view = health(&stat, NOW);
            assert_eq!(view.reasons[0].message.contains("the daemon is stopping"), says);
        }
    }

    #[test]
    fn a_daemon_whose_volumes_are_served_is_ok() {
        let view = health(&well(), NOW);
        assert_eq!((view.state, view.serving, view.volumes), (HealthState::Ok, 2, 2));
        assert!(view.reasons.is_empty());
    }

    #[test]
    fn each_reason_has_its_kind_and_state() {
        let (failing, degraded) = (HealthState::Failing, HealthState::Degraded);
        assert_reason(failing, "volume_not_served", Some("b"), |stat| {
            stat.volumes[1].state = VolumeCondition::Failed;
            stat.volumes[1].failure = Some(FailureStat::default());
        });
        assert_reason(degraded, "volume_opening", Some("a"), |stat| {
            stat.volumes[0].state = VolumeCondition::Opening;
        });
        assert_reason(degraded, "volume_closing", Some("a"), |stat| {
            stat.volumes[0].state = VolumeCondition::Closing;
        });
        assert_reason(failing, "data_lost", Some("a"), |stat| {
            let remedy = "open it anew".into();
            stat.volumes[0].loss = Some(LossStat { remedy, ..LossStat::default() });
        });
        assert_reason(failing, "guest_fails", Some("a"), |stat| {
            stat.volumes[0].failing_guests = FailingGuests { vhost: 1, xen: 0 };
        });
        assert_reason(failing, "guest_fails", Some("b"), |stat| {
            stat.volumes[1].failing_guests = FailingGuests { vhost: 0, xen: 2 };
        });
        assert_reason(failing, "remote_down", Some("a"), |stat| {
            stat.volumes[0].remote = Some(RemoteStat { in_flight: 1, ..RemoteStat::default() });
            stat.volumes[0].outage =
                Some(OutageStat { silent_seconds: 20.0, ..OutageStat::default() });
        });
        let remote =
            |silent_seconds| RemoteStat { connections: 1, silent_seconds, ..Default::default() };
        assert_reason(failing, "store_silent", Some("a"), |stat| {
            stat.volumes[0].remote = Some(remote(RemoteStat::SILENT_AFTER));
        });
        assert_reason(failing, "store_silent", Some("b"), |stat| {
            stat.volumes[0].remote = Some(remote(RemoteStat::SILENT_AFTER - 1));
            stat.volumes[1].outage =
                Some(OutageStat { silent_seconds: 11.0, ..OutageStat::default() });
        });
        assert_reason(failing, "requests_fail", Some("b"), |stat| {
            stat.volumes[1].outage = Some(OutageStat { failed: 3, ..OutageStat::default() });
        });
        assert_reason(failing, "worker_stuck", None, |stat| stat.workers[0].answers = false);
        assert_reason(degraded, "writeback_stuck", None, |stat| {
            let stuck = BdiStat { stuck: true, ..BdiStat::default() };
            stat.bdis = vec![stuck.clone(), BdiStat { dirty_bytes: 1, ..stuck }];
        });
        let expires = |expires| vec![CertificateStat { expires, ..CertificateStat::default() }];
        assert_reason(degraded, "certificate_expired", None, |stat| {
            stat.certificates = expires(NOW);
        });
        assert_reason(degraded, "certificate_expires", None, |stat| {
            stat.certificates = expires(NOW + EXPIRES_SOON - 1);
            stat.certificates.extend(expires(NOW + EXPIRES_SOON));
        });
        let mut stat = well();
        stat.certificates = expires(NOW - 1);
        stat.certificates[0].kind = CertificateKind::RevocationList;
        let view = health(&stat, NOW);
        assert_eq!(view.state, HealthState::Failing);
        assert!(view.reasons[0].message.contains("ebbd refuses every client"));
        assert_reason(failing, "socket_lost", None, |stat| {
            stat.lost_sockets = vec!["/run/ebbd.sock".into()];
        });
        assert_reason(degraded, "not_in_force", Some("a"), |stat| {
            let message = "it makes no sense".into();
            let volume = Some("a".into());
            stat.problems = vec![ProblemStat { volume, message, ..ProblemStat::default() }];
        });
        assert_reason(degraded, ProblemStat::COMMIT, Some("a"), |stat| {
            let (kind, remedy) = (ProblemStat::COMMIT.into(), "repeat the commit".into());
            let (volume, message) = (Some("a".into()), "it is a mix".into());
            stat.problems = vec![ProblemStat { volume, message, kind, remedy }];
        });
        assert_reason(degraded, "reload_failed", None, |stat| {
            stat.reload = Some(ReloadStat::default());
        });
        assert_reason(degraded, "memory_pressure", None, |stat| {
            stat.pressure = Some(PressureStat { level: 2, ..PressureStat::default() });
        });
        let mut stat = well();
        stat.pressure = Some(PressureStat { level: 1, ..PressureStat::default() });
        stat.reload = Some(ReloadStat { success: true, ..ReloadStat::default() });
        // No request has needed its server yet.
        stat.volumes[0].remote = Some(RemoteStat { since_seconds: 3600, ..RemoteStat::default() });
        assert_eq!(health(&stat, NOW).state, HealthState::Ok);
    }

    #[test]
    fn the_remedy_of_a_volume_that_is_not_served_is_true() {
        let remedy = |next_seconds| {
            let mut stat = well();
            stat.volumes[0].state = VolumeCondition::Failed;
            stat.volumes[0].failure = Some(FailureStat { next_seconds, ..FailureStat::default() });
            health(&stat, NOW).reasons[0].remedy.clone()
        };
        assert!(remedy(Some(1.0)).contains("tried again by itself"));
        let mut stat = well();
        stat.volumes[0].failure = Some(FailureStat { removed: true, ..FailureStat::default() });
        let removed = health(&stat, NOW).reasons[0].remedy.clone();
        assert!(removed.starts_with("run `ebbd volume remove a` again"), "{removed}");
        let file = remedy(None);
        assert!(file.contains("`ebbd reload`") && file.contains("volume remove a`"), "{file}");
    }

    #[test]
    fn failed_requests_are_told_with_volume_count_and_time() {
        let mut stat = well();
        let outage = OutageStat { failed: 3, last_failed_seconds: 12.3, ..OutageStat::default() };
        stat.volumes[1].outage = Some(outage);
        let reason = &health(&stat, NOW).reasons[0];
        assert_eq!(reason.volume.as_deref(), Some("b"));
        let told = "3 requests to its store have failed, the last 12 s ago (shown until 60 s without a failure, also if it works again)";
        assert_eq!(reason.message, told);
        assert!(reason.remedy.contains("see the log"), "{}", reason.remedy);
        let remedy = "free space on the store".to_owned();
        stat.volumes[1].outage = Some(OutageStat { remedy, failed: 3, ..OutageStat::default() });
        assert_eq!(health(&stat, NOW).reasons[0].remedy, "free space on the store");
    }

    #[test]
    fn server_that_was_reached_need_not_be_started() {
        for is_reached in [true, false] {
            let last_error = Some("came back with another size".into());
            let mut stat = well();
            stat.volumes[0].remote =
                Some(RemoteStat { last_error, is_reached, ..RemoteStat::default() });
            let remedy = health(&stat, NOW).reasons[0].remedy.clone();
            assert_eq!(remedy.contains("start the server"), !is_reached, "{remedy}");
        }
    }

    #[test]
    fn pressure_that_was_requested_needs_no_memory() {
        let of = |cause: &str| {
            let pressure =
                PressureStat { level: 3, cause: cause.into(), ..PressureStat::default() };
            let view = health(&Stat { pressure: Some(pressure), ..well() }, NOW);
            (view.reasons[0].message.clone(), view.reasons[0].remedy.clone())
        };
        let (message, remedy) = of(Cause::Injected.as_str());
        assert!(message.starts_with("memory pressure L3 (requested by hand): "), "{message}");
        assert!(remedy.contains("`ebbd pressure L0`"), "{remedy}");
        assert_eq!(of(Cause::AvailableLow.as_str()).1, "free memory on this host");
        assert!(of(Cause::Easing.as_str()).1.starts_with("wait"));
    }

    #[test]
    fn remedy_of_a_failed_reload_is_its_own() {
        let remedy = |remedy: &str| {
            let reload = ReloadStat { remedy: remedy.into(), ..ReloadStat::default() };
            health(&Stat { reload: Some(reload), ..well() }, NOW).reasons[0].remedy.clone()
        };
        assert_eq!(remedy("mount it"), "mount it");
        // The cause may be outside the configuration.
        let other = remedy("");
        assert!(other.contains("`ebbd reload`") && !other.contains("configuration"), "{other}");
    }

    #[test]
    fn what_a_volume_waits_for_is_named() {
        let message = |volume: VolumeStat| of_volume(&volume, false)[0].message.clone();
        let opening = VolumeStat { state: VolumeCondition::Opening, ..volume("a") };
        assert!(message(opening.clone()).contains("its store is being opened"));
        let file = "its file is being written: /s/a.toml";
        let text = message(VolumeStat { waits_for: Some(file.into()), ..opening });
        assert!(text.contains(file) && !text.contains("store"), "{text}");
        let cache = VolumeCacheStat { dirty_bytes: 4096, ..VolumeCacheStat::default() };
        let closing = VolumeCondition::Closing;
        let text = message(VolumeStat { state: closing, cache: Some(cache), ..volume("a") });
        assert!(text.contains("4096 bytes of dirty data"), "{text}");
    }

    #[test]
    fn the_worst_reasons_come_first_and_the_rest_is_counted() {
        let mut stat = well();
        let opening =
            |n: u32| VolumeStat { state: VolumeCondition::Opening, ..volume(&n.to_string()) };
        stat.volumes.extend((0..5000).map(opening));
        stat.workers[0].answers = false;
        let view = health(&stat, NOW);
        assert_eq!(view.state, HealthState::Failing);
        assert_eq!(view.reasons[0].kind, "worker_stuck");
        assert_eq!((view.reasons.len(), view.more), (HealthView::MAX_REASONS, 4901));
        assert_eq!((view.serving, view.volumes), (2, 5002));
    }

    #[test]
    fn it_is_ready_when_each_volume_was_tried_and_the_sockets_listen() {
        let mut stat = well();
        assert_eq!(not_ready(&stat), None);
        stat.volumes[0].state = VolumeCondition::Failed;
        assert_eq!(not_ready(&stat), None, "it was tried");
        stat.volumes[0].state = VolumeCondition::Opening;
        assert!(not_ready(&stat).unwrap().contains("1 volume is being opened"));
        for (phase, word) in
            [(DaemonPhase::Starting, "starting"), (DaemonPhase::Stopping, "stopping")]
        {
            let stat = Stat { phase, ..well() };
            assert!(not_ready(&stat).unwrap().contains(word));
        }
    }
}
