//! A Linux guest uses an exported disk: it creates a file system and files with checksums, verifies
//! them after a restart of the daemon, and trims.

use testbed::guest::Guest;
use testbed::harness::server::Setup;
use testbed::{Error, Result, Tool, check};

const MIB: u64 = 1 << 20;

/// Creates a file system with files of many sizes and their checksums.
const FILL: &str = r#"
mkfs.ext4 -q -E nodiscard /dev/vda
mkdir -p /mnt
mount -t ext4 /dev/vda /mnt
mkdir /mnt/many
for i in $(seq 1 60); do
    dd if=/dev/urandom of=/mnt/many/$i bs=1000 count=$i 2>/dev/null
done
dd if=/dev/urandom of=/mnt/big bs=64k count=320 2>/dev/null
dd if=/dev/urandom of=/mnt/synced bs=4k count=64 oflag=direct 2>/dev/null
cd /mnt
find . -type f ! -name SUMS | sort | xargs sha256sum >/tmp/SUMS
cp /tmp/SUMS SUMS
cd /
say files $(wc -l </tmp/SUMS)
say sums $(sha256sum </tmp/SUMS)
umount /mnt
e2fsck -f -n /dev/vda
"#;

/// Compares every file with its checksum, then removes the largest one and trims.
const VERIFY: &str = r#"
e2fsck -f -n /dev/vda
mount -t ext4 /dev/vda /mnt
cd /mnt
sha256sum -c SUMS >/tmp/checked || { grep -v OK /tmp/checked; exit 1; }
cd /
say files $(grep -c OK /tmp/checked)
say sums $(sha256sum </mnt/SUMS)
rm /mnt/big
sync
say trimmed $(fstrim -v /mnt)
umount /mnt
e2fsck -f -n /dev/vda
"#;

#[test]
fn files_of_a_guest_outlive_the_daemon_and_discards_free_space() -> Result {
    let mut server = Setup::new()?.image("disk", 256 * MIB)?.start()?;
    let guest = |script: &str| Guest::new(script).program("mkfs.ext4").program("e2fsck");
    let filled = guest(FILL).export(&server, "disk").ok()?;
    server.healthy()?;
    server.stop()?;
    // The image by itself is a valid file system, too.
    Tool::new("/sbin/e2fsck").args(["-f", "-n"]).arg(server.image_path("disk")).ok()?;
    let before = server.image_usage("disk")?;
    check(before >= 21 * MIB, || format!("22 MiB written, but the image uses {before} bytes"))?;

    server.restart()?;
    let verified = guest(VERIFY).export(&server, "disk").ok()?;
    for key in ["files", "sums"] {
        let (wrote, found) = (filled.answer(key)?, verified.answer(key)?);
        check(wrote == found, || format!("{key}: wrote {wrote}, found {found}"))?;
    }
    check(verified.answer("files")? == "62", || "62 files".into())?;
    server.healthy()?;
    server.stop()?;
    let after = server.image_usage("disk")?;
    check(after + 19 * MIB <= before, || {
        format!(
            "20 MiB removed and trimmed, but the image used {before} bytes before and uses {after} now"
        )
    })
}

/// The kernel's own NBD client: two connections, files, checksums, trim, disconnect.
const KERNEL_CLIENT: &str = r#"
nbd-client 10.0.2.2 PORT /dev/nbd0 -N disk -C 2 -b 512
say size $(blockdev --getsize64 /dev/nbd0)
mkfs.ext4 -q /dev/nbd0
mount -t ext4 /dev/nbd0 /mnt
dd if=/dev/urandom of=/mnt/file bs=64k count=160 2>/dev/null
sum=$(sha256sum </mnt/file)
umount /mnt
nbd-client -d /dev/nbd0
nbd-client 10.0.2.2 PORT /dev/nbd0 -N disk -b 512
mount -t ext4 /dev/nbd0 /mnt
[ "$sum" = "$(sha256sum </mnt/file)" ]
rm /mnt/file
sync
say trimmed $(fstrim -v /mnt)
umount /mnt
e2fsck -f -n /dev/nbd0
nbd-client -d /dev/nbd0
"#;

#[test]
fn the_nbd_client_of_the_kernel_works() -> Result {
    let port = free_port()?;
    let mut server = Setup::new()?
        .image("disk", 128 * MIB)?
        .arg("--listen")
        .arg(format!("tcp:127.0.0.1:{port}"))
        .start()?;
    let guest = Guest::new(KERNEL_CLIENT.replace("PORT", &port.to_string()))
        .network()
        .module("nbd")
        .program("nbd-client")
        .program("mkfs.ext4")
        .program("e2fsck");
    let outcome = guest.ok()?;
    let size = outcome.answer("size")?;
    check(size == (128 * MIB).to_string(), || format!("size {size}"))?;
    server.healthy()?;
    server.stop()?;
    Tool::new("/sbin/e2fsck").args(["-f", "-n"]).arg(server.image_path("disk")).ok()?;
    let used = server.image_usage("disk")?;
    check(used < 8 * MIB, || {
        format!("all files are removed and trimmed, but the image uses {used} bytes")
    })
}

/// A port that no process listens on now.
fn free_port() -> Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).map_err(Error::io("bind"))?;
    listener.local_addr().map(|a| a.port()).map_err(Error::io("local address"))
}
