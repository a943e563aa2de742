//! A clock that ticks once a period, for a task of the control thread. It is a timer of the kernel (timerfd(2)): a tick of
//! the runtime's own timers wakes an idle thread three times, since they are kept in a wheel.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use tokio::net::unix::pipe::Receiver;

/// A clock that no task waits for yet.
#[derive(Debug)]
pub(crate) struct ClockFd(OwnedFd);

impl ClockFd {
    /// A clock whose first tick is a period from now.
    ///
    /// # Errors
    /// The process is out of descriptors, or `period` is too long.
    pub(crate) fn new(period: Duration) -> io::Result<ClockFd> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let period = Timespec::try_from(period).map_err(|_| io::ErrorKind::InvalidInput)?;
        let times = Itimerspec { it_interval: period, it_value: period };
        timerfd_settime(&fd, TimerfdTimerFlags::empty(), &times)?;
        Ok(ClockFd(fd))
    }

    /// Calls `work` at each tick. Ticks that pass while it runs are left out.
    ///
    /// # Errors
    /// The clock fails; it never ends otherwise. Must be polled within the runtime.
    pub(crate) async fn run(self, mut work: impl FnMut()) -> io::Result<()> {
        // It is read as a pipe is: a read waits until the timer has expired.
        let clock = Receiver::from_owned_fd_unchecked(self.0)?;
        loop {
            clock.readable().await?;
            match clock.try_read(&mut [0; 8]) {
                Ok(_) => work(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_tick_calls_once() {
        let clock = ClockFd::new(Duration::from_millis(1)).unwrap();
        let (sender, mut receiver) = tokio::sync::mpsc::channel(3);
        // The work fails when the channel is full or closed: the calls are counted, and it runs for ever.
        let run = tokio::spawn(clock.run(move || {
            let _ = sender.try_send(());
        }));
        for _ in 0..3 {
            receiver.recv().await.unwrap();
        }
        assert!(!run.is_finished());
        run.abort();
    }

    #[test]
    fn a_period_that_the_kernel_has_no_numbers_for_is_an_error() {
        assert!(ClockFd::new(Duration::MAX).is_err());
    }
}
