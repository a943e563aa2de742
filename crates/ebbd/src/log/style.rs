//! The form of the log's lines: text or JSON, and the priorities of the journal (`sd-daemon(3)`).

use std::os::fd::AsFd;

use ebb_config::LogFormat;
use tracing::Level;
use tracing_subscriber::Layer;
use tracing_subscriber::registry::LookupSpan;

use super::Log;
use super::fields::TextFields;

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStyle {
    /// Text or JSON.
    pub format: LogFormat,
    /// The reader is the journal: each line begins with its priority, and text has no time.
    pub journal: bool,
    /// The reader is a terminal: levels have colours.
    pub terminal: bool,
}

impl LogStyle {
    /// What a line begins with.
    pub fn prefix(self, level: Level) -> &'static str {
        match level {
            _ if !self.journal => "",
            Level::ERROR => "<3>",
            Level::WARN => "<4>",
            Level::INFO => "<6>",
            _ => "<7>",
        }
    }

    /// The layer that writes lines to `log`.
    pub fn layer<S>(self, log: &Log) -> Box<dyn Layer<S> + Send + Sync>
    where
        S: tracing::Subscriber + for<'a> LookupSpan<'a>,
    {
        let lines = tracing_subscriber::fmt::layer().with_writer(log.clone()).with_target(false);
        match (self.format, self.journal) {
            (LogFormat::Json, _) => lines.json().flatten_event(true).boxed(),
            (LogFormat::Text, true) => {
                lines.fmt_fields(TextFields).with_ansi(false).without_time().boxed()
            }
            (LogFormat::Text, false) => {
                lines.fmt_fields(TextFields).with_ansi(self.terminal).boxed()
            }
        }
    }

    /// A line that is written without the subscriber, in this style.
    pub fn line(self, level: Level, time: &str, text: &str) -> String {
        let prefix = self.prefix(level);
        match self.format {
            LogFormat::Json => {
                let line = serde_json::json!({
                    "timestamp": time, "level": level.as_str(), "message": text,
                });
                format!("{prefix}{line}\n")
            }
            LogFormat::Text if self.journal => format!("{prefix}{level:>5} {text}\n"),
            LogFormat::Text => format!("{time} {level:>5} {text}\n"),
        }
    }
}

/// Whether a file is the stream that systemd connected to the journal: `JOURNAL_STREAM` has its device and inode.
pub fn is_journal(file: impl AsFd, variable: Option<&str>) -> bool {
    let Some((device, inode)) = variable.and_then(|text| text.split_once(':')) else {
        return false;
    };
    let (Ok(device), Ok(inode)) = (device.parse::<u64>(), inode.parse::<u64>()) else {
        return false;
    };
    rustix::fs::fstat(file).is_ok_and(|found| (found.st_dev, found.st_ino) == (device, inode))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use ebb_control::EventLog;
    use tracing_subscriber::prelude::*;

    use super::super::events::EventLayer;
    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What `act` logs in a style, and its events.
    fn logged(style: LogStyle, act: impl FnOnce()) -> (String, EventLog) {
        let (sink, events) = (Sink::default(), EventLog::default());
        let log = Log::start(sink.clone(), style).unwrap();
        let layers = style.layer(&log);
        let subscriber =
            tracing_subscriber::registry().with(layers).with(EventLayer(events.clone()));
        tracing::subscriber::with_default(subscriber, act);
        while !log.finish() {}
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        (text, events)
    }

    fn some_lines() {
        tracing::warn!(volume = "a\n<0>b", client = "192.0.2.1:7", error = %"broken", "it broke");
        tracing::info!(volume = "disk", "fine");
        tracing::debug!("detail");
        tracing::error!("worse");
    }

    #[test]
    fn the_journal_gets_a_priority_in_each_line() {
        let style = LogStyle { journal: true, ..LogStyle::default() };
        let (text, _) = logged(style, some_lines);
        let starts: Vec<&str> = text.lines().map(|line| line.get(..3).unwrap()).collect();
        assert_eq!(starts, ["<4>", "<6>", "<7>", "<3>"], "{text}");
        assert!(!text.contains("20") || !text.contains('Z'), "the journal has the time: {text}");
        let style = LogStyle::default();
        let (text, _) = logged(style, some_lines);
        assert!(!text.contains("<4>") && text.contains(" WARN it broke"), "{text}");
        assert_eq!(text.lines().count(), 4, "a field adds no line: {text}");
    }

    #[test]
    fn the_fields_of_text_are_quoted_in_one_way() {
        let (text, _) = logged(LogStyle { journal: true, ..LogStyle::default() }, || {
            let (peer, name) = ("unix (uid 0, pid 1)", "a \"b\"\x1b[31m");
            tracing::info!(volume = "disk", %peer, name, count = 7, on = true, part = 0.1 + 0.2, "it\x1b[1m is");
            tracing::info!(error = %"broken", absent = None::<u64>, given = Some(3), "so");
        });
        let lines: Vec<&str> = text.lines().collect();
        let expected = r#"<6> INFO it\u{1b}[1m is volume="disk" peer="unix (uid 0, pid 1)" name="a \"b\"\u{1b}[31m" count=7 on=true part=0.3"#;
        assert_eq!(lines, [expected, r#"<6> INFO so error="broken" given=3"#]);
        let (text, _) = logged(LogStyle { terminal: true, ..LogStyle::default() }, || {
            tracing::info!(volume = "disk", "fine");
        });
        assert!(text.contains("\x1b[3mvolume\x1b[0m\x1b[2m=\x1b[0m\"disk\""), "{text:?}");
    }

    #[test]
    fn json_has_one_object_in_each_line_with_its_fields() {
        for journal in [false, true] {
            let style = LogStyle { format: LogFormat::Json, journal, terminal: true };
            let (text, _) = logged(style, some_lines);
            let lines = text.lines().map(|line| {
                let line = if journal { &line[3..] } else { line };
                serde_json::from_str::<serde_json::Value>(line).unwrap()
            });
            let lines: Vec<_> = lines.collect();
            assert_eq!(lines.len(), 4);
            let first = &lines[0];
            assert_eq!((&first["message"], &first["level"]), (&"it broke".into(), &"WARN".into()));
            assert_eq!((&first["volume"], &first["error"]), (&"a\n<0>b".into(), &"broken".into()));
            assert!(first["timestamp"].as_str().unwrap().ends_with('Z'), "{first}");
        }
    }

    #[test]
    fn what_is_logged_at_info_and_above_becomes_an_event() {
        let (_, events) = logged(LogStyle::default(), || {
            some_lines();
            tracing::warn!(long = "ü".repeat(1 << 20), "long");
        });
        let found = events.all();
        let words: Vec<_> =
            found.iter().map(|event| (event.id, &*event.level, &*event.message)).collect();
        assert_eq!(
            words,
            [
                (1, "warn", "it broke"),
                (2, "info", "fine"),
                (3, "error", "worse"),
                (4, "warn", "long")
            ]
        );
        let fields = &found[0].fields;
        assert_eq!((&*fields["volume"], &*fields["client"]), ("a\n<0>b", "192.0.2.1:7"));
        assert_eq!(&*fields["error"], "broken");
        assert!(found[0].time > 1.7e9 && found[3].fields["long"].len() <= 1024);
    }

    #[test]
    fn the_journal_is_recognised_by_device_and_inode() {
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::tempfile().unwrap();
        let found = file.metadata().unwrap();
        let right = format!("{}:{}", found.dev(), found.ino());
        assert!(is_journal(&file, Some(&right)));
        for wrong in [None, Some(""), Some("1"), Some("x:y"), Some(&*format!("{right}1"))] {
            assert!(!is_journal(&file, wrong), "{wrong:?}");
        }
    }
}
