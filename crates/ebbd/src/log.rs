//! The writer of the log: a thread of its own writes to standard error, so that no worker waits for its reader.
//!
//! # Invariants
//! - Logging a line takes no longer than copying it, whatever standard error is and whether it is read.
//! - The buffer is bounded. Lines that do not fit are counted, and a line at their place reports the count as soon as
//!   the reader reads again.
//! - The program waits for its last lines when it ends, but at most for [`LAST`].

pub mod events;
mod fields;
pub mod style;

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ebb_config::LogFormat;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use self::style::LogStyle;

/// The size of the buffer, bytes: some two thousand lines.
const WAITING_MOST: usize = 256 << 10;
/// A larger allocation is not kept after its lines were written.
const KEPT: usize = 16 << 10;
/// How long the program waits for its last lines when it ends.
const LAST: Duration = Duration::from_secs(2);
/// The pause before a write to a full non-blocking standard error is tried again.
const AGAIN: Duration = Duration::from_millis(50);

/// The log; clones share one buffer.
#[derive(Clone, Debug, Default)]
pub struct Log {
    shared: Arc<LogShared>,
    style: LogStyle,
}

#[derive(Debug, Default)]
struct LogShared {
    state: Mutex<LogBuffer>,
    /// Notified when there is something to write, and when something was written.
    more: Condvar,
    written: Condvar,
}

#[derive(Debug, Default)]
struct LogBuffer {
    waiting: Vec<u8>,
    /// Lines that did not fit since the writer last emptied the buffer. Until it does, no line is accepted after them.
    lost: u64,
    writing: bool,
}

impl Log {
    /// Starts the thread, which writes to `output`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(output: impl Write + Send + 'static, style: LogStyle) -> io::Result<Log> {
        let log = Log { style, ..Log::default() };
        let own = log.clone();
        // It only writes, so that a small stack suffices.
        let thread = std::thread::Builder::new().name("log".into()).stack_size(64 << 10);
        thread.spawn(move || own.run(output))?;
        Ok(log)
    }

    fn state(&self) -> MutexGuard<'_, LogBuffer> {
        // Text and counters are valid after a panic of another thread.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Buffers the program's last line, the error that it ends with: in text as any program writes it.
    pub fn end(&self, text: &str) {
        let line = match self.style.format {
            LogFormat::Text => format!("{}ebbd: {text}\n", self.style.prefix(Level::ERROR)),
            LogFormat::Json => self.style.line(Level::ERROR, &time(), text),
        };
        self.line(line.as_bytes());
    }

    /// Buffers a line, including its newline, if there is room.
    pub fn line(&self, line: &[u8]) {
        let mut state = self.state();
        if state.lost > 0 || state.waiting.len() + line.len() > WAITING_MOST {
            state.lost = state.lost.saturating_add(1);
        } else {
            state.waiting.extend_from_slice(line);
        }
        self.shared.more.notify_one();
    }

    /// Waits until all lines are written, for [`LAST`] at most: true if they are.
    pub fn finish(&self) -> bool {
        let busy = |state: &mut LogBuffer| state.writing || state.has_more();
        let waited = self.shared.written.wait_timeout_while(self.state(), LAST, busy);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.writing && !state.has_more()
    }

    fn run(&self, mut output: impl Write) {
        let mut batch = Vec::new();
        loop {
            let mut state = self.state();
            state.writing = false;
            while !state.has_more() {
                self.shared.written.notify_all();
                state = self.shared.more.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            std::mem::swap(&mut batch, &mut state.waiting);
            let lost = std::mem::take(&mut state.lost);
            state.writing = true;
            drop(state);
            if lost > 0 {
                batch.extend_from_slice(missing(lost, self.style).as_bytes());
            }
            write_all(&mut output, &batch);
            batch.clear();
            batch.shrink_to(KEPT);
        }
    }
}

impl LogBuffer {
    fn has_more(&self) -> bool {
        !self.waiting.is_empty() || self.lost > 0
    }
}

/// The line of the log for `lost` missing lines.
fn missing(lost: u64, style: LogStyle) -> String {
    let text = format!("lines of the log are missing here: its reader was too slow lines={lost}");
    style.line(Level::WARN, &time(), &text)
}

fn time() -> String {
    let mut time = String::new();
    // Without a time the line is written nevertheless.
    let _ = SystemTime.format_time(&mut format::Writer::new(&mut time));
    time
}

/// Writes all, or drops what cannot be written: an error of the log cannot be reported anywhere.
fn write_all(output: &mut impl Write, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(0) => return,
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                std::thread::park_timeout(AGAIN);
            }
            Err(_) => return,
        }
    }
}

/// An error and its causes in one line. A cause that the text before it contains already is left out, such as the error
/// of the system in a message that quotes it.
pub fn reasons(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Writes one line to the log.
#[derive(Debug)]
pub struct LogWriter<'a> {
    log: &'a Log,
    prefix: &'static str,
}

impl Write for LogWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // The subscriber writes each line at once.
        if self.prefix.is_empty() {
            self.log.line(line);
        } else {
            self.log.line(&[self.prefix.as_bytes(), line].concat());
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = LogWriter<'a>;

    fn make_writer(&'a self) -> LogWriter<'a> {
        LogWriter { log: self, prefix: "" }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> LogWriter<'a> {
        LogWriter { log: self, prefix: self.style.prefix(*metadata.level()) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot read x ({source}): check it")]
        struct Quoting {
            source: io::Error,
        }
        let error = || Quoting { source: io::Error::from_raw_os_error(2) };
        let said = reasons(&anyhow::Error::from(error()).context("TLS"));
        assert_eq!(said, "TLS: cannot read x (No such file or directory (os error 2)): check it");
        let said = reasons(&anyhow::Error::from(error().source).context("open"));
        assert_eq!(said, "open: No such file or directory (os error 2)");
    }

    #[test]
    fn lines_that_do_not_fit_are_counted_and_the_count_is_logged_in_their_place() {
        let (mut read_end, write_end) = io::pipe().unwrap();
        let log = Log::start(write_end, LogStyle::default()).unwrap();
        let line = [&[b'x'; 99][..], b"\n"].concat();
        // Far more than the pipe and the buffer hold; no call blocks.
        const LINES: usize = 50_000;
        (0..LINES).for_each(|_| log.line(&line));
        assert!(log.state().waiting.len() <= WAITING_MOST);
        assert!(!log.finish(), "the pipe is not read");
        let reader = std::thread::spawn(move || {
            let (mut text, mut piece) = (String::new(), [0; 4096]);
            while !text.ends_with("the last\n") {
                let count = read_end.read(&mut piece).unwrap();
                text.push_str(std::str::from_utf8(&piece[..count]).unwrap());
            }
            text
        });
        // The counts are written without a further line, and then there is room again.
        while !log.finish() {}
        log.line(b"the last\n");
        let text = reader.join().unwrap();
        let mut lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.pop(), Some("the last"));
        // One for each time that the writer emptied the buffer.
        let told = lines.iter().filter_map(|line| {
            let (text, lost) = line.split_once("lines=")?;
            assert!(text.contains(" WARN lines of the log are missing here"), "{line}");
            lost.parse::<usize>().ok()
        });
        let lost: usize = told.sum();
        let whole = |line: &&&str| line.len() == 99 && line.starts_with('x');
        assert_eq!(lines.iter().filter(whole).count() + lost, LINES, "of {}", lines.len());
        assert!(lost > 0);
    }
}
