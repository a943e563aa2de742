//! Packs the relocations of the program where the loader can read them so (glibc 2.36): they take a few
//! KiB then rather than hundreds, all of which the loader reads at the start.

use std::io::Write;
use std::process::Command;

/// Whether this host's libc is glibc 2.36 or later. A program for another host is linked as usual.
fn loader_unpacks() -> bool {
    let var = |name: &str| std::env::var(name).unwrap_or_default();
    if var("TARGET") != var("HOST") || var("CARGO_CFG_TARGET_ENV") != "gnu" {
        return false;
    }
    // "glibc 2.36".
    let Ok(output) = Command::new("getconf").arg("GNU_LIBC_VERSION").output() else { return false };
    let text = String::from_utf8_lossy(&output.stdout);
    let Some((major, minor)) = text.trim().strip_prefix("glibc ").and_then(|v| v.split_once('.'))
    else {
        return false;
    };
    let number = |text: &str| text.split('.').next().and_then(|text| text.parse::<u32>().ok());
    number(major).zip(number(minor)).is_some_and(|version| version >= (2, 36))
}

fn main() -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "cargo:rerun-if-changed=build.rs")?;
    if loader_unpacks() {
        writeln!(out, "cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs")?;
    }
    Ok(())
}
