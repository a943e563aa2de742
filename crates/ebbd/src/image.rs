//! `ebbd image`: looks at images, verifies and copies them, in a process without a daemon.
//!
//! # Invariants
//! - Only the destination of a copy, a store that is cleared, and a header whose keys are changed are written to. Everything
//!   else is opened read-only, with the lock that excludes a daemon
//!   which writes to it.
//! - Whatever an image holds, no file is opened that it names, but those in the folder of a delta (`chain.rs`), and memory is
//!   bounded.

mod chain;
mod check;
mod clear;
mod clone;
mod copy;
mod destination;
mod error;
mod info;
mod interrupt;
mod key;
mod map;
mod map_walk;
mod open;
mod output;
mod progress;

use ebb_config::{Size, StoreUri};

use self::chain::ImageChain;
use self::check::{Findings, ImageVerdict, check_delta, check_qcow2};
use self::destination::Destination;
use self::interrupt::Interrupt;
use self::open::{must_be_raw, on_worker, open_image};
use crate::cli::{ImageCheckArgs, ImageCommand, ImageCopyArgs};
use crate::client::json_text;
use crate::exit_status;

pub use self::error::ImageError;
pub use self::output::ImageOutput;

/// The exit status of a check that could not look at everything, and of one that found damage.
const UNCHECKED: u8 = exit_status::FAILED;
const DAMAGED: u8 = exit_status::FAILING;

/// Runs a command, and returns the exit status. What it prints goes to `out`.
///
/// # Errors
/// [`ImageError`].
pub fn image(command: &ImageCommand, mut out: ImageOutput) -> Result<u8, ImageError> {
    match command {
        ImageCommand::Info(args) => {
            let (uri, json) = (args.store.clone(), args.json);
            let report = on_worker(move |io| async move {
                let report = Box::pin(info::info(&io, &uri)).await?;
                Ok(if json { json_text(report) } else { report.to_string() })
            })?;
            write!(out, "{report}").and_then(|()| out.flush()).map_err(ImageError::Output)?;
        }
        ImageCommand::Check(args) => return check(args, out),
        ImageCommand::Map(args) => {
            let (uri, json) = (args.store.clone(), args.json);
            on_worker(move |io| async move {
                let image = Box::pin(open_image(&io, &uri, false)).await?;
                Box::pin(map::map(&io, image, json, out)).await
            })?;
        }
        ImageCommand::Import(args) | ImageCommand::Export(args) => {
            let (size, written) = copy(args)?;
            let (size, written) = (Size::new(size), Size::new(written));
            output::line(&mut out, &format!("{}: {size}, {written} of data", args.dest))?;
            out.flush().map_err(ImageError::Output)?;
        }
        ImageCommand::Key(command) => key::key(command, out)?,
        ImageCommand::Clone(args) => {
            clone::clone_file(&args.source, &args.dest)?;
            let text = format!("{}: shares the blocks of {}", args.dest, args.source);
            output::line(&mut out, &text)?;
            out.flush().map_err(ImageError::Output)?;
        }
        ImageCommand::Clear(args) => {
            let (uri, force) = (args.store.clone(), args.force);
            let size =
                on_worker(move |io| async move { Box::pin(clear::clear(&io, &uri, force)).await })?;
            let text = format!("{}: {} of zeroes", args.store, Size::new(size));
            output::line(&mut out, &text)?;
            out.flush().map_err(ImageError::Output)?;
        }
    }
    Ok(0)
}

fn check(args: &ImageCheckArgs, out: ImageOutput) -> Result<u8, ImageError> {
    let (uri, base) = (args.store.clone(), args.base.clone());
    let findings = Findings::new(out, uri.to_string());
    let verdict =
        match uri {
            StoreUri::Qcow2(path) => check_qcow2(&path, findings)?,
            uri => on_worker(move |io| async move {
                Box::pin(check_delta(&io, &uri, base, findings)).await
            })?,
        };
    Ok(match verdict {
        ImageVerdict::Sound => 0,
        ImageVerdict::Unchecked => UNCHECKED,
        ImageVerdict::Damaged => DAMAGED,
    })
}

/// Copies a disk; returns its size and the bytes of data that were written.
fn copy(args: &ImageCopyArgs) -> Result<(u64, u64), ImageError> {
    let args = args.clone();
    let interrupt = Interrupt::watch()?;
    on_worker(move |io| async move {
        if !args.raw {
            let or_raw = ", or `--raw` to copy the bytes as they are";
            must_be_raw(&io, &args.source, or_raw).await?;
        }
        let source = Box::pin(open_image(&io, &args.source, args.raw)).await?;
        let mut given = Vec::new();
        for base in &args.base {
            given.push(Box::pin(open_image(&io, base, false)).await?);
        }
        let chain = Box::pin(ImageChain::open(&io, source, given)).await?;
        let (size, mut stores) = (chain.size(), chain.stores());
        let opened = Destination::open(&io, &args.dest, &stores, (size, args.force));
        let dest = Box::pin(opened).await?;
        let leftover = dest.leftover();
        stores.push(dest.store().clone());
        interrupt.guard(stores, leftover.clone());
        let to = (dest.store().clone(), dest.is_zero());
        let copied = Box::pin(copy::copy_disk(&io, chain, to, interrupt.clone())).await;
        let written = copied.map_err(|error| {
            // Its stores are closed before the process ends.
            interrupt.end();
            match error {
                ImageError::Interrupted(_) => ImageError::Interrupted(leftover.after_interrupt()),
                error => error,
            }
        })?;
        io.offload(move || dest.finish()).await?;
        interrupt.end();
        Ok((size, written))
    })
}
