//! What a frontend encodes is what is decoded, for any values, in whatever pieces it arrives.

use ebb_vhost_proto::{
    Assembler, BlkRequestHeader, BlkRequestKind, ConfigRange, FrontendMessage as M, InflightArea,
    LogArea, MemoryRegion, ProtocolFeatures, RangeSegment, VirtioFeatures, VringAddress, VringFile,
    VringState,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::vhost;

fn region() -> impl Strategy<Value = MemoryRegion> {
    any::<(u64, u64, u64, u64)>().prop_map(|(guest_address, bytes, user_address, mmap_offset)| {
        MemoryRegion { guest_address, bytes, user_address, mmap_offset }
    })
}

/// All messages of a fixed size.
fn messages() -> impl Strategy<Value = M<'static>> {
    let state = || any::<(u32, u32)>().prop_map(|(index, number)| VringState { index, number });
    let file = || {
        any::<(u8, bool)>()
            .prop_map(|(index, has_descriptor)| VringFile { index: index.into(), has_descriptor })
    };
    let area = || {
        any::<(u64, u64, u16, u16)>().prop_map(|(mmap_size, mmap_offset, queues, queue_size)| {
            InflightArea { mmap_size, mmap_offset, queues, queue_size }
        })
    };
    let address = any::<(u32, u32, [u64; 4])>().prop_map(|(index, flags, addresses)| {
        let [descriptor, used, available, log] = addresses;
        VringAddress { index, flags, descriptor, used, available, log }
    });
    let range = any::<(u32, u32, u32)>().prop_map(|(offset, size, flags)| ConfigRange {
        offset,
        size,
        flags,
    });
    let log = any::<Option<(u64, u64)>>()
        .prop_map(|log| log.map(|(size, offset)| LogArea { size, offset }));
    let bare = [
        M::GetFeatures,
        M::SetOwner,
        M::ResetOwner,
        M::SetLogFd,
        M::GetProtocolFeatures,
        M::GetQueueNum,
        M::SetBackendReqFd,
        M::ResetDevice,
        M::GetMaxMemSlots,
        M::GetStatus,
    ];
    let with_numbers = prop_oneof![
        any::<u64>().prop_map(|bits| M::SetFeatures(VirtioFeatures(bits))),
        any::<u64>().prop_map(|bits| M::SetProtocolFeatures(ProtocolFeatures(bits))),
        any::<u32>().prop_map(M::GetVringBase),
        any::<u32>().prop_map(M::VringKick),
        any::<u8>().prop_map(M::SetStatus),
        any::<(u32, bool)>().prop_map(|(index, enabled)| M::SetVringEnable { index, enabled }),
        (45..=u32::MAX).prop_map(M::Unsupported),
    ];
    let of_queues = prop_oneof![
        state().prop_map(M::SetVringNum),
        state().prop_map(M::SetVringBase),
        address.prop_map(M::SetVringAddr),
        file().prop_map(M::SetVringKick),
        file().prop_map(M::SetVringCall),
        file().prop_map(M::SetVringErr),
    ];
    let of_memory = prop_oneof![
        log.prop_map(M::SetLogBase),
        area().prop_map(M::GetInflightFd),
        area().prop_map(M::SetInflightFd),
        region().prop_map(M::AddMemReg),
        region().prop_map(M::RemMemReg),
        range.prop_map(M::GetConfig),
    ];
    prop_oneof![proptest::sample::select(bare.to_vec()), with_numbers, of_queues, of_memory]
}

/// Sends a message in pieces of these sizes, and decodes what arrives.
fn receive<T>(
    (request, body): (u32, Vec<u8>),
    descriptors: usize,
    pieces: &[usize],
    judge: impl FnOnce(M<'_>) -> T,
) -> T {
    let size = u32::try_from(body.len()).expect("a short body");
    let head = [request, 9, size].map(u32::to_le_bytes).concat();
    let bytes = [head, body].concat();
    let (mut rest, mut assembler) = (&bytes[..], Assembler::new());
    let mut pieces = pieces.iter().copied().chain(std::iter::repeat(usize::MAX));
    while !rest.is_empty() {
        let space = assembler.space();
        let len = space.len().min(pieces.next().unwrap_or(usize::MAX)).min(rest.len());
        space[..len].copy_from_slice(&rest[..len]);
        rest = &rest[len..];
        assembler.advance(len).expect("a valid header");
    }
    let (header, body) = assembler.take().expect("a whole message");
    assert!(header.need_reply);
    judge(M::decode(header, body, descriptors).expect("a valid message"))
}

proptest! {
    #[test]
    fn messages_survive(message in messages(), pieces in vec(1..20_usize, 0..60)) {
        receive(vhost::encode(&message), message.descriptors(), &pieces, |decoded| {
            prop_assert_eq!(decoded, message);
            Ok(())
        })?;
    }

    #[test]
    fn tables_survive(regions in vec(region(), 0..=8), pieces in vec(1..100_usize, 0..60)) {
        let head = [regions.len() as u64].map(u64::to_le_bytes).concat();
        let single = regions.iter().map(|region| vhost::encode(&M::AddMemReg(*region)).1);
        let body = single.fold(head, |body, region| [&body, &region[8..]].concat());
        receive((5, body.clone()), regions.len(), &pieces, |decoded| {
            prop_assert_eq!(vhost::encode(&decoded), (5, body));
            let M::SetMemTable(table) = decoded else { panic!("{decoded:?}") };
            prop_assert_eq!(table.regions().collect::<Vec<_>>(), regions);
            Ok(())
        })?;
    }

    #[test]
    fn config_writes_survive(
        payload in vec(any::<u8>(), 0..=256),
        (offset, flags) in any::<(u32, u32)>(),
        pieces in vec(1..100_usize, 0..60),
    ) {
        let size = u32::try_from(payload.len()).unwrap();
        let message = M::SetConfig(ConfigRange { offset, size, flags }, &payload);
        receive(vhost::encode(&message), 0, &pieces, |decoded| {
            prop_assert_eq!(decoded, message);
            Ok(())
        })?;
    }

    #[test]
    fn request_formats_survive((number, count, flags, sector) in any::<(u32, u32, u32, u64)>()) {
        let bytes = u128::from(number) | u128::from(flags) << 32 | u128::from(sector) << 64;
        let header = BlkRequestHeader::from_bytes(&bytes.to_le_bytes());
        prop_assert_eq!(header, BlkRequestHeader { kind: BlkRequestKind::from_wire(number), sector });
        let bytes = u128::from(sector) | u128::from(count) << 64 | u128::from(flags) << 96;
        let segment = RangeSegment::from_bytes(&bytes.to_le_bytes());
        prop_assert_eq!(segment, RangeSegment { sector, count, flags });
    }
}
