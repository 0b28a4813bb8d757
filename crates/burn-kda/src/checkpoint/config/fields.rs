//! Typed access to a JSON object; every error names the key with the path to it.

use serde_json::{Map, Value};

use crate::checkpoint::ConfigError;

/// The largest size a model may have: products of three stay within 64 bits, lists within memory.
const LARGEST: u64 = 1 << 20;

pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub(super) fn root(value: &'a Value) -> Result<Self, ConfigError> {
        let map = value.as_object().ok_or_else(|| invalid("config.json", "an object", value))?;
        Ok(Self { map, path: String::new() })
    }

    /// The key with the path to it.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    /// None if the key is missing or null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, null or not.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| invalid(&self.key(key), expected, value))
    }

    pub(super) fn missing(&self, key: &str) -> ConfigError {
        ConfigError::Missing { key: self.key(key) }
    }

    pub(super) fn invalid(&self, key: &str, expected: &str) -> ConfigError {
        invalid(&self.key(key), expected, self.map.get(key).unwrap_or(&Value::Null))
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.typed(key, "an integer from 1 to 2^20", size)
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.optional_size(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn positive(&self, key: &str) -> Result<f64, ConfigError> {
        let positive = |value: &Value| value.as_f64().filter(|&number| number > 0.0 && number.is_finite());
        self.typed(key, "a number above 0", positive)?.ok_or_else(|| self.missing(key))
    }

    /// The bound of a sigmoid gate.
    pub(super) fn optional_bound(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let negative = |value: &Value| value.as_f64().filter(|&number| number < 0.0 && number.is_finite());
        self.typed(key, "a number below 0", negative)
    }

    pub(super) fn bound(&self, key: &str) -> Result<f64, ConfigError> {
        self.optional_bound(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn optional_flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, ConfigError> {
        self.optional_flag(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn optional_text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.typed(key, "a string", Value::as_str)
    }

    pub(super) fn text(&self, key: &str) -> Result<&'a str, ConfigError> {
        self.optional_text(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn optional_object(&self, key: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { map, path: format!("{}.", self.key(key)) }))
    }

    /// Layer numbers counted from `first`, as numbers from 0 below `layers`; sorted.
    pub(super) fn optional_layers(
        &self,
        key: &str,
        first: usize,
        layers: usize,
    ) -> Result<Option<Vec<usize>>, ConfigError> {
        let expected = format!("a list of different layers from {first} to {}", layers + first - 1);
        let index = |value: &Value| usize::try_from(value.as_u64()?).ok()?.checked_sub(first).filter(|&i| i < layers);
        self.typed(key, &expected, |value| {
            let mut list = value.as_array()?.iter().map(index).collect::<Option<Vec<_>>>()?;
            let len = list.len();
            list.sort_unstable();
            list.dedup();
            (list.len() == len).then_some(list)
        })
    }

    /// The layers whose entry in `layer_types` is `linear_attention`. Another name could be one for it.
    pub(super) fn optional_layer_types(&self, layers: usize) -> Result<Option<Vec<usize>>, ConfigError> {
        self.typed(
            "layer_types",
            &format!("a list of {layers} of linear_attention, full_attention and indexed_attention"),
            |value| {
                let linear = |kind: &Value| match kind.as_str()? {
                    "linear_attention" => Some(true),
                    "full_attention" | "indexed_attention" => Some(false),
                    _ => None,
                };
                let types = value.as_array()?.iter().map(linear).collect::<Option<Vec<_>>>()?;
                (types.len() == layers).then(|| (0..layers).filter(|&i| types[i]).collect())
            },
        )
    }
}

fn size(value: &Value) -> Option<usize> {
    let size = value.as_u64().filter(|size| (1..=LARGEST).contains(size))?;
    usize::try_from(size).ok()
}

/// Long values are cut: an error message should fit on a screen.
fn invalid(key: &str, expected: &str, got: &Value) -> ConfigError {
    let mut got = got.to_string();
    if let Some((cut, _)) = got.char_indices().nth(80) {
        got.truncate(cut);
        got.push_str("..");
    }
    ConfigError::Invalid { key: key.into(), expected: expected.into(), got }
}
