//! What the program says on its standard output, when that is full.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::File;
use std::process::{Command, Output, Stdio};

fn run(arguments: &[&str], stdout: Stdio) -> Output {
    let program = env!("CARGO_BIN_EXE_ebbd");
    Command::new(program).args(arguments).stdout(stdout).stderr(Stdio::piped()).output().unwrap()
}

#[test]
fn what_cannot_be_written_is_a_failure() {
    let all: [&[&str]; 5] = [
        &["--version"],
        &["--help"],
        &["serve", "--help"],
        &["stat", "-h"],
        &["completions", "bash"],
    ];
    for arguments in all {
        let output = run(arguments, Stdio::null());
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = run(arguments, full.into());
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("No space left on device"), "{arguments:?}: {said}");
    }
    // A mistake is a mistake wherever the output goes.
    let full = File::options().write(true).open("/dev/full").unwrap();
    assert_eq!(run(&["--nonsense"], full.into()).status.code(), Some(2));
}
