//! `ebbd volume`, `flush`, `reload` and `operation`: their commands and options.

use clap::{ArgGroup, Args, Subcommand};
use ebb_config::{Size, size_option};

/// What `ebbd volume` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum VolumeCommand {
    /// Print a table of all volumes
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Print one volume with its settings
    Show(ShowVolumeArgs),
    /// Add a volume to a running daemon
    ///
    /// Opens the store and serves the volume. Without --persist it is served until it is removed or the
    /// daemon ends; with --persist the next start serves it, too: it is written to the state
    /// directory (`state` in ebbd.toml(5)). If its store cannot be opened, it is not added.
    #[command(visible_alias = "create")]
    Add(AddArgs),
    /// Remove a volume that was added at run time
    ///
    /// Its requests in flight complete, its clients and guests are disconnected, and its dirty data is
    /// written; then it is closed. Its file or device is kept. A snapshot, or another read-only
    /// delta, is not removed while an overlay rests on its file: delete the snapshot instead. A
    /// volume of the configuration file is removed there, followed by `ebbd reload`.
    #[command(visible_aliases = ["rm", "delete"])]
    Remove(RemoveArgs),
    /// Rename a volume that was added at run time and that no client and no guest uses
    Rename(RenameArgs),
    /// Make a snapshot of an overlay while it is in use
    ///
    /// The snapshot holds what was acknowledged before, as a disk does after a power failure. It is served as the
    /// read-only volume VOLUME@NAME, from which backup programs read and above which clones can be made: `ebbd volume
    /// add CLONE file:PATH --base VOLUME@NAME --create`. It takes no space of its own; what is written from then on goes
    /// to a new file. The overlay is in a file, and at most eight deltas may be above each other, snapshots included.
    Snapshot(SnapshotArgs),
    /// Copy what is below an overlay into it, so that it no longer needs a base
    ///
    /// The volume stays in use. Blocks of zeroes are not copied. If this is cancelled or the daemon
    /// ends, what was copied stays, and the next attempt copies the rest. Afterwards the volume
    /// needs neither the base nor the snapshots below it. Of a volume that the configuration file
    /// defines, set `base = "none"` there, without `create` and `size`, and reload. The copy has no
    /// limit, and the limits of the volume do not apply to it.
    Flatten(FlattenArgs),
    /// Keep a volume that was added at run time for the next start
    ///
    /// Volumes added without --persist end with the daemon. This writes the volume, and the volumes
    /// below it that would end, to the state directory (`state` in ebbd.toml(5)). A volume that is
    /// kept already stays as it is.
    Persist(PersistArgs),
    /// Delete a snapshot, and its file
    ///
    /// What the snapshot holds and later layers do not is copied to the layer above it. The volume
    /// stays in use, and it and its other snapshots read as before. A snapshot that a client uses
    /// or that is the base of another volume is refused, and so is one that a delta in the same
    /// folder needs. A clone in another folder that is no volume at present is not known. If this
    /// is cancelled or the daemon ends, the snapshot is still there, or deleting it again removes
    /// what is left.
    DeleteSnapshot(DeleteSnapshotArgs),
    /// Write what an overlay holds into its base, and begin anew with an empty overlay
    ///
    /// The base is a raw file or a device. Both are closed meanwhile: first disconnect their
    /// clients, delete the snapshots of the volume, and flatten other overlays above the same base,
    /// which would be lost. A delta in the folder of the volume or of its base is such an overlay,
    /// also if no volume has it. If this is cancelled or the daemon ends, the volume reads as
    /// before and its base alone may be a mix of old and new data; repeat it then.
    Commit(CommitArgs),
    /// Print which parts of a volume were written since a snapshot, or between two
    ///
    /// For incremental backups: copies of a snapshot need only these parts of a later one, read from VOLUME@NAME. Each line
    /// has the offset and the length of a part in bytes, the last line the sum. NBD clients get the same as the metadata
    /// context qemu:dirty-bitmap:NAME, of VOLUME and of its later snapshots.
    Changes(ChangesArgs),
    /// Resize a volume that is in use
    ///
    /// Changes the size of a volume's file to SIZE or, without SIZE, adopts the size that its file,
    /// block device or remote export has now: extend a device or an export first, where it is. A disk
    /// of a Xen or KVM guest is resized at once; an NBD client keeps the size it received when it connected,
    /// and gets the new one when it connects again. Prints VOLUME: OLD -> NEW. The size is
    /// remembered in the state directory, if there is one, also that of a volume of the
    /// configuration file. Without one, a file that the configuration creates is not made smaller
    /// than its `size` there, which the next start would insist on.
    Resize(ResizeArgs),
    /// Change who may open a volume that was added at run time
    ///
    /// Clients and guests that may no longer open it are disconnected when their requests in flight have completed. Of a
    /// volume of the configuration file, change `allow` there, followed by `ebbd reload`.
    Allow(AllowArgs),
    /// Change the keys of an encrypted volume while it is in use
    ///
    /// For a volume that is not open, see `ebbd image key`. To exchange a key: add the new one, name it in `encryption` of the
    /// configuration, `ebbd reload` (`ebbd volume key use` for a volume that was added at run time), and remove the slot of the
    /// old one. Clients and guests stay connected.
    #[command(subcommand)]
    Key(VolumeKeyCommand),
}

/// What `ebbd volume key` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum VolumeKeyCommand {
    /// Print the key slots of a volume
    List(ShowVolumeArgs),
    /// Add a key, and print the number of its slot
    ///
    /// The daemon reads the key, as its user: no key is sent to it. Takes a second of processor time.
    Add(VolumeKeyAddArgs),
    /// Remove a key by its slot, and overwrite the slot
    ///
    /// The last key cannot be removed. A copy of the header that was made before still opens with the removed key.
    Remove(VolumeKeyRemoveArgs),
    /// Name another key with which a volume is opened that was added at run time
    ///
    /// The key must open the volume. Of a volume of the configuration file, change `encryption` there, followed by `ebbd
    /// reload`.
    Use(VolumeKeyAddArgs),
}

/// The options of `ebbd volume key add` and `use`.
#[derive(Clone, Debug, Default, Args)]
pub struct VolumeKeyAddArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// Where the key is: key-file:PATH or credential:NAME, as in `encryption` of ebbd.toml(5); the daemon reads it
    #[arg(value_name = "KEY")]
    pub key: String,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume key remove`.
#[derive(Clone, Debug, Default, Args)]
pub struct VolumeKeyRemoveArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// The number of the slot
    #[arg(value_name = "SLOT")]
    pub slot: u32,

    /// Remove it also if the configured key opens no other slot, or cannot be read: the volume may
    /// then not be opened again until another key is configured
    #[arg(long)]
    pub force: bool,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The connection to the daemon, and how to wait for it.
#[derive(Clone, Debug, Default, Args)]
pub struct ChangeArgs {
    /// Return after a second at most: a longer change continues in the daemon, and `ebbd operation`
    /// shows how it ends. Without this the command waits for the end, and shows the progress
    #[arg(long)]
    pub no_wait: bool,

    /// The default, which scripts may spell out.
    #[arg(long, hide = true, conflicts_with = "no_wait")]
    pub wait: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of commands that list.
#[derive(Clone, Debug, Default, Args)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// The options of `ebbd volume show`.
#[derive(Clone, Debug, Default, Args)]
pub struct ShowVolumeArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// Output and connection.
    #[command(flatten)]
    pub output: ListArgs,
}

/// The options of `ebbd volume add`.
#[derive(Clone, Debug, Default, Args)]
pub struct AddArgs {
    /// The export name
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The store: file:PATH, qcow2:PATH (read-only), an NBD server's nbd://HOST/EXPORT, rbd:POOL/IMAGE, memory:SIZE or null:SIZE
    #[arg(value_name = "STORE")]
    pub store: String,

    /// Make it an overlay: it reads as this read-only volume, and what is written goes to its own store; or `none`: the
    /// delta was flattened, or (with --create and --size) begins empty
    #[arg(long, value_name = "VOLUME")]
    pub base: Option<String>,

    /// The size of the file to create, such as 20G; of an overlay that of the volume: if it is smaller than the base, the
    /// end of the base is cut off
    #[arg(long, value_name = "SIZE", value_parser = size_option)]
    pub size: Option<Size>,

    /// Create the file if it does not exist
    #[arg(long)]
    pub create: bool,

    /// Where the key of an encrypted volume is: key-file:PATH or credential:NAME, as in ebbd.toml(5); the daemon reads it
    #[arg(long, value_name = "KEY")]
    pub encryption: Option<String>,

    /// Let clients only read
    #[arg(long)]
    pub read_only: bool,

    /// Let several guests and clients write at the same time
    #[arg(long)]
    pub shared: bool,

    /// Let only these clients open it: psk:NAME, cn:PATTERN, uid:USER, gid:GROUP, net:NETWORK or xen:GUEST. May be given
    /// several times; see `allow` in ebbd.toml(5) [default: all clients]
    #[arg(long, value_name = "ENTRY")]
    pub allow: Vec<String>,

    /// Whether to open the file with O_DIRECT: auto, on or off
    #[arg(long, value_name = "MODE")]
    pub direct: Option<String>,

    /// The cache: none, writethrough or writeback
    #[arg(long, value_name = "MODE")]
    pub cache: Option<String>,

    /// The name of its backing device, which volumes with the same name share
    #[arg(long, value_name = "BDI")]
    pub bdi: Option<String>,

    /// The unix socket at which to serve it over vhost-user-blk, or none [default: the one in the daemon's directory,
    /// if it has one]
    #[arg(long, value_name = "PATH")]
    pub vhost_user: Option<String>,

    /// Keep it in the state directory, so that the next start serves it, too
    #[arg(long)]
    pub persist: bool,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume remove`.
#[derive(Clone, Debug, Default, Args)]
pub struct RemoveArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume snapshot`.
#[derive(Clone, Debug, Default, Args)]
pub struct SnapshotArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// The name of the snapshot: letters, digits, and . _ -
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Keep VOLUME@NAME in the state directory, so that the next start serves it, too
    #[arg(long)]
    pub persist: bool,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume flatten`.
#[derive(Clone, Debug, Default, Args)]
pub struct FlattenArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume persist`.
#[derive(Clone, Debug, Default, Args)]
pub struct PersistArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume delete-snapshot`.
#[derive(Clone, Debug, Default, Args)]
pub struct DeleteSnapshotArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// The name of the snapshot
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume commit`.
#[derive(Clone, Debug, Default, Args)]
pub struct CommitArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume changes`.
#[derive(Clone, Debug, Default, Args)]
pub struct ChangesArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// The snapshot from which on changes count
    #[arg(long, value_name = "NAME")]
    pub since: String,

    /// The later snapshot up to which they count [default: now]
    #[arg(long, value_name = "NAME")]
    pub until: Option<String>,

    /// Output and connection.
    #[command(flatten)]
    pub output: ListArgs,
}

/// The options of `ebbd volume rename`.
#[derive(Clone, Debug, Default, Args)]
pub struct RenameArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// Its new name
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume resize`.
#[derive(Clone, Debug, Default, Args)]
pub struct ResizeArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// The size, such as 20G: a multiple of 512 bytes
    #[arg(value_name = "SIZE", value_parser = size_option)]
    pub size: Option<Size>,

    /// Allow a smaller size: the data beyond the new end is lost
    #[arg(long)]
    pub shrink: bool,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd volume allow`.
#[derive(Clone, Debug, Default, Args)]
#[command(
    override_usage = "ebbd volume allow [OPTIONS] <VOLUME> <ENTRY>...\n       ebbd volume allow [OPTIONS] <VOLUME> --all|--none"
)]
#[command(group = ArgGroup::new("allowed").args(["entries", "all", "none"]).required(true))]
pub struct AllowArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: String,

    /// The clients: psk:NAME, cn:PATTERN, uid:USER, gid:GROUP, net:NETWORK or xen:GUEST, as for `allow` in ebbd.toml(5)
    #[arg(value_name = "ENTRY")]
    pub entries: Vec<String>,

    /// Let all clients open it
    #[arg(long)]
    pub all: bool,

    /// Let no client open it
    #[arg(long)]
    pub none: bool,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// The options of `ebbd flush`.
#[derive(Clone, Debug, Default, Args)]
#[command(group = ArgGroup::new("flushed").args(["volume", "all"]).required(true))]
pub struct FlushArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub volume: Option<String>,

    /// Flush all volumes
    #[arg(long)]
    pub all: bool,

    /// Output and connection.
    #[command(flatten)]
    pub change: ChangeArgs,
}

/// What `ebbd operation` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum OperationCommand {
    /// Print a table of the operations in progress, and of those that ended in the last ten minutes
    List(ListArgs),
    /// Print one operation
    Show(ShowOperationArgs),
    /// Cancel an operation, where that is safe: adding a volume while its store is being opened, waiting for a
    /// flush, and the copying of `ebbd volume flatten`, `delete-snapshot` and `commit`
    Cancel(CancelArgs),
}

/// The options of `ebbd operation show`.
#[derive(Clone, Debug, Default, Args)]
pub struct ShowOperationArgs {
    /// The number of the operation
    #[arg(value_name = "ID", value_parser = operation)]
    pub id: u64,

    /// Wait until it has ended, and show the progress
    #[arg(long)]
    pub wait: bool,

    /// Output and connection.
    #[command(flatten)]
    pub output: ListArgs,
}

/// The options of `ebbd operation cancel`.
#[derive(Clone, Debug, Default, Args)]
pub struct CancelArgs {
    /// The number of the operation
    #[arg(value_name = "ID", value_parser = operation)]
    pub id: u64,

    /// Output and connection.
    #[command(flatten)]
    pub output: ListArgs,
}

/// The number of an operation.
fn operation(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "write its number, as `ebbd operation list` has it".to_owned())
}
