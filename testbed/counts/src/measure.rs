//! Runs the measured programs.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::baseline::Counts;
use crate::callgrind::{Requests, Sources, read};
use crate::served::{Error, Export, VolumeKind, WARM, loads};

/// Requests of each load.
const REQUESTS: u32 = 1000;
/// Seconds after which a run counts as hung. One takes a few.
const LIMIT: &str = "180";

/// Measures everything with the programs in `programs`. `progress` receives the name of the next
/// measurement.
///
/// # Errors
/// A program is missing or failed.
pub fn measure(
    programs: &Path,
    root: &Path,
    mut progress: impl FnMut(&str),
) -> Result<Counts, Error> {
    let mut counts = Counts { environment: environment(root)?, ..Counts::default() };
    let mut sources = Sources::new(root);
    for export in Export::ALL {
        for volume in VolumeKind::ALL {
            let name = format!("{}.{}", export.name(), volume.name());
            progress(&name);
            count_calls(programs, &name, (export, volume), &mut counts)?;
            count_instructions(programs, &name, (export, volume), &mut counts, &mut sources)?;
        }
    }
    Ok(counts)
}

/// What counts depend on besides the code. Instructions are compared only where all but the kernel
/// are the same.
fn environment(root: &Path) -> Result<std::collections::BTreeMap<String, String>, Error> {
    let said = |program: &str, arguments: &[&str]| -> Result<String, Error> {
        run(Command::new(program).args(arguments).current_dir(root))
    };
    #[cfg(target_arch = "x86_64")]
    let avx = if std::arch::is_x86_feature_detected!("avx2") { " avx2" } else { "" };
    #[cfg(not(target_arch = "x86_64"))]
    let avx = "";
    let all = [
        ("rustc", said("rustc", &["--version"])?),
        ("valgrind", said("valgrind", &["--version"])?),
        ("libc", said("getconf", &["GNU_LIBC_VERSION"])?),
        ("processor", format!("{}{avx}", std::env::consts::ARCH)),
        ("kernel", said("uname", &["-r"])?),
    ];
    Ok(all.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).into())
}

/// Runs a program to its end and returns its output.
fn run(command: &mut Command) -> Result<String, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| {
        format!("cannot start {program}: {error}; testbed/install installs valgrind")
    })?;
    if output.status.success() {
        return Ok(String::from_utf8(output.stdout)?);
    }
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {}: {}\n{said}", words.join(" "), output.status).into())
}

/// Allocations, copied bytes and operations of the ring, without valgrind.
fn count_calls(
    programs: &Path,
    name: &str,
    (export, volume): (Export, VolumeKind),
    counts: &mut Counts,
) -> Result<(), Error> {
    let program = programs.join("served-copies");
    let mut command = Command::new("timeout");
    command.arg(LIMIT).arg(program).args([export.name(), volume.name()]).arg(REQUESTS.to_string());
    for line in run(&mut command)?.lines() {
        let mut words = line.split_ascii_whitespace();
        let load = words.next().unwrap_or_default();
        let values: Vec<(&str, f64)> = words
            .filter_map(|word| word.split_once('='))
            .filter_map(|(key, value)| Some((key, value.parse().ok()?)))
            .collect();
        let [("requests", requests), rest @ ..] = &values[..] else {
            return Err(format!("{name}: unexpected output `{line}`").into());
        };
        for (key, value) in rest {
            counts.counts.insert(format!("{name}.{load}.{key}"), value / requests);
        }
    }
    Ok(())
}

/// Instructions and system calls.
fn count_instructions(
    programs: &Path,
    name: &str,
    (export, volume): (Export, VolumeKind),
    counts: &mut Counts,
    sources: &mut Sources<'_>,
) -> Result<(), Error> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("out");
    let mut command = Command::new("timeout");
    command.arg(LIMIT).arg("valgrind");
    command.args(["--tool=callgrind", "--collect-systime=yes", "--collect-atstart=no"]);
    command.args(["--compress-strings=no", "--compress-pos=no", "--error-exitcode=1"]);
    command.arg("--toggle-collect=counts::served::counted_iteration");
    command.arg("--zero-before=counts::served::load_begins");
    command.arg("--dump-after=counts::served::load_has_ended");
    command.arg(format!("--callgrind-out-file={}", out.display()));
    command.arg(programs.join("served")).args([export.name(), volume.name()]);
    run(command.arg(REQUESTS.to_string()))?;
    for (number, load) in loads(volume).enumerate() {
        // The first dump is of the time before the first load.
        let dump = format!("out.{}", number + 2);
        let text = fs::read_to_string(folder.path().join(dump))?;
        // `--zero-before` does not forget system calls: the dump includes the warm-up.
        let (warm, counted) = (load.depth * WARM, load.depth * load.batches(REQUESTS as usize));
        let requests = Requests { instructions: counted, system_calls: warm + counted };
        let profile = read(&text, sources, requests);
        let both = [("instructions", profile.instructions), ("system_calls", profile.system_calls)];
        for (unit, costs) in both {
            let sum: f64 = costs.values().sum();
            let figure = format!("{name}.{}.{unit}", load.name);
            if unit == "instructions" && sum < 1.0 {
                return Err(format!("{figure}: callgrind has counted nothing").into());
            }
            counts.counts.insert(figure.clone(), sum);
            counts.costs.insert(figure, costs);
        }
    }
    Ok(())
}
