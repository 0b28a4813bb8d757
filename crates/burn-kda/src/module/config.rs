use burn::config::Config;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use super::{GatedRmsNormConfig, KdaModule, ShortConvolutionConfig, init};
use crate::DecayFn;

/// How the decay gate and the output gate are projected from the hidden state.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Projection {
    /// Two matrices whose rank is the value head dim, as in FLA's layer, Kimi Linear and GLM-5.3-Flash.
    HeadRank,
    /// Two matrices of this rank.
    LowRank(usize),
    /// One matrix.
    Full,
}

/// Configuration of a [`KdaModule`].
///
/// The defaults are FLA's layer (`fla.layers.KimiDeltaAttention`) and Kimi Linear.
#[derive(Config, Debug)]
pub struct KdaConfig {
    /// Width of the hidden state.
    pub hidden_size: usize,
    /// Query/key heads `H`.
    pub num_heads: usize,
    /// Key dim `K` of a head.
    pub head_dim: usize,
    /// Value heads `HV`, a multiple of `H`; none is `H`.
    pub num_v_heads: Option<usize>,
    /// Value dim of a head as a multiple of `head_dim`; the product must be an integer.
    #[config(default = 1.0)]
    pub expand_v: f64,
    /// Decay gate.
    #[config(default = "DecayFn::Softplus")]
    pub decay: DecayFn,
    /// Projection of the decay gate: `f_a_proj` and `f_b_proj`, or `f_proj`.
    #[config(default = "Projection::HeadRank")]
    pub decay_projection: Projection,
    /// Projection of the output gate: `g_a_proj` and `g_b_proj`, or `g_proj`.
    #[config(default = "Projection::HeadRank")]
    pub output_gate: Projection,
    /// Adds a bias to the (last) output gate projection. FLA's layer has one, no shipped model does.
    #[config(default = false)]
    pub output_gate_bias: bool,
    /// Width `W` of the short convolutions; with none, q, k and v only go through silu.
    #[config(default = "Some(4)")]
    pub conv_size: Option<usize>,
    /// Adds a bias to the short convolutions.
    #[config(default = false)]
    pub conv_bias: bool,
    /// Doubles the write strength, which allows eigenvalues down to -1.
    #[config(default = false)]
    pub allow_neg_eigval: bool,
    /// Epsilon of the output norm.
    #[config(default = 1e-5)]
    pub norm_eps: f64,
    /// Most rows of a chunk in training and prefill, a power of two from 1 to 128; see
    /// [`KdaOptions::chunk_size`](crate::KdaOptions::chunk_size).
    #[config(default = 64)]
    pub chunk_size: usize,
}

impl KdaConfig {
    /// Kimi-Linear-48B-A3B: softplus gate, low-rank projections.
    pub fn kimi_linear_48b() -> Self {
        Self::new(2304, 32, 128)
    }

    /// Kimi K3: sigmoid gate bounded at -5, full-rank output gate.
    pub fn kimi_k3() -> Self {
        Self::new(7168, 96, 128).with_decay(DecayFn::SIGMOID).with_output_gate(Projection::Full)
    }

    /// GLM-5.3-Flash: sigmoid gate bounded at -5, low-rank projections.
    pub fn glm_5_3_flash() -> Self {
        Self::new(4096, 64, 128).with_decay(DecayFn::SIGMOID)
    }

    /// Ling-3.0-flash: sigmoid gate bounded at -5, full-rank projections.
    pub fn ling_3_flash() -> Self {
        Self::new(2560, 32, 128)
            .with_decay(DecayFn::SIGMOID)
            .with_decay_projection(Projection::Full)
            .with_output_gate(Projection::Full)
            .with_norm_eps(1e-6)
    }

    /// Value heads `HV`.
    pub fn value_heads(&self) -> usize {
        self.num_v_heads.unwrap_or(self.num_heads)
    }

    /// Value dim `V` of a head, `head_dim * expand_v`.
    pub fn value_head_dim(&self) -> usize {
        (self.head_dim as f64 * self.expand_v).round() as usize
    }

    /// Initialises a layer as FLA does: `A_log = log U(1, 16)`, or 0 with the sigmoid gate; `dt_bias` the inverse
    /// softplus of a time step log-uniform in `[0.001, 0.1]`; projections and convolutions uniform in
    /// `+-fan_in^-0.5`.
    ///
    /// # Panics
    ///
    /// If a field is out of its range; the message names it.
    pub fn init(&self, device: &Device) -> KdaModule {
        self.check();
        let (heads, value_heads) = (self.num_heads, self.value_heads());
        let (key_dim, value_dim) = (self.head_dim, self.value_head_dim());
        let (keys, values, gates) = (heads * key_dim, value_heads * value_dim, value_heads * key_dim);

        let linear = |input, output| LinearConfig::new(input, output).with_bias(false).init(device);
        let conv = |channels| {
            let width = self.conv_size?;
            Some(ShortConvolutionConfig::new(channels, width).with_bias(self.conv_bias).init(device))
        };
        let [f_a_proj, f_b_proj, f_proj] = self.project(self.decay_projection, gates, false, device);
        let [g_a_proj, g_b_proj, g_proj] = self.project(self.output_gate, values, self.output_gate_bias, device);

        KdaModule {
            q_proj: linear(self.hidden_size, keys),
            k_proj: linear(self.hidden_size, keys),
            v_proj: linear(self.hidden_size, values),
            q_conv1d: conv(keys),
            k_conv1d: conv(keys),
            v_conv1d: conv(values),
            f_a_proj,
            f_b_proj,
            f_proj,
            b_proj: linear(self.hidden_size, value_heads),
            g_a_proj,
            g_b_proj,
            g_proj,
            a_log: init::a_log(value_heads, self.decay, device),
            dt_bias: init::dt_bias(gates, device),
            o_norm: GatedRmsNormConfig::new(value_dim).with_epsilon(self.norm_eps).init(device),
            o_proj: linear(values, self.hidden_size),
            decay: self.decay,
            num_heads: heads,
            num_v_heads: value_heads,
            allow_neg_eigval: self.allow_neg_eigval,
            chunk_size: self.chunk_size,
        }
    }

    /// `[a, b, full]`: a pair or the last one.
    fn project(&self, kind: Projection, width: usize, bias: bool, device: &Device) -> [Option<Linear>; 3] {
        let linear = |input, output, bias| Some(LinearConfig::new(input, output).with_bias(bias).init(device));
        let pair = |rank| [linear(self.hidden_size, rank, false), linear(rank, width, bias), None];
        match kind {
            Projection::HeadRank => pair(self.value_head_dim()),
            Projection::LowRank(rank) => pair(rank),
            Projection::Full => [None, None, linear(self.hidden_size, width, bias)],
        }
    }

    fn check(&self) {
        if let Err(problem) = self.validate() {
            panic!("KdaConfig: {problem}");
        }
    }

    /// What is wrong with a field, naming it.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let ensure = |holds: bool, problem: &dyn Fn() -> String| if holds { Ok(()) } else { Err(problem()) };
        for (field, size) in [
            ("hidden_size", self.hidden_size),
            ("num_heads", self.num_heads),
            ("head_dim", self.head_dim),
            ("num_v_heads", self.value_heads()),
            ("conv_size", self.conv_size.unwrap_or(1)),
        ] {
            ensure(size > 0, &|| format!("`{field}` must be at least 1, got {size}"))?;
        }
        for (field, projection) in [("decay_projection", self.decay_projection), ("output_gate", self.output_gate)] {
            ensure(projection != Projection::LowRank(0), &|| {
                format!("the rank of `{field}` must be at least 1, got 0")
            })?;
        }
        let (heads, value_heads) = (self.num_heads, self.value_heads());
        ensure(value_heads.is_multiple_of(heads), &|| {
            format!("`num_v_heads` must be a multiple of `num_heads` = {heads}, got {value_heads}")
        })?;
        let (head_dim, expand_v) = (self.head_dim, self.expand_v);
        let exact = head_dim as f64 * expand_v;
        let whole = self.value_head_dim() as f64;
        ensure(whole >= 1.0 && (exact - whole).abs() <= 1e-5 * whole, &|| {
            format!("`expand_v` times `head_dim` must be a positive integer, got {expand_v} * {head_dim} = {exact}")
        })?;
        let eps = self.norm_eps;
        ensure(eps > 0.0 && eps.is_finite(), &|| format!("`norm_eps` must be positive and finite, got {eps}"))?;
        let chunk = self.chunk_size;
        ensure(chunk.is_power_of_two() && chunk <= 128, &|| {
            format!("`chunk_size` must be a power of two from 1 to 128, got {chunk}")
        })?;
        self.decay.validate()
    }
}
