//! Counts of a request (`make counts`): see [`served`] for what is measured.
pub mod served;
