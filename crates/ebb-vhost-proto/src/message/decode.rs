//! From the body of a frontend's request to its message.
//!
//! A body has exactly the size of its request. The exceptions are `SET_MEM_TABLE`, whose size follows from its number of
//! regions; `GET_CONFIG`, with or without room for the answer; `SET_LOG_BASE`, which is an address without shared
//! memory; and the inflight messages, with or without the padding that a C compiler adds.
//! Of a request that a block device does not support, only the number is read.

use super::{
    ConfigRange, FrontendMessage, InflightArea, LogArea, MAX_TABLE_REGIONS, MemoryRegion,
    MemoryTable, ProtocolError, REGION_BYTES, VringAddress, VringFile, VringState,
};
use crate::features::{ProtocolFeatures, VirtioFeatures};
use crate::request;
use crate::wire::NumberReader;

/// Bit 8 of the body of `SET_VRING_KICK` and its like: there is no descriptor.
const VRING_NO_DESCRIPTOR: u64 = 1 << 8;

/// The body of a request.
#[derive(Clone, Copy)]
pub(super) struct MessageBody<'a> {
    pub(super) request: u32,
    pub(super) bytes: &'a [u8],
}

impl<'a> MessageBody<'a> {
    /// The message, without a check of how many descriptors came with it.
    pub(super) fn decode(self, descriptors: usize) -> Result<FrontendMessage<'a>, ProtocolError> {
        use FrontendMessage as M;
        Ok(match self.request {
            request::GET_FEATURES => self.empty(M::GetFeatures)?,
            request::SET_FEATURES => M::SetFeatures(VirtioFeatures(self.number()?)),
            request::SET_OWNER => self.empty(M::SetOwner)?,
            request::RESET_OWNER => self.empty(M::ResetOwner)?,
            request::SET_MEM_TABLE => M::SetMemTable(self.table()?),
            request::SET_LOG_BASE => M::SetLogBase(self.log()?.filter(|_| descriptors > 0)),
            request::SET_LOG_FD => self.empty(M::SetLogFd)?,
            request::SET_VRING_NUM => M::SetVringNum(self.state()?),
            request::SET_VRING_ADDR => M::SetVringAddr(self.address()?),
            request::SET_VRING_BASE => M::SetVringBase(self.state()?),
            request::GET_VRING_BASE => M::GetVringBase(self.state()?.index),
            request::SET_VRING_KICK => M::SetVringKick(self.file()?),
            request::SET_VRING_CALL => M::SetVringCall(self.file()?),
            request::SET_VRING_ERR => M::SetVringErr(self.file()?),
            request::GET_PROTOCOL_FEATURES => self.empty(M::GetProtocolFeatures)?,
            request::SET_PROTOCOL_FEATURES => {
                M::SetProtocolFeatures(ProtocolFeatures(self.number()?))
            }
            request::GET_QUEUE_NUM => self.empty(M::GetQueueNum)?,
            request::SET_VRING_ENABLE => {
                let VringState { index, number } = self.state()?;
                let enabled = number == 1;
                self.allow(number.into(), number <= 1)?;
                M::SetVringEnable { index, enabled }
            }
            request::SET_BACKEND_REQ_FD => self.empty(M::SetBackendReqFd)?,
            request::GET_CONFIG => {
                let (range, payload) = self.config()?;
                self.sized(payload.is_empty() || fits(payload, range))?;
                M::GetConfig(range)
            }
            request::SET_CONFIG => {
                let (range, payload) = self.config()?;
                self.sized(fits(payload, range))?;
                M::SetConfig(range, payload)
            }
            request::GET_INFLIGHT_FD => M::GetInflightFd(self.inflight()?),
            request::SET_INFLIGHT_FD => M::SetInflightFd(self.inflight()?),
            request::RESET_DEVICE => self.empty(M::ResetDevice)?,
            request::VRING_KICK => M::VringKick(self.state()?.index),
            request::GET_MAX_MEM_SLOTS => self.empty(M::GetMaxMemSlots)?,
            request::ADD_MEM_REG => M::AddMemReg(self.region()?),
            request::REM_MEM_REG => M::RemMemReg(self.region()?),
            request::SET_STATUS => {
                let number = self.number()?;
                let status = u8::try_from(number);
                M::SetStatus(status.map_err(|_| self.value(number))?)
            }
            request::GET_STATUS => self.empty(M::GetStatus)?,
            unsupported => M::Unsupported(unsupported),
        })
    }

    fn size_error(self) -> ProtocolError {
        // A longer body does not come here.
        let bytes = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        ProtocolError::Size { request: self.request, bytes }
    }

    fn sized(self, is: bool) -> Result<(), ProtocolError> {
        if is { Ok(()) } else { Err(self.size_error()) }
    }

    const fn value(self, value: u64) -> ProtocolError {
        ProtocolError::Value { request: self.request, value }
    }

    fn allow(self, value: u64, is: bool) -> Result<(), ProtocolError> {
        if is { Ok(()) } else { Err(self.value(value)) }
    }

    fn empty(self, message: FrontendMessage<'a>) -> Result<FrontendMessage<'a>, ProtocolError> {
        self.sized(self.bytes.is_empty()).map(|()| message)
    }

    /// What `parse` reads, if that is the whole body.
    fn whole<T>(
        self,
        parse: impl FnOnce(&mut NumberReader<'a>) -> Option<T>,
    ) -> Result<T, ProtocolError> {
        let mut reader = NumberReader::new(self.bytes);
        let parsed = parse(&mut reader).filter(|_| reader.rest().is_empty());
        parsed.ok_or_else(|| self.size_error())
    }

    fn number(self) -> Result<u64, ProtocolError> {
        self.whole(NumberReader::u64)
    }

    fn state(self) -> Result<VringState, ProtocolError> {
        self.whole(|reader| Some(VringState { index: reader.u32()?, number: reader.u32()? }))
    }

    fn address(self) -> Result<VringAddress, ProtocolError> {
        self.whole(|reader| {
            Some(VringAddress {
                index: reader.u32()?,
                flags: reader.u32()?,
                descriptor: reader.u64()?,
                used: reader.u64()?,
                available: reader.u64()?,
                log: reader.u64()?,
            })
        })
    }

    fn file(self) -> Result<VringFile, ProtocolError> {
        let number = self.number()?;
        let index = u8::try_from(number & !VRING_NO_DESCRIPTOR).map_err(|_| self.value(number))?;
        let has_descriptor = number & VRING_NO_DESCRIPTOR == 0;
        Ok(VringFile { index: index.into(), has_descriptor })
    }

    fn table(self) -> Result<MemoryTable<'a>, ProtocolError> {
        let mut reader = NumberReader::new(self.bytes);
        let count = reader.u32().ok_or_else(|| self.size_error())?;
        let _padding = reader.u32().ok_or_else(|| self.size_error())?;
        let regions = usize::try_from(count).unwrap_or(usize::MAX);
        self.allow(count.into(), regions <= MAX_TABLE_REGIONS)?;
        let bytes = reader.rest();
        self.sized(bytes.len() == regions.saturating_mul(REGION_BYTES))?;
        Ok(MemoryTable { bytes })
    }

    fn region(self) -> Result<MemoryRegion, ProtocolError> {
        self.whole(|reader| {
            let _padding = reader.u64()?;
            MemoryRegion::read(reader)
        })
    }

    fn log(self) -> Result<Option<LogArea>, ProtocolError> {
        if self.bytes.len() == size_of::<u64>() {
            return Ok(None);
        }
        self.whole(|reader| Some(LogArea { size: reader.u64()?, offset: reader.u64()? })).map(Some)
    }

    fn config(self) -> Result<(ConfigRange, &'a [u8]), ProtocolError> {
        let mut reader = NumberReader::new(self.bytes);
        let range = ConfigRange::read(&mut reader).ok_or_else(|| self.size_error())?;
        Ok((range, reader.rest()))
    }

    fn inflight(self) -> Result<InflightArea, ProtocolError> {
        self.whole(|reader| {
            let area = InflightArea {
                mmap_size: reader.u64()?,
                mmap_offset: reader.u64()?,
                queues: reader.u16()?,
                queue_size: reader.u16()?,
            };
            if !reader.rest().is_empty() {
                let _padding = reader.u32()?;
            }
            Some(area)
        })
    }
}

fn fits(payload: &[u8], range: ConfigRange) -> bool {
    u32::try_from(payload.len()).is_ok_and(|len| len == range.size)
}
