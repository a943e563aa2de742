//! Failed logins: each is answered late, and some are logged.
//!
//! A valid token is never refused because of other failures, so that no client can lock out others of the same address.
//! Tokens cannot be guessed; the delay keeps a program that tries from using the daemon's time and log.
//!
//! # Invariants
//! - At most [`LATE_MOST`] replies wait; further ones are sent at once, with 429.
//! - The table of addresses has at most [`ADDRESSES_MOST`] entries, whatever peers send.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use ebb_volume::LogLimit;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::answer::ApiRefusal;
use crate::page_connections::{PeerId, address};

/// The delay of an address's first failure; each further one adds as much.
const STEP: Duration = Duration::from_millis(100);
/// The longest delay.
const LATEST: Duration = Duration::from_secs(2);
/// The most replies that wait at a time: fewer than connections.
const LATE_MOST: usize = 8;
/// The failures of an address are forgotten after so long without one.
const FORGET: Duration = Duration::from_secs(60);
/// Addresses whose failures are remembered.
const ADDRESSES_MOST: usize = 1024;
/// Limit of the log lines of all addresses together, and its period.
const LINES: u32 = 10;
const LINES_PERIOD: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct FailedLogins {
    late: Semaphore,
    state: Mutex<FailureTable>,
}

#[derive(Debug)]
struct FailureTable {
    addresses: BTreeMap<PeerId, (u32, Instant)>,
    lines: LogLimit,
}

impl Default for FailedLogins {
    fn default() -> Self {
        let lines = LogLimit::new(LINES, LINES_PERIOD);
        let state = Mutex::new(FailureTable { addresses: BTreeMap::new(), lines });
        Self { late: Semaphore::new(LATE_MOST), state }
    }
}

impl FailedLogins {
    /// Counts and logs a failed login, and returns its refusal, late.
    pub(super) async fn refuse(&self, peer: IpAddr) -> ApiRefusal {
        let delay = self.note(peer, Instant::now());
        let Ok(_late) = self.late.try_acquire() else {
            let message = "too many logins have failed";
            let remedy = "try again in a few seconds";
            return ApiRefusal::new(StatusCode::TOO_MANY_REQUESTS, "too_many", message, remedy);
        };
        tokio::time::sleep(delay).await;
        super::unauthorized("the token is not one of this daemon's")
    }

    /// How long to wait before the reply.
    fn note(&self, peer: IpAddr, now: Instant) -> Duration {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(left_out) = state.lines.admit(now.into_std()) {
            let left_out = (left_out > 0).then_some(left_out);
            tracing::info!(
                client = %peer.to_canonical(),
                left_out,
                "a login to the page failed: the token is not in the file `web_tokens`"
            );
        }
        let table = &mut state.addresses;
        let of = address(peer);
        if table.len() >= ADDRESSES_MOST && !table.contains_key(&of) {
            table.retain(|_, (_, last)| now.saturating_duration_since(*last) < FORGET);
            if table.len() >= ADDRESSES_MOST {
                // Many addresses fail at the same time: the longest delay for those that are not remembered.
                return LATEST;
            }
        }
        let (count, last) = table.entry(of).or_insert((0, now));
        if now.saturating_duration_since(*last) >= FORGET {
            *count = 0;
        }
        (*count, *last) = (count.saturating_add(1), now);
        STEP.saturating_mul(*count).min(LATEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_grows_with_the_failures_of_an_address_and_is_forgotten() {
        let (logins, now) = (FailedLogins::default(), Instant::now());
        let (one, two) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        assert_eq!([logins.note(one, now), logins.note(one, now)], [STEP, STEP * 2]);
        assert_eq!(logins.note(two, now), STEP);
        let last = (0..1000).map(|_| logins.note(one, now)).last();
        assert_eq!(last, Some(LATEST));
        assert_eq!(logins.note(one, now + FORGET), STEP);
    }

    #[test]
    fn many_addresses_are_not_all_remembered() {
        let (logins, now) = (FailedLogins::default(), Instant::now());
        for number in 0..5000_u32 {
            logins.note(IpAddr::from(number.to_be_bytes()), now);
        }
        let remembered = |logins: &FailedLogins| logins.state.lock().unwrap().addresses.len();
        assert_eq!(remembered(&logins), ADDRESSES_MOST);
        assert_eq!(logins.note(IpAddr::from([9, 9, 9, 9]), now), LATEST);
        assert_eq!(logins.note(IpAddr::from([9, 9, 9, 9]), now + FORGET), STEP);
        assert_eq!(remembered(&logins), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn few_refusals_wait_at_a_time() {
        let logins = FailedLogins::default();
        let peer = IpAddr::from([192, 0, 2, 1]);
        let all: Vec<_> = (0..100).map(|_| Box::pin(logins.refuse(peer))).collect();
        let mut at_once = 0;
        let mut waiting = Vec::new();
        for mut refusal in all {
            match futures_lite::future::poll_once(&mut refusal).await {
                Some(refused) => {
                    assert_eq!(refused.0, StatusCode::TOO_MANY_REQUESTS);
                    at_once += 1;
                }
                None => waiting.push(refusal),
            }
        }
        assert_eq!((at_once, waiting.len()), (100 - LATE_MOST, LATE_MOST));
        for refusal in waiting {
            assert_eq!(refusal.await.0, StatusCode::UNAUTHORIZED);
        }
    }
}
