//! One safetensors file: its header, and the bytes of single tensors.
//!
//! The file is read by position, tensor by tensor. burn-store's own reader would refuse a shard for one tensor in a
//! dtype that Burn does not have, as the experts of published models are.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use safetensors::tensor::{Metadata, TensorInfo};

use super::CheckpointError;
use super::unique::Unique;

/// The length of the header comes first, in eight bytes.
const LENGTH: u64 = 8;
/// As the format has it.
const LONGEST_HEADER: u64 = 100_000_000;

/// An open file whose header has been checked against its length.
#[derive(Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    file: Mutex<File>,
    tensors: BTreeMap<String, TensorInfo>,
    data: u64,
}

impl TensorFile {
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = || CheckpointError::io(path);
        let wrong = |problem: String| CheckpointError::file(path, problem);
        let mut file = File::open(path).map_err(io())?;
        let len = file.metadata().map_err(io())?.len();
        if len < LENGTH {
            return Err(wrong(format!("{len} bytes are no safetensors file")));
        }
        let mut bytes = [0; LENGTH as usize];
        file.read_exact(&mut bytes).map_err(io())?;
        let header = u64::from_le_bytes(bytes);
        if header > LONGEST_HEADER || header > len - LENGTH {
            return Err(wrong(format!("a header of {header} bytes in a file of {len}")));
        }
        let mut bytes = vec![0; header as usize];
        file.read_exact(&mut bytes).map_err(io())?;
        let Unique::<TensorInfo>(tensors) =
            serde_json::from_slice(&bytes).map_err(|e| wrong(format!("header: {e}")))?;

        for (name, info) in &tensors {
            check_length(info).map_err(|problem| wrong(format!("header: `{name}` {problem}")))?;
        }
        // Offsets without gaps or overlaps.
        let mut sorted: Vec<_> = tensors.clone().into_iter().collect();
        sorted.sort_by_key(|(_, info)| info.data_offsets);
        let metadata = Metadata::new(None, sorted).map_err(|e| wrong(format!("header: {e}")))?;
        let (want, got) = (metadata.data_len() as u64, len - LENGTH - header);
        if got != want {
            return Err(wrong(format!("the header describes {want} bytes of tensors, the file has {got}")));
        }
        Ok(Self { path: path.to_path_buf(), file: Mutex::new(file), tensors, data: LENGTH + header })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The bytes `range` of the tensor at `info`.
    pub(super) fn read(&self, info: &TensorInfo, range: Range<usize>) -> Result<Vec<u8>, CheckpointError> {
        let mut bytes = vec![0; range.len()];
        // A reader that panicked leaves a file with any position, which is set here.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let start = self.data + (info.data_offsets.0 + range.start) as u64;
        let result = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut bytes));
        result.map_err(CheckpointError::io(&self.path))?;
        Ok(bytes)
    }
}

/// Offsets of the length that dtype and shape have; the error of the `safetensors` crate would not name the tensor.
fn check_length(info: &TensorInfo) -> Result<(), String> {
    let (start, end) = info.data_offsets;
    let want = info.shape.iter().try_fold(info.dtype.bitsize(), |bits, &len| bits.checked_mul(len));
    let got = end.checked_sub(start).and_then(|bytes| bytes.checked_mul(8));
    match want.is_some() && want == got {
        true => Ok(()),
        false => Err(format!("of {} and shape {:?} is at bytes {start} to {end}", info.dtype, info.shape)),
    }
}
