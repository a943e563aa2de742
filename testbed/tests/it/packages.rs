//! What is delivered beside the program: the Debian package, in a Debian guest with systemd; units, example
//! configuration, dashboard and alert rules, and the container's seccomp profile.

mod container;
mod observability;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use testbed::guest::Guest;
use testbed::harness::binary::{self, Build};
use testbed::harness::process::PATIENCE;
use testbed::{Error, Result, Tool, check};

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging")
}

/// Makes the package, as `make deb` does, of this version, for a Debian with this systemd.
fn make_deb(directory: &Path, version: &str, systemd: &str) -> Result<PathBuf> {
    Tool::new(packaging().join("make-deb"))
        .args(["--version", version, "--systemd", systemd])
        .arg(binary::ebbd(Build::Release)?)
        .arg(directory)
        .limit(PATIENCE * 4)
        .ok()?;
    let made = fs::read_dir(directory).map_err(Error::io("list packages"))?.flatten();
    let start = format!("ebbd_{version}_");
    made.map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&start)))
        .ok_or_else(|| Error::unexpected(format!("no package {start}*.deb")))
}

fn directory() -> Result<TempDir> {
    TempDir::with_prefix("packages-").map_err(Error::io("make a directory"))
}

/// The version of systemd of this machine's Debian, which is also the guest's.
fn systemd() -> Result<String> {
    let version = Tool::new("systemctl").arg("--version").ok()?.stdout;
    let word = version.split_whitespace().nth(1).unwrap_or_default();
    Ok(word.to_owned())
}

#[test]
fn the_package_is_made_alike_twice_and_lintian_finds_no_fault() -> Result {
    let (one, two) = (directory()?, directory()?);
    let deb = make_deb(one.path(), "0.1.0-1", "252")?;
    let again = make_deb(two.path(), "0.1.0-1", "252")?;
    let read = |path: &Path| fs::read(path).map_err(Error::io("read a package"));
    check(read(&deb)? == read(&again)?, || "two builds of one package differ".into())?;
    let found = Tool::new("lintian").args(["--fail-on", "error,warning"]).arg(&deb).run()?;
    found.check(found.status.success(), "no error and no warning")?;

    let list = Tool::new("dpkg-deb").arg("--contents").arg(&deb).ok()?;
    for file in [
        "./usr/bin/ebbd",
        "./usr/libexec/ebbd-vhost-user -> ../bin/ebbd",
        "./usr/share/qemu/vhost-user/60-ebbd.json",
        "./etc/ebbd/ebbd.toml",
        "./usr/lib/sysusers.d/ebbd.conf",
        "./usr/lib/tmpfiles.d/ebbd.conf",
        "/lib/udev/rules.d/60-ebbd.rules",
        "./usr/share/man/man1/ebbd-serve.1.gz",
        "./usr/share/man/man5/ebbd.toml.5.gz",
        "./usr/share/bash-completion/completions/ebbd",
        "./usr/share/zsh/vendor-completions/_ebbd",
        "./usr/share/fish/vendor_completions.d/ebbd.fish",
        "./usr/share/doc/ebbd/book/concepts/",
        "./usr/share/doc/ebbd/copyright",
        "./usr/share/doc/ebbd/third-party.txt.gz",
        "./usr/share/doc/ebbd/examples/prometheus-rules.yml",
    ] {
        let there = list.stdout.lines().any(|line| line.ends_with(file));
        list.check(there, &format!("{file} in the package"))?;
    }
    let control = Tool::new("dpkg-deb").args(["--field"]).arg(&deb).arg("Depends").ok()?;
    for library in ["libc6", "libssl3"] {
        control.check(control.stdout.contains(library), &format!("a dependency on {library}"))?;
    }
    Ok(())
}

/// The unit for a systemd of this version, as a file that systemd-analyze reads.
fn unit(directory: &Path, version: &str) -> Result<(PathBuf, String)> {
    let text = Tool::new(packaging().join("unit-for-systemd")).arg(version).ok()?.stdout;
    // The program is checked to be there, the manual pages to be installed.
    let program = binary::ebbd(Build::AsTests)?;
    let runnable = text.replace("/usr/bin/ebbd", &program.display().to_string());
    let runnable: Vec<_> =
        runnable.lines().filter(|line| !line.starts_with("Documentation=")).collect();
    let path = directory.join("ebbd.service");
    fs::write(&path, runnable.join("\n")).map_err(Error::io("write a unit"))?;
    Ok((path, text))
}

#[test]
fn the_units_pass_the_checks_of_systemd_and_older_versions_get_what_they_know() -> Result {
    let directory = directory()?;
    let (_, newest) = unit(directory.path(), "257")?;
    let (path, here) = unit(directory.path(), &systemd()?)?;
    let (_, older) = unit(directory.path(), "252")?;
    let has = |text: &str, line: &str| text.lines().any(|found| found == line);
    for line in ["Type=notify-reload", "RestartSteps=6", "StartLimitIntervalSec=0"] {
        check(has(&newest, line), || format!("{line} in:\n{newest}"))?;
    }
    check(!newest.contains("ExecReload="), || "a reload is one signal, not two".into())?;
    for line in ["Type=notify", "StartLimitIntervalSec=0", "RestartPreventExitStatus=2"] {
        check(has(&older, line), || format!("{line} in:\n{older}"))?;
    }
    let reload = has(&older, "ExecReload=/bin/sh -c 'kill -HUP $MAINPID'");
    check(reload && !older.contains("RestartSteps"), || format!("for systemd 252:\n{older}"))?;

    let here_is_older = here == older;
    let path = if here_is_older { unit(directory.path(), "252")?.0 } else { path };
    let verified = Tool::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).run()?;
    let clean = verified.status.success() && !verified.stderr.contains("ebbd");
    verified.check(clean, "no finding about ebbd.service")?;
    exposure(&path)?;
    check(has(&older, "SystemCallFilter=~@privileged @resources"), || {
        format!("system calls for systemd 252:\n{older}")
    })?;
    let (_, ancient) = unit(directory.path(), "249")?;
    // The C library reads limits with a call that is one of @resources there.
    check(ancient.contains("@resources\nSystemCallFilter=prlimit64\n"), || {
        format!("for systemd 249:\n{ancient}")
    })?;

    // In a Xen dom0.
    let (path, _) = unit(directory.path(), if here_is_older { "252" } else { "257" })?;
    let drop_in = directory.path().join("ebbd.service.d");
    fs::create_dir(&drop_in).map_err(Error::io("make a directory"))?;
    fs::copy(packaging().join("ebbd-xen.conf"), drop_in.join("xen.conf"))
        .map_err(Error::io("copy the drop-in"))?;
    let shown = exposure(&path)?;
    check(shown.contains("/dev/xen/gntdev"), || format!("the drop-in is not read:\n{shown}"))
}

/// What systemd-analyze finds about a unit, whose exposure is to be low.
fn exposure(unit: &Path) -> Result<String> {
    let score = Tool::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold=12"])
        .arg(unit)
        .run()?;
    score.check(score.status.success(), "an exposure of at most 1.2")?;
    Ok(score.stdout)
}

/// The commands of the book's page about systemd.
fn installation() -> Result<String> {
    let page = packaging().join("..").join("docs/book/src/operate/systemd.md");
    let text = fs::read_to_string(page).map_err(Error::io("read systemd.md"))?;
    let block = text.split_once("\n```sh\n").and_then(|(_, block)| block.split_once("\n```\n"));
    let (block, _) = block.ok_or_else(|| Error::unexpected("no commands in systemd.md"))?;
    Ok(block.to_owned())
}

#[test]
fn commands_of_the_book_install_what_the_unit_starts() -> Result {
    let block = installation()?;
    let here = systemd()?;
    let expected = Tool::new(packaging().join("unit-for-systemd")).arg(&here).ok()?.stdout;
    let start = expected.lines().find_map(|line| line.strip_prefix("ExecStart="));
    let words: Vec<&str> = start.unwrap_or_default().split_whitespace().collect();
    let [program, "serve", "--config", config] = words[..] else {
        return Err(Error::unexpected(format!("ExecStart={words:?}")));
    };
    let directory = program.strip_suffix("ebbd").unwrap_or_default();
    let installs = format!("sudo install target/release/ebbd {directory}");
    check(block.lines().any(|line| line == installs), || format!("no {installs:?} in:\n{block}"))?;
    let places = block.contains(&format!(" {config}\n"));
    check(places, || format!("the configuration is not put at {config}:\n{block}"))?;

    // The command that makes the unit, up to the pipe.
    let made = block
        .lines()
        .find(|line| line.starts_with("packaging/unit-for-systemd"))
        .and_then(|line| line.strip_suffix(" |"))
        .ok_or_else(|| Error::unexpected(format!("no unit for this systemd in:\n{block}")))?;
    let made = Tool::new("bash")
        .arg("-c")
        .arg(format!("cd '{}' && {made}", packaging().join("..").display()))
        .ok()?;
    made.check(made.stdout == expected, &format!("the unit for systemd {here}"))?;
    let written = block.contains("\n    sudo tee /etc/systemd/system/ebbd.service >/dev/null");
    check(written, || format!("the unit is not written:\n{block}"))
}

#[test]
fn the_examples_in_the_configuration_are_valid() -> Result {
    let file = packaging().join("ebbd.toml");
    let text = fs::read_to_string(&file).map_err(Error::io("read ebbd.toml"))?;
    let directory = directory()?;
    let path = |name: &str| directory.path().join(name).display().to_string();
    // `#key` is an example, `# text` explains.
    let mut examples = String::new();
    for line in text.lines() {
        let example =
            line.strip_prefix('#').filter(|rest| !rest.is_empty() && !rest.starts_with(' '));
        match example {
            // Another value of a key that is there, and one of two that exclude each other.
            Some(line) if line.starts_with("listen") || line.starts_with("tls_psk") => {}
            Some(line) => examples.push_str(&format!("{line}\n")),
            None => examples.push_str(&format!("{line}\n")),
        }
    }
    check(examples.contains("\n[volume.remote]\n"), || format!("examples:\n{examples}"))?;
    let keys = ["tls = ", "tls_certificates = ", "tls_verify_peer = ", "web_to", "web_tls"];
    let without = |text: &str, keys: &[&str]| -> String {
        let keep = |line: &&str| !keys.iter().any(|key| line.starts_with(key));
        text.lines().filter(keep).map(|line| format!("{line}\n")).collect()
    };
    let here = without(&examples, &keys)
        .replace("/var/lib/ebbd", &path(""))
        .replace("/run/ebbd", &path(""))
        .replace("nbd://storage.example/disk", "memory:1M");
    let config = directory.path().join("ebbd.toml");
    fs::write(&config, here).map_err(Error::io("write a configuration"))?;
    let ebbd = binary::ebbd(Build::AsTests)?;
    let checked = Tool::new(&ebbd).args(["serve", "--check", "--config"]).arg(&config).run()?;
    checked.check(checked.status.success(), "the examples to be valid")?;
    // The keys of TLS need files: that these are missed shows that the keys are read.
    fs::write(&config, examples).map_err(Error::io("write a configuration"))?;
    let checked = Tool::new(&ebbd).args(["serve", "--check", "--config"]).arg(&config).fails()?;
    for missed in ["/etc/ebbd/tls", "/etc/ebbd/tokens", "/etc/ebbd/web"] {
        checked.check(checked.stderr.contains(missed), &format!("{missed} to be missed"))?;
    }
    Ok(())
}

#[test]
fn the_package_is_installed_upgraded_removed_and_purged_in_a_debian_guest() -> Result {
    let directory = directory()?;
    let here = systemd()?;
    let old = make_deb(directory.path(), "0.1.0-1", &here)?;
    let new = make_deb(directory.path(), "0.1.0-2", &here)?;
    let outcome = Guest::new(include_str!("../../guests/package.sh"))
        .debian()
        .data(&old, Path::new("/data/ebbd-1.deb"))
        .data(&new, Path::new("/data/ebbd-2.deb"))
        .memory_mib(768)
        .limit(Duration::from_secs(1800))
        .ok()?;
    let kind = if here.parse::<u32>().is_ok_and(|n| n < 253) { "notify" } else { "notify-reload" };
    for (key, expected) in [
        ("installed", "active enabled"),
        ("type", &format!("{kind} 0")),
        ("user", "ebbd /var/lib/ebbd:/usr/sbin/nologin"),
        ("places", "ebbd:ebbd:750 ebbd:ebbd:750 root:root:644"),
        ("socket", "ebbd:ebbd:770"),
        ("device", "ebbd:root:600"),
        ("dom0", "ebbd opened refused unchanged hidden"),
        ("manual", "3"),
        ("empty", "0 of 0 volumes served"),
        ("size", "67108864"),
        ("status", "1 of 1 volume served"),
        ("killed", "active"),
        ("upgraded", "0.1.0-2 active"),
        ("same", "yes"),
        ("flushed", "1"),
        ("removed", "inactive gone kept"),
        ("purged", "gone kept 1"),
        ("clean", "0 0"),
    ] {
        let said = outcome.answer(key)?;
        check(said == expected, || {
            outcome.unexpected(&format!("{key}: {expected:?}, not {said:?}")).to_string()
        })?;
    }
    let completion = outcome.answer("completion")?;
    check(completion.contains("_ebbd"), || format!("completion: {completion}"))?;
    // The journal, from the serial console.
    for line in ["listening", "Started ebbd.service", "reloaded", "stopped: all volumes flushed"] {
        check(outcome.console.contains(line), || {
            outcome.unexpected(&format!("{line:?} in the journal")).to_string()
        })?;
    }
    Ok(())
}

#[test]
fn a_stranger_serves_a_volume_with_the_package_and_edits_no_file() -> Result {
    let directory = directory()?;
    let deb = make_deb(directory.path(), "0.1.0-1", &systemd()?)?;
    let script = "bash ./data/stranger.sh\n";
    let stranger = Path::new(env!("CARGO_MANIFEST_DIR")).join("guests/stranger.sh");
    let outcome = Guest::new(script)
        .debian()
        .data(&deb, Path::new("/data/data/ebbd-1.deb"))
        .data(&stranger, Path::new("/data/stranger.sh"))
        .memory_mib(768)
        .limit(Duration::from_secs(1800))
        .ok()?;
    // Kept for people to read.
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stranger.txt");
    fs::write(&kept, &outcome.console).map_err(Error::io("keep the output"))?;
    let done = outcome.console.contains("stranger: all done");
    check(done, || outcome.unexpected("the last step of the script").to_string())
}
