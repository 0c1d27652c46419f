//! Whether a station that owes an answer is still there.
//!
//! While a request waits, everything that comes from its station counts as a sign of life. After one health interval
//! without any, HEALTH is asked, which a station answers at once however busy its model is; if nothing comes of that for
//! most of another interval, the station is given up. So it takes less than two intervals from the last sign of life.

use std::time::{Duration, Instant};

/// Probes in one interval at least, where they may be lost.
const PROBES: u32 = 5;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing before this instant.
    Wait(Instant),
    /// Ask HEALTH.
    Probe,
    /// The station is gone; nothing was heard for so long.
    Silent(Duration),
}

/// Watches over the station of one request.
#[derive(Debug)]
pub(super) struct Watch {
    interval: Duration,
    /// Since when the station owes an answer.
    since: Instant,
    /// The first and the last probe since the last sign of life.
    probes: Option<(Instant, Instant)>,
}

impl Watch {
    pub(super) const fn new(interval: Duration, since: Instant) -> Self {
        Self { interval, since, probes: None }
    }

    /// Looks at the clock. `heard` is the last sign of life; `repeat` the time after which a probe may count as lost, if
    /// it can be.
    pub(super) fn check(&mut self, now: Instant, heard: Instant, repeat: Option<Duration>) -> Verdict {
        let quiet_since = self.since.max(heard);
        self.probes = self.probes.filter(|(first, _)| *first > quiet_since);
        let Some((first, last)) = self.probes else {
            let due = quiet_since + self.interval;
            if now < due {
                return Verdict::Wait(due);
            }
            self.probes = Some((now, now));
            return Verdict::Probe;
        };
        // Counted from the probe, not from the last sign of life: this process may itself have stood still.
        let end = first + self.interval * 3 / 4;
        if now >= end {
            return Verdict::Silent(now.duration_since(quiet_since));
        }
        match repeat.map(|repeat| last + repeat.min(self.interval / PROBES)) {
            Some(due) if now >= due => {
                self.probes = Some((first, now));
                Verdict::Probe
            }
            due => Verdict::Wait(due.map_or(end, |due| due.min(end))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(4);

    #[test]
    fn a_silent_station_is_given_up_within_two_intervals() {
        let start = Instant::now();
        for repeat in [None, Some(Duration::from_millis(100)), Some(Duration::from_secs(100))] {
            let mut watch = Watch::new(INTERVAL, start);
            let (mut now, mut probes) = (start, 0);
            let silence = loop {
                match watch.check(now, start - INTERVAL, repeat) {
                    Verdict::Wait(until) => {
                        assert!(until > now);
                        now = until;
                    }
                    Verdict::Probe => probes += 1,
                    Verdict::Silent(silence) => break silence,
                }
            };
            assert!(silence >= INTERVAL * 3 / 2 && silence < INTERVAL * 2, "{silence:?}");
            assert_eq!(silence, now - start);
            match repeat {
                None => assert_eq!(probes, 1),
                Some(_) => assert!((3..=30).contains(&probes), "{probes}"),
            }
        }
    }

    #[test]
    fn any_sign_of_life_begins_a_new_interval() {
        let start = Instant::now();
        let mut watch = Watch::new(INTERVAL, start);
        let mut heard = start;
        for round in 1..100 {
            let now = start + INTERVAL * round;
            assert_eq!(watch.check(now, heard, None), Verdict::Probe, "round {round}");
            heard = now + INTERVAL / 100;
            assert_eq!(watch.check(heard, heard, None), Verdict::Wait(heard + INTERVAL));
            heard = now;
            watch = Watch { probes: None, ..watch };
        }
    }

    #[test]
    fn a_client_that_stood_still_asks_before_it_judges() {
        let start = Instant::now();
        let mut watch = Watch::new(INTERVAL, start);
        let late = start + INTERVAL * 50;
        assert_eq!(watch.check(late, start, None), Verdict::Probe);
        assert_eq!(watch.check(late, start, None), Verdict::Wait(late + INTERVAL * 3 / 4));
    }
}
