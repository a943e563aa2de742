//! The numbers of all requests of the protocol, sections "Front-end message types" and "Back-end message types".

macro_rules! frontend_requests {
    ($($name:ident = $number:literal;)*) => {
        $(
            #[doc = concat!("`VHOST_USER_", stringify!($name), "`")]
            pub const $name: u32 = $number;
        )*

        /// The name of a frontend's request in the protocol, without `VHOST_USER_`; `None` if the number is unknown.
        #[must_use]
        pub const fn frontend_request_name(number: u32) -> Option<&'static str> {
            match number {
                $($number => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}

frontend_requests! {
    GET_FEATURES = 1;
    SET_FEATURES = 2;
    SET_OWNER = 3;
    RESET_OWNER = 4;
    SET_MEM_TABLE = 5;
    SET_LOG_BASE = 6;
    SET_LOG_FD = 7;
    SET_VRING_NUM = 8;
    SET_VRING_ADDR = 9;
    SET_VRING_BASE = 10;
    GET_VRING_BASE = 11;
    SET_VRING_KICK = 12;
    SET_VRING_CALL = 13;
    SET_VRING_ERR = 14;
    GET_PROTOCOL_FEATURES = 15;
    SET_PROTOCOL_FEATURES = 16;
    GET_QUEUE_NUM = 17;
    SET_VRING_ENABLE = 18;
    SEND_RARP = 19;
    NET_SET_MTU = 20;
    SET_BACKEND_REQ_FD = 21;
    IOTLB_MSG = 22;
    SET_VRING_ENDIAN = 23;
    GET_CONFIG = 24;
    SET_CONFIG = 25;
    CREATE_CRYPTO_SESSION = 26;
    CLOSE_CRYPTO_SESSION = 27;
    POSTCOPY_ADVISE = 28;
    POSTCOPY_LISTEN = 29;
    POSTCOPY_END = 30;
    GET_INFLIGHT_FD = 31;
    SET_INFLIGHT_FD = 32;
    GPU_SET_SOCKET = 33;
    RESET_DEVICE = 34;
    VRING_KICK = 35;
    GET_MAX_MEM_SLOTS = 36;
    ADD_MEM_REG = 37;
    REM_MEM_REG = 38;
    SET_STATUS = 39;
    GET_STATUS = 40;
    GET_SHARED_OBJECT = 41;
    SET_DEVICE_STATE_FD = 42;
    CHECK_DEVICE_STATE = 43;
    GET_SHMEM_CONFIG = 44;
}

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`: a request of the backend, on the socket of `SET_BACKEND_REQ_FD`.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;
