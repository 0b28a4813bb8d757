//! Presets against the shapes of the published layers.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use burn_kda::{KdaConfig, KdaModule};
use serde_json::Value;

use super::common::fixture;

/// Shapes of a module's parameters, none of which is initialised.
#[derive(Default)]
struct Shapes(Vec<String>, BTreeMap<String, Vec<usize>>);

impl ModuleVisitor for Shapes {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.0.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.0.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.1.insert(self.0.join("."), param.lazy_shape().to_vec());
    }
}

fn shapes(module: &KdaModule) -> BTreeMap<String, Vec<usize>> {
    let mut shapes = Shapes::default();
    module.visit(&mut shapes);
    shapes.1
}

#[test]
fn presets_have_the_published_shapes() {
    let published: Value = serde_json::from_slice(&fixture::read("checkpoints/presets.json")).unwrap();
    // Parameters by hand, from the table of shapes: 4 D hidden for q, k, v and o; the two gates; beta; three
    // convolutions; and D + H + 128 numbers of dt_bias, A_log and o_norm.
    let low_rank = |hidden: usize, width: usize| 128 * hidden + 128 * width;
    let full_rank = |hidden: usize, width: usize| hidden * width;
    let sizes = |hidden: usize, heads: usize, gates: usize| {
        let width = 128 * heads;
        4 * hidden * width + gates + hidden * heads + 12 * width + width + heads + 128
    };
    for (name, preset, count) in [
        ("kimi_linear_48b", KdaConfig::kimi_linear_48b(), sizes(2304, 32, 2 * low_rank(2304, 4096))),
        ("kimi_k3", KdaConfig::kimi_k3(), sizes(7168, 96, low_rank(7168, 12288) + full_rank(7168, 12288))),
        ("glm_5_3_flash", KdaConfig::glm_5_3_flash(), sizes(4096, 64, 2 * low_rank(4096, 8192))),
        ("ling_3_flash", KdaConfig::ling_3_flash(), sizes(2560, 32, 2 * full_rank(2560, 4096))),
    ] {
        let module = preset.init(&Device::flex());
        assert_eq!(module.num_params(), count, "{name}");
        assert_eq!(Some(preset.norm_eps), published[name]["norm_eps"].as_f64(), "{name}");
        let mut got = shapes(&module);
        let mut total = 0;
        for (tensor, shape) in published[name]["shapes"].as_object().unwrap() {
            let shape: Vec<_> = shape.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
            total += shape.iter().product::<usize>();
            let mut take = |path: &str| got.remove(path).unwrap_or_else(|| panic!("{name}: {path} of {tensor}"));
            match (tensor.as_str(), &shape[..]) {
                ("conv1d.weight", [channels, 1, width]) => {
                    let part = vec![channels / 3, 1, *width];
                    for path in ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"] {
                        assert_eq!(take(path), part, "{name}: {path}");
                    }
                }
                ("A_log", shape) => {
                    assert_eq!(take("a_log").iter().product::<usize>(), shape.iter().product::<usize>())
                }
                (path, [rows, columns]) => assert_eq!(take(path), [*columns, *rows], "{name}: {path}"),
                (path, shape) => assert_eq!(take(path), shape, "{name}: {path}"),
            }
        }
        assert_eq!(total, count, "{name}");
        assert!(got.is_empty(), "{name}: {got:?}");
    }
}
