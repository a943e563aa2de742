//! The state machine of a device: what to do for the states of its two ends (`xen/include/public/io/xenbus.h`
//! and "State Diagrams" in `blkif.h`). Pure: it takes states and returns an action; `xenstore.rs` reads
//! xenstore and carries the action out.
//!
//! The guest chooses what the frontend writes, in any order and at any speed, and states can be missed,
//! since watches only say that something changed.

/// The states of one end of a device (`enum xenbus_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the protocol's")]
pub(crate) enum XenbusState {
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

impl XenbusState {
    const ALL: [XenbusState; 9] = [
        XenbusState::Unknown,
        XenbusState::Initialising,
        XenbusState::InitWait,
        XenbusState::Initialised,
        XenbusState::Connected,
        XenbusState::Closing,
        XenbusState::Closed,
        XenbusState::Reconfiguring,
        XenbusState::Reconfigured,
    ];

    /// Parses a node's value; an invalid value is [`XenbusState::Unknown`].
    pub(crate) fn parse(text: &str) -> XenbusState {
        let number = text.parse::<usize>().unwrap_or(0);
        if !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return XenbusState::Unknown;
        }
        XenbusState::ALL.get(number).copied().unwrap_or(XenbusState::Unknown)
    }

    /// As a node's value.
    pub(crate) fn text(self) -> &'static str {
        ["0", "1", "2", "3", "4", "5", "6", "7", "8"][self.index()]
    }

    fn index(self) -> usize {
        XenbusState::ALL.iter().position(|state| *state == self).unwrap_or_default()
    }
}

/// The phase of a device in this backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DevicePhase {
    /// Just found.
    New,
    /// Offered; the frontend has not responded.
    Waiting,
    /// ServedDevices.
    Connected {
        /// The frontend's state was `Connected` since.
        settled: bool,
    },
    /// Its rings are being drained.
    Draining,
    /// Not served; the frontend may connect again.
    Closed,
    /// Failed, until the frontend restarts.
    Failed,
}

/// The states read from xenstore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObservedStates {
    /// The frontend's state; `None` if its directory does not exist.
    pub frontend: Option<XenbusState>,
    /// The backend's state; `None` if its directory does not exist.
    pub own: Option<XenbusState>,
    /// The toolstack wants the device.
    pub online: bool,
    /// The frontend's nodes name another ring than the one that is served.
    pub other_ring: bool,
}

/// What to do next. After it was done [`next`] is called again, until it returns [`Action::Nothing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Wait for a change.
    Nothing,
    /// Publish the features and set [`XenbusState::InitWait`].
    Offer,
    /// Map the rings, publish the geometry, set [`XenbusState::Connected`].
    Connect,
    /// As [`Action::Connect`], resuming a predecessor's rings.
    Resume,
    /// Drain the rings.
    Disconnect,
    /// Set this state.
    Show(XenbusState),
    /// The frontend violated the protocol: report it and set [`XenbusState::Closing`].
    Fail,
    /// Forget the device, and remove its nodes and journals.
    Forget,
}

/// The next thing to do about a device in `phase`.
pub(crate) fn next(phase: DevicePhase, seen: &ObservedStates) -> Action {
    let served = matches!(phase, DevicePhase::Connected { .. });
    let Some(own) = seen.own else {
        return match phase {
            DevicePhase::Connected { .. } => Action::Disconnect,
            DevicePhase::Draining => Action::Nothing,
            _ => Action::Forget,
        };
    };
    if phase == DevicePhase::Draining {
        return Action::Nothing;
    }
    match seen.frontend {
        None | Some(XenbusState::Unknown) if served => Action::Disconnect,
        // Its directory was not created yet; or it was removed, which is the last thing to happen.
        None => match own {
            XenbusState::Initialising if phase == DevicePhase::New => Action::Nothing,
            XenbusState::Closed => Action::Forget,
            _ => Action::Show(XenbusState::Closed),
        },
        Some(XenbusState::Unknown) => Action::Nothing,
        Some(XenbusState::Initialising) => match phase {
            _ if served => Action::Disconnect,
            DevicePhase::Waiting if own == XenbusState::InitWait => Action::Nothing,
            // It was waiting when the device failed: trying again at once would repeat without end.
            DevicePhase::Failed if own == XenbusState::Closed => Action::Nothing,
            _ if own == XenbusState::Closing => Action::Show(XenbusState::Closed),
            _ if seen.online => Action::Offer,
            _ => Action::Nothing,
        },
        Some(frontend @ (XenbusState::Initialised | XenbusState::Connected)) => match phase {
            DevicePhase::New
                if own == XenbusState::Connected && frontend == XenbusState::Connected =>
            {
                Action::Resume
            }
            DevicePhase::Waiting if own == XenbusState::InitWait => Action::Connect,
            DevicePhase::New | DevicePhase::Closed | DevicePhase::Waiting if seen.online => {
                Action::Offer
            }
            // A state was missed: the frontend has restarted.
            DevicePhase::Connected { .. } if seen.other_ring => Action::Disconnect,
            DevicePhase::Connected { settled: true } if frontend == XenbusState::Initialised => {
                Action::Disconnect
            }
            _ => Action::Nothing,
        },
        Some(XenbusState::Closing) => match own {
            XenbusState::Closing | XenbusState::Closed => Action::Nothing,
            _ => Action::Show(XenbusState::Closing),
        },
        Some(XenbusState::Closed) if served => Action::Disconnect,
        Some(XenbusState::Closed) if own != XenbusState::Closed => match phase {
            // A frontend that was not started yet, or whose state is from before the guest restarted.
            DevicePhase::New if seen.online && own == XenbusState::Initialising => Action::Offer,
            _ => Action::Show(XenbusState::Closed),
        },
        Some(XenbusState::Closed) if !seen.online && phase != DevicePhase::New => Action::Forget,
        Some(XenbusState::Closed) => Action::Nothing,
        Some(XenbusState::InitWait | XenbusState::Reconfiguring | XenbusState::Reconfigured) => {
            match phase {
                DevicePhase::Failed => Action::Nothing,
                _ if own == XenbusState::Closing || own == XenbusState::Closed => Action::Nothing,
                _ => Action::Fail,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(frontend: XenbusState, own: XenbusState) -> ObservedStates {
        ObservedStates { frontend: Some(frontend), own: Some(own), online: true, other_ring: false }
    }

    #[test]
    fn a_guest_connects_and_disconnects() {
        use XenbusState::*;
        let to = |phase, frontend, own| next(phase, &seen(frontend, own));
        assert_eq!(to(DevicePhase::New, Initialising, Initialising), Action::Offer);
        assert_eq!(to(DevicePhase::Waiting, Initialising, InitWait), Action::Nothing);
        assert_eq!(to(DevicePhase::Waiting, Initialised, InitWait), Action::Connect);
        let fresh = DevicePhase::Connected { settled: false };
        assert_eq!(to(fresh, Initialised, XenbusState::Connected), Action::Nothing);
        let settled = DevicePhase::Connected { settled: true };
        assert_eq!(to(settled, XenbusState::Connected, XenbusState::Connected), Action::Nothing);
        assert_eq!(to(settled, Closing, XenbusState::Connected), Action::Show(Closing));
        assert_eq!(to(settled, Closing, Closing), Action::Nothing);
        assert_eq!(to(settled, Closed, Closing), Action::Disconnect);
        assert_eq!(to(DevicePhase::Closed, Closed, Closing), Action::Show(Closed));
        assert_eq!(to(DevicePhase::Closed, Closed, Closed), Action::Nothing);
        // The module is loaded again.
        assert_eq!(to(DevicePhase::Closed, Initialising, Closed), Action::Offer);
    }

    #[test]
    fn a_device_is_resumed_only_if_both_ends_are_connected() {
        use XenbusState::*;
        let connected = XenbusState::Connected;
        assert_eq!(next(DevicePhase::New, &seen(connected, connected)), Action::Resume);
        assert_eq!(next(DevicePhase::New, &seen(Initialised, connected)), Action::Offer);
        assert_eq!(next(DevicePhase::New, &seen(connected, InitWait)), Action::Offer);
    }

    #[test]
    fn a_missed_state_leads_to_a_disconnect() {
        let settled = DevicePhase::Connected { settled: true };
        assert_eq!(
            next(settled, &seen(XenbusState::Initialised, XenbusState::Connected)),
            Action::Disconnect
        );
        let mut other = seen(XenbusState::Connected, XenbusState::Connected);
        other.other_ring = true;
        assert_eq!(next(settled, &other), Action::Disconnect);
        assert_eq!(
            next(settled, &seen(XenbusState::Initialising, XenbusState::Connected)),
            Action::Disconnect
        );
    }

    #[test]
    fn a_device_whose_directories_were_removed_is_forgotten() {
        let mut removed = seen(XenbusState::Connected, XenbusState::Connected);
        removed.own = None;
        assert_eq!(next(DevicePhase::Connected { settled: true }, &removed), Action::Disconnect);
        assert_eq!(next(DevicePhase::Closed, &removed), Action::Forget);
        let mut destroyed = seen(XenbusState::Closed, XenbusState::Connected);
        destroyed.frontend = None;
        assert_eq!(next(DevicePhase::Connected { settled: true }, &destroyed), Action::Disconnect);
        assert_eq!(next(DevicePhase::Closed, &destroyed), Action::Show(XenbusState::Closed));
        destroyed.own = Some(XenbusState::Closed);
        assert_eq!(next(DevicePhase::Closed, &destroyed), Action::Forget);
    }

    #[test]
    fn states_that_disks_do_not_use_fail_the_device_once() {
        for odd in [XenbusState::InitWait, XenbusState::Reconfiguring, XenbusState::Reconfigured] {
            assert_eq!(next(DevicePhase::Waiting, &seen(odd, XenbusState::InitWait)), Action::Fail);
            assert_eq!(
                next(DevicePhase::Failed, &seen(odd, XenbusState::Closing)),
                Action::Nothing
            );
        }
    }

    #[test]
    fn states_and_their_texts_match() {
        for state in XenbusState::ALL {
            assert_eq!(XenbusState::parse(state.text()), state);
        }
        for text in ["", "9", "-1", "+4", "4 ", "0x4", "99999999999999999999", "four"] {
            assert_eq!(XenbusState::parse(text), XenbusState::Unknown, "{text}");
        }
    }

    /// For all states of the two ends, repeating the actions ends.
    #[test]
    fn the_actions_always_end() {
        let phases = [
            DevicePhase::New,
            DevicePhase::Waiting,
            DevicePhase::Connected { settled: false },
            DevicePhase::Connected { settled: true },
            DevicePhase::Draining,
            DevicePhase::Closed,
            DevicePhase::Failed,
        ];
        let ends = || XenbusState::ALL.into_iter().map(Some).chain([None]);
        for (phase, frontend) in phases.into_iter().flat_map(|p| ends().map(move |f| (p, f))) {
            for (own, bits) in ends().flat_map(|own| (0..4).map(move |bits| (own, bits))) {
                let (online, other_ring) = (bits & 1 != 0, bits & 2 != 0);
                let mut seen = ObservedStates { frontend, own, online, other_ring };
                let mut phase = phase;
                let mut steps = 0;
                loop {
                    steps += 1;
                    assert!(steps < 10, "{phase:?} {seen:?}");
                    match next(phase, &seen) {
                        Action::Nothing | Action::Forget => break,
                        Action::Offer => {
                            seen.own = Some(XenbusState::InitWait);
                            phase = DevicePhase::Waiting;
                        }
                        Action::Connect | Action::Resume => {
                            seen.own = Some(XenbusState::Connected);
                            seen.other_ring = false;
                            let settled = seen.frontend == Some(XenbusState::Connected);
                            phase = DevicePhase::Connected { settled };
                        }
                        Action::Disconnect => phase = DevicePhase::Closed,
                        Action::Show(state) => {
                            seen.own = Some(state);
                            if state == XenbusState::Closed {
                                phase = DevicePhase::Closed;
                            }
                        }
                        Action::Fail => {
                            seen.own = Some(XenbusState::Closing);
                            phase = DevicePhase::Failed;
                        }
                    }
                }
            }
        }
    }
}
