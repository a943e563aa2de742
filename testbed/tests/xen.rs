//! Real Xen: unmodified Linux guests whose disks the daemon serves, in one boot.
//!
//! Two guests with two queues each. One makes a file system, writes 80 MB with checksums, finds them
//! again after its disk was detached and attached, gives space back, and is replaced by a guest that
//! finds the files, too. The other verifies raw content, with requests of
//! many pages, while the daemon is killed eight times and goes on with the same rings; and once more
//! on a disk without persistent grants. The scripts are in `tests/xen/`.
//!
//! One boot, a little over three minutes of one processor: that is why it is 80 MB.

use std::time::Duration;
use testbed::binary::{self, Build};
use testbed::xen::{Machine, Outcome};
use testbed::{Result, check};

/// Daemon and load are those of a release: a machine that counts instructions counts debug checks, too.
fn machine() -> Result<Machine> {
    let mut machine = Machine::new(include_str!("xen/job.sh"))
        .file("files.sh", include_str!("xen/files.sh"))
        .file("churn.sh", include_str!("xen/churn.sh"))
        .file("more.sh", include_str!("xen/more.sh"))
        .guest(2, 320)
        .guest(2, 256)
        .program(binary::ebbd(Build::Release)?)
        .guest_program(binary::release("testbed", "guest-load")?)
        .limit(Duration::from_secs(1500));
    for program in ["fio", "mkfs.ext4", "e2fsck", "fstrim"] {
        machine = machine.guest_program(program);
    }
    Ok(machine)
}

/// A number that was given as an answer.
fn number(outcome: &Outcome, key: &str) -> Result<u64> {
    let text = outcome.answer(key)?;
    text.parse().map_err(|_| outcome.unexpected(&format!("a number for {key}, not {text}")))
}

#[test]
fn linux_guests_on_xen_keep_their_files_while_the_daemon_is_killed() -> Result {
    let outcome = machine()?.ok()?;
    let expect = |condition: bool, what: &str| match condition {
        true => Ok(()),
        false => Err(outcome.unexpected(what)),
    };
    expect(outcome.answers("queues") == ["2", "2"], "two queues for each guest")?;
    expect(outcome.answers("persistent") == ["1", "1"], "persistent grants for each guest")?;
    expect(outcome.answer("without")? == "0", "no persistent grants on the last disk")?;
    expect(outcome.answer("kills")? == "8", "eight kills")?;

    // "churn COUNT errors wrong": guest-load itself fails when there is an error or a wrong byte.
    let loads = [outcome.answers("two.churn"), outcome.answers("two.plain")].concat();
    expect(loads.len() == 3, "three verified loads")?;
    for load in &loads {
        let words: Vec<&str> = load.split(' ').collect();
        let good = matches!(words[..], ["churn", count, "0", "0"]
            if count.parse::<u64>().is_ok_and(|n| n > 1000));
        check(good, || format!("more than 1000 requests, none failed or wrong: {load}"))?;
    }

    expect(number(&outcome, "flushes")? > 0, "flushes of the file system at the store")?;
    expect(outcome.answer("more.files")? == "8", "eight files found by the next guest")?;
    let (before, after) = (number(&outcome, "used-before")?, number(&outcome, "used-after")?);
    // Eleven files of 4 MiB.
    check(after + 40_000 <= before, || {
        format!("44 MiB trimmed, but the image took {before} KiB and takes {after} KiB")
    })
}
