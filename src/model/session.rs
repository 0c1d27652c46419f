//! Sessions: the caches of the sequences that a station works on, by name.
//!
//! A table holds at most so many sessions and so many bytes, and drops those that were not used for a while, least
//! recently used first. A session that is being worked on is never dropped. What was dropped is remembered by name for a
//! while, so that a client that appends without saying where is told that its history is gone instead of getting an
//! answer without it. Time is an argument everywhere.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use super::{Cache, kept::Kept};

/// Bytes that a session takes besides its cache, roughly.
const SESSION_OVERHEAD: usize = 512;
/// Names of dropped sessions that are remembered.
const REMEMBERED: usize = 4096;
/// UDP senders that a session remembers.
const SENDERS: usize = 8;

/// A session name that nobody else has: 128 random bits.
#[must_use]
pub fn random_name() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// How much a table may hold.
#[derive(Debug, Clone, Copy)]
pub struct SessionLimits {
    /// Sessions at once.
    pub count: usize,
    /// Bytes of all caches together.
    pub bytes: usize,
    /// Time after which an unused session is dropped.
    pub max_idle: Duration,
}

/// Why a session cannot be worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The request does not begin where the session ends (or before): it should begin at `expected`.
    Position {
        /// Positions the session holds.
        expected: usize,
    },
    /// All sessions are in use and the budget is spent.
    Budget {
        /// Bytes wanted in all.
        wanted: usize,
        /// Bytes allowed in all.
        budget: usize,
    },
    /// The session alone would be larger than all sessions together may be: waiting does not help.
    TooLarge {
        /// Bytes that the session wanted.
        wanted: usize,
        /// Bytes allowed in all.
        budget: usize,
    },
}

/// The state of one session; the lock around it is held while a request works on it.
#[derive(Debug)]
pub struct SessionState {
    /// The positions held.
    pub cache: Box<dyn Cache>,
    /// What is known of them beside the cache.
    pub kept: Kept,
    senders: Senders,
}

impl SessionState {
    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.cache.truncate(len);
        self.kept.truncate(len);
    }

    /// Memory held, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.cache.bytes() + self.kept.bytes()
    }

    /// Whether a request with this sequence from a UDP sender is older than one that already changed the session.
    #[must_use]
    pub fn is_stale(&self, sender: SocketAddr, sequence: u32) -> bool {
        self.senders.is_stale(sender, sequence)
    }

    /// Remembers that a UDP sender's request changed the session.
    pub fn changed_by(&mut self, sender: SocketAddr, sequence: u32) {
        self.senders.note(sender, sequence);
    }
}

/// The highest sequence of each UDP sender, in serial order.
#[derive(Debug, Clone, Default)]
struct Senders(Vec<(SocketAddr, u32)>);

impl Senders {
    fn is_stale(&self, sender: SocketAddr, sequence: u32) -> bool {
        self.0.iter().any(|(known, highest)| *known == sender && !is_newer(sequence, *highest))
    }

    fn note(&mut self, sender: SocketAddr, sequence: u32) {
        if let Some((_, highest)) = self.0.iter_mut().find(|(known, _)| *known == sender) {
            if is_newer(sequence, *highest) {
                *highest = sequence;
            }
            return;
        }
        if self.0.len() == SENDERS {
            self.0.remove(0);
        }
        self.0.push((sender, sequence));
    }
}

/// Serial number order of RFC 1982 for 32 bits.
pub(super) fn is_newer(a: u32, b: u32) -> bool {
    a != b && a.wrapping_sub(b) < 1 << 31
}

#[derive(Debug)]
struct Session {
    state: Mutex<SessionState>,
    bytes: AtomicUsize,
    users: AtomicUsize,
    last_used: Mutex<LastUsed>,
}

/// When a session was used last, and its place among the others.
#[derive(Debug, Clone, Copy)]
struct LastUsed {
    at: Instant,
    turn: u64,
}

/// A session that is in use; it cannot be dropped from its table until this value goes.
#[derive(Debug)]
pub struct SessionGuard {
    session: Arc<Session>,
}

impl SessionGuard {
    /// Waits for the session's previous request and locks its state.
    pub fn lock(&self) -> MutexGuard<'_, SessionState> {
        lock(&self.session.state)
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        self.session.users.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug, Default)]
struct Table {
    sessions: HashMap<Arc<str>, Arc<Session>>,
    /// Names by the turn in which they were used last: a table that is full finds its oldest at once, however many it holds.
    order: BTreeMap<u64, Arc<str>>,
    next_turn: u64,
    bytes: usize,
    dropped: HashMap<Arc<str>, Dropped>,
    dropped_order: VecDeque<Arc<str>>,
}

#[derive(Debug)]
struct Dropped {
    evicted: bool,
    senders: Senders,
}

/// What a list of sessions says of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionInfo {
    /// Its name: a secret of its client.
    pub name: Arc<str>,
    /// Positions held; `None` while a request works on it.
    pub positions: Option<usize>,
    /// Memory held, in bytes.
    pub bytes: usize,
    /// Time since its last request began.
    pub idle: Duration,
}

/// All sessions of a station.
#[derive(Debug)]
pub struct SessionTable {
    limits: SessionLimits,
    table: Mutex<Table>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic inside a backend leaves a cache that its caller truncates on the next request.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SessionTable {
    /// An empty table.
    #[must_use]
    pub fn new(limits: SessionLimits) -> Self {
        Self { limits, table: Mutex::default() }
    }

    /// Takes a session into use for a request that begins at `pos` (`None`: where the session ends), making it with
    /// `new_cache` if it begins a new one.
    ///
    /// # Errors
    /// [`Refused::Position`] if an unknown session is asked to go on, [`Refused::Budget`] if there is no room for one
    /// more.
    pub fn open(
        &self,
        name: &str,
        pos: Option<usize>,
        now: Instant,
        new_cache: impl FnOnce() -> Box<dyn Cache>,
    ) -> Result<SessionGuard, Refused> {
        let mut table = lock(&self.table);
        if let Some(session) = table.sessions.get(name).map(Arc::clone) {
            session.users.fetch_add(1, Ordering::AcqRel);
            let turn = lock(&session.last_used).turn;
            let place = table.order.remove(&turn).unwrap_or_else(|| name.into());
            *lock(&session.last_used) = LastUsed { at: now, turn: table.take_turn(place) };
            return Ok(SessionGuard { session });
        }
        let goes_on = match pos {
            Some(pos) => pos > 0,
            None => table.dropped.get(name).is_some_and(|dropped| dropped.evicted),
        };
        if goes_on {
            return Err(Refused::Position { expected: 0 });
        }
        if SESSION_OVERHEAD > self.limits.bytes {
            return Err(Refused::TooLarge { wanted: SESSION_OVERHEAD, budget: self.limits.bytes });
        }
        if table.sessions.len() >= self.limits.count {
            let Some(oldest) = table.idle().next().map(|(name, _)| name) else {
                return Err(Refused::Budget { wanted: self.limits.count + 1, budget: self.limits.count });
            };
            table.evict(&oldest);
        }
        table.make_room(SESSION_OVERHEAD, self.limits.bytes)?;
        let senders = table.dropped.remove(name).map(|dropped| dropped.senders).unwrap_or_default();
        let name: Arc<str> = name.into();
        let turn = table.take_turn(Arc::clone(&name));
        let session = Arc::new(Session {
            state: Mutex::new(SessionState { cache: new_cache(), kept: Kept::default(), senders }),
            bytes: AtomicUsize::new(SESSION_OVERHEAD),
            users: AtomicUsize::new(1),
            last_used: Mutex::new(LastUsed { at: now, turn }),
        });
        table.bytes += SESSION_OVERHEAD;
        table.sessions.insert(name, Arc::clone(&session));
        Ok(SessionGuard { session })
    }

    /// Sets bytes aside for a session that is about to grow, dropping others if it must.
    ///
    /// # Errors
    /// [`Refused::TooLarge`] if it would not fit an empty table, [`Refused::Budget`] if the sessions in use leave too
    /// little; nothing is dropped then.
    pub fn reserve(&self, guard: &SessionGuard, additional: usize) -> Result<(), Refused> {
        let mut table = lock(&self.table);
        let wanted = guard.session.bytes.load(Ordering::Acquire).saturating_add(additional);
        if wanted > self.limits.bytes {
            return Err(Refused::TooLarge { wanted, budget: self.limits.bytes });
        }
        table.make_room(additional, self.limits.bytes)?;
        if table.holds(guard) {
            table.bytes += additional;
        }
        guard.session.bytes.fetch_add(additional, Ordering::AcqRel);
        Ok(())
    }

    /// Replaces what was set aside by what a session's state really takes now.
    pub fn settle(&self, guard: &SessionGuard, state_bytes: usize) {
        let mut table = lock(&self.table);
        let bytes = SESSION_OVERHEAD + state_bytes;
        let before = guard.session.bytes.swap(bytes, Ordering::AcqRel);
        // A session that was reset meanwhile took its bytes along; what is still done with it must not count again.
        if table.holds(guard) {
            table.bytes = (table.bytes + bytes).saturating_sub(before);
        }
    }

    /// Whether a session with this name is held.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        lock(&self.table).sessions.contains_key(name)
    }

    /// Drops a session on its client's word. A UDP sender's sequence is kept, so that a late copy of an older request is
    /// still recognised; the return value is false if this request itself is such a copy.
    pub fn reset(&self, name: &str, by: Option<(SocketAddr, u32)>) -> bool {
        let held = lock(&self.table).sessions.get(name).map(Arc::clone);
        // The state is locked without the table: whoever works on the session keeps only this caller waiting.
        let held = held.map(|session| lock(&session.state).senders.clone());
        let mut table = lock(&self.table);
        let mut senders =
            held.or_else(|| table.dropped.get(name).map(|dropped| dropped.senders.clone())).unwrap_or_default();
        if let Some((sender, sequence)) = by {
            if senders.is_stale(sender, sequence) {
                return false;
            }
            senders.note(sender, sequence);
        }
        table.drop_session(name, Dropped { evicted: false, senders });
        true
    }

    /// Drops the sessions that were not used for [`SessionLimits::max_idle`]; returns how many.
    pub fn expire(&self, now: Instant) -> usize {
        let mut table = lock(&self.table);
        let is_old =
            |session: &Session| now.saturating_duration_since(lock(&session.last_used).at) >= self.limits.max_idle;
        let expired: Vec<Arc<str>> =
            table.idle().take_while(|(_, session)| is_old(session)).map(|(name, _)| name).collect();
        for name in &expired {
            table.evict(name);
        }
        expired.len()
    }

    /// All sessions, the one used last first. Waits for no request.
    #[must_use]
    pub fn list(&self, now: Instant) -> Vec<SessionInfo> {
        let sessions: Vec<(Arc<str>, Arc<Session>)> =
            lock(&self.table).sessions.iter().map(|(name, held)| (Arc::clone(name), Arc::clone(held))).collect();
        let info = |(name, session): (Arc<str>, Arc<Session>)| SessionInfo {
            name,
            positions: session.state.try_lock().ok().map(|state| state.cache.len()),
            bytes: session.bytes.load(Ordering::Acquire),
            idle: now.saturating_duration_since(lock(&session.last_used).at),
        };
        let mut list: Vec<SessionInfo> = sessions.into_iter().map(info).collect();
        list.sort_by_key(|session| session.idle);
        list
    }

    /// Sessions held, and their bytes.
    #[must_use]
    pub fn usage(&self) -> (usize, usize) {
        let table = lock(&self.table);
        (table.sessions.len(), table.bytes)
    }
}

impl Table {
    /// A new last place in the order.
    fn take_turn(&mut self, name: Arc<str>) -> u64 {
        let turn = self.next_turn;
        self.next_turn += 1;
        self.order.insert(turn, name);
        turn
    }

    /// Whether a session in use is still in this table under its name.
    fn holds(&self, guard: &SessionGuard) -> bool {
        let turn = lock(&guard.session.last_used).turn;
        let held = self.order.get(&turn).and_then(|name| self.sessions.get(name));
        held.is_some_and(|session| Arc::ptr_eq(session, &guard.session))
    }

    /// Sessions that are not in use, least recently used first.
    fn idle(&self) -> impl Iterator<Item = (Arc<str>, &Session)> {
        self.order
            .values()
            .filter_map(|name| Some((Arc::clone(name), &**self.sessions.get(name)?)))
            .filter(|(_, session)| session.users.load(Ordering::Acquire) == 0)
    }

    /// Drops the least recently used sessions that are not in use, or none if that is not enough.
    fn make_room(&mut self, additional: usize, budget: usize) -> Result<(), Refused> {
        let wanted = self.bytes.saturating_add(additional);
        let mut missing = wanted.saturating_sub(budget);
        if missing == 0 {
            return Ok(());
        }
        let mut oldest = Vec::new();
        for (name, session) in self.idle() {
            missing = missing.saturating_sub(session.bytes.load(Ordering::Acquire));
            oldest.push(name);
            if missing == 0 {
                break;
            }
        }
        if missing > 0 {
            return Err(Refused::Budget { wanted, budget });
        }
        for name in oldest {
            self.evict(&name);
        }
        Ok(())
    }

    fn evict(&mut self, name: &str) {
        let Some(session) = self.sessions.get(name) else { return };
        let senders = lock(&session.state).senders.clone();
        self.drop_session(name, Dropped { evicted: true, senders });
    }

    fn drop_session(&mut self, name: &str, dropped: Dropped) {
        if let Some(session) = self.sessions.remove(name) {
            self.bytes = self.bytes.saturating_sub(session.bytes.load(Ordering::Acquire));
            self.order.remove(&lock(&session.last_used).turn);
        }
        if self.dropped.capacity() == 0 {
            // Twice what it holds: names come and go, and the table then never has to be made anew for that.
            self.dropped.reserve(2 * REMEMBERED);
        }
        let name: Arc<str> = name.into();
        if self.dropped.insert(Arc::clone(&name), dropped).is_none() {
            self.dropped_order.push_back(name);
        }
        // A name that was used again left its place in the order behind.
        while self.dropped_order.len() > REMEMBERED {
            if let Some(oldest) = self.dropped_order.pop_front() {
                self.dropped.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(usize);

    impl Cache for Fake {
        fn len(&self) -> usize {
            self.0
        }
        fn truncate(&mut self, len: usize) {
            self.0 = self.0.min(len);
        }
        fn bytes(&self) -> usize {
            self.0 * 100
        }
    }

    fn table(count: usize, bytes: usize) -> SessionTable {
        SessionTable::new(SessionLimits { count, bytes, max_idle: Duration::from_secs(60) })
    }

    fn open(table: &SessionTable, name: &str, pos: Option<usize>, now: Instant) -> Result<SessionGuard, Refused> {
        table.open(name, pos, now, || Box::new(Fake(0)))
    }

    #[test]
    fn unknown_sessions_begin_at_zero_only() {
        let (table, now) = (table(4, 1 << 20), Instant::now());
        assert_eq!(open(&table, "a", Some(3), now).unwrap_err(), Refused::Position { expected: 0 });
        assert!(open(&table, "a", Some(0), now).is_ok());
        assert!(open(&table, "b", None, now).is_ok());
        assert_eq!(table.usage(), (2, 2 * SESSION_OVERHEAD));
    }

    #[test]
    fn the_least_recently_used_idle_session_goes_first() {
        let (table, start) = (table(2, 1 << 20), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        drop(open(&table, "a", Some(0), at(1)).unwrap());
        drop(open(&table, "b", Some(0), at(2)).unwrap());
        drop(open(&table, "a", None, at(3)).unwrap());
        let held = open(&table, "c", Some(0), at(4)).unwrap();
        assert!(table.contains("a") && !table.contains("b"));
        let also_held = open(&table, "a", None, at(5)).unwrap();
        assert!(matches!(open(&table, "d", Some(0), at(6)), Err(Refused::Budget { .. })));
        drop((held, also_held));
        assert!(open(&table, "d", Some(0), at(7)).is_ok());
        assert!(!table.contains("c"));
    }

    #[test]
    fn an_evicted_session_is_told_so_when_it_appends() {
        let (table, now) = (table(1, 1 << 20), Instant::now());
        drop(open(&table, "a", Some(0), now).unwrap());
        drop(open(&table, "b", Some(0), now).unwrap());
        assert_eq!(open(&table, "a", None, now).unwrap_err(), Refused::Position { expected: 0 });
        assert!(open(&table, "a", Some(0), now).is_ok());
        // A client's own reset is no loss: appending begins anew.
        assert!(table.reset("a", None));
        assert!(open(&table, "a", None, now).is_ok());
    }

    #[test]
    fn a_list_waits_for_no_request() {
        let (table, start) = (table(4, 1 << 20), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let first = open(&table, "a", Some(0), at(1)).unwrap();
        table.settle(&first, 4000);
        let second = open(&table, "b", Some(0), at(2)).unwrap();
        let working = second.lock();
        let row = |name: &str, positions, state_bytes, idle| SessionInfo {
            name: name.into(),
            positions,
            bytes: SESSION_OVERHEAD + state_bytes,
            idle: Duration::from_secs(idle),
        };
        assert_eq!(table.list(at(5)), [row("b", None, 0, 3), row("a", Some(0), 4000, 4)]);
        drop(working);
    }

    #[test]
    fn bytes_are_set_aside_settled_and_bounded() {
        let (table, start) = (table(9, 10_000), Instant::now());
        let first = open(&table, "a", Some(0), start).unwrap();
        table.reserve(&first, 5000).unwrap();
        assert_eq!(table.usage().1, SESSION_OVERHEAD + 5000);
        table.settle(&first, 4000);
        assert_eq!(table.usage().1, SESSION_OVERHEAD + 4000);
        let second = open(&table, "b", Some(0), start + Duration::from_secs(1)).unwrap();
        assert!(matches!(table.reserve(&second, 6000), Err(Refused::Budget { budget: 10_000, .. })));
        // What can never fit is told apart from what does not fit now, and costs nobody else anything.
        let wanted = SESSION_OVERHEAD + 9900;
        assert_eq!(table.reserve(&second, 9900), Err(Refused::TooLarge { wanted, budget: 10_000 }));
        drop(first);
        table.reserve(&second, 6000).unwrap();
        assert!(!table.contains("a"));
        assert_eq!(table.usage(), (1, SESSION_OVERHEAD + 6000));
    }

    #[test]
    fn what_cannot_be_made_room_for_drops_nobody() {
        let (table, now) = (table(9, 10_000), Instant::now());
        drop(open(&table, "idle", Some(0), now).unwrap());
        let working = open(&table, "working", Some(0), now).unwrap();
        table.reserve(&working, 7000).unwrap();
        let next = open(&table, "next", Some(0), now).unwrap();
        assert!(matches!(table.reserve(&next, 5000), Err(Refused::Budget { .. })));
        assert!(matches!(table.reserve(&next, 50_000), Err(Refused::TooLarge { .. })));
        assert!(table.contains("idle"));
    }

    #[test]
    fn a_session_that_is_reset_while_in_use_leaves_no_bytes_behind() {
        let (table, now) = (table(9, 1 << 20), Instant::now());
        drop(open(&table, "other", Some(0), now).unwrap());
        let before = table.usage();
        for is_reserved_first in [false, true] {
            let guard = open(&table, "a", Some(0), now).unwrap();
            if is_reserved_first {
                table.reserve(&guard, 5000).unwrap();
            }
            assert!(table.reset("a", None));
            // Another client may take the name meanwhile.
            let again = open(&table, "a", Some(0), now).unwrap();
            table.reserve(&guard, 5000).unwrap();
            table.settle(&guard, 4000);
            assert_eq!(table.usage().1, before.1 + SESSION_OVERHEAD);
            table.settle(&again, 100);
            assert_eq!(table.usage().1, before.1 + SESSION_OVERHEAD + 100);
            assert!(table.reset("a", None));
            assert_eq!(table.usage(), before);
            assert_eq!(lock(&table.table).order.len(), 1);
        }
    }

    #[test]
    fn idle_sessions_expire_but_never_one_in_use() {
        let (table, start) = (table(9, 1 << 20), Instant::now());
        drop(open(&table, "a", Some(0), start).unwrap());
        let held = open(&table, "b", Some(0), start).unwrap();
        assert_eq!(table.expire(start + Duration::from_secs(59)), 0);
        assert_eq!(table.expire(start + Duration::from_secs(60)), 1);
        drop(held);
        assert_eq!(table.expire(start + Duration::from_secs(60)), 1);
        assert_eq!(table.usage(), (0, 0));
    }

    #[test]
    fn a_late_copy_of_an_old_request_is_recognised_even_after_a_reset() {
        let (table, now) = (table(4, 1 << 20), Instant::now());
        let (peer, other) = ("10.0.0.1:5".parse().unwrap(), "10.0.0.2:5".parse().unwrap());
        let guard = open(&table, "a", Some(0), now).unwrap();
        guard.lock().changed_by(peer, u32::MAX);
        assert!(guard.lock().is_stale(peer, u32::MAX) && guard.lock().is_stale(peer, u32::MAX - 5));
        assert!(!guard.lock().is_stale(peer, 0) && !guard.lock().is_stale(other, 3));
        drop(guard);
        assert!(table.reset("a", Some((peer, 4))));
        assert!(!table.reset("a", Some((peer, 3))));
        let guard = open(&table, "a", Some(0), now).unwrap();
        assert!(guard.lock().is_stale(peer, 2));
    }

    #[test]
    fn names_of_dropped_sessions_are_bounded() {
        let (table, now) = (table(1, 1 << 20), Instant::now());
        for n in 0..REMEMBERED + 100 {
            drop(open(&table, &n.to_string(), Some(0), now).unwrap());
        }
        let table = lock(&table.table);
        assert_eq!(table.dropped.len(), REMEMBERED);
        assert_eq!(table.dropped_order.len(), REMEMBERED);
    }
}
