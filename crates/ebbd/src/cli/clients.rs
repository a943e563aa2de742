//! The options of `ebbd client`.

use clap::{Args, Subcommand};

/// The options of `ebbd client`.
#[derive(Clone, Debug, Args)]
pub struct ClientArgs {
    /// What to do
    #[command(subcommand)]
    pub action: ClientAction,
}

/// What `ebbd client` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum ClientAction {
    /// Print who is connected: address, identity, volume, and what each has read and written
    List(ClientOptions),
    /// Print one client
    Show(OneClient),
    /// Disconnect an NBD client, or a frontend of vhost-user
    ///
    /// Its requests in flight complete first; an NBD client is disconnected after five seconds in any case. It may connect
    /// again: QEMU does so if its chardev has the option `reconnect`.
    Disconnect(OneClient),
}

/// The options of all actions.
#[derive(Clone, Debug, Default, Args)]
pub struct ClientOptions {
    /// Print JSON, sizes in bytes, times in seconds
    #[arg(long)]
    pub json: bool,

    /// The control socket of the daemon [default: $EBBD_CONTROL, or /run/ebbd/control.sock]
    #[arg(long, value_name = "PATH")]
    pub control: Option<String>,
}

/// One client, and options.
#[derive(Clone, Debug, Default, Args)]
pub struct OneClient {
    /// The client, as `ebbd client list` shows it: nbd-17, xen-3-51712 or vhost-5
    #[arg(value_name = "CLIENT")]
    pub id: String,

    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would print the text")]
    pub options: ClientOptions,
}
