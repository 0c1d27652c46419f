//! Who may connect: networks for UDP and TCP, users and groups for Unix sockets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Networks that may ask; loopback unless others are named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AllowList(Vec<IpNet>);

impl Default for AllowList {
    fn default() -> Self {
        let loopback = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);
        Self(vec![loopback.into(), Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128).into()])
    }
}

impl AllowList {
    /// The networks named, or loopback if none is.
    #[must_use]
    pub fn new(networks: Vec<IpNet>) -> Self {
        if networks.is_empty() { Self::default() } else { Self(networks) }
    }

    /// Whether an address may ask. An IPv4 address in IPv6 form is the IPv4 address.
    #[must_use]
    pub fn allows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }
}

/// Reads `ADDR/BITS`, or a single address.
///
/// # Errors
/// A text that says what was expected.
pub fn parse_network(text: &str) -> Result<IpNet, String> {
    text.parse::<IpNet>()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
        .map_err(|_| format!("{text:?} is no network such as 10.0.0.0/8 or fd00::/8"))
}

/// Users and groups that may connect to a Unix socket; everyone whom the file's mode lets in if both are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CredentialList {
    /// User ids.
    pub uids: Vec<u32>,
    /// Group ids (the primary group of the peer's process).
    pub gids: Vec<u32>,
}

impl CredentialList {
    /// Whether a process with this user and group may connect.
    #[must_use]
    pub fn allows(&self, uid: u32, gid: u32) -> bool {
        (self.uids.is_empty() && self.gids.is_empty()) || self.uids.contains(&uid) || self.gids.contains(&gid)
    }
}

/// The same peer has one form: an IPv4 address in IPv6 form becomes the IPv4 address.
#[must_use]
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_only_unless_networks_are_named() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let default = AllowList::new(Vec::new());
        assert!(default.allows(ip("127.3.2.1")) && default.allows(ip("::1")) && default.allows(ip("::ffff:127.0.0.1")));
        assert!(!default.allows(ip("10.0.0.1")) && !default.allows(ip("::2")));
        let named = AllowList::new(vec![parse_network("10.0.0.0/8").unwrap(), parse_network("fd00::1").unwrap()]);
        assert!(named.allows(ip("10.9.9.9")) && named.allows(ip("::ffff:10.0.0.1")) && named.allows(ip("fd00::1")));
        assert!(!named.allows(ip("127.0.0.1")) && !named.allows(ip("fd00::2")));
        assert!(parse_network("10.0.0.0/33").is_err() && parse_network("host").is_err());
    }

    #[test]
    fn an_empty_credential_list_leaves_it_to_the_file_mode() {
        assert!(CredentialList::default().allows(1000, 1000));
        let list = CredentialList { uids: vec![5], gids: vec![7] };
        assert!(list.allows(5, 1) && list.allows(1, 7) && !list.allows(1, 1));
        // The overflow uid of another user namespace is a user like any other: not on the list.
        assert!(!list.allows(65_534, 65_534));
    }

    #[test]
    fn mapped_addresses_have_one_form() {
        let mapped: SocketAddr = "[::ffff:10.1.2.3]:9".parse().unwrap();
        assert_eq!(canonical(mapped), "10.1.2.3:9".parse().unwrap());
    }
}
