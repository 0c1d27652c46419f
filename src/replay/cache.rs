//! The entries: tails and key-value slabs of prefixes, least recently used first out, never over the budget.
//!
//! An entry is checked when it comes in (sizes, layers, finite numbers) and holds how it was made, so that a lookup can
//! say no: another model, another mesh, a prefix that came through a basis. A mismatch is a miss, never a wrong answer.
//! What is looked up is shared, so an entry that is dropped meanwhile stays whole for whoever holds it.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aeon_proto::residual;

use super::key::{Conditions, Digest, PrefixKey};
use crate::{
    model::{LayerRange, kept::Provenance},
    telemetry::Counter,
};

/// Bytes that an entry takes beside its numbers, roughly: two map nodes, the shared block, fingerprints.
pub const ENTRY_OVERHEAD: usize = 512;

/// What entries of this station must look like.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Values of a tail.
    pub hidden_dim: usize,
    /// Layers of the station.
    pub layers: Range<u32>,
    /// Positions that a sequence can have.
    pub max_position: usize,
    /// Slab values of one position; `None` if the backend cannot take a slab.
    pub slab_per_position: Option<usize>,
    /// Fingerprint of the model's configuration.
    pub config_fp: Arc<str>,
    /// Fingerprint of the weights of the station.
    pub layers_fp: Arc<str>,
}

impl Shape {
    /// The shape for a model range.
    #[must_use]
    pub fn of(model: &dyn LayerRange) -> Self {
        let info = model.info();
        Self {
            hidden_dim: info.hidden_dim,
            layers: info.layers.clone(),
            max_position: info.max_position,
            slab_per_position: model.exported_per_position(),
            config_fp: info.config_fp.as_str().into(),
            layers_fp: info.layers_fp.as_str().into(),
        }
    }
}

/// What is to be kept of a prefix.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Capture {
    /// The station's output residual at the last position.
    pub tail: Vec<f32>,
    /// Keys and values `[layer][keys, values][position][kv_heads * head_dim]`; empty for the tail alone.
    pub slab: Vec<f32>,
    /// Digest of the prefix.
    pub prefix_digest: Option<Digest>,
    /// What all stations of the mesh hold.
    pub mesh_fp: Option<Digest>,
    /// What the prefix came through.
    pub provenance: Provenance,
}

/// A prefix that is kept.
#[derive(Debug)]
pub struct Entry {
    /// What was captured.
    pub capture: Capture,
    /// Fingerprint of the model's configuration.
    pub config_fp: Arc<str>,
    /// Fingerprint of the weights that made it.
    pub layers_fp: Arc<str>,
}

impl Entry {
    fn bytes(&self) -> usize {
        ENTRY_OVERHEAD + (self.capture.tail.capacity() + self.capture.slab.capacity()) * size_of::<f32>()
    }

    fn meets(&self, conditions: &Conditions) -> bool {
        let digests_agree = match (self.capture.prefix_digest, conditions.prefix_digest) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => true,
        };
        digests_agree
            && conditions.config_fp.as_ref().is_none_or(|config_fp| config_fp.eq_ignore_ascii_case(&self.config_fp))
            && conditions.mesh_fp.is_none_or(|mesh_fp| self.capture.mesh_fp == Some(mesh_fp))
            && conditions.accept(self.capture.provenance)
    }
}

/// The two parts of a capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The residual at the end.
    Tail,
    /// Keys and values.
    Slab,
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tail => "tail",
            Self::Slab => "slab",
        })
    }
}

/// Why a capture is not kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CaptureError {
    /// A prefix of no positions.
    #[error("prefix_len is 0, at least one position is expected")]
    EmptyPrefix,
    /// More positions than the model has.
    #[error("prefix of {prefix_len} positions, the context of this model is {context_len}")]
    PrefixTooLong {
        /// By the capture.
        prefix_len: usize,
        /// The model's limit.
        context_len: usize,
    },
    /// A capture for another station.
    #[error("capture of layers {lo}..{hi}, this station holds {}..{}", held.start, held.end)]
    Layers {
        /// First layer of the capture.
        lo: u16,
        /// One past its last layer.
        hi: u16,
        /// This station's.
        held: Range<u32>,
    },
    /// A tail of another width.
    #[error("tail of {got} values, {expected} expected")]
    TailLen {
        /// This model's width.
        expected: usize,
        /// By the capture.
        got: usize,
    },
    /// A slab that does not hold the positions of the prefix.
    #[error("slab of {got} bytes, {expected} (layers x 2 x prefix_len x kv_dim x 4) or none expected")]
    SlabLen {
        /// For this prefix.
        expected: usize,
        /// By the capture.
        got: usize,
    },
    /// A slab for a backend that remembers nothing that could be put into it.
    #[error("slab of {got} bytes: this station's backend takes none, capture the tail alone")]
    SlabNotTaken {
        /// By the capture.
        got: usize,
    },
    /// Numbers that no computation gives.
    #[error("value {index} of the {part} is NaN or infinite")]
    NonFinite {
        /// Which part.
        part: Part,
        /// Which value of it.
        index: usize,
    },
    /// An entry that would not fit an empty cache.
    #[error("entry of {len} bytes, the whole replay cache of this station has {budget}; raise max-replay-bytes")]
    TooLarge {
        /// Bytes of the entry.
        len: usize,
        /// Bytes of the cache.
        budget: usize,
    },
}

#[derive(Debug)]
struct Slot {
    entry: Arc<Entry>,
    bytes: usize,
    used: u64,
}

#[derive(Debug, Default)]
struct Slots {
    slots: HashMap<PrefixKey, Slot>,
    /// Keys by when they were used last.
    order: BTreeMap<u64, PrefixKey>,
    bytes: usize,
    clock: u64,
}

impl Slots {
    fn remove(&mut self, key: &PrefixKey) -> Option<Arc<Entry>> {
        let slot = self.slots.remove(key)?;
        self.order.remove(&slot.used);
        self.bytes -= slot.bytes;
        Some(slot.entry)
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

/// What a cache did so far.
#[derive(Debug, Default)]
pub struct ReplayCounters {
    /// Lookups with an answer.
    pub hits: Counter,
    /// Lookups without.
    pub misses: Counter,
    /// Captures kept.
    pub captures: Counter,
    /// Captures refused.
    pub refused: Counter,
    /// Entries dropped for lack of room.
    pub evictions: Counter,
}

/// The cache of one station.
#[derive(Debug)]
pub struct ReplayCache {
    shape: Shape,
    budget: usize,
    slots: Mutex<Slots>,
    /// What it did.
    pub counters: ReplayCounters,
}

impl ReplayCache {
    /// An empty cache that never holds more than `budget` bytes.
    #[must_use]
    pub fn new(shape: Shape, budget: usize) -> Self {
        Self { shape, budget, slots: Mutex::default(), counters: ReplayCounters::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What entries look like.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Slab values of a prefix; `None` if the backend takes none.
    #[must_use]
    pub fn slab_len(&self, prefix_len: u32) -> Option<usize> {
        self.shape.slab_per_position.map(|per_position| per_position.saturating_mul(prefix_len as usize))
    }

    /// Whether an entry is all that a session needs to go on behind its prefix.
    #[must_use]
    pub fn is_whole(&self, key: &PrefixKey, entry: &Entry) -> bool {
        self.slab_len(key.prefix_len) == Some(entry.capture.slab.len())
    }

    /// Looks a prefix up; `whole` asks for an entry with its slab.
    pub fn find(&self, key: &PrefixKey, conditions: &Conditions, whole: bool) -> Option<Arc<Entry>> {
        let found = {
            let mut slots = self.lock();
            let tick = slots.tick();
            let Slots { slots, order, .. } = &mut *slots;
            slots
                .get_mut(key)
                .filter(|slot| slot.entry.meets(conditions))
                .filter(|slot| !whole || self.is_whole(key, &slot.entry))
                .map(|slot| {
                    order.remove(&slot.used);
                    order.insert(tick, *key);
                    slot.used = tick;
                    Arc::clone(&slot.entry)
                })
        };
        match &found {
            Some(_) => self.counters.hits.add_one(),
            None => self.counters.misses.add_one(),
        }
        found
    }

    /// What can be said against a capture before its numbers are there.
    ///
    /// # Errors
    /// [`CaptureError::EmptyPrefix`], [`CaptureError::PrefixTooLong`], [`CaptureError::Layers`] or
    /// [`CaptureError::TooLarge`].
    pub fn check(&self, key: &PrefixKey, slab_values: usize) -> Result<(), CaptureError> {
        let result = self.check_key(key).and_then(|()| {
            let values = self.shape.hidden_dim.saturating_add(slab_values);
            self.check_len(values.saturating_mul(size_of::<f32>()).saturating_add(ENTRY_OVERHEAD))
        });
        result.inspect_err(|_| self.counters.refused.add_one())
    }

    fn check_key(&self, key: &PrefixKey) -> Result<(), CaptureError> {
        let Shape { layers, max_position, .. } = &self.shape;
        let prefix_len = key.prefix_len as usize;
        if prefix_len == 0 {
            return Err(CaptureError::EmptyPrefix);
        }
        if prefix_len > *max_position {
            return Err(CaptureError::PrefixTooLong { prefix_len, context_len: *max_position });
        }
        if u32::from(key.layer_lo) != layers.start || u32::from(key.layer_hi) != layers.end {
            return Err(CaptureError::Layers { lo: key.layer_lo, hi: key.layer_hi, held: layers.clone() });
        }
        Ok(())
    }

    fn check_len(&self, len: usize) -> Result<(), CaptureError> {
        if len > self.budget { Err(CaptureError::TooLarge { len, budget: self.budget }) } else { Ok(()) }
    }

    fn check_content(&self, key: &PrefixKey, capture: &Capture) -> Result<(), CaptureError> {
        let (expected, got) = (self.shape.hidden_dim, capture.tail.len());
        if got != expected {
            return Err(CaptureError::TailLen { expected, got });
        }
        if !capture.slab.is_empty() {
            let got = size_of_val(capture.slab.as_slice());
            let expected = self.slab_len(key.prefix_len).ok_or(CaptureError::SlabNotTaken { got })?;
            if capture.slab.len() != expected {
                return Err(CaptureError::SlabLen { expected: expected.saturating_mul(size_of::<f32>()), got });
            }
        }
        for (part, values) in [(Part::Tail, &capture.tail), (Part::Slab, &capture.slab)] {
            residual::check_finite_values(values)
                .map_err(|error| CaptureError::NonFinite { part, index: error.index })?;
        }
        Ok(())
    }

    /// Keeps a capture, in place of an earlier one of the same key; drops the least recently used ones if it must.
    ///
    /// # Errors
    /// See [`CaptureError`]; the cache is then as it was.
    pub fn insert(&self, key: PrefixKey, capture: Capture) -> Result<(), CaptureError> {
        let checked = self.check_key(&key).and_then(|()| self.check_content(&key, &capture));
        let Shape { config_fp, layers_fp, .. } = &self.shape;
        let entry = Entry { capture, config_fp: Arc::clone(config_fp), layers_fp: Arc::clone(layers_fp) };
        let bytes = entry.bytes();
        checked.and_then(|()| self.check_len(bytes)).inspect_err(|_| self.counters.refused.add_one())?;
        let entry = Arc::new(entry);
        // Large entries are given back to the system without the lock.
        let mut dropped = Vec::new();
        {
            let mut slots = self.lock();
            dropped.extend(slots.remove(&key));
            while slots.bytes.saturating_add(bytes) > self.budget {
                let Some(oldest) = slots.order.first_key_value().map(|(_, key)| *key) else { break };
                dropped.extend(slots.remove(&oldest));
                self.counters.evictions.add_one();
            }
            let used = slots.tick();
            slots.order.insert(used, key);
            slots.slots.insert(key, Slot { entry, bytes, used });
            slots.bytes += bytes;
        }
        drop(dropped);
        self.counters.captures.add_one();
        Ok(())
    }

    /// Entries held, and their bytes.
    #[must_use]
    pub fn usage(&self) -> (usize, usize) {
        let slots = self.lock();
        (slots.slots.len(), slots.bytes)
    }

    /// Bytes that it may hold.
    #[must_use]
    pub const fn budget(&self) -> usize {
        self.budget
    }
}

#[cfg(test)]
mod tests;
