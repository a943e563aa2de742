//! Whether the file system of a path is mounted, as far as `/etc/fstab` has it.
//!
//! In an empty mount point a daemon would find no volumes and no images, and a later mount would
//! hide its new files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The longest table that is read, bytes.
const MAX_TABLE: u64 = 4 << 20;

/// The mount point of `/etc/fstab` at or above `path` at which nothing is mounted, if there is one.
/// Blocks.
pub fn unmounted_point(path: &Path) -> Option<PathBuf> {
    #[cfg(any(test, feature = "state-faults"))]
    if let Some(point) = super::faults::unmounted(path) {
        return Some(point);
    }
    let table = |path| {
        let mut text = Vec::new();
        File::open(path).ok()?.take(MAX_TABLE).read_to_end(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    };
    unmounted_of(path, &table("/etc/fstab")?, &table("/proc/self/mountinfo")?)
}

/// As [`unmounted_point`], with the contents of `/etc/fstab` and `/proc/self/mountinfo`: fstab(5),
/// proc_pid_mountinfo(5).
fn unmounted_of(path: &Path, fstab: &str, mountinfo: &str) -> Option<PathBuf> {
    let planned = fstab.lines().filter(|line| !line.trim_start().starts_with('#'));
    let planned = planned.filter_map(|line| line.split_whitespace().nth(1)).map(unescaped);
    let nearest = planned
        .filter(|point| path.starts_with(point) && *point != Path::new("/"))
        .max_by_key(|point| point.components().count())?;
    let is_mounted = mountinfo.lines().any(|line| {
        let mut fields = line.split(' ').skip(3).map(unescaped);
        let Some((root, point)) = fields.next().zip(fields.next()) else { return false };
        // A service manager binds a directory to itself, to make it writable.
        let itself = root
            .strip_prefix("/")
            .is_ok_and(|root| !root.as_os_str().is_empty() && point.ends_with(root));
        point == nearest && !itself
    });
    (!is_mounted).then_some(nearest)
}

/// A path, in which both tables write spaces and the like as octal numbers: `\040`.
fn unescaped(field: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let (mut bytes, mut rest) = (Vec::with_capacity(field.len()), field.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = code.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code.filter(|_| *first == b'\\') {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FSTAB: &str = "# /dev/sda9 /srv/state ext4 defaults 0 1\nUUID=1 / ext4 defaults 0 1\n\
                         LABEL=state\t/srv/my\\040state  xfs nofail 0 2\nUUID=2 none swap sw 0 0\n\nodd\n";
    const ROOT: &str = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n";

    #[test]
    fn a_mount_point_of_fstab_without_a_mount_is_found() {
        let path = Path::new("/srv/my state/ebbd");
        let point = Some(PathBuf::from("/srv/my state"));
        assert_eq!(unmounted_of(path, FSTAB, ROOT), point);
        let mounted = format!("{ROOT}30 22 8:2 / /srv/my\\040state rw - xfs /dev/sdb rw\n");
        assert_eq!(unmounted_of(path, FSTAB, &mounted), None);
        let bound =
            format!("{ROOT}30 22 8:1 /srv/my\\040state /srv/my\\040state rw - ext4 /dev/sda1 rw\n");
        assert_eq!(unmounted_of(path, FSTAB, &bound), point, "bound to itself");
        assert_eq!(unmounted_of(Path::new("/srv/state"), FSTAB, ROOT), None, "a comment");
        assert_eq!(unmounted_of(Path::new("/var/lib/ebbd"), FSTAB, ROOT), None, "the root only");
        assert_eq!(unmounted_of(Path::new("/srv/my stateless"), FSTAB, ROOT), None);
    }

    #[test]
    fn the_nearest_mount_point_counts() {
        let fstab = "a /srv ext4 x 0 0\nb /srv/state ext4 x 0 0\n";
        let mounted = format!("{ROOT}30 22 8:2 / /srv rw - xfs /dev/sdb rw\n");
        let path = Path::new("/srv/state");
        assert_eq!(unmounted_of(path, fstab, &mounted), Some(path.to_owned()));
        assert_eq!(unmounted_of(Path::new("/srv/other"), fstab, &mounted), None);
    }
}
