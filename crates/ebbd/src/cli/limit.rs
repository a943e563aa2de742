//! The options of `ebbd limit`.

use clap::{ArgGroup, Args};
use ebb_config::{Size, size_option};

/// The options of `ebbd limit`.
#[derive(Clone, Debug, Default, Args)]
#[command(allow_negative_numbers = true)]
#[command(group = ArgGroup::new("limited").args(["volume", "group"]).multiple(true))]
pub struct LimitArgs {
    /// The volume; without it and without --group, all limits in force are printed
    #[arg(value_name = "VOLUME")]
    pub volume: Option<String>,

    /// Put the volume into this group; without a VOLUME, limit the group itself
    #[arg(long, value_name = "GROUP", conflicts_with = "no_group")]
    pub group: Option<String>,

    /// Take the volume out of its group
    #[arg(long, requires = "volume")]
    pub no_group: bool,

    /// The most requests per second, reads and writes together; 0 is no limit
    #[arg(long, value_name = "N", requires = "limited", value_parser = requests)]
    pub iops: Option<u64>,

    /// The most reads per second
    #[arg(long, value_name = "N", requires = "limited", value_parser = requests)]
    pub read_iops: Option<u64>,

    /// The most writes per second; discards and requests to write zeroes count as writes
    #[arg(long, value_name = "N", requires = "limited", value_parser = requests)]
    pub write_iops: Option<u64>,

    /// The most bytes per second, such as 200M, reads and writes together; 0 is no limit
    #[arg(long, value_name = "SIZE", requires = "limited", value_parser = size_option)]
    pub bandwidth: Option<Size>,

    /// The most bytes per second of reads
    #[arg(long, value_name = "SIZE", requires = "limited", value_parser = size_option)]
    pub read_bandwidth: Option<Size>,

    /// The most bytes per second of writes
    #[arg(long, value_name = "SIZE", requires = "limited", value_parser = size_option)]
    pub write_bandwidth: Option<Size>,

    /// The burst after an idle period: the requests and bytes of this time, such as 2s or 500ms; a plain number is
    /// milliseconds
    #[arg(long, value_name = "TIME", requires = "limited", value_parser = milliseconds)]
    pub burst: Option<u64>,

    /// Go back to the limits that were kept or configured, before other options are applied; with --persist, to those of
    /// the configuration file
    #[arg(long, requires = "limited")]
    pub clear: bool,

    /// Keep the limits of the VOLUME, or else of the group, in the state directory, so that the next start has them, too
    #[arg(long)]
    pub persist: bool,

    /// Print JSON, sizes in bytes, times in seconds
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// Parses a time on the command line: `2s`, `500ms`, or a number of milliseconds.
///
/// # Errors
/// Text that is no time, with the remedy.
pub fn milliseconds(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix("ms") {
        Some(digits) => (digits, 1),
        None => text.strip_suffix('s').map_or((text, 1), |digits| (digits, 1000)),
    };
    let plain = !digits.starts_with('+');
    let number = digits.parse::<u64>().ok().filter(|_| plain).and_then(|n| n.checked_mul(unit));
    number.ok_or_else(|| "not a time; write it as 2s or 500ms".to_owned())
}

/// Requests per second. The daemon checks the range.
fn requests(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "write a whole number, 0 or 1 to 1000000000".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_requests_name_their_range() {
        assert_eq!(requests("5000"), Ok(5000));
        for bad in ["-5", "", "1k", "99999999999999999999"] {
            assert!(requests(bad).is_err_and(|why| why.contains("0 or 1 to 1000000000")), "{bad}");
        }
    }

    #[test]
    fn times_are_parsed() {
        let parsed = ["2s", "500ms", "7", "0s"].map(|text| milliseconds(text).unwrap());
        assert_eq!(parsed, [2000, 500, 7, 0]);
        for bad in [
            "",
            "s",
            "ms",
            "2m",
            "-1s",
            "+1s",
            "1.5s",
            "99999999999999999999s",
            "18446744073709551615s",
        ] {
            assert!(milliseconds(bad).is_err(), "{bad}");
        }
    }
}
