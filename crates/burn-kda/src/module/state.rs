use std::ops::Range;
use std::path::Path;

use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};
use burn_pack::{Reader, Writer};

/// The last raw inputs of the three short convolutions, oldest first.
#[derive(Debug, Clone)]
pub struct ConvState {
    /// `[B, H * K, W - 1]`.
    pub q: Tensor<3>,
    /// `[B, H * K, W - 1]`.
    pub k: Tensor<3>,
    /// `[B, HV * V, W - 1]`.
    pub v: Tensor<3>,
}

/// What a layer carries from one call to the next; its size does not depend on the tokens seen.
///
/// A state is a value: it goes in and a new one comes out. Keeping an old one is a snapshot, putting it back is a
/// rollback.
#[derive(Debug, Clone)]
pub struct KdaState {
    /// `[B, HV, K, V]`, f32 or f64.
    pub recurrent: Tensor<4>,
    /// None for a layer without short convolutions.
    pub conv: Option<ConvState>,
}

/// A state that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The file could not be read or written, or is no burnpack file.
    #[error("state file: {0}")]
    Pack(#[from] burn_pack::Error),
    /// The file holds other tensors than a state has.
    #[error("state file: `{name}` is {problem}")]
    Tensor {
        /// The tensor's name.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl KdaState {
    /// Sequences `B` in the state.
    pub fn batch_size(&self) -> usize {
        self.recurrent.dims()[0]
    }

    /// Cuts the state out of the autodiff graph, for training across segments without backpropagation through them.
    pub fn detach(self) -> Self {
        self.map(Tensor::detach, Tensor::detach)
    }

    /// Moves the state to a device.
    pub fn to_device(self, device: &Device) -> Self {
        self.map(|x| x.to_device(device), |x| x.to_device(device))
    }

    /// The state of the sequences `rows`.
    ///
    /// # Panics
    ///
    /// If `rows` is empty or past the batch.
    pub fn slice(&self, rows: Range<usize>) -> Self {
        let batch = self.batch_size();
        assert!(
            rows.start < rows.end && rows.end <= batch,
            "KdaState::slice: `rows` must be a non-empty range within 0..{batch}, got {rows:?}",
        );
        self.clone().map(|x| x.slice_dim(0, rows.clone()), |x| x.slice_dim(0, rows.clone()))
    }

    /// One state per sequence.
    pub fn split(&self) -> Vec<Self> {
        (0..self.batch_size()).map(|row| self.slice(row..row + 1)).collect()
    }

    /// Joins states along the batch.
    ///
    /// # Panics
    ///
    /// If `states` is empty, or if they are states of different layers.
    pub fn cat(states: Vec<Self>) -> Self {
        assert!(!states.is_empty(), "KdaState::cat: `states` must not be empty, got []");
        let want = states[0].layout();
        for got in states.iter().map(Self::layout) {
            assert!(
                got == want,
                "KdaState::cat: `states` must agree in all but the batch, got {got:?} beside {want:?}"
            );
        }
        let join = |field: fn(&ConvState) -> &Tensor<3>| {
            let parts = states.iter().filter_map(|state| state.conv.as_ref());
            Tensor::cat(parts.map(|conv| field(conv).clone()).collect(), 0)
        };
        let with_conv = states[0].conv.is_some();
        Self {
            conv: with_conv.then(|| ConvState { q: join(|c| &c.q), k: join(|c| &c.k), v: join(|c| &c.v) }),
            recurrent: Tensor::cat(states.iter().map(|state| state.recurrent.clone()).collect(), 0),
        }
    }

    /// Dtype and dims without the batch of every tensor.
    fn layout(&self) -> Vec<(DType, Vec<usize>)> {
        let conv = self.conv.iter().flat_map(|conv| [&conv.q, &conv.k, &conv.v]);
        let conv = conv.map(|x| (x.dtype(), x.dims()[1..].to_vec()));
        let recurrent = (self.recurrent.dtype(), self.recurrent.dims()[1..].to_vec());
        std::iter::once(recurrent).chain(conv).collect()
    }

    /// Writes the state to a burnpack file, Burn's own record format.
    pub fn save_file(&self, path: impl AsRef<Path>) -> Result<(), StateError> {
        Ok(self.writer().overwrite(true).write_to_file(path)?)
    }

    /// Reads a state written by [`save_file`](Self::save_file).
    pub fn load_file(path: impl AsRef<Path>, device: &Device) -> Result<Self, StateError> {
        Self::read(Reader::from_file(path)?, device)
    }

    /// The state as the bytes of a burnpack file.
    pub fn to_bytes(&self) -> Result<Bytes, StateError> {
        Ok(self.writer().into_bytes()?)
    }

    /// Reads a state written by [`to_bytes`](Self::to_bytes).
    pub fn from_bytes(bytes: Bytes, device: &Device) -> Result<Self, StateError> {
        Self::read(Reader::from_bytes(bytes)?, device)
    }

    fn map(self, recurrent: impl Fn(Tensor<4>) -> Tensor<4>, conv: impl Fn(Tensor<3>) -> Tensor<3>) -> Self {
        Self {
            recurrent: recurrent(self.recurrent),
            conv: self.conv.map(|state| ConvState { q: conv(state.q), k: conv(state.k), v: conv(state.v) }),
        }
    }

    fn writer(&self) -> Writer {
        let pack = |name: &str, data: TensorData| {
            let (bytes, shape, dtype) = data.into_parts();
            burn_pack::Tensor::new(name.into(), dtype, shape, None, bytes)
        };
        let mut tensors = vec![pack("recurrent", self.recurrent.to_data())];
        if let Some(conv) = &self.conv {
            tensors.extend([
                pack("conv.q", conv.q.to_data()),
                pack("conv.k", conv.k.to_data()),
                pack("conv.v", conv.v.to_data()),
            ]);
        }
        Writer::new(tensors)
    }

    fn read(reader: Reader, device: &Device) -> Result<Self, StateError> {
        let mut tensors = std::collections::BTreeMap::new();
        for tensor in reader.into_tensors()? {
            let (name, dtype, shape, _, bytes) = tensor.into_parts()?;
            tensors.insert(name, TensorData::from_bytes(bytes, shape, dtype));
        }
        let recurrent = take(&mut tensors, "recurrent", device)?;
        let conv = match tensors.is_empty() {
            true => None,
            false => Some(ConvState {
                q: take(&mut tensors, "conv.q", device)?,
                k: take(&mut tensors, "conv.k", device)?,
                v: take(&mut tensors, "conv.v", device)?,
            }),
        };
        match tensors.into_keys().next() {
            Some(name) => Err(StateError::Tensor { name, problem: "not part of a state".into() }),
            None => Ok(Self { recurrent, conv }),
        }
    }
}

fn take<const D: usize>(
    tensors: &mut std::collections::BTreeMap<String, TensorData>,
    name: &str,
    device: &Device,
) -> Result<Tensor<D>, StateError> {
    let wrong = |problem: String| StateError::Tensor { name: name.into(), problem };
    let data = tensors.remove(name).ok_or_else(|| wrong("missing".into()))?;
    if data.shape().num_dims() != D || !data.dtype().is_float() {
        return Err(wrong(format!("{:?} {:?}, not a float tensor of rank {D}", data.dtype(), data.shape())));
    }
    let dtype = data.dtype();
    Ok(Tensor::from_data(data, (device, dtype)))
}
