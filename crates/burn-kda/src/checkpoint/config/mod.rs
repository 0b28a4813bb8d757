//! `config.json` of the published models, as their own code reads it.

mod families;
mod fields;

use std::fmt;

use serde_json::Value;

use super::ConfigError;
use crate::KdaConfig;
use fields::Fields;

/// Models that share a `config.json`, tensor names and a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// Kimi-Linear-48B-A3B: `kimi_linear`.
    KimiLinear,
    /// Kimi K3: `kimi_k3`.
    KimiK3,
    /// GLM-5.3-Flash: `glm5_next`.
    Glm5Next,
    /// Ling-3.0: `bailing_hybrid`, `bailing_moe_v3`.
    BailingHybrid,
    /// flash-linear-attention's own models: `kda`.
    Fla,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::KimiLinear => "Kimi Linear",
            Self::KimiK3 => "Kimi K3",
            Self::Glm5Next => "GLM-5.3",
            Self::BailingHybrid => "Ling-3.0",
            Self::Fla => "FLA",
        })
    }
}

/// What a `config.json` says about a model's KDA layers.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// Whose model it is.
    pub family: Family,
    /// All layers of the model, of any attention.
    pub num_layers: usize,
    /// The KDA layers, from 0, rising.
    pub kda_layers: Vec<usize>,
    /// One KDA layer; they are all alike.
    pub layer: KdaConfig,
}

impl KdaConfig {
    /// The KDA layers of the model that a `config.json` describes: Kimi Linear, Kimi K3, GLM-5.3-Flash, Ling-3.0 or one
    /// of FLA's own, as published or as transformers writes it.
    ///
    /// Which layers are KDA layers is [`ModelConfig::kda_layers`]: a list counted from 1 (Kimi), all but every fourth
    /// (GLM), all but the last of each group (Ling), all but those of `attn.layers` (FLA), or `layer_types` where there
    /// are some.
    ///
    /// # Errors
    ///
    /// For a `model_type` that is none of these, a missing key, or a value that cannot be; the error names the key. Keys
    /// that decide shapes or the gate must be there, even where the model's code has a default; only what published
    /// files leave out may be missing, such as a bound under `linear_attn_config`.
    ///
    /// # Example
    ///
    /// ```
    /// use burn_kda::{DecayFn, KdaConfig};
    ///
    /// let config = serde_json::json!({
    ///     "model_type": "bailing_hybrid", "hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 32,
    ///     "head_dim": 128, "rms_norm_eps": 1e-6, "short_conv_kernel_size": 4, "layer_group_size": 6,
    ///     "no_kda_lora": true, "kda_safe_gate": true, "kda_lower_bound": -5.0,
    /// });
    /// let model = KdaConfig::from_hf(&config)?;
    /// assert_eq!(model.layer.decay, DecayFn::SIGMOID);
    /// assert_eq!(model.kda_layers.len(), 35);
    /// # Ok::<_, burn_kda::checkpoint::ConfigError>(())
    /// ```
    pub fn from_hf(config: &Value) -> Result<ModelConfig, ConfigError> {
        let root = Fields::root(config)?;
        let model = match root.text("model_type")? {
            "kimi_linear" => families::kimi(Family::KimiLinear, &root),
            "kimi_k3" => families::kimi_k3(&root),
            "glm5_next" | "glm5_next_text" => families::glm5_next(&root),
            "bailing_hybrid" | "bailing_moe_v3" => families::bailing_hybrid(&root),
            "kda" => families::fla(&root),
            other => Err(ConfigError::ModelType { key: root.key("model_type"), got: other.into() }),
        }?;
        model.layer.validate().map_err(ConfigError::Layer)?;
        check_sizes(&model.layer)?;
        Ok(model)
    }
}

/// Rows of the largest tensors, which 32 bits may not hold.
fn check_sizes(layer: &KdaConfig) -> Result<(), ConfigError> {
    let (heads, head_dim) = (layer.num_heads, layer.head_dim);
    let (value_heads, value_dim) = (layer.value_heads(), layer.value_head_dim());
    for (heads, dim) in [(heads, head_dim), (value_heads, head_dim), (value_heads, value_dim)] {
        // Three projections are one tensor where the convolutions are, and a number has up to 4 bytes.
        if heads.checked_mul(dim).and_then(|rows| rows.checked_mul(3 * 4)).is_none() {
            return Err(ConfigError::Layer(format!("{heads} heads of {dim} are more than this machine can address")));
        }
    }
    Ok(())
}
