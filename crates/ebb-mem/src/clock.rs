//! The clock of this program: the system's monotonic one, or in a simulation (feature `sim`) one that
//! the simulation moves.
//!
//! A thread that has called [`set`] has its own time from then on; every other thread, and every build
//! without the feature, reads the system's clock directly.

use std::time::{Duration, Instant};

#[cfg(feature = "sim")]
thread_local! {
    static VIRTUAL: std::cell::Cell<Option<Instant>> = const { std::cell::Cell::new(None) };
}

/// The time now.
#[inline]
#[must_use]
pub fn now() -> Instant {
    #[cfg(feature = "sim")]
    if let Some(now) = VIRTUAL.get() {
        return now;
    }
    Instant::now()
}

/// The time since `then`; zero if `then` is in the future.
#[inline]
#[must_use]
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

/// Sets the time of this thread; `None`: the system's again. The simulation never sets it back.
#[cfg(feature = "sim")]
pub fn set(now: Option<Instant>) {
    VIRTUAL.set(now);
}

/// True on a thread whose time a simulation moves.
#[inline]
#[must_use]
pub fn is_virtual() -> bool {
    #[cfg(feature = "sim")]
    return VIRTUAL.get().is_some();
    #[cfg(not(feature = "sim"))]
    false
}
