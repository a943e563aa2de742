//! The numbers of users and groups by name.

use std::ffi::CString;
use std::io;
use std::ptr::null_mut;

/// The longest entry of a user or group in the system's data that is read, bytes; a group of many members is long.
const RECORD_BYTES_MAX: usize = 1 << 22;

/// Finds users and groups by name.
pub trait NameLookup {
    /// The number of a user; `None` if there is none of this name.
    ///
    /// # Errors
    /// If that cannot be found out.
    fn user(&self, name: &str) -> io::Result<Option<u32>>;

    /// The number of a group; `None` if there is none of this name.
    ///
    /// # Errors
    /// If that cannot be found out.
    fn group(&self, name: &str) -> io::Result<Option<u32>>;
}

/// The users and groups of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemNames;

impl NameLookup for SystemNames {
    fn user(&self, name: &str) -> io::Result<Option<u32>> {
        look_up(name, |name, buffer| {
            let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
            let mut found = null_mut();
            // SAFETY: the name ends with a zero byte, and the function writes to `record`, to `found` and to at most as many
            // bytes of the buffer as it has, all of which outlive the call.
            let code = unsafe {
                libc::getpwnam_r(
                    name.as_ptr(),
                    record.as_mut_ptr(),
                    buffer.as_mut_ptr(),
                    buffer.len(),
                    &raw mut found,
                )
            };
            // SAFETY: `found` is null or points to `record`, which is filled in then.
            (code, unsafe { found.as_ref() }.map(|record| record.pw_uid))
        })
    }

    fn group(&self, name: &str) -> io::Result<Option<u32>> {
        look_up(name, |name, buffer| {
            let mut record = std::mem::MaybeUninit::<libc::group>::uninit();
            let mut found = null_mut();
            // SAFETY: as for users.
            let code = unsafe {
                libc::getgrnam_r(
                    name.as_ptr(),
                    record.as_mut_ptr(),
                    buffer.as_mut_ptr(),
                    buffer.len(),
                    &raw mut found,
                )
            };
            // SAFETY: as for users.
            (code, unsafe { found.as_ref() }.map(|record| record.gr_gid))
        })
    }
}

/// Calls a function of the C library with a buffer that is large enough.
fn look_up(
    name: &str,
    call: impl Fn(&CString, &mut [libc::c_char]) -> (libc::c_int, Option<u32>),
) -> io::Result<Option<u32>> {
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut bytes = 1 << 12;
    loop {
        match call(&name, &mut vec![0; bytes]) {
            (0, found) => return Ok(found),
            (libc::EINTR, _) => {}
            (libc::ERANGE, _) if bytes < RECORD_BYTES_MAX => bytes *= 2,
            // What the C library may return if there is no such name (getpwnam(3)).
            (libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM, _) => return Ok(None),
            (code, _) => return Err(io::Error::from_raw_os_error(code)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_the_first_user_and_group() {
        assert_eq!(SystemNames.user("root").unwrap(), Some(0));
        assert_eq!(SystemNames.group("root").unwrap(), Some(0));
        for none in ["no such user of ebbd", "", "a\0b", "\u{e4}", &"x".repeat(5000)] {
            assert_eq!(SystemNames.user(none).unwrap(), None, "{none}");
            assert_eq!(SystemNames.group(none).unwrap(), None, "{none}");
        }
    }
}
