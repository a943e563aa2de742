//! The owners that memory is accounted to.

use crate::block::OwnerId;
use crate::memory::{Memory, MemoryError};

/// The owners by number.
#[derive(Default)]
pub(crate) struct Owners {
    pub(crate) names: Vec<Option<String>>,
    /// Numbers without a name.
    free: Vec<u16>,
}

impl Owners {
    pub(crate) fn new(names: Vec<Option<String>>) -> Owners {
        Owners { names, free: Vec::new() }
    }
}

impl Memory {
    /// Registers an owner to account memory to.
    ///
    /// # Errors
    /// [`MemoryError::Owners`] when there are more than [`MemoryOptions::owners`].
    pub fn owner(&self, name: &str) -> Result<OwnerId, MemoryError> {
        let mut owners = self.owners.lock();
        let (name, new) = (Some(name.to_owned()), owners.names.len());
        if let Some(id) = owners.free.pop() {
            owners.names[usize::from(id)] = name;
            return Ok(OwnerId(id));
        }
        let id = u16::try_from(new).ok().filter(|&id| id < self.options.owners);
        let id = id.ok_or(MemoryError::Owners(self.options.owners))?;
        // Every worker must have gauges for the number before it is published.
        let mut workers = self.workers.lock();
        workers.owners = new + 1;
        workers.list.iter().for_each(|worker| worker.owners.make_room(new + 1));
        drop(workers);
        owners.names.push(name);
        Ok(OwnerId(id))
    }

    /// Makes an owner's number available again. Memory that is still accounted to it would appear under
    /// the next owner's name: free it first.
    pub fn release_owner(&self, owner: OwnerId) {
        let mut owners = self.owners.lock();
        if owner.0 != 0
            && let Some(name) = owners.names.get_mut(usize::from(owner.0))
            && name.take().is_some()
        {
            owners.free.push(owner.0);
        }
    }
}
