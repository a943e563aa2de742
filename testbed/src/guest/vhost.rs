//! Guests with disks over vhost-user-blk, and which QEMU and memory they have.
//!
//! The daemon maps the guest's memory, which is therefore shared: a memfd, which QEMU seals, or a file.

use super::{Guest, kernel};
use crate::{Error, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which QEMU emulates the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Qemu {
    /// The one that is installed.
    #[default]
    Installed,
    /// The one of bookworm-backports in the cache; see `testbed/install`.
    Backports,
}

/// The guest's memory.
#[derive(Debug, Default)]
enum Ram {
    #[default]
    Private,
    /// A memfd.
    Shared,
    /// A file.
    File(PathBuf),
}

/// The parts of a guest's machine that it shares with the daemon, and the emulator.
#[derive(Debug, Default)]
pub(super) struct Hardware {
    pub(super) qemu: Qemu,
    ram: Ram,
    /// Whether memory can be added at run time.
    hotplug: bool,
    pub(super) may_reset: bool,
    pub(super) boots_from_disk: bool,
    frontends: usize,
}

impl Qemu {
    /// The command without arguments of a machine.
    ///
    /// # Errors
    /// It is not in the cache.
    pub(super) fn command(self) -> Result<Command> {
        if self == Qemu::Installed {
            return Ok(Command::new("qemu-system-x86_64"));
        }
        let tree = kernel::cache().join("qemu-backports");
        if !tree.join("complete").is_file() {
            let tree = tree.display();
            return Err(Error::unexpected(format!("no QEMU in {tree}: run testbed/install")));
        }
        // Tests run in the folder of their package, QEMU in that of the guest.
        let usr = tree.join("usr").canonicalize().map_err(Error::io("find QEMU"))?;
        let mut command = Command::new(usr.join("bin/qemu-system-x86_64"));
        for data in ["share/qemu", "share/seabios"] {
            command.arg("-L").arg(usr.join(data));
        }
        Ok(command)
    }
}

impl Hardware {
    /// QEMU's options for the memory.
    pub(super) fn memory(&self, mib: u32) -> Vec<OsString> {
        let mut size = format!("{mib}M");
        if self.hotplug {
            size.push_str(",slots=4,maxmem=4G");
        }
        let mut options: Vec<OsString> = vec!["-m".into(), size.into()];
        let backend = match &self.ram {
            Ram::Private => return options,
            Ram::Shared => "memory-backend-memfd".to_owned(),
            Ram::File(path) => format!("memory-backend-file,mem-path={}", path.display()),
        };
        options.push("-object".into());
        options.push(format!("{backend},id=ram,size={mib}M,share=on").into());
        options.extend(["-machine".into(), "pc,memory-backend=ram".into()]);
        options
    }
}

impl Guest {
    /// Has this QEMU emulate the machine.
    #[must_use]
    pub fn qemu(mut self, qemu: Qemu) -> Guest {
        self.hardware.qemu = qemu;
        self
    }

    /// Adds a disk over vhost-user-blk, served at `socket`, with further options of the device, such as `num-queues=4`. QEMU
    /// connects again a second after a connection has ended, that of backports (selected before) after a tenth of a second.
    #[must_use]
    pub fn vhost_user(mut self, socket: &Path, options: &[&str]) -> Guest {
        let id = format!("frontend{}", self.hardware.frontends);
        self.hardware.frontends += 1;
        self.disks += 1;
        if matches!(self.hardware.ram, Ram::Private) {
            self.hardware.ram = Ram::Shared;
        }
        let options: String = options.iter().map(|option| format!(",{option}")).collect();
        let socket = socket.display();
        let again = match self.hardware.qemu {
            Qemu::Installed => "reconnect=1",
            Qemu::Backports => "reconnect-ms=100",
        };
        self.option("-chardev", &format!("socket,id={id},path={socket},{again}"))
            .option("-device", &format!("vhost-user-blk-pci,id=disk-{id},chardev={id}{options}"))
    }

    /// Has a file as memory, which is not sealed.
    #[must_use]
    pub fn memory_file(mut self, path: &Path) -> Guest {
        self.hardware.ram = Ram::File(path.into());
        self
    }

    /// Memory can be added and removed at run time.
    #[must_use]
    pub fn hotplug_memory(mut self) -> Guest {
        self.hardware.hotplug = true;
        self.kernel_words("memhp_default_state=online_movable")
    }

    /// A reset boots the guest again, where otherwise QEMU ends.
    #[must_use]
    pub fn may_reset(mut self) -> Guest {
        self.hardware.may_reset = true;
        self
    }

    /// Boots from the first disk, by SeaBIOS, and not Linux.
    #[must_use]
    pub fn boots_from_disk(mut self) -> Guest {
        self.hardware.boots_from_disk = true;
        self
    }

    /// Waits for a migration that QEMU's monitor begins (`migrate-incoming`), and does not boot.
    #[must_use]
    pub fn incoming(self) -> Guest {
        self.option("-incoming", "defer")
    }

    fn option(mut self, name: &str, value: &str) -> Guest {
        self.devices.push(name.into());
        self.devices.push(value.into());
        self
    }
}
