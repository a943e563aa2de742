//! Finds what a path leads to, without following links of `/proc`: those of the broker and of other processes lead to files by no path.
//!
//! `openat2` could do that, but a unit with `RestrictSUIDSGID=` has no such call.

use std::collections::VecDeque;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// `PROC_SUPER_MAGIC` of Linux's include/uapi/linux/magic.h.
pub(crate) const PROC_MAGIC: i64 = 0x9fa0;
/// As many links as the kernel follows.
const LINKS_MAX: usize = 40;

/// Where a path leads: a folder, and a name in it.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub folder: OwnedFd,
    /// `.` for the folder itself.
    pub name: CString,
    /// The path ends with a slash.
    pub is_folder: bool,
}

fn open(folder: impl AsFd, name: &[u8], more: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(folder, name, OFlags::PATH | OFlags::CLOEXEC | more, Mode::empty())
}

/// Puts the parts of a path before `rest`, and returns whether it ends with a slash.
fn put(path: &[u8], rest: &mut VecDeque<Vec<u8>>) -> bool {
    let parts = path.split(|byte| *byte == b'/');
    for part in parts.rev().filter(|part| !part.is_empty() && *part != b".") {
        rest.push_front(part.to_vec());
    }
    path.ends_with(b"/") || path.ends_with(b"/.")
}

/// Finds where a path leads from a folder; a link at its end is followed with `follow`. What is at the end need not exist.
///
/// # Errors
/// As for opening it; [`Errno::LOOP`] for a link of `/proc`.
pub(crate) fn resolve(from: impl AsFd, path: &[u8], follow: bool) -> Result<Resolved, Errno> {
    let root = || open(CWD, b"/", OFlags::DIRECTORY);
    let mut at = match path.first() {
        None => return Err(Errno::NOENT),
        Some(b'/') => root()?,
        Some(_) => open(from, b".", OFlags::DIRECTORY)?,
    };
    let (mut rest, mut links) = (VecDeque::new(), 0);
    let mut is_folder = put(path, &mut rest);
    let name = |name: Vec<u8>| CString::new(name).map_err(|_| Errno::INVAL);
    while let Some(part) = rest.pop_front() {
        let last = rest.is_empty();
        if part == b".." {
            at = open(&at, b"..", OFlags::DIRECTORY)?;
            continue;
        }
        if last && !follow {
            return Ok(Resolved { folder: at, name: name(part)?, is_folder });
        }
        let found = match open(&at, &part, OFlags::NOFOLLOW) {
            Err(Errno::NOENT) if last => {
                return Ok(Resolved { folder: at, name: name(part)?, is_folder });
            }
            found => found?,
        };
        match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
            FileType::Symlink => {
                links += 1;
                if links > LINKS_MAX || rustix::fs::fstatfs(&found)?.f_type == PROC_MAGIC {
                    return Err(Errno::LOOP);
                }
                let target = rustix::fs::readlinkat(&found, "", Vec::new())?;
                if target.as_bytes().first() == Some(&b'/') {
                    at = root()?;
                }
                let ends = put(target.as_bytes(), &mut rest);
                is_folder |= last && ends;
            }
            _ if last => return Ok(Resolved { folder: at, name: name(part)?, is_folder }),
            FileType::Directory => at = found,
            _ => return Err(Errno::NOTDIR),
        }
    }
    Ok(Resolved { folder: at, name: c".".to_owned(), is_folder: true })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    #[test]
    fn a_path_leads_where_the_kernel_finds_it() {
        let root = tempfile::tempdir().unwrap();
        let of = |path: &str| root.path().join(path);
        fs::create_dir_all(of("a/b")).unwrap();
        fs::write(of("a/b/file"), "text").unwrap();
        symlink("b/file", of("a/relative")).unwrap();
        symlink(of("a/b"), of("absolute")).unwrap();
        symlink("relative", of("a/twice")).unwrap();
        symlink("missing", of("a/dangling")).unwrap();
        symlink("loop", of("a/loop")).unwrap();
        let read = |path: &str| {
            let found = resolve(CWD, of(path).as_os_str().as_bytes(), true)?;
            Ok::<_, Errno>(
                rustix::fs::statat(
                    &found.folder,
                    &found.name,
                    rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
                )?
                .st_ino,
            )
        };
        for path in [
            "a/b/file",
            "a/relative",
            "a/twice",
            "absolute/file",
            "a/./b//file",
            "a/b/../b/file",
            "absolute/../b/file",
            "a",
            "a/",
            "a/b/..",
            "absolute",
        ] {
            assert_eq!(read(path).unwrap(), fs::metadata(of(path)).unwrap().ino(), "{path}");
        }
        assert_eq!(read("a/loop"), Err(Errno::LOOP));
        assert_eq!(read("a/b/file/more"), Err(Errno::NOTDIR));
        assert_eq!(read("missing/more"), Err(Errno::NOENT));
        let dangling = resolve(CWD, of("a/dangling").as_os_str().as_bytes(), true).unwrap();
        assert_eq!(dangling.name.as_bytes(), b"missing");
        let link = resolve(CWD, of("a/relative").as_os_str().as_bytes(), false).unwrap();
        assert_eq!(link.name.as_bytes(), b"relative");
        assert!(resolve(CWD, b"/", true).unwrap().is_folder && resolve(CWD, b"", true).is_err());
    }

    #[test]
    fn links_of_proc_are_not_followed() {
        for path in [
            "/proc/self",
            "/proc/self/exe",
            "/proc/self/cwd/etc",
            "/dev/fd/0",
            "//proc/self/cwd",
            "/proc/thread-self/comm",
        ] {
            assert_eq!(resolve(CWD, path.as_bytes(), true).unwrap_err(), Errno::LOOP, "{path}");
        }
        assert!(resolve(CWD, b"/proc/meminfo", true).is_ok());
    }
}
