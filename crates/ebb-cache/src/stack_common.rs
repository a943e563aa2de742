//! [`StackCommon`]: what outlives an exchange of a volume's layers.

use crate::abort_signal::AbortSignal;
use crate::layer_identities::LayerIdentities;
use crate::shared_reads::SharedReadCounters;

/// What all stacks of a volume have in common: requests may use the stacks of before an exchange.
#[derive(Debug, Default)]
pub(crate) struct StackCommon {
    /// Ends the requests that wait for layers which other volumes go on using.
    pub(crate) signal: AbortSignal,
    /// What reads found in the layers below the top one.
    pub(crate) reads: SharedReadCounters,
    /// What its layers were, and are going to be.
    pub(crate) identities: LayerIdentities,
}
