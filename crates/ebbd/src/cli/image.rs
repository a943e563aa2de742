//! `ebbd image`: its commands and options.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use ebb_config::{BadValue, StoreUri};

/// What `ebbd image` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum ImageCommand {
    /// Print what a store is: its format, its sizes, and what is below a delta
    ///
    /// Of a delta it prints its identity (a random number, which deltas above it record), its number (which each opening for
    /// writing increases, so that deltas above it are refused from then on), the blocks it holds, its base, and the chain downward as far as the
    /// files are in the delta's folder. Of a qcow2 image it prints version, cluster size, and the name of a backing file,
    /// which is never opened.
    Info(ImageInfoArgs),
    /// Verify a delta or a qcow2 image
    ///
    /// Of a delta it verifies both slots of the header and of each page of the block map, the size
    /// of the file, and whether the base is the one that it was made above, if the base is found in
    /// the folder of the delta or given with --base. Of a qcow2 image it verifies that all entries
    /// of both levels of tables are aligned and within the file; its reference counts are not
    /// verified, see qemu-img(1). Each finding is a line: the place, what it is, and what to do.
    /// The exit status is 0 if the image is sound, 1 if it could not be checked, and 5 if it is
    /// damaged.
    Check(ImageCheckArgs),
    /// Print which parts of a store hold data
    ///
    /// Prints runs with offset and length in bytes: `data` is stored there, `zero` reads as zeroes and takes no space, and
    /// `base` is not in this delta but in a layer below. `damaged` is a part of a delta whose
    /// block map is damaged.
    Map(ImageMapArgs),
    /// Copy a disk into a raw file or another store
    ///
    /// Copies what SOURCE reads as to DEST. A file that does not exist is created, sparse: zeroes take no space. It gets
    /// its name when it is complete and stable, so that a copy that fails or is interrupted leaves nothing. A file, a
    /// device, an export or an image that holds something is overwritten with --force only. Images are created with `rbd
    /// create`.
    Import(ImageCopyArgs),
    /// Copy a disk out of a chain of deltas or any other store
    ///
    /// As import. The files of a chain are those of the delta's folder; the plain base below it is given with --base: it
    /// is recognised by samples of its content only, so that the right one has to be named.
    Export(ImageCopyArgs),
    /// Make a copy of a raw file that shares its blocks
    ///
    /// Uses the reflinks of the file system (XFS, Btrfs, bcachefs), which takes no time and no space. On other file systems
    /// it fails: there, `ebbd image import` copies, and an overlay needs no copy.
    Clone(ImageCloneArgs),
    /// Write zeroes over all of a device, an export or an image
    ///
    /// A new delta is made on such a store only if it is known to hold nothing. This makes it so: all that it holds is lost.
    /// What holds something is cleared with --force only. A device that cannot zero by itself is written from its start to its end.
    Clear(ImageClearArgs),
    /// List, add, change or remove keys of an encrypted volume that is not open
    #[command(subcommand)]
    Key(ImageKeyCommand),
}

/// What `ebbd image key` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum ImageKeyCommand {
    /// Print the key slots of a LUKS2 header
    ///
    /// Each line is a slot: its number, what derives its key, and whether ebbd can open it.
    List(ImageKeyListArgs),
    /// Add a key slot with another key
    ///
    /// Prints the number of the new slot.
    Add(ImageKeyAddArgs),
    /// Replace a key by another one
    ///
    /// Adds a slot with the new key, and then removes the one of the old key. If it is interrupted, one of the two keys opens
    /// the volume, or both do.
    Change(ImageKeyAddArgs),
    /// Remove a key slot and overwrite its key
    ///
    /// The last slot is not removed. A backup of the header still has the key: the data is safe from it only after it was
    /// encrypted again with cryptsetup reencrypt.
    Remove(ImageKeyRemoveArgs),
}

/// The options of `ebbd image key list`.
#[derive(Clone, Debug, Args)]
pub struct ImageKeyListArgs {
    /// The file or block device, as file: and its path
    #[arg(value_name = "STORE", value_parser = store)]
    pub store: StoreUri,
}

/// The options of `ebbd image key add` and `ebbd image key change`.
#[derive(Clone, Debug, Args)]
pub struct ImageKeyAddArgs {
    /// The file or block device, as file: and its path
    #[arg(value_name = "STORE", value_parser = store)]
    pub store: StoreUri,

    /// A file with a key that opens the volume
    #[arg(long, value_name = "PATH")]
    pub key_file: PathBuf,

    /// A file with the new key
    #[arg(long, value_name = "PATH")]
    pub new_key_file: PathBuf,
}

/// The options of `ebbd image key remove`.
#[derive(Clone, Debug, Args)]
pub struct ImageKeyRemoveArgs {
    /// The file or block device, as file: and its path
    #[arg(value_name = "STORE", value_parser = store)]
    pub store: StoreUri,

    /// The number of the slot
    #[arg(value_name = "SLOT")]
    pub slot: u32,
}

/// The options of `ebbd image info`.
#[derive(Clone, Debug, Args)]
pub struct ImageInfoArgs {
    /// The store, such as file:/srv/web1.delta, qcow2:/srv/golden.qcow2, nbd://server/disk or rbd:pool/image@snapshot
    #[arg(value_name = "STORE", value_parser = store)]
    pub store: StoreUri,

    /// Print JSON, sizes in bytes
    #[arg(long)]
    pub json: bool,
}

/// The options of `ebbd image check`.
#[derive(Clone, Debug, Args)]
pub struct ImageCheckArgs {
    /// The store: file: and the path of a delta, or qcow2: and that of an image
    #[arg(value_name = "STORE", value_parser = store)]
    pub store: StoreUri,

    /// What is directly below the delta, if it is not in the folder of the delta
    #[arg(long, value_name = "STORE", value_parser = store)]
    pub base: Option<StoreUri>,
}

/// The options of `ebbd image map`.
#[derive(Clone, Debug, Args)]
pub struct ImageMapArgs {
    /// The store
    #[arg(value_name = "STORE", value_parser = store)]
    pub store: StoreUri,

    /// Print JSON: a list of runs with offset, length and content
    #[arg(long)]
    pub json: bool,
}

/// The options of `ebbd image import` and `ebbd image export`.
#[derive(Clone, Debug, Args)]
pub struct ImageCopyArgs {
    /// What is copied, such as qcow2:/srv/golden.qcow2 or file:/srv/web1.delta
    #[arg(value_name = "SOURCE", value_parser = store)]
    pub source: StoreUri,

    /// Where to, such as file:/srv/copy.raw, nbd://server/disk or rbd:pool/image
    #[arg(value_name = "DEST", value_parser = store)]
    pub dest: StoreUri,

    /// What is below the delta: the plain base, and each delta that is not in the delta's folder
    #[arg(long, value_name = "STORE", value_parser = store)]
    pub base: Vec<StoreUri>,

    /// Overwrite what DEST holds
    #[arg(long)]
    pub force: bool,

    /// Copy SOURCE as it is, also if it looks like a delta or a qcow2 image: a raw disk on which a guest may have written anything
    #[arg(long, conflicts_with = "base")]
    pub raw: bool,
}

/// The options of `ebbd image clone`.
#[derive(Clone, Debug, Args)]
pub struct ImageCloneArgs {
    /// The file, as file: and its path
    #[arg(value_name = "SOURCE", value_parser = store)]
    pub source: StoreUri,

    /// The new file, on the same file system
    #[arg(value_name = "DEST", value_parser = store)]
    pub dest: StoreUri,
}

/// The options of `ebbd image clear`.
#[derive(Clone, Debug, Args)]
pub struct ImageClearArgs {
    /// The store, such as file:/dev/vg/web1, nbd://server/disk or rbd:pool/image
    #[arg(value_name = "STORE", value_parser = store)]
    pub store: StoreUri,

    /// Clear it whatever it holds
    #[arg(long)]
    pub force: bool,
}

fn store(text: &str) -> Result<StoreUri, String> {
    // The remedy for a path names the file already.
    let is_advised = text.contains(':') || text.starts_with(['/', '.']);
    text.parse().map_err(|bad: BadValue| match is_advised {
        true => bad.to_string(),
        false => format!("{bad}; for a file write `file:{text}`"),
    })
}
