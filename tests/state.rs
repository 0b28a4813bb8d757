//! The state a sequence carries from call to call: a value that says all about the past.

mod common;
#[path = "state/files.rs"]
mod files;
#[path = "state/padding.rs"]
mod padding;
#[path = "state/precision.rs"]
mod precision;

use burn::tensor::{DType, Device, Tensor};
use burn_kda::{KdaConfig, KdaInput, KdaModule, KdaState, kda_step};
use common::array::{Array, gradient};
use common::calls::{every_split, run_in_calls};
use common::compare::Report;
use common::operator::Form;
use common::parameters::{configs, layer};
use common::platform::{bar, devices, platforms};
use common::recipe::{Decay, Random, Recipe};

/// What a layer returned, by name.
struct Returned(Vec<(&'static str, Array)>);

impl Returned {
    fn of((y, state): (Tensor<3>, KdaState)) -> Self {
        let Self(state) = Self::state(&state);
        Self(std::iter::once(("y", Array::of(y))).chain(state).collect())
    }

    fn state(KdaState { recurrent, conv }: &KdaState) -> Self {
        let conv = conv.iter().flat_map(|conv| [("conv.q", &conv.q), ("conv.k", &conv.k), ("conv.v", &conv.v)]);
        let conv = conv.map(|(name, x)| (name, Array::of(x.clone())));
        Self(std::iter::once(("recurrent", Array::of(recurrent.clone()))).chain(conv).collect())
    }

    fn check(&self, want: &Self, report: &mut Report, group: &str, what: &str, dtype: DType) {
        assert_eq!(self.0.len(), want.0.len(), "{group} {what}: tensors");
        for ((name, got), (_, want)) in self.0.iter().zip(&want.0) {
            report.check(group, format!("{what} {name}"), got, want, dtype, bar(dtype));
        }
    }

    #[track_caller]
    fn assert_same_bits(&self, want: &Self, what: &str) {
        assert_eq!(self.0.len(), want.0.len(), "{what}: tensors");
        for ((name, got), (_, want)) in self.0.iter().zip(&want.0) {
            assert_same_bits(got, want, &format!("{what}: {name}"));
        }
    }
}

#[track_caller]
fn assert_same_bits(got: &Array, want: &Array, what: &str) {
    assert_eq!(got.shape, want.shape, "{what}");
    assert!(got.values.iter().all(|x| x.is_finite()), "{what} is not finite");
    let different = got.values.iter().zip(&want.values).filter(|(got, want)| got.to_bits() != want.to_bits()).count();
    assert!(different == 0, "{what}: {different} of {} numbers differ", got.values.len());
}

/// Where right answers are computed, in f64.
fn reference(config: &KdaConfig, seed: u64) -> (KdaModule, Device) {
    (layer(config, seed, &Device::flex(), DType::F64), Device::flex())
}

fn tokens(config: &KdaConfig, batch: usize, time: usize, seed: u64) -> Array {
    Random::new(seed).normal(vec![batch, time, config.hidden_size])
}

fn span(x: &Tensor<3>, start: usize, end: usize) -> Tensor<3> {
    x.clone().slice_dim(1, start..end)
}

#[test]
fn every_split_of_the_operator_is_one_call() {
    let mut report = Report::new("operator in calls");
    let forms = [&[Form::Chunk(4)][..], &[Form::Recurrent], &[Form::Chunk(2), Form::Step, Form::Recurrent]];
    for (decay, state) in [(Decay::Uniform, true), (Decay::HardReset, true), (Decay::HardReset, false)] {
        let problem = Recipe { batch: 2, time: 7, decay, state, ..Recipe::default() }.problem();
        for (platform, device, dtype) in platforms() {
            for bounds in every_split(7) {
                for forms in forms {
                    let output = run_in_calls(&problem, problem.constants(&device, dtype), &bounds, forms);
                    let what = |name: &str| format!("{decay:?} {forms:?} {bounds:?} {name}");
                    report.check(&platform, what("o"), &Array::of(output.o), &problem.o, dtype, bar(dtype));
                    let state = Array::of(output.final_state);
                    report.check(&platform, what("final_state"), &state, &problem.final_state, dtype, bar(dtype));
                }
            }
        }
    }
    report.finish();
}

#[test]
fn every_split_of_the_layer_is_one_call() {
    let mut report = Report::new("layer in calls");
    for (name, config) in configs() {
        let x = tokens(&config, 2, 6, 1);
        let (exact, device) = reference(&config, 0);
        let want = Returned::of(exact.forward_recurrent(x.tensor(&device, DType::F64), None));
        for (platform, device, dtype) in platforms() {
            let layer = layer(&config, 0, &device, dtype);
            let x = x.tensor::<3>(&device, dtype);
            report.check(&platform, name, &Array::of(layer.forward(x.clone())), &want.0[0].1, dtype, bar(dtype));
            for form in [KdaModule::forward_with_state, KdaModule::forward_recurrent] {
                for bounds in every_split(6) {
                    let (mut outputs, mut state) = (Vec::new(), None);
                    for call in bounds.windows(2) {
                        let (y, next) = form(&layer, span(&x, call[0], call[1]), state);
                        outputs.push(y);
                        state = Some(next);
                    }
                    let got = Returned::of((Tensor::cat(outputs, 1), state.expect("a call")));
                    got.check(&want, &mut report, &platform, &format!("{name} {bounds:?}"), dtype);
                }
            }
        }
    }
    report.finish();
}

#[test]
fn a_call_without_tokens_returns_the_state() {
    for (name, config) in configs() {
        for (platform, device, dtype) in platforms() {
            let layer = layer(&config, 0, &device, dtype);
            let x = tokens(&config, 2, 5, 1).tensor::<3>(&device, dtype);
            let nothing = span(&x, 0, 0);
            assert_eq!(layer.forward(nothing.clone()).dims(), nothing.dims());
            for form in [KdaModule::forward_with_state, KdaModule::forward_recurrent] {
                let what = format!("{platform} {name}");
                let (y, empty) = form(&layer, nothing.clone(), None);
                assert_eq!(y.dims(), nothing.dims(), "{what}");
                assert!(Returned::state(&empty).0.iter().all(|(_, x)| x.values.iter().all(|&x| x == 0.0)), "{what}");

                let (_, state) = form(&layer, x.clone(), Some(empty));
                let (y, same) = form(&layer, nothing.clone(), Some(state.clone()));
                assert_eq!(y.dims(), nothing.dims(), "{what}");
                Returned::state(&same).assert_same_bits(&Returned::state(&state), &what);
            }
        }
    }
}

#[test]
fn an_old_state_is_a_rollback() {
    for (name, config) in configs() {
        for (platform, device, dtype) in platforms() {
            let layer = layer(&config, 0, &device, dtype);
            let x = tokens(&config, 2, 9, 1).tensor::<3>(&device, dtype);
            let (_, snapshot) = layer.forward_with_state(span(&x, 0, 5), None);
            let first = layer.forward_with_state(span(&x, 5, 7), Some(snapshot.clone()));
            let mut state = snapshot.clone();
            for t in 5..9 {
                state = layer.forward_with_state(span(&x, t, t + 1), Some(state)).1;
            }
            let again = layer.forward_with_state(span(&x, 5, 7), Some(snapshot));
            Returned::of(again).assert_same_bits(&Returned::of(first), &format!("{platform} {name}"));
        }
    }
}

/// Sizes at which a matrix product may block its rows.
fn large() -> KdaConfig {
    KdaConfig::new(96, 2, 32).with_num_v_heads(Some(4)).with_chunk_size(16)
}

#[test]
fn a_sequence_alone_is_the_sequence_in_a_batch_to_the_bit() {
    for (name, config) in configs().into_iter().chain([("large", large())]) {
        for (platform, device, dtype) in platforms() {
            let layer = layer(&config, 0, &device, dtype);
            for time in [1, 6, 35] {
                let x = tokens(&config, 3, time, 1).tensor::<3>(&device, dtype);
                for form in [KdaModule::forward_with_state, KdaModule::forward_recurrent] {
                    let (y, state) = form(&layer, x.clone(), None);
                    let next = form(&layer, span(&x, 0, 1), Some(state.clone()));
                    for row in 0..3 {
                        let what = format!("{platform} {name} T = {time} row {row}");
                        let at = |x: &Tensor<3>| x.clone().slice_dim(0, row..row + 1);
                        let alone = form(&layer, at(&x), None);
                        let alone_next = form(&layer, at(&span(&x, 0, 1)), Some(alone.1.clone()));
                        let batch = Returned::of((at(&y), state.slice(row..row + 1)));
                        Returned::of(alone).assert_same_bits(&batch, &what);
                        let batch = Returned::of((at(&next.0), next.1.slice(row..row + 1)));
                        Returned::of(alone_next).assert_same_bits(&batch, &format!("{what}, next token"));
                    }
                }
            }
        }
    }
}

#[test]
fn a_problem_alone_is_the_problem_in_a_batch_to_the_bit() {
    let one_head = |time| Recipe { batch: 3, time, heads: 1, group: 1, key_dim: 16, value_dim: 9, ..Recipe::default() };
    let regimes = Decay::ALL.map(|decay| Recipe { batch: 3, time: 37, decay, ..Recipe::default() });
    // Output and state of the batch have more than a megabyte, and may lie in memory in another way.
    let large = Recipe { batch: 3, time: 64, heads: 22, group: 1, key_dim: 64, value_dim: 64, ..Recipe::default() };
    for recipe in [1, 2, 5, 37].map(one_head).into_iter().chain(regimes).chain([large]) {
        let problem = recipe.problem();
        for (platform, device, dtype) in platforms() {
            for form in [Form::Chunk(16), Form::Chunk(64), Form::Recurrent, Form::Step] {
                let all = problem.constants(&device, dtype);
                let batch = problem.run(form, all.clone());
                let batch_next = next_token(all.input.clone(), problem.run(form, all.clone()).final_state);
                for row in 0..3 {
                    let at = |x: &Tensor<4>| x.clone().slice_dim(0, row..row + 1);
                    let mut alone = all.clone();
                    for x in [&mut alone.input.q, &mut alone.input.k, &mut alone.input.v, &mut alone.input.g] {
                        *x = at(x);
                    }
                    alone.input.beta = alone.input.beta.slice_dim(0, row..row + 1);
                    alone.state = alone.state.as_ref().map(at);
                    let alone_next = next_token(alone.input.clone(), problem.run(form, alone.clone()).final_state);
                    let alone = problem.run(form, alone);
                    let what = format!("{platform} {recipe:?} {form:?}");
                    assert_same_bits(&Array::of(alone.o.clone()), &Array::of(at(&batch.o)), &what);
                    assert_same_bits(&Array::of(alone.final_state), &Array::of(at(&batch.final_state)), &what);
                    for (alone, batch) in alone_next.into_iter().zip(&batch_next) {
                        assert_same_bits(&Array::of(alone), &Array::of(at(batch)), &format!("{what}, next token"));
                    }
                    // And so is what is computed from the output: on NdArray it could depend on the layout.
                    let (alone, batch) = (alone.o.sum_dim(3), at(&batch.o.clone().sum_dim(3)));
                    assert_same_bits(&Array::of(alone), &Array::of(batch), &format!("sum of {what}"));
                }
            }
        }
    }
}

/// Output and state of the first token once more, from a state that nothing else holds.
fn next_token(KdaInput { q, k, v, g, beta }: KdaInput, state: Tensor<4>) -> [Tensor<4>; 2] {
    let first = |x: Tensor<4>| x.slice_dim(1, 0..1).squeeze_dim::<3>(1);
    let beta = beta.slice_dim(1, 0..1).squeeze_dim::<2>(1);
    let (o, state) = kda_step(state, first(q), first(k), first(v), first(g), beta, 0.5);
    [o.unsqueeze_dim(1), state]
}

#[test]
fn a_run_repeats_to_the_bit() {
    for (name, config) in configs().into_iter().chain([("large", large())]) {
        for (platform, device, dtype) in platforms() {
            let layer = layer(&config, 0, &device, dtype);
            let x = tokens(&config, 3, 35, 1).tensor::<3>(&device, dtype);
            for form in [KdaModule::forward_with_state, KdaModule::forward_recurrent] {
                let first = Returned::of(form(&layer, x.clone(), None));
                for _ in 0..3 {
                    Returned::of(form(&layer, x.clone(), None)).assert_same_bits(&first, &format!("{platform} {name}"));
                }
            }
        }
    }
}

#[test]
fn states_split_and_join_along_the_batch() {
    for (name, config) in configs() {
        for (platform, device, dtype) in platforms() {
            let what = format!("{platform} {name}");
            let x = tokens(&config, 3, 5, 1).tensor::<3>(&device, dtype);
            let (_, state) = layer(&config, 0, &device, dtype).forward_with_state(x, None);
            assert_eq!(state.batch_size(), 3);
            let parts = state.split();
            assert_eq!(parts.iter().map(KdaState::batch_size).collect::<Vec<_>>(), [1, 1, 1]);
            Returned::state(&KdaState::cat(parts.clone())).assert_same_bits(&Returned::state(&state), &what);
            let tail = KdaState::cat(vec![parts[1].clone(), parts[2].clone()]);
            Returned::state(&state.slice(1..3)).assert_same_bits(&Returned::state(&tail), &what);
        }
    }
}

#[test]
fn states_move_between_devices() {
    let config = KdaConfig::new(10, 2, 4);
    for (_, from) in devices() {
        let x = tokens(&config, 2, 5, 1).tensor::<3>(&from, DType::F32);
        let (_, state) = layer(&config, 0, &from, DType::F32).forward_with_state(x, None);
        for (_, to) in devices() {
            let moved = state.clone().to_device(&to);
            assert_eq!(moved.recurrent.device(), to);
            assert_eq!(moved.conv.as_ref().expect("a convolution").q.device(), to);
            Returned::state(&moved).assert_same_bits(&Returned::state(&state), "moved");
        }
    }
}

#[test]
fn a_detached_state_carries_no_gradient() {
    let config = KdaConfig::new(10, 2, 4);
    for (platform, device, dtype) in platforms() {
        let layer = layer(&config, 0, &device.clone().autodiff(), dtype);
        let x = tokens(&config, 2, 5, 1).leaf::<3>(&device, dtype);
        let next = tokens(&config, 2, 2, 2).tensor::<3>(&x.device(), dtype);
        let (_, state) = layer.forward_with_state(x.clone(), None);
        let (y, _) = layer.forward_with_state(next.clone(), Some(state.clone().detach()));
        assert!(!y.is_tracked(), "{platform}");
        let (y, _) = layer.forward_with_state(next, Some(state));
        assert!(gradient(&x, &y.sum().backward()).values.iter().all(|&x| x != 0.0 && x.is_finite()), "{platform}");
    }
}
