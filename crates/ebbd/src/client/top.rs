//! `ebbd top`: the volumes of a daemon by what they do, on a terminal.
//!
//! A thread asks the daemon for samples, so that keys work while it does not reply.

use std::cmp::Ordering;
use std::io::{self, IsTerminal};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use ebb_api::stat::Stat;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Row, Table};

use super::persistent::AGAIN;
use super::rates::{VolumeRates, rates};
use super::table::Tint;
use super::watch::{COLUMNS, TITLES, columns, is_left, row, summary, tint};
use super::{ClientError, DaemonClient};
use crate::cli::{TopArgs, TopSort};

/// The pause between two looks at keys and samples.
const PAUSE: Duration = Duration::from_millis(100);

/// Shows the volumes until `q` is pressed.
///
/// # Errors
/// [`ClientError`] if the first sample cannot be had, or with `--json`; if standard output is no terminal.
pub fn top(args: &TopArgs) -> anyhow::Result<()> {
    if args.json {
        let message = "top shows a table that is updated on a terminal".to_owned();
        let remedy = "for JSON use `ebbd stat --watch --json`".to_owned();
        return Err(ClientError::Refused { message, remedy }.into());
    }
    anyhow::ensure!(
        io::stdout().is_terminal() && io::stdin().is_terminal(),
        "top needs a terminal; for a pipe or a file use `ebbd stat --watch`, with --json for programs"
    );
    let daemon = DaemonClient::new(args.control.as_deref())?;
    let first = daemon.json("GET", "/v1/stat", None)?;
    let samples = sample(daemon, Duration::from_secs(args.interval))?;
    let mut screen = TopScreen::new(first, args.sort);
    let mut terminal = ratatui::try_init().context("the terminal")?;
    let outcome = run(&mut terminal, &mut screen, &samples);
    ratatui::restore();
    outcome
}

/// Asks for samples on a thread, until the receiver is dropped.
fn sample(
    daemon: DaemonClient,
    interval: Duration,
) -> anyhow::Result<Receiver<Result<Stat, ClientError>>> {
    let (sender, receiver) = sync_channel(1);
    let ask = move || {
        let mut pause = interval;
        loop {
            std::thread::sleep(pause);
            let sample: Result<Stat, ClientError> = daemon.json("GET", "/v1/stat", None);
            // The screen shows that a daemon does not reply, and it is asked again soon.
            pause = if sample.is_ok() { interval } else { interval.min(AGAIN) };
            if sender.send(sample).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("sampler".into()).spawn(ask).context("a thread")?;
    Ok(receiver)
}

fn run(
    terminal: &mut ratatui::DefaultTerminal,
    screen: &mut TopScreen,
    samples: &Receiver<Result<Stat, ClientError>>,
) -> anyhow::Result<()> {
    loop {
        match samples.try_recv() {
            Ok(sample) => screen.update(sample),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                anyhow::bail!("the thread that asks the daemon has ended")
            }
        }
        terminal.draw(|frame| screen.draw(frame))?;
        if event::poll(PAUSE)?
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
            && !screen.key(key)
        {
            return Ok(());
        }
    }
}

/// What is shown, and how.
struct TopScreen {
    last: Stat,
    volumes: Vec<VolumeRates>,
    /// Why there is no newer sample.
    error: Option<String>,
    sort: TopSort,
    reversed: bool,
    /// A part of the names that are shown, and whether it is being typed.
    search: String,
    typing: bool,
    /// The first row that is shown.
    scroll: usize,
    /// The rows that fit, at the last drawing.
    height: usize,
}

impl TopScreen {
    fn new(first: Stat, sort: TopSort) -> TopScreen {
        let volumes = rates(&first, &first);
        TopScreen {
            last: first,
            volumes,
            error: None,
            sort,
            reversed: false,
            search: String::new(),
            typing: false,
            scroll: 0,
            height: 1,
        }
    }

    fn update(&mut self, sample: Result<Stat, ClientError>) {
        match sample {
            Ok(stat) => {
                let earlier = match self.error.take() {
                    None => std::mem::take(&mut self.last),
                    // The counters of a daemon that was restarted begin at 0.
                    Some(_) => Stat::default(),
                };
                self.volumes = rates(&earlier, &stat);
                self.last = stat;
            }
            Err(error) => self.error = Some(error.to_string()),
        }
    }

    /// The volumes to show, in order.
    fn shown(&self) -> Vec<&VolumeRates> {
        let mut shown: Vec<_> =
            self.volumes.iter().filter(|volume| volume.name.contains(&self.search)).collect();
        let largest = |one: f64, other: f64| other.total_cmp(&one);
        shown.sort_by(|one, other| {
            let order = match self.sort {
                TopSort::Name => Ordering::Equal,
                TopSort::Iops => largest(one.reads + one.writes, other.reads + other.writes),
                TopSort::Bytes => largest(
                    one.read_bytes + one.written_bytes,
                    other.read_bytes + other.written_bytes,
                ),
                TopSort::P99 => largest(one.p99.unwrap_or(-1.0), other.p99.unwrap_or(-1.0)),
                TopSort::Dirty => other.dirty.cmp(&one.dirty),
                TopSort::Errors => largest(one.errors, other.errors),
            };
            order.then_with(|| one.name.cmp(&other.name))
        });
        if self.reversed {
            shown.reverse();
        }
        shown
    }

    /// Responds to a key; false to end.
    fn key(&mut self, key: KeyEvent) -> bool {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return false,
            KeyCode::Esc if self.typing => {
                self.typing = false;
                self.search.clear();
            }
            KeyCode::Enter if self.typing => self.typing = false,
            KeyCode::Backspace if self.typing => drop(self.search.pop()),
            KeyCode::Char(c) if self.typing => self.search.push(c),
            KeyCode::Char('q') | KeyCode::Esc => return false,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('s') => self.sort = next(self.sort, 1),
            KeyCode::Char('S') => self.sort = next(self.sort, TopSort::value_variants().len() - 1),
            KeyCode::Down => self.scroll = self.scroll.saturating_add(1),
            KeyCode::Up => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(self.height),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(self.height),
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = usize::MAX,
            _ => {}
        }
        let last = self.shown().len().saturating_sub(self.height);
        self.scroll = self.scroll.min(last);
        true
    }

    fn foot(&self) -> String {
        if self.typing {
            return format!("/{}_  (Enter keeps it, Esc clears it)", self.search);
        }
        let sort = match self.sort {
            TopSort::Name => "VOLUME",
            TopSort::Iops => "READS/s + WRITES/s",
            TopSort::Bytes => "READ/s + WRITTEN/s",
            TopSort::P99 => "P99",
            TopSort::Dirty => "DIRTY",
            TopSort::Errors => "ERRORS/s",
        };
        let search =
            if self.search.is_empty() { String::new() } else { format!("  /{}", self.search) };
        format!(
            "by {sort}{}{search}  (s, S sort, r reverse, / search, q quit)",
            if self.reversed { ", reversed" } else { "" }
        )
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(2), Constraint::Fill(1), Constraint::Length(1)])
                .areas(frame.area());
        let red = Style::new().fg(Color::Red);
        let [load, memory] = summary(&self.last);
        let first = match &self.error {
            Some(error) => Line::styled(fitting(error, head.width), red),
            None => Line::raw(fitting(&load, head.width)),
        };
        frame.render_widget(Text::from(vec![first, fitting(&memory, head.width).into()]), head);
        frame.render_widget(
            Line::styled(self.foot(), Style::new().add_modifier(Modifier::DIM)),
            foot,
        );
        self.height = usize::from(body.height.saturating_sub(1)).max(1);
        let shown: Vec<_> = self
            .shown()
            .into_iter()
            .skip(self.scroll)
            .take(self.height)
            .map(|volume| (row(volume), tint(volume)))
            .collect();
        let columns = columns(&shown, usize::from(body.width));
        let cells = |cells: &[String; COLUMNS]| {
            Row::new(columns.iter().filter_map(|&(column, width)| {
                let cell = cells.get(column)?;
                Some(if is_left(column) { cell.clone() } else { format!("{cell:>width$}") })
            }))
        };
        let rows = shown.iter().map(|(row, tint)| {
            cells(row).style(match tint {
                Tint::Plain => Style::new(),
                Tint::Warning => Style::new().fg(Color::Yellow),
                Tint::Bad => red,
            })
        });
        let titles =
            cells(&TITLES.map(str::to_owned)).style(Style::new().add_modifier(Modifier::BOLD));
        let lengths = columns
            .iter()
            .map(|(_, width)| Constraint::Length(u16::try_from(*width).unwrap_or(u16::MAX)));
        frame.render_widget(Table::new(rows, lengths).header(titles).column_spacing(2), body);
    }
}

/// `text` in at most `width` characters; what is cut off is shown by dots.
fn fitting(text: &str, width: u16) -> String {
    let width = usize::from(width);
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(3)).chain("...".chars()).collect()
}

/// The column `step` places after `sort`.
fn next(sort: TopSort, step: usize) -> TopSort {
    let all = TopSort::value_variants();
    let at = all.iter().position(|one| *one == sort).unwrap_or(0);
    all.get((at + step) % all.len()).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use ebb_api::stat::VolumeCondition;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn screen() -> TopScreen {
        let mut screen = TopScreen::new(Stat::default(), TopSort::Iops);
        let volume = |name: &str, reads: f64, p99: f64, state| VolumeRates {
            name: name.into(),
            reads,
            p99: Some(p99),
            state,
            remote: Some("up".into()),
            ..VolumeRates::default()
        };
        screen.volumes = vec![
            volume("alpha", 10.0, 0.5, VolumeCondition::Serving),
            volume("beta", 300.0, 0.001, VolumeCondition::Serving),
            volume("gamma", 0.0, 0.002, VolumeCondition::Failed),
        ];
        screen
    }

    fn drawn(screen: &mut TopScreen, width: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, 7)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..7).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn press(screen: &mut TopScreen, keys: &str) -> bool {
        keys.chars().all(|c| screen.key(KeyEvent::from(KeyCode::Char(c))))
    }

    #[test]
    fn volumes_are_sorted_searched_and_fit_the_terminal() {
        let mut screen = screen();
        let lines = drawn(&mut screen, 160);
        let names = |lines: &[String]| -> Vec<String> {
            let rows = lines.iter().skip(3).take(3).filter(|line| !line.is_empty());
            rows.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
        };
        assert!(lines[0].contains("0 clients, pressure unknown"), "{lines:#?}");
        assert!(lines[6].starts_with("by READS/s + WRITES/s  (s, S sort"), "{lines:#?}");
        assert!(lines[2].contains("BUFSPACE") && lines[2].contains("REMOTE"), "{lines:#?}");
        assert_eq!(names(&lines), ["beta", "alpha", "gamma"]);
        // By bytes, then by p99.
        assert!(press(&mut screen, "ss"));
        assert_eq!(names(&drawn(&mut screen, 160)), ["alpha", "gamma", "beta"]);
        press(&mut screen, "r");
        assert_eq!(names(&drawn(&mut screen, 160)), ["beta", "gamma", "alpha"]);
        press(&mut screen, "/amm");
        screen.key(KeyEvent::from(KeyCode::Enter));
        assert_eq!(names(&drawn(&mut screen, 160)), ["gamma"]);
        for width in [30, 60, 80, 120] {
            let lines = drawn(&mut screen, width);
            assert!(
                lines[2].starts_with("VOLUME  STATE") && lines[2].contains("P99"),
                "{width}: {lines:#?}"
            );
        }
        assert!(!press(&mut screen, "q"));
    }

    #[test]
    fn a_daemon_that_does_not_reply_is_told_and_scrolling_is_bounded() {
        let mut screen = screen();
        screen
            .update(Err(ClientError::InvalidReply { path: "/s".into(), what: "nonsense".into() }));
        assert!(drawn(&mut screen, 100)[0].contains("nonsense"));
        for key in [KeyCode::End, KeyCode::Down, KeyCode::PageDown, KeyCode::Up, KeyCode::Home] {
            assert!(screen.key(KeyEvent::from(key)));
            assert!(screen.scroll <= 2);
        }
        screen.update(Ok(Stat::default()));
        assert!(drawn(&mut screen, 100)[0].starts_with("ebbd"));
    }
}
