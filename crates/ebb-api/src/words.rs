//! States as single words: enums whose JSON is the word.
//!
//! # Invariants
//! - A word that was sent once keeps its meaning.
//! - Reading fails for no word: one of a newer version becomes `Other`, and an absent one `Unset`.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident = $word:tt),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$of])* #[serde(rename = $word)] $variant,)*
            /// Not told.
            #[default]
            #[serde(rename = "")]
            Unset,
            /// A word of a newer version.
            #[serde(rename = "unknown", other)]
            Other,
        }

        impl $name {
            /// Returns the word, as in JSON.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                    Self::Unset => "",
                    Self::Other => "unknown",
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let words = ObjectBuilder::new().schema_type(Type::String);
                words.enum_values(Some([$($word),*])).into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                stringify!($name).into()
            }
        }
    };
}

words! {
    /// The state of an [operation](crate::OperationView).
    OperationState {
        /// It is in progress.
        Running = "running",
        /// It has succeeded.
        Done = "done",
        /// It has failed.
        Failed = "failed",
        /// It was cancelled, and what it had begun is undone.
        Cancelled = "cancelled",
    }
}

words! {
    /// The health of the daemon, or the weight of a [reason](crate::HealthReason).
    HealthState {
        /// Everything is served as configured.
        Ok = "ok",
        /// Something is worse than configured, and no volume fails requests.
        Degraded = "degraded",
        /// A volume fails requests, or is not served.
        Failing = "failing",
    }
}

words! {
    /// The role of a caller.
    CallerRole {
        /// Nothing, except to ask whether the daemon is healthy.
        None = "none",
        /// Read everything.
        View = "view",
        /// Read and change everything.
        Operate = "operate",
    }
}

words! {
    /// The state of the daemon as a whole.
    DaemonPhase {
        /// It opens its volumes and sockets for the first time.
        Starting = "starting",
        /// It was ready once, and listens.
        Serving = "serving",
        /// It completes requests and closes its volumes.
        Stopping = "stopping",
    }
}

words! {
    /// The state of a volume, computed for every surface: list, status, statistics, page and
    /// metrics.
    VolumeCondition {
        /// The store is being opened for the first time.
        Opening = "opening",
        /// Served, and the store replies.
        Serving = "serving",
        /// Served; the store fails requests, or a guest's requests fail until it is reset.
        Failing = "failing",
        /// Served, and the store does not reply: requests wait.
        Silent = "silent",
        /// Served, and the server of the store is not connected: requests wait.
        Disconnected = "disconnected",
        /// Served, and acknowledged writes may be lost.
        Lost = "lost",
        /// The store cannot be opened; ebbd tries again.
        Failed = "failed",
        /// The volume is being withdrawn.
        Closing = "closing",
    }
}

words! {
    /// Where a volume is defined.
    DefinedIn {
        /// In the configuration file or on the command line.
        Configuration = "configuration",
        /// In the state directory.
        State = "state",
        /// It was added while the daemon runs, and ends with it.
        RunTime = "run-time",
    }
}

words! {
    /// The state of the server of a remote store.
    RemoteCondition {
        /// No request has needed a connection since the store was opened.
        Idle = "idle",
        /// It is connected and replies.
        Up = "up",
        /// It is connected and does not reply.
        Silent = "silent",
        /// It is not connected: the last connection was lost, or none could be made, or requests
        /// wait for one.
        Down = "down",
    }
}

words! {
    /// The state of a Ceph cluster: a server's states, and one more.
    ClusterCondition {
        /// No image is open.
        Idle = "idle",
        /// It answers.
        Up = "up",
        /// Images are open, and it does not answer requests.
        Silent = "silent",
        /// No image is open, and the last attempt to connect has failed.
        Down = "down",
        /// It has fenced a handle (put it on its blocklist): the images on it are offline until
        /// their volumes are opened again.
        Fenced = "fenced",
    }
}

words! {
    /// The state of a frontend of vhost-user.
    FrontendState {
        /// No queue is served: the guest has not started its driver, or is paused.
        Connected = "connected",
        /// Queues are not served, since the volume has another writer.
        Waiting = "waiting",
        /// Queues are served.
        Serving = "serving",
        /// Requests in flight complete, no new ones begin, and the connection ends.
        Closing = "closing",
    }
}

words! {
    /// The content of a file that expires.
    CertificateKind {
        /// A certificate that the daemon presents.
        Certificate = "certificate",
        /// The CA that signs clients' certificates.
        Authority = "authority",
        /// The certificates that the CA has revoked.
        RevocationList = "revocation-list",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_its_word_and_a_new_word_is_read() {
        let text = serde_json::to_string(&DefinedIn::RunTime).unwrap();
        assert_eq!((&*text, DefinedIn::RunTime.as_str()), ("\"run-time\"", "run-time"));
        let read = |text: &str| serde_json::from_str::<VolumeCondition>(text).unwrap();
        assert_eq!(read("\"lost\""), VolumeCondition::Lost);
        assert_eq!(read("\"frozen\""), VolumeCondition::Other);
        assert_eq!(read("\"\""), VolumeCondition::Unset);
        assert_eq!(serde_json::to_string(&VolumeCondition::Unset).unwrap(), "\"\"");
        assert_eq!(format!("{:>5}|", OperationState::Done), " done|");
    }

    #[test]
    fn the_description_lists_the_words() {
        let schema = serde_json::to_value(CertificateKind::schema()).unwrap();
        let words = serde_json::json!(["certificate", "authority", "revocation-list"]);
        assert_eq!((&schema["type"], &schema["enum"]), (&"string".into(), &words));
    }
}
