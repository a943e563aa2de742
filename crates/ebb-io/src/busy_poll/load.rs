//! How much of the machine is in use, as far as polling has to know it: read by a worker that polls, ten times per second.

use std::fs::File;
use std::str::FromStr;
use std::time::Duration;

use crate::read_now::read_now;

/// Totals since some point in the past; only differences count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoadSample {
    /// How long the processors of the machine were idle, all together; `None` if that is unknown, or if there is only one.
    pub(crate) idle: Option<Duration>,
    /// How long this thread was ready to run, but waited for a processor.
    pub(crate) delayed: Duration,
}

/// Reads samples on one thread.
///
/// A worker opens it before it is restricted: it cannot afterwards.
#[derive(Debug)]
pub(crate) struct LoadReader {
    /// `proc_uptime(5)`: the second number is the sum of the idle times of all processors, in seconds.
    uptime: Option<File>,
    /// `Documentation/scheduler/sched-stats.rst`: the second number is the time spent waiting on a run queue, in
    /// nanoseconds.
    schedstat: Option<File>,
}

impl LoadReader {
    /// For the calling thread; `alone`: the process has one processor.
    pub(crate) fn open(alone: bool) -> LoadReader {
        LoadReader {
            uptime: if alone { None } else { File::open("/proc/uptime").ok() },
            schedstat: File::open("/proc/thread-self/schedstat").ok(),
        }
    }

    /// The totals now. A delay that cannot be read counts as none.
    pub(crate) fn read(&self) -> LoadSample {
        let idle = self.uptime.as_ref().and_then(second);
        let idle = idle.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let delayed = self.schedstat.as_ref().and_then(second);
        LoadSample { idle, delayed: delayed.map(Duration::from_nanos).unwrap_or_default() }
    }
}

/// The second number of a file in `/proc`.
fn second<T: FromStr>(file: &File) -> Option<T> {
    let mut bytes = [0; 128];
    let count = read_now(file, &mut bytes).ok()?;
    let text = std::str::from_utf8(bytes.get(..count)?).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_of_this_machine_can_be_read() {
        let reader = LoadReader::open(false);
        let before = reader.read();
        assert!(before.idle > Some(Duration::ZERO));
        let later = reader.read();
        assert!(later.idle >= before.idle && later.delayed >= before.delayed);
        assert_eq!(LoadReader::open(true).read().idle, None);
    }
}
