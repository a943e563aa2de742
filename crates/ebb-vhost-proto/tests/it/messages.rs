//! Each request of a frontend, as bytes written down from the protocol document, and what is wrong with one.

use ebb_vhost_proto::{
    Assembler, ConfigRange, FrontendMessage as M, InflightArea, LogArea, MessageHeader,
    ProtocolError, ProtocolFeatures, VirtioFeatures, VringAddress, VringFile, VringState, request,
};

const U64: &[u8] = &[8, 7, 6, 5, 4, 3, 2, 1];
const STATE: &[u8] = &[3, 0, 0, 0, 0x34, 0x12, 0, 0];
const REGION: &[u8] = &[
    0, 0, 0, 0, 1, 0, 0, 0, // guest address
    0, 0, 0, 0x80, 0, 0, 0, 0, // size
    0, 0, 0x20, 0x11, 0x22, 0x7f, 0, 0, // user address
    0, 0x10, 0, 0, 0, 0, 0, 0, // offset
];
const INFLIGHT: &[u8] = &[0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 4, 0, 128, 0];

fn header(number: u32, body: &[u8]) -> MessageHeader {
    let size = u32::try_from(body.len()).expect("a short body");
    MessageHeader { request: number, need_reply: false, size }
}

fn decode(number: u32, body: &[u8], descriptors: usize) -> Result<M<'_>, ProtocolError> {
    M::decode(header(number, body), body, descriptors)
}

/// Decodes a body that must be right, and neither with a byte more nor with one less.
fn exact(number: u32, body: &[u8], descriptors: usize) -> M<'_> {
    let longer = [body, &[0]].concat();
    let error = |bytes: usize| {
        let bytes = u32::try_from(bytes).expect("a short body");
        Err(ProtocolError::Size { request: number, bytes })
    };
    assert_eq!(decode(number, &longer, descriptors), error(body.len() + 1), "request {number}");
    if let Some((_, shorter)) = body.split_last() {
        assert_eq!(decode(number, &body[..shorter.len()], descriptors), error(shorter.len()));
    }
    let message = decode(number, body, descriptors).expect("a valid message");
    assert_eq!(message.descriptors(), descriptors, "request {number}");
    message
}

fn joined(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

#[test]
fn requests_without_a_body() {
    for (number, message, descriptors) in [
        (1, M::GetFeatures, 0),
        (3, M::SetOwner, 0),
        (4, M::ResetOwner, 0),
        (7, M::SetLogFd, 1),
        (15, M::GetProtocolFeatures, 0),
        (17, M::GetQueueNum, 0),
        (21, M::SetBackendReqFd, 1),
        (34, M::ResetDevice, 0),
        (36, M::GetMaxMemSlots, 0),
        (40, M::GetStatus, 0),
    ] {
        assert_eq!(exact(number, &[], descriptors), message);
    }
}

#[test]
fn requests_with_a_number() {
    let number = 0x0102_0304_0506_0708;
    assert_eq!(exact(2, U64, 0), M::SetFeatures(VirtioFeatures(number)));
    assert_eq!(exact(16, U64, 0), M::SetProtocolFeatures(ProtocolFeatures(number)));
    assert_eq!(exact(39, &[0x8f, 0, 0, 0, 0, 0, 0, 0], 0), M::SetStatus(0x8f));
    let error = ProtocolError::Value { request: 39, value: 0x100 };
    assert_eq!(decode(39, &[0, 1, 0, 0, 0, 0, 0, 0], 0), Err(error));
}

#[test]
fn requests_with_the_state_of_a_queue() {
    let state = VringState { index: 3, number: 0x1234 };
    assert_eq!(exact(8, STATE, 0), M::SetVringNum(state));
    assert_eq!(exact(10, STATE, 0), M::SetVringBase(state));
    assert_eq!(exact(11, STATE, 0), M::GetVringBase(3));
    assert_eq!(exact(35, STATE, 0), M::VringKick(3));
    for (number, enabled) in [(0, false), (1, true)] {
        let body = [3, 1, 0, 0, number, 0, 0, 0];
        assert_eq!(exact(18, &body, 0), M::SetVringEnable { index: 0x103, enabled });
    }
    let error = ProtocolError::Value { request: 18, value: 0x1234 };
    assert_eq!(decode(18, STATE, 0), Err(error));
}

#[test]
fn the_addresses_of_a_queue() {
    let body = [
        2, 0, 0, 0, 1, 0, 0, 0, // index, flags
        1, 0, 0, 0, 0, 0, 0, 0x10, // descriptor
        2, 0, 0, 0, 0, 0, 0, 0x20, // used
        3, 0, 0, 0, 0, 0, 0, 0x30, // available
        4, 0, 0, 0, 0, 0, 0, 0x40, // log
    ];
    let address = VringAddress {
        index: 2,
        flags: VringAddress::LOG,
        descriptor: 0x1000_0000_0000_0001,
        used: 0x2000_0000_0000_0002,
        available: 0x3000_0000_0000_0003,
        log: 0x4000_0000_0000_0004,
    };
    assert_eq!(exact(9, &body, 0), M::SetVringAddr(address));
}

#[test]
fn the_files_of_a_queue() {
    type Kind = fn(VringFile) -> M<'static>;
    let kinds: [(u32, Kind); 3] =
        [(12, M::SetVringKick), (13, M::SetVringCall), (14, M::SetVringErr)];
    for (number, message) in kinds {
        let file = |has_descriptor| VringFile { index: 255, has_descriptor };
        assert_eq!(exact(number, &[255, 0, 0, 0, 0, 0, 0, 0], 1), message(file(true)));
        assert_eq!(exact(number, &[255, 1, 0, 0, 0, 0, 0, 0], 0), message(file(false)));
        // A descriptor that comes in spite of the flag is surplus.
        let polled = decode(number, &[255, 1, 0, 0, 0, 0, 0, 0], 1).unwrap();
        assert_eq!(polled.descriptors(), 0);
        for reserved in [[0, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0x80]] {
            let value = u64::from_le_bytes(reserved);
            let error = ProtocolError::Value { request: number, value };
            assert_eq!(decode(number, &reserved, 1), Err(error));
        }
    }
}

#[test]
fn tables_of_memory() {
    let prefix = |count: u8| [count, 0, 0, 0, 0xee, 0xee, 0xee, 0xee];
    for count in 0..=8_u8 {
        let body = joined(&[&prefix(count), &REGION.repeat(count.into())]);
        let M::SetMemTable(table) = exact(5, &body, count.into()) else { panic!("a table") };
        assert_eq!((table.len(), table.is_empty()), (count.into(), count == 0));
        assert_eq!(table.regions().count(), table.len());
        for region in table.regions() {
            assert_eq!((region.guest_address, region.bytes), (0x1_0000_0000, 0x8000_0000));
            assert_eq!((region.user_address, region.mmap_offset), (0x7f22_1120_0000, 0x1000));
        }
        // A count that is not that of the regions.
        let other = joined(&[&prefix(count ^ 1), &REGION.repeat(count.into())]);
        assert!(decode(5, &other, 8).is_err());
    }
    // The order is that of the descriptors.
    let second: Vec<u8> = REGION.iter().rev().copied().collect();
    let body = joined(&[&prefix(2), REGION, &second]);
    let M::SetMemTable(table) = decode(5, &body, 3).unwrap() else { panic!("a table") };
    assert_eq!(table.regions().map(|r| r.guest_address).collect::<Vec<_>>(), [1 << 32, 1 << 52]);
    for count in [9, u32::MAX] {
        let body = joined(&[&count.to_le_bytes(), &[0; 4], &REGION.repeat(9)]);
        let error = ProtocolError::Value { request: 5, value: count.into() };
        assert_eq!(decode(5, &body, 8), Err(error));
    }
}

#[test]
fn single_regions_of_memory() {
    let body = joined(&[&[0xee; 8], REGION]);
    let M::AddMemReg(added) = exact(37, &body, 1) else { panic!("a region") };
    let M::RemMemReg(removed) = exact(38, &body, 0) else { panic!("a region") };
    assert_eq!(added, removed);
    assert_eq!((added.guest_address, added.bytes), (0x1_0000_0000, 0x8000_0000));
    assert_eq!((added.user_address, added.mmap_offset), (0x7f22_1120_0000, 0x1000));
    // Frontends may send one, against the protocol.
    assert_eq!(decode(38, &body, 1).unwrap().descriptors(), 0);
}

#[test]
fn the_log() {
    let body = joined(&[&[0, 0x10, 0, 0, 0, 0, 0, 0], U64]);
    let area = LogArea { size: 0x1000, offset: 0x0102_0304_0506_0708 };
    assert_eq!(exact(6, &body, 1), M::SetLogBase(Some(area)));
    // Without shared memory there is nothing to map.
    assert_eq!(exact(6, &body, 0), M::SetLogBase(None));
    assert_eq!(exact(6, U64, 0), M::SetLogBase(None));
}

#[test]
fn the_config_space() {
    let head = [1, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0];
    let range = ConfigRange { offset: 1, size: 3, flags: ConfigRange::MIGRATION };
    let body = joined(&[&head, &[7, 8, 9]]);
    assert_eq!(exact(24, &body, 0), M::GetConfig(range));
    assert_eq!(exact(24, &head, 0), M::GetConfig(range), "without room for the answer");
    assert_eq!(exact(25, &body, 0), M::SetConfig(range, &[7, 8, 9]));
    assert!(decode(25, &head, 0).is_err());
    // The whole space of QEMU, and a range that no config space has: that is for the reply to say.
    let whole = joined(&[&[0; 4], &256_u32.to_le_bytes(), &[0; 4], &[0; 256]]);
    assert!(matches!(exact(24, &whole, 0), M::GetConfig(range) if range.size == 256));
    let beyond = joined(&[&[0xff; 4], &[0xff; 4], &[0; 4]]);
    assert!(matches!(decode(24, &beyond, 0), Ok(M::GetConfig(range)) if range.size == u32::MAX));
    assert!(decode(25, &beyond, 0).is_err());
}

#[test]
fn the_inflight_area() {
    let area = InflightArea { mmap_size: 0x2000, mmap_offset: 0x1000, queues: 4, queue_size: 128 };
    for padding in [&[][..], &[0xee; 4]] {
        let body = joined(&[INFLIGHT, padding]);
        assert_eq!(exact(31, &body, 0), M::GetInflightFd(area));
        assert_eq!(exact(32, &body, 1), M::SetInflightFd(area));
    }
}

#[test]
fn missing_descriptors_are_an_error_and_others_are_surplus() {
    let table = joined(&[&[2, 0, 0, 0, 0, 0, 0, 0], REGION, REGION]);
    let region = joined(&[&[0; 8], REGION]);
    for (number, body, needed) in [
        (5, &table[..], 2),
        (7, &[], 1),
        (12, &[0; 8], 1),
        (21, &[], 1),
        (32, INFLIGHT, 1),
        (37, &region, 1),
    ] {
        let received = needed - 1;
        let error = ProtocolError::Descriptors { request: number, needed, received };
        assert_eq!(decode(number, body, received), Err(error));
        assert_eq!(decode(number, body, needed + 5).unwrap().descriptors(), needed);
    }
    assert_eq!(decode(1, &[], 8).unwrap().descriptors(), 0);
}

/// All others, of any size.
#[test]
fn what_no_block_device_supports_is_told_by_its_number() {
    let unsupported = [19, 20, 22, 23, 26, 27, 28, 29, 30, 33, 41, 42, 43, 44, 45, 0, u32::MAX];
    for number in unsupported {
        for body in [&[][..], &[1; 8], &[1; 4096]] {
            let message = decode(number, body, 3).unwrap();
            assert_eq!((message, message.descriptors()), (M::Unsupported(number), 0));
            assert!(!message.has_reply(ProtocolFeatures(u64::MAX)));
        }
    }
    let supported = (0..=50).filter(|n| !matches!(decode(*n, &[0; 3], 0), Ok(M::Unsupported(_))));
    let names: Vec<_> = supported.map(request::frontend_request_name).collect();
    assert_eq!(names.len(), 44 - 14);
    assert!(names.iter().all(Option::is_some));
    assert_eq!(request::frontend_request_name(44), Some("GET_SHMEM_CONFIG"));
    assert_eq!(request::frontend_request_name(45), None);
}

#[test]
fn a_reply_is_due_to_those_that_ask() {
    let none = ProtocolFeatures::NONE;
    let asking: Vec<u32> = (1..=44)
        .filter(|number| {
            // Bodies of which one fits each request.
            let bodies = [&[][..], &[0; 8], &[0; 12], &[0; 24], &[0; 40]];
            let decoded = bodies.iter().find_map(|body| decode(*number, body, 1).ok());
            decoded.unwrap().has_reply(none)
        })
        .collect();
    assert_eq!(asking, [1, 11, 15, 17, 24, 31, 36, 40]);
    let log = decode(6, U64, 0).unwrap();
    assert!(!log.has_reply(none) && log.has_reply(ProtocolFeatures::LOG_SHMFD));
}

#[test]
fn an_error_names_the_request() {
    let error = decode(5, &[0; 9], 0).unwrap_err();
    assert_eq!(error.to_string(), "SET_MEM_TABLE has 9 bytes, which is not its size");
    let error = decode(12, &[0; 8], 0).unwrap_err();
    assert_eq!(error.to_string(), "SET_VRING_KICK came with 0 file descriptors, and needs 1");
    let error = decode(18, STATE, 0).unwrap_err();
    assert_eq!(error.to_string(), "SET_VRING_ENABLE has a value that is not allowed: 0x1234");
}

/// As a frontend begins, one byte at a time.
#[test]
fn a_conversation_in_single_bytes() {
    let bytes: Vec<u8> = [
        &[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0][..],
        &[15, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        &[16, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0x2b, 0x92, 0, 0, 0, 0, 0, 0],
        &[3, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0],
        &[24, 0, 0, 0, 1, 0, 0, 0, 15, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    let mut assembler = Assembler::new();
    let mut met = Vec::new();
    for byte in bytes {
        assembler.space()[0] = byte;
        assembler.advance(1).unwrap();
        if let Some((header, body)) = assembler.take() {
            let message = M::decode(header, body, 0).unwrap();
            met.push((format!("{message:?}"), header.need_reply));
        }
    }
    let features = "SetProtocolFeatures(ProtocolFeatures(37419))";
    let config = "GetConfig(ConfigRange { offset: 0, size: 3, flags: 0 })";
    let expected = ["GetFeatures", "GetProtocolFeatures", features, "SetOwner", config];
    assert!(met.iter().map(|(text, _)| text.as_str()).eq(expected), "{met:?}");
    assert!(met.iter().map(|(_, need_reply)| *need_reply).eq([false, false, false, true, false]));
    assert!(assembler.is_empty());
}
