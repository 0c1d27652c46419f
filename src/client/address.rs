//! Where a station is: `uds:PATH`, `udp:ADDR:PORT` or `tcp:ADDR:PORT`.

use std::{fmt, path::PathBuf, str::FromStr};

/// The address of a station.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StationAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// `ADDR:PORT` or `NAME:PORT`, one datagram a frame.
    Udp(String),
    /// `ADDR:PORT` or `NAME:PORT`, prefixed frames.
    Tcp(String),
}

/// A text that is no station address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no station address; write uds:PATH, udp:ADDR:PORT or tcp:ADDR:PORT")]
pub struct AddressError {
    text: String,
}

impl FromStr for StationAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let wrong = || AddressError { text: text.to_owned() };
        let (carrier, rest) = text.split_once(':').ok_or_else(wrong)?;
        let has_port =
            rest.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        match carrier {
            "uds" if !rest.is_empty() => Ok(Self::Unix(rest.into())),
            "udp" if has_port => Ok(Self::Udp(rest.to_owned())),
            "tcp" if has_port => Ok(Self::Tcp(rest.to_owned())),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for StationAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "uds:{}", path.display()),
            Self::Udp(address) => write!(f, "udp:{address}"),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back_and_others_are_refused() {
        for text in ["uds:/run/aeon/flow.sock", "udp:127.0.0.1:7000", "tcp:[::1]:7001", "udp:node-2.example:9"] {
            assert_eq!(text.parse::<StationAddress>().unwrap().to_string(), text);
        }
        for text in ["", "/run/s", "uds:", "udp:127.0.0.1", "tcp:host:99999", "udp::7", "http:host:1"] {
            assert!(text.parse::<StationAddress>().is_err(), "{text}");
        }
    }
}
