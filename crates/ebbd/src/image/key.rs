//! `ebbd image key`: the key slots of encrypted volumes that are not open.

use std::path::Path;

use ebb_config::StoreUri;
use ebb_store::HeaderOfFile;

use super::error::ImageError;
use super::output::{ImageOutput, line};
use crate::cli::{ImageKeyAddArgs, ImageKeyCommand};
use crate::client::key_state;
use crate::volume_key::read_own_file;

/// Runs a command; what it prints goes to `out`.
///
/// # Errors
/// [`ImageError`].
pub(super) fn key(command: &ImageKeyCommand, mut out: ImageOutput) -> Result<(), ImageError> {
    match command {
        ImageKeyCommand::List(args) => {
            let open = open(&args.store, false)?;
            if let Some(warning) = open.header().warning() {
                line(&mut out, &format!("warning: {warning}"))?;
            }
            for slot in open.header().slots() {
                let why = slot.unusable().map(|why| (why.reason(), why.remedy()));
                let state = key_state(slot.is_usable(), slot.ignored, why);
                line(&mut out, &format!("{}: {}, {state}", slot.number, slot.kdf))?;
            }
        }
        ImageKeyCommand::Add(args) => {
            let (_, added, _) = add(args)?;
            line(&mut out, &format!("added key slot {added}"))?;
        }
        ImageKeyCommand::Change(args) => {
            let (mut open, added, opened) = add(args)?;
            open.remove_key(opened)?;
            line(&mut out, &format!("added key slot {added}, and removed {opened}"))?;
        }
        ImageKeyCommand::Remove(args) => {
            let mut open = open(&args.store, true)?;
            open.remove_key(args.slot)?;
            line(&mut out, &format!("removed key slot {}", args.slot))?;
        }
    }
    out.flush().map_err(ImageError::Output)
}

/// The path of a file with a header.
fn file(store: &StoreUri) -> Result<&Path, ImageError> {
    match store {
        StoreUri::File(path) => Ok(path),
        other => Err(ImageError::NoFile { place: other.to_string() }),
    }
}

/// Opens the header in a file. A daemon that has the file open also lists and changes its keys.
fn open(store: &StoreUri, writes: bool) -> Result<HeaderOfFile, ImageError> {
    let remedy = match writes {
        false => "if a daemon serves it, use `ebbd volume key list`",
        true => "if a daemon serves it, use `ebbd volume key`",
    };
    let opened = HeaderOfFile::open(file(store)?, writes);
    opened.map_err(|error| ImageError::from(error).of_keys(remedy))
}

/// Adds a key; returns the open header, the new slot, and the slot that the old key opens.
fn add(args: &ImageKeyAddArgs) -> Result<(HeaderOfFile, u32, u32), ImageError> {
    let (old, new) = (read_own_file(&args.key_file)?, read_own_file(&args.new_key_file)?);
    let mut open = open(&args.store, true)?;
    let (opened, volume_key) = open.unlock(&old)?;
    let added = open.add_key(&volume_key, &new)?;
    Ok((open, added, opened))
}
