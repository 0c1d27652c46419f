//! Proof that a UDP sender is where its address says: a token that only a receiver at that address can know.
//!
//! Nothing is stored. The token is a keyed hash of the address and of the time in steps; the current and the previous
//! step are valid.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

/// How long a token is valid at least; twice that at most.
const STEP: Duration = Duration::from_secs(600);

/// Makes and checks tokens with a secret of its own.
#[derive(Debug)]
pub(crate) struct AddressTokens {
    secret: [u8; 32],
    started: Instant,
}

impl AddressTokens {
    pub(crate) fn new(started: Instant) -> Self {
        Self { secret: rand::random(), started }
    }

    /// The token for an address.
    pub(crate) fn issue(&self, address: SocketAddr, now: Instant) -> String {
        self.token(address, self.step(now))
    }

    /// Whether a token was issued to this address lately.
    pub(crate) fn verify(&self, address: SocketAddr, token: &str, now: Instant) -> bool {
        let step = self.step(now);
        // blake3::Hash compares in constant time, plain strings do not; the lengths are no secret.
        let given = blake3::hash(token.as_bytes());
        [Some(step), step.checked_sub(1)]
            .into_iter()
            .flatten()
            .any(|step| blake3::hash(self.token(address, step).as_bytes()) == given)
    }

    fn step(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_secs() / STEP.as_secs()
    }

    fn token(&self, address: SocketAddr, step: u64) -> String {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        match address.ip().to_canonical() {
            IpAddr::V4(ip) => hasher.update(&ip.octets()),
            IpAddr::V6(ip) => hasher.update(&ip.octets()),
        };
        hasher.update(&address.port().to_le_bytes()).update(&step.to_le_bytes());
        hasher.finalize().as_bytes()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_good_for_its_address_and_a_while() {
        let start = Instant::now();
        let tokens = AddressTokens::new(start);
        let (mine, other) = ("10.1.2.3:9".parse().unwrap(), "10.1.2.3:10".parse().unwrap());
        let mapped = "[::ffff:10.1.2.3]:9".parse().unwrap();
        let token = tokens.issue(mine, start);
        assert_eq!(token.len(), 32);
        assert!(tokens.verify(mine, &token, start));
        assert!(tokens.verify(mapped, &token, start));
        assert!(tokens.verify(mine, &token, start + STEP));
        assert!(!tokens.verify(mine, &token, start + STEP * 2));
        assert!(!tokens.verify(other, &token, start));
        assert!(!tokens.verify(mine, "", start));
        assert!(!AddressTokens::new(start).verify(mine, &token, start));
    }
}
