//! The command line: help, exit status, and the stream of each message.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn ebbd(args: &[&str]) -> Output {
    // Sockets that a service manager passed to the test are not meant for the program under test.
    Command::new(env!("CARGO_BIN_EXE_ebbd"))
        .args(args)
        .env_remove("LISTEN_FDS")
        .env_remove("LISTEN_PID")
        .stdin(Stdio::null())
        .output()
        .expect("the program starts")
}

/// Asserts the exit status, and that the only message is on stderr and has all of `parts`.
#[track_caller]
fn fails(args: &[&str], status: i32, parts: &[&str]) {
    let output = ebbd(args);
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert!(output.stdout.is_empty(), "{:?}", output.stdout);
    for part in parts {
        assert!(stderr.contains(part), "`{part}` is not in: {stderr}");
    }
}

#[track_caller]
fn succeeds(args: &[&str]) -> String {
    let output = ebbd(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.is_empty(), "{stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn help_and_version() {
    let help = succeeds(&["--help"]);
    for part in ["serve", "completions", "man", "over the NBD protocol"] {
        assert!(help.contains(part), "{help}");
    }
    let help = succeeds(&["serve", "--help"]);
    for part in ["--connection-memory <SIZE>", "[default: 64M]", "tcp:HOST:PORT"] {
        assert!(help.contains(part), "{help}");
    }
    assert_eq!(succeeds(&["--version"]), format!("ebbd {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn bad_usage_is_status_2_with_advice() {
    fails(&[], 2, &["Usage: ebbd"]);
    fails(&["serv"], 2, &["'serve'"]);
    fails(&["serve", "--volum", "x"], 2, &["'--volume'"]);
    fails(&["serve", "--log", "inof"], 2, &["'info'"]);
    fails(&["serve", "--max-request", "1KB"], 2, &["the units are"]);
    fails(&["serve", "--workers", "many"], 2, &["--workers"]);
    // A daemon that is not there is a failure; a mistake is told first.
    let socket = "/nonexistent/control";
    let mistakes: [(&[&str], &str); 13] = [
        (&["token", "view", "a:b"], "letters, digits"),
        (&["token", "admin", "a"], "operate"),
        (&["bench", "disk", "--uri", "http://host/disk"], "is no store"),
        (&["bench", "disk", "--uri", "file:/srv/disk"], "nbd://HOST/EXPORT"),
        (&["bench", "disk", "--within", "4K"], "1M or more"),
        (&["bench", "disk", "--seconds", "0"], "1..=600"),
        (&["xen", "attach", "guest", "sda", "disk"], "xvda"),
        (&["xen", "attach", "guest", "xvda"], "<VOLUME>"),
        (&["limit", "disk", "--burst", "soon"], "500ms"),
        (&["limit", "disk", "--group", "a", "--no-group"], "cannot be used with"),
        (&["flush"], "<VOLUME|--all>"),
        (&["stat", "--watch", "0"], "1..=3600"),
        (&["stat", "--control", "tcp:h:1"], "unix:/path"),
    ];
    for (args, part) in mistakes {
        fails(args, 2, &[part]);
    }
    fails(&["stat", "--control", socket], 3, &[socket]);
}

/// The command fails with one object in a line of stderr, and nothing on stdout.
#[track_caller]
fn json_error(args: &[&str], status: i32) -> serde_json::Value {
    let output = ebbd(args);
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert!(output.stdout.is_empty(), "{:?}", output.stdout);
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(!stderr.contains('\u{202e}'), "a terminal would obey it: {stderr}");
    serde_json::from_str(&stderr).unwrap_or_else(|error| panic!("{error}: {stderr}"))
}

#[test]
fn errors_are_objects_with_json() {
    let away = json_error(&["status", "--json", "--control", "/nonexistent/control"], 3);
    assert_eq!(away["error"], "unreachable");
    assert!(away["message"].as_str().expect("text").contains("/nonexistent/control"), "{away}");
    assert!(away["remedy"].as_str().expect("text").starts_with("start it"), "{away}");
    let top = json_error(&["top", "--json"], 2);
    assert_eq!(
        (&top["error"], &top["remedy"]),
        (&"usage".into(), &"for JSON use `ebbd stat --watch --json`".into())
    );
    let usage = json_error(&["stat", "--json", "--nonsense"], 2);
    assert_eq!((&usage["error"], &usage["remedy"]), (&"usage".into(), &serde_json::Value::Null));
    assert!(usage["message"].as_str().expect("text").contains("--nonsense"), "{usage}");
    let image = json_error(&["image", "info", "--json", "file:/nonexistent/disk"], 1);
    assert_eq!(image["error"], "failed");
    let reversed = json_error(&["image", "info", "--json", "file:/nonexistent/\u{202e}disk"], 1);
    assert!(reversed["message"].as_str().expect("text").contains('\u{202e}'), "{reversed}");
}

#[test]
fn mistyped_volume_of_the_command_line_ends_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = format!("unix:{}", folder.path().join("nbd").display());
    let volume = format!("disk=file:{}", folder.path().join("dsik.img").display());
    let (wrong, good) = (["--volume", &volume], ["--volume", "other=memory:1M"]);
    let serve = ["serve", "--log", "error", "--listen", &socket];
    let output = ebbd(&[&serve[..], &wrong].concat());
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("ebbd: volume disk: ") && stderr.contains("no such file"), "{stderr}");
    // Together with others that are served, the daemon serves those.
    let mut child = Command::new(env!("CARGO_BIN_EXE_ebbd"))
        .args([&["serve", "--listen", &socket][..], &wrong, &good].concat())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let log = std::io::BufReader::new(child.stderr.take().expect("piped"));
    let ready = std::io::BufRead::lines(log)
        .map_while(Result::ok)
        .any(|line| line.contains("ready") && line.contains("volumes=1") && line.contains("of=2"));
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    assert!(ready);
}

#[test]
fn start_error_is_the_last_word() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("written");
    let socket = format!("unix:{}", file.display());
    let output = ebbd(&["serve", "--volume", "disk=memory:1M", "--listen", &socket]);
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let last = stderr.lines().last().expect("a line");
    assert!(last.contains("exists and is not a socket"), "{stderr}");
    assert!(!stderr.contains("broker has ended"), "{stderr}");
}

#[test]
fn bad_configuration_is_status_2_with_advice() {
    fails(
        &["serve"],
        2,
        &["ebbd: ", "`ebbd serve --volume disk=memory:1G --listen unix:/tmp/ebbd.sock`"],
    );
    fails(
        &["serve", "--check", "--listen", "unix:/a", "--volume", "a=memory:1G,readonly=true"],
        2,
        &["--volume a: readonly", "did you mean `read-only`?"],
    );
    fails(&["serve", "--check", "--workers", "-1"], 2, &["--workers: -1", "from 1 to 64"]);
    fails(
        &["serve", "--config", "/nonexistent.toml"],
        2,
        &["/nonexistent.toml: ", "check the path"],
    );
    fails(&["config", "show", "/nonexistent.toml"], 2, &["/nonexistent.toml: ", "check the path"]);

    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ebbd.toml");
    let path = file.to_str().expect("UTF-8");
    fs::write(&file, "listen = ['unix:/a']\n\n[nbd]\nmax_client = 3\n").expect("written");
    fails(
        &["serve", "--check", "--config", path],
        2,
        &[&format!("{path}:4: nbd.max_client: "), "did you mean `max_clients`?"],
    );
    let socket = format!("unix:{}", folder.path().join("nbd").display());
    let serve = ["serve", "--takeover", "--volume", "disk=memory:1M", "--listen", &socket];
    fails(&serve, 2, &["--takeover needs the control socket", "set `control`"]);
}

#[test]
fn a_command_without_what_it_needs_names_it() {
    fails(&["flush"], 2, &["<VOLUME|--all>"]);
    fails(&["limit", "--iops", "5"], 2, &["<VOLUME|--group <GROUP>>"]);
    fails(&["top", "--json"], 2, &["`ebbd stat --watch --json`"]);
}

#[test]
fn a_configuration_is_checked_and_shown_as_json() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ebbd.toml");
    let path = file.to_str().expect("UTF-8");
    let listen = format!("listen = ['unix:{}']", folder.path().join("s").display());
    fs::write(&file, format!("{listen}\n[volume.a]\nstore = 'memory:1M'\n")).expect("written");
    let json = |args: &[&str]| -> serde_json::Value {
        serde_json::from_slice(&ebbd(args).stdout).expect("JSON")
    };
    let shown = json(&["config", "show", path, "--json"]);
    assert_eq!(
        (&shown["workers"], &shown["volume"]["a"]["store"]),
        (&1.into(), &"memory:1M".into())
    );
    assert_eq!(json(&["config", "check", path, "--json"])[1]["level"], "ok");

    fs::write(
        &file,
        format!("{listen}\nworkers = 99\nlogs = 'x'\n[volume.a]\nstore = 'memory:1M'\n"),
    )
    .expect("written");
    let found = json(&["config", "check", path, "--json"]);
    let levels: Vec<_> =
        found.as_array().expect("a list").iter().map(|one| &one["level"]).collect();
    assert_eq!(levels, ["mistake", "mistake"], "{found}");
    assert!(found[0]["text"].as_str().is_some_and(|text| text.contains(":2: workers")), "{found}");
    assert_eq!(ebbd(&["config", "check", path, "--json"]).status.code(), Some(2));
    // One style: a single line where the output is no terminal.
    let output = ebbd(&["config", "show", path, "--json"]);
    assert!(output.stdout.is_empty() && output.status.code() == Some(2));
}

#[test]
fn manual_pages_are_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("new/man");
    let arg = out.to_str().expect("UTF-8");
    assert_eq!(succeeds(&["man", "--out", arg]), "");
    for page in ["ebbd.1", "ebbd-serve.1", "ebbd-token.1", "ebbd-completions.1", "ebbd.toml.5"] {
        let text = fs::read_to_string(out.join(page)).expect(page);
        assert!(text.contains(".SH NAME"), "{page}");
    }
    // A failure that is not caused by the configuration.
    fs::write(folder.path().join("file"), "").expect("written");
    let blocked = folder.path().join("file/man");
    fails(&["man", "--out", blocked.to_str().expect("UTF-8")], 1, &["file/man"]);
}

#[test]
fn a_token_is_apart_from_its_line_so_that_the_line_can_be_appended_to_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tokens");
    let mut tokens = Vec::new();
    for (role, name) in [("view", "prometheus"), ("operate", "alice")] {
        let appended = fs::OpenOptions::new().create(true).append(true).open(&file);
        let output = Command::new(env!("CARGO_BIN_EXE_ebbd"))
            .args(["token", role, name])
            .stdout(appended.expect("the file opens"))
            .output()
            .expect("the program starts");
        assert_eq!(output.status.code(), Some(0));
        tokens.push(String::from_utf8(output.stderr).expect("UTF-8"));
    }
    let text = fs::read_to_string(&file).expect("the file");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].starts_with("view:prometheus:"), "{text}");
    assert!(lines[1].starts_with("operate:alice:"), "{text}");
    ebb_control::TokenTable::parse(&text, &file).expect("the file is one of tokens");
    for token in tokens {
        // Nothing else is there, so that a script can take it.
        assert!(token.starts_with("ebbd_") && token.lines().count() == 1, "{token}");
        assert!(!text.contains(token.trim()), "the file has the token");
    }
}

#[test]
fn completions_are_printed() {
    for (shell, part) in
        [("bash", "-F _clap_complete_ebbd"), ("zsh", "#compdef ebbd"), ("fish", "complete --")]
    {
        assert!(succeeds(&["completions", shell]).contains(part), "{shell}");
    }
    fails(&["completions", "bsh"], 2, &["'bash'"]);
}

#[test]
fn a_closed_pipe_is_not_a_failure() {
    assert!(Path::new("/bin/sh").exists(), "this test needs /bin/sh");
    let script =
        format!("{{ {} completions zsh; echo $? >&2; }} | true", env!("CARGO_BIN_EXE_ebbd"));
    let output = Command::new("/bin/sh").args(["-c", &script]).output().expect("sh starts");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "0\n");
}
