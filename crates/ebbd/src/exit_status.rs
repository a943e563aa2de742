//! The exit statuses of the program. Scripts rely on them: none changes its meaning.

/// Done; of `ebbd status` and `ebbd doctor`: all is well.
pub const DONE: u8 = 0;
/// It failed while running.
pub const FAILED: u8 = 1;
/// A mistake on the command line or in the configuration, or a request that the daemon rejects:
/// also one for something that is busy, which succeeds later.
pub const USAGE: u8 = 2;
/// The daemon cannot be reached, or does not reply.
pub const UNREACHABLE: u8 = 3;
/// Something is worse than configured, and everything is served.
pub const DEGRADED: u8 = 4;
/// A volume is not served or fails requests; an image is damaged; a check found a mistake.
pub const FAILING: u8 = 5;

/// All statuses: the number, the name that an error has with `--json`, and the meaning.
pub const ALL: [(u8, &str, &str); 6] = [
    (DONE, "done", "Success."),
    (FAILED, "failed", "A failure while running."),
    (
        USAGE,
        "usage",
        "A mistake on the command line or in the configuration, or a request that the daemon rejects.",
    ),
    (UNREACHABLE, "unreachable", "The daemon cannot be reached, or does not reply."),
    (
        DEGRADED,
        "degraded",
        "Something is worse than configured, and everything is served (status, reload); there is a warning (doctor).",
    ),
    (
        FAILING,
        "failing",
        "A volume is not served or fails requests (status, reload); there is a mistake (doctor); the image is damaged \
         (image check).",
    ),
];

/// Returns the name of a status.
pub fn name(status: u8) -> &'static str {
    ALL.iter().find(|(number, ..)| *number == status).map_or("failed", |(_, name, _)| name)
}

/// The statuses as text for `--help`.
pub fn help() -> String {
    let lines = ALL.iter().map(|(number, _, meaning)| format!("  {number}  {meaning}\n"));
    format!("Exit status:\n{}", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_distinct_and_in_order() {
        let numbers: Vec<u8> = ALL.iter().map(|(number, ..)| *number).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        assert_eq!((name(UNREACHABLE), name(200)), ("unreachable", "failed"));
    }
}
