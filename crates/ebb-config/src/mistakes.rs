//! All mistakes of a configuration file in one run.
//!
//! Parsing and checking end at the first mistake. To find the others, its key is repaired in the parsed table
//! (`repairs.rs`), and the table is checked again.
//!
//! # Invariants
//! - Every mistake is reported once. One that only follows from a repair is not reported.
//! - At most [`MOST`] mistakes are reported, so that the time is bounded.

use super::ServeArgs;
use super::error::{ConfigError, ConfigErrorKind};
use super::file;
use super::repairs::Repairs;

/// The most mistakes that are reported.
const MOST: usize = 100;

/// All mistakes of the file that the command line names, and one on the command line; empty if there is none.
pub(super) fn mistakes(args: &ServeArgs) -> Vec<ConfigError> {
    let Some(path) = &args.config else { return Vec::new() };
    let text = match file::read_text(path) {
        Ok(text) => text,
        Err(error) => return vec![error],
    };
    mistakes_of(|repairs| {
        let base = file::parse_repaired(&text, path, repairs)?;
        super::resolve::resolve(base, super::flags::layer(args)?, args.inherited_sockets).map(drop)
    })
}

/// The mistakes that `check` reports one at a time.
fn mistakes_of(check: impl Fn(&Repairs) -> Result<(), ConfigError>) -> Vec<ConfigError> {
    let (mut repairs, mut found) = (Repairs::default(), Vec::<ConfigError>::new());
    // A mistake may need two repairs, and an element of a list as many as there are elements in its line.
    for _ in 0..4 * MOST {
        let Err(error) = check(&repairs) else { break };
        // It may be that only what is wrong would have been served.
        if error.kind == ConfigErrorKind::NothingToServe && !found.is_empty() {
            break;
        }
        let is_new = !repairs.lead_to(&error)
            && found.iter().all(|known| {
                (known.line, &known.key, &known.message) != (error.line, &error.key, &error.message)
            });
        let repaired = repairs.add(&error);
        if is_new {
            found.push(error);
        }
        if !repaired || found.len() == MOST {
            break;
        }
    }
    found.sort_by_key(|error| error.line);
    found
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn found(text: &str) -> Vec<String> {
        let args = ServeArgs::default();
        let all = mistakes_of(|repairs| {
            let base = file::parse_repaired(text, Path::new("f"), repairs)?;
            crate::resolve::resolve(base, crate::flags::layer(&args)?, 0).map(drop)
        });
        all.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn all_mistakes_of_a_file_are_reported_in_their_order() {
        let text = "listen = ['unix:/s', 'ux:/t', 'tcp:x']\nworkers = 900\nlogg = 'info'\n[nbd]\ntls = 'yes'\n\
                    max_request = 'much'\n[volume.a]\nstore = 'tape:/x'\nsize = '1M'\ncreate = true\n[volume.b]\n\
                    read_only = true\n[volume.c]\nstore = 'memory:1M'\ncache = 'fast'\ndirect = 'on'\n\
                    [volume.d]\nstore = 'file:/d'\ncreate = true\n[colour]\nred = 1\n";
        let all = found(text);
        let places: Vec<_> =
            all.iter().map(|line| line.split(": ").take(2).collect::<Vec<_>>().join(" ")).collect();
        let expected = [
            "f:1 listen",
            "f:1 listen",
            "f:2 workers",
            "f:3 logg",
            "f:5 nbd.tls",
            "f:6 nbd.max_request",
            "f:8 volume.a.store",
            "f:11 volume.b",
            "f:15 volume.c.cache",
            "f:16 volume.c.direct",
            "f:19 volume.d.create",
            "f:20 colour",
        ];
        assert_eq!(places, expected, "{all:#?}");
    }

    #[test]
    fn a_mistake_is_not_reported_for_what_follows_from_its_repair() {
        for text in [
            "listen = ['ux:/s']\n[volume.a]\nstore = 'memory:1M'\n",
            "listen = ['unix:/s']\n[volume.a]\nstore = 'file:/a'\nsize = 'big'\ncreate = true\n",
            "listen = ['unix:/s']\n[volume.a]\nstore = 7\n",
            "listen = ['unix:/s']\n[volume.a]\nstore = 'file:/a'\n[volume.b]\nstore = 'file:/b'\nbase = 'a'\n\
             create = true\n",
            "listen = ['unix:/s']\n[volume.a]\nstor = 'memory:1M'\n[volume.b]\nstore = 'memory:1M'\n",
            "listen = ['unix:/s']\n[volume.a]\nstore = 'file:/a'\nsize = '1M'\ncreate = true\nread_only = true\n\
             [volume.b]\nstore = 'file:/b'\nbase = 'a'\ncreate = true\n",
        ] {
            let all = found(text);
            let most = if text.contains("stor =") { 2 } else { 1 };
            assert!(!all.is_empty() && all.len() <= most, "{text}: {all:#?}");
        }
        assert!(found("listen = ['unix:/s']\n[volume.a]\nstore = 'memory:1M'\n").is_empty());
        // What follows a syntax error cannot be read.
        assert_eq!(found("listen = [\nworkers = 900\n").len(), 1);
    }

    #[test]
    fn the_number_of_reported_mistakes_is_bounded() {
        let text: String =
            (0..300).map(|i| format!("[volume.v{i}]\nstore = 'tape:/x'\n")).collect();
        assert_eq!(found(&text).len(), MOST);
    }
}
