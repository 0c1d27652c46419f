//! SHARD_PUT and SHARD_GET: a bounded key-value store of JSON values. Spec: `proto/SPEC.md`, "Shards".
//!
//! A shard is a name space. All shards of a station share one bound of entries and one of bytes; a PUT past either vents
//! the oldest entries, whatever their shard, and says how many. Writing a key again makes it the youngest. Nothing is
//! stored on disk.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use aeon_proto::{
    json::{Object, Value},
    meta::Error as MetaError,
    payload::FrameWriter,
};

use super::{Context, Station, error::RequestError, hello::finish, limits::ShardLimits};

/// The longest name of a shard and the longest key, in bytes.
const MAX_NAME: usize = 256;
/// The longest value as JSON text: with the longest names, escaped, it still fits the meta of a reply.
const MAX_VALUE: usize = 60_000;
/// Bytes that an entry takes beside its texts, roughly.
const ENTRY_OVERHEAD: usize = 128;

type Name = (Box<str>, Box<str>);

#[derive(Debug)]
struct Slot {
    value: Box<str>,
    bytes: usize,
    written: u64,
}

#[derive(Debug, Default)]
struct Slots {
    slots: HashMap<Name, Slot>,
    order: BTreeMap<u64, Name>,
    bytes: usize,
    clock: u64,
}

impl Slots {
    fn remove(&mut self, name: &Name) -> bool {
        let Some(slot) = self.slots.remove(name) else { return false };
        self.order.remove(&slot.written);
        self.bytes -= slot.bytes;
        true
    }
}

/// What a PUT did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stored {
    held: usize,
    held_bytes: usize,
    vented: usize,
}

/// The shards of one station.
#[derive(Debug)]
pub(super) struct ShardStore {
    limits: ShardLimits,
    slots: Mutex<Slots>,
}

impl ShardStore {
    pub(super) fn new(limits: ShardLimits) -> Self {
        Self { limits, slots: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Entries held, and their bytes.
    pub(super) fn usage(&self) -> (usize, usize) {
        let slots = self.lock();
        (slots.slots.len(), slots.bytes)
    }

    fn put(&self, name: Name, value: String) -> Result<Stored, RequestError> {
        let bytes = ENTRY_OVERHEAD + 2 * (name.0.len() + name.1.len()) + value.len();
        if bytes > self.limits.bytes {
            return Err(RequestError::ShardEntryTooLarge { len: bytes, max: self.limits.bytes });
        }
        let mut slots = self.lock();
        slots.remove(&name);
        let mut vented = 0;
        while slots.slots.len() >= self.limits.entries || slots.bytes + bytes > self.limits.bytes {
            let Some(oldest) = slots.order.first_key_value().map(|(_, name)| name.clone()) else { break };
            slots.remove(&oldest);
            vented += 1;
        }
        slots.clock += 1;
        let written = slots.clock;
        slots.order.insert(written, name.clone());
        slots.slots.insert(name, Slot { value: value.into(), bytes, written });
        slots.bytes += bytes;
        Ok(Stored { held: slots.slots.len(), held_bytes: slots.bytes, vented })
    }

    fn get(&self, name: &Name) -> Option<Box<str>> {
        self.lock().slots.get(name).map(|slot| slot.value.clone())
    }
}

fn name(object: &Object<'_>, key: &'static str) -> Result<Box<str>, MetaError> {
    match object.get(key) {
        Some(Value::String(text)) if !text.is_empty() && text.len() <= MAX_NAME => Ok((&**text).into()),
        _ => Err(MetaError::Field { key, expected: "a string of 1 to 256 bytes" }),
    }
}

fn entry_name(object: &Object<'_>) -> Result<Name, MetaError> {
    Ok((name(object, "shard")?, name(object, "key")?))
}

/// The JSON text of a value. Numbers that are no whole ones keep their value, not their spelling.
fn write(value: &Value<'_>, out: &mut String) {
    let separate = |first: &mut bool, out: &mut String| {
        if !std::mem::take(first) {
            out.push(',');
        }
    };
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(value) => *out += &value.to_string(),
        Value::Unsigned(value) => *out += &value.to_string(),
        Value::Negative(value) => *out += &value.to_string(),
        Value::Float(value) => *out += &serde_json::Value::from(*value).to_string(),
        Value::String(text) => *out += &serde_json::Value::from(&**text).to_string(),
        Value::Array(items) => {
            let mut first = true;
            out.push('[');
            for item in items {
                separate(&mut first, out);
                write(item, out);
            }
            out.push(']');
        }
        Value::Object(object) => {
            let mut first = true;
            out.push('{');
            for (key, value) in object.iter() {
                separate(&mut first, out);
                *out += &serde_json::Value::from(key).to_string();
                out.push(':');
                write(value, out);
            }
            out.push('}');
        }
    }
}

impl Station {
    pub(super) fn shard_put(&self, meta: &str, context: &Context, out: &mut Vec<u8>) -> Result<(), RequestError> {
        let core = &*self.core;
        let object = Object::parse(meta).map_err(MetaError::from)?;
        let name = entry_name(&object)?;
        let value = object.get("value").ok_or(MetaError::Field { key: "value", expected: "a JSON value" })?;
        let mut text = String::new();
        write(value, &mut text);
        if text.len() > MAX_VALUE {
            return Err(RequestError::ShardEntryTooLarge { len: text.len(), max: MAX_VALUE });
        }
        core.check_draining()?;
        let Stored { held, held_bytes, vented } = core.shards.put(name, text)?;
        let mut frame = FrameWriter::new(out, context.stream_id, context.sequence, context.success);
        frame
            .meta()
            .unsigned("status", 200)
            .unsigned("held", held as u64)
            .unsigned("vented", vented as u64)
            .unsigned("capacity", core.shards.limits.entries as u64)
            .unsigned("held_bytes", held_bytes as u64)
            .unsigned("capacity_bytes", core.shards.limits.bytes as u64);
        finish(frame)
    }

    pub(super) fn shard_get(&self, meta: &str, context: &Context, out: &mut Vec<u8>) -> Result<(), RequestError> {
        let object = Object::parse(meta).map_err(MetaError::from)?;
        let name = entry_name(&object)?;
        let value = self.core.shards.get(&name).ok_or(RequestError::ShardKeyUnknown)?;
        let mut frame = FrameWriter::new(out, context.stream_id, context.sequence, context.success);
        frame.meta().unsigned("status", 200).string("shard", &name.0).string("key", &name.1).raw("value", &value);
        finish(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(entries: usize, bytes: usize) -> ShardStore {
        ShardStore::new(ShardLimits { entries, bytes })
    }

    fn named(key: &str) -> Name {
        ("s".into(), key.into())
    }

    #[test]
    fn the_oldest_is_vented_and_counted() {
        let store = store(3, 1 << 20);
        for key in ["a", "b", "c"] {
            assert_eq!(store.put(named(key), "1".into()).unwrap().vented, 0);
        }
        // Written again, "a" is the youngest.
        assert_eq!(store.put(named("a"), "2".into()).unwrap().held, 3);
        let stored = store.put(named("d"), "1".into()).unwrap();
        assert_eq!((stored.held, stored.vented), (3, 1));
        assert_eq!(store.get(&named("b")), None);
        assert_eq!(store.get(&named("a")).as_deref(), Some("2"));
        assert_eq!(store.get(&("t".into(), "a".into())), None);
    }

    #[test]
    fn bytes_are_bounded_too() {
        let store = store(1000, 1000);
        for n in 0..50 {
            let stored = store.put(named(&n.to_string()), "x".repeat(100)).unwrap();
            assert!(stored.held_bytes <= 1000 && stored.held <= 4);
        }
        assert_eq!(store.put(named("large"), "x".repeat(800)).unwrap().held, 1);
        let refused = store.put(named("larger"), "x".repeat(1000));
        assert!(matches!(refused, Err(RequestError::ShardEntryTooLarge { max: 1000, .. })));
        let slots = store.lock();
        assert_eq!(slots.bytes, slots.slots.values().map(|slot| slot.bytes).sum::<usize>());
    }

    #[test]
    fn values_keep_their_meaning() {
        for text in [
            r#"{"v":null}"#,
            r#"{"v":[true,false,[],{}]}"#,
            r#"{"v":{"b":-1,"a":[18446744073709551615,0.5]}}"#,
            r#"{"v":"quote \" back \\ nl \n é 𝄞"}"#,
        ] {
            let object = Object::parse(text).unwrap();
            let mut out = String::new();
            write(object.get("v").unwrap(), &mut out);
            assert_eq!(format!("{{\"v\":{out}}}"), text);
        }
        let object = Object::parse(r#"{"v":1e2}"#).unwrap();
        let mut out = String::new();
        write(object.get("v").unwrap(), &mut out);
        assert_eq!(out, "100.0");
    }
}
