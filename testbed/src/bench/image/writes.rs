//! Writes of 4 KiB into an overlay, beside `qemu-nbd` with a qcow2 file and nbdkit's `cow` filter.
//!
//! Every server gets the same blocks in the same order: first an eighth of the disk, each block once, then the same
//! blocks in another order, again and again. No flush is among them, so that the disk is not measured.

use std::fs;
use std::os::unix::fs::MetadataExt;

use super::client::{BLOCK, Client, Load, choose};
use super::rig::{Kind, Rig, stop};
use super::{Error, log};
use crate::bench::figure::{Bar, Better, Figure};
use crate::bench::io_context;
use crate::harness::pattern::Random;

/// Figures of writes. The bars are on the peers as they are by default; those with `_4k` at the end, for information,
/// compare with nbdkit's filter with blocks of the size of the requests, which it is not by default.
pub const RATES: [&str; 5] = [
    "image_first_write_4k_qd32_iops_to_qemu_nbd",
    "image_first_write_4k_qd32_iops_to_nbdkit_cow",
    "image_first_write_4k_qd32_iops_to_nbdkit_cow_4k",
    "image_rewrite_4k_qd32_iops",
    "image_rewrite_4k_qd32_iops_to_nbdkit_cow_4k",
];
/// Figure: what the file of an overlay takes for each byte that was written.
pub const SIZE: &str = "image_delta_bytes_per_byte";

const KINDS: [Kind; 4] = [Kind::Ebbd, Kind::QemuNbd, Kind::NbdkitCow, Kind::NbdkitCow4k];

/// Rates of first writes and of rewrites.
///
/// # Errors
/// [`Error`] when a server fails, or returns other data than were written.
pub fn rates(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let (mut first, mut again) = (vec![Vec::new(); KINDS.len()], vec![Vec::new(); KINDS.len()]);
    let count = rig.blocks() / 8;
    let places = choose(rig.blocks(), count, &mut Random::new(1));
    let order = choose(count, count, &mut Random::new(2));
    let other: Vec<u32> = order.into_iter().map(|index| places[index as usize]).collect();
    // Written blocks among others.
    let verified = choose(rig.blocks(), rig.blocks() / 4, &mut Random::new(3));
    for order in rig.orders(KINDS.len()) {
        for at in order {
            let (server, export, _) = rig.overlay(KINDS[at])?;
            let mut image = rig.image();
            let mut client = Client::open(server.socket(), export)?;
            let once = client.run(&mut image, Load::single(&places, true, None))?;
            let seconds = Some(rig.options().common.seconds);
            let more = client.run(&mut image, Load::single(&other, true, seconds))?;
            client.run(&mut image, Load::single(&verified, false, None))?;
            stop(client, server)?;
            let name = KINDS[at].name();
            log(format_args!("{name}: {once:.0} first writes/s, {more:.0} rewrites/s"));
            first[at].push(once);
            again[at].push(more);
        }
    }
    let figure = |name: &str, rounds: &[Vec<f64>], peers: &[usize], bar| {
        let of = std::iter::once(&0).chain(peers).map(|at| rounds[*at].clone());
        Figure::from_rounds(name, &of.collect::<Vec<_>>(), Better::Higher, bar)
    };
    let figures = [
        figure(RATES[0], &first, &[1], Bar::AtLeastRatio(2.0)),
        figure(RATES[1], &first, &[2], Bar::AtLeastRatio(1.0)),
        figure(RATES[2], &first, &[3], Bar::None),
        figure(RATES[3], &again, &[1, 2], Bar::AtLeastRatio(1.2)),
        figure(RATES[4], &again, &[3], Bar::None),
    ];
    Ok(figures.into_iter().flatten().collect())
}

/// What a delta takes on the disk for each byte written: a sixteenth of the disk in different random blocks, flushed.
/// The allocation does not depend on time, so one run does.
///
/// # Errors
/// As [`rates`].
pub fn size(rig: &Rig<'_>) -> Result<Vec<Figure>, Error> {
    let places = choose(rig.blocks(), rig.blocks() / 16, &mut Random::new(4));
    let written = (places.len() * BLOCK) as f64;
    let allocated = |kind: Kind| {
        let (server, export, delta) = rig.overlay(kind)?;
        let mut client = Client::open(server.socket(), export)?;
        client.run(&mut rig.image(), Load::single(&places, true, None))?;
        client.flush()?;
        let delta = fs::metadata(&delta).map_err(io_context("inspecting the delta"))?;
        stop(client, server)?;
        let bytes = delta.blocks() * 512;
        log(format_args!("{}: {bytes} bytes allocated for {written} written", kind.name()));
        Ok::<f64, Error>(bytes as f64 / written)
    };
    let peer = Some(allocated(Kind::QemuNbd)?);
    let ours = allocated(Kind::Ebbd)?;
    Ok(vec![Figure { name: SIZE.into(), ours, peer, bar: Bar::AtMost(1.1) }])
}
