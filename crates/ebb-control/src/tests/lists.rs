//! Long answers delay no others, and event streams are shared.

use std::sync::Condvar;

use super::*;

/// The name of a volume whose first list of volumes is held.
const HELD: &str = "held";
static HOLD: (Mutex<Hold>, Condvar) =
    (Mutex::new(Hold { begun: false, released: false }), Condvar::new());

struct Hold {
    begun: bool,
    released: bool,
}

/// Called for each list: the first one of a daemon with the volume `held` waits.
pub(super) fn hold(unserved: &[VolumeStat]) {
    if unserved.iter().any(|volume| volume.name == HELD) {
        let (hold, changed) = &HOLD;
        let mut state = hold.lock().unwrap();
        if !std::mem::replace(&mut state.begun, true) {
            changed.notify_all();
            drop(changed.wait_timeout_while(state, HANG, |state| !state.released).unwrap());
        }
    }
}

#[test]
fn health_is_answered_while_lists_are_made() {
    let held = VolumeStat { name: HELD.to_owned(), ..VolumeStat::default() };
    let daemon = start_with(None, vec![held]);
    let (hold, changed) = &HOLD;
    std::thread::scope(|scope| {
        let readers: Vec<_> =
            (0..12).map(|_| scope.spawn(|| daemon.ask("GET", "/v1/volumes", ""))).collect();
        let state = hold.lock().unwrap();
        let (state, late) = changed.wait_timeout_while(state, HANG, |state| !state.begun).unwrap();
        assert!(!late.timed_out());
        drop(state);
        for path in ["/healthz", "/readyz", "/v1/version"] {
            let (status, _) = daemon.ask("GET", path, "");
            let released = hold.lock().unwrap().released;
            assert!(!released && (status == 200 || status == 503), "{path}: {status}");
        }
        assert!(readers.iter().all(|reader| !reader.is_finished()), "the list was not held");
        hold.lock().unwrap().released = true;
        changed.notify_all();
        for reader in readers {
            assert_eq!(reader.join().unwrap().0, 200);
        }
    });
}

#[test]
fn one_caller_takes_half_of_the_event_streams() {
    let daemon = start();
    let stream = || {
        let mut stream = UnixStream::connect(&daemon.path).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        stream
            .write_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
            .unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        (stream, String::from_utf8_lossy(&status).into_owned())
    };
    let open: Vec<_> = (0..9).map(|_| stream()).collect();
    let (last, first) = open.split_last().unwrap();
    assert!(first.iter().all(|(_, status)| status.ends_with("200")));
    assert!(last.1.ends_with("503"), "{}", last.1);
}
