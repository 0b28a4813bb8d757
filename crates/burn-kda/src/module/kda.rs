use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::{DType, Device, Tensor};

use super::{ConvState, GatedRmsNorm, KdaState, ShortConvolution};
use crate::activation::silu;
use crate::functions::{ConvOutput, check_cu_seqlens, gated_rms_norm_to};
use crate::ops::ConvParams;
use crate::{
    DecayFn, KdaInput, KdaOptions, KdaOutput, chunk_kda, decay_gate, fla_read_scale, l2_normalize, precision,
    recurrent_kda, write_strength,
};

/// Kimi Delta Attention: takes the place of an attention layer, `[B, T, hidden]` to `[B, T, hidden]`.
///
/// Should be created with [`KdaConfig`](super::KdaConfig). Parameters carry the names of the shipped models.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_kda::KdaConfig;
///
/// let device = Device::default();
/// let layer = KdaConfig::new(64, 2, 16).init(&device);
/// let x = Tensor::<3>::random([1, 10, 64], Distribution::Default, &device);
///
/// // Training and prefill take all tokens at once; decoding takes them as they come.
/// let y = layer.forward(x.clone());
/// let (_, state) = layer.forward_with_state(x.clone().slice_dim(1, 0..9), None);
/// let (last, _) = layer.forward_with_state(x.slice_dim(1, 9..10), Some(state));
/// assert!(last.all_close(y.slice_dim(1, 9..10), Some(1e-4), Some(1e-5)));
/// ```
#[derive(Module, Debug)]
pub struct KdaModule {
    /// Queries, `[hidden, H * K]`.
    pub q_proj: Linear,
    /// Keys, `[hidden, H * K]`.
    pub k_proj: Linear,
    /// Values, `[hidden, HV * V]`.
    pub v_proj: Linear,
    /// Convolution of the queries.
    pub q_conv1d: Option<ShortConvolution>,
    /// Convolution of the keys.
    pub k_conv1d: Option<ShortConvolution>,
    /// Convolution of the values.
    pub v_conv1d: Option<ShortConvolution>,
    /// First factor of the decay gate, `[hidden, rank]`.
    pub f_a_proj: Option<Linear>,
    /// Second factor of the decay gate, `[rank, HV * K]`.
    pub f_b_proj: Option<Linear>,
    /// Full-rank decay gate, `[hidden, HV * K]`.
    pub f_proj: Option<Linear>,
    /// Write strength, `[hidden, HV]`.
    pub b_proj: Linear,
    /// First factor of the output gate, `[hidden, rank]`.
    pub g_a_proj: Option<Linear>,
    /// Second factor of the output gate, `[rank, HV * V]`.
    pub g_b_proj: Option<Linear>,
    /// Full-rank output gate, `[hidden, HV * V]`.
    pub g_proj: Option<Linear>,
    /// Log of the decay rate, `[HV]`.
    pub a_log: Param<Tensor<1>>,
    /// Bias of the decay gate, `[HV * K]`.
    pub dt_bias: Param<Tensor<1>>,
    /// Norm of the heads' outputs.
    pub o_norm: GatedRmsNorm,
    /// Output, `[HV * V, hidden]`.
    pub o_proj: Linear,
    #[module(skip)]
    pub(super) decay: DecayFn,
    pub(super) num_heads: usize,
    pub(super) num_v_heads: usize,
    pub(super) allow_neg_eigval: bool,
    pub(super) chunk_size: usize,
}

/// How the tokens of one call are laid out and processed.
pub(super) struct Call<'a> {
    pub function: &'static str,
    pub form: fn(KdaInput, KdaOptions) -> KdaOutput,
    pub cu_seqlens: Option<&'a [usize]>,
}

impl KdaModule {
    /// All tokens at once, from an empty state; differentiable. `[B, T, hidden]` to `[B, T, hidden]`.
    ///
    /// # Panics
    ///
    /// If the last axis of `x` is not `hidden`.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let call = Call { function: "KdaModule::forward", form: chunk_kda, cu_seqlens: None };
        self.run(call, x, None).0
    }

    /// Continues from `state` (none is the start of the sequences) by any number of tokens: prefill, decode, resume.
    ///
    /// Takes `[B, T, hidden]`, returns `[B, T, hidden]` and the state after the last token. However a sequence is
    /// split into calls, the result is the same up to rounding.
    ///
    /// # Panics
    ///
    /// If `x` or `state` has a shape or a dtype the layer does not produce; the message names it.
    pub fn forward_with_state(&self, x: Tensor<3>, state: Option<KdaState>) -> (Tensor<3>, KdaState) {
        let form = if x.dims()[1] == 1 { recurrent_kda } else { chunk_kda };
        self.run(Call { function: "KdaModule::forward_with_state", form, cu_seqlens: None }, x, state)
    }

    /// [`forward_with_state`](Self::forward_with_state) token by token: the same answer from the recurrent form.
    ///
    /// # Panics
    ///
    /// As [`forward_with_state`](Self::forward_with_state).
    pub fn forward_recurrent(&self, x: Tensor<3>, state: Option<KdaState>) -> (Tensor<3>, KdaState) {
        let call = Call { function: "KdaModule::forward_recurrent", form: recurrent_kda, cu_seqlens: None };
        self.run(call, x, state)
    }

    /// Sequences packed along the time axis, none of which sees another: `x` is `[1, T, hidden]`, sequence `n`
    /// is rows `cu_seqlens[n]..cu_seqlens[n + 1]`, and states have `N` rows.
    ///
    /// # Panics
    ///
    /// If `cu_seqlens` does not rise from 0 to `T`, if the batch is not 1, or as
    /// [`forward_with_state`](Self::forward_with_state).
    pub fn forward_packed(&self, x: Tensor<3>, cu_seqlens: &[usize], state: Option<KdaState>) -> (Tensor<3>, KdaState) {
        let call = Call { function: "KdaModule::forward_packed", form: chunk_kda, cu_seqlens: Some(cu_seqlens) };
        self.run(call, x, state)
    }

    /// The read scale, [`fla_read_scale`] of the key head dim.
    pub fn k_scale(&self) -> f64 {
        fla_read_scale(self.key_dim())
    }

    /// Casts the parameters for mixed precision. `a_log` and `dt_bias` stay f32 (f64 in f64): a decay rounded to
    /// 8 bits forgets at another rate.
    pub fn cast(self, dtype: DType) -> Self {
        let wide = precision::accumulation(dtype);
        let (a_log, dt_bias) = (self.a_log.clone(), self.dt_bias.clone());
        let mut layer = self.map(&mut Cast(dtype));
        layer.a_log = a_log.map(|x| x.cast(wide));
        layer.dt_bias = dt_bias.map(|x| x.cast(wide));
        layer
    }

    fn key_dim(&self) -> usize {
        self.q_proj.weight.shape().dims::<2>()[1] / self.num_heads
    }

    pub(super) fn run(&self, call: Call, x: Tensor<3>, state: Option<KdaState>) -> (Tensor<3>, KdaState) {
        let [batch, time, _] = x.dims();
        let function = call.function;
        self.check_input(function, &x);
        let sequences = match call.cu_seqlens {
            Some(bounds) => {
                assert!(batch == 1, "{function}: `x` must have a batch of 1 beside `cu_seqlens`, got {batch}");
                check_cu_seqlens(function, bounds, time);
                bounds.len() - 1
            }
            None => batch,
        };
        if let Some(state) = &state {
            self.check_state(function, state, sequences, x.dtype());
        }
        if time == 0 {
            // NdArray cannot multiply matrices without rows.
            let state = state.unwrap_or_else(|| self.empty_state(sequences, &x.device(), x.dtype()));
            return (x, state);
        }
        let (recurrent, conv) = match state {
            Some(state) => (Some(state.recurrent), state.conv),
            None => (None, None),
        };

        // Wide from projection to projection: every rounding to bf16 on the way would add 1.7e-3.
        let (dtype, wide) = (x.dtype(), precision::accumulation(x.dtype()));
        let raw = [&self.q_proj, &self.k_proj, &self.v_proj].map(|linear| linear.forward(x.clone()));
        let ([q, k, v], conv) = self.convolve(raw, conv, call.cu_seqlens, wide);
        let heads = |x: Tensor<3>, heads: usize| {
            let dim = x.dims()[2] / heads;
            x.reshape([batch, time, heads, dim])
        };
        let input = KdaInput {
            q: heads(q, self.num_heads),
            k: heads(k, self.num_heads),
            v: heads(v, self.num_v_heads),
            g: decay_gate(
                heads(project([&self.f_a_proj, &self.f_b_proj, &self.f_proj], x.clone()), self.num_v_heads),
                Some(self.a_log.val()),
                Some(self.dt_bias.val()),
                self.decay,
            ),
            beta: write_strength(self.b_proj.forward(x.clone()), self.allow_neg_eigval),
        };
        let options = KdaOptions {
            scale: Some(self.k_scale()),
            chunk_size: self.chunk_size,
            // A layer in half precision is rounded more than they round.
            tensor_cores: dtype != wide,
            initial_state: recurrent,
            cu_seqlens: call.cu_seqlens.map(<[usize]>::to_vec),
        };
        let KdaOutput { o, final_state } = (call.form)(input, options);

        let gate = heads(project([&self.g_a_proj, &self.g_b_proj, &self.g_proj], x), self.num_v_heads);
        let [_, _, value_heads, value_dim] = o.dims();
        let o = gated_rms_norm_to(o, self.o_norm.weight.val(), gate, self.o_norm.epsilon, dtype);
        let o = o.reshape([batch, time, value_heads * value_dim]);
        (self.o_proj.forward(o), KdaState { recurrent: final_state, conv })
    }

    /// Convolution and silu of q, k and v, and normalisation of the heads of q and k.
    fn convolve(
        &self,
        raw: [Tensor<3>; 3],
        state: Option<ConvState>,
        cu_seqlens: Option<&[usize]>,
        dtype: DType,
    ) -> ([Tensor<3>; 3], Option<ConvState>) {
        let (Some(q_conv), Some(k_conv), Some(v_conv)) = (&self.q_conv1d, &self.k_conv1d, &self.v_conv1d) else {
            let [q, k, v] = raw.map(|x| silu(x.cast(dtype)));
            let normalize = |x: Tensor<3>| {
                let [batch, time, channels] = x.dims();
                l2_normalize(x.reshape([batch, time, self.num_heads, self.key_dim()])).reshape([batch, time, channels])
            };
            return ([normalize(q), normalize(k), v], None);
        };
        let states = match state {
            Some(ConvState { q, k, v }) => [Some(q), Some(k), Some(v)],
            None => [None, None, None],
        };
        let key_dim = Some(self.key_dim());
        let convolutions = [(q_conv, key_dim), (k_conv, key_dim), (v_conv, None)].into_iter().zip(raw).zip(states);
        let outputs = convolutions.map(|(((conv, head_dim), x), state)| {
            let params = ConvParams { head_dim, dtype };
            match cu_seqlens {
                Some(bounds) => convolve_packed(conv, x, state, bounds, params),
                None => conv.run(x, state, params),
            }
        });
        let [q, k, v] = outputs.collect::<Vec<_>>().try_into().expect("three convolutions");
        ([q.y, k.y, v.y], Some(ConvState { q: q.state, k: k.state, v: v.state }))
    }

    /// What a sequence starts from.
    fn empty_state(&self, sequences: usize, device: &Device, dtype: DType) -> KdaState {
        let [keys, values] = [&self.q_proj, &self.v_proj].map(|linear| linear.weight.shape().dims::<2>()[1]);
        let recurrent = [sequences, self.num_v_heads, self.key_dim(), values / self.num_v_heads];
        let conv = self.q_conv1d.as_ref().map(|conv| {
            let past = conv.weight.shape().dims::<3>()[2] - 1;
            let zeros = |channels| Tensor::zeros([sequences, channels, past], (device, dtype));
            ConvState { q: zeros(keys), k: zeros(keys), v: zeros(values) }
        });
        KdaState { recurrent: Tensor::zeros(recurrent, (device, precision::accumulation(dtype))), conv }
    }

    pub(super) fn check_input(&self, function: &str, x: &Tensor<3>) {
        let weight = &self.q_proj.weight;
        let (want, got) = (weight.shape().dims::<2>()[0], x.dims());
        assert!(got[2] == want, "{function}: `x` must be [B, T, hidden = {want}], got {got:?}");
        let (want, got) = (weight.dtype(), x.dtype());
        assert!(got == want, "{function}: `x` must have the dtype of the parameters, {want:?}, got {got:?}");
    }

    fn check_state(&self, function: &str, state: &KdaState, sequences: usize, dtype: DType) {
        let keys = self.q_proj.weight.shape().dims::<2>()[1];
        let values = self.v_proj.weight.shape().dims::<2>()[1];
        let want = [sequences, self.num_v_heads, self.key_dim(), values / self.num_v_heads];
        let got = state.recurrent.dims();
        assert!(got == want, "{function}: `state.recurrent` must be [B, HV, K, V] = {want:?}, got {got:?}");
        let (wide, got) = (precision::accumulation(dtype), state.recurrent.dtype());
        assert!(got == wide, "{function}: `state.recurrent` must be {wide:?} beside {dtype:?} input, got {got:?}");

        let some = |present| if present { "some" } else { "none" };
        let (want, got) = (self.q_conv1d.is_some(), state.conv.is_some());
        let (need, got_some) = (some(want), some(got));
        assert!(got == want, "{function}: `state.conv` must be {need}, as the layer's convolutions, got {got_some}");
        let (Some(conv), Some(layer)) = (&state.conv, &self.q_conv1d) else { return };
        let past = layer.weight.shape().dims::<3>()[2] - 1;
        for (name, x, channels) in [("q", &conv.q, keys), ("k", &conv.k, keys), ("v", &conv.v, values)] {
            let (want, got) = ([sequences, channels, past], x.dims());
            assert!(got == want, "{function}: `state.conv.{name}` must be [B, D, W - 1] = {want:?}, got {got:?}");
            let got = x.dtype();
            assert!(got == dtype, "{function}: `state.conv.{name}` must have the dtype of `x`, {dtype:?}, got {got:?}");
        }
    }
}

/// Each sequence on its own, so that none reads the one before it.
fn convolve_packed(
    conv: &ShortConvolution,
    x: Tensor<3>,
    states: Option<Tensor<3>>,
    bounds: &[usize],
    params: ConvParams,
) -> ConvOutput {
    let outputs: Vec<_> = (bounds.windows(2).enumerate())
        .map(|(n, span)| {
            let state = states.as_ref().map(|states| states.clone().slice_dim(0, n..n + 1));
            conv.run(x.clone().slice_dim(1, span[0]..span[1]), state, params)
        })
        .collect();
    ConvOutput {
        y: Tensor::cat(outputs.iter().map(|output| output.y.clone()).collect(), 1),
        state: Tensor::cat(outputs.into_iter().map(|output| output.state).collect(), 0),
    }
}

/// One full-rank projection, or two of low rank in turn.
fn project(parts: [&Option<Linear>; 3], x: Tensor<3>) -> Tensor<3> {
    parts.into_iter().flatten().fold(x, |x, linear| linear.forward(x))
}

/// Casts every float parameter.
struct Cast(DType);

impl burn::module::ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|x| x.cast(self.0))
    }
}
