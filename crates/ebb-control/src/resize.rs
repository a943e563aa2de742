//! What a resize that cannot be done is answered with.

use std::error::Error;

use axum::http::StatusCode;
use ebb_advice::Advice;
use ebb_api::stat::{VolumeCondition, VolumeStat};
use ebb_api::{OperationState, OperationView, Refusal};
use ebb_config::params::unknown_volume;
use ebb_volume::ResizeError;

use super::ControlContext;
use super::answer::ApiRefusal;
use super::manager::Refused;

/// Checks that the volume of this name is served.
pub(super) fn check_served(shared: &ControlContext, name: &str) -> Result<(), ApiRefusal> {
    if shared.server.volumes().get(name).is_some() {
        return Ok(());
    }
    if let Some(stat) = (shared.volumes)().into_iter().find(|stat| stat.name == name) {
        let mut message = format!("the volume is {}", stat.state);
        let mut remedy = "try again in a moment".to_owned();
        if let Some(failure) = stat.failure {
            remedy = failure.reason;
        } else if let Some(operation) = operation_of(shared, &stat) {
            message = format!("{message}: operation {} ({})", operation.id, operation.kind);
            remedy =
                format!("wait until it has ended: `ebbd operation show {} --wait`", operation.id);
        } else if let Some(why) = stat.waits_for {
            message = format!("{message}: {why}");
        }
        return Err(ApiRefusal::new(StatusCode::CONFLICT, "not_served", &message, remedy));
    }
    let volumes = (shared.volumes)();
    Err(unknown_volume(name, volumes.iter().map(|volume| &*volume.name)).into())
}

/// The operation that closes or opens a volume.
fn operation_of(shared: &ControlContext, stat: &VolumeStat) -> Option<OperationView> {
    let mut running = shared.manager.operations();
    running.retain(|operation| operation.state == OperationState::Running);
    let is_of_it = |operation: &OperationView| match operation.kind.as_str() {
        "add" | "remove" | "rename" | "commit" => operation.volume.as_ref() == Some(&stat.name),
        _ => false,
    };
    let reloads = |operation: &OperationView| operation.kind == "reload";
    let found = running.iter().position(is_of_it);
    let closes = stat.state == VolumeCondition::Closing && stat.waits_for.is_none();
    let reload = || running.iter().position(reloads).filter(|_| closes);
    found.or_else(reload).map(|at| running.swap_remove(at))
}

/// The reply to a resize that has failed.
pub fn refusal(error: &ResizeError) -> Refused {
    let (refusal, kind) = match error {
        ResizeError::Sectors { .. } => (Refusal::Invalid, "invalid_value"),
        ResizeError::Io(_) | ResizeError::Remote(_) => (Refusal::Failed, "io"),
        ResizeError::Unsaved(_) | ResizeError::Metadata(_) => (Refusal::Failed, "not_resized"),
        _ => (Refusal::Conflict, "not_resized"),
    };
    let message = match error.source() {
        Some(cause) => format!("{error} ({cause})"),
        None => error.to_string(),
    };
    Refused::new(refusal, kind, message, error.remedy().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(error: &ResizeError) -> String {
        let failure = refusal(error).body;
        assert!(!failure.message.is_empty() && !failure.remedy.is_empty(), "{failure:?}");
        format!("{}; {}", failure.message, failure.remedy)
    }

    #[test]
    fn a_refused_size_is_reported_with_its_cause_and_a_remedy() {
        for (code, cause, remedy) in [
            (rustix::io::Errno::FBIG, "File too large", "smaller"),
            (rustix::io::Errno::NOSPC, "No space left", "free space"),
            (rustix::io::Errno::DQUOT, "quota", "free space"),
            (rustix::io::Errno::PERM, "not permitted", "lsattr"),
            (rustix::io::Errno::IO, "Input/output error", "file system"),
        ] {
            let said = refused(&ResizeError::Io(code.into()));
            assert!(said.contains(cause) && said.contains(remedy), "{said}");
            assert!(!said.contains("log"), "the error is not in the log: {said}");
        }
        let fixed = ResizeError::Unsupported { why: "it keeps its size", remedy: "add it again" };
        let said = refused(&fixed);
        assert_eq!(said, "it keeps its size; add it again");
        let said = refused(&ResizeError::Device { size: 512 });
        assert!(said.starts_with("the device has 512 bytes; resize the device itself"), "{said}");
    }
}
