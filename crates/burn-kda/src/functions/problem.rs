//! What one call of the operator is given and gives back, and the checks before any work.

use burn::tensor::{DType, Tensor};

use super::packed::{self, check_cu_seqlens};
use crate::{ops, precision};

/// FLA's default read scale, `head_k_dim^-0.5`. It multiplies the read `S^T q` only, never the state.
pub fn fla_read_scale(head_k_dim: usize) -> f64 {
    (head_k_dim as f64).powf(-0.5)
}

/// Inputs of the operator; `HV % H == 0`, and value head `hv` reads query/key head `hv / (HV / H)`.
///
/// `q`, `k` and `v` share one float dtype. `g` and `beta` have that dtype, or f32 beside f16 and bf16.
#[derive(Debug, Clone)]
pub struct KdaInput {
    /// Queries `[B, T, H, K]`, already normalised.
    pub q: Tensor<4>,
    /// Keys `[B, T, H, K]`, already normalised.
    pub k: Tensor<4>,
    /// Values `[B, T, HV, V]`.
    pub v: Tensor<4>,
    /// Natural log of the per-step decay `[B, T, HV, K]`, `<= 0`; `-inf` forgets the channel.
    pub g: Tensor<4>,
    /// Write strength `[B, T, HV]`.
    pub beta: Tensor<3>,
}

/// Options of the operator. `Default`: [`fla_read_scale`], chunks of 64, no initial state, no packing.
#[derive(Debug, Clone)]
pub struct KdaOptions {
    /// Read scale; none is [`fla_read_scale`] of `K`.
    pub scale: Option<f64>,
    /// Most rows of a chunk, a power of two from 1 to 128, for [`chunk_kda`](super::chunk_kda). The result depends on
    /// it by rounding only. In plain tensor operations chunks have at most 16 rows, to stay within the error bars for
    /// nearly dependent keys; on NdArray and Flex there are none, because the kernels need none.
    pub chunk_size: usize,
    /// Lets the products of f32 inputs be made on tensor cores, each number as the sum of two in bf16: relative errors
    /// of 1e-5 where f32 has 1e-7 (docs/numerics.md). Those of f16 and bf16 inputs are in any case, and without tensor
    /// cores it changes nothing. For [`chunk_kda`](super::chunk_kda).
    pub tensor_cores: bool,
    /// State before the first token, `[B, HV, K, V]` (`[N, HV, K, V]` with `cu_seqlens`), f32 or f64 as the result.
    pub initial_state: Option<Tensor<4>>,
    /// Bounds of `N` sequences packed along the time axis of a batch of one: `0 = c_0 <= c_1 <= .. <= c_N = T`.
    pub cu_seqlens: Option<Vec<usize>>,
}

impl Default for KdaOptions {
    fn default() -> Self {
        Self { scale: None, chunk_size: 64, tensor_cores: false, initial_state: None, cu_seqlens: None }
    }
}

impl KdaOptions {
    /// Sets the read scale.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets the most rows of a chunk.
    pub fn with_chunk_size(mut self, chunk_size: usize) -> Self {
        self.chunk_size = chunk_size;
        self
    }

    /// Lets f32 products be made on tensor cores.
    pub fn with_tensor_cores(mut self, tensor_cores: bool) -> Self {
        self.tensor_cores = tensor_cores;
        self
    }

    /// Sets the state before the first token.
    pub fn with_initial_state(mut self, initial_state: impl Into<Option<Tensor<4>>>) -> Self {
        self.initial_state = initial_state.into();
        self
    }

    /// Sets the bounds of packed sequences.
    pub fn with_cu_seqlens(mut self, cu_seqlens: Vec<usize>) -> Self {
        self.cu_seqlens = Some(cu_seqlens);
        self
    }
}

/// Result of the operator.
#[derive(Debug, Clone)]
pub struct KdaOutput {
    /// Outputs `[B, T, HV, V]` in the dtype of `v`.
    pub o: Tensor<4>,
    /// State after the last token, `[B, HV, K, V]` (`[N, HV, K, V]` with `cu_seqlens`), f32 or f64.
    pub final_state: Tensor<4>,
}

/// What messages name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    /// The public function.
    pub function: &'static str,
    /// Its argument for the state before the first token.
    pub state: &'static str,
}

impl Caller {
    /// A function of [`KdaOptions`].
    pub fn new(function: &'static str) -> Self {
        Self { function, state: "initial_state" }
    }
}

/// Sizes of one problem.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dims {
    pub batch: usize,
    pub time: usize,
    pub heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl Dims {
    /// From the shapes of `q` and `v`.
    pub fn new([batch, time, heads, key_dim]: [usize; 4], [_, _, value_heads, value_dim]: [usize; 4]) -> Self {
        Self { batch, time, heads, value_heads, key_dim, value_dim }
    }

    /// Value heads of all batch rows: independent recurrences.
    pub fn lanes(&self) -> usize {
        self.batch * self.value_heads
    }

    /// The wider of key and value dim.
    pub fn width(&self) -> usize {
        self.key_dim.max(self.value_dim)
    }
}

impl KdaInput {
    pub(crate) fn dims(&self) -> Dims {
        Dims::new(self.q.dims(), self.v.dims())
    }

    pub(crate) fn cast(self, dtype: DType) -> Self {
        Self {
            q: self.q.cast(dtype),
            k: self.k.cast(dtype),
            v: self.v.cast(dtype),
            g: self.g.cast(dtype),
            beta: self.beta.cast(dtype),
        }
    }

    /// Rows `start..end` of the time axis.
    pub(crate) fn slice_time(&self, start: usize, end: usize) -> Self {
        let rows = start..end;
        Self {
            q: self.q.clone().slice_dim(1, rows.clone()),
            k: self.k.clone().slice_dim(1, rows.clone()),
            v: self.v.clone().slice_dim(1, rows.clone()),
            g: self.g.clone().slice_dim(1, rows.clone()),
            beta: self.beta.clone().slice_dim(1, rows),
        }
    }

    fn check(&self, Caller { function, state: state_name }: Caller, options: &KdaOptions) -> Dims {
        let dims @ Dims { batch, time, heads, value_heads, key_dim, value_dim } = self.dims();
        let name = |argument: &str, layout: &str, got: &[usize], want: &[usize]| {
            assert!(got == want, "{function}: `{argument}` must be {layout} = {want:?}, got {got:?}");
        };
        for (size, argument, axis) in [
            (heads, "q", "head count H"),
            (key_dim, "q", "key dim K"),
            (value_heads, "v", "head count HV"),
            (value_dim, "v", "value dim V"),
        ] {
            assert!(size > 0, "{function}: the {axis} of `{argument}` must be at least 1, got 0");
        }
        assert!(
            value_heads % heads == 0,
            "{function}: the head count of `v` must be a multiple of that of `q`, got HV = {value_heads}, H = {heads}",
        );
        name("k", "[B, T, H, K]", &self.k.dims(), &[batch, time, heads, key_dim]);
        name("v", "[B, T, HV, V]", &self.v.dims(), &[batch, time, value_heads, value_dim]);
        name("g", "[B, T, HV, K]", &self.g.dims(), &[batch, time, value_heads, key_dim]);
        name("beta", "[B, T, HV]", &self.beta.dims(), &[batch, time, value_heads]);

        let dtype = self.q.dtype();
        let wide = precision::accumulation(dtype);
        for (argument, got) in [("k", self.k.dtype()), ("v", self.v.dtype())] {
            assert!(got == dtype, "{function}: `{argument}` must have the dtype of `q`, {dtype:?}, got {got:?}");
        }
        for (argument, got) in [("g", self.g.dtype()), ("beta", self.beta.dtype())] {
            assert!(
                got == dtype || got == wide,
                "{function}: `{argument}` must have the dtype of `q`, {dtype:?}, or {wide:?}, got {got:?}",
            );
        }

        let chunk = options.chunk_size;
        assert!(
            chunk.is_power_of_two() && chunk <= 128,
            "{function}: `chunk_size` must be a power of two from 1 to 128, got {chunk}",
        );
        if let Some(scale) = options.scale {
            assert!(scale.is_finite(), "{function}: `scale` must be finite, got {scale}");
        }
        let sequences = match &options.cu_seqlens {
            Some(bounds) => {
                assert!(batch == 1, "{function}: `cu_seqlens` needs a batch of 1, got `q` with B = {batch}");
                check_cu_seqlens(function, bounds, time);
                bounds.len() - 1
            }
            None => batch,
        };
        if let Some(state) = &options.initial_state {
            let axis = if options.cu_seqlens.is_some() { "N" } else { "B" };
            let layout = format!("[{axis}, HV, K, V]");
            name(state_name, &layout, &state.dims(), &[sequences, value_heads, key_dim, value_dim]);
            let got = state.dtype();
            assert!(got == wide, "{function}: `{state_name}` must be {wide:?} beside {dtype:?} inputs, got {got:?}");
        }
        dims
    }
}

/// Checks the call, fixes the dtype, handles empty and packed inputs, and leaves the arithmetic to `form`: one way to
/// compute a plain batch from inputs, initial state and read scale, with `B >= 1` and `T >= 1`.
pub(crate) fn run(
    caller: Caller,
    input: KdaInput,
    options: KdaOptions,
    form: impl Fn(KdaInput, Option<Tensor<4>>, f64) -> KdaOutput,
) -> KdaOutput {
    let dims = input.check(caller, &options);
    let scale = options.scale.unwrap_or_else(|| fla_read_scale(dims.key_dim));
    let dtype = input.v.dtype();
    let input = if ops::takes_half(&input.v) { input } else { input.cast(precision::accumulation(dtype)) };

    let form = |input: KdaInput, state: Option<Tensor<4>>| match input.q.dims() {
        [0, ..] | [_, 0, ..] => nothing(input, state),
        _ => form(input, state, scale),
    };
    let output = match options.cu_seqlens {
        Some(bounds) => packed::run(input, options.initial_state, &bounds, form),
        None => form(input, options.initial_state),
    };
    KdaOutput { o: output.o.cast(dtype), final_state: output.final_state }
}

/// No tokens: no outputs, and the state stays what it was.
fn nothing(input: KdaInput, state: Option<Tensor<4>>) -> KdaOutput {
    let Dims { batch, value_heads, key_dim, value_dim, .. } = input.dims();
    let dtype = precision::accumulation(input.v.dtype());
    let zeros = || Tensor::zeros([batch, value_heads, key_dim, value_dim], (&input.v.device(), dtype));
    KdaOutput { final_state: state.unwrap_or_else(zeros), o: input.v }
}
