//! `ebbd image info`: what a store is, and what is below it.
//!
//! # Invariants
//! - What an image names is text for the operator. What is looked for below a delta is in its folder ([`file_below`]).

use std::fmt;
use std::os::unix::fs::MetadataExt;

use ebb_advice::Advised;
use ebb_cache::plain_parent;
use ebb_config::{CHAIN_MOST, Size, StoreUri};
use ebb_image::{BLOCK, Parent};
use ebb_io::Io;
use ebb_store::{ForeignFormat, Qcow2Store};
use serde::Serialize;

use super::chain::{ImageChain, file_below};
use super::error::ImageError;
use super::open::{open_image, other_format};

/// What `ebbd image info` prints.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ImageReport {
    store: String,
    /// `raw`, `delta`, `qcow2`, or the name of a format that ebbd does not read.
    format: &'static str,
    /// How to get the raw disk out of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<&'static str>,
    /// Bytes of the disk, or of the file if ebbd does not read the format.
    virtual_size: u64,
    /// Bytes that its file takes; `None` if it is in no file.
    allocated: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<DeltaReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    qcow2: Option<Qcow2Report>,
}

#[derive(Clone, Debug, Serialize)]
struct DeltaReport {
    identity: String,
    number: u64,
    held_blocks: u64,
    held_bytes: u64,
    /// Bytes of the disk whose part of the block map is damaged.
    damaged_bytes: u64,
    /// Why the base alone must not be used, if that is so.
    #[serde(skip_serializing_if = "Option::is_none")]
    unfinished_commit: Option<&'static str>,
    /// From the top down; empty if nothing is below it.
    chain: Vec<LayerReport>,
}

/// A layer below a delta, as the delta above it describes it.
#[derive(Clone, Debug, Serialize)]
struct LayerReport {
    place: String,
    format: &'static str,
    size: u64,
    identity: Option<String>,
    number: Option<u64>,
    /// The file of that name in the folder.
    file: Option<String>,
    /// What was found there.
    state: String,
}

#[derive(Clone, Debug, Serialize)]
struct Qcow2Report {
    version: u32,
    cluster_size: u64,
    backing_file: Option<String>,
    /// Why a daemon does not serve it.
    refused: Option<String>,
}

/// A commit that has begun and not ended.
pub(super) const UNFINISHED_COMMIT: &str = "a commit into its base has begun and not ended: the base alone is a mix of old and \
    new data; repeat the commit: `ebbd volume commit`";

fn hex(identity: [u8; 16]) -> String {
    identity.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes that the file of a store takes.
fn allocated(uri: &StoreUri) -> Option<u64> {
    match uri {
        StoreUri::File(path) | StoreUri::Qcow2(path) => {
            let found = std::fs::metadata(path).ok().filter(|found| found.is_file())?;
            Some(found.blocks().saturating_mul(512))
        }
        StoreUri::Nbd(_) | StoreUri::Rbd(_) | StoreUri::Memory(_) | StoreUri::Null(_) => None,
    }
}

/// Returns the length of the file of a store; `None` if it is in no file, or on a device.
fn file_length(uri: &StoreUri) -> Option<u64> {
    let StoreUri::File(path) = uri else { return None };
    let found = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some(found.len())
}

/// Looks at a store. May block.
///
/// # Errors
/// [`ImageError`].
pub(super) async fn info(io: &Io, uri: &StoreUri) -> Result<ImageReport, ImageError> {
    let report = ImageReport {
        store: uri.to_string(),
        format: "raw",
        remedy: None,
        virtual_size: 0,
        allocated: allocated(uri),
        delta: None,
        qcow2: None,
    };
    if let StoreUri::Qcow2(path) = uri {
        let info = Qcow2Store::info(path)?;
        let refused = Qcow2Store::inspect(path, ebb_store::Direct::Off).err();
        let qcow2 = Qcow2Report {
            version: info.version,
            cluster_size: info.cluster_bytes,
            backing_file: info.backing_file.as_deref().map(ebb_image::shown_text),
            refused: refused.map(|error| Advised(error).to_string()),
        };
        let (virtual_size, qcow2) = (info.size, Some(qcow2));
        return Ok(ImageReport { format: "qcow2", virtual_size, qcow2, ..report });
    }
    let image = open_image(io, uri, false).await?;
    let virtual_size = image.size();
    let Some(header) = image.delta.as_ref().map(ebb_cache::Delta::header) else {
        let named = uri.clone();
        let other = io.offload(move || other_format(&named)).await;
        let format = other.map_or(report.format, ForeignFormat::name);
        let remedy = other.map(ForeignFormat::to_raw);
        // The store pads a file to whole sectors.
        let length = other.and_then(|_| file_length(uri));
        let virtual_size = length.unwrap_or(virtual_size);
        return Ok(ImageReport { format, remedy, virtual_size, ..report });
    };
    let own = ImageChain::alone(image).own_content(io).await?;
    let delta = DeltaReport {
        identity: hex(header.delta),
        number: header.number,
        held_blocks: own.held_blocks,
        held_bytes: own.held_blocks.saturating_mul(BLOCK),
        damaged_bytes: own.lost_bytes,
        unfinished_commit: header.parent.is_mixed().then_some(UNFINISHED_COMMIT),
        chain: Box::pin(chain_below(io, uri, header.parent)).await,
    };
    Ok(ImageReport { format: "delta", virtual_size, delta: Some(delta), ..report })
}

/// The layers below a delta, as far as they are found.
async fn chain_below(io: &Io, uri: &StoreUri, parent: Parent) -> Vec<LayerReport> {
    let (mut uri, mut parent, mut list) = (uri.clone(), parent, Vec::new());
    while parent != Parent::default() && list.len() < CHAIN_MOST {
        let found = below(io, &uri, &parent).await;
        let is_delta = parent.delta != [0; 16];
        let (file, state, next) = match found {
            Ok((file, true, next)) => (Some(file), "found".to_owned(), next),
            Ok((file, false, _)) => (Some(file), "another one than the base".to_owned(), None),
            Err(state) => (None, state, None),
        };
        list.push(LayerReport {
            place: parent.shown_place(),
            format: if is_delta { "delta" } else { "plain" },
            size: parent.size,
            identity: is_delta.then(|| hex(parent.delta)),
            number: is_delta.then_some(parent.number),
            file: file.as_ref().map(ToString::to_string),
            state,
        });
        match file.zip(next) {
            Some((file, next)) => (uri, parent) = (file, next),
            None => break,
        }
    }
    list
}

/// What is in the folder for a layer: the store, whether it is that layer, and what that is above.
async fn below(
    io: &Io,
    above: &StoreUri,
    parent: &Parent,
) -> Result<(StoreUri, bool, Option<Parent>), String> {
    let file = file_of_layer(above, parent)?;
    let image = open_image(io, &file, parent.delta == [0; 16]).await;
    let image = image.map_err(|error| Advised(error).to_string())?;
    let (found, next) = match &image.delta {
        Some(delta) => (delta.as_parent(&image.store), Some(delta.header().parent)),
        None => (plain_parent(io, &image.store).await.map_err(|error| error.to_string())?, None),
    };
    Ok((file, parent.is(&found), next))
}

/// The store in the folder that a delta calls its base: a delta, or a plain base of either format. May block.
///
/// # Errors
/// Why there is none.
pub(super) fn file_of_layer(above: &StoreUri, parent: &Parent) -> Result<StoreUri, &'static str> {
    let file = file_below(above, parent)?;
    let StoreUri::File(path) = &file else { return Ok(file) };
    // It is verified to be that base, whatever a guest has written there.
    let is_qcow2 = parent.delta == [0; 16]
        && matches!(ForeignFormat::of_path(path), Ok(Some(ForeignFormat::Qcow)));
    Ok(if is_qcow2 { StoreUri::Qcow2(path.clone()) } else { file })
}

/// A size in the units of the configuration, and in bytes.
fn size(bytes: u64) -> String {
    match Size::new(bytes).to_string() {
        text if text == bytes.to_string() => format!("{bytes} bytes"),
        text => format!("{text} ({bytes} bytes)"),
    }
}

impl fmt::Display for ImageReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: &str| writeln!(f, "{name:14} {value}");
        row("store", &self.store)?;
        row("format", self.format)?;
        if let Some(remedy) = self.remedy {
            row("file size", &size(self.virtual_size))?;
            return row("for a raw disk", remedy);
        }
        row("virtual size", &size(self.virtual_size))?;
        if let Some(allocated) = self.allocated {
            row("allocated", &size(allocated))?;
        }
        if let Some(delta) = &self.delta {
            row("identity", &delta.identity)?;
            row("number", &delta.number.to_string())?;
            row("held", &format!("{} blocks, {}", delta.held_blocks, size(delta.held_bytes)))?;
            if delta.damaged_bytes > 0 {
                let bytes = size(delta.damaged_bytes);
                row("damaged", &format!("the map of {bytes}: `ebbd image check` says where"))?;
            }
            if let Some(text) = delta.unfinished_commit {
                row("warning", text)?;
            }
            if delta.chain.is_empty() {
                row("base", "none")?;
            }
            for (depth, layer) in delta.chain.iter().enumerate() {
                let name = if depth == 0 { "base" } else { "below that" };
                let LayerReport { place, format, state, .. } = layer;
                let file = layer.file.as_ref().map_or(String::new(), |file| format!(" {file}"));
                row(name, &format!("{place}, {format}, {}: {state}{file}", size(layer.size)))?;
            }
        }
        if let Some(qcow2) = &self.qcow2 {
            row("version", &qcow2.version.to_string())?;
            row("cluster size", &size(qcow2.cluster_size))?;
            if let Some(name) = &qcow2.backing_file {
                row("backing file", &format!("{name} (refused)"))?;
            }
            if let Some(reason) = &qcow2.refused {
                row("not served", reason)?;
            }
        }
        Ok(())
    }
}
