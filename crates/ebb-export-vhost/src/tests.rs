//! Virtqueues against models of drivers: correct ones, hostile ones, and ones whose device dies.

#![allow(clippy::cast_possible_truncation, reason = "numbers of models are small")]

mod crashes;
mod device;
mod differential;
mod driver;
mod hostile;
mod model;
mod packed_driver;
mod refused;
mod split_driver;
mod world;
