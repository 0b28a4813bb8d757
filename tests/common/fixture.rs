//! Fixtures of `tests/oracle`, read only after their sha256 has been checked against the manifest.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::array::Array;

fn oracle() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle")
}

/// Names in the manifest with their sha256.
pub fn manifest() -> Vec<(String, String)> {
    let path = oracle().join("MANIFEST.sha256");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let line = |line: &str| line.split_once("  fixtures/").map(|(sum, name)| (name.to_string(), sum.to_string()));
    text.lines().map(|l| line(l).unwrap_or_else(|| panic!("not a manifest line: {l}"))).collect()
}

/// Every file below `fixtures`, with the path from there.
pub fn files() -> BTreeSet<String> {
    fn walk(folder: &Path, prefix: &str, files: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).expect("tests/oracle/fixtures") {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_str().expect("UTF-8"));
            match entry.file_type().unwrap().is_dir() {
                true => walk(&entry.path(), &format!("{name}/"), files),
                false => drop(files.insert(name)),
            }
        }
    }
    let mut all = BTreeSet::new();
    walk(&oracle().join("fixtures"), "", &mut all);
    all
}

/// A folder of fixtures whose files are all as the manifest lists them.
pub fn folder(name: &str) -> PathBuf {
    let inside: Vec<_> = files().into_iter().filter(|file| file.starts_with(&format!("{name}/"))).collect();
    assert!(!inside.is_empty(), "no fixtures in {name}");
    inside.iter().for_each(|file| drop(read(file)));
    oracle().join("fixtures").join(name)
}

/// The bytes of a fixture, if they are the ones the manifest lists.
pub fn read(file: &str) -> Vec<u8> {
    let path = oracle().join("fixtures").join(file);
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let sum: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let listed = manifest().into_iter().find(|(name, _)| name == file);
    let (_, want) = listed.unwrap_or_else(|| panic!("{file} is not in MANIFEST.sha256"));
    assert_eq!(sum, want, "{file} is not the file that MANIFEST.sha256 lists");
    bytes
}

/// A file of cases.
pub struct Fixture {
    file: String,
    bytes: Vec<u8>,
    cases: serde_json::Map<String, Value>,
}

impl Fixture {
    pub fn open(name: &str) -> Self {
        let file = format!("{name}.safetensors");
        let bytes = read(&file);
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
        let cases = &header.metadata().as_ref().expect("metadata")["cases"];
        Self { cases: serde_json::from_str(cases).expect("JSON in `cases`"), file, bytes }
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.cases.keys().map(String::as_str)
    }

    pub fn case(&self, name: &str) -> Case<'_> {
        let options = self.cases.get(name).unwrap_or_else(|| panic!("{}: no case `{name}`", self.file));
        let tensors = SafeTensors::deserialize(&self.bytes).expect("a safetensors file");
        Case { name: name.into(), options, tensors }
    }

    /// The cases named `row`, `row/..`; all for an empty `row`.
    pub fn row(&self, row: &str) -> Vec<Case<'_>> {
        let inside = |name: &&str| row.is_empty() || *name == row || name.starts_with(&format!("{row}/"));
        let cases: Vec<_> = self.names().filter(inside).map(|name| self.case(name)).collect();
        assert!(!cases.is_empty(), "{}: no case in row `{row}`", self.file);
        cases
    }
}

pub struct Case<'a> {
    pub name: String,
    options: &'a Value,
    tensors: SafeTensors<'a>,
}

impl Case<'_> {
    pub fn option(&self, key: &str) -> &Value {
        self.options.get(key).unwrap_or_else(|| panic!("{}: no option `{key}`", self.name))
    }

    pub fn text(&self, key: &str) -> &str {
        self.option(key).as_str().unwrap_or_else(|| panic!("{}: `{key}` is no text", self.name))
    }

    /// How far the published layer is from a result in bf16, where that was recorded.
    pub fn half_error(&self, result: &str) -> Option<f64> {
        self.options.get("bf16")?.get(result)?.as_f64()
    }

    /// Names of the case's tensors.
    pub fn tensors(&self) -> Vec<String> {
        let prefix = format!("{}/", self.name);
        let names = self.tensors.names().into_iter();
        names
            .filter_map(|name| name.strip_prefix(&prefix))
            .filter(|name| !name.contains('/'))
            .map(String::from)
            .collect()
    }

    pub fn get(&self, name: &str) -> Array {
        self.find(name).unwrap_or_else(|| panic!("{}: no tensor `{name}`", self.name))
    }

    pub fn find(&self, name: &str) -> Option<Array> {
        let view = self.tensors.tensor(&format!("{}/{name}", self.name)).ok()?;
        let values = match view.dtype() {
            Dtype::F32 => {
                view.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
            }
            Dtype::F64 => view.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            other => panic!("{}/{name}: unexpected dtype {other:?}", self.name),
        };
        Some(Array::new(view.shape().to_vec(), values))
    }
}
