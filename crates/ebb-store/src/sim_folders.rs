//! The directories of a simulation (feature `sim`), which knows the names in them that are stable.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::rc::Rc;

type Sync = Rc<dyn Fn(&Path) -> io::Result<()>>;

thread_local! {
    static SYNC: RefCell<Option<Sync>> = const { RefCell::new(None) };
}

/// Sets the function that makes the names in a directory of this thread's simulation stable.
pub fn set_folder_sync(sync: Option<Sync>) {
    SYNC.set(sync);
}

/// Makes them stable; `None` without a simulation.
pub(crate) fn sync(folder: &Path) -> Option<io::Result<()>> {
    let sync = SYNC.with_borrow(Clone::clone)?;
    Some(sync(folder))
}
