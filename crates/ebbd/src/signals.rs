//! The signals of the daemon: SIGTERM and SIGINT stop it, SIGHUP reloads the configuration file.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

/// Signals that would end the process before the daemon is ready for them.
pub struct EarlySignals {
    hangup: Arc<AtomicBool>,
    /// A signal has requested the end of the daemon.
    pub(crate) end: Arc<AtomicBool>,
    /// Who receives the signals, once they are watched.
    receiver: OnceLock<Arc<Mutex<SendSignal>>>,
}

type SendSignal = Box<dyn Fn(i32) + Send>;

impl std::fmt::Debug for EarlySignals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EarlySignals")
    }
}

impl EarlySignals {
    /// From now on SIGHUP requests a reload, which takes place when the daemon has started, and a write beyond the
    /// process's limit of file size (`RLIMIT_FSIZE`) fails with an error and does not end the process. Call this before
    /// the configuration is read: a reload that is requested meanwhile must not be lost.
    ///
    /// # Errors
    /// If the signal handlers cannot be installed.
    pub fn watch() -> std::io::Result<EarlySignals> {
        let hangup = Arc::<AtomicBool>::default();
        signal_hook::flag::register(SIGHUP, hangup.clone())?;
        // With a handler the write fails with EFBIG, as if the signal were ignored.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(EarlySignals { hangup, end: Arc::default(), receiver: OnceLock::new() })
    }
}

/// Passes signals to `send`; if it is called again, from then on to another one, which first gets a SIGTERM if there was
/// one. The third SIGTERM or SIGINT ends the process, whatever the main thread does.
pub(crate) fn watch(
    early: &EarlySignals,
    send: impl Fn(i32) + Send + 'static,
) -> anyhow::Result<()> {
    if let Some(receiver) = early.receiver.get() {
        let mut receiver = receiver.lock().unwrap_or_else(PoisonError::into_inner);
        if early.end.load(Ordering::SeqCst) {
            send(SIGTERM);
        }
        *receiver = Box::new(send);
        return Ok(());
    }
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    if early.hangup.load(Ordering::SeqCst) {
        send(SIGHUP);
    }
    let send: SendSignal = Box::new(send);
    let receiver = early.receiver.get_or_init(|| Arc::new(Mutex::new(send))).clone();
    let end = early.end.clone();
    let watch = move || {
        let mut ends = 0;
        for signal in signals.forever() {
            // Locked before the flag is set, so that a new receiver gets the signal once.
            let send = receiver.lock().unwrap_or_else(PoisonError::into_inner);
            if signal != SIGHUP {
                ends += 1;
                end.store(true, Ordering::SeqCst);
            }
            if ends > 2 {
                signal_hook::low_level::exit(1);
            }
            send(signal);
        }
    };
    let thread = std::thread::Builder::new().name("ebbd-signals".into()).stack_size(128 << 10);
    thread.spawn(watch).context("the thread for signals")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};

    use super::*;

    #[test]
    fn a_hangup_before_the_start_requests_a_reload_and_a_file_size_signal_does_not_end_the_process()
    {
        let early = EarlySignals::watch().unwrap();
        kill_process(getpid(), Signal::HUP).unwrap();
        kill_process(getpid(), Signal::XFSZ).unwrap();
        while !early.hangup.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let (sender, signals) = channel();
        super::watch(&early, move |signal| sender.send(signal).unwrap()).unwrap();
        let signal = signals.recv_timeout(Duration::from_secs(60)).expect("the reload is lost");
        assert_eq!(signal, SIGHUP);
    }
}
