use super::super::options::NbdAddress;
use super::*;
use proptest::prelude::*;

/// A server that has said everything beforehand.
struct Script {
    input: io::Cursor<Vec<u8>>,
    output: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.input.read(buf)
    }
}

impl Write for Script {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.output.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    let mut bytes = magic::INIT.to_be_bytes().to_vec();
    bytes.extend(magic::OPTION.to_be_bytes());
    bytes.extend(flags.to_be_bytes());
    bytes
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = magic::OPTION_REPLY.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    bytes.extend(data);
    bytes
}

fn export_info(size: u64, flags: u16) -> Vec<u8> {
    let mut data = info::EXPORT.to_be_bytes().to_vec();
    data.extend(size.to_be_bytes());
    data.extend(flags.to_be_bytes());
    reply(option::GO, option_reply::INFO, &data)
}

fn block_info(min: u32, preferred: u32, max: u32) -> Vec<u8> {
    let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
    for number in [min, preferred, max] {
        data.extend(number.to_be_bytes());
    }
    reply(option::GO, option_reply::INFO, &data)
}

fn context(id: u32, name: &str) -> Vec<u8> {
    let mut data = id.to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    reply(option::SET_META_CONTEXT, option_reply::META_CONTEXT, &data)
}

fn ack(option: u32) -> Vec<u8> {
    reply(option, option_reply::ACK, &[])
}

fn structured() -> Vec<u8> {
    [ack(option::STRUCTURED_REPLY), context(9, "base:allocation"), ack(option::SET_META_CONTEXT)]
        .concat()
}

fn enter(parts: &[Vec<u8>]) -> Result<(RemoteExport, Vec<u8>), NbdError> {
    let options = NbdOptions::new(NbdAddress::Unix("/s".into()), "disk");
    let script = Script { input: io::Cursor::new(parts.concat()), output: Vec::new() };
    let (export, script) = Negotiation::greet(script, &options)?.enter()?;
    export.check(&options)?;
    Ok((export, script.output))
}

fn refused(parts: &[Vec<u8>]) -> String {
    ebb_advice::full_text(&enter(parts).unwrap_err())
}

#[test]
fn a_modern_server_is_used_with_all_features() {
    let go = [export_info(1 << 20, 0x1fd), block_info(512, 4096, 65536), ack(option::GO)].concat();
    let (export, said) = enter(&[greeting(3), structured(), go]).unwrap();
    assert_eq!((export.size, export.min_block, export.max_block), (1 << 20, 512, 65536));
    assert!(export.structured);
    assert_eq!(export.allocation, Some(9));
    assert_eq!(said[..4], [0, 0, 0, 3], "both client flags");
    let name = [&[0, 0, 0, 4][..], b"disk"].concat();
    assert!(said.windows(8).any(|bytes| bytes == name));
}

#[test]
fn an_old_server_is_used_without_optional_features() {
    let unsupported = reply(option::STRUCTURED_REPLY, option_reply::ERR_UNSUP, b"no");
    let go = [export_info(512, 1), ack(option::GO)].concat();
    let (export, _) = enter(&[greeting(1), unsupported, go]).unwrap();
    assert!(!export.structured && export.allocation.is_none());
    assert_eq!((export.min_block, export.max_block), (1, 32 << 20));
}

/// The reply to `EXPORT_NAME` has zeroes at its end, unless both sides omit them.
#[test]
fn server_without_go_is_used_by_the_export_name() {
    let no_go = reply(option::GO, option_reply::ERR_UNSUP, b"no");
    let mut description = (1u64 << 20).to_be_bytes().to_vec();
    description.extend(5u16.to_be_bytes());
    for (flags, zeroes) in [(1, 124), (3, 0)] {
        let script = [greeting(flags), structured(), no_go.clone(), description.clone()];
        let (export, said) = enter(&[script.concat(), vec![0; zeroes]]).unwrap();
        assert_eq!((export.size, export.flags.0, export.min_block), (1 << 20, 5, 1));
        assert!(export.structured && export.allocation == Some(9));
        assert_eq!(said[said.len() - 12..], *b"\0\0\0\x01\0\0\0\x04disk");
    }
    let text = refused(&[greeting(3), structured(), no_go]);
    assert!(text.contains("no export `disk` (it hangs up)"), "{text}");
}

#[test]
fn refusals_name_the_remedy() {
    let go = |kind, text: &str| [structured(), reply(option::GO, kind, text.as_bytes())].concat();
    for (kind, expected) in [
        (option_reply::ERR_UNKNOWN, "nbdinfo --list"),
        (option_reply::ERR_TLS_REQD, "nbds://"),
        (option_reply::ERR_POLICY, "(because)"),
        (77, "an invalid reply"),
    ] {
        let text = refused(&[greeting(3), go(kind, "be\ncause")]);
        assert!(text.contains(expected), "{text}");
    }
    let text = refused(&[b"SSH-2.0-OpenSSH_9.2p1".to_vec()]);
    assert!(text.contains("is there an NBD server"), "{text}");
    let mut old = magic::INIT.to_be_bytes().to_vec();
    old.extend([0; 144]);
    assert!(refused(&[old]).contains("oldstyle"));
    assert!(refused(&[greeting(0)]).contains("fixed newstyle"));
    let closed = "the handshake failed (the server closed the connection)";
    assert!(refused(&[greeting(3)]).contains(closed));
}

#[test]
fn a_hostile_server_ends_in_an_error() {
    let overlong = {
        let mut bytes = reply(option::STRUCTURED_REPLY, option_reply::ACK, &[]);
        bytes[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        bytes
    };
    assert!(refused(&[greeting(3), overlong]).contains("overlong"));
    let endless = vec![context(1, "base:allocation"); REPLIES_MAX + 1].concat();
    let text = refused(&[greeting(3), ack(option::STRUCTURED_REPLY), endless]);
    assert!(text.contains("too many replies"), "{text}");
    let nothing = [structured(), ack(option::GO)].concat();
    assert!(refused(&[greeting(3), nothing]).contains("without sending its size"));
    let short = [structured(), reply(option::GO, option_reply::INFO, &[0, 0, 1])].concat();
    assert!(refused(&[greeting(3), short]).contains("truncated"));
    let blocks = [structured(), export_info(512, 1), block_info(3, 3, 3), ack(option::GO)].concat();
    assert!(refused(&[greeting(3), blocks]).contains("block sizes"));
    let other = reply(option::GO, option_reply::ACK, &[]);
    assert!(refused(&[greeting(3), other]).contains("another option"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// A right negotiation with some bytes changed ends in one way or the other.
    #[test]
    fn changed_bytes_never_panic(changes in prop::collection::vec((0usize..300, any::<u8>()), 1..6)) {
        let go = [export_info(1 << 20, 0x1fd), block_info(512, 4096, 65536), ack(option::GO)];
        let mut bytes = [greeting(3), structured(), go.concat()].concat();
        for (at, value) in changes {
            let length = bytes.len();
            bytes[at % length] = value;
        }
        if let Ok((export, _)) = enter(&[bytes]) {
            prop_assert!(export.size % 512 == 0 && export.max_block >= export.min_block);
        }
    }
}
