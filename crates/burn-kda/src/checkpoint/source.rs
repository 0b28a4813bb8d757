//! Where the tensors of a checkpoint are: in one file, or in shards that an index lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::CheckpointError;
use super::file::TensorFile;
use super::unique::Unique;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

#[derive(Debug)]
pub(super) enum Source {
    Single(Arc<TensorFile>),
    Sharded { folder: PathBuf, index: PathBuf, weight_map: BTreeMap<String, String> },
}

#[derive(Deserialize)]
struct Index {
    weight_map: Unique<String>,
}

impl Source {
    /// A folder, a safetensors file, or an index.
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let path = if path.is_dir() { in_folder(path)? } else { path.to_path_buf() };
        if path.extension().is_none_or(|extension| extension != "json") {
            return Ok(Self::Single(Arc::new(TensorFile::open(&path)?)));
        }
        let Index { weight_map: Unique(weight_map) } = read_json(&path)?;
        // A name may only lead to a neighbour of the index.
        let plain = |file: &str| Path::new(file).file_name().is_some_and(|name| name == file);
        if let Some((name, file)) = weight_map.iter().find(|(_, file)| !plain(file)) {
            return Err(CheckpointError::file(&path, format!("`{name}` is in {file:?}, which is no file name")));
        }
        let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        Ok(Self::Sharded { folder, index: path, weight_map })
    }

    /// Whether there is a tensor of this name.
    pub(super) fn contains(&self, name: &str) -> bool {
        match self {
            Self::Single(file) => file.info(name).is_some(),
            Self::Sharded { weight_map, .. } => weight_map.contains_key(name),
        }
    }

    /// Whether there is a tensor below `prefix`.
    pub(super) fn any_below(&self, prefix: &str) -> bool {
        match self {
            Self::Single(file) => file.names().any(|name| name.starts_with(prefix)),
            Self::Sharded { weight_map, .. } => weight_map.keys().any(|name| name.starts_with(prefix)),
        }
    }

    /// Every tensor below `prefix`, with its file; only the files that hold one are opened.
    pub(super) fn below(&self, prefix: &str) -> Result<BTreeMap<String, Arc<TensorFile>>, CheckpointError> {
        let (folder, index, weight_map) = match self {
            Self::Single(file) => {
                let names = file.names().filter(|name| name.starts_with(prefix));
                return Ok(names.map(|name| (name.clone(), file.clone())).collect());
            }
            Self::Sharded { folder, index, weight_map } => (folder, index, weight_map),
        };
        let listed = || weight_map.iter().filter(|(name, _)| name.starts_with(prefix));
        let mut found = BTreeMap::new();
        for shard in listed().map(|(_, shard)| shard).collect::<BTreeSet<_>>() {
            let file = Arc::new(TensorFile::open(&folder.join(shard))?);
            for (name, _) in listed().filter(|(_, other)| *other == shard) {
                if file.info(name).is_none() {
                    return Err(CheckpointError::file(index, format!("`{name}` is not in {shard}")));
                }
                found.insert(name.clone(), file.clone());
            }
            // Two copies of a tensor could differ.
            let mut held = file.names().filter(|name| name.starts_with(prefix));
            if let Some(name) = held.find(|name| weight_map.get(*name) != Some(shard)) {
                return Err(CheckpointError::file(
                    file.path(),
                    format!("`{name}` is here, where the index does not have it"),
                ));
            }
        }
        Ok(found)
    }
}

/// The model or its index. With both, either could be a leftover.
fn in_folder(folder: &Path) -> Result<PathBuf, CheckpointError> {
    let [index, single] = [INDEX, SINGLE].map(|name| folder.join(name));
    match (index.is_file(), single.is_file()) {
        (true, false) => Ok(index),
        (false, true) => Ok(single),
        (true, true) => {
            let problem = format!("both {INDEX} and {SINGLE} are in this folder; name the one to read");
            Err(CheckpointError::file(folder, problem))
        }
        (false, false) => Err(CheckpointError::file(folder, format!("neither {INDEX} nor {SINGLE} is in this folder"))),
    }
}

pub(super) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    serde_json::from_reader(BufReader::new(file)).map_err(|e| CheckpointError::file(path, e.to_string()))
}
