//! The program `ebbd`: parses the command line and runs the command.
//!
//! The exit statuses are in `exit_status.rs`. Errors go to stderr, results to stdout.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::OnceLock;

use anyhow::Context;
use clap::Parser;
use ebb_advice::Advised;
use ebb_config::{Config, ConfigError, LogLevel, ServeArgs, toml_to_json};
use ebb_control::{EventLog, NewToken, Role};
use ebb_export_xen::AttachError;
use ebb_store::{NbdError, end_process_with_librbd, wait_for_closed_images};
use ebbd::check::CheckLine;
use ebbd::cli::{self, Cli, CliCommand, ConfigCommand};
use ebbd::client::{self, ClientError};
use ebbd::daemon::NoControlSocket;
use ebbd::exit_status::{DONE, FAILED, USAGE, name};
use ebbd::image::ImageError;
use ebbd::log::Log;
use ebbd::log::events::EventLayer;
use ebbd::log::style::{self, LogStyle};
use ebbd::{
    check, completion, daemon, doctor, man, sandbox, signals, vhost_program, volume_bench, xen,
};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::prelude::*;
use tracing_subscriber::reload;

fn main() -> ExitCode {
    // Before anything uses OpenSSL. Where it fails, an encrypted volume says so when it is opened.
    let _ = ebb_luks::prepare();
    ebbd::limit_key_memory();
    completion::complete_if_asked();
    let arguments = vhost_program::arguments(std::env::args_os());
    if vhost_program::asks_for_capabilities(&arguments) {
        return match print(vhost_program::CAPABILITIES.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let json = arguments.iter().any(|argument| argument == "--json");
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) if json && error.use_stderr() => {
            let text = error.to_string();
            let message = text.trim_start_matches("error: ").trim_end();
            report_json(USAGE, message, None);
            return ExitCode::from(USAGE);
        }
        Err(error) => return print_clap(&error),
    };
    let code = match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            let code = error_code(&error);
            report_error(&error, code, json);
            code
        }
    };
    wait_for_closed_images();
    if let Some(log) = LOG.get() {
        log.finish();
    }
    // What it cannot write, nothing else reports.
    let _ = io::stdout().flush();
    end_process_with_librbd(code);
    ExitCode::from(code)
}

/// Runs a command, and returns the exit status.
fn run(command: CliCommand) -> anyhow::Result<u8> {
    match command {
        CliCommand::Status(args) => return told(client::status(&args)),
        CliCommand::Image(command) => return image(&command),
        CliCommand::Doctor(args) => return doctor(&args),
        CliCommand::Serve(args) => serve(*args),
        CliCommand::VhostUser(args) => {
            let (serve, passed) = args.prepare()?;
            serve_with(serve, passed)
        }
        CliCommand::Get(args) => say(client::get(&args)),
        CliCommand::Set(args) => say(client::set(&args)),
        CliCommand::Stat(args) => match args.watch {
            Some(seconds) => watch(&args, seconds),
            None => say(client::stat(&args)),
        },
        CliCommand::Top(args) => client::top(&args),
        CliCommand::Events(args) => printed(|show| Ok(client::events(&args, show)?)),
        CliCommand::Bench(args) => {
            let mut said = Ok(());
            volume_bench::bench(&args, |line| said = print(format!("{line}\n").as_bytes()))?;
            said
        }
        CliCommand::Config(args) => match args.command {
            ConfigCommand::Check(args) => {
                let serve = ServeArgs { config: Some(args.file), ..ServeArgs::default() };
                check(&serve, args.json)
            }
            ConfigCommand::Show(args) => match args.file.clone() {
                Some(file) => {
                    let text = load(file)?.to_toml();
                    let json = args.json.then(|| client::json_text(toml_to_json(&text)));
                    print(json.unwrap_or(text).as_bytes())
                }
                None => say(client::show_config(&args)),
            },
            ConfigCommand::Diff(args) => say(client::diff_config(&args)),
        },
        CliCommand::Pressure(args) => say(client::pressure(&args)),
        CliCommand::Limit(args) => say(client::limit(&args)),
        CliCommand::Client(args) => say(client::clients(&args)),
        CliCommand::Volume(command) => printed(|show| Ok(client::volume::volume(&command, show)?)),
        CliCommand::Flush(args) => say(client::volume::flush(&args)),
        CliCommand::Reload(args) => return told(client::volume::reload(&args)),
        CliCommand::Operation(command) => say(client::operation::operation(&command)),
        CliCommand::Xen(args) => xen::attach_or_detach(&args),
        CliCommand::Completions { shell } => print(&completion::script(shell)),
        CliCommand::Token(args) => token(&args),
        CliCommand::Man { parameters: Some(out), .. } => {
            ebb_config::params::pages::write_pages(&out)
        }
        CliCommand::Man { out, .. } => man::write_pages(&out),
    }?;
    Ok(DONE)
}

/// The exit status of a command that has failed. What can be checked without a daemon, `clap`
/// checks when it parses the command line.
fn error_code(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<ClientError>() {
        return error.exit_status();
    }
    let unknown_guest = matches!(error.downcast_ref(), Some(Advised(AttachError::NoDomain(_))));
    let unknown_export = matches!(error.downcast_ref(), Some(Advised(NbdError::NoExport { .. })));
    let mistake = error.is::<ConfigErrors>()
        || error.is::<check::CheckFailed>()
        || error.is::<NoControlSocket>();
    if unknown_guest || unknown_export || mistake { USAGE } else { FAILED }
}

/// Prints a text that has an exit status.
fn told(answer: Result<(String, u8), ClientError>) -> anyhow::Result<u8> {
    let (text, code) = answer?;
    print(client::terminal_text(&text).as_bytes()).map(|()| code)
}

/// Reports why a command has failed; with `--json` as an object.
fn report_error(error: &anyhow::Error, code: u8, json: bool) {
    let reasons = ebbd::log::reasons(error);
    if !json {
        return report(&reasons);
    }
    match error.downcast_ref::<ClientError>().map(ClientError::parts) {
        Some((message, remedy)) => report_json(code, &message, remedy.as_deref()),
        None => report_json(code, &reasons, None),
    }
}

/// Writes an error as an object in a line of standard error. Without a remedy that is null.
fn report_json(code: u8, message: &str, remedy: Option<&str>) {
    let error = serde_json::json!({ "error": name(code), "message": message, "remedy": remedy });
    let error = error.to_string();
    // An error of stderr cannot be reported anywhere.
    drop(writeln!(io::stderr().lock(), "{}", client::terminal_text(&error)));
}

/// Looks at an image. A reader that closes the pipe early, such as `head`, is not a failure.
fn image(command: &cli::ImageCommand) -> anyhow::Result<u8> {
    let out = Box::new(io::BufWriter::new(io::stdout()));
    match ebbd::image::image(command, out) {
        Err(ImageError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(DONE),
        done => Ok(done.map_err(Advised)?),
    }
}

fn doctor(args: &cli::DoctorArgs) -> anyhow::Result<u8> {
    let (mut said, mut findings) = (Ok(()), Vec::new());
    let code = doctor::doctor(args, |line| {
        if args.json {
            return findings.push(finding(line));
        }
        let (level, text) = line.parts();
        said = print(format!("{level:8} {text}\n").as_bytes());
    });
    if args.json {
        said = print(client::json_text(findings).as_bytes());
    }
    said.map(|()| code)
}

/// A line of a check as an element of the list that `--json` prints.
fn finding(line: &CheckLine) -> serde_json::Value {
    let (level, text) = line.parts();
    serde_json::json!({ "level": level, "text": text })
}

/// The configuration of a file, or all of its mistakes.
fn load(file: std::path::PathBuf) -> anyhow::Result<Config> {
    let args = ServeArgs { config: Some(file), ..ServeArgs::default() };
    Ok(Config::load(&args).map_err(|_| ConfigErrors(Config::mistakes(&args)))?)
}

/// The log of a daemon.
static LOG: OnceLock<Log> = OnceLock::new();

/// Writes to standard error; in a daemon after the lines of the log, and without blocking on its reader.
fn report(text: &str) {
    match LOG.get() {
        Some(log) => log.end(text),
        // An error of stderr cannot be reported anywhere.
        None => {
            let text = client::terminal_text(text);
            drop(writeln!(io::stderr().lock(), "ebbd: {text}"));
        }
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
    print(client::terminal_text(&answer?).as_bytes())
}

/// Clears a terminal.
const HOME_AND_CLEAR: &str = "\x1b[H\x1b[2J";

/// Prints the table of `stat --watch`, on a terminal in place.
fn watch(args: &cli::StatArgs, seconds: u64) -> anyhow::Result<()> {
    let clear = if io::stdout().is_terminal() && !args.json { HOME_AND_CLEAR } else { "" };
    let end = if args.json { "" } else { "\n" };
    printed(|show| Ok(client::watch(args, seconds, |text| show(&format!("{clear}{text}{end}")))?))
}

/// Prints what a command passes to the function it is given, until the reader closes the pipe.
fn printed(
    command: impl FnOnce(&mut dyn FnMut(&str) -> bool) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut outcome = Ok(());
    command(&mut |text| {
        let mut stdout = io::stdout().lock();
        let (clear, text) = match text.strip_prefix(HOME_AND_CLEAR) {
            Some(text) => (HOME_AND_CLEAR, text),
            None => ("", text),
        };
        let text = client::terminal_text(text);
        outcome = stdout
            .write_all(clear.as_bytes())
            .and_then(|()| stdout.write_all(text.as_bytes()))
            .and_then(|()| stdout.flush());
        outcome.is_ok()
    })?;
    match outcome {
        // A reader that closes the pipe early, such as `head`, is not a failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}

/// Makes a token: its line for the file to stdout, so that it can be appended there, and then the token to stderr.
fn token(args: &cli::TokenArgs) -> anyhow::Result<()> {
    let role = match args.role {
        cli::TokenRole::View => Role::View,
        cli::TokenRole::Operate => Role::Operate,
    };
    let token = NewToken::create(role, &args.name)?;
    print(token.line.as_bytes())?;
    Ok(writeln!(io::stderr().lock(), "{}", token.secret)?)
}

fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        // A reader that closes the pipe early, such as `head`, is not a failure.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}

fn serve(args: ServeArgs) -> anyhow::Result<()> {
    serve_with(args, None)
}

fn serve_with(mut args: ServeArgs, passed: Option<daemon::PassedSocket>) -> anyhow::Result<()> {
    // First: until then SIGHUP ends the process.
    let signals = if args.check { None } else { Some(signals::EarlySignals::watch()?) };
    args.inherited_sockets = ebbd::handover::passed_listeners()? + usize::from(passed.is_some());
    let Some(signals) = signals else { return check(&args, false) };
    let config = Config::load(&args).map_err(|_| ConfigErrors(Config::mistakes(&args)))?;
    let flusher = sandbox::flush_without_own_reclaim();
    // Before other threads are made. What the log has of the broker it has written itself.
    sandbox::prepare(&config, &args, || drop(start_log(&config)));
    let log = start_log(&config).context("cannot start the thread of the log: raise TasksMax")?;
    if let Err(error) = flusher {
        tracing::debug!(
            %error,
            "memory reclaim of the daemon may wait for disks that it serves: CAP_SYS_RESOURCE is missing"
        );
    }
    daemon::serve(&config, &args, &log, &signals, passed)
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

/// Checks a configuration: what can be served to standard output, mistakes to standard error; or all as one list in JSON.
fn check(args: &ServeArgs, json: bool) -> anyhow::Result<()> {
    // What the stores log while they are opened.
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::WARN)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .init();
    let (mut said, mut findings) = (Ok(()), Vec::new());
    let outcome = check::check(args, |line| match line {
        line if json => findings.push(finding(&line)),
        CheckLine::Ok(text) => said = print(format!("ok {text}\n").as_bytes()),
        CheckLine::Warning(text) => said = print(format!("warning {text}\n").as_bytes()),
        CheckLine::Mistake(text) => report(&text),
    });
    if json {
        said = print(client::json_text(findings).as_bytes());
    }
    outcome?;
    said
}

fn start_log(config: &Config) -> io::Result<daemon::LogHandle> {
    let variable = std::env::var("JOURNAL_STREAM").ok();
    let style = LogStyle {
        format: config.log_format,
        journal: style::is_journal(io::stderr(), variable.as_deref()),
        terminal: io::stderr().is_terminal(),
    };
    let log = Log::start(io::stderr(), style)?;
    let log = LOG.get_or_init(|| log);
    let (filter, handle) = reload::Layer::new(level_filter(config.log));
    let events = EventLog::default();
    let kept = EventLayer(events.clone()).with_filter(LevelFilter::INFO);
    tracing_subscriber::registry().with(style.layer(log).with_filter(filter)).with(kept).init();
    // The filter lives as long as the process.
    let set_level = Arc::new(move |level| drop(handle.reload(level_filter(level))));
    Ok(daemon::LogHandle { set_level, events })
}

fn level_filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    }
}
