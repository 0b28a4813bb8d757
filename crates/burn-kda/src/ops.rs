//! What a backend may accelerate, and nothing else.
#![allow(deprecated)] // Burn's NdArray, in favour of Flex; this crate supports both.

mod bodies;

pub(crate) use bodies::*;

use std::sync::LazyLock;

#[cfg(feature = "native")]
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, DispatchTensorKind, ExtensionType, backend_extension};
use burn::tensor::{DType, Tensor};

use crate::functions::{KdaInput, KdaOutput};
use crate::gate::DecayFn;
use crate::plain;

/// The inputs of the operator as primitives of one backend, shapes as [`KdaInput`], `B >= 1`, `T >= 1`.
///
/// f32 or f64; on the CubeCL backends also f16 and bf16, as [`KdaInput`] has them. States are f32 then.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct KdaTensors<B: Backend> {
    /// `[B, T, H, K]`
    pub q: FloatTensor<B>,
    /// `[B, T, H, K]`
    pub k: FloatTensor<B>,
    /// `[B, T, HV, V]`
    pub v: FloatTensor<B>,
    /// `[B, T, HV, K]`
    pub g: FloatTensor<B>,
    /// `[B, T, HV]`
    pub beta: FloatTensor<B>,
}

/// The numbers of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KdaParams {
    /// Read scale.
    pub scale: f64,
    /// As [`KdaOptions::chunk_size`](crate::KdaOptions::chunk_size).
    pub chunk_size: usize,
    /// As [`KdaOptions::tensor_cores`](crate::KdaOptions::tensor_cores).
    pub tensor_cores: bool,
}

/// What a convolution is to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvParams {
    /// Channels of a head, a divisor of all channels, if each head is to be normalised as by
    /// [`l2_normalize`](crate::l2_normalize).
    pub head_dim: Option<usize>,
    /// Of the result.
    pub dtype: DType,
}

/// A tensor that may be missing: `Option` in a form the backend extension can take apart.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum MaybeTensor<B: Backend> {
    /// There is one.
    Some(FloatTensor<B>),
    /// There is none.
    None,
}

/// The gradients that a backward pass is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // Each is that of the input of its name.
pub struct WantedGradients {
    pub q: bool,
    pub k: bool,
    pub v: bool,
    pub g: bool,
    pub beta: bool,
    pub initial_state: bool,
}

/// Gradients of the operator's inputs, in the shapes of [`KdaTensors`]: those that were asked for.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[allow(missing_docs)] // Each is that of the input of its name.
pub struct KdaGradients<B: Backend> {
    #[extension_type]
    pub q: MaybeTensor<B>,
    #[extension_type]
    pub k: MaybeTensor<B>,
    #[extension_type]
    pub v: MaybeTensor<B>,
    #[extension_type]
    pub g: MaybeTensor<B>,
    #[extension_type]
    pub beta: MaybeTensor<B>,
    /// `[B, HV, K, V]`
    #[extension_type]
    pub initial_state: MaybeTensor<B>,
}

/// Primitives of a backend as [`Tensor`]s, and back: what lets the default bodies of [`KdaOps`] be written once.
pub trait TensorBridge: Backend {
    /// Wraps a primitive.
    fn tensor<const D: usize>(primitive: FloatTensor<Self>) -> Tensor<D>;

    /// Unwraps a tensor of this backend.
    fn primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Self>;
}

/// The operator as a backend extension. The default bodies are the plain tensor algorithm, so a backend that
/// accelerates nothing needs one empty `impl`. States are `[B, HV, K, V]`.
///
/// Called by [`chunk_kda`](crate::chunk_kda) and [`recurrent_kda`](crate::recurrent_kda), which check the call.
#[backend_extension(
    NdArray: cfg(feature = "ndarray"),
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cubecl"),
    Remote: cfg(feature = "remote"),
    Capture: cfg(feature = "capture"),
    Autodiff: cfg(feature = "autodiff"),
)]
pub trait KdaOps: TensorBridge {
    /// The chunked form: output `[B, T, HV, V]`, final state and, with `keep_states`, what [`kda_backward`] can use
    /// instead of running the forward pass again; the layout is the backend's own.
    ///
    /// [`kda_backward`]: Self::kda_backward
    fn kda_chunk(
        #[extension_type] inputs: KdaTensors<Self>,
        #[extension_type] initial_state: MaybeTensor<Self>,
        params: KdaParams,
        keep_states: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>) {
        plain_chunk(inputs, initial_state, params, keep_states)
    }

    /// The recurrent form: output and final state.
    fn kda_recurrent(
        #[extension_type] inputs: KdaTensors<Self>,
        #[extension_type] initial_state: MaybeTensor<Self>,
        scale: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        plain_recurrent(inputs, initial_state, scale)
    }

    /// The wanted gradients from the cotangents of output and final state; a missing cotangent is zero. `states` is
    /// what [`kda_chunk`](Self::kda_chunk) kept, if it ran. Without an initial state its gradient is not wanted.
    #[allow(clippy::too_many_arguments)]
    fn kda_backward(
        #[extension_type] inputs: KdaTensors<Self>,
        #[extension_type] initial_state: MaybeTensor<Self>,
        #[extension_type] states: MaybeTensor<Self>,
        #[extension_type] d_o: MaybeTensor<Self>,
        #[extension_type] d_final_state: MaybeTensor<Self>,
        params: KdaParams,
        wanted: WantedGradients,
    ) -> KdaGradients<Self> {
        plain_backward(inputs, initial_state, states, [d_o, d_final_state], params, wanted)
    }

    /// [`short_convolution`](crate::short_convolution) of `x` `[B, T, D]` by `weight` `[D, 1, W]` and `bias` `[D]` after
    /// `state` `[B, D, W - 1]`: the result, with each head normalised if `params` say so, and the next state.
    fn kda_convolution(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] state: MaybeTensor<Self>,
        params: ConvParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        plain_convolution(x, weight, bias, state, params)
    }

    /// The gradients of `x`, `weight`, `bias` and `state` of [`kda_convolution`](Self::kda_convolution) from the
    /// cotangents of its outputs; a missing cotangent is zero.
    #[allow(clippy::type_complexity)]
    fn kda_convolution_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] state: MaybeTensor<Self>,
        #[extension_type] d_y: MaybeTensor<Self>,
        #[extension_type] d_next: MaybeTensor<Self>,
        params: ConvParams,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, MaybeTensor<Self>, MaybeTensor<Self>) {
        plain_convolution_backward(x, weight, bias, state, [d_y, d_next], params)
    }

    /// [`decay_gate`](crate::decay_gate).
    fn kda_decay_gate(
        raw: FloatTensor<Self>,
        #[extension_type] a_log: MaybeTensor<Self>,
        #[extension_type] dt_bias: MaybeTensor<Self>,
        decay: DecayFn,
    ) -> FloatTensor<Self> {
        plain_decay_gate(raw, a_log, dt_bias, decay)
    }

    /// The gradients of `raw`, `a_log` and `dt_bias` of [`kda_decay_gate`](Self::kda_decay_gate).
    fn kda_decay_gate_backward(
        raw: FloatTensor<Self>,
        #[extension_type] a_log: MaybeTensor<Self>,
        #[extension_type] dt_bias: MaybeTensor<Self>,
        d_g: FloatTensor<Self>,
        decay: DecayFn,
    ) -> (FloatTensor<Self>, MaybeTensor<Self>, MaybeTensor<Self>) {
        plain_decay_gate_backward(raw, a_log, dt_bias, d_g, decay)
    }

    /// [`write_strength`](crate::write_strength), `factor` 1 or 2.
    fn kda_write_strength(logit: FloatTensor<Self>, factor: f64) -> FloatTensor<Self> {
        plain_write_strength::<Self>(logit, factor)
    }

    /// The gradient of `logit` of [`kda_write_strength`](Self::kda_write_strength).
    fn kda_write_strength_backward(
        logit: FloatTensor<Self>,
        d_beta: FloatTensor<Self>,
        factor: f64,
    ) -> FloatTensor<Self> {
        plain_write_strength_backward::<Self>(logit, d_beta, factor)
    }

    /// [`gated_rms_norm`](crate::gated_rms_norm), in `dtype`.
    fn kda_output_norm(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        eps: f64,
        dtype: DType,
    ) -> FloatTensor<Self> {
        plain_output_norm::<Self>(o, weight, gate, eps, dtype)
    }

    /// The gradients of `o`, `weight` and `gate` of [`kda_output_norm`](Self::kda_output_norm).
    fn kda_output_norm_backward(
        o: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        d_y: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        plain_output_norm_backward::<Self>(o, weight, gate, d_y, eps)
    }
}

impl<B: Backend> MaybeTensor<B> {
    /// None of a missing tensor.
    #[cfg(feature = "native")]
    pub(crate) fn dtype(&self) -> Option<DType> {
        match self {
            Self::Some(tensor) => Some(tensor.dtype()),
            Self::None => None,
        }
    }

    pub(crate) fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Some(tensor) => Some(tensor),
            Self::None => None,
        }
    }
}

impl<B: Backend> From<Option<FloatTensor<B>>> for MaybeTensor<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::None, Self::Some)
    }
}

impl<B: TensorBridge> MaybeTensor<B> {
    pub(crate) fn of<const D: usize>(tensor: Option<Tensor<D>>) -> Self {
        tensor.map(B::primitive).into()
    }

    pub(crate) fn tensor<const D: usize>(self) -> Option<Tensor<D>> {
        self.into_option().map(B::tensor)
    }
}

impl<B: TensorBridge> KdaTensors<B> {
    pub(crate) fn of(input: KdaInput) -> Self {
        Self {
            q: B::primitive(input.q),
            k: B::primitive(input.k),
            v: B::primitive(input.v),
            g: B::primitive(input.g),
            beta: B::primitive(input.beta),
        }
    }

    pub(crate) fn tensors(self) -> KdaInput {
        KdaInput {
            q: B::tensor(self.q),
            k: B::tensor(self.k),
            v: B::tensor(self.v),
            g: B::tensor(self.g),
            beta: B::tensor(self.beta),
        }
    }
}

impl TensorBridge for Dispatch {
    fn tensor<const D: usize>(primitive: FloatTensor<Self>) -> Tensor<D> {
        Tensor::from_dispatch(primitive)
    }

    fn primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Self> {
        tensor.into_dispatch()
    }
}

/// What runs, by the environment variable `BURN_KDA_PLAIN`, read once: to compare, and to rule the kernels out when
/// something is wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Mode {
    /// Not set: what the backend accelerates, accelerated.
    Accelerated,
    /// Set: the plain algorithm, as one node of the autodiff graph.
    Plain,
    /// `composed`: the plain algorithm, each operation of it differentiated by Burn.
    Composed,
}

impl Mode {
    pub fn current() -> Self {
        static MODE: LazyLock<Mode> = LazyLock::new(|| match std::env::var_os("BURN_KDA_PLAIN") {
            None => Mode::Accelerated,
            Some(value) if value == "composed" => Mode::Composed,
            Some(_) => Mode::Plain,
        });
        *MODE
    }
}

/// Whether the backend of `tensor` is one of [`KdaOps`]. One that Burn has and this crate's features do not name runs
/// the plain algorithm, operation by operation.
fn is_extended<const D: usize>(tensor: &Tensor<D>) -> bool {
    fn listed(kind: &DispatchTensorKind) -> bool {
        match kind {
            #[cfg(feature = "autodiff")]
            DispatchTensorKind::Autodiff(inner) => listed(inner),
            #[cfg(feature = "ndarray")]
            DispatchTensorKind::NdArray(_) => true,
            #[cfg(feature = "flex")]
            DispatchTensorKind::Flex(_) => true,
            #[cfg(feature = "cubecl")]
            DispatchTensorKind::Cube(_) => true,
            #[cfg(feature = "remote")]
            DispatchTensorKind::Remote(_) => true,
            #[cfg(feature = "capture")]
            DispatchTensorKind::Capture(_) => true,
            #[allow(unreachable_patterns)] // If there is no other.
            _ => false,
        }
    }
    Mode::current() != Mode::Composed && listed(&tensor.clone().into_dispatch().kind)
}

/// Whether the backend of `tensor` reads and writes f16 and bf16 itself.
pub(crate) fn takes_half(tensor: &Tensor<4>) -> bool {
    Mode::current() == Mode::Accelerated && is_on_cube(tensor)
}

/// Whether the tensor is one of CubeCL's.
pub(crate) fn is_on_cube<const D: usize>(tensor: &Tensor<D>) -> bool {
    fn on_cube(kind: &DispatchTensorKind) -> bool {
        match kind {
            #[cfg(feature = "autodiff")]
            DispatchTensorKind::Autodiff(inner) => on_cube(inner),
            #[cfg(feature = "cubecl")]
            DispatchTensorKind::Cube(_) => true,
            _ => false,
        }
    }
    on_cube(&tensor.clone().into_dispatch().kind)
}

/// Rows of a chunk where Burn differentiates each operation: the gradient of the inverse of a chunk passes it twice, so
/// that with one key for all tokens and `beta` near 1, 16 rows are at 3e-6 and 8 just above 1e-6 in f32.
const COMPOSED_ROWS: usize = 4;

/// The chunked form on whatever backend the tensors are.
pub(crate) fn chunk(input: KdaInput, state: Option<Tensor<4>>, params: KdaParams) -> KdaOutput {
    if !is_extended(&input.q) {
        let KdaInput { q, k, v, g, beta } = &input;
        let is_recorded = [q, k, v, g].into_iter().chain(&state).any(|x| x.device().is_autodiff());
        let most = if is_recorded || beta.device().is_autodiff() { COMPOSED_ROWS } else { params.chunk_size };
        return plain::chunk_forward(input, state, params.scale, params.chunk_size.min(most), false).0;
    }
    let (o, final_state, _) =
        <Dispatch as KdaOps>::kda_chunk(KdaTensors::of(input), MaybeTensor::of(state), params, false);
    KdaOutput { o: Tensor::from_dispatch(o), final_state: Tensor::from_dispatch(final_state) }
}

/// The recurrent form on whatever backend the tensors are.
pub(crate) fn recurrent(input: KdaInput, state: Option<Tensor<4>>, scale: f64) -> KdaOutput {
    if !is_extended(&input.q) {
        return plain::recurrence(input, state, scale);
    }
    let (o, final_state) = <Dispatch as KdaOps>::kda_recurrent(KdaTensors::of(input), MaybeTensor::of(state), scale);
    KdaOutput { o: Tensor::from_dispatch(o), final_state: Tensor::from_dispatch(final_state) }
}

/// [`KdaOps::kda_convolution`] on whatever backend the tensors are; any `B` and `T`.
pub(crate) fn convolution(
    x: Tensor<3>,
    weight: Tensor<3>,
    bias: Option<Tensor<1>>,
    state: Option<Tensor<3>>,
    params: ConvParams,
) -> [Tensor<3>; 2] {
    if is_empty(&x) || !is_extended(&x) {
        return plain::convolution(x, weight, bias, state, params);
    }
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    let (bias, state) = (MaybeTensor::of(bias), MaybeTensor::of(state));
    let (y, state) = <Dispatch as KdaOps>::kda_convolution(x, weight, bias, state, params);
    [y, state].map(Tensor::from_dispatch)
}

/// [`KdaOps::kda_decay_gate`], as [`convolution`].
pub(crate) fn decay_gate(
    raw: Tensor<4>,
    a_log: Option<Tensor<1>>,
    dt_bias: Option<Tensor<1>>,
    decay: DecayFn,
) -> Tensor<4> {
    if is_empty(&raw) || !is_extended(&raw) {
        return plain::decay_gate(raw, a_log, dt_bias, decay);
    }
    let (a_log, dt_bias) = (MaybeTensor::of(a_log), MaybeTensor::of(dt_bias));
    Tensor::from_dispatch(<Dispatch as KdaOps>::kda_decay_gate(raw.into_dispatch(), a_log, dt_bias, decay))
}

/// [`KdaOps::kda_write_strength`], as [`convolution`].
pub(crate) fn write_strength(logit: Tensor<3>, factor: f64) -> Tensor<3> {
    if is_empty(&logit) || !is_extended(&logit) {
        return plain::write_strength(logit, factor);
    }
    Tensor::from_dispatch(<Dispatch as KdaOps>::kda_write_strength(logit.into_dispatch(), factor))
}

/// [`KdaOps::kda_output_norm`], as [`convolution`].
pub(crate) fn output_norm(o: Tensor<4>, weight: Tensor<1>, gate: Tensor<4>, eps: f64, dtype: DType) -> Tensor<4> {
    if is_empty(&o) || !is_extended(&o) {
        return plain::output_norm(o, weight, gate, eps, dtype);
    }
    let (o, weight, gate) = (o.into_dispatch(), weight.into_dispatch(), gate.into_dispatch());
    Tensor::from_dispatch(<Dispatch as KdaOps>::kda_output_norm(o, weight, gate, eps, dtype))
}

fn is_empty<const D: usize>(x: &Tensor<D>) -> bool {
    x.shape().num_elements() == 0
}
