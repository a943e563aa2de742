//! `ebbd volume`, `flush` and `reload`.

use ebb_api::stat::{DefinedIn, VolumeStat};
use ebb_api::{
    AddVolumeBody, ChangeVolumeBody, KeyBody, KeyChangeView, KeySlotsView, OperationView,
    RenameBody, ResizeBody, ResizeView, SnapshotBody, VolumeView,
};
use ebb_config::Size;

use super::changes::changes;
use super::operation::{Requested, change, request};
use super::show::{bytes, key_state, limit_values};
use super::table::TextTable;
use super::{ClientError, DaemonClient, encoded, json_text, text};
use crate::cli::volume::{
    AddArgs, ChangeArgs, FlushArgs, ResizeArgs, VolumeCommand, VolumeKeyCommand,
};
use crate::exit_status;

/// Carries out `ebbd volume`, and passes what it prints to `show`, until that returns false.
///
/// # Errors
/// [`ClientError`].
pub fn volume(
    command: &VolumeCommand,
    show: &mut dyn FnMut(&str) -> bool,
) -> Result<(), ClientError> {
    let text = match command {
        VolumeCommand::List(args) => {
            let daemon = DaemonClient::new(args.control.as_deref())?;
            let volumes: Vec<VolumeStat> = daemon.json("GET", "/v1/volumes", None)?;
            Ok(if args.json { json_text(&volumes) } else { table(&volumes) })
        }
        VolumeCommand::Show(args) => {
            let daemon = DaemonClient::new(args.output.control.as_deref())?;
            let view: VolumeView = daemon.json("GET", &path(&args.volume, ""), None)?;
            Ok(if args.output.json { json_text(&view) } else { details(&view) })
        }
        VolumeCommand::Add(args) => add(args),
        VolumeCommand::Remove(args) => {
            change(&args.change, "DELETE", &path(&args.volume, ""), None, |_: &OperationView| {
                format!("{}: removed\n", args.volume)
            })
        }
        VolumeCommand::Changes(args) => return changes(args, show),
        VolumeCommand::Rename(args) => {
            let body = text(RenameBody { name: args.name.clone() });
            let target = path(&args.volume, "/rename");
            change(&args.change, "POST", &target, Some(&body), |_: &OperationView| {
                format!("{} -> {}\n", args.volume, args.name)
            })
        }
        VolumeCommand::Snapshot(args) => {
            let body = text(SnapshotBody { name: args.name.clone(), persist: args.persist });
            let target = path(&args.volume, "/snapshot");
            change(&args.change, "POST", &target, Some(&body), |_: &OperationView| {
                let kept = until_when(args.persist);
                format!("{}@{}: served, read-only{kept}\n", args.volume, args.name)
            })
        }
        VolumeCommand::Flatten(args) => {
            let target = path(&args.volume, "/flatten");
            let flattened = change(&args.change, "POST", &target, None, |_: &OperationView| {
                format!("{}: flattened\n", args.volume)
            });
            flattened.and_then(|text| with_warnings(&args.change, &args.volume, text))
        }
        VolumeCommand::Persist(args) => persist(&args.volume, &args.change),
        VolumeCommand::Commit(args) => {
            let target = path(&args.volume, "/commit");
            change(&args.change, "POST", &target, None, |_: &OperationView| {
                format!("{}: committed into its base, and empty\n", args.volume)
            })
        }
        VolumeCommand::DeleteSnapshot(args) => {
            let target = path(&args.volume, &format!("/snapshots/{}", encoded(&args.name)));
            change(&args.change, "DELETE", &target, None, |_: &OperationView| {
                format!("{}@{}: deleted\n", args.volume, args.name)
            })
        }
        VolumeCommand::Resize(args) => resize(args),
        VolumeCommand::Allow(args) => {
            let allow = (!args.all).then(|| args.entries.clone());
            let shown = allowed(allow.as_deref());
            let (body, target) = (text(ChangeVolumeBody { allow }), path(&args.volume, ""));
            let changed =
                change(&args.change, "PATCH", &target, Some(&body), |_: &OperationView| {
                    format!("{}: may be opened by {shown}\n", args.volume)
                });
            changed.and_then(|text| with_warnings(&args.change, &args.volume, text))
        }
        VolumeCommand::Key(command) => key(command),
    };
    show(&text?);
    Ok(())
}

fn key(command: &VolumeKeyCommand) -> Result<String, ClientError> {
    match command {
        VolumeKeyCommand::List(args) => {
            let daemon = DaemonClient::new(args.output.control.as_deref())?;
            let view: KeySlotsView = daemon.json("GET", &path(&args.volume, "/keys"), None)?;
            Ok(if args.output.json { json_text(&view) } else { key_slots(&view) })
        }
        VolumeKeyCommand::Add(args) => {
            let (body, target) =
                (text(KeyBody { key: args.key.clone() }), path(&args.volume, "/keys"));
            change(&args.change, "POST", &target, Some(&body), |added: &KeyChangeView| {
                format!("{}: added key slot {}\n", added.volume, added.slot)
            })
        }
        VolumeKeyCommand::Use(args) => {
            let (body, target) =
                (text(KeyBody { key: args.key.clone() }), path(&args.volume, "/keys"));
            change(&args.change, "PUT", &target, Some(&body), |_: &OperationView| {
                format!("{}: opened with {} from now on\n", args.volume, args.key)
            })
        }
        VolumeKeyCommand::Remove(args) => {
            let query = if args.force { "?force=true" } else { "" };
            let target = path(&args.volume, &format!("/keys/{}{query}", args.slot));
            change(&args.change, "DELETE", &target, None, |_: &OperationView| {
                format!("{}: removed key slot {}\n", args.volume, args.slot)
            })
        }
    }
}

/// Keeps a volume for the next start. One of the configuration file is kept there.
fn persist(volume: &str, args: &ChangeArgs) -> Result<String, ClientError> {
    let kept = change(args, "POST", &path(volume, "/persist"), None, |_: &OperationView| {
        format!("{volume}: kept for the next start\n")
    })?;
    if args.json || args.no_wait {
        return Ok(kept);
    }
    let daemon = DaemonClient::new(args.control.as_deref())?;
    // It is kept, also if this fails.
    let view = daemon.json::<VolumeView>("GET", &path(volume, ""), None);
    let told = view.ok().and_then(|view| told(volume, view.stat.origin, view.store.as_deref()));
    Ok(told.unwrap_or(kept))
}

/// Returns the line about a volume that the configuration keeps, or that is kept without its data.
fn told(volume: &str, origin: DefinedIn, store: Option<&str>) -> Option<String> {
    let in_memory = store.is_some_and(|store| store.starts_with("memory:"));
    let kept = match origin {
        DefinedIn::Configuration => "nothing to do, the configuration keeps it",
        _ if in_memory => "kept for the next start",
        _ => return None,
    };
    let data = if in_memory { ", without its data, which is in memory" } else { "" };
    Some(format!("{volume}: {kept}{data}\n"))
}

/// The key slots of a volume, a line each, as `ebbd image key list` prints them.
fn key_slots(view: &KeySlotsView) -> String {
    let mut out: String =
        view.warning.iter().map(|warning| format!("warning: {warning}\n")).collect();
    for slot in &view.slots {
        let why = slot.reason.as_deref().zip(slot.remedy.as_deref());
        let state = key_state(slot.usable, slot.ignored, why);
        out.push_str(&format!("{}: {}, {state}\n", slot.slot, slot.kdf));
    }
    out
}

/// The clients that may open a volume, for people.
fn allowed(entries: Option<&[String]>) -> String {
    match entries {
        None => "all clients".to_owned(),
        Some([]) => "no client".to_owned(),
        Some(entries) => entries.join(", "),
    }
}

/// As [`allowed`], with the volume that the list comes from, if that is another one.
fn allowed_by(view: &VolumeView) -> String {
    let entries = allowed(view.allow.as_deref());
    match &view.allow_of {
        Some(volume) => format!("{entries}, as volume {volume}"),
        None => entries,
    }
}

fn add(args: &AddArgs) -> Result<String, ClientError> {
    let on = |flag: bool| flag.then_some(true);
    let body = text(AddVolumeBody {
        name: args.name.clone(),
        store: args.store.clone(),
        base: args.base.clone(),
        size: args.size.map(|size| size.to_string()),
        create: on(args.create),
        encryption: args.encryption.clone(),
        read_only: on(args.read_only),
        shared: on(args.shared),
        allow: Some(args.allow.clone()).filter(|entries| !entries.is_empty()),
        direct: args.direct.clone(),
        cache: args.cache.clone(),
        bdi: args.bdi.clone(),
        vhost_user: args.vhost_user.clone(),
        persist: args.persist,
    });
    change(&args.change, "POST", "/v1/volumes", Some(&body), |view: &VolumeView| {
        added(view, args.persist)
    })
}

/// How long what was made is served.
fn until_when(persist: bool) -> &'static str {
    if persist { "" } else { ", until the daemon ends" }
}

fn warnings(view: &VolumeView) -> String {
    view.warnings.iter().map(|text| format!("warning: {text}\n")).collect()
}

/// What a change has printed, and the warnings about the volume.
fn with_warnings(args: &ChangeArgs, volume: &str, text: String) -> Result<String, ClientError> {
    if args.json {
        return Ok(text);
    }
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let view: VolumeView = daemon.json("GET", &path(volume, ""), None)?;
    Ok(text + &warnings(&view))
}

/// What was added, and what is not as it was asked for.
fn added(view: &VolumeView, persist: bool) -> String {
    let kept = until_when(persist);
    let (name, size) = (&view.stat.name, Size::new(view.stat.size_bytes));
    let failure = view.vhost_user_failure.as_ref();
    let warning = failure.map(|why| format!("warning: not served over vhost-user: {why}\n"));
    format!("{name}: added, {size}{kept}\n{}{}", warning.unwrap_or_default(), warnings(view))
}

fn resize(args: &ResizeArgs) -> Result<String, ClientError> {
    let body = text(ResizeBody { size: args.size.map(Size::bytes), shrink: args.shrink });
    let target = path(&args.volume, "/resize");
    change(&args.change, "POST", &target, Some(&body), resized)
}

/// What a resize has changed, as a line.
fn resized(view: &ResizeView) -> String {
    let (name, from, to) = (&view.name, Size::new(view.from), Size::new(view.size));
    match from == to {
        true => format!("{name}: {to}, unchanged\n"),
        false => format!("{name}: {from} -> {to}\n"),
    }
}

/// Flushes one volume or all.
///
/// # Errors
/// [`ClientError`].
pub fn flush(args: &FlushArgs) -> Result<String, ClientError> {
    let target = match &args.volume {
        Some(volume) => path(volume, "/flush"),
        None => "/v1/flush".to_owned(),
    };
    change(&args.change, "POST", &target, None, |_: &OperationView| "flushed\n".to_owned())
}

/// Lets the daemon read its configuration again.
///
/// # Errors
/// [`ClientError`].
pub fn reload(args: &ChangeArgs) -> Result<(String, u8), ClientError> {
    let daemon = DaemonClient::new(args.control.as_deref())?;
    Ok(match request::<OperationView>(&daemon, args, "POST", "/v1/reload", None)? {
        Requested::Done(view) => reload_outcome(args, &view),
        Requested::Ended(view) => reload_outcome(args, &view),
        Requested::Continues(text) => (text, exit_status::DONE),
    })
}

/// The text that a finished reload prints, and its exit status.
fn reload_outcome(args: &ChangeArgs, view: &OperationView) -> (String, u8) {
    let text = if args.json { json_text(view) } else { reloaded(view) };
    let all_served = view.not_served.is_empty() && view.more_not_served == 0;
    let code = match (all_served, view.without_socket.is_empty()) {
        (false, _) => exit_status::FAILING,
        (true, false) => exit_status::DEGRADED,
        (true, true) => exit_status::DONE,
    };
    (text, code)
}

/// What a reload has done, and a line for each volume that is not served.
fn reloaded(view: &OperationView) -> String {
    let mut out = format!("{}\n", view.step);
    for volume in &view.not_served {
        out.push_str(&format!("not served: {volume}\n"));
    }
    if view.more_not_served > 0 {
        out.push_str(&format!("and {} more\n", view.more_not_served));
    }
    view.without_socket.iter().for_each(|volume| out.push_str(&format!("{volume}\n")));
    out
}

pub(super) fn path(volume: &str, rest: &str) -> String {
    format!("/v1/volumes/{}{rest}", encoded(volume))
}

/// What is known of a volume while its store is open, else a dash.
fn known(volume: &VolumeStat, text: impl FnOnce(&VolumeStat) -> String) -> String {
    volume.opened().map_or_else(|| "-".to_owned(), text)
}

fn access(volume: &VolumeStat) -> &'static str {
    if volume.read_only { "read" } else { "write" }
}

fn table(volumes: &[VolumeStat]) -> String {
    let mut table =
        TextTable::new(&["VOLUME", "SIZE", "STATE", "ACCESS", "CLIENTS", "DEFINED"], 0b10_1101);
    for volume in volumes {
        table.row([
            volume.name.clone(),
            known(volume, |volume| bytes(volume.size_bytes)),
            volume.state.to_string(),
            known(volume, |volume| access(volume).to_owned()),
            volume.clients.to_string(),
            volume.origin.to_string(),
        ]);
    }
    table.text()
}

fn details(view: &VolumeView) -> String {
    let stat = &view.stat;
    let mut out = String::new();
    let mut line = |name: &str, value: &str| out.push_str(&format!("{name:<9} {value}\n"));
    line("volume", &stat.name);
    line("state", stat.state.as_str());
    if let Some(failure) = &stat.failure {
        line("failure", &failure.reason);
    }
    if let Some(why) = &stat.waits_for {
        line("reason", why);
    }
    view.warnings.iter().for_each(|text| line("warning", text));
    line("defined", &view.defined);
    line("store", view.store.as_deref().unwrap_or("-"));
    if let Some(key) = &view.encryption {
        line("key", key);
    }
    if let Some(base) = &view.base {
        line("base", base);
        line("own", &known(stat, |stat| stat.own_bytes.map_or_else(|| "-".to_owned(), bytes)));
        line("layers", &known(stat, |stat| stat.layers.to_string()));
        line("below", &known(stat, |stat| format!("{} cached", bytes(stat.shared_cache_bytes))));
        for layer in &stat.below {
            let name = layer.snapshot.as_ref().map(|name| format!("snapshot {name}, "));
            let cached = bytes(layer.cache_bytes);
            line("", &format!("{}{}: {cached} cached", name.unwrap_or_default(), layer.store));
        }
    }
    line(
        "size",
        &known(stat, |stat| format!("{} ({} bytes)", bytes(stat.size_bytes), stat.size_bytes)),
    );
    line("access", &known(stat, |stat| access(stat).to_owned()));
    line("shared", if view.shared { "yes" } else { "no" });
    line("allow", &allowed_by(view));
    line("direct", view.direct.as_deref().unwrap_or("-"));
    line("cache", if view.cache.is_empty() { "-" } else { &view.cache });
    line("bdi", view.bdi.as_deref().unwrap_or("-"));
    let failure = view.vhost_user_failure.as_ref().map(|why| format!("none: {why}"));
    line("vhost-user", failure.as_ref().or(view.vhost_user.as_ref()).map_or("-", String::as_str));
    if let Some(limits) = &stat.limits {
        let [requests, bytes] = limit_values(limits);
        line("requests", &format!("{requests} per second at most"));
        line("bytes", &format!("{bytes} per second at most"));
        line("burst", &format!("{} ms", limits.burst_ms));
        line("group", limits.group.as_deref().unwrap_or("-"));
    }
    line("clients", &stat.clients.to_string());
    out
}

#[cfg(test)]
mod tests {
    use ebb_api::stat::VolumeCondition;

    use super::*;

    #[test]
    fn the_size_and_access_of_a_volume_that_cannot_be_opened_are_not_known() {
        let mut volume =
            VolumeStat { name: "zz".to_owned(), size_bytes: 7, ..VolumeStat::default() };
        let row = |volume: &VolumeStat| {
            let text = table(std::slice::from_ref(volume));
            text.lines().nth(1).unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        volume.state = VolumeCondition::Serving;
        assert_eq!(row(&volume)[1..4], ["7", "serving", "write"]);
        volume.state = VolumeCondition::Failed;
        assert_eq!(row(&volume)[1..4], ["-", "failed", "-"]);
    }

    #[test]
    fn persist_says_that_data_in_memory_is_not_kept() {
        let of = |origin, store| told("a", origin, Some(store));
        assert_eq!(of(DefinedIn::State, "file:/a"), None);
        for origin in [DefinedIn::State, DefinedIn::Configuration] {
            let text = of(origin, "memory:1M").expect("it says so");
            assert!(text.ends_with(", without its data, which is in memory\n"), "{text}");
        }
        let text = of(DefinedIn::Configuration, "file:/a");
        assert_eq!(text.as_deref(), Some("a: nothing to do, the configuration keeps it\n"));
    }

    #[test]
    fn reload_is_degraded_if_only_a_socket_cannot_be_opened() {
        let outcome = |view: &OperationView| reload_outcome(&ChangeArgs::default(), view);
        let mut view = OperationView { step: "reloaded".to_owned(), ..OperationView::default() };
        assert_eq!(outcome(&view), ("reloaded\n".to_owned(), exit_status::DONE));
        view.without_socket = vec!["volume a: not served over vhost-user: in use".to_owned()];
        let told = "reloaded\nvolume a: not served over vhost-user: in use\n".to_owned();
        assert_eq!(outcome(&view), (told, exit_status::DEGRADED));
        view.not_served = vec!["volume b: missing".to_owned()];
        assert_eq!(outcome(&view).1, exit_status::FAILING);
    }

    #[test]
    fn a_volume_that_was_added_without_its_socket_comes_with_a_warning() {
        let mut view = VolumeView::default();
        view.stat.name = "a".to_owned();
        assert_eq!(added(&view, true).lines().count(), 1);
        view.vhost_user_failure = Some("in use".to_owned());
        assert!(added(&view, true).ends_with("warning: not served over vhost-user: in use\n"));
        view.warnings = vec!["its base `b@one` is not kept".to_owned()];
        assert!(added(&view, true).ends_with("\nwarning: its base `b@one` is not kept\n"));
        assert!(details(&view).contains("warning   its base `b@one` is not kept\n"));
    }

    #[test]
    fn a_resize_says_what_has_changed() {
        let view = |from, size| ResizeView { name: "disk".into(), from, size };
        assert_eq!(resized(&view(1 << 30, 40 << 30)), "disk: 1G -> 40G\n");
        assert_eq!(resized(&view(512, 512)), "disk: 512, unchanged\n");
    }

    #[test]
    fn a_volume_is_shown_with_its_settings_and_limits() {
        let limits = ebb_api::LimitStat { iops: 5000, burst_ms: 100, ..Default::default() };
        let stat = VolumeStat {
            name: "disk".into(),
            size_bytes: 40 << 30,
            limits: Some(limits),
            ..VolumeStat::default()
        };
        let text =
            details(&VolumeView { stat, direct: Some("auto".into()), ..VolumeView::default() });
        let snapshot = VolumeView {
            allow: Some(vec!["uid:0".into()]),
            allow_of: Some("disk".into()),
            ..VolumeView::default()
        };
        assert!(details(&snapshot).contains("allow     uid:0, as volume disk\n"));
        for line in [
            "size      40.0G (42949672960 bytes)",
            "direct    auto",
            "requests  5000 per second at most",
            "bytes     - per second at most",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}: {text}");
        }
    }
}
