//! What the control side tells the application.

use verbring_sys::{DeviceError, Status};

use crate::key::{PeerId, RemoteKey};

/// What `control` has to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A peer is connected, or is again.
    Connected {
        /// Its id: after a `reconnect`, of either side, the one that it had.
        peer: PeerId,
        /// The incarnation id of its engine.
        node: u64,
        /// Whether it connected to us.
        incoming: bool,
    },
    /// A connection is lost, or came to nothing. Its operations end in error; `reconnect`, or free its place by
    /// `disconnect`.
    Lost {
        /// The peer's id.
        peer: PeerId,
        /// Why.
        cause: DeviceError,
    },
    /// An import is ready.
    Imported {
        /// The key that `import` gave. It comes once for each connection.
        key: RemoteKey,
    },
    /// An import was refused.
    ImportFailed {
        /// The key that `import` gave.
        key: RemoteKey,
        /// Why.
        status: Status,
    },
    /// The owner closed a region or bumped its epoch: operations on it end as `StaleEpoch`.
    Revoked {
        /// The import.
        key: RemoteKey,
    },
}
