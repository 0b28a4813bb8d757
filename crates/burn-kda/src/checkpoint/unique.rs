use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

/// A JSON object whose keys differ: readers disagree on which of two entries counts. Metadata is left out.
pub(super) struct Unique<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

struct Entries<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
    type Value = Unique<V>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique<V>, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            match entries.entry(key) {
                Entry::Vacant(entry) => drop(entry.insert(map.next_value()?)),
                Entry::Occupied(entry) => return Err(A::Error::custom(format_args!("`{}` twice", entry.key()))),
            }
        }
        Ok(Unique(entries))
    }
}
