//! A client that knows what each block of an export holds: it keeps a number of requests in flight and verifies all data
//! that it reads.
//!
//! Invariants:
//! - Each block holds its number and its generation: 0 as the base was made, one more with each write.
//! - A run ends when all its requests were answered.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use super::Error;
use crate::bench::io_context;
use crate::harness::nbd::{self, Request, read_reply, wire};
use crate::harness::pattern::Random;

/// Bytes of a block.
pub const BLOCK: usize = BLOCK_BYTES as usize;
const BLOCK_BYTES: u32 = 4096;
/// Head of a simple reply.
const HEAD: usize = 16;
/// What one read from the socket may take: several replies.
const INPUT: usize = 256 << 10;
/// Longest time without a reply.
const SILENCE: Duration = Duration::from_secs(60);

/// What an export holds: the generation of each of its blocks.
#[derive(Debug, Clone)]
pub struct Image {
    generations: Vec<u8>,
    /// What all blocks have in common, from byte 8 on; it does not compress.
    rest: Vec<u8>,
}

impl Image {
    /// As a base is made.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        let mut random = Random::new(0x1_4a6e);
        let words = (0..BLOCK / 8).flat_map(|_| random.next().to_le_bytes());
        Self { generations: vec![0; blocks as usize], rest: words.collect() }
    }

    /// Number of its blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        u32::try_from(self.generations.len()).unwrap_or(u32::MAX)
    }

    /// Appends the content of a block.
    pub fn content(&self, block: u32, out: &mut Vec<u8>) {
        out.extend(block.to_le_bytes());
        out.extend(u32::from(self.generations[block as usize]).to_le_bytes());
        out.extend(&self.rest[8..]);
    }

    fn holds(&self, block: u32, data: &[u8]) -> bool {
        let generation = u32::from(self.generations[block as usize]);
        data[..4] == block.to_le_bytes()
            && data[4..8] == generation.to_le_bytes()
            && data[8..] == self.rest[8..]
    }

    /// The content after another write of a block.
    fn rewritten(&mut self, block: u32, out: &mut Vec<u8>) {
        let generation = &mut self.generations[block as usize];
        *generation = generation.wrapping_add(1);
        self.content(block, out);
    }
}

/// `count` different blocks of `blocks`, in random order.
#[must_use]
pub fn choose(blocks: u32, count: u32, random: &mut Random) -> Vec<u32> {
    let mut all: Vec<u32> = (0..blocks).collect();
    let mut chosen = Vec::new();
    for _ in 0..count.min(blocks) {
        let at = usize::try_from(random.below(all.len() as u64)).unwrap_or(0);
        chosen.push(all.swap_remove(at));
    }
    chosen
}

/// What a run does.
#[derive(Debug, Clone, Copy)]
pub struct Load<'a> {
    /// The first block of each request, in their order.
    pub places: &'a [u32],
    /// Blocks of a request; a write has one.
    pub blocks: u32,
    /// Requests in flight.
    pub depth: usize,
    /// Writes instead of reads.
    pub write: bool,
    /// Goes through `places` again and again for so long; `None`: once.
    pub time: Option<Duration>,
}

impl<'a> Load<'a> {
    /// 4 KiB requests, 32 in flight.
    #[must_use]
    pub fn single(places: &'a [u32], write: bool, seconds: Option<u32>) -> Self {
        let time = seconds.map(|seconds| Duration::from_secs(seconds.into()));
        Self { places, blocks: 1, depth: 32, write, time }
    }
}

/// A connection to an export.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    slowest: Duration,
}

/// Requests in flight, and the bytes between the client and the socket.
struct Flight {
    /// First block of the request with this cookie, and when it was sent.
    places: Vec<(u32, Instant)>,
    slowest: Duration,
    free: Vec<usize>,
    output: Vec<u8>,
    input: Vec<u8>,
    filled: usize,
}

impl Client {
    /// Connects to an export.
    ///
    /// # Errors
    /// [`Error`] when there is no such export.
    pub fn open(socket: &Path, export: &str) -> Result<Self, Error> {
        let stream = nbd::Client::open(socket, export)?.into_stream();
        let limit = Some(SILENCE);
        stream
            .set_read_timeout(limit)
            .and_then(|()| stream.set_write_timeout(limit))
            .map_err(io_context("limiting the time of the NBD client"))?;
        Ok(Self { stream, slowest: Duration::ZERO })
    }

    /// The longest time until a request was answered, over all runs.
    #[must_use]
    pub fn slowest(&self) -> Duration {
        self.slowest
    }

    /// Sends the requests of a load and returns how many were answered in a second.
    ///
    /// # Errors
    /// [`Error`] when a request fails or is not answered, or a read returns other data than `image` says.
    pub fn run(&mut self, image: &mut Image, load: Load<'_>) -> Result<f64, Error> {
        let mut flight = Flight {
            places: vec![(0, Instant::now()); load.depth],
            slowest: Duration::ZERO,
            free: (0..load.depth).collect(),
            output: Vec::new(),
            input: vec![0; INPUT],
            filled: 0,
        };
        let rounds = if load.time.is_some() { usize::MAX } else { 1 };
        let mut places = (0..rounds).flat_map(|_| load.places.iter().copied());
        let began = Instant::now();
        let over = || load.time.is_some_and(|time| began.elapsed() >= time);
        let mut answered = 0_u64;
        loop {
            while let Some(cookie) = flight.free.pop() {
                let Some(place) = (if over() { None } else { places.next() }) else {
                    flight.free.push(cookie);
                    break;
                };
                flight.add(cookie, place, image, load);
            }
            if flight.free.len() == load.depth {
                self.slowest = self.slowest.max(flight.slowest);
                return Ok(answered as f64 / began.elapsed().as_secs_f64());
            }
            self.stream.write_all(&flight.output).map_err(io_context("sending requests"))?;
            flight.output.clear();
            let space = &mut flight.input[flight.filled..];
            let read = self.stream.read(space).map_err(io_context("waiting for a reply"))?;
            if read == 0 {
                return Err(failed("the server closed the connection".into()));
            }
            flight.filled += read;
            answered += flight.take_replies(image, load)?;
        }
    }

    /// Makes all writes durable.
    ///
    /// # Errors
    /// [`Error`] when the server refuses.
    pub fn flush(&mut self) -> Result<(), Error> {
        let request = Request { command: wire::CMD_FLUSH, ..Request::default() };
        self.stream.write_all(&request.bytes()).map_err(io_context("sending a flush"))?;
        match read_reply(&mut self.stream)? {
            (_, 0) => Ok(()),
            (_, error) => Err(failed(format!("a flush failed with error {error}"))),
        }
    }

    /// Ends the connection.
    ///
    /// # Errors
    /// [`Error`] when the server had ended it.
    pub fn disconnect(mut self) -> Result<(), Error> {
        let request = Request { command: wire::CMD_DISC, ..Request::default() };
        self.stream.write_all(&request.bytes()).map_err(io_context("disconnecting"))
    }
}

impl Flight {
    fn add(&mut self, cookie: usize, place: u32, image: &mut Image, load: Load<'_>) {
        self.places[cookie] = (place, Instant::now());
        let request = Request {
            flags: 0,
            command: if load.write { wire::CMD_WRITE } else { wire::CMD_READ },
            cookie: cookie as u64,
            offset: u64::from(place) * BLOCK as u64,
            length: load.blocks * BLOCK_BYTES,
        };
        self.output.extend(request.bytes());
        if load.write {
            image.rewritten(place, &mut self.output);
        }
    }

    /// Takes the whole replies from the input, and returns their number.
    fn take_replies(&mut self, image: &Image, load: Load<'_>) -> Result<u64, Error> {
        let data = if load.write { 0 } else { load.blocks as usize * BLOCK };
        let (mut at, mut count) = (0, 0);
        while self.filled - at >= HEAD {
            let (cookie, error) = read_reply(&mut &self.input[at..at + HEAD])?;
            if error != 0 {
                return Err(failed(format!("a request failed with error {error}")));
            }
            if self.filled - at < HEAD + data {
                break;
            }
            let cookie = usize::try_from(cookie).unwrap_or(usize::MAX);
            let Some((place, sent)) = self.places.get(cookie).copied() else {
                return Err(failed(format!("a reply to request {cookie}, which was not sent")));
            };
            let body = &self.input[at + HEAD..at + HEAD + data];
            for (block, data) in (place..).zip(body.chunks(BLOCK)) {
                if !image.holds(block, data) {
                    let head = &data[..8];
                    return Err(failed(format!("block {block} holds other data: {head:02x?}")));
                }
            }
            self.slowest = self.slowest.max(sent.elapsed());
            self.free.push(cookie);
            (at, count) = (at + HEAD + data, count + 1);
        }
        self.input.copy_within(at..self.filled, 0);
        self.filled -= at;
        Ok(count)
    }
}

fn failed(what: String) -> Error {
    Error::Failed { program: "the NBD client".into(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_known_by_its_number_and_its_generation() {
        let mut image = Image::new(8);
        let (mut old, mut new) = (Vec::new(), Vec::new());
        image.content(3, &mut old);
        assert!(image.holds(3, &old) && !image.holds(4, &old));
        image.rewritten(3, &mut new);
        assert!(image.holds(3, &new) && !image.holds(3, &old));
        new[BLOCK - 1] ^= 1;
        assert!(!image.holds(3, &new));
    }

    #[test]
    fn chosen_blocks_are_different() {
        let mut chosen = choose(100, 60, &mut Random::new(1));
        assert_ne!(chosen[..4], [0, 1, 2, 3]);
        chosen.sort_unstable();
        chosen.dedup();
        assert_eq!(chosen.len(), 60);
        assert_eq!(choose(8, 100, &mut Random::new(1)).len(), 8);
    }
}
