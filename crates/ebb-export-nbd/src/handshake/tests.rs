//! The handshake against a client written from the protocol text only: numbers are literals
//! here, so that a wrong constant is found.

use super::*;
use proptest::prelude::*;

struct TestExports(Vec<ExportInfo>);

impl Exports for TestExports {
    fn list(&self, visit: &mut dyn FnMut(&str, &str)) {
        self.0.iter().for_each(|export| visit(&export.name, &export.description));
    }

    /// The empty name is the first export.
    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        if name.is_empty() {
            return self.0.first().cloned();
        }
        self.0.iter().find(|export| export.name == name).cloned()
    }
}

fn export(handle: u64, name: &str, description: &str) -> ExportInfo {
    ExportInfo {
        snapshots: vec!["monday".to_owned(), "tuesday".to_owned()],
        handle,
        name: name.into(),
        description: description.into(),
        size: 0x4000_0000,
        capabilities: ExportCapabilities {
            flush: true,
            fua: true,
            ..ExportCapabilities::default()
        },
        block: BlockSizes::default(),
    }
}

fn test_exports() -> TestExports {
    TestExports(vec![export(7, "disk", "the first"), export(8, "other", "")])
}

fn option(number: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend(payload);
    bytes
}

fn counted(text: &str) -> Vec<u8> {
    let mut bytes = u32::try_from(text.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

fn go_payload(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut bytes = counted(name);
    bytes.extend(u16::try_from(infos.len()).unwrap().to_be_bytes());
    infos.iter().for_each(|info| bytes.extend(info.to_be_bytes()));
    bytes
}

fn context_payload(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = counted(name);
    bytes.extend(u32::try_from(queries.len()).unwrap().to_be_bytes());
    queries.iter().for_each(|query| bytes.extend(counted(query)));
    bytes
}

fn reply(number: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A conversation: does what the caller of a handshake has to do.
struct Talk {
    machine: Handshake,
    buffer: Vec<u8>,
    out: Vec<u8>,
}

impl Talk {
    fn new(policy: HandshakePolicy) -> Self {
        Self { machine: Handshake::new(policy), buffer: Vec::new(), out: Vec::new() }
    }

    /// Past the client's flags, with fixed newstyle and no zeroes.
    fn begun(policy: HandshakePolicy) -> Self {
        let mut talk = Self::new(policy);
        assert_eq!(talk.send(&[0, 0, 0, 3]), Ok(HandshakeStep::NeedMore));
        talk
    }

    /// Passes bytes to the handshake until it needs more, or a step other than `Again`.
    fn send(&mut self, bytes: &[u8]) -> Result<HandshakeStep, HandshakeError> {
        self.buffer.extend(bytes);
        loop {
            let (consumed, step) =
                self.machine.advance(&self.buffer, &test_exports(), &mut self.out)?;
            self.buffer.drain(..consumed);
            if step != HandshakeStep::Again {
                return Ok(step);
            }
        }
    }

    fn replies(&mut self) -> Vec<u8> {
        core::mem::take(&mut self.out)
    }

    /// Sends an option to which exactly one reply is expected; returns the reply's type and payload.
    fn ask(&mut self, number: u32, payload: &[u8]) -> (u32, Vec<u8>) {
        assert_eq!(self.send(&option(number, payload)), Ok(HandshakeStep::NeedMore));
        let replies = self.replies();
        assert_eq!(replies[8..12], number.to_be_bytes(), "the reply names its option");
        (u32::from_be_bytes(replies[12..16].try_into().unwrap()), replies[20..].to_vec())
    }

    fn go(&mut self, payload: &[u8]) -> Session {
        match self.send(&option(7, payload)) {
            Ok(HandshakeStep::Transmission(session)) => session,
            other => panic!("expected transmission, got {other:?}"),
        }
    }
}

const UNSUP: u32 = 0x8000_0001;
const POLICY: u32 = 0x8000_0002;
const INVALID: u32 = 0x8000_0003;
const TLS_REQD: u32 = 0x8000_0005;
const UNKNOWN: u32 = 0x8000_0006;
const SHUTDOWN: u32 = 0x8000_0007;
const TOO_BIG: u32 = 0x8000_0009;
const EXT_HEADER_REQD: u32 = 0x8000_000a;

#[test]
fn the_greeting_follows_the_protocol() {
    let mut out = Vec::new();
    Handshake::new(HandshakePolicy::default()).greeting(&mut out);
    assert_eq!(out, b"NBDMAGICIHAVEOPT\0\x03");
    assert_eq!(out.len(), crate::proto::GREETING_LEN);
}

#[test]
fn go_follows_the_protocol() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    let session = talk.go(&go_payload("disk", &[0, 1, 2, 3, 99]));
    let mut expected = Vec::new();
    // 1 GiB; HAS_FLAGS, SEND_FLUSH, SEND_FUA
    expected.extend(reply(7, 3, b"\0\0\0\0\0\0\x40\0\0\0\0\x0d"));
    expected.extend(reply(7, 3, b"\0\x01disk"));
    expected.extend(reply(7, 3, b"\0\x02the first"));
    expected.extend(reply(7, 3, b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0"));
    expected.extend(reply(7, 1, b""));
    assert_eq!(talk.replies(), expected);
    assert_eq!(session.export.handle, 7);
    assert_eq!(session.style, ReplyStyle::Simple);
    assert!(session.block_size_requested && session.no_zeroes && !session.tls);
    assert_eq!(session.context, None);
    assert_eq!(talk.send(b""), Err(HandshakeError::Ended), "no more input is consumed");
}

#[test]
fn info_describes_the_export_and_continues_the_handshake() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.send(&option(6, &go_payload("", &[]))), Ok(HandshakeStep::NeedMore));
    let mut expected = reply(6, 3, b"\0\0\0\0\0\0\x40\0\0\0\0\x0d");
    expected.extend(reply(6, 3, b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0"));
    expected.extend(reply(6, 1, b""));
    assert_eq!(talk.replies(), expected);
    assert!(!talk.go(&go_payload("", &[])).block_size_requested);
}

/// A client that asks for the default export learns its name.
#[test]
fn default_export_is_described_by_its_own_name() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.send(&option(6, &go_payload("", &[1]))), Ok(HandshakeStep::NeedMore));
    let replies = talk.replies();
    let name = reply(6, 3, b"\0\x01disk");
    assert!(replies.windows(name.len()).any(|part| part == name), "{replies:02x?}");
}

#[test]
fn export_name_follows_the_protocol() {
    for (flags, zeroes) in [(3_u32, 0), (1, 124), (0, 124), (2, 0)] {
        let mut talk = Talk::new(HandshakePolicy::default());
        talk.send(&flags.to_be_bytes()).unwrap();
        let step = talk.send(&option(1, b"other")).unwrap();
        assert!(
            matches!(step, HandshakeStep::Transmission(Session { export, .. }) if export.handle == 8)
        );
        let mut expected = b"\0\0\0\0\x40\0\0\0\0\x0d".to_vec();
        expected.resize(expected.len() + zeroes, 0);
        assert_eq!(talk.replies(), expected, "client flags {flags}");
    }
}

#[test]
fn errors_of_export_name_close_the_connection() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(
        talk.send(&option(1, b"nothing")),
        Err(HandshakeError::UnknownExport("nothing".into()))
    );
    assert!(talk.replies().is_empty());
    for name in [&b"a\0b"[..], b"\xff", &[b'a'; 4097]] {
        let mut talk = Talk::begun(HandshakePolicy::default());
        assert_eq!(talk.send(&option(1, name)), Err(HandshakeError::BadExportName));
    }
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.ask(11, b"").0, 1);
    assert_eq!(talk.send(&option(1, b"disk")), Err(HandshakeError::ExportNameAfterExtendedHeaders));
}

#[test]
fn list_follows_the_protocol() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.send(&option(3, b"")), Ok(HandshakeStep::NeedMore));
    let mut expected = reply(3, 2, b"\0\0\0\x04diskthe first");
    expected.extend(reply(3, 2, b"\0\0\0\x05other"));
    expected.extend(reply(3, 1, b""));
    assert_eq!(talk.replies(), expected);
    assert_eq!(talk.ask(3, b"x").0, INVALID);
}

#[test]
fn abort_is_acknowledged_whatever_its_payload() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.send(b"IHAVEOPT\0\0\0\x02\xff\xff\xff\xff"), Ok(HandshakeStep::Abort));
    assert_eq!(talk.replies(), reply(2, 1, b""));
    assert_eq!(talk.send(b"anything"), Err(HandshakeError::Ended));
}

#[test]
fn unknown_options_are_skipped_and_refused() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    for number in [0, 4, 12, 0xffff_ffff] {
        assert_eq!(talk.ask(number, &[0xaa; 300]).0, UNSUP, "option {number}");
    }
    assert_eq!(talk.ask(8, b"").0, 1, "the next option is understood");
}

#[test]
fn refused_payloads_are_not_kept() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    let announced = (64 << 10) + 1_u32;
    let mut head = b"IHAVEOPT\0\0\0\x07".to_vec();
    head.extend(announced.to_be_bytes());
    assert_eq!(talk.send(&head), Ok(HandshakeStep::NeedMore));
    for _ in 0..announced {
        assert!(talk.buffer.is_empty());
        assert!(talk.replies().is_empty(), "the reply is sent after the payload");
        assert_eq!(talk.send(b"x"), Ok(HandshakeStep::NeedMore));
    }
    assert_eq!(talk.replies()[12..16], TOO_BIG.to_be_bytes());
    talk.go(&go_payload("disk", &[]));
}

#[test]
fn unknown_exports_are_refused() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.ask(8, b"").0, 1);
    assert_eq!(talk.ask(6, &go_payload("nothing", &[])).0, UNKNOWN);
    assert_eq!(talk.ask(7, &go_payload("nothing", &[])).0, UNKNOWN);
    assert_eq!(talk.ask(9, &context_payload("nothing", &[])).0, UNKNOWN);
    assert_eq!(talk.ask(10, &context_payload("nothing", &["base:allocation"])).0, UNKNOWN);
    assert_eq!(talk.ask(7, b"\0\0").0, INVALID);
    talk.go(&go_payload("disk", &[]));
}

#[test]
fn reply_styles() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.ask(8, b"data").0, INVALID);
    assert_eq!(talk.ask(8, b"").0, 1);
    assert_eq!(talk.ask(8, b"").0, 1, "a repeated option is accepted");
    let session = talk.go(&go_payload("disk", &[]));
    assert_eq!(session.style, ReplyStyle::Structured);
    assert!(session.flags.contains(TransmissionFlags::SEND_DF));

    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.ask(11, b"data").0, INVALID);
    assert_eq!(talk.ask(11, b"").0, 1);
    assert_eq!(talk.ask(8, b"").0, EXT_HEADER_REQD, "no way back");
    let session = talk.go(&go_payload("disk", &[]));
    assert_eq!(session.style, ReplyStyle::Extended);
    assert_eq!(session.flags.0, 0b1000_1101);
}

#[test]
fn contexts_are_listed() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.ask(9, &context_payload("disk", &[])).0, INVALID, "no chunks yet");
    talk.ask(8, b"");
    for queries in [&["base:"][..], &["base:allocation", "base:"], &["x:y", "base:"]] {
        talk.send(&option(9, &context_payload("disk", queries))).unwrap();
        let mut expected = reply(9, 4, b"\0\0\0\0base:allocation");
        expected.extend(reply(9, 1, b""));
        assert_eq!(talk.replies(), expected, "{queries:?}");
    }
    for queries in [&[][..], &["qemu:", "base:"], &["qemu:dirty-bitmap:", "base:allocation"]] {
        talk.send(&option(9, &context_payload("disk", queries))).unwrap();
        let mut expected = reply(9, 4, b"\0\0\0\0base:allocation");
        expected.extend(reply(9, 4, b"\0\0\0\0qemu:dirty-bitmap:monday"));
        expected.extend(reply(9, 4, b"\0\0\0\0qemu:dirty-bitmap:tuesday"));
        expected.extend(reply(9, 1, b""));
        assert_eq!(talk.replies(), expected, "{queries:?}");
    }
    talk.send(&option(9, &context_payload("disk", &["qemu:dirty-bitmap:tuesday"]))).unwrap();
    let mut expected = reply(9, 4, b"\0\0\0\0qemu:dirty-bitmap:tuesday");
    expected.extend(reply(9, 1, b""));
    assert_eq!(talk.replies(), expected);
    assert_eq!(talk.ask(9, &context_payload("disk", &["qemu:dirty-bitmap:x", "base:other"])).0, 1);
    let many = vec!["base:"; 129];
    assert_eq!(talk.ask(9, &context_payload("disk", &many)).0, TOO_BIG);
}

#[test]
fn contexts_are_selected_for_one_export() {
    // What was selected last, which export was chosen, whether it was granted.
    let allocation = context_payload("disk", &["base:allocation"]);
    let cases: [(Vec<Vec<u8>>, &str, bool); 7] = [
        (vec![allocation.clone()], "disk", true),
        (vec![allocation.clone()], "", true),
        (vec![allocation.clone()], "other", false),
        (vec![allocation.clone(), context_payload("disk", &[])], "disk", false),
        (vec![allocation.clone(), context_payload("disk", &["base:"])], "disk", false),
        (vec![allocation.clone(), b"broken".to_vec()], "disk", false),
        (vec![allocation.clone(), vec![0; 70_000]], "disk", false),
    ];
    for (selections, name, granted) in cases {
        let mut talk = Talk::begun(HandshakePolicy::default());
        talk.ask(8, b"");
        for selection in &selections {
            talk.send(&option(10, selection)).unwrap();
        }
        let mut expected = reply(10, 4, b"\0\0\0\x01base:allocation");
        expected.extend(reply(10, 1, b""));
        assert!(talk.replies().starts_with(&expected));
        let session = talk.go(&go_payload(name, &[]));
        assert_eq!(session.context, granted.then_some(1), "{name} {selections:?}");
    }
}

#[test]
fn what_has_changed_since_a_snapshot_is_a_context() {
    for queries in
        [&["qemu:dirty-bitmap:tuesday"][..], &["base:allocation", "qemu:dirty-bitmap:tuesday"]]
    {
        let mut talk = Talk::begun(HandshakePolicy::default());
        talk.ask(8, b"");
        talk.send(&option(10, &context_payload("disk", queries))).unwrap();
        let mut expected = reply(10, 4, b"\0\0\0\x02qemu:dirty-bitmap:tuesday");
        expected.extend(reply(10, 1, b""));
        assert_eq!(talk.replies(), expected);
        let session = talk.go(&go_payload("disk", &[]));
        assert_eq!((session.context, session.changed_since.as_deref()), (Some(2), Some("tuesday")));
    }
    let mut talk = Talk::begun(HandshakePolicy::default());
    talk.ask(8, b"");
    let queries = ["qemu:dirty-bitmap:never", "base:allocation"];
    talk.send(&option(10, &context_payload("disk", &queries))).unwrap();
    talk.replies();
    let session = talk.go(&go_payload("disk", &[]));
    assert_eq!((session.context, session.changed_since), (Some(1), None));
}

#[test]
fn unknown_client_flags_close_the_connection() {
    let mut talk = Talk::new(HandshakePolicy::default());
    assert_eq!(talk.send(&[0, 0, 0, 7]), Err(HandshakeError::UnknownClientFlags(4)));
    let mut talk = Talk::new(HandshakePolicy::default());
    assert_eq!(talk.send(&[0x80, 0, 0, 3]), Err(HandshakeError::UnknownClientFlags(1 << 31)));
}

#[test]
fn without_fixed_newstyle_only_export_name() {
    for number in [2, 3, 5, 7, 99] {
        let mut talk = Talk::new(HandshakePolicy::default());
        talk.send(&[0, 0, 0, 2]).unwrap();
        assert_eq!(talk.send(&option(number, b"")), Err(HandshakeError::NotFixedNewstyle(number)));
    }
}

#[test]
fn wrong_magic_closes() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    assert_eq!(talk.send(b"GET / HT"), Err(HandshakeError::BadMagic(0x4745_5420_2f20_4854)));
    assert_eq!(talk.send(&option(3, b"")), Err(HandshakeError::Ended));
}

/// `nbdinfo --list` sends two options for each export, on one connection.
#[test]
fn a_client_can_list_a_server_with_many_exports() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    for _ in 0..30_000 {
        talk.send(&option(6, &go_payload("disk", &[1, 2, 3]))).unwrap();
        talk.send(&option(9, &[&counted("disk")[..], &[0; 4]].concat())).unwrap();
    }
}

#[test]
fn a_handshake_is_bounded_in_options_and_bytes() {
    let limits = HandshakeLimits { options_max: 3, ..HandshakeLimits::default() };
    let mut talk = Talk::begun(HandshakePolicy { limits, ..HandshakePolicy::default() });
    for _ in 0..3 {
        talk.ask(3, b"");
    }
    assert_eq!(talk.send(&option(3, b"")), Err(HandshakeError::TooManyOptions(3)));

    let limits = HandshakeLimits { bytes_max: 100, ..HandshakeLimits::default() };
    let mut talk = Talk::begun(HandshakePolicy { limits, ..HandshakePolicy::default() });
    assert_eq!(talk.ask(77, &[0; 84]).0, UNSUP);
    assert_eq!(talk.send(&option(3, b"")), Err(HandshakeError::TooManyBytes(100)));
    // Announced bytes count like sent ones.
    let mut talk = Talk::begun(HandshakePolicy { limits, ..HandshakePolicy::default() });
    assert_eq!(
        talk.send(b"IHAVEOPT\0\0\0\x4d\xff\xff\xff\xff"),
        Err(HandshakeError::TooManyBytes(100))
    );
}

fn tls(tls: TlsMode) -> HandshakePolicy {
    HandshakePolicy { tls, ..HandshakePolicy::default() }
}

#[test]
fn tls_off() {
    let mut talk = Talk::begun(tls(TlsMode::Off));
    assert_eq!(talk.ask(5, b"").0, POLICY);
    assert_eq!(talk.ask(5, b"data").0, INVALID);
    assert!(!talk.go(&go_payload("disk", &[])).tls);
}

#[test]
fn tls_may_be_used() {
    let mut talk = Talk::begun(tls(TlsMode::On));
    assert_eq!(talk.ask(8, b"").0, 1);
    assert_eq!(talk.ask(10, &context_payload("disk", &["base:allocation"])).0, 4);
    assert_eq!(talk.ask(5, b"data").0, INVALID);
    assert_eq!(talk.send(&option(5, b"")), Ok(HandshakeStep::StartTls));
    assert_eq!(talk.replies(), reply(5, 1, b""));
    talk.machine.tls_established().unwrap();
    assert_eq!(talk.ask(5, b"").0, INVALID, "TLS within TLS");
    let session = talk.go(&go_payload("disk", &[]));
    assert!(session.tls);
    assert_eq!(session.style, ReplyStyle::Simple, "everything negotiated before TLS is discarded");
    assert_eq!(session.context, None);

    assert!(!Talk::begun(tls(TlsMode::On)).go(&go_payload("disk", &[])).tls, "it is no must");
}

#[test]
fn tls_required() {
    let mut talk = Talk::begun(tls(TlsMode::Require));
    for number in [3, 6, 7, 8, 9, 10, 11, 99] {
        assert_eq!(talk.ask(number, b"some data").0, TLS_REQD, "option {number}");
    }
    assert_eq!(talk.send(&option(5, b"")), Ok(HandshakeStep::StartTls));
    talk.machine.tls_established().unwrap();
    talk.replies();
    assert_eq!(talk.ask(99, b"").0, UNSUP, "TLS_REQD never again");
    assert!(talk.go(&go_payload("disk", &[])).tls);

    let mut talk = Talk::begun(tls(TlsMode::Require));
    assert_eq!(talk.send(&option(1, b"disk")), Err(HandshakeError::TlsRequired));
    let mut talk = Talk::begun(tls(TlsMode::Require));
    assert_eq!(talk.send(&option(2, b"")), Ok(HandshakeStep::Abort), "leaving needs no TLS");
}

#[test]
fn nothing_is_injected_before_tls() {
    for whole in [true, false] {
        let mut talk = Talk::begun(tls(TlsMode::Require));
        let mut bytes = option(5, b"");
        let injected = option(7, &go_payload("disk", &[]));
        let outcome = if whole {
            bytes.extend(&injected);
            talk.send(&bytes)
        } else {
            assert_eq!(talk.send(&bytes), Ok(HandshakeStep::StartTls));
            assert_eq!(talk.send(b""), Ok(HandshakeStep::StartTls), "no bytes, no harm");
            talk.send(&injected)
        };
        assert_eq!(outcome, Err(HandshakeError::PlaintextAfterStartTls));
        assert_eq!(talk.machine.tls_established(), Err(HandshakeError::Ended));
    }
}

#[test]
fn tls_established_out_of_order_ends_the_handshake() {
    let mut talk = Talk::begun(tls(TlsMode::On));
    assert_eq!(talk.machine.tls_established(), Err(HandshakeError::Ended));
    assert_eq!(talk.send(&option(3, b"")), Err(HandshakeError::Ended));
}

#[test]
fn shutting_down() {
    let mut talk = Talk::begun(HandshakePolicy::default());
    talk.machine.shut_down();
    assert_eq!(talk.ask(7, &go_payload("disk", &[])).0, SHUTDOWN);
    assert_eq!(talk.ask(5, b"").0, SHUTDOWN);
    assert_eq!(talk.send(&option(2, b"")), Ok(HandshakeStep::Abort));
    let mut talk = Talk::begun(HandshakePolicy::default());
    talk.machine.shut_down();
    assert_eq!(talk.send(&option(1, b"disk")), Err(HandshakeError::ShuttingDown));
}

/// A plausible option of a client.
fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let name = prop_oneof![Just("disk"), Just("other"), Just(""), Just("nothing")];
    let query = prop_oneof![Just("base:allocation"), Just("base:"), Just("x-y:z"), Just("bad")];
    let queries = proptest::collection::vec(query, 0..4);
    prop_oneof![
        (name.clone(), proptest::collection::vec(0_u16..6, 0..5))
            .prop_map(|(name, infos)| option(6, &go_payload(name, &infos))),
        (9_u32..11, name.clone(), queries)
            .prop_map(|(number, name, queries)| option(number, &context_payload(name, &queries))),
        prop_oneof![Just(3_u32), Just(8), Just(11)].prop_map(|number| option(number, b"")),
        (0_u32..14, proptest::collection::vec(any::<u8>(), 0..40))
            .prop_filter("these end it", |(number, _)| ![1, 2, 5, 7].contains(number))
            .prop_map(|(number, payload)| option(number, &payload)),
    ]
}

proptest! {
    /// Splitting the bytes of a client anywhere changes nothing.
    #[test]
    fn splitting_the_input_changes_nothing(
        options in proptest::collection::vec(any_option(), 0..6),
        last in prop_oneof![
            Just(option(7, &go_payload("disk", &[3]))),
            Just(option(1, b"disk")),
            Just(option(2, b"")),
            Just(b"IHAVEOPX".to_vec()),
        ],
        cuts in proptest::collection::vec(1_usize..24, 1..8),
    ) {
        let mut bytes = vec![0, 0, 0, 3];
        bytes.extend(options.concat());
        bytes.extend(last);
        let mut whole = Talk::new(HandshakePolicy::default());
        let expected = whole.send(&bytes);

        let mut pieces = Talk::new(HandshakePolicy::default());
        let mut rest = &bytes[..];
        let mut outcome = Ok(HandshakeStep::NeedMore);
        for cut in cuts.iter().cycle() {
            let (piece, behind) = rest.split_at(rest.len().min(*cut));
            rest = behind;
            outcome = pieces.send(piece);
            if rest.is_empty() || outcome != Ok(HandshakeStep::NeedMore) {
                break;
            }
        }
        prop_assert_eq!(outcome, expected);
        prop_assert_eq!(pieces.out, whole.out);
    }
}
