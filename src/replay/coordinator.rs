//! The coordinator's rule: when a mesh may skip the prefill of a prompt.
//!
//! Every station is asked. Prefill is skipped only if there is a station and **all** of them have the prefix; any miss,
//! error or doubtful answer means prefill everywhere. The rule is decided on data in hand, never on a promise: an answer
//! counts as a hit only once the station has put the prefix into the session and its tail has arrived.

/// What to do with a prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision<T> {
    /// Every station has it: go on from what the last one gave.
    Skip {
        /// What the last station answered.
        last: T,
    },
    /// Run the prompt through all stations, then capture on all of them.
    Prefill,
}

/// Decides on the answers of all stations, in order; `None` is a miss.
#[must_use]
pub fn decide<T>(answers: Vec<Option<T>>) -> Decision<T> {
    let hits: Option<Vec<T>> = answers.into_iter().collect();
    match hits.and_then(|mut hits| hits.pop()) {
        Some(last) => Decision::Skip { last },
        None => Decision::Prefill,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_hit_skips() {
        assert_eq!(decide(vec![Some(7)]), Decision::Skip { last: 7 });
    }

    #[test]
    fn one_miss_prefills() {
        assert_eq!(decide::<u8>(vec![None]), Decision::Prefill);
    }

    #[test]
    fn none_asked_prefills() {
        assert_eq!(decide::<u8>(vec![]), Decision::Prefill);
    }

    proptest! {
        #[test]
        fn any_miss_prefills(before in proptest::collection::vec(any::<Option<u8>>(), 0..30), after in proptest::collection::vec(any::<Option<u8>>(), 0..30)) {
            let answers: Vec<_> = before.into_iter().chain([None]).chain(after).collect();
            prop_assert_eq!(decide(answers), Decision::Prefill);
        }

        #[test]
        fn all_hit_skips_with_the_last_answer(answers in proptest::collection::vec(any::<u8>(), 1..60)) {
            let last = answers[answers.len() - 1];
            prop_assert_eq!(decide(answers.into_iter().map(Some).collect()), Decision::Skip { last });
        }
    }
}
