//! The program of `make demo`: the runs show what it claims, the text fits a terminal, and the SVG
//! is one.

use std::time::Duration;
use tempfile::TempDir;
use testbed::harness::binary::{self, Build};
use testbed::harness::browser::Browser;
use testbed::{Error, Result, Tool, check};

#[test]
fn demo_shows_its_claim_in_text_and_svg() -> Result {
    let dir = TempDir::with_prefix("demo-").map_err(Error::io("make a directory"))?;
    let svg = dir.path().join("demo.svg");
    // Its exit status is the verdict.
    let outcome = Tool::new(env!("CARGO_BIN_EXE_demo"))
        .arg(&svg)
        .env("EBBD_BIN", binary::ebbd(Build::AsTests)?)
        .limit(Duration::from_secs(900))
        .ok()?;
    let (plots, rest) = outcome
        .stdout
        .split_once("The same as a picture: ")
        .ok_or_else(|| outcome.unexpected("the path of the SVG"))?;
    let wide = plots.lines().find(|line| line.chars().count() > 80);
    check(wide.is_none(), || outcome.unexpected(&format!("80 columns, not {wide:?}")).to_string())?;
    for part in ["cache, MiB", "free memory, MiB", "pages swapped out", "█", "the neighbour worked"]
    {
        check(plots.contains(part), || outcome.unexpected(part).to_string())?;
    }
    check(rest.contains("The elastic cache shrank by"), || {
        outcome.unexpected("a verdict").to_string()
    })?;

    let mut browser = Browser::start()?;
    browser.open(&format!("file://{}", svg.display()))?;
    let shown = browser.eval(
        "[document.documentElement.tagName, document.querySelectorAll('parsererror').length, \
         document.querySelectorAll('polyline').length >= 6, \
         [...document.querySelectorAll('text')].some(text => text.textContent === '0 s')].join()",
    )?;
    check(shown == "svg,0,true,true", || format!("the browser does not show the SVG: {shown}"))
}
