//! Another size of an overlay in use: its top layer gets it. The layers below keep theirs.

use ebb_block::{Io, Resize, ResizeError, SECTOR, check_size_change};

use crate::stacked::StackedLayers;

const NO_OVERLAY: ResizeError = ResizeError::Unsupported {
    why: "it is read-only, or no overlay",
    remedy: "make an overlay of the size that you need above it",
};
const NO_SIZE: ResizeError = ResizeError::Unsupported {
    why: "an overlay has the size that you give it",
    remedy: "name one, as in `ebbd volume resize VOLUME 40G`",
};

/// The size that an order gives to an overlay.
///
/// # Errors
/// [`ResizeError`]: it cannot have it.
pub(super) fn check(stacked: &StackedLayers, order: Resize) -> Result<u64, ResizeError> {
    let (_, delta) = stacked.written_delta().ok_or(NO_OVERLAY)?;
    let to = order.to.ok_or(NO_SIZE)?;
    check_size_change(delta.layout().size(), to, SECTOR, order.shrink)?;
    delta.layout_at(to).map(|layout| layout.size())
}

/// Gives an overlay another size.
///
/// # Errors
/// [`ResizeError`]; it keeps its size.
pub(super) async fn resize(
    stacked: &StackedLayers,
    io: &Io,
    order: Resize,
) -> Result<u64, ResizeError> {
    let to = check(stacked, order)?;
    let (top, delta) = stacked.written_delta().ok_or(NO_OVERLAY)?;
    match to < delta.layout().size() {
        true => delta.shrink(io, &top, to).await?,
        false if to > delta.layout().size() => delta.grow(io, &top, to).await?,
        false => {}
    }
    Ok(to)
}

/// See `Layers::discard_beyond_end`.
pub(super) async fn discard_beyond_end(stacked: &StackedLayers, io: &Io, from: u64) {
    if let Some((top, delta)) = stacked.written_delta() {
        delta.discard_beyond_end(io, &top, from).await;
    }
}
