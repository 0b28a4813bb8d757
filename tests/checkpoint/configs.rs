//! `config.json` of every family, as published and as transformers writes it.

use burn_kda::checkpoint::{ConfigError, Family, ModelConfig};
use burn_kda::{DecayFn, KdaConfig, Projection};
use serde_json::{Value, json};

use super::{FOLDERS, folder};

/// The keys that matter of the published files.
fn kimi_linear() -> Value {
    let full = [4, 8, 12, 16, 20, 24, 27];
    let kda: Vec<_> = (1..=27).filter(|i| !full.contains(i)).collect();
    json!({
        "model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
        "head_dim": 72, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "kda_layers": kda, "full_attn_layers": full, "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        },
    })
}

fn kimi_k3() -> Value {
    let kda: Vec<_> = (1..92).filter(|i| i % 4 != 0).collect();
    let full: Vec<_> = (1..24).map(|i| 4 * i).chain([93]).collect();
    json!({
        "model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": {
            "model_type": "kimi_linear", "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96,
            "hidden_act": "situ", "rms_norm_eps": 1e-5,
            "linear_attn_config": {
                "kda_layers": kda, "full_attn_layers": full, "num_heads": 96, "head_dim": 128,
                "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": true,
            },
        },
    })
}

fn glm5_next() -> Value {
    json!({
        "model_type": "glm5_next",
        "text_config": {
            "model_type": "glm5_next_text", "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "linear_num_heads": 64, "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0,
        },
    })
}

fn bailing_hybrid() -> Value {
    json!({
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "hidden_size": 2560,
        "num_hidden_layers": 42, "num_attention_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "layer_group_size": 6, "short_conv_kernel_size": 4, "no_kda_lora": true,
        "kda_safe_gate": true, "kda_lower_bound": -5.0,
    })
}

fn fla() -> Value {
    json!({
        "model_type": "kda", "hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 16, "head_dim": 128,
        "num_v_heads": null, "expand_v": 1.0, "use_short_conv": true, "conv_size": 4, "allow_neg_eigval": false,
        "safe_gate": false, "lower_bound": null, "norm_eps": 1e-6, "attn": null,
    })
}

fn all() -> [(Value, Family); 5] {
    [
        (kimi_linear(), Family::KimiLinear),
        (kimi_k3(), Family::KimiK3),
        (glm5_next(), Family::Glm5Next),
        (bailing_hybrid(), Family::BailingHybrid),
        (fla(), Family::Fla),
    ]
}

fn parse(config: &Value) -> ModelConfig {
    KdaConfig::from_hf(config).unwrap_or_else(|e| panic!("{config}: {e}"))
}

/// `config` with the value at `path` replaced, or removed.
fn with(mut config: Value, path: &str, value: Option<Value>) -> Value {
    let (parents, key) = path.rsplit_once('.').unwrap_or(("", path));
    let parents = parents.split('.').filter(|key| !key.is_empty());
    let parent = parents.fold(&mut config, |object, key| &mut object[key]).as_object_mut().unwrap();
    match value {
        Some(value) => parent.insert(key.into(), value),
        None => parent.remove(key),
    };
    config
}

#[track_caller]
fn assert_same(got: &KdaConfig, want: &KdaConfig) {
    assert_eq!(format!("{got:?}"), format!("{want:?}"));
}

#[test]
fn published_configs_are_the_presets() {
    let fla = KdaConfig::new(2048, 16, 128).with_output_gate_bias(true).with_norm_eps(1e-6);
    let presets = [
        (KdaConfig::kimi_linear_48b(), 27, 20),
        (KdaConfig::kimi_k3(), 93, 69),
        (KdaConfig::glm_5_3_flash(), 45, 34),
        (KdaConfig::ling_3_flash(), 42, 35),
        (fla, 24, 24),
    ];
    for ((config, family), (preset, num_layers, kda)) in all().into_iter().zip(presets) {
        let model = parse(&config);
        assert_eq!((model.family, model.num_layers, model.kda_layers.len()), (family, num_layers, kda));
        assert_same(&model.layer, &preset);
    }
}

#[test]
fn each_family_finds_its_kda_layers() {
    let others = |config: &Value| {
        let model = parse(config);
        (0..model.num_layers).filter(|i| !model.kda_layers.contains(i)).collect::<Vec<_>>()
    };
    assert_eq!(others(&kimi_linear()), [3, 7, 11, 15, 19, 23, 26]);
    assert_eq!(others(&kimi_k3()), (0..23).map(|i| 4 * i + 3).chain([92]).collect::<Vec<_>>());
    assert_eq!(others(&glm5_next()), (0..11).map(|i| 4 * i + 3).collect::<Vec<_>>());
    assert_eq!(others(&bailing_hybrid()), [5, 11, 17, 23, 29, 35, 41]);
    assert_eq!(others(&with(fla(), "attn", Some(json!({"layers": [5, 11]})))), [5, 11]);

    // `layer_types` comes first, and any other attention than `linear_attention` is none of ours.
    let types = json!(["linear_attention", "indexed_attention", "full_attention", "linear_attention"]);
    for (config, prefix) in
        [(kimi_linear(), ""), (kimi_k3(), "text_config."), (glm5_next(), "text_config."), (bailing_hybrid(), "")]
    {
        let config = with(config, &format!("{prefix}num_hidden_layers"), Some(json!(4)));
        assert_eq!(others(&with(config, &format!("{prefix}layer_types"), Some(types.clone()))), [1, 2]);
    }
}

#[test]
fn options_of_each_family() {
    let layer = |config: Value| parse(&config).layer;
    let bound = |lower_bound| DecayFn::Sigmoid { lower_bound };

    // Kimi: bounded only where the file says so.
    let path = |key: &str| format!("linear_attn_config.{key}");
    assert_eq!(layer(with(kimi_linear(), &path("gate_lower_bound"), Some(json!(-4)))).decay, bound(-4.0));
    assert_eq!(layer(with(kimi_linear(), &path("gate_lower_bound"), Some(json!(null)))).decay, DecayFn::Softplus);
    let full = layer(with(kimi_linear(), &path("use_full_rank_gate"), Some(json!(true))));
    assert_eq!((full.output_gate, full.decay_projection), (Projection::Full, Projection::HeadRank));

    // GLM: null is the unbounded gate; the older form has it in `linear_attn_config`, -5 if it does not say.
    let glm = |key: &str, value: Value| layer(with(glm5_next(), &format!("text_config.{key}"), Some(value)));
    assert_eq!(glm("linear_lower_bound", json!(-2.5)).decay, bound(-2.5));
    assert_eq!(glm("linear_lower_bound", json!(null)).decay, DecayFn::Softplus);
    let older = |extra: Value| {
        let mut linear = json!({"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 3, "kda_layers": [0]});
        linear.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        with(with(glm5_next(), "text_config.linear_attn_config", Some(linear)), "text_config.linear_lower_bound", None)
    };
    let config = layer(older(json!({})));
    assert_eq!((config.num_heads, config.head_dim, config.conv_size), (2, 16, Some(3)));
    assert_eq!(config.decay, bound(-5.0));
    assert_eq!(layer(older(json!({"gate_lower_bound": -3.0}))).decay, bound(-3.0));
    assert_eq!(layer(older(json!({"safe_gate": false}))).decay, bound(-5.0));
    let null = json!({"gate_lower_bound": null, "safe_gate": false});
    assert_eq!(layer(older(null.clone())).decay, DecayFn::Softplus);
    assert_eq!(layer(older(json!({"gate_lower_bound": null, "safe_gate": null}))).decay, DecayFn::Softplus);
    assert_eq!(layer(older(json!({"gate_lower_bound": null}))).decay, bound(-5.0));
    // The table's null comes before the model's own bound, which counts where the table has no such key.
    let both = |extra: Value, own: Value| layer(with(older(extra), "text_config.linear_lower_bound", Some(own))).decay;
    assert_eq!(both(null, json!(-2.0)), DecayFn::Softplus);
    assert_eq!(both(json!({"gate_lower_bound": null}), json!(-2.0)), bound(-5.0));
    assert_eq!(both(json!({"gate_lower_bound": -3.0}), json!(-2.0)), bound(-3.0));
    assert_eq!(both(json!({"safe_gate": false}), json!(-2.0)), bound(-2.0));
    assert_eq!(both(json!({"safe_gate": false}), json!(null)), DecayFn::Softplus);
    assert_eq!(both(json!({}), json!(null)), bound(-5.0));
    assert_eq!(parse(&older(json!({}))).kda_layers.len(), 34, "the list, from 0 here, is not read");
    assert_same(&layer(glm5_next()["text_config"].clone()), &KdaConfig::glm_5_3_flash());

    // Ling: low rank, and the unbounded gate.
    let config = layer(with(bailing_hybrid(), "no_kda_lora", Some(json!(false))));
    assert_eq!((config.output_gate, config.decay_projection), (Projection::HeadRank, Projection::HeadRank));
    assert_eq!(layer(with(bailing_hybrid(), "kda_safe_gate", Some(json!(false)))).decay, DecayFn::Softplus);

    // FLA: everything its layer takes.
    let config = [
        ("num_v_heads", json!(32)),
        ("expand_v", json!(0.5)),
        ("allow_neg_eigval", json!(true)),
        ("safe_gate", json!(true)),
        ("lower_bound", json!(-5.0)),
        ("use_short_conv", json!(false)),
    ];
    let config = layer(config.into_iter().fold(fla(), |config, (key, value)| with(config, key, Some(value))));
    let want = KdaConfig::new(2048, 16, 128)
        .with_num_v_heads(Some(32))
        .with_expand_v(0.5)
        .with_allow_neg_eigval(true)
        .with_decay(DecayFn::SIGMOID)
        .with_conv_size(None)
        .with_output_gate_bias(true)
        .with_norm_eps(1e-6);
    assert_same(&config, &want);
}

/// transformers writes Ling's rotary dim as `head_dim`; reading that would halve the heads.
#[test]
fn configs_written_by_transformers() {
    for (name, _) in FOLDERS {
        let text = std::fs::read_to_string(folder(name).join("config.json")).unwrap();
        let model = parse(&serde_json::from_str(&text).unwrap());
        assert_eq!((model.layer.hidden_size, model.layer.head_dim), (40, 16), "{name}");
    }
    let text = std::fs::read_to_string(folder("bailing_hybrid_native").join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((config["head_dim"].as_u64(), config["linear_head_dim"].as_u64()), (Some(12), Some(16)));
}

/// Every key of the published files that is not optional, one after the other.
#[test]
fn a_missing_key_is_named() {
    let optional = [
        "architectures",
        "hidden_act",
        "attn",
        "num_v_heads",
        "lower_bound",
        "safe_gate",
        "allow_neg_eigval",
        "no_kda_lora",
        "use_full_rank_gate",
        "gate_lower_bound",
        "conv_size",
    ];
    // Not read: other attention.
    let unread = |family: Family, key: &str| match key {
        "num_attention_heads" => family != Family::BailingHybrid,
        "head_dim" => family == Family::KimiLinear,
        _ => false,
    };
    fn keys(object: &Value, path: &str, into: &mut Vec<String>) {
        for (key, value) in object.as_object().unwrap() {
            into.push(format!("{path}{key}"));
            if value.is_object() {
                keys(value, &format!("{path}{key}."), into);
            }
        }
    }
    let mut tested = 0;
    for (config, family) in all() {
        let mut paths = Vec::new();
        keys(&config, "", &mut paths);
        for path in paths {
            let key = path.rsplit('.').next().unwrap();
            if optional.contains(&key) || !path.contains("linear_attn_config.") && unread(family, key) {
                continue;
            }
            if family == Family::Glm5Next && (path == "text_config" || path == "text_config.model_type") {
                continue; // a text model alone has neither
            }
            let missing = KdaConfig::from_hf(&with(config.clone(), &path, None)).expect_err(&path);
            let ConfigError::Missing { key: named } = &missing else { panic!("{path}: {missing}") };
            // Without its table, Kimi's sizes are looked for where transformers writes them.
            let moved = path.ends_with("linear_attn_config") && named.ends_with("linear_num_heads");
            assert!(*named == path || moved, "{path}: {missing}");
            assert!(missing.to_string().contains(named.as_str()));
            tested += 1;
        }
    }
    assert_eq!(tested, 10 + 12 + 8 + 10 + 8);
    let config = with(fla(), "safe_gate", Some(json!(true)));
    assert!(matches!(KdaConfig::from_hf(&config), Err(ConfigError::Missing { key }) if key == "lower_bound"));
    let config = with(fla(), "conv_size", None);
    assert!(matches!(KdaConfig::from_hf(&config), Err(ConfigError::Missing { key }) if key == "conv_size"));
}

#[test]
fn an_unknown_model_type_is_named() {
    for (config, key) in [
        (json!({"model_type": "qwen3_next"}), "model_type"),
        (with(kimi_k3(), "text_config.model_type", Some(json!("kimi_k2"))), "text_config.model_type"),
    ] {
        let error = KdaConfig::from_hf(&config).unwrap_err();
        assert!(matches!(&error, ConfigError::ModelType { key: named, .. } if named == key), "{error}");
        assert!(error.to_string().contains("kimi_k3, glm5_next"), "{error}");
    }
}

#[test]
fn values_that_cannot_be_are_errors() {
    let row = |config: Value, path: &str, value: Value| {
        let error =
            KdaConfig::from_hf(&with(config, path, Some(value.clone()))).expect_err(&format!("{path}: {value}"));
        let named = matches!(&error, ConfigError::Invalid { key, .. } if key == path);
        assert!(named && error.to_string().len() < 300, "{path}: {value}: {error}");
    };
    for size in [json!(0), json!(-1), json!(1.5), json!("32"), json!(u64::MAX), json!((1 << 20) + 1), json!([1])] {
        row(kimi_linear(), "hidden_size", size.clone());
        row(kimi_linear(), "num_hidden_layers", size.clone());
        row(kimi_k3(), "text_config.linear_attn_config.num_heads", size.clone());
        row(glm5_next(), "text_config.linear_conv_kernel_dim", size.clone());
        row(bailing_hybrid(), "layer_group_size", size.clone());
        row(fla(), "num_v_heads", size);
    }
    row(kimi_linear(), "rms_norm_eps", json!("1e-5"));
    row(kimi_linear(), "hidden_act", json!("gelu"));
    row(kimi_linear(), "linear_attn_config", json!([]));
    for layers in [json!([0, 1]), json!([1, 1]), json!([28]), json!([1.0]), json!("all")] {
        row(kimi_linear(), "linear_attn_config.kda_layers", layers);
    }
    // A layer in neither list, or in both.
    row(kimi_linear(), "linear_attn_config.full_attn_layers", json!([4, 8, 12, 16, 20, 24]));
    row(kimi_linear(), "linear_attn_config.full_attn_layers", json!([3, 4, 8, 12, 16, 20, 24, 27]));
    row(glm5_next(), "text_config.layer_types", json!(["linear_attention"]));
    // A name that is not known could be one for KDA.
    for kind in ["mamba", "kda", "Linear_attention", ""] {
        row(with(kimi_linear(), "num_hidden_layers", Some(json!(2))), "layer_types", json!(["linear_attention", kind]));
    }
    row(fla(), "use_short_conv", json!(1));
    row(fla(), "expand_v", json!(1e300));
    row(json!({"model_type": 3}), "model_type", json!(3));
    assert!(matches!(KdaConfig::from_hf(&json!([])), Err(ConfigError::Invalid { .. })));

    for eps in [json!(0), json!(-1e-5), json!(0.0)] {
        row(kimi_linear(), "rms_norm_eps", eps.clone());
        row(kimi_k3(), "text_config.rms_norm_eps", eps.clone());
        row(glm5_next(), "text_config.rms_norm_eps", eps.clone());
        row(bailing_hybrid(), "rms_norm_eps", eps.clone());
        row(fla(), "norm_eps", eps);
    }
    for bound in [json!(5), json!(0), json!(-0.0), json!("-5")] {
        row(kimi_linear(), "linear_attn_config.gate_lower_bound", bound.clone());
        row(kimi_k3(), "text_config.linear_attn_config.gate_lower_bound", bound.clone());
        row(glm5_next(), "text_config.linear_lower_bound", bound.clone());
        row(bailing_hybrid(), "kda_lower_bound", bound.clone());
        row(fla(), "lower_bound", bound);
    }
    row(fla(), "expand_v", json!(-1));
    // K3's text model alone calls itself `kimi_linear`, and is not.
    row(kimi_k3()["text_config"].clone(), "hidden_act", json!("situ"));

    // Fine one by one, but not together: the fields of the layer, which are FLA's keys, are named.
    for (config, path, value, field) in
        [(fla(), "num_v_heads", json!(24), "num_v_heads"), (fla(), "expand_v", json!(0.3), "expand_v")]
    {
        let error = KdaConfig::from_hf(&with(config, path, Some(value))).unwrap_err();
        assert!(matches!(&error, ConfigError::Layer(problem) if problem.contains(field)), "{path}: {error}");
    }
}

/// A list of layers is searched, not scanned, for each layer.
#[test]
fn long_lists_of_layers_are_read_at_once() {
    let layers = 1 << 20;
    let others: Vec<_> = (0..layers / 2).collect();
    let config = with(fla(), "num_hidden_layers", Some(json!(layers)));
    let config = with(config, "attn", Some(json!({"layers": others})));
    let start = std::time::Instant::now();
    assert_eq!(parse(&config).kda_layers.len(), layers / 2);
    // A scan takes minutes.
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}
