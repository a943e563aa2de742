//! What `ebbd image` prints: lines, which go out as they are found.

use std::io::Write;

use super::error::ImageError;

/// Where lines go to.
pub type ImageOutput = Box<dyn Write + Send>;

/// Prints one line.
///
/// # Errors
/// [`ImageError::Output`].
pub(super) fn line(out: &mut ImageOutput, text: &str) -> Result<(), ImageError> {
    writeln!(out, "{text}").map_err(ImageError::Output)
}
