//! Metrics of the process, under the names that the client libraries of Prometheus give them, of the last reload,
//! of the sandbox and of the certificates.

use std::fmt;

use ebb_api::stat::Stat;
use prometheus_client::registry::Unit;

use super::{Out, float};

/// Writes a figure that is never 0: a 0 is one that could not be read.
fn measured(
    out: &mut Out<'_>,
    name: (&'static str, &'static str),
    unit: Option<&Unit>,
    figure: u64,
) -> fmt::Result {
    if figure > 0 { out.gauge(name, unit, float(figure)) } else { Ok(()) }
}

/// Writes them.
pub(super) fn encode(stat: &Stat, out: &mut Out<'_>) -> fmt::Result {
    let (process, bytes, seconds) = (&stat.process, Some(&Unit::Bytes), Some(&Unit::Seconds));
    let resident = ("process_resident_memory", "Resident memory of the process");
    measured(out, resident, bytes, stat.resident_bytes)?;
    let address = ("process_virtual_memory", "Address space of the process");
    measured(out, address, bytes, process.virtual_bytes)?;
    let cpu = ("process_cpu", "Time of the processors in user and kernel mode");
    out.time(cpu, process.cpu_seconds)?;
    measured(out, ("process_open_fds", "Open descriptors"), None, process.open_fds)?;
    if let Some(most) = process.max_fds {
        out.gauge(("process_max_fds", "Limit of open descriptors"), None, float(most))?;
    }
    measured(out, ("process_threads", "Threads of the process"), None, process.threads)?;
    let start = ("process_start_time", "When the process started, since 1970");
    out.gauge(start, seconds, process.start_time)?;
    let success = stat.reload.as_ref().is_none_or(|reload| reload.success);
    let help = "Whether the last reload of the configuration was applied; 1 before the first";
    out.gauge(("ebbd_config_last_reload_successful", help), None, f64::from(u8::from(success)))?;
    let applied = stat.reload.as_ref().and_then(|reload| reload.last_success);
    let help = "When the configuration in force was applied, since 1970";
    let name = "ebbd_config_last_reload_success_timestamp";
    out.gauge((name, help), seconds, applied.unwrap_or(process.start_time))?;
    if !stat.sandbox.is_empty() {
        let parts = stat.sandbox.iter().map(|part| {
            ([("mechanism", part.mechanism.as_str())], float(u64::from(part.in_force)))
        });
        let help = "Whether a part of the daemon's sandbox is in force";
        out.fractions(("ebbd_sandbox_in_force", help), None, parts)?;
    }
    if stat.certificates.is_empty() {
        return Ok(());
    }
    let expiries = stat.certificates.iter().map(|certificate| {
        let labels = [("purpose", certificate.purpose.as_str()), ("path", &certificate.path)];
        (labels, float(u64::try_from(certificate.expires).unwrap_or(0)))
    });
    let expiry = (
        "ebbd_certificate_expiry_timestamp",
        "When the certificate, CA or revocation list expires",
    );
    out.fractions(expiry, seconds, expiries)
}
