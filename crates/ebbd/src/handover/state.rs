//! The description of what is handed over, in a file in memory: the length of a text in JSON as 8 bytes (little endian), the
//! text, and after it the bytes that were received of each client and not used.
//!
//! # Invariants
//! - Daemons of other versions understand it, or say that they do not: [`VERSION`] changes when a field changes its meaning.
//! - No length in it is believed beyond the size of the file, and that is limited.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use ebb_export_nbd::SessionState;
use serde::{Deserialize, Serialize};

/// The version of the description.
const VERSION: u32 = 1;
/// The longest description, bytes: of 65,536 connections, with names of usual length and what their clients have sent.
const MAX_BYTES: u64 = 1 << 30;

/// Why what a predecessor has handed over cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandoverStateError {
    #[error("it is of another version of ebbd ({0}, this one has {VERSION})")]
    Version(u32),
    #[error("it is not complete, or not of ebbd")]
    Invalid,
    #[error("it cannot be read")]
    Io(#[from] io::Error),
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct HandoverState {
    #[serde(default)]
    pub(super) listeners: Vec<ListenerState>,
    #[serde(default)]
    pub(super) connections: Vec<ConnectionState>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ListenerState {
    /// The number of the socket (`SO_COOKIE`), which no other socket of the host has.
    pub(super) socket: u64,
    pub(super) address: Option<String>,
    pub(super) name: String,
    pub(super) file: Option<(PathBuf, (u64, u64))>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ConnectionState {
    pub(super) socket: u64,
    pub(super) session: SessionState,
    /// The number of bytes that were received and not used.
    pub(super) rest: u64,
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    state: T,
}

/// A description, and the bytes of each connection.
type ReadState = (HandoverState, Vec<Box<[u8]>>);

/// A file with this description and these bytes.
pub(super) fn write(state: &HandoverState, rests: &[&[u8]]) -> io::Result<OwnedFd> {
    let text = serde_json::to_vec(&Versioned { version: VERSION, state })?;
    let file = rustix::fs::memfd_create("ebbd-handover", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = File::from(file);
    file.write_all(&(text.len() as u64).to_le_bytes())?;
    file.write_all(&text)?;
    for rest in rests {
        file.write_all(rest)?;
    }
    Ok(file.into())
}

/// The description in a file, and the bytes of each connection.
pub(super) fn read(file: &OwnedFd) -> Result<ReadState, HandoverStateError> {
    let mut file = File::from(file.try_clone()?);
    file.rewind()?;
    let mut bytes = Vec::new();
    // One more than is admitted.
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(HandoverStateError::Invalid);
    }
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Result<ReadState, HandoverStateError> {
    let (length, after) = bytes.split_first_chunk::<8>().ok_or(HandoverStateError::Invalid)?;
    let (text, mut after) =
        split(after, u64::from_le_bytes(*length)).ok_or(HandoverStateError::Invalid)?;
    // The version first: another one may have other fields.
    let version: Versioned<serde::de::IgnoredAny> =
        serde_json::from_slice(text).map_err(|_| HandoverStateError::Invalid)?;
    if version.version != VERSION {
        return Err(HandoverStateError::Version(version.version));
    }
    let state: HandoverState =
        serde_json::from_slice(text).map_err(|_| HandoverStateError::Invalid)?;
    let mut rests = Vec::new();
    for connection in &state.connections {
        let (rest, others) = split(after, connection.rest).ok_or(HandoverStateError::Invalid)?;
        rests.push(rest.into());
        after = others;
    }
    Ok((state, rests))
}

fn split(bytes: &[u8], length: u64) -> Option<(&[u8], &[u8])> {
    bytes.split_at_checked(usize::try_from(length).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> SessionState {
        SessionState {
            export: "disk \u{e4}".to_owned(),
            store: "file 1:2".to_owned(),
            size: 1 << 40,
            flags: 0x1234,
            style: "structured".to_owned(),
            block: [512, 4096, 1 << 25],
            block_size_requested: true,
            context: Some(3),
            changed_since: None,
            no_zeroes: false,
        }
    }

    fn sample() -> (HandoverState, [&'static [u8]; 2]) {
        let rests: [&[u8]; 2] = [b"", b"\x25\x60\x95\x13"];
        let of = |(socket, rest): (u64, &&[u8])| ConnectionState {
            socket,
            session: session(),
            rest: rest.len() as u64,
        };
        let listener = ListenerState {
            socket: 7,
            address: Some("unix:/s".to_owned()),
            name: "unix:/s".to_owned(),
            file: Some(("/s".into(), (1, 2))),
        };
        let connections = (8..).zip(&rests).map(of).collect();
        (HandoverState { listeners: vec![listener], connections }, rests)
    }

    #[test]
    fn what_was_written_is_read() {
        let (state, rests) = sample();
        let file = write(&state, &rests).unwrap();
        let (read, found) = read(&file).unwrap();
        assert_eq!(format!("{read:?}"), format!("{state:?}"));
        assert_eq!(found.iter().map(|rest| &**rest).collect::<Vec<_>>(), rests);
    }

    #[test]
    fn another_version_is_named_and_other_bytes_are_refused() {
        let of = |text: &str| {
            let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
            bytes.extend_from_slice(text.as_bytes());
            parse(&bytes).map(drop)
        };
        assert!(of(r#"{"version":1}"#).is_ok());
        assert!(matches!(of(r#"{"version":2,"other":[]}"#), Err(HandoverStateError::Version(2))));
        assert!(matches!(of("{}"), Err(HandoverStateError::Invalid)));
        assert!(matches!(parse(&u64::MAX.to_le_bytes()), Err(HandoverStateError::Invalid)));
        assert!(matches!(parse(b"short"), Err(HandoverStateError::Invalid)));
    }

    #[test]
    fn no_cut_or_changed_byte_leads_beyond_the_file() {
        let (state, rests) = sample();
        let mut whole = Vec::new();
        File::from(write(&state, &rests).unwrap()).rewind().unwrap();
        let file = write(&state, &rests).unwrap();
        let mut file = File::from(file);
        file.rewind().unwrap();
        file.read_to_end(&mut whole).unwrap();
        for length in 0..whole.len() {
            assert!(parse(&whole[..length]).is_err(), "cut to {length} bytes");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut changed = whole.clone();
                changed[at] ^= 1 << bit;
                let _ = parse(&changed);
            }
        }
    }
}
