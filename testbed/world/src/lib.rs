//! The whole daemon in one thread, simulated from a seed: see `tests/world` and
//! `docs/adr/0007-world.md`. It contains tests only.
