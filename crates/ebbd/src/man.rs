//! The manual pages, generated from the command line ([`crate::cli`]) and the table of keys
//! ([`ebb_config::keys`]), so that they match the program.
//!
//! The pages are kept in `docs/man`; a test fails if they differ from the generated text.

mod commands;

use std::io;
use std::path::Path;

use anyhow::Context;
use clap::{ArgAction, Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use ebb_config::keys::{ConfigKey, EXAMPLE, SECTIONS, Section, VOLUME};

use self::commands::{COMMANDS, CommandPage};
use crate::cli::Cli;
use crate::client::SOCKET_VARIABLE;

/// A manual page: its file name and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManPage {
    /// The file name, such as `ebbd.1`.
    pub name: &'static str,
    /// The text in roff.
    pub text: String,
}

/// All manual pages.
///
/// # Errors
/// Only if the page generator fails on its own output.
pub fn pages() -> io::Result<Vec<ManPage>> {
    let mut pages = vec![ManPage { name: "ebbd.1", text: ebbd()? }];
    for command in COMMANDS {
        let text = match command.name {
            "serve" => ebbd_serve()?,
            _ => client_command(command)?,
        };
        pages.push(ManPage { name: command.file, text });
    }
    pages.push(ManPage { name: "ebbd.toml.5", text: ebbd_toml() });
    Ok(pages)
}

/// Writes all manual pages to the directory `out`, which is created if it is absent.
///
/// # Errors
/// If the directory cannot be created or a page cannot be written; the error names the path.
pub fn write_pages(out: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(out)
        .with_context(|| format!("cannot create the directory {}", out.display()))?;
    for page in pages().context("cannot generate the manual pages")? {
        let path = out.join(page.name);
        std::fs::write(&path, page.text)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The manual the pages belong to.
const MANUAL: &str = "ebbd manual";

/// The footer of each page.
fn source() -> String {
    format!("ebbd {}", env!("CARGO_PKG_VERSION"))
}

fn ebbd() -> io::Result<String> {
    let command = Cli::command();
    let synopsis: Vec<_> = command
        .get_subcommands()
        .map(|sub| match sub.get_name() {
            // Its many options are on its own page.
            "serve" => vec![bold("ebbd serve"), roman(" [OPTION]...")],
            _ if sub.has_subcommands() => {
                let mut line = usage(sub);
                line.extend([roman(" "), italic("COMMAND"), roman(" [ARGUMENT]...")]);
                line
            }
            _ => usage(sub),
        })
        .collect();
    let mut out = head(&command, "ebbd", &synopsis)?;
    let mut roff = Roff::new();
    roff.control("SH", ["COMMANDS"]);
    for (sub, usage) in command.get_subcommands().zip(synopsis) {
        let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
        let own_page = COMMANDS.iter().find(|command| command.name == sub.get_name());
        let more = own_page.map(|own| format!(" See {}(1).", own.title)).unwrap_or_default();
        entry(&mut roff, usage, &format!("{about}.{more}"));
        for arg in sub.get_arguments().filter(|_| own_page.is_none()) {
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            roff.control("br", []);
            roff.text([argument(arg), roman(format!(": {help}."))]);
        }
    }
    exit_status(&mut roff);
    roff.control("SH", ["EXAMPLES"]);
    example(
        &mut roff,
        "Serve a disk of 1 GiB in a sparse file, and show its properties:",
        "ebbd serve --volume disk=file:/var/tmp/disk.img,size=1G,create=true \\\n    \
         --listen unix:/tmp/ebbd.sock\nnbdinfo 'nbd+unix:///disk?socket=/tmp/ebbd.sock'",
    );
    let pages: Vec<String> =
        COMMANDS.iter().map(|command| format!("{}(1)", command.title)).collect();
    let mut pages: Vec<&str> = pages.iter().map(String::as_str).collect();
    pages.extend(["ebbd.toml(5)", "nbdinfo(1)", "nbdcopy(1)"]);
    see_also(&mut roff, &pages);
    out.push_str(&roff.to_roff());
    Ok(out)
}

/// The page's opening for `command`: title and name, the given synopsis, description and options.
fn head(command: &Command, title: &str, synopsis: &[Vec<Inline>]) -> io::Result<String> {
    let man = Man::new(command.clone()).title(title).manual(MANUAL).source(source());
    let mut out = Vec::new();
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]);
    for (n, line) in synopsis.iter().enumerate() {
        if n > 0 {
            roff.control("br", []);
        }
        roff.text(line.clone());
    }
    roff.control("SH", ["DESCRIPTION"]);
    let about = command.get_long_about().map(ToString::to_string).unwrap_or_default();
    // The first paragraph is the short form, which is in the section NAME.
    for text in about.split("\n\n").skip(1) {
        paragraph(&mut roff, text);
    }
    roff.to_writer(&mut out)?;
    man.render_options_section(&mut out)?;
    String::from_utf8(out).map_err(io::Error::other)
}

/// An argument as it is written.
fn argument(arg: &clap::Arg) -> Inline {
    let value = arg.get_value_names().filter(|_| arg.get_action().takes_values());
    let value = value.and_then(|names| names.first()).map(ToString::to_string);
    match (arg.get_long(), value) {
        (Some(long), Some(value)) => bold(format!("--{long} {value}")),
        (Some(long), None) => bold(format!("--{long}")),
        (None, value) => italic(value.unwrap_or_default()),
    }
}

/// How to call a command: its name and each argument with its value.
fn usage(command: &Command) -> Vec<Inline> {
    // Of a command that is complete the usual name has those of its parents.
    let name = command
        .get_bin_name()
        .map_or_else(|| format!("ebbd {}", command.get_name()), str::to_owned);
    let mut line = vec![bold(name)];
    let shown = |arg: &&clap::Arg| arg.get_id() != "help" && !arg.is_hide_set();
    for arg in command.get_arguments().filter(shown) {
        let value = arg
            .get_value_names()
            .filter(|_| arg.get_action().takes_values())
            .and_then(|names| names.first());
        let value = value.map(ToString::to_string).unwrap_or_default();
        let Some(long) = arg.get_long() else {
            match arg.is_required_set() {
                true => line.extend([roman(" "), italic(value)]),
                false => line.extend([roman(" ["), italic(value), roman("]")]),
            }
            if matches!(arg.get_action(), ArgAction::Append) {
                line.push(roman("..."));
            }
            continue;
        };
        line.extend([roman(" ["), bold(format!("--{long}"))]);
        if !value.is_empty() {
            line.extend([roman(" "), italic(value)]);
        }
        line.push(roman("]"));
        if matches!(arg.get_action(), ArgAction::Append) {
            line.push(roman("..."));
        }
    }
    line
}

/// How to call a command, or each of its subcommands.
fn synopsis(command: &Command) -> Vec<Vec<Inline>> {
    let subs: Vec<_> = subcommands_of(command).map(usage).collect();
    if subs.is_empty() { vec![usage(command)] } else { subs }
}

fn subcommands_of(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|sub| sub.get_name() != "help")
}

/// A section with the subcommands, if there are any: the arguments and options of each.
fn subcommands(roff: &mut Roff, command: &Command) {
    for (n, sub) in subcommands_of(command).enumerate() {
        if n == 0 {
            roff.control("SH", ["COMMANDS"]);
        }
        let about = sub.get_long_about().or(sub.get_about()).map(ToString::to_string);
        entry(roff, usage(sub), &format!("{}.", about.unwrap_or_default().trim_end_matches('.')));
        for arg in sub.get_arguments().filter(|arg| arg.get_id() != "help") {
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            roff.control("RS", []);
            entry(roff, vec![argument(arg)], &format!("{help}."));
            roff.control("RE", []);
        }
    }
}

/// The command called `name`, complete.
fn subcommand(name: &str) -> io::Result<Command> {
    let mut parent = Cli::command();
    parent.build();
    let found = parent.find_subcommand(name).cloned();
    found.ok_or_else(|| io::Error::other(format!("there is no command `{name}`")))
}

fn client_command(page: &CommandPage) -> io::Result<String> {
    let command = subcommand(page.name)?;
    let mut out = head(&command, page.title, &synopsis(&command))?;
    let mut roff = Roff::new();
    subcommands(&mut roff, &command);
    if !matches!(page.name, "xen" | "token" | "completions" | "image") {
        roff.control("SH", ["ENVIRONMENT"]);
        entry(
            &mut roff,
            vec![bold(SOCKET_VARIABLE)],
            "The path of the control socket, if --control is absent.",
        );
    }
    exit_status(&mut roff);
    roff.control("SH", ["EXAMPLES"]);
    for (what, lines) in page.examples {
        example(&mut roff, what, lines);
    }
    see_also(&mut roff, page.see_also);
    out.push_str(&roff.to_roff());
    Ok(out)
}

fn ebbd_serve() -> io::Result<String> {
    let serve = &subcommand("serve")?;
    let mut out = head(serve, "ebbd-serve", &[usage(serve)])?;
    let mut roff = Roff::new();
    roff.control("SH", ["VOLUMES"]);
    let store = VOLUME.find("store").map(|key| key.doc.replace('"', "")).unwrap_or_default();
    paragraph(
        &mut roff,
        "A volume is given as NAME=STORE[,option=value]...: its export name, its store and its \
         options.",
    );
    entry(
        &mut roff,
        vec![italic("NAME")],
        "The export name that clients request: 1 to 255 bytes of UTF-8 without control characters \
         and without an equals sign.",
    );
    entry(&mut roff, vec![italic("STORE")], &store);
    for key in VOLUME.keys.iter().filter(|key| key.name != "store") {
        let term = vec![bold(key.option_name()), roman("="), italic(key.value)];
        let doc = format!("{}{}", key.doc.replace('"', ""), default_of(key));
        entry(&mut roff, term, &doc);
    }
    signals(&mut roff);
    environment(&mut roff);
    exit_status(&mut roff);
    roff.control("SH", ["EXAMPLES"]);
    example(
        &mut roff,
        "Check a configuration before a reload:",
        "ebbd config check && systemctl reload ebbd",
    );
    example(
        &mut roff,
        "A disk in memory and a read-only image, with encryption by certificates:",
        "ebbd serve --volume scratch=memory:256M \\\n    \
         --volume cd=file:/srv/install.iso,read-only=true \\\n    \
         --listen tcp:[::]:10809 --tls require --tls-certificates /etc/ebbd/tls",
    );
    see_also(&mut roff, &["ebbd(1)", "ebbd-set(1)", "ebbd.toml(5)"]);
    out.push_str(&roff.to_roff());
    Ok(out)
}

fn signals(roff: &mut Roff) {
    roff.control("SH", ["SIGNALS"]);
    entry(
        roff,
        vec![bold("SIGTERM"), roman(", "), bold("SIGINT")],
        "Complete the requests in flight, write back and flush each volume as soon as its own requests \
         have completed, and exit with status 0; or list the volumes that could not be flushed within \
         --drain, and exit with status 1. Writes in flight to a store that does not respond were never \
         acknowledged and are not counted as lost. A second signal leaves 3 seconds for data that can \
         still be written; a third one ends the daemon at once.",
    );
    entry(
        roff,
        vec![bold("SIGHUP")],
        "Reload the configuration file. New volumes are served; volumes that are no longer in the file \
         complete their requests and are removed; the log level and the limits change. A parameter that \
         was set with ebbd-set(1) keeps its value, unless its value in the file has changed. Changes \
         that need a restart are logged. A file with a mistake changes nothing; a volume whose new store \
         cannot be opened is served as before. A SIGHUP during the start takes effect after it.",
    );
}

fn environment(roff: &mut Roff) {
    roff.control("SH", ["ENVIRONMENT"]);
    entry(
        roff,
        vec![bold("LISTEN_FDS"), roman(", "), bold("LISTEN_PID")],
        "Listening sockets passed by the service manager, see sd_listen_fds(3). If there are any, \
         listen addresses are refused.",
    );
    entry(
        roff,
        vec![bold("NOTIFY_SOCKET")],
        "The socket to which READY=1 is sent when the daemon serves, RELOADING=1 and READY=1 around a reload, STOPPING=1 \
         at its end, and the number of volumes that are served; see sd_notify(3).",
    );
}

fn exit_status(roff: &mut Roff) {
    roff.control("SH", ["EXIT STATUS"]);
    for (number, _, meaning) in crate::exit_status::ALL {
        entry(roff, vec![bold(number.to_string())], meaning);
    }
    paragraph(
        roff,
        "With --json, an error is an object in a line of standard error: error is the kind (failed, usage or unreachable), \
         message says what happened, and remedy what to do; it is null if the message says that.",
    );
}

fn ebbd_toml() -> String {
    let mut roff = Roff::new();
    let source = source();
    roff.control("TH", ["ebbd.toml", "5", "", source.as_str(), MANUAL]);
    roff.control("SH", ["NAME"]);
    paragraph(&mut roff, "ebbd.toml - configuration file of ebbd");
    roff.control("SH", ["DESCRIPTION"]);
    paragraph(
        &mut roff,
        "The file is TOML in UTF-8, at most 1 MiB, and is given to ebbd-serve(1) with --config. An \
         unknown key is an error. Options of the command line override the file.",
    );
    paragraph(
        &mut roff,
        "A SIZE is a number of bytes or a string with a unit: 512, \"64K\", \"32M\", \"1G\", \
         \"2T\". K is 1024 bytes, and so is KiB. A BOOL is true or false without quotes. Relative \
         paths are relative to the working directory of the daemon.",
    );
    for section in SECTIONS {
        keys(&mut roff, &section);
    }
    roff.control("SH", ["EXAMPLE"]);
    example(&mut roff, "A file with every table:", EXAMPLE.trim_end());
    see_also(&mut roff, &["ebbd(1)", "ebbd-serve(1)"]);
    roff.to_roff()
}

fn keys(roff: &mut Roff, section: &Section) {
    let title = match section.header {
        "" => "KEYS AT THE TOP".to_owned(),
        header => format!("THE TABLE [{header}]"),
    };
    roff.control("SH", [title.as_str()]);
    paragraph(roff, section.doc);
    for key in section.keys {
        let term = vec![bold(key.name), roman(" = "), italic(key.value)];
        entry(roff, term, &format!("{}{}", key.doc, default_of(key)));
    }
}

fn default_of(key: &ConfigKey) -> String {
    if key.default.is_empty() { String::new() } else { format!(" Default: {}.", key.default) }
}

fn entry(roff: &mut Roff, term: Vec<Inline>, text: &str) {
    roff.control("TP", []);
    roff.text(term);
    roff.text([roman(text)]);
}

fn paragraph(roff: &mut Roff, text: &str) {
    roff.control("PP", []);
    roff.text([roman(text)]);
}

fn example(roff: &mut Roff, text: &str, lines: &str) {
    paragraph(roff, text);
    roff.control("PP", []);
    roff.control("RS", ["4"]);
    roff.control("nf", []);
    for line in lines.lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    roff.control("RE", []);
}

fn see_also(roff: &mut Roff, pages: &[&str]) {
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman(pages.join(", "))]);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_pages_in_the_repository_are_up_to_date() {
        let kept = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/man"));
        let remedy = "run `cargo run -p ebbd -- man --out docs/man` and commit the result";
        let pages = pages().unwrap();
        for page in &pages {
            let text = std::fs::read_to_string(kept.join(page.name))
                .unwrap_or_else(|error| panic!("docs/man/{}: {error}; {remedy}", page.name));
            assert!(text == page.text, "docs/man/{} is out of date; {remedy}", page.name);
        }
        let names: BTreeSet<_> = pages.iter().map(|page| page.name.to_owned()).collect();
        let found: BTreeSet<_> = std::fs::read_dir(&kept)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(found, names, "docs/man contains the generated pages and nothing else");
    }

    #[test]
    fn every_key_and_option_has_an_entry() {
        let pages = pages().unwrap();
        let text = |name: &str| {
            pages.iter().find(|page| page.name == name).unwrap().text.replace("\\-", "-")
        };
        let toml = text("ebbd.toml.5");
        for key in SECTIONS.iter().flat_map(|section| section.keys) {
            assert!(toml.contains(&format!("\\fB{}\\fR", key.name)), "{}", key.name);
        }
        let serve = text("ebbd-serve.1");
        let command = Cli::command();
        for arg in command.find_subcommand("serve").unwrap().get_arguments() {
            let option = format!("--{}", arg.get_long().unwrap());
            assert!(serve.contains(&option), "{option}");
        }
        for key in VOLUME.keys.iter().filter(|key| key.name != "store") {
            assert!(serve.contains(&format!("\\fB{}\\fR", key.option_name())), "{}", key.name);
        }
        let ebbd = text("ebbd.1");
        for command in command.get_subcommands() {
            assert!(ebbd.contains(&format!("ebbd {}", command.get_name())));
        }
    }

    #[test]
    fn an_error_names_the_directory_that_cannot_be_created() {
        let error = write_pages(Path::new("/dev/null/man")).unwrap_err();
        assert!(error.to_string().contains("/dev/null/man"));
    }
}
