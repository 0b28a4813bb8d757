//! What each family calls the tensors of a layer: as in its published files, and as transformers 5.24.0
//! (`conversion_mapping.py`) and FLA 0.6.0 (`fla/layers/kda.py`) name their modules.

use burn::tensor::Shape;

use super::{Family, ModelConfig};
use crate::{KdaConfig, Projection};

/// How a checkpoint names and groups the tensors of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// As the models are published: `f_a_proj` and `f_b_proj`, or `f_proj`; three convolutions.
    Published,
    /// As transformers holds them: the decay gate in `forget_gate`, the convolutions in one `conv1d`.
    Native,
    /// As FLA's layer: `f_proj.0` and `f_proj.1`.
    Fla,
}

/// The layout of a tensor in the file, which says how its shape is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Layout {
    /// `[out, in]`, transposed in a module.
    Matrix([usize; 2]),
    /// `[D, 1, W]` or `[D, W]`.
    Taps([usize; 2]),
    /// `[n]`.
    Vector(usize),
    /// One number per head, in any shape of one long axis.
    Rates { heads: usize, form: Rates },
}

/// How a family publishes its rates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rates {
    /// `[H]`.
    Vector,
    /// `[1, 1, H, 1]`.
    FourAxes,
    /// `[n]`, with zeros after the last head.
    Padded,
}

/// The most rates of a padded tensor. Published are 128 for 96 heads; without an end, a file could ask for any memory.
fn most_rates(heads: usize) -> usize {
    heads.next_power_of_two().max(128)
}

impl Layout {
    pub(super) fn accepts(&self, shape: &[usize]) -> bool {
        match *self {
            Self::Matrix(want) => shape == want,
            Self::Taps([channels, width]) => shape == [channels, 1, width] || shape == [channels, width],
            Self::Vector(len) => shape == [len],
            Self::Rates { heads, form } => {
                let long: Vec<_> = shape.iter().copied().filter(|&len| len != 1).collect();
                let len = long.first().copied().unwrap_or(1);
                let most = if form == Rates::Padded { most_rates(heads) } else { heads };
                long.len() <= 1 && !shape.is_empty() && (heads..=most).contains(&len)
            }
        }
    }

    /// For error messages.
    pub(super) fn expected(&self) -> String {
        match *self {
            Self::Matrix([rows, columns]) => format!("[{rows}, {columns}]"),
            Self::Taps([channels, width]) => format!("[{channels}, 1, {width}] or [{channels}, {width}]"),
            Self::Vector(len) => format!("[{len}]"),
            Self::Rates { heads, form: Rates::Padded } => {
                format!("[{heads}], or up to [{}] with zeros after {heads}", most_rates(heads))
            }
            Self::Rates { heads, .. } => format!("[{heads}] or [1, 1, {heads}, 1]"),
        }
    }

    /// The shape of some rows, as PyTorch has it.
    pub(super) fn of_rows(&self, rows: usize) -> Shape {
        match *self {
            Self::Matrix([_, columns]) => Shape::new([rows, columns]),
            Self::Taps([_, width]) => Shape::new([rows, 1, width]),
            Self::Vector(_) | Self::Rates { .. } => Shape::new([rows]),
        }
    }

    /// The shape that new files have.
    pub(super) fn usual(&self) -> Vec<usize> {
        match *self {
            Self::Matrix(shape) => shape.to_vec(),
            Self::Taps([channels, width]) => vec![channels, 1, width],
            Self::Vector(len) => vec![len],
            Self::Rates { heads, form: Rates::FourAxes } => vec![1, 1, heads, 1],
            Self::Rates { heads, .. } => vec![heads],
        }
    }
}

/// A tensor of a file and the parameters it holds, one below the other.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub name: String,
    pub layout: Layout,
    /// Path in the module and rows of the tensor.
    pub parts: Vec<(&'static str, usize)>,
}

impl Entry {
    /// Numbers per row.
    pub(super) fn columns(&self) -> usize {
        match self.layout {
            Layout::Matrix([_, columns]) | Layout::Taps([_, columns]) => columns,
            Layout::Vector(_) | Layout::Rates { .. } => 1,
        }
    }
}

/// Prefixes of a layer's tensors, the published one first.
pub(super) fn prefixes(family: Family, layer: usize) -> Vec<String> {
    let prefixes: &[[&str; 2]] = match family {
        Family::KimiLinear => &[["model", "self_attn"]],
        Family::KimiK3 => &[["language_model.model", "self_attn"], ["model", "self_attn"]],
        Family::Glm5Next => &[["model.language_model", "self_attn"], ["model", "self_attn"]],
        Family::BailingHybrid => &[["model", "attention"], ["model", "self_attn"]],
        Family::Fla => &[["model", "attn"]],
    };
    prefixes.iter().map(|[model, attention]| format!("{model}.layers.{layer}.{attention}.")).collect()
}

/// The style of new files.
pub(super) fn usual_style(family: Family) -> Style {
    if family == Family::Fla { Style::Fla } else { Style::Published }
}

/// Every tensor of a layer, sorted by its name.
pub(super) fn entries(model: &ModelConfig, prefix: &str, style: Style) -> Vec<Entry> {
    let KdaConfig { hidden_size: hidden, num_heads: heads, head_dim, .. } = model.layer;
    let (value_heads, value_dim) = (model.layer.value_heads(), model.layer.value_head_dim());
    let (keys, values, gates) = (heads * head_dim, value_heads * value_dim, value_heads * head_dim);
    let mut entries = Vec::new();
    let mut add = |name: &str, layout: Layout, parts: Vec<(&'static str, usize)>| {
        entries.push(Entry { name: format!("{prefix}{name}"), layout, parts });
    };
    let mut matrix = |name: &str, path: &'static str, [input, output]: [usize; 2]| {
        add(name, Layout::Matrix([output, input]), vec![(path, output)]);
    };

    matrix("q_proj.weight", "q_proj.weight", [hidden, keys]);
    matrix("k_proj.weight", "k_proj.weight", [hidden, keys]);
    matrix("v_proj.weight", "v_proj.weight", [hidden, values]);
    matrix("b_proj.weight", "b_proj.weight", [hidden, value_heads]);
    matrix("o_proj.weight", "o_proj.weight", [values, hidden]);
    let gate = if style == Style::Native { "forget_gate." } else { "" };
    let [f_a, f_b, g_a, g_b] = match style {
        Style::Fla => ["f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"],
        _ => ["f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"],
    };
    match rank(model.layer.decay_projection, value_dim) {
        Some(rank) => {
            matrix(&format!("{gate}{f_a}.weight"), "f_a_proj.weight", [hidden, rank]);
            matrix(&format!("{gate}{f_b}.weight"), "f_b_proj.weight", [rank, gates]);
        }
        None => matrix(&format!("{gate}f_proj.weight"), "f_proj.weight", [hidden, gates]),
    }
    let last = match rank(model.layer.output_gate, value_dim) {
        Some(rank) => {
            matrix(&format!("{g_a}.weight"), "g_a_proj.weight", [hidden, rank]);
            matrix(&format!("{g_b}.weight"), "g_b_proj.weight", [rank, values]);
            (g_b, "g_b_proj.bias")
        }
        None => {
            matrix("g_proj.weight", "g_proj.weight", [hidden, values]);
            ("g_proj", "g_proj.bias")
        }
    };
    if model.layer.output_gate_bias {
        add(&format!("{}.bias", last.0), Layout::Vector(values), vec![(last.1, values)]);
    }
    if let Some(width) = model.layer.conv_size {
        let parts = [("q_conv1d.weight", keys), ("k_conv1d.weight", keys), ("v_conv1d.weight", values)];
        match style {
            Style::Native => add("conv1d.weight", Layout::Taps([2 * keys + values, width]), parts.to_vec()),
            _ => {
                for (path, channels) in parts {
                    add(path, Layout::Taps([channels, width]), vec![(path, channels)]);
                }
            }
        }
    }
    let form = match model.family {
        Family::KimiLinear => Rates::FourAxes,
        Family::KimiK3 => Rates::Padded,
        _ => Rates::Vector,
    };
    add(&format!("{gate}A_log"), Layout::Rates { heads: value_heads, form }, vec![("a_log", value_heads)]);
    add(&format!("{gate}dt_bias"), Layout::Vector(gates), vec![("dt_bias", gates)]);
    add("o_norm.weight", Layout::Vector(value_dim), vec![("o_norm.weight", value_dim)]);
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    entries
}

fn rank(projection: Projection, head_rank: usize) -> Option<usize> {
    match projection {
        Projection::HeadRank => Some(head_rank),
        Projection::LowRank(rank) => Some(rank),
        Projection::Full => None,
    }
}
