//! The device's state machine: what to do about the states the two ends show (reference, 5.2).
//! Pure: it sees numbers and says what to do; `xenstore.rs` reads xenstore and does it.
//!
//! Everything the frontend writes is the guest's to choose, in any order and at any speed, and
//! states may be missed, since watches say only that something changed.

/// States of a device's end (`xenbus_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the protocol say it")]
pub enum State {
    Unknown,
    Initialising,
    InitWait,
    Initialised,
    Connected,
    Closing,
    Closed,
    Reconfiguring,
    Reconfigured,
}

impl State {
    const ALL: [State; 9] = [
        State::Unknown,
        State::Initialising,
        State::InitWait,
        State::Initialised,
        State::Connected,
        State::Closing,
        State::Closed,
        State::Reconfiguring,
        State::Reconfigured,
    ];

    /// From a node's value; what is no state is [`State::Unknown`].
    pub fn parse(text: &str) -> State {
        let number = text.parse::<usize>().unwrap_or(0);
        if !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return State::Unknown;
        }
        State::ALL.get(number).copied().unwrap_or(State::Unknown)
    }

    /// As a node's value.
    pub fn text(self) -> &'static str {
        ["0", "1", "2", "3", "4", "5", "6", "7", "8"][self.index()]
    }

    fn index(self) -> usize {
        State::ALL.iter().position(|state| *state == self).unwrap_or_default()
    }
}

/// What the backend is doing about a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Just found.
    New,
    /// Offered; the frontend has not answered.
    Waiting,
    /// Served.
    Connected {
        /// The frontend has been seen connected since.
        settled: bool,
    },
    /// Rings are being wound up.
    Draining,
    /// Nothing is served; the frontend may come again.
    Closed,
    /// Given up, until the frontend starts anew.
    Failed,
}

/// What xenstore shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The frontend's state; `None` if its directory is gone.
    pub frontend: Option<State>,
    /// Our own state; `None` if our directory is gone.
    pub own: Option<State>,
    /// The toolstack wants the device.
    pub online: bool,
    /// The ring the frontend names is not the one that is served.
    pub other_ring: bool,
}

/// What to do next. After it was done the machine is asked again, until it says [`Action::Nothing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Wait for a change.
    Nothing,
    /// Publish what the device can and show [`State::InitWait`].
    Offer,
    /// Map the rings, publish the disk, show [`State::Connected`].
    Connect,
    /// As [`Action::Connect`], with what a predecessor left.
    Resume,
    /// Wind the rings up.
    Disconnect,
    /// Show this state.
    Show(State),
    /// The frontend broke the rules: say so and show [`State::Closing`].
    Fail,
    /// Forget the device, and remove what is left of it.
    Forget,
}

/// The next thing to do about a device in `phase`.
pub fn next(phase: Phase, seen: &Seen) -> Action {
    let served = matches!(phase, Phase::Connected { .. });
    let Some(own) = seen.own else {
        return match phase {
            Phase::Connected { .. } => Action::Disconnect,
            Phase::Draining => Action::Nothing,
            _ => Action::Forget,
        };
    };
    if phase == Phase::Draining {
        return Action::Nothing;
    }
    match seen.frontend {
        None | Some(State::Unknown) if served => Action::Disconnect,
        // Its directory has not been made yet; or it was removed, which comes last of all.
        None => match own {
            State::Initialising if phase == Phase::New => Action::Nothing,
            State::Closed => Action::Forget,
            _ => Action::Show(State::Closed),
        },
        Some(State::Unknown) => Action::Nothing,
        Some(State::Initialising) => match phase {
            _ if served => Action::Disconnect,
            Phase::Waiting if own == State::InitWait => Action::Nothing,
            // It waits since before we gave up: to try again at once would go on for ever.
            Phase::Failed if own == State::Closed => Action::Nothing,
            _ if own == State::Closing => Action::Show(State::Closed),
            _ if seen.online => Action::Offer,
            _ => Action::Nothing,
        },
        Some(frontend @ (State::Initialised | State::Connected)) => match phase {
            Phase::New if own == State::Connected && frontend == State::Connected => Action::Resume,
            Phase::Waiting if own == State::InitWait => Action::Connect,
            Phase::New | Phase::Closed | Phase::Waiting if seen.online => Action::Offer,
            // A state was missed: the guest has begun anew.
            Phase::Connected { .. } if seen.other_ring => Action::Disconnect,
            Phase::Connected { settled: true } if frontend == State::Initialised => {
                Action::Disconnect
            }
            _ => Action::Nothing,
        },
        Some(State::Closing) => match own {
            State::Closing | State::Closed => Action::Nothing,
            _ => Action::Show(State::Closing),
        },
        Some(State::Closed) if served => Action::Disconnect,
        Some(State::Closed) if own != State::Closed => match phase {
            // A frontend that has not come yet, such as one left by the guest's last life.
            Phase::New if seen.online && own == State::Initialising => Action::Offer,
            _ => Action::Show(State::Closed),
        },
        Some(State::Closed) if !seen.online && phase != Phase::New => Action::Forget,
        Some(State::Closed) => Action::Nothing,
        Some(State::InitWait | State::Reconfiguring | State::Reconfigured) => match phase {
            Phase::Failed => Action::Nothing,
            _ if own == State::Closing || own == State::Closed => Action::Nothing,
            _ => Action::Fail,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(frontend: State, own: State) -> Seen {
        Seen { frontend: Some(frontend), own: Some(own), online: true, other_ring: false }
    }

    #[test]
    fn a_guest_connects_and_leaves() {
        use State::*;
        let to = |phase, frontend, own| next(phase, &seen(frontend, own));
        assert_eq!(to(Phase::New, Initialising, Initialising), Action::Offer);
        assert_eq!(to(Phase::Waiting, Initialising, InitWait), Action::Nothing);
        assert_eq!(to(Phase::Waiting, Initialised, InitWait), Action::Connect);
        let fresh = Phase::Connected { settled: false };
        assert_eq!(to(fresh, Initialised, State::Connected), Action::Nothing);
        let settled = Phase::Connected { settled: true };
        assert_eq!(to(settled, State::Connected, State::Connected), Action::Nothing);
        assert_eq!(to(settled, Closing, State::Connected), Action::Show(Closing));
        assert_eq!(to(settled, Closing, Closing), Action::Nothing);
        assert_eq!(to(settled, Closed, Closing), Action::Disconnect);
        assert_eq!(to(Phase::Closed, Closed, Closing), Action::Show(Closed));
        assert_eq!(to(Phase::Closed, Closed, Closed), Action::Nothing);
        // The module is loaded again.
        assert_eq!(to(Phase::Closed, Initialising, Closed), Action::Offer);
    }

    #[test]
    fn a_predecessor_is_succeeded_only_between_two_connected_ends() {
        use State::*;
        let connected = State::Connected;
        assert_eq!(next(Phase::New, &seen(connected, connected)), Action::Resume);
        assert_eq!(next(Phase::New, &seen(Initialised, connected)), Action::Offer);
        assert_eq!(next(Phase::New, &seen(connected, InitWait)), Action::Offer);
    }

    #[test]
    fn a_missed_state_is_made_up_for() {
        let settled = Phase::Connected { settled: true };
        assert_eq!(next(settled, &seen(State::Initialised, State::Connected)), Action::Disconnect);
        let mut other = seen(State::Connected, State::Connected);
        other.other_ring = true;
        assert_eq!(next(settled, &other), Action::Disconnect);
        assert_eq!(next(settled, &seen(State::Initialising, State::Connected)), Action::Disconnect);
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let mut gone = seen(State::Connected, State::Connected);
        gone.own = None;
        assert_eq!(next(Phase::Connected { settled: true }, &gone), Action::Disconnect);
        assert_eq!(next(Phase::Closed, &gone), Action::Forget);
        let mut destroyed = seen(State::Closed, State::Connected);
        destroyed.frontend = None;
        assert_eq!(next(Phase::Connected { settled: true }, &destroyed), Action::Disconnect);
        assert_eq!(next(Phase::Closed, &destroyed), Action::Show(State::Closed));
        destroyed.own = Some(State::Closed);
        assert_eq!(next(Phase::Closed, &destroyed), Action::Forget);
    }

    #[test]
    fn states_that_make_no_sense_here_fail_once() {
        for odd in [State::InitWait, State::Reconfiguring, State::Reconfigured] {
            assert_eq!(next(Phase::Waiting, &seen(odd, State::InitWait)), Action::Fail);
            assert_eq!(next(Phase::Failed, &seen(odd, State::Closing)), Action::Nothing);
        }
    }

    #[test]
    fn numbers_and_texts() {
        for state in State::ALL {
            assert_eq!(State::parse(state.text()), state);
        }
        for text in ["", "9", "-1", "+4", "4 ", "0x4", "99999999999999999999", "four"] {
            assert_eq!(State::parse(text), State::Unknown, "{text}");
        }
    }

    /// Whatever the two ends show, doing what the machine says comes to rest.
    #[test]
    fn it_always_comes_to_rest() {
        let phases = [
            Phase::New,
            Phase::Waiting,
            Phase::Connected { settled: false },
            Phase::Connected { settled: true },
            Phase::Draining,
            Phase::Closed,
            Phase::Failed,
        ];
        let ends = || State::ALL.into_iter().map(Some).chain([None]);
        for (phase, frontend) in phases.into_iter().flat_map(|p| ends().map(move |f| (p, f))) {
            for (own, bits) in ends().flat_map(|own| (0..4).map(move |bits| (own, bits))) {
                let (online, other_ring) = (bits & 1 != 0, bits & 2 != 0);
                let mut seen = Seen { frontend, own, online, other_ring };
                let mut phase = phase;
                let mut steps = 0;
                loop {
                    steps += 1;
                    assert!(steps < 10, "{phase:?} {seen:?}");
                    match next(phase, &seen) {
                        Action::Nothing | Action::Forget => break,
                        Action::Offer => {
                            seen.own = Some(State::InitWait);
                            phase = Phase::Waiting;
                        }
                        Action::Connect | Action::Resume => {
                            seen.own = Some(State::Connected);
                            seen.other_ring = false;
                            let settled = seen.frontend == Some(State::Connected);
                            phase = Phase::Connected { settled };
                        }
                        Action::Disconnect => phase = Phase::Closed,
                        Action::Show(state) => {
                            seen.own = Some(state);
                            if state == State::Closed {
                                phase = Phase::Closed;
                            }
                        }
                        Action::Fail => {
                            seen.own = Some(State::Closing);
                            phase = Phase::Failed;
                        }
                    }
                }
            }
        }
    }
}
