//! [`FoundInstead`]: a volume's path no longer leads to its file.

/// The find at the path of a volume whose file was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundInstead {
    /// Nothing.
    Nothing,
    /// Another file.
    Other,
}

impl FoundInstead {
    pub(super) fn text(self) -> &'static str {
        match self {
            FoundInstead::Nothing => "there is no file",
            FoundInstead::Other => "another file is in its place",
        }
    }

    /// The remedy for an operator who wants the file back. One that was deleted is there as long as
    /// the volume has it open.
    pub(super) fn back(self) -> &'static str {
        match self {
            FoundInstead::Nothing => {
                "move it back if it was moved, or mount its file system again; if it was deleted while \
                 the volume is served, copy the disk out before the daemon ends, or the volume is changed"
            }
            FoundInstead::Other => "move it back",
        }
    }

    /// The remedy for an operator who does not want the file back.
    pub(super) fn otherwise(self) -> &'static str {
        match self {
            FoundInstead::Nothing => {
                "to give it up, remove the volume: from the configuration, and reload, or with \
                 `ebbd volume remove`"
            }
            FoundInstead::Other => {
                "to use the file that is there now, remove the volume and add it again: in the \
                 configuration, with a reload after each, or with `ebbd volume remove` and \
                 `ebbd volume add`"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_serves_volumes_of_the_configuration_and_others() {
        for found in [FoundInstead::Nothing, FoundInstead::Other] {
            let remedy = found.otherwise();
            assert!(remedy.contains("configuration"), "{remedy}");
            assert!(remedy.contains("`ebbd volume remove`"), "{remedy}");
            assert!(!remedy.contains("new"), "a record of the creation prevents that: {remedy}");
        }
    }
}
