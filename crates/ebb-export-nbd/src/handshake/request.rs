//! Parses the payloads of options, without copying.
//!
//! Implements "Option types" of the protocol. A payload must be consumed to its last byte; otherwise it
//! is syntactically invalid and refused with `NBD_REP_ERR_INVALID`.

use super::refusal::{
    BAD_STRING, LONG_STRING, MALFORMED, MANY_QUERIES, NO_NAMESPACE, OptionRefusal,
};
use crate::proto::{Reader, STRING_MAX, context, info};

/// Data of `NBD_OPT_INFO` and `NBD_OPT_GO`: a name and the requested information.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InfoRequest<'a> {
    pub(super) name: &'a str,
    pub(super) wants_name: bool,
    pub(super) wants_description: bool,
    pub(super) wants_block_size: bool,
}

impl<'a> InfoRequest<'a> {
    pub(super) fn parse(payload: &'a [u8]) -> Result<Self, OptionRefusal> {
        let mut reader = Reader::new(payload);
        let name = string(reader.counted().ok_or(MALFORMED)?)?;
        let count = reader.u16().ok_or(MALFORMED)?;
        let mut request =
            Self { name, wants_name: false, wants_description: false, wants_block_size: false };
        for _ in 0..count {
            match reader.u16().ok_or(MALFORMED)? {
                info::NAME => request.wants_name = true,
                info::DESCRIPTION => request.wants_description = true,
                info::BLOCK_SIZE => request.wants_block_size = true,
                // NBD_INFO_EXPORT is always sent; unknown types must be ignored.
                _ => {}
            }
        }
        if reader.is_empty() { Ok(request) } else { Err(MALFORMED) }
    }
}

/// Data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContextRequest<'a> {
    pub(super) name: &'a str,
    /// Number of queries; a listing without queries lists all contexts.
    pub(super) queries: u32,
    /// A query names `base:allocation`.
    pub(super) names_allocation: bool,
    /// A query is `base:`, the wildcard for listing the namespace.
    pub(super) names_base: bool,
    /// A query is `qemu:` or `qemu:dirty-bitmap:`, the wildcards for listing those.
    pub(super) names_bitmaps: bool,
    /// The last snapshot that a query names after `qemu:dirty-bitmap:`.
    pub(super) bitmap: Option<&'a str>,
}

impl<'a> ContextRequest<'a> {
    pub(super) fn parse(payload: &'a [u8], queries_max: u32) -> Result<Self, OptionRefusal> {
        let mut reader = Reader::new(payload);
        let name = string(reader.counted().ok_or(MALFORMED)?)?;
        let queries = reader.u32().ok_or(MALFORMED)?;
        if queries > queries_max {
            return Err(MANY_QUERIES);
        }
        let mut request = Self {
            name,
            queries,
            names_allocation: false,
            names_base: false,
            names_bitmaps: false,
            bitmap: None,
        };
        for _ in 0..queries {
            let query = string(reader.counted().ok_or(MALFORMED)?)?;
            match query {
                context::BASE => request.names_base = true,
                context::ALLOCATION => request.names_allocation = true,
                context::QEMU | context::BITMAP => request.names_bitmaps = true,
                _ if query.starts_with(context::BITMAP) => {
                    request.bitmap = query.strip_prefix(context::BITMAP);
                }
                // Unknown namespaces, and unknown leaves of `base:`, must be ignored.
                _ if query.find(':').is_some_and(|colon| colon > 0) => {}
                _ => return Err(NO_NAMESPACE),
            }
        }
        if reader.is_empty() { Ok(request) } else { Err(MALFORMED) }
    }
}

/// A string as section "Conventions" defines it.
pub(super) fn string(bytes: &[u8]) -> Result<&str, OptionRefusal> {
    if bytes.len() > STRING_MAX {
        return Err(LONG_STRING);
    }
    match core::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(BAD_STRING),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_info_request_is_parsed() {
        let request = InfoRequest::parse(b"\0\0\0\x04disk\0\x03\0\x03\0\x01\x12\x34").unwrap();
        assert_eq!(
            request,
            InfoRequest {
                name: "disk",
                wants_name: true,
                wants_description: false,
                wants_block_size: true
            }
        );
        // The shortest one: the default export, without information requests.
        assert_eq!(InfoRequest::parse(b"\0\0\0\0\0\0").unwrap().name, "");
    }

    #[test]
    fn an_info_request_with_wrong_lengths_is_malformed() {
        for payload in [
            &b""[..],
            b"\0\0\0",
            b"\0\0\0\x04dis",
            b"\0\0\0\x04disk",
            b"\0\0\0\x04disk\0",
            b"\0\0\0\x04disk\0\x01",
            b"\0\0\0\x04disk\0\x01\0",
            b"\0\0\0\x04disk\0\x00\0",
            b"\xff\xff\xff\xffdisk\0\0",
        ] {
            assert_eq!(InfoRequest::parse(payload), Err(MALFORMED), "{payload:?}");
        }
    }

    #[test]
    fn names_must_be_valid_strings() {
        assert_eq!(InfoRequest::parse(b"\0\0\0\x02a\0\0\0"), Err(BAD_STRING));
        assert_eq!(InfoRequest::parse(b"\0\0\0\x02\xc3\x28\0\0"), Err(BAD_STRING));
        assert!(string(&[b'a'; STRING_MAX]).is_ok());
        assert_eq!(string(&[b'a'; STRING_MAX + 1]), Err(LONG_STRING));
    }

    #[test]
    fn a_valid_context_request_is_parsed() {
        let payload =
            b"\0\0\0\x01d\0\0\0\x03\0\0\0\x0fbase:allocation\0\0\0\x05base:\0\0\0\x05x-a:";
        // The third query is one byte shorter than its length says.
        assert_eq!(ContextRequest::parse(payload, 8), Err(MALFORMED));
        let payload = b"\0\0\0\x01d\0\0\0\x02\0\0\0\x0fbase:allocation\0\0\0\x04x-a:";
        assert_eq!(
            ContextRequest::parse(payload, 8).unwrap(),
            ContextRequest {
                name: "d",
                queries: 2,
                names_allocation: true,
                names_base: false,
                names_bitmaps: false,
                bitmap: None
            }
        );
        assert_eq!(ContextRequest::parse(payload, 1), Err(MANY_QUERIES));
    }

    #[test]
    fn queries_need_a_namespace() {
        for query in ["base", "", ":allocation"] {
            let mut payload = b"\0\0\0\0\0\0\0\x01\0\0\0".to_vec();
            payload.push(u8::try_from(query.len()).unwrap());
            payload.extend_from_slice(query.as_bytes());
            assert_eq!(ContextRequest::parse(&payload, 8), Err(NO_NAMESPACE), "{query:?}");
        }
        // An unknown leaf is ignored, not refused.
        let payload = b"\0\0\0\0\0\0\0\x01\0\0\0\x08base:new";
        assert!(!ContextRequest::parse(payload, 8).unwrap().names_allocation);
    }
}
