//! The scripts that install packages while another apt process runs: apt-get is replaced by a script
//! whose lists are locked at first.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use testbed::{Error, Result, check};

/// `update` finds the lists locked twice; the arguments of each call are written to a file.
const APT_GET: &str = r#"#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
    *update)
        [ "$(grep -c 'update$' "$CALLS")" -gt 2 ] && exit 0
        echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 1 (apt-get)" >&2
        echo "E: Unable to lock directory /var/lib/apt/lists/" >&2
        exit 100
        ;;
esac
"#;

fn program(folder: &Path, name: &str, text: &str) -> Result {
    let path = folder.join(name);
    fs::write(&path, text).map_err(Error::io("write a program"))?;
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&path, mode).map_err(Error::io("write a program"))
}

/// Runs an installer with the replaced apt-get, as if nothing were installed. Returns the arguments of the calls.
fn run(script: &str) -> Result<String> {
    let folder = tempfile::tempdir().map_err(Error::io("make a folder"))?;
    let (dir, calls) = (folder.path(), folder.path().join("calls"));
    program(dir, "apt-get", APT_GET)?;
    program(dir, "id", "#!/bin/sh\necho 0\n")?;
    program(dir, "pkg-config", "#!/bin/sh\nexit 1\n")?;
    program(dir, "dpkg-query", "#!/bin/sh\nexit 1\n")?;
    fs::create_dir_all(dir.join("cache/kernel")).map_err(Error::io("make a folder"))?;
    fs::write(dir.join("cache/kernel/release"), "x").map_err(Error::io("write a file"))?;
    program(&dir.join("cache"), "promtool", "")?;
    fs::create_dir(dir.join("cache/qemu-backports")).map_err(Error::io("make a folder"))?;
    let complete = dir.join("cache/qemu-backports/complete");
    fs::write(complete, "qemu-system-x86 qemu-system-data seabios qemu-utils\n")
        .map_err(Error::io("write a file"))?;
    fs::create_dir_all(dir.join("cache/cryptsetup/sbin")).map_err(Error::io("make a folder"))?;
    program(&dir.join("cache/cryptsetup/sbin"), "cryptsetup", "")?;
    fs::create_dir(dir.join("cache/debian")).map_err(Error::io("make a folder"))?;
    fs::write(dir.join("cache/debian/made-by"), include_str!("../../debian-image"))
        .map_err(Error::io("write a file"))?;
    let path = std::env::var("PATH").unwrap_or_default();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let output = Command::new("bash")
        .arg(root.join(script))
        .env("PATH", format!("{}:{path}", dir.display()))
        .env("CALLS", &calls)
        .env("EBBD_TESTBED_CACHE", dir.join("cache"))
        .output()
        .map_err(Error::io("run a script"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    check(output.status.success(), || format!("{script}: {}\n{said}", output.status))?;
    fs::read_to_string(&calls).map_err(Error::io("read the calls"))
}

#[test]
fn installers_wait_for_another_apt() -> Result {
    for script in ["packaging/install-build-deps", "testbed/install"] {
        let calls = run(script)?;
        let lines: Vec<&str> = calls.lines().collect();
        let waits = lines.iter().all(|line| line.contains("-o DPkg::Lock::Timeout=600"));
        let updates = lines.iter().filter(|line| line.ends_with("update")).count();
        let last = lines.last().is_some_and(|line| line.contains(" install "));
        check(waits && updates == 3 && last, || format!("{script} called apt-get:\n{calls}"))?;
    }
    Ok(())
}
