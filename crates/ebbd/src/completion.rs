//! Completion of the command line by the shell, with the names of volumes and parameters of the running daemon.
//!
//! The script of `ebbd completions SHELL` calls the program with the variable `COMPLETE` set. An argument is completed by
//! its value name, such as `VOLUME`. Names of volumes come from the daemon at the socket of `EBBD_CONTROL` or the default
//! path; without one there are none.

use std::time::Duration;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use ebb_api::stat::{BdiStat, VolumeStat};
use ebb_config::params::TABLE;

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
    let is_parameter = matches!(command.get_name(), "get" | "set");
    command = command.mut_args(|arg| {
        let value = arg.get_value_names().and_then(|names| names.first());
        let candidates = match value.map(|name| name.as_str()) {
            Some("VOLUME") => ArgValueCandidates::new(volumes),
            Some("BDI") => ArgValueCandidates::new(bdis),
            Some("NAME") if is_parameter => ArgValueCandidates::new(parameters),
            _ => return arg,
        };
        arg.add(candidates)
    });
    command.mut_subcommands(with_names)
}

fn volumes() -> Vec<CompletionCandidate> {
    let all: Option<Vec<VolumeStat>> = ask("/v1/volumes");
    let all = all.unwrap_or_default().into_iter();
    all.map(|volume| CompletionCandidate::new(volume.name).help(Some(volume.state.into())))
        .collect()
}

fn bdis() -> Vec<CompletionCandidate> {
    let all: Option<Vec<BdiStat>> = ask("/v1/bdis");
    all.unwrap_or_default().into_iter().map(|bdi| CompletionCandidate::new(bdi.name)).collect()
}

fn parameters() -> Vec<CompletionCandidate> {
    TABLE.keys().map(|key| CompletionCandidate::new(key.name())).collect()
}

/// A reply of the daemon, if there is one.
fn ask<T: serde::de::DeserializeOwned>(target: &str) -> Option<T> {
    DaemonClient::new(None).ok()?.within(REPLY_TIMEOUT).json("GET", target, None).ok()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

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
    }
}
