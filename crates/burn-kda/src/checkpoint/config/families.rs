//! One function per family. Sources: transformers 5.24.0 (`configuration_kimi_linear.py`, `configuration_glm5_next.py`,
//! `configuration_bailing_hybrid.py`), FLA 0.6.0 (`configuration_kda.py`), and the `config.json` of the published models.

use super::{Family, Fields, ModelConfig};
use crate::checkpoint::ConfigError;
use crate::{DecayFn, KdaConfig, Projection};

type Result<T> = std::result::Result<T, ConfigError>;

/// Sizes under `linear_attn_config`, or in keys of their own where transformers wrote the file.
fn linear_attention(config: &Fields) -> Result<KdaConfig> {
    let sizes = |fields: &Fields, [heads, dim, width]: [&str; 3]| {
        Ok::<_, ConfigError>((fields.size(heads)?, fields.size(dim)?, fields.size(width)?))
    };
    let (heads, head_dim, width) = match config.optional_object("linear_attn_config")? {
        Some(linear) => sizes(&linear, ["num_heads", "head_dim", "short_conv_kernel_size"])?,
        None => sizes(config, ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"])?,
    };
    Ok(KdaConfig::new(config.size("hidden_size")?, heads, head_dim)
        .with_conv_size(Some(width))
        .with_norm_eps(config.positive("rms_norm_eps")?))
}

fn decay(lower_bound: Option<f64>) -> DecayFn {
    lower_bound.map_or(DecayFn::Softplus, |lower_bound| DecayFn::Sigmoid { lower_bound })
}

/// The convolutions of these models are followed by the activation of the whole model, which this crate has as silu.
fn check_activation(config: &Fields) -> Result<()> {
    match config.optional_text("hidden_act")? {
        None | Some("silu" | "swish") => Ok(()),
        Some(_) => Err(config.invalid("hidden_act", "silu")),
    }
}

/// The layer lists count from 1. The gate is unbounded and of low rank unless the file says otherwise.
pub(super) fn kimi(family: Family, config: &Fields) -> Result<ModelConfig> {
    // Kimi K3's convolutions keep silu beside another activation of the model. By that activation its text model, which
    // calls itself `kimi_linear`, is refused on its own.
    if family == Family::KimiLinear {
        check_activation(config)?;
    }
    let num_layers = config.size("num_hidden_layers")?;
    let mut layer = linear_attention(config)?;
    let linear = config.optional_object("linear_attn_config")?;
    if let Some(linear) = &linear {
        layer.decay = decay(linear.optional_bound("gate_lower_bound")?);
        if linear.optional_flag("use_full_rank_gate")?.unwrap_or(false) {
            layer.output_gate = Projection::Full;
        }
    }
    let kda_layers = match (config.optional_layer_types(num_layers)?, linear) {
        (Some(layers), _) => layers,
        (None, Some(linear)) => listed(&linear, num_layers)?,
        (None, None) => return Err(config.missing("layer_types")),
    };
    Ok(ModelConfig { family, num_layers, kda_layers, layer })
}

/// `kda_layers`, with `full_attn_layers` as the others.
fn listed(linear: &Fields, num_layers: usize) -> Result<Vec<usize>> {
    let layers = |key| linear.optional_layers(key, 1, num_layers)?.ok_or_else(|| linear.missing(key));
    let (kda, full) = (layers("kda_layers")?, layers("full_attn_layers")?);
    let mut all = [&kda[..], &full].concat();
    all.sort_unstable();
    if !all.iter().copied().eq(0..num_layers) {
        return Err(
            linear.invalid("full_attn_layers", &format!("those of the {num_layers} layers not in `kda_layers`"))
        );
    }
    Ok(kda)
}

pub(super) fn kimi_k3(root: &Fields) -> Result<ModelConfig> {
    let text = root.optional_object("text_config")?.ok_or_else(|| root.missing("text_config"))?;
    match text.text("model_type")? {
        "kimi_linear" => kimi(Family::KimiK3, &text),
        other => Err(ConfigError::ModelType { key: text.key("model_type"), got: other.into() }),
    }
}

/// All but every fourth layer, unless `layer_types` says otherwise; the lists of `linear_attn_config` are not read.
pub(super) fn glm5_next(root: &Fields) -> Result<ModelConfig> {
    let text = root.optional_object("text_config")?;
    let config = text.as_ref().unwrap_or(root);
    check_activation(config)?;
    let num_layers = config.size("num_hidden_layers")?;
    let mut layer = linear_attention(config)?;
    let linear = config.optional_object("linear_attn_config")?;
    layer.decay = decay(glm_bound(config, linear.as_ref())?);
    let kda_layers = config.optional_layer_types(num_layers)?;
    let kda_layers = kda_layers.unwrap_or_else(|| (0..num_layers).filter(|i| i % 4 != 3).collect());
    Ok(ModelConfig { family: Family::Glm5Next, num_layers, kda_layers, layer })
}

/// Null is the unbounded gate, unless `safe_gate` replaces it. A table that does not say leaves the model's own bound, or
/// the default of transformers' class.
fn glm_bound(config: &Fields, linear: Option<&Fields>) -> Result<Option<f64>> {
    const DEFAULT: f64 = -5.0;
    let own = config.optional_bound("linear_lower_bound")?;
    let has_own = config.has("linear_lower_bound");
    let Some(linear) = linear else {
        return if has_own { Ok(own) } else { Err(config.missing("linear_lower_bound")) };
    };
    let bound = match linear.optional_bound("gate_lower_bound")? {
        None if linear.has("gate_lower_bound") => None,
        None if has_own => own,
        None => Some(DEFAULT),
        bound => bound,
    };
    let safe = linear.optional_flag("safe_gate")?.unwrap_or(!linear.has("safe_gate"));
    Ok(bound.or(safe.then_some(DEFAULT)))
}

/// All but the last layer of each group. A file written by transformers has its rotary dim as `head_dim`, and the head
/// dim as `linear_head_dim`.
pub(super) fn bailing_hybrid(config: &Fields) -> Result<ModelConfig> {
    check_activation(config)?;
    let num_layers = config.size("num_hidden_layers")?;
    let either = |key, other| config.optional_size(key)?.map_or_else(|| config.size(other), Ok);
    let heads = either("linear_num_heads", "num_attention_heads")?;
    let mut layer = KdaConfig::new(config.size("hidden_size")?, heads, either("linear_head_dim", "head_dim")?)
        .with_conv_size(Some(config.size("short_conv_kernel_size")?))
        .with_norm_eps(config.positive("rms_norm_eps")?);
    // Older models of this type have no KDA layers and no such key.
    if config.flag("kda_safe_gate")? {
        layer.decay = decay(Some(config.bound("kda_lower_bound")?));
    }
    // transformers knows only the full rank and does not write the key.
    if config.optional_flag("no_kda_lora")?.unwrap_or(true) {
        layer.decay_projection = Projection::Full;
        layer.output_gate = Projection::Full;
    }
    let kda_layers = match config.optional_layer_types(num_layers)? {
        Some(layers) => layers,
        None => {
            let group = config.size("layer_group_size")?;
            (0..num_layers).filter(|i| (i + 1) % group != 0).collect()
        }
    };
    Ok(ModelConfig { family: Family::BailingHybrid, num_layers, kda_layers, layer })
}

/// The gate is bounded by `lower_bound` alone, as in FLA's kernels; `safe_gate` is a promise about it.
pub(super) fn fla(config: &Fields) -> Result<ModelConfig> {
    let num_layers = config.size("num_hidden_layers")?;
    let lower_bound = config.optional_bound("lower_bound")?;
    if config.optional_flag("safe_gate")?.unwrap_or(false) && lower_bound.is_none() {
        return Err(config.missing("lower_bound"));
    }
    let conv_size = if config.flag("use_short_conv")? { Some(config.size("conv_size")?) } else { None };
    let layer = KdaConfig::new(config.size("hidden_size")?, config.size("num_heads")?, config.size("head_dim")?)
        .with_num_v_heads(config.optional_size("num_v_heads")?)
        .with_expand_v(config.positive("expand_v")?)
        .with_decay(decay(lower_bound))
        .with_output_gate_bias(true)
        .with_conv_size(conv_size)
        .with_allow_neg_eigval(config.optional_flag("allow_neg_eigval")?.unwrap_or(false))
        .with_norm_eps(config.positive("norm_eps")?);
    if layer.value_head_dim() > 1 << 20 {
        return Err(config.invalid("expand_v", "a multiple that leaves the value dim at most 2^20"));
    }
    let others = match config.optional_object("attn")? {
        Some(attn) => {
            let layers = attn.optional_layers("layers", 0, num_layers)?;
            layers.ok_or_else(|| attn.missing("layers"))?
        }
        None => Vec::new(),
    };
    let kda_layers = (0..num_layers).filter(|i| others.binary_search(i).is_err()).collect();
    Ok(ModelConfig { family: Family::Fla, num_layers, kda_layers, layer })
}
