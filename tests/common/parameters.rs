//! The parameters of a layer as arrays, in the order in which the layer visits them.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_kda::{DecayFn, KdaConfig, KdaModule, Projection};

use super::array::Array;
use super::recipe::Random;

/// Names and values.
pub fn parameters(layer: &KdaModule) -> Vec<(String, Array)> {
    let mut collect = Collect::default();
    layer.visit(&mut collect);
    collect.found
}

#[derive(Default)]
struct Collect {
    path: Vec<String>,
    found: Vec<(String, Array)>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push((self.path.join("."), Array::of(param.val())));
    }
}

/// The layer on other tensors, flat, each reshaped to its parameter's shape.
pub fn with_tensors(layer: KdaModule, tensors: Vec<Tensor<1>>) -> KdaModule {
    let mut replace = Replace(tensors.into_iter());
    let layer = layer.map(&mut replace);
    assert!(replace.0.next().is_none(), "a tensor for every parameter");
    layer
}

struct Replace(std::vec::IntoIter<Tensor<1>>);

impl ModuleMapper for Replace {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let tensor = self.0.next().expect("a tensor for every parameter");
        param.map(|x| tensor.reshape(x.shape()))
    }
}

/// A layer with parameters from a seed, the same on every device and in every precision.
pub fn layer(config: &KdaConfig, seed: u64, device: &Device, dtype: DType) -> KdaModule {
    let mut random = Random::new(seed);
    let layer = config.init(device);
    let tensors = parameters(&layer).into_iter().map(|(name, old)| {
        let len = old.values.len();
        let fan_in = if name.contains("conv1d") { config.conv_size.unwrap_or(1) } else { old.shape[0] };
        let bound = (fan_in as f64).powf(-0.5);
        let new = match name.as_str() {
            "a_log" => random.uniform(vec![len], 0.0, 2.0),
            "dt_bias" => random.uniform(vec![len], -6.0, -1.0),
            "o_norm.weight" => random.uniform(vec![len], 0.5, 1.5),
            _ => random.uniform(vec![len], -bound, bound),
        };
        new.tensor::<1>(device, dtype)
    });
    let tensors = tensors.collect();
    with_tensors(layer, tensors)
}

/// Layers that differ in everything a configuration can change.
pub fn configs() -> Vec<(&'static str, KdaConfig)> {
    let plain = KdaConfig::new(12, 2, 4).with_chunk_size(4);
    let grouped = KdaConfig::new(10, 2, 6)
        .with_num_v_heads(Some(4))
        .with_expand_v(1.5)
        .with_output_gate_bias(true)
        .with_conv_bias(true)
        .with_chunk_size(4);
    let bounded = KdaConfig::new(9, 3, 5)
        .with_decay(DecayFn::SIGMOID)
        .with_decay_projection(Projection::Full)
        .with_output_gate(Projection::Full)
        .with_conv_size(Some(2))
        .with_allow_neg_eigval(true)
        .with_chunk_size(2);
    let without_conv = KdaConfig::new(8, 2, 3)
        .with_decay_projection(Projection::LowRank(2))
        .with_output_gate(Projection::LowRank(5))
        .with_conv_size(None)
        .with_chunk_size(8);
    vec![("plain", plain), ("grouped", grouped), ("bounded", bounded), ("without conv", without_conv)]
}
