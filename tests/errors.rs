//! Bad input panics before any work with a message that names the function and the argument.

mod common;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

use burn::tensor::{Bool, DType, Device, Tensor};
use burn_kda::*;

thread_local! {
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// The message of the panic in `call`, which is not printed.
fn message(call: impl FnOnce()) -> Option<String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let default = take_hook();
        set_hook(Box::new(move |info| {
            if !EXPECTED.get() {
                default(info)
            }
        }));
    });
    EXPECTED.set(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    EXPECTED.set(false);
    let payload = result.err()?;
    let text = payload.downcast_ref::<String>().cloned();
    text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
}

/// A table of bad calls: what is wrong, the function and the argument that the message must name, the call.
#[derive(Default)]
struct Table(Vec<String>, usize);

impl Table {
    fn row(&mut self, what: &str, function: &str, argument: &str, call: impl FnOnce()) {
        self.1 += 1;
        let Some(message) = message(call) else { return self.0.push(format!("{what}: accepted")) };
        let named = message.starts_with(&format!("{function}: ")) && message.contains(&format!("`{argument}`"));
        if !(named && message.contains(", got ") && !message.contains('\n')) {
            self.0.push(format!("{what}: want {function} and `{argument}`, got: {message}"));
        }
    }

    fn finish(self) {
        assert!(self.1 > 0);
        assert!(self.0.is_empty(), "{} of {} rows:\n{}", self.0.len(), self.1, self.0.join("\n"));
    }
}

/// Sizes of the right call; each row changes one thing.
const B: usize = 2;
const T: usize = 6;
const H: usize = 2;
const HV: usize = 4;
const K: usize = 5;
const V: usize = 3;

fn zeros<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::zeros(shape, (&Device::flex(), DType::F32))
}

fn input() -> KdaInput {
    let (key, value) = (zeros([B, T, H, K]), zeros([B, T, HV, V]));
    KdaInput { q: key.clone(), k: key, v: value, g: zeros([B, T, HV, K]), beta: zeros([B, T, HV]) }
}

/// One sequence, for `cu_seqlens`.
fn one() -> KdaInput {
    let KdaInput { q, k, v, g, beta } = input();
    let first = |x: Tensor<4>| x.slice_dim(0, 0..1);
    KdaInput { q: first(q), k: first(k), v: first(v), g: first(g), beta: beta.slice_dim(0, 0..1) }
}

#[test]
fn operator() {
    let mut table = Table::default();
    for (function, call) in
        [("chunk_kda", chunk_kda as fn(KdaInput, KdaOptions) -> KdaOutput), ("recurrent_kda", recurrent_kda)]
    {
        let options = KdaOptions::default;
        assert_eq!(message(|| drop(call(input(), options()))), None, "the right call");

        let inputs: [(&str, &str, KdaInput); 24] = [
            ("no heads", "q", KdaInput { q: zeros([B, T, 0, K]), ..input() }),
            ("no key channels", "q", KdaInput { q: zeros([B, T, H, 0]), ..input() }),
            ("no value heads", "v", KdaInput { v: zeros([B, T, 0, V]), ..input() }),
            ("no value channels", "v", KdaInput { v: zeros([B, T, HV, 0]), ..input() }),
            ("HV % H != 0", "v", KdaInput { v: zeros([B, T, 3, V]), ..input() }),
            ("HV < H", "v", KdaInput { v: zeros([B, T, 1, V]), ..input() }),
            ("heads of k", "k", KdaInput { k: zeros([B, T, HV, K]), ..input() }),
            ("width of k", "k", KdaInput { k: zeros([B, T, H, K + 1]), ..input() }),
            ("length of k", "k", KdaInput { k: zeros([B, T - 1, H, K]), ..input() }),
            ("batch of k", "k", KdaInput { k: zeros([1, T, H, K]), ..input() }),
            ("length of v", "v", KdaInput { v: zeros([B, T + 1, HV, V]), ..input() }),
            ("batch of v", "v", KdaInput { v: zeros([1, T, HV, V]), ..input() }),
            ("g per head of q", "g", KdaInput { g: zeros([B, T, H, K]), ..input() }),
            ("g per head only", "g", KdaInput { g: zeros([B, T, HV, 1]), ..input() }),
            ("g as wide as v", "g", KdaInput { g: zeros([B, T, HV, V]), ..input() }),
            ("length of g", "g", KdaInput { g: zeros([B, 1, HV, K]), ..input() }),
            ("beta per head of q", "beta", KdaInput { beta: zeros([B, T, H]), ..input() }),
            ("length of beta", "beta", KdaInput { beta: zeros([B, 1, HV]), ..input() }),
            ("k in f64", "k", KdaInput { k: input().k.cast(DType::F64), ..input() }),
            ("v in f64", "v", KdaInput { v: input().v.cast(DType::F64), ..input() }),
            ("v in bf16", "v", KdaInput { v: input().v.cast(DType::BF16), ..input() }),
            ("g in f64", "g", KdaInput { g: input().g.cast(DType::F64), ..input() }),
            ("g in bf16", "g", KdaInput { g: input().g.cast(DType::BF16), ..input() }),
            ("beta in f64", "beta", KdaInput { beta: input().beta.cast(DType::F64), ..input() }),
        ];
        for (what, argument, input) in inputs {
            table.row(what, function, argument, || drop(call(input, options())));
        }

        let state = |shape| options().with_initial_state(zeros(shape));
        let settings = [
            ("chunk size 0", "chunk_size", options().with_chunk_size(0)),
            ("chunk size 48", "chunk_size", options().with_chunk_size(48)),
            ("chunk size 256", "chunk_size", options().with_chunk_size(256)),
            ("scale NaN", "scale", options().with_scale(f64::NAN)),
            ("infinite scale", "scale", options().with_scale(f64::INFINITY)),
            ("cu_seqlens for two rows", "cu_seqlens", options().with_cu_seqlens(vec![0, T])),
            ("state V-first", "initial_state", state([B, HV, V, K])),
            ("state per head of q", "initial_state", state([B, H, K, V])),
            ("state of one row", "initial_state", state([1, HV, K, V])),
            ("state in f64", "initial_state", options().with_initial_state(zeros([B, HV, K, V]).cast(DType::F64))),
            ("state in bf16", "initial_state", options().with_initial_state(zeros([B, HV, K, V]).cast(DType::BF16))),
        ];
        for (what, argument, options) in settings {
            table.row(what, function, argument, || drop(call(input(), options)));
        }

        for (what, bounds) in bad_bounds() {
            table.row(what, function, "cu_seqlens", || drop(call(one(), options().with_cu_seqlens(bounds))));
        }
        let packed = options().with_cu_seqlens(vec![0, 2, T]).with_initial_state(zeros([1, HV, K, V]));
        table.row("one state for two sequences", function, "initial_state", || drop(call(one(), packed)));
    }
    table.finish();
}

fn bad_bounds() -> [(&'static str, Vec<usize>); 8] {
    [
        ("no bounds", vec![]),
        ("one bound", vec![0]),
        ("not from 0", vec![1, T]),
        ("decreasing", vec![0, 4, 3, T]),
        ("decreasing below 0", vec![0, 4, 0, T]),
        ("ends early", vec![0, T - 1]),
        ("ends late", vec![0, T + 1]),
        ("past the end in between", vec![0, T + 2, T]),
    ]
}

#[test]
fn step() {
    let mut table = Table::default();
    let state = || zeros([B, HV, K, V]);
    let (key, value, decay, beta) = (zeros([B, H, K]), zeros([B, HV, V]), zeros([B, HV, K]), zeros([B, HV]));
    let right = || (state(), key.clone(), key.clone(), value.clone(), decay.clone(), beta.clone());
    type Arguments = (Tensor<4>, Tensor<3>, Tensor<3>, Tensor<3>, Tensor<3>, Tensor<2>);
    let call = |(state, q, k, v, g, beta): Arguments, scale| drop(kda_step(state, q, k, v, g, beta, scale));
    assert_eq!(message(|| call(right(), 1.0)), None, "the right call");

    type Change<'a> = &'a dyn Fn(&mut Arguments);
    let changed = |change: Change| {
        let mut arguments = right();
        change(&mut arguments);
        arguments
    };
    let rows: [(&str, &str, Change); 12] = [
        ("no heads", "q", &|x| (x.1, x.2) = (zeros([B, 0, K]), zeros([B, 0, K]))),
        ("state V-first", "state", &|x| x.0 = zeros([B, HV, V, K])),
        ("state per head of q", "state", &|x| x.0 = zeros([B, H, K, V])),
        ("state of one row", "state", &|x| x.0 = zeros([1, HV, K, V])),
        ("state in f64", "state", &|x| x.0 = state().cast(DType::F64)),
        ("q of one row", "k", &|x| x.1 = zeros([1, H, K])),
        ("width of k", "k", &|x| x.2 = zeros([B, H, K - 1])),
        ("k in f64", "k", &|x| x.2 = key.clone().cast(DType::F64)),
        ("HV % H != 0", "v", &|x| x.3 = zeros([B, 3, V])),
        ("g per head of q", "g", &|x| x.4 = zeros([B, H, K])),
        ("beta per head of q", "beta", &|x| x.5 = zeros([B, H])),
        ("beta in f64", "beta", &|x| x.5 = beta.clone().cast(DType::F64)),
    ];
    for (what, argument, change) in rows {
        table.row(what, "kda_step", argument, || call(changed(change), 1.0));
    }
    table.row("scale NaN", "kda_step", "scale", || call(right(), f64::NAN));
    table.finish();
}

#[test]
fn gates_norms_and_convolution() {
    let mut table = Table::default();
    let raw = || zeros([B, T, HV, K]);
    let gate = |a_log: Option<usize>, dt_bias: Option<usize>, decay| {
        drop(decay_gate(raw(), a_log.map(|n| zeros([n])), dt_bias.map(|n| zeros([n])), decay))
    };
    assert_eq!(message(|| gate(Some(HV), Some(HV * K), DecayFn::Softplus)), None, "the right call");
    for decay in [DecayFn::Softplus, DecayFn::SIGMOID] {
        table.row("a_log per head of q", "decay_gate", "a_log", || gate(Some(H), Some(HV * K), decay));
        table.row("a_log of one number", "decay_gate", "a_log", || gate(Some(1), None, decay));
        table.row("dt_bias per head", "decay_gate", "dt_bias", || gate(Some(HV), Some(HV), decay));
        table.row("dt_bias per head of q", "decay_gate", "dt_bias", || gate(Some(HV), Some(H), decay));
        table.row("dt_bias per channel", "decay_gate", "dt_bias", || gate(Some(HV), Some(K), decay));
    }
    table.row("softplus without a_log", "decay_gate", "a_log", || gate(None, Some(HV * K), DecayFn::Softplus));
    for lower_bound in [0.0, 5.0, f64::NAN, f64::NEG_INFINITY] {
        let decay = DecayFn::Sigmoid { lower_bound };
        table.row("lower bound", "decay_gate", "lower_bound", || gate(Some(HV), None, decay));
    }

    let norm = |weight, gate| drop(gated_rms_norm(zeros([B, T, HV, V]), zeros([weight]), zeros(gate), 1e-5));
    assert_eq!(message(|| norm(V, [B, T, HV, V])), None, "the right call");
    table.row("norm weight of K", "gated_rms_norm", "weight", || norm(K, [B, T, HV, V]));
    table.row("norm weight of all heads", "gated_rms_norm", "weight", || norm(HV * V, [B, T, HV, V]));
    table.row("norm gate per head", "gated_rms_norm", "gate", || norm(V, [B, T, HV, 1]));
    table.row("norm gate of one row", "gated_rms_norm", "gate", || norm(V, [1, T, HV, V]));

    const D: usize = 7;
    let conv = |weight, bias: Option<usize>, state: Option<Tensor<3>>| {
        drop(short_convolution(zeros([B, T, D]), zeros(weight), bias.map(|n| zeros([n])), state))
    };
    assert_eq!(message(|| conv([D, 1, 4], Some(D), Some(zeros([B, D, 3])))), None, "the right call");
    table.row("weight of other channels", "short_convolution", "weight", || conv([D + 1, 1, 4], None, None));
    table.row("dense weight", "short_convolution", "weight", || conv([D, D, 4], None, None));
    table.row("weight without taps", "short_convolution", "weight", || conv([D, 1, 0], None, None));
    table.row("conv bias", "short_convolution", "bias", || conv([D, 1, 4], Some(1), None));
    table.row("conv state W long", "short_convolution", "state", || conv([D, 1, 4], None, Some(zeros([B, D, 4]))));
    table.row("conv state time-first", "short_convolution", "state", || conv([D, 1, 4], None, Some(zeros([B, 3, D]))));
    table.row("conv state of one row", "short_convolution", "state", || conv([D, 1, 4], None, Some(zeros([1, D, 3]))));
    let wide = || zeros([B, D, 3]).cast(DType::F64);
    table.row("conv state in f64", "short_convolution", "state", || conv([D, 1, 4], None, Some(wide())));
    table.finish();
}

#[test]
fn configuration() {
    let mut table = Table::default();
    let right = || KdaConfig::new(8, H, K);
    let device = Device::flex();
    assert_eq!(message(|| drop(right().init(&device))), None, "the right configuration");
    let rows = [
        ("hidden_size", KdaConfig::new(0, H, K)),
        ("num_heads", KdaConfig::new(8, 0, K)),
        ("head_dim", KdaConfig::new(8, H, 0)),
        ("num_v_heads", right().with_num_v_heads(Some(0))),
        ("num_v_heads", right().with_num_v_heads(Some(3))),
        ("num_v_heads", right().with_num_v_heads(Some(1))),
        ("expand_v", right().with_expand_v(1.5)),
        ("expand_v", right().with_expand_v(0.0)),
        ("expand_v", right().with_expand_v(-1.0)),
        ("expand_v", right().with_expand_v(f64::NAN)),
        ("expand_v", right().with_expand_v(f64::INFINITY)),
        ("decay_projection", right().with_decay_projection(Projection::LowRank(0))),
        ("output_gate", right().with_output_gate(Projection::LowRank(0))),
        ("conv_size", right().with_conv_size(Some(0))),
        ("norm_eps", right().with_norm_eps(0.0)),
        ("norm_eps", right().with_norm_eps(-1e-5)),
        ("norm_eps", right().with_norm_eps(f64::NAN)),
        ("chunk_size", right().with_chunk_size(0)),
        ("chunk_size", right().with_chunk_size(48)),
        ("chunk_size", right().with_chunk_size(256)),
        ("lower_bound", right().with_decay(DecayFn::Sigmoid { lower_bound: 0.0 })),
        ("lower_bound", right().with_decay(DecayFn::Sigmoid { lower_bound: 1.0 })),
        ("lower_bound", right().with_decay(DecayFn::Sigmoid { lower_bound: f64::NAN })),
    ];
    for (field, config) in rows {
        table.row(&format!("{field} in {config:?}"), "KdaConfig", field, || drop(config.init(&device)));
    }
    table.finish();
}

#[test]
fn layer() {
    const HIDDEN: usize = 8;
    let mut table = Table::default();
    let device = Device::flex();
    let layer = KdaConfig::new(HIDDEN, H, K).with_num_v_heads(Some(HV)).init(&device);
    let bare = KdaConfig::new(HIDDEN, H, K).with_num_v_heads(Some(HV)).with_conv_size(None).init(&device);
    let x = || zeros([B, T, HIDDEN]);
    let (_, state) = layer.forward_with_state(x(), None);
    let (_, bare_state) = bare.forward_with_state(x(), None);

    table.row("hidden size", "KdaModule::forward", "x", || drop(layer.forward(zeros([B, T, HIDDEN + 1]))));
    table.row("x in f64", "KdaModule::forward", "x", || drop(layer.forward(x().cast(DType::F64))));
    table.row("x in bf16", "KdaModule::forward", "x", || drop(layer.forward(x().cast(DType::BF16))));

    let changed = |change: &dyn Fn(&mut KdaState)| {
        let mut state = state.clone();
        change(&mut state);
        state
    };
    let conv = |change: &dyn Fn(&mut ConvState)| changed(&|state| change(state.conv.as_mut().expect("a convolution")));
    let states = [
        ("state of one row", "state.recurrent", state.slice(0..1)),
        ("state V-first", "state.recurrent", changed(&|state| state.recurrent = zeros([B, HV, K + 1, K]))),
        ("state per head of q", "state.recurrent", changed(&|state| state.recurrent = zeros([B, H, K, K]))),
        ("state in f64", "state.recurrent", changed(&|state| state.recurrent = zeros([B, HV, K, K]).cast(DType::F64))),
        ("no convolution state", "state.conv", bare_state.clone()),
        ("q state of another width", "state.conv.q", conv(&|conv| conv.q = zeros([B, H * K, 4]))),
        ("k state of other channels", "state.conv.k", conv(&|conv| conv.k = zeros([B, HV * K, 3]))),
        ("v state of one row", "state.conv.v", conv(&|conv| conv.v = zeros([1, HV * K, 3]))),
        ("v state in f64", "state.conv.v", conv(&|conv| conv.v = zeros([B, HV * K, 3]).cast(DType::F64))),
    ];
    for (what, argument, state) in states {
        for (function, form) in [
            ("KdaModule::forward_with_state", KdaModule::forward_with_state as fn(&KdaModule, _, _) -> _),
            ("KdaModule::forward_recurrent", KdaModule::forward_recurrent),
        ] {
            let state = state.clone();
            let call = || drop::<(Tensor<3>, KdaState)>(form(&layer, x(), Some(state)));
            table.row(what, function, argument, call);
        }
    }
    table.row("a convolution state too many", "KdaModule::forward_with_state", "state.conv", || {
        drop(bare.forward_with_state(x(), Some(state.clone())))
    });

    let packed = |x, bounds: &[usize], state| drop(layer.forward_packed(x, bounds, state));
    let function = "KdaModule::forward_packed";
    for (what, bounds) in bad_bounds() {
        table.row(what, function, "cu_seqlens", || packed(zeros([1, T, HIDDEN]), &bounds, None));
    }
    table.row("two packed rows", function, "x", || packed(x(), &[0, T], None));
    table.row("one state for two sequences", function, "state.recurrent", || {
        packed(zeros([1, T, HIDDEN]), &[0, 2, T], Some(state.slice(0..1)))
    });

    let function = "KdaModule::forward_with_mask";
    let mask = |shape: [usize; 2]| Tensor::<2, Bool>::full(shape, true, &device);
    table.row("length of the mask", function, "mask", || drop(layer.forward_with_mask(x(), mask([B, T + 1]))));
    table.row("rows of the mask", function, "mask", || drop(layer.forward_with_mask(x(), mask([1, T]))));
    table.row("hidden size", function, "x", || drop(layer.forward_with_mask(zeros([B, T, 3]), mask([B, T]))));

    for rows in [0..0, 1..1, 1..3, 3..4] {
        table.row(&format!("rows {rows:?}"), "KdaState::slice", "rows", || drop(state.slice(rows)));
    }
    let cat = |states| drop(KdaState::cat(states));
    table.row("nothing to join", "KdaState::cat", "states", || cat(vec![]));
    table.row("with and without convolution", "KdaState::cat", "states", || {
        cat(vec![state.clone(), bare_state.clone()])
    });
    let other = || changed(&|state| state.recurrent = zeros([B, HV, K, K + 1]));
    table.row("states of other shapes", "KdaState::cat", "states", || cat(vec![state.clone(), other()]));
    table.finish();
}
