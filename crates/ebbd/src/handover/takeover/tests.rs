//! The steps of a takeover, between two ends of a socket.

use rustix::event::{PollFd, PollFlags, poll};
use std::os::unix::net::UnixListener;

use super::*;

fn pair() -> (Successor, Predecessor) {
    let (one, other) = UnixStream::pair().unwrap();
    (Successor(Peer::new(one).unwrap(), None), Predecessor::of(Peer::new(other).unwrap()))
}

/// Something to hand over: a listening socket without a file.
fn handed() -> HandedOver {
    let folder = tempfile::tempdir().unwrap();
    let socket = UnixListener::bind(folder.path().join("s")).unwrap();
    let listener =
        Listener::handed_over(socket.into(), None, "s".to_owned(), Some("unix:/s".to_owned()));
    let listeners = vec![crate::handover::HandedListener::of(listener)];
    HandedOver { listeners, ..HandedOver::default() }
}

/// How far the successor comes before it is killed.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Step {
    Connected,
    Received,
    Ready,
    Done,
}

#[test]
fn a_successor_that_ends_at_any_step_leaves_the_service_to_its_predecessor() {
    for step in [Step::Connected, Step::Received, Step::Ready, Step::Done] {
        let (successor, predecessor) = pair();
        let end = AtomicBool::default();
        let other = std::thread::spawn(move || {
            let end = AtomicBool::default();
            if step == Step::Connected {
                return;
            }
            assert_eq!(predecessor.receive(&end).unwrap().listeners.len(), 1);
            if step == Step::Received {
                return;
            }
            predecessor.ready(&end).unwrap();
            if step == Step::Done {
                predecessor.done();
            }
        });
        match (successor.hand_over(handed(), true, &end), step) {
            (HandoverEnd::Done, Step::Done) => {}
            (HandoverEnd::Back(back, TakeoverError::Gone), step) if step < Step::Done => {
                assert_eq!(back.listeners.len(), 1, "{step:?}: the socket to listen at");
            }
            // It could not be sent.
            (HandoverEnd::Back(back, TakeoverError::Io(_)), Step::Connected) => {
                assert_eq!(back.listeners.len(), 1);
            }
            (other, step) => panic!("{step:?}: {other:?}"),
        }
        other.join().unwrap();
    }
}

#[test]
fn a_predecessor_learns_why_its_successor_cannot_start() {
    let (successor, predecessor) = pair();
    let report = predecessor.failure_report();
    let other = std::thread::spawn(move || {
        predecessor.receive(&AtomicBool::default()).unwrap();
        drop(predecessor);
        report.send("no disk");
    });
    let ended = successor.hand_over(handed(), true, &AtomicBool::default());
    let HandoverEnd::Back(_, error) = ended else { panic!("{ended:?}") };
    assert_eq!(error.to_string(), "the successor could not start: no disk");
    other.join().unwrap();
}

/// It may take long to end after it has failed.
#[test]
fn report_of_a_failure_does_not_hide_an_end_after_go() {
    let (successor, predecessor) = pair();
    let report = predecessor.failure_report();
    let other = std::thread::spawn(move || {
        let end = AtomicBool::default();
        predecessor.receive(&end).unwrap();
        predecessor.ready(&end).unwrap();
    });
    let ended = successor.hand_over(handed(), true, &AtomicBool::default());
    assert!(matches!(ended, HandoverEnd::Back(_, TakeoverError::Gone)), "{ended:?}");
    other.join().unwrap();
    report.send("too late");
}

#[test]
fn a_predecessor_that_ends_leaves_the_service_to_its_successor() {
    let end = AtomicBool::default();
    // Before it has handed over anything.
    let (successor, predecessor) = pair();
    drop(successor);
    assert!(matches!(predecessor.receive(&end), Err(TakeoverError::Gone)));
    // In the middle.
    let (successor, predecessor) = pair();
    successor.0.send(Kind::State, 2, &[handed().descriptors().unwrap().0.as_fd()]).unwrap();
    drop(successor);
    assert!(matches!(predecessor.receive(&end), Err(TakeoverError::Gone)));
    // After that.
    let (successor, predecessor) = pair();
    drop(successor);
    predecessor.ready(&end).unwrap();
}

#[test]
fn a_predecessor_that_ends_or_refuses_before_it_is_greeted_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let end = AtomicBool::default();
    let listener = crate::listener::open_private(&path, &end).unwrap();
    drop(Successor::connect(&path).unwrap());
    assert!(matches!(Predecessor::accept(&listener, &end), Err(TakeoverError::Gone)));
    Successor::connect(&path).unwrap().refuse("no");
    let refused = Predecessor::accept(&listener, &end).unwrap_err();
    assert!(matches!(&refused, TakeoverError::Aborted(why) if why == "no"), "{refused:?}");
}

#[test]
fn a_successor_uses_nothing_once_its_predecessor_goes_on() {
    let end = AtomicBool::default();
    let (successor, predecessor) = pair();
    successor.refuse("a store\ndoes not respond");
    let refused = predecessor.receive(&end).unwrap_err();
    assert!(matches!(refused, TakeoverError::Aborted(why) if why.contains("a store")));
    let (successor, predecessor) = pair();
    successor.refuse(&"long ".repeat(10_000));
    // Its end of the socket is closed, and yet this is no end of the process.
    assert!(matches!(predecessor.ready(&end), Err(TakeoverError::Aborted(_))));
}

#[test]
fn a_predecessor_that_cannot_serve_again_leaves_the_service_to_a_late_successor() {
    for can_serve_again in [true, false] {
        let (successor, predecessor) = pair();
        let late = std::thread::spawn(move || {
            let end = AtomicBool::default();
            predecessor.receive(&end).unwrap();
            // Instead of `Ready`, for which the other daemon would wait for a minute.
            predecessor.peer.send(Kind::Done, 0, &[]).unwrap();
            let mut fds = [PollFd::new(&predecessor.peer.0, PollFlags::IN)];
            poll(&mut fds, None).unwrap();
            predecessor.ready(&end).is_ok()
        });
        let end = AtomicBool::default();
        let ended = successor.hand_over(handed(), can_serve_again, &end);
        assert!(matches!(ended, HandoverEnd::Back(..)), "{ended:?}");
        assert_eq!(late.join().unwrap(), !can_serve_again);
    }
}

#[test]
fn a_signal_ends_each_wait() {
    let end = AtomicBool::new(true);
    let (successor, predecessor) = pair();
    assert!(matches!(predecessor.receive(&end), Err(TakeoverError::Interrupted)));
    let ended = successor.hand_over(handed(), true, &end);
    assert!(matches!(ended, HandoverEnd::Done), "{ended:?}");
    // The signal was for the predecessor.
    let end = AtomicBool::default();
    assert_eq!(predecessor.receive(&end).unwrap().listeners.len(), 1);
    predecessor.ready(&end).unwrap();
}

#[test]
fn a_socket_at_which_no_successor_listens_is_refused_without_a_wait() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let end = AtomicBool::default();
    assert!(Successor::connect(&path).is_err());
    let listener = crate::listener::open_private(&path, &end).unwrap();
    rustix::net::listen(&listener.fd, 0).unwrap();
    let waiting = Successor::connect(&path).unwrap();
    // Its queue is full now, or after one more.
    let full = (0..4).find_map(|_| Successor::connect(&path).err()).unwrap();
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    let accepted = Predecessor::accept(&listener, &end).unwrap();
    assert!(waiting.greets(&end));
    drop(accepted);
    let (successor, predecessor) = pair();
    predecessor.peer.send(Kind::Ready, PROTOCOL, &[]).unwrap();
    assert!(!successor.greets(&end));
}

#[test]
fn other_bytes_are_refused() {
    let end = AtomicBool::default();
    for bytes in [*b"x\0\0\0\0", *b"s\xff\xff\xff\xff", *b"a\xff\xff\xff\xff", *b"g\0\0\0\0"] {
        let (successor, predecessor) = pair();
        (&successor.0.0).write_all(&bytes).unwrap();
        assert!(matches!(predecessor.receive(&end), Err(TakeoverError::Invalid)), "{bytes:?}");
    }
}
