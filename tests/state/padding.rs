//! Batches of sequences of different lengths: padded, and packed.

use burn::tensor::{Bool, DType, Tensor, TensorData};
use burn_kda::{KdaConfig, KdaState};

use super::{Report, Returned, assert_same_bits, configs, gradient, layer, platforms, reference, tokens};
use crate::common::array::Array;

/// Left, right, holes, all live, none live, one token.
const MASK: [[u8; 9]; 6] = [
    [0, 0, 0, 1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 0, 0, 0, 0],
    [0, 1, 1, 0, 1, 0, 0, 1, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, 0, 0, 0, 1],
];
const TIME: usize = MASK[0].len();

fn mask(rows: &[[u8; TIME]]) -> (Vec<bool>, TensorData) {
    let flat: Vec<_> = rows.iter().flatten().map(|&live| live == 1).collect();
    (flat.clone(), TensorData::new(flat, [rows.len(), TIME]))
}

/// Each row's live tokens on their own, in f64: the rows of `y`, zero elsewhere, and the states.
fn want(config: &KdaConfig, x: &Array, mask: &[bool]) -> Returned {
    let (layer, device) = reference(config, 0);
    let [batch, time, hidden] = x.shape[..] else { unreachable!("three dimensions") };
    let mut y = Array::zeros(x.shape.clone());
    let mut states = Vec::new();
    for row in 0..batch {
        let live: Vec<_> = (0..time).map(|t| row * time + t).filter(|&i| mask[i]).collect();
        let rows = live.iter().flat_map(|&i| &x.values[i * hidden..(i + 1) * hidden]).copied().collect();
        let alone = Array::new(vec![1, live.len(), hidden], rows);
        let (out, state) = layer.forward_recurrent(alone.tensor(&device, DType::F64), None);
        for (&i, out) in live.iter().zip(Array::of(out).values.chunks(hidden)) {
            y.values[i * hidden..(i + 1) * hidden].copy_from_slice(out);
        }
        states.push(state);
    }
    let mut all = Returned::state(&KdaState::cat(states));
    all.0.insert(0, ("y", y));
    all
}

/// `x` with another number wherever the mask is false.
fn padded_with(x: &Array, mask: &[bool], pad: f64) -> Array {
    let hidden = x.shape[2];
    let value = |(i, &x): (usize, &f64)| if mask[i / hidden] { x } else { pad };
    Array::new(x.shape.clone(), x.values.iter().enumerate().map(value).collect())
}

#[test]
fn padding_is_inert_whatever_it_holds() {
    let mut report = Report::new("padded");
    let (live, data) = mask(&MASK);
    for (name, config) in configs() {
        let x = tokens(&config, MASK.len(), TIME, 1);
        let want = want(&config, &x, &live);
        for (platform, device, dtype) in platforms() {
            let layer = layer(&config, 0, &device, dtype);
            let mask = Tensor::<2, Bool>::from_data(data.clone(), &device);
            let run = |pad| {
                let x = padded_with(&x, &live, pad).tensor::<3>(&device, dtype);
                Returned::of(layer.forward_with_mask(x, mask.clone()))
            };
            let zeros = run(0.0);
            zeros.check(&want, &mut report, &platform, name, dtype);
            let y = zeros.0[0].1.values.chunks(config.hidden_size).zip(&live);
            assert!(y.filter(|(_, live)| !**live).all(|(y, _)| y.iter().all(|&y| y == 0.0)), "{platform} {name}");
            for pad in [1.0, -1e30, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                run(pad).assert_same_bits(&zeros, &format!("{platform} {name} padded with {pad}"));
            }
        }
    }
    report.finish();
}

#[test]
fn gradients_do_not_see_padding() {
    let (live, data) = mask(&MASK);
    let (_, config) = &configs()[1];
    let x = tokens(config, MASK.len(), TIME, 1);
    for (platform, device, dtype) in platforms() {
        let layer = layer(config, 0, &device.clone().autodiff(), dtype);
        let gradients = [0.0, f64::NAN].map(|pad| {
            let x = padded_with(&x, &live, pad).leaf::<3>(&device, dtype);
            let mask = Tensor::<2, Bool>::from_data(data.clone(), &x.device());
            let (y, _) = layer.forward_with_mask(x.clone(), mask);
            gradient(&x, &y.square().sum().backward())
        });
        assert_same_bits(&gradients[1], &gradients[0], &platform);
        for (i, row) in gradients[0].values.chunks(config.hidden_size).enumerate() {
            assert_eq!(row.iter().any(|&x| x != 0.0), live[i], "{platform} token {i}");
        }
    }
}

#[test]
fn a_batch_of_padding_alone_or_of_nothing_has_empty_states() {
    for (name, config) in configs() {
        for (platform, device, dtype) in platforms() {
            let layer = layer(&config, 0, &device, dtype);
            let none_live = Tensor::<3>::full([2, 4, config.hidden_size], f64::NAN, (&device, dtype));
            let no_tokens = none_live.clone().slice_dim(1, 0..0);
            for x in [none_live, no_tokens] {
                let [batch, time, _] = x.dims();
                let mask =
                    Tensor::<2, Bool>::from_data(TensorData::new(vec![false; batch * time], [batch, time]), &device);
                let (y, state) = layer.forward_with_mask(x.clone(), mask);
                assert_eq!(y.dims(), x.dims(), "{platform} {name}");
                let got = Returned::of((y, state));
                assert!(got.0.iter().all(|(_, x)| x.values.iter().all(|&x| x == 0.0)), "{platform} {name}");
                assert_eq!(got.0[1].1.shape[0], 2, "{platform} {name}");
            }
        }
    }
}

#[test]
fn packed_sequences_are_separate_ones() {
    let mut report = Report::new("packed");
    let all_bounds: [&[usize]; 6] =
        [&[0, 0, 1, 4, 4, 9], &[0, 1, 2, 3], &[0, 9], &[0, 0], &[0, 0, 0, 5, 6, 6], &[0, 6, 7, 13, 20]];
    for (name, config) in configs() {
        let (exact, exact_device) = reference(&config, 0);
        for bounds in all_bounds {
            let (sequences, time) = (bounds.len() - 1, bounds[bounds.len() - 1]);
            let (x, past) = (tokens(&config, 1, time, 1), tokens(&config, sequences, 5, 2));
            for carried in [false, true] {
                let x_exact = x.tensor::<3>(&exact_device, DType::F64);
                let (_, states) = exact.forward_with_state(past.tensor(&exact_device, DType::F64), None);
                let (mut outputs, mut finals) = (Vec::new(), Vec::new());
                for (n, span) in bounds.windows(2).enumerate() {
                    let state = carried.then(|| states.slice(n..n + 1));
                    let (y, state) = exact.forward_recurrent(super::span(&x_exact, span[0], span[1]), state);
                    outputs.push(y);
                    finals.push(state);
                }
                let want = Returned::of((Tensor::cat(outputs, 1), KdaState::cat(finals)));
                for (platform, device, dtype) in platforms() {
                    let layer = layer(&config, 0, &device, dtype);
                    let (_, states) = layer.forward_with_state(past.tensor(&device, dtype), None);
                    let got = layer.forward_packed(x.tensor(&device, dtype), bounds, carried.then_some(states));
                    let what = format!("{name} {bounds:?} carried: {carried}");
                    Returned::of(got).check(&want, &mut report, &platform, &what, dtype);
                }
            }
        }
    }
    report.finish();
}
