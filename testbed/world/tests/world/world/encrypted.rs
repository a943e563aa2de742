//! Encrypted volumes. Nothing that a client has written is on the disk as it is.

use super::World;
use super::site::{Site, disk_site};
use crate::disks::ENCRYPTED_FROM;
use crate::oracle::{Oracle, SECTOR};
use crate::random::Random;
use ebb_store::TestStore;
use std::sync::Arc;

use crate::daemon::Place;

pub(super) fn sites(random: &mut Random) -> Vec<Site> {
    let count = random.between(1, 3);
    let site = |number| {
        let mut site = disk_site(&format!("v{number}"), random);
        let bytes = (site.oracle.sectors() * SECTOR) as u64 + ENCRYPTED_FROM;
        site.config.place = Place::Disk(Arc::new(TestStore::new(bytes, random.next())));
        site.key = Some(random.next());
        site
    };
    (0..count).map(site).collect()
}

impl World {
    /// Looks for data of clients on the disks of encrypted volumes.
    pub(super) fn check_ciphertext(&self) -> Result<(), String> {
        for site in self.sites.iter().filter(|site| site.key.is_some()) {
            let Some(disk) = site.disk() else { continue };
            let mut content = vec![0; disk.size() as usize];
            disk.look(0, &mut content);
            if let Some(at) = content.chunks_exact(SECTOR).position(Oracle::is_written) {
                let name = &site.config.name;
                return Err(format!("sector {at} of the disk of {name} is not encrypted"));
            }
        }
        Ok(())
    }
}
