//! The routes of volumes and operations, over a manager that changes nothing.

use ebb_api::stat::VolumeCondition;
use ebb_api::{
    AddVolumeBody, ConfigChange, KeyChangeView, KeySlotView, KeySlotsView, OperationState,
    OperationView, Refusal, ResizeView, VolumeView,
};
use ebb_volume::Stop;

use super::*;
use crate::manager::{BegunOperation, ConfigSource, Refused, VolumeChange, VolumeManager};

/// Ends operations as the names of their volumes say.
#[derive(Default)]
pub(super) struct NoChanges {
    begun: Mutex<Vec<(VolumeChange, String)>>,
}

impl NoChanges {
    fn view((change, by): &(VolumeChange, String), id: u64) -> (OperationView, u16) {
        let (kind, volume) = match change {
            VolumeChange::Add(AddVolumeBody { name, .. }) => ("add", name.as_str()),
            VolumeChange::Remove(name) => ("remove", name.as_str()),
            VolumeChange::Rename(name, _) => ("rename", name.as_str()),
            VolumeChange::Snapshot(name, _) => ("snapshot", name.as_str()),
            VolumeChange::Flatten(name) => ("flatten", name.as_str()),
            VolumeChange::Persist(name) => ("persist", name.as_str()),
            VolumeChange::Commit(name) => ("commit", name.as_str()),
            VolumeChange::DeleteSnapshot(name, snapshot) => {
                assert_eq!(snapshot, "monday");
                ("delete-snapshot", name.as_str())
            }
            VolumeChange::Resize(name, _) => ("resize", name.as_str()),
            VolumeChange::AddKey(name, body) => {
                assert_eq!(body.key, "key-file:/k");
                ("add key", name.as_str())
            }
            VolumeChange::UseKey(name, _) => ("use key", name.as_str()),
            VolumeChange::RemoveKey(name, 3, true) => ("remove key", name.as_str()),
            VolumeChange::RemoveKey(..) => panic!("another slot"),
            VolumeChange::CheckLimits(name) => ("check limit", name.as_str()),
            VolumeChange::CheckGroupLimits => ("check limit", ""),
            VolumeChange::KeepLimits(name) | VolumeChange::ForgetLimits(name) => {
                ("limit", name.as_str())
            }
            VolumeChange::KeepGroupLimits(_) | VolumeChange::ForgetGroupLimits(_) => ("limit", ""),
            VolumeChange::Change(name, _) => ("change", name.as_str()),
            VolumeChange::Flush(name) => ("flush", name.as_str()),
            VolumeChange::FlushAll => ("flush", ""),
            VolumeChange::Reload => ("reload", ""),
            VolumeChange::Takeover(body) => {
                assert_eq!(body.socket, "/s");
                ("takeover", "")
            }
        };
        let (kind, volume) = (kind.to_owned(), Some(volume.to_owned()));
        let by = by.clone();
        let mut view = OperationView { id, kind, volume, by, ..OperationView::default() };
        view.state = OperationState::Done;
        match view.volume.as_deref() {
            Some("slow") => view.state = OperationState::Running,
            Some("bad") => {
                view.state = OperationState::Failed;
                view.failure = Some(Refused::new(Refusal::Invalid, "not_opened", "m", "r").body);
                return (view, 422);
            }
            Some(name) if view.kind == "resize" => {
                view.resized = Some(ResizeView { name: name.to_owned(), from: 512, size: 1024 });
            }
            Some(name) if view.kind == "add key" => {
                view.key_added = Some(KeyChangeView { volume: name.to_owned(), slot: 1 });
            }
            _ => {}
        }
        (view, 200)
    }
}

impl ConfigSource for NoChanges {
    fn text(&self) -> String {
        "workers = 1\n".to_owned()
    }

    fn kept_keys(&self) -> Vec<String> {
        Vec::new()
    }

    fn changes(&self) -> Result<Vec<ConfigChange>, Refused> {
        match self.begun.lock().unwrap().is_empty() {
            true => Ok(vec![ConfigChange { key: "workers".to_owned(), ..ConfigChange::default() }]),
            false => {
                Err(Refused::new(Refusal::Invalid, "configuration", "f:1: a mistake", "correct it"))
            }
        }
    }
}

impl VolumeManager for NoChanges {
    fn begin(&self, change: VolumeChange, by: &str) -> Result<BegunOperation, Refused> {
        let mut begun = self.begun.lock().unwrap();
        begun.push((change, by.to_owned()));
        let id = begun.len() as u64;
        let ended = Arc::<Stop>::default();
        if Self::view(&begun[begun.len() - 1], id).0.state != OperationState::Running {
            ended.stop();
        }
        Ok(BegunOperation { id, ended })
    }

    fn volume(&self, name: &str) -> Option<VolumeView> {
        let stat = VolumeStat { name: name.to_owned(), ..VolumeStat::default() };
        (name != "dsk").then(|| VolumeView { stat, ..VolumeView::default() })
    }

    fn key_slots(&self, name: &str) -> Result<KeySlotsView, Refused> {
        let slot = KeySlotView {
            slot: 1,
            kdf: "argon2id".into(),
            usable: true,
            reason: None,
            remedy: None,
            ignored: false,
        };
        Ok(KeySlotsView { volume: name.to_owned(), slots: vec![slot], warning: None })
    }

    fn operations(&self) -> Vec<OperationView> {
        (1..).zip(&*self.begun.lock().unwrap()).map(|(id, one)| Self::view(one, id).0).collect()
    }

    fn operation(&self, id: u64) -> Option<(OperationView, u16)> {
        let begun = self.begun.lock().unwrap();
        let at = usize::try_from(id).ok()?.checked_sub(1)?;
        begun.get(at).map(|change| Self::view(change, id))
    }

    fn cancel(&self, id: u64) -> Result<OperationView, Refused> {
        match self.operation(id) {
            Some((view, _)) => Ok(view),
            None => Err(Refused::new(Refusal::Unknown, "unknown_operation", "m", "r")),
        }
    }
}

#[test]
fn a_change_is_answered_when_it_has_ended_or_with_its_operation() {
    let daemon = start();
    let add =
        |name: &str| format!("{{\"name\": \"{name}\", \"store\": \"null:1G\", \"persist\": true}}");
    let (status, body) = daemon.ask("POST", "/v1/volumes", &add("new"));
    assert_eq!(status, 201, "{body}");
    let view: VolumeView = serde_json::from_str(&body).unwrap();
    assert_eq!(view.stat.name, "new");
    daemon.refuses(("POST", "/v1/volumes", &add("bad")), 422, "not_opened", "r");
    let body = add("slow");
    let length = body.len();
    let request = format!("POST /v1/volumes HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{body}");
    let answer = daemon.send(request.as_bytes());
    assert!(
        answer.starts_with("HTTP/1.0 202") && answer.contains("location: /v1/operations/3"),
        "{answer}"
    );
    let resized = daemon.json("POST", "/v1/volumes/disk/resize", "{\"size\": 1024}");
    assert_eq!(resized, json!({"name": "disk", "from": 512, "size": 1024}));
    for (method, path, body, kind) in [
        ("POST", "/v1/volumes/disk/flush", "", "flush"),
        ("POST", "/v1/flush", "", "flush"),
        ("POST", "/v1/reload", "", "reload"),
        ("POST", "/v1/volumes/disk/rename", "{\"name\": \"other\"}", "rename"),
        ("POST", "/v1/volumes/disk/snapshot", "{\"name\": \"monday\"}", "snapshot"),
        ("POST", "/v1/volumes/disk/flatten", "", "flatten"),
        ("POST", "/v1/volumes/disk/persist", "", "persist"),
        ("POST", "/v1/volumes/disk/commit", "", "commit"),
        ("DELETE", "/v1/volumes/disk/snapshots/monday", "", "delete-snapshot"),
        ("DELETE", "/v1/volumes/a%2Fb%20%25%22%C3%BC", "", "remove"),
        ("POST", "/v1/takeover", r#"{"socket":"/s"}"#, "takeover"),
    ] {
        assert_eq!(daemon.json(method, path, body)["kind"], kind, "{path}");
    }
    let all = daemon.json("GET", "/v1/operations", "");
    assert_eq!(all.as_array().unwrap().len(), 15);
    assert_eq!(daemon.json("GET", "/v1/operations/14", "")["volume"], "a/b %\"ü");
    assert_eq!(daemon.json("DELETE", "/v1/operations/3", "")["state"], "running");
    assert_eq!(daemon.json("GET", "/v1/volumes/disk", "")["stat"]["name"], "disk");
}

#[test]
fn keys_are_listed_added_and_removed_on_the_control_socket() {
    let daemon = start();
    let listed = daemon.json("GET", "/v1/volumes/disk/keys", "");
    assert_eq!(listed["slots"][0]["kdf"], "argon2id");
    let body = "{\"key\": \"key-file:/k\"}";
    let added = daemon.json("POST", "/v1/volumes/disk/keys", body);
    assert_eq!(added, json!({"volume": "disk", "slot": 1}));
    assert_eq!(daemon.json("PUT", "/v1/volumes/disk/keys", body)["kind"], "use key");
    let removed = daemon.json("DELETE", "/v1/volumes/disk/keys/3?force=true", "");
    assert_eq!(removed["kind"], "remove key");
    let by = format!("uid:{}", rustix::process::geteuid().as_raw());
    assert_eq!(removed["by"], by.as_str());
}

#[test]
fn mistakes_in_requests_that_change_volumes_have_a_remedy() {
    let daemon = start();
    for (request, status, error, remedy) in [
        (("POST", "/v1/volumes", "{\"name\": \"a\"}"), 400, "invalid_body", "send {"),
        (
            ("POST", "/v1/volumes", "{\"name\": \"a\", \"store\": \"\", \"siz\": 1}"),
            400,
            "invalid_body",
            "send {",
        ),
        (("GET", "/v1/volumes/dsk", ""), 404, "unknown_volume", "`disk`"),
        (("POST", "/v1/volumes/dsk/flush", ""), 404, "unknown_volume", "`disk`"),
        (("GET", "/v1/volumes/dsk/changes?since=a", ""), 404, "unknown_volume", "`disk`"),
        (("GET", "/v1/volumes/disk/changes", ""), 400, "malformed_query", "since=SNAPSHOT"),
        (
            ("GET", "/v1/volumes/disk/changes?since=a&offset=-1", ""),
            400,
            "malformed_query",
            "offset=BYTES",
        ),
        (
            ("GET", "/v1/volumes/disk/changes?since=a", ""),
            404,
            "unknown_snapshot",
            "ebbd volume snapshot",
        ),
        (
            ("GET", "/v1/volumes/disk/changes?since=a&limit=10001", ""),
            422,
            "out_of_range",
            "1 to 10000",
        ),
        (("POST", "/v1/volumes/disk/rename", "{}"), 400, "invalid_body", "new-name"),
        (("GET", "/v1/volumes/dsk/keys", ""), 404, "unknown_volume", "`disk`"),
        (("POST", "/v1/volumes/disk/keys", "{}"), 400, "invalid_body", "key-file:"),
        (
            ("POST", "/v1/volumes/disk/keys", "{\"key\": \"a\", \"force\": true}"),
            400,
            "invalid_body",
            "key-file:",
        ),
        (("DELETE", "/v1/volumes/disk/keys/x", ""), 404, "unknown_slot", "key list"),
        (("DELETE", "/v1/volumes/disk/keys/3?forse=true", ""), 400, "malformed_query", "force"),
        (("GET", "/v1/operations/77", ""), 404, "unknown_operation", "operation list"),
        (("GET", "/v1/operations/x", ""), 404, "unknown_operation", "operation list"),
        (("PATCH", "/v1/volumes/disk", ""), 400, "malformed_json", "send {\"allow\""),
        (("PATCH", "/v1/volumes/disk", "{}"), 400, "invalid_body", "for all clients"),
        (("PATCH", "/v1/volumes", ""), 405, "method_not_allowed", "POST"),
    ] {
        daemon.refuses(request, status, error, remedy);
    }
}

/// Without tokens the page is read-only.
#[test]
fn nothing_is_changed_over_tcp_without_a_token() {
    let daemon = start();
    for (method, path) in [
        ("POST", "/v1/volumes"),
        ("DELETE", "/v1/volumes/disk"),
        ("POST", "/v1/flush"),
        ("POST", "/v1/reload"),
        ("POST", "/v1/takeover"),
        ("DELETE", "/v1/operations/1"),
    ] {
        let mut stream = std::net::TcpStream::connect(daemon.page).unwrap();
        let host = daemon.page;
        write!(stream, "{method} {path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.0 403"), "{method} {path}: {answer}");
    }
}

#[test]
fn the_operation_that_closes_a_volume_is_named() {
    let closing = |name: &str, waits_for: Option<String>| VolumeStat {
        name: name.to_owned(),
        state: VolumeCondition::Closing,
        waits_for,
        ..VolumeStat::default()
    };
    let why = "closed while w is committed into b (operation 3)";
    let unserved = vec![closing("slow", None), closing("b", Some(why.to_owned()))];
    let daemon = start_with(None, unserved);
    daemon.ask("DELETE", "/v1/volumes/slow?wait=0", "");
    let (_, answer) = daemon.ask("POST", "/v1/volumes/slow/flush", "");
    assert!(answer.contains("the volume is closing: operation 1 (remove)"), "{answer}");
    assert!(answer.contains("ebbd operation show 1 --wait"), "{answer}");
    let (_, answer) = daemon.ask("POST", "/v1/volumes/b/flush", "");
    assert!(answer.contains(why), "{answer}");
}
