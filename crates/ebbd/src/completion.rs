//! Completion of the command line by the shell, with the names of volumes, clients and others of the running daemon.
//!
//! The script of `ebbd completions SHELL` calls the program with the variable `COMPLETE` set. An argument is completed by
//! its value name, such as `VOLUME`. Names come from the daemon at the socket of `--control` if that was typed already, of
//! `EBBD_CONTROL`, or at the default path; without a daemon there are none.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use ebb_api::stat::{BdiStat, VolumeStat};
use ebb_api::{ClientView, LimitGroupStat, OperationView};
use ebb_config::params::{Kind, TABLE};
use ebb_config::{CacheMode, Choice, DirectMode};

use crate::cli::Cli;
use crate::client::DaemonClient;

/// The variable that the script of the shell sets.
const VARIABLE: &str = "COMPLETE";
/// How long the daemon may take to reply: a key was pressed.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// If the shell asks for a completion, prints it and ends the program.
pub fn complete_if_asked() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// The completion script for `shell`, as text in UTF-8; empty for a shell that is not known.
pub fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    let shells = Shells::builtins();
    if let Some(completer) = shells.completer(&shell.to_string()) {
        // Writing to memory does not fail.
        let _ = completer.write_registration(VARIABLE, "ebbd", "ebbd", "ebbd", &mut script);
    }
    script
}

/// The command line, with completers.
fn command() -> Command {
    with_names(Cli::command())
}

fn with_names(mut command: Command) -> Command {
    let of = command.get_name().to_owned();
    command = command.mut_args(|arg| {
        let value = arg.get_value_names().and_then(|names| names.first());
        let candidates = match (&*of, value.map(|name| name.as_str())) {
            (_, Some("VOLUME")) => ArgValueCandidates::new(volumes),
            (_, Some("BDI")) => ArgValueCandidates::new(bdis),
            (_, Some("GROUP")) => ArgValueCandidates::new(groups),
            (_, Some("CLIENT")) => ArgValueCandidates::new(clients),
            (_, Some("ID")) => ArgValueCandidates::new(operations),
            ("get" | "set", Some("NAME")) => ArgValueCandidates::new(parameters),
            ("set", Some("VALUE")) => ArgValueCandidates::new(values),
            // The daemon reports a mistake in these.
            ("add", _) if arg.get_id() == "direct" => ArgValueCandidates::new(direct_modes),
            ("add", _) if arg.get_id() == "cache" => ArgValueCandidates::new(cache_modes),
            _ => return arg,
        };
        arg.add(candidates)
    });
    command.mut_subcommands(with_names)
}

fn volumes() -> Vec<CompletionCandidate> {
    let all: Option<Vec<VolumeStat>> = ask("/v1/volumes");
    let all = all.unwrap_or_default().into_iter();
    all.map(|volume| CompletionCandidate::new(volume.name).help(Some(volume.state.as_str().into())))
        .collect()
}

fn bdis() -> Vec<CompletionCandidate> {
    let all: Option<Vec<BdiStat>> = ask("/v1/bdis");
    all.unwrap_or_default().into_iter().map(|bdi| CompletionCandidate::new(bdi.name)).collect()
}

fn groups() -> Vec<CompletionCandidate> {
    let all: Option<Vec<LimitGroupStat>> = ask("/v1/limit-groups");
    let all = all.unwrap_or_default().into_iter();
    all.map(|group| CompletionCandidate::new(group.name)).collect()
}

fn clients() -> Vec<CompletionCandidate> {
    let all: Option<Vec<ClientView>> = ask("/v1/clients");
    let all = all.unwrap_or_default().into_iter();
    all.map(|client| CompletionCandidate::new(client.id).help(Some(client.volume.into()))).collect()
}

fn operations() -> Vec<CompletionCandidate> {
    let all: Option<Vec<OperationView>> = ask("/v1/operations");
    let of = |operation: OperationView| {
        let help = format!("{} {}", operation.kind, operation.volume.unwrap_or_default());
        CompletionCandidate::new(operation.id.to_string())
            .help(Some(help.trim_end().to_owned().into()))
    };
    all.unwrap_or_default().into_iter().map(of).collect()
}

fn parameters() -> Vec<CompletionCandidate> {
    TABLE.keys().map(|key| CompletionCandidate::new(key.name())).collect()
}

fn direct_modes() -> Vec<CompletionCandidate> {
    DirectMode::names().map(CompletionCandidate::new).collect()
}

fn cache_modes() -> Vec<CompletionCandidate> {
    CacheMode::names().map(CompletionCandidate::new).collect()
}

/// The words that are a value of the parameter on the command line, if its values are words.
fn values() -> Vec<CompletionCandidate> {
    let words: Vec<OsString> = std::env::args_os().collect();
    words_of_parameter(&words).into_iter().map(CompletionCandidate::new).collect()
}

fn words_of_parameter(command_line: &[OsString]) -> Vec<String> {
    let of = |word: &OsString| TABLE.keys().find(|key| *word == *key.name());
    match command_line.iter().find_map(of).map(|key| key.definition().kind) {
        Some(Kind::Word(words)) => words.iter().map(ToString::to_string).collect(),
        _ => Vec::new(),
    }
}

/// A reply of the daemon, if there is one.
fn ask<T: serde::de::DeserializeOwned>(target: &str) -> Option<T> {
    let words: Vec<OsString> = std::env::args_os().collect();
    let control = control_of(&words);
    DaemonClient::new(control.as_deref()).ok()?.within(REPLY_TIMEOUT).json("GET", target, None).ok()
}

/// The value of `--control` on a command line.
fn control_of(words: &[OsString]) -> Option<String> {
    let mut words = words.iter().filter_map(|word| word.to_str());
    let mut found = None;
    while let Some(word) = words.next() {
        match word.strip_prefix("--control") {
            // The shell passes an equals sign as a word of its own (bash).
            Some("") => found = words.find(|word| *word != "="),
            Some(value) => found = value.strip_prefix('=').or(found),
            None => {}
        }
    }
    found.filter(|path| !path.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    /// The completions of the last word of a command line.
    fn completions_of(words: &[&str]) -> Vec<String> {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let last = words.len() - 1;
        let all = clap_complete::engine::complete(&mut command(), words, last, None).unwrap();
        all.iter().map(|one| one.get_value().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn there_is_a_script_for_every_shell() {
        for shell in Shell::value_variants() {
            let script = String::from_utf8(script(*shell)).unwrap();
            assert!(script.contains("ebbd") && script.contains(VARIABLE), "{shell}: {script}");
        }
    }

    #[test]
    fn commands_options_and_parameters_are_completed() {
        let has = |words: &[&str], one: &str| {
            assert!(
                completions_of(words).contains(&one.into()),
                "{words:?}: {:?}",
                completions_of(words)
            );
        };
        has(&["ebbd", "sta"], "status");
        has(&["ebbd", "serve", "--conn"], "--connection-memory");
        has(&["ebbd", "set", "max_b"], "max_buffer_pages");
        has(&["ebbd", "stat", "b"], "bdi");
        has(&["ebbd", "volume", "add", "disk", "file:/a", "--cache", ""], "writeback");
        has(&["ebbd", "volume", "add", "disk", "file:/a", "--direct", ""], "auto");
    }

    #[test]
    fn values_are_completed_by_the_parameter_and_names_by_the_control_socket() {
        let words =
            |text: &str| -> Vec<OsString> { text.split_whitespace().map(OsString::from).collect() };
        let completed = |text| words_of_parameter(&words(text));
        assert!(
            completed("ebbd set log").contains(&"debug".into()),
            "{:?}",
            completed("ebbd set log")
        );
        assert_eq!(completed("ebbd set feature_persistent"), ["off", "on"]);
        assert_eq!(completed("ebbd set max_buffer_pages"), [""; 0]);
        let control = |text| control_of(&words(text));
        for text in ["ebbd limit --control /a x", "ebbd --control=/a", "ebbd --control = /a"] {
            assert_eq!(control(text).as_deref(), Some("/a"), "{text}");
        }
        assert_eq!([control("ebbd limit"), control("ebbd --control")], [None, None]);
    }
}
