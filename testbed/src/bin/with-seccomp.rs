//! Runs a program under a seccomp profile as container engines read it: `with-seccomp [--kill] PROFILE PROGRAM [ARGUMENTS]`.
//! With `--kill` a system call that the profile denies ends the program, so that none goes unnoticed.

use seccompiler::{BpfMap, TargetArch, apply_filter, compile_from_json};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::os::unix::process::CommandExt;
use std::process::Command;

fn main() -> Result<Infallible, String> {
    let mut arguments: Vec<_> = std::env::args().skip(1).collect();
    let kill = arguments.first().is_some_and(|first| first == "--kill");
    if kill {
        arguments.remove(0);
    }
    let [profile, program, rest @ ..] = &arguments[..] else {
        return Err("usage: with-seccomp [--kill] PROFILE PROGRAM [ARGUMENTS]".into());
    };
    confine(profile, kill).map_err(|error| format!("{profile}: {error}"))?;
    Err(format!("{program}: {}", Command::new(program).args(rest).exec()))
}

/// Confines this process for good.
fn confine(profile: &str, kill: bool) -> Result<(), String> {
    let text = std::fs::read_to_string(profile).map_err(|e| e.to_string())?;
    let profile = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    for filter in filters(&profile, kill)? {
        let text = json!({ "filter": filter }).to_string();
        let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(|e| e.to_string())?;
        let map: BpfMap =
            compile_from_json(text.as_bytes(), arch).map_err(|e| format!("{e}: {e:?}"))?;
        for program in map.values() {
            apply_filter(program).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

/// The filters of a profile in the form of seccompiler: of several the kernel takes the strictest answer. So a call
/// that is denied with an error of its own is allowed by the first one, and has another.
fn filters(profile: &Value, kill: bool) -> Result<Vec<Value>, String> {
    if profile["defaultAction"] != "SCMP_ACT_ERRNO" {
        return Err("defaultAction is not SCMP_ACT_ERRNO".into());
    }
    let denied = if kill { json!("kill_process") } else { json!({"errno": 1}) };
    let (mut allowed, mut others) = (Vec::new(), Vec::new());
    for group in profile["syscalls"].as_array().ok_or("no syscalls")? {
        let arguments: Vec<Value> = match group["args"].as_array() {
            Some(list) => list.iter().map(condition).collect::<Result<_, _>>()?,
            None => Vec::new(),
        };
        for name in group["names"].as_array().ok_or("a group without names")? {
            allowed.push(match arguments.is_empty() {
                true => json!({"syscall": name}),
                false => json!({"syscall": name, "args": arguments}),
            });
            if group["action"] == "SCMP_ACT_ERRNO" {
                others.push(json!({
                    "mismatch_action": "allow",
                    "match_action": {"errno": group["errnoRet"]},
                    "filter": [{"syscall": name}],
                }));
            } else if group["action"] != "SCMP_ACT_ALLOW" {
                return Err(format!("action {}", group["action"]));
            }
        }
    }
    let first = json!({"mismatch_action": denied, "match_action": "allow", "filter": allowed});
    others.push(first);
    Ok(others)
}

/// A condition on an argument of a call.
fn condition(argument: &Value) -> Result<Value, String> {
    let (value, mut compared) = (&argument["value"], argument["value"].clone());
    let operator = match argument["op"].as_str() {
        Some("SCMP_CMP_EQ") => json!("eq"),
        Some("SCMP_CMP_MASKED_EQ") => {
            compared = argument["valueTwo"].clone();
            json!({ "masked_eq": value })
        }
        other => return Err(format!("operator {other:?}")),
    };
    Ok(json!({"index": argument["index"], "type": "qword", "op": operator, "val": compared}))
}
