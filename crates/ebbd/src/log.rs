//! The log's way to standard error: a thread of its own writes, so that no worker waits for who reads it.
//!
//! # Invariants
//! - To log takes no longer than to copy the line, whatever standard error is and whether it is read.
//! - What waits to be written is bounded. Lines that find no room are counted, and a line says so at their place as
//!   soon as something is read again.
//! - At the end of the program the last lines are waited for, but not for long.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// The most that waits to be written, bytes: some two thousand lines.
const WAITING_MOST: usize = 256 << 10;
/// A larger buffer than this is not kept.
const KEPT: usize = 16 << 10;
/// How long the end of the program waits for the last lines.
const LAST: Duration = Duration::from_secs(2);
/// How long a standard error that must not be waited for has before it is tried again.
const AGAIN: Duration = Duration::from_millis(50);

/// The log. Its clones are one.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There is something to write; something was written.
    more: Condvar,
    written: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<u8>,
    /// Lines that found no room since the writer last took what waits. No line is taken behind them before.
    lost: u64,
    writing: bool,
}

impl Log {
    /// Starts the thread, which writes to `output`.
    ///
    /// # Errors
    /// The system's, if it has no thread left.
    pub fn start(output: impl Write + Send + 'static) -> io::Result<Log> {
        let log = Log::default();
        let own = log.clone();
        // It does nothing but write.
        let thread = std::thread::Builder::new().name("log".into()).stack_size(64 << 10);
        thread.spawn(move || own.run(output))?;
        Ok(log)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Text and counters: as good as before after a panic elsewhere.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a line, with its end, if there is room.
    pub fn line(&self, line: &[u8]) {
        let mut state = self.state();
        if state.lost > 0 || state.waiting.len() + line.len() > WAITING_MOST {
            state.lost = state.lost.saturating_add(1);
        } else {
            state.waiting.extend_from_slice(line);
        }
        self.0.more.notify_one();
    }

    /// Waits until all lines are written, but not long: true if they are.
    pub fn finish(&self) -> bool {
        let busy = |state: &mut State| state.writing || state.has_more();
        let waited = self.0.written.wait_timeout_while(self.state(), LAST, busy);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.writing && !state.has_more()
    }

    fn run(&self, mut output: impl Write) {
        let mut batch = Vec::new();
        loop {
            let mut state = self.state();
            state.writing = false;
            while !state.has_more() {
                self.0.written.notify_all();
                state = self.0.more.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            std::mem::swap(&mut batch, &mut state.waiting);
            let lost = std::mem::take(&mut state.lost);
            state.writing = true;
            drop(state);
            if lost > 0 {
                batch.extend_from_slice(missing(lost).as_bytes());
            }
            write_all(&mut output, &batch);
            batch.clear();
            batch.shrink_to(KEPT);
        }
    }
}

impl State {
    fn has_more(&self) -> bool {
        !self.waiting.is_empty() || self.lost > 0
    }
}

/// As a line of the log.
fn missing(lost: u64) -> String {
    let mut time = String::new();
    // A clock that cannot be shown is no reason to say nothing.
    let _ = SystemTime.format_time(&mut format::Writer::new(&mut time));
    format!(
        "{time}  WARN lines of the log are missing here: it was not read in time lines={lost}\n"
    )
}

/// What cannot be written is lost: there is no other place to say so.
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

/// Takes one line.
#[derive(Debug)]
pub struct Line<'a>(&'a Log);

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn lines_that_find_no_room_are_counted_and_told_at_their_place() {
        let (mut read_end, write_end) = io::pipe().unwrap();
        let log = Log::start(write_end).unwrap();
        let line = [&[b'x'; 99][..], b"\n"].concat();
        // Far more than the pipe and the queue hold; nothing of it waits.
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
        // All is told without another line, and then there is room for more.
        while !log.finish() {}
        log.line(b"the last\n");
        let text = reader.join().unwrap();
        let mut lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.pop(), Some("the last"));
        // One for each time that the writer took what waited.
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
