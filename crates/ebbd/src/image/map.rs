//! `ebbd image map`: which parts of a store hold data.
//!
//! # Invariants
//! - A run is printed when it ends: memory does not grow with the number of runs.

use ebb_io::Io;
use serde::Serialize;

use super::chain::{ImageChain, RunContent};
use super::error::ImageError;
use super::open::OpenImage;
use super::output::{ImageOutput, line};

/// A line of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct MapRun {
    offset: u64,
    length: u64,
    content: &'static str,
}

fn name(content: &RunContent) -> &'static str {
    match content {
        RunContent::Data(..) => "data",
        RunContent::Zero => "zero",
        RunContent::Below => "base",
        RunContent::Lost { .. } => "damaged",
    }
}

/// Prints the map.
struct MapPrinter {
    out: ImageOutput,
    json: bool,
    is_first: bool,
}

impl MapPrinter {
    fn say(&mut self, run: MapRun) -> Result<(), ImageError> {
        let MapRun { offset, length, content } = run;
        if !self.json {
            return line(&mut self.out, &format!("{offset:>18} {length:>18}  {content}"));
        }
        let head = if self.is_first { "[" } else { ",\n " };
        self.is_first = false;
        let text = serde_json::json!(run);
        write!(self.out, "{head}{text}").map_err(ImageError::Output)
    }
}

/// Prints the map of a store.
///
/// # Errors
/// Those of the store, and of the output.
pub(super) async fn map(
    io: &Io,
    image: OpenImage,
    json: bool,
    out: ImageOutput,
) -> Result<(), ImageError> {
    let mut chain = ImageChain::alone(image);
    let mut printer = MapPrinter { out, json, is_first: true };
    if !json {
        let title = format!("{:>18} {:>18}  CONTENT", "OFFSET", "LENGTH");
        line(&mut printer.out, &title)?;
    }
    let (mut at, mut last) = (0, None::<MapRun>);
    while at < chain.size() {
        let run = chain.run(io, at).await?;
        let content = name(&run.content);
        match &mut last {
            Some(last) if last.content == content => last.length += run.length,
            _ => {
                let next = MapRun { offset: at, length: run.length, content };
                if let Some(run) = last.replace(next) {
                    printer.say(run)?;
                }
            }
        }
        at += run.length;
    }
    if let Some(run) = last {
        printer.say(run)?;
    }
    if json {
        line(&mut printer.out, "]")?;
    }
    printer.out.flush().map_err(ImageError::Output)
}
