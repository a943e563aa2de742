//! Mistakes of an operator at the command line, each answered with one line that names the place and a remedy; and a
//! file whose mistakes are all told in one run.

use std::fs;
use std::path::Path;

use testbed::harness::binary::{self, Build};
use testbed::harness::server::Setup;
use testbed::harness::tool::Outcome;
use testbed::{Error, Result, Server, Tool, check};

/// A daemon with a control socket and volumes `disk` (in its command line), `other` and `kept` (in its state directory).
struct Rig {
    server: Server,
    control: String,
}

impl Rig {
    fn start() -> Result<Rig> {
        let setup = Setup::new()?.volume("disk=memory:1M");
        let path = |name: &str| setup.dir().join(name).display().to_string();
        let (control, state) = (path("control.sock"), path("state"));
        fs::create_dir(&state).map_err(Error::io("make the state directory"))?;
        let server = setup.arg("--control").arg(&control).arg("--state").arg(state).start()?;
        let rig = Rig { server, control };
        rig.run(&["volume", "add", "other", "memory:1M"])?.check_success()?;
        rig.run(&["volume", "add", "kept", "null:1M", "--persist"])?.check_success()?;
        Ok(rig)
    }

    fn run(&self, args: &[&str]) -> Result<Outcome> {
        let ebbd = Tool::new(binary::ebbd(Build::AsTests)?).args(args);
        ebbd.env("EBBD_CONTROL", &self.control).run()
    }

    fn file(&self, name: &str, text: &[u8]) -> Result<String> {
        let path = self.server.dir().join(name);
        fs::write(&path, text).map_err(Error::io("write a file"))?;
        Ok(path.display().to_string())
    }
}

trait CheckSuccess {
    fn check_success(&self) -> Result;
}

impl CheckSuccess for Outcome {
    fn check_success(&self) -> Result {
        self.check(self.status.success(), "success")
    }
}

/// Requires a failure with one line on standard error that has all the words: the place, and what to do.
fn told(outcome: &Outcome, words: &[&str]) -> Result {
    outcome.check(!outcome.status.success(), "a failure")?;
    let lines: Vec<&str> = outcome.stderr.lines().filter(|line| !line.trim().is_empty()).collect();
    outcome.check(lines.len() == 1, "one line")?;
    for word in words {
        outcome.check(lines[0].contains(word), &format!("the words `{word}`"))?;
    }
    // A place or name, and a remedy after it.
    outcome.check(lines[0].contains(';') || lines[0].contains(": "), "a message and a remedy")
}

#[test]
fn a_mistake_is_one_line_with_the_place_and_a_remedy() -> Result {
    let rig = Rig::start()?;
    let odd = rig.file("odd.img", &[0; 1000])?;
    let image = rig.file("image.img", &[0; 4096])?;
    rig.run(&["volume", "add", "taken", &format!("file:{image}")])?.check_success()?;
    let (odd, image) = (format!("file:{odd}"), format!("file:{image}"));
    let blank = format!("file:{}", rig.file("blank.img", &[0; 4096])?);
    let key = format!("key-file:{}", rig.file("one.key", b"a key")?);
    let encrypted =
        ["volume", "add", "x", &blank, "--encryption", &key, "--create", "--size", "1M"];
    let cut = format!("file:{}", rig.file("cut.delta", &[&b"EBBDELTA"[..], &[0; 4992]].concat())?);
    let mistakes: &[(&[&str], &[&str])] = &[
        // Names.
        (&["volume", "show", "dsik"], &["`dsik`", "`disk`"]),
        (&["volume", "remove", "nothing"], &["`nothing`"]),
        (&["volume", "remove", "disk"], &["--volume", "remove it there"]),
        (&["volume", "rename", "taken", "disk"], &["`disk`", "choose another name"]),
        (&["volume", "add", "disk", "memory:1M"], &["`disk`", "choose another name"]),
        (&["volume", "add", "a\nb", "memory:1M"], &["name", "control"]),
        // Stores.
        (&["volume", "add", "x", "tape:/dev/st0"], &["store", "file:, qcow2:, memory:"]),
        (&["volume", "add", "x", "file:/no/such/image"], &["/no/such/image", "create"]),
        (&["volume", "add", "x", &odd], &["odd.img", "512"]),
        (&["volume", "add", "x", &cut], &["cut.delta", "truncated: restore it from a backup"]),
        (&encrypted, &["blank.img", "needs 17825792", "truncate -s"]),
        (&["volume", "add", "x", &image], &["taken", "give each one of its own"]),
        (&["volume", "add", "x", "memory:1000"], &["store", "512"]),
        (&["volume", "add", "x", "nbd://127.0.0.1:1/x"], &["127.0.0.1:1", "refused"]),
        (&["volume", "add", "x", "file:/tmp/x", "--create"], &["size", "such as 1G"]),
        (&["volume", "add", "x", "memory:1M", "--cache", "fast"], &["cache", "writeback"]),
        (&["volume", "add", "x", "null:1M", "--bdi", "array"], &["bdi", "writeback"]),
        // Sizes.
        (&["volume", "resize", "other", "1000"], &["1000 bytes", "multiple of"]),
        (&["volume", "resize", "other", "512K"], &["shrink"]),
        (&["volume", "resize", "kept", "2M"], &["null", "size"]),
        // Parameters and limits.
        (&["set", "max_bufer_pages", "1"], &["`max_bufer_pages`", "`max_buffer_pages`"]),
        (&["set", "max_buffer_pages", "many"], &["max_buffer_pages", "many"]),
        (&["set", "workers", "2"], &["workers"]),
        (&["limit", "dsik", "--iops", "5"], &["`dsik`", "`disk`"]),
        (&["get", "limit_iops", "--volume", "nothing"], &["nothing"]),
        // Clients, operations, statistics.
        (&["client", "disconnect", "nbd-999"], &["nbd-999", "ebbd client list"]),
        (&["operation", "cancel", "999"], &["999", "ebbd operation list"]),
        (&["stat", "volume", "dsik"], &["`dsik`", "`disk`"]),
        (&["bench", "nothing", "--seconds", "1"], &["nothing"]),
        // The daemon.
        (&["stat", "--control", "/no/such/socket"], &["/no/such/socket", "--control"]),
        (&["config", "show", "/no/such/file"], &["/no/such/file", "check the path"]),
    ];
    let mut wrong = Vec::new();
    for (args, words) in mistakes {
        if let Err(error) = told(&rig.run(args)?, words) {
            wrong.push(format!("{args:?}: {error}"));
        }
    }
    check(wrong.is_empty(), || wrong.join("\n"))?;
    check(mistakes.len() >= 25, || "fewer than 25".to_owned())
}

#[test]
fn all_mistakes_of_a_file_are_told_in_one_run() -> Result {
    let dir = tempfile::tempdir().map_err(Error::io("make a directory"))?;
    let file = dir.path().join("ebbd.toml");
    let text = "listen = ['ux:/t']\nworkers = 900\nlogg = 'info'\n[nbd]\ntls = 'yes'\n[volume.a]\nstore = 'tape:/x'\n\
                [volume.b]\nread_only = true\n";
    fs::write(&file, text).map_err(Error::io("write a file"))?;
    let run = |args: &[&str]| -> Result<Outcome> {
        Tool::new(binary::ebbd(Build::AsTests)?).args(args).arg(&file).run()
    };
    let places = |outcome: &Outcome| -> Vec<String> {
        let name = file.display().to_string();
        let line = |line: &str| {
            let place = line.strip_prefix("ebbd: ")?.strip_prefix(&*name)?.strip_prefix(':')?;
            Some(place.split(": ").take(2).collect::<Vec<_>>().join(" "))
        };
        outcome.stderr.lines().filter_map(line).collect()
    };
    let expected =
        ["1 listen", "2 workers", "3 logg", "5 nbd.tls", "7 volume.a.store", "8 volume.b"];
    for args in
        [&["config", "check"][..], &["serve", "--check", "--config"], &["serve", "--config"]]
    {
        let outcome = run(args)?;
        outcome.check(outcome.status.code() == Some(2), "exit status 2")?;
        let places = places(&outcome);
        outcome.check(places == expected, &format!("{expected:?} instead of {places:?}"))?;
    }
    check(!Path::new("/t").exists(), || "something was made".to_owned())
}
