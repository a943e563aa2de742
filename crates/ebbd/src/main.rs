//! The program `ebbd`: parses the command line and runs the command.
//!
//! Exit status: 0 success, 1 a failure while running, 2 a mistake on the command line or in the
//! configuration. Errors go to stderr, results to stdout.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::Context;
use clap::Parser;
use ebb_config::{Config, ConfigError, LogLevel, ServeArgs};
use ebbd::check::CheckLine;
use ebbd::cli::{self, Cli, CliCommand};
use ebbd::client::{self, ClientError};
use ebbd::log::Log;
use ebbd::{check, daemon, man, signals, xen};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;
use tracing_subscriber::reload;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return print_clap(&error),
    };
    let outcome = match cli.command {
        CliCommand::Serve(args) => serve(*args),
        CliCommand::Get(args) => say(client::get(&args)),
        CliCommand::Set(args) => say(client::set(&args)),
        CliCommand::Stat(args) => match args.watch {
            Some(seconds) => watch(&args, seconds),
            None => say(client::stat(&args)),
        },
        CliCommand::Pressure(args) => say(client::pressure(&args)),
        CliCommand::Resize(args) => say(client::resize(&args)),
        CliCommand::Xen(args) => xen::attach_or_detach(&args),
        CliCommand::Completions { shell } => print(&cli::completions(shell)),
        CliCommand::Man { parameters: Some(out), .. } => {
            ebb_config::params::pages::write_pages(&out)
        }
        CliCommand::Man { out, .. } => man::write_pages(&out),
    };
    let code = match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&format!("ebbd: {error:#}\n"));
            let refused = error.downcast_ref::<ClientError>().is_some_and(ClientError::is_usage);
            let mistake = error.is::<ConfigErrors>() || error.is::<check::CheckFailed>();
            ExitCode::from(if refused || mistake { 2 } else { 1 })
        }
    };
    if let Some(log) = LOG.get() {
        log.finish();
    }
    code
}

/// The log of a daemon.
static LOG: OnceLock<Log> = OnceLock::new();

/// Writes to standard error; in a daemon after the lines of the log, and without blocking on its reader.
fn report(text: &str) {
    match LOG.get() {
        Some(log) => log.line(text.as_bytes()),
        // An error of stderr cannot be reported anywhere.
        None => drop(io::stderr().lock().write_all(text.as_bytes())),
    }
}

/// Prints help and version to stdout, mistakes to stderr. A failed write is a failure, so that a script that redirects
/// the output to a full disk notices it.
fn print_clap(error: &clap::Error) -> ExitCode {
    let code = ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
    match error.print().and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let _ = writeln!(io::stderr().lock(), "ebbd: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
        _ => code,
    }
}

fn say(answer: Result<String, ClientError>) -> anyhow::Result<()> {
    print(answer?.as_bytes())
}

/// Prints the table of `stat --watch`, on a terminal in place, until the reader closes the pipe.
fn watch(args: &cli::StatArgs, seconds: u64) -> anyhow::Result<()> {
    const HOME_AND_CLEAR: &str = "\x1b[H\x1b[2J";
    let clear = if io::stdout().is_terminal() { HOME_AND_CLEAR } else { "" };
    let mut outcome = Ok(());
    client::watch(args, seconds, |text| {
        let mut stdout = io::stdout().lock();
        outcome = writeln!(stdout, "{clear}{text}").and_then(|()| stdout.flush());
        outcome.is_ok()
    })?;
    match outcome {
        // A reader that closes the pipe early, such as `head`, is not a failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}

fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        // A reader that closes the pipe early, such as `head`, is not a failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}

fn serve(mut args: ServeArgs) -> anyhow::Result<()> {
    // First: until then SIGHUP ends the process.
    let signals = if args.check { None } else { Some(signals::EarlySignals::watch()?) };
    args.inherited_sockets = sd_notify::listen_fds()?.len();
    let Some(signals) = signals else { return check(&args) };
    let config = Config::load(&args).map_err(|_| ConfigErrors(Config::mistakes(&args)))?;
    let set_log_level =
        start_log(config.log).context("cannot start the thread of the log: raise TasksMax")?;
    daemon::serve(&config, args, set_log_level, &signals)
}

/// All mistakes of a configuration, a line each.
#[derive(Debug)]
struct ConfigErrors(Vec<ConfigError>);

impl std::error::Error for ConfigErrors {}

impl std::fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lines: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\nebbd: "))
    }
}

/// Checks a configuration: what can be served to standard output, mistakes to standard error.
fn check(args: &ServeArgs) -> anyhow::Result<()> {
    // Notes of the stores that are opened.
    let _ =
        start_log(LogLevel::Warn).context("cannot start the thread of the log: raise TasksMax")?;
    let mut said = Ok(());
    let outcome = check::check(args, |line| match line {
        CheckLine::Ok(text) => said = print(format!("ok {text}\n").as_bytes()),
        CheckLine::Warning(text) => said = print(format!("warning {text}\n").as_bytes()),
        CheckLine::Mistake(text) => report(&format!("ebbd: {text}\n")),
    });
    outcome?;
    said
}

fn start_log(level: LogLevel) -> io::Result<daemon::SetLogLevel> {
    let log = Log::start(io::stderr())?;
    let log = LOG.get_or_init(|| log);
    let (filter, handle) = reload::Layer::new(level_filter(level));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(log.clone())
        .with_ansi(io::stderr().is_terminal())
        .with_target(false);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
    // The filter lives as long as the process.
    Ok(Box::new(move |level| drop(handle.reload(level_filter(level)))))
}

fn level_filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    }
}
