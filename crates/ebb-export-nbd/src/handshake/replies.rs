//! Replies to options, appended to an output buffer.
//!
//! Implements "Fixed newstyle negotiation" (the format of a reply) and "Option reply types" of the protocol.

use super::ExportInfo;
use super::refusal::OptionRefusal;
use crate::proto::{
    EXPORT_NAME_PADDING, HandshakeFlags, ReplyStyle, STRING_MAX, info, magic, option_reply,
};

/// The first bytes of a connection.
pub(super) fn greeting(out: &mut Vec<u8>) {
    out.extend_from_slice(&magic::INIT.to_be_bytes());
    out.extend_from_slice(&magic::OPTION.to_be_bytes());
    let flags = HandshakeFlags::FIXED_NEWSTYLE.with(HandshakeFlags::NO_ZEROES);
    out.extend_from_slice(&flags.0.to_be_bytes());
}

/// Replies to one option.
pub(super) struct Replies<'a> {
    option: u32,
    out: &'a mut Vec<u8>,
}

impl<'a> Replies<'a> {
    pub(super) fn to(option: u32, out: &'a mut Vec<u8>) -> Self {
        Self { option, out }
    }

    fn reply(&mut self, kind: u32, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.out.extend_from_slice(&magic::OPTION_REPLY.to_be_bytes());
        self.out.extend_from_slice(&self.option.to_be_bytes());
        self.out.extend_from_slice(&kind.to_be_bytes());
        self.out.extend_from_slice(&wire_len(len).to_be_bytes());
        for part in parts {
            self.out.extend_from_slice(part);
        }
    }

    pub(super) fn ack(&mut self) {
        self.reply(option_reply::ACK, &[]);
    }

    pub(super) fn refuse(&mut self, refusal: &OptionRefusal) {
        // A message is a string, whose length the protocol limits.
        self.reply(refusal.kind, &[display(&refusal.message).as_bytes()]);
    }

    /// `NBD_REP_SERVER`; an export whose name is not a valid string is omitted.
    pub(super) fn server(&mut self, name: &str, description: &str) {
        if name.len() > STRING_MAX || name.contains('\0') {
            return;
        }
        let len = wire_len(name.len()).to_be_bytes();
        self.reply(option_reply::SERVER, &[&len, name.as_bytes(), display(description).as_bytes()]);
    }

    /// `NBD_INFO_EXPORT`
    pub(super) fn info_export(&mut self, export: &ExportInfo, style: ReplyStyle) {
        self.reply(
            option_reply::INFO,
            &[
                &info::EXPORT.to_be_bytes(),
                &export.size.to_be_bytes(),
                &export.transmission_flags(style).0.to_be_bytes(),
            ],
        );
    }

    /// `NBD_INFO_NAME` or `NBD_INFO_DESCRIPTION`
    pub(super) fn info_text(&mut self, kind: u16, text: &str) {
        self.reply(option_reply::INFO, &[&kind.to_be_bytes(), display(text).as_bytes()]);
    }

    /// `NBD_INFO_BLOCK_SIZE`
    pub(super) fn info_block_size(&mut self, export: &ExportInfo) {
        self.reply(
            option_reply::INFO,
            &[
                &info::BLOCK_SIZE.to_be_bytes(),
                &export.block.minimum().to_be_bytes(),
                &export.block.preferred().to_be_bytes(),
                &export.block.maximum_payload().to_be_bytes(),
            ],
        );
    }

    /// `NBD_REP_META_CONTEXT`, of a name in two parts.
    pub(super) fn context(&mut self, id: u32, name: &str, end: &str) {
        let parts = [&id.to_be_bytes()[..], name.as_bytes(), end.as_bytes()];
        self.reply(option_reply::META_CONTEXT, &parts);
    }
}

/// The reply to `NBD_OPT_EXPORT_NAME`, which has its own format.
pub(super) fn export_name(
    export: &ExportInfo,
    style: ReplyStyle,
    no_zeroes: bool,
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(&export.size.to_be_bytes());
    out.extend_from_slice(&export.transmission_flags(style).0.to_be_bytes());
    if !no_zeroes {
        out.extend_from_slice(&[0; EXPORT_NAME_PADDING]);
    }
}

/// Cuts a text to a valid string: before the first NUL, and at a character boundary.
fn display(text: &str) -> &str {
    let text = text.split('\0').next().unwrap_or_default();
    &text[..text.floor_char_boundary(STRING_MAX)]
}

/// A length field. All lengths here are far below 4 GiB: every text is at most 4 KiB.
fn wire_len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        let long = "é".repeat(STRING_MAX);
        assert_eq!(display(&long).len(), STRING_MAX);
        let odd = format!("a{long}");
        assert_eq!(display(&odd).len(), STRING_MAX - 1);
        assert_eq!(display("short"), "short");
        assert_eq!(display("before\0after"), "before");
    }

    #[test]
    fn an_export_whose_name_is_not_a_valid_string_is_not_listed() {
        let mut out = Vec::new();
        let mut replies = Replies::to(3, &mut out);
        replies.server(&"n".repeat(STRING_MAX + 1), "");
        replies.server("a\0b", "");
        assert!(out.is_empty());
    }
}
