//! Where formulas divide by zero, saturate or have a kink in their pieces.

use super::*;
use crate::common::array::gradient;

/// `dx = w / n - x (x . w) / n^3`, `n = sqrt(x . x + 1e-6)`: zero rows and rows at the epsilon too, where the curvature
/// is too strong for differences.
#[test]
fn l2_norm_of_zero_rows_has_its_gradient() {
    let mut report = Report::new("gradients of the l2 norm");
    let weights = [0.3, -1.2, 0.7];
    for scale in [0.0, 1e-12, 1e-4, 1e-3, 1e-2, 1.0, 1e6] {
        let x = [1.0, -2.0, 0.5].map(|x| f64::from((x * scale) as f32));
        let dot = |a: [f64; 3], b: [f64; 3]| (0..3).map(|i| a[i] * b[i]).sum::<f64>();
        let norm = (dot(x, x) + 1e-6).sqrt();
        let want = (0..3).map(|i| weights[i] / norm - x[i] * dot(x, weights) / norm.powi(3)).collect();
        let want = Array::new(vec![1, 3], want);
        for (platform, device, dtype) in platforms() {
            let x = Array::new(vec![1, 3], x.to_vec()).leaf::<2>(&device, dtype);
            let cotangent = Array::new(vec![1, 3], weights.to_vec()).tensor(&x.device(), dtype);
            let gradients = (l2_normalize(x.clone()) * cotangent).sum().backward();
            report.check(&platform, format!("x of {scale}"), &gradient(&x, &gradients), &want, dtype, bar(dtype));
        }
    }
    report.finish();
}

/// Value and gradient of `f` at each of `points`.
fn values_and_slopes(
    points: &[f64],
    device: &Device,
    dtype: DType,
    f: impl Fn(Tensor<1>) -> Tensor<1>,
) -> (Vec<f64>, Vec<f64>) {
    let x = Array::new(vec![points.len()], points.to_vec()).leaf::<1>(device, dtype);
    let y = f(x.clone());
    let gradients = y.clone().sum().backward();
    (Array::of(y).values, gradient(&x, &gradients).values)
}

#[test]
fn gradients_at_exactly_zero() {
    for (platform, device, dtype) in platforms() {
        let slope = |f: &dyn Fn(Tensor<1>) -> Tensor<1>| values_and_slopes(&[0.0], &device, dtype, f).1[0];
        let beta = |twice| move |x: Tensor<1>| flat(write_strength(x.reshape([1, 1, 1]), twice));
        assert_eq!(slope(&beta(false)), 0.25, "{platform} sigmoid");
        assert_eq!(slope(&beta(true)), 0.5, "{platform} doubled sigmoid");
        let gate = |decay| {
            move |x: Tensor<1>| {
                let one = Tensor::zeros([1], (&x.device(), x.dtype()));
                flat(decay_gate(x.reshape([1, 1, 1, 1]), Some(one), None, decay))
            }
        };
        assert_eq!(slope(&gate(DecayFn::Softplus)), -0.5, "{platform} softplus");
        assert_eq!(slope(&gate(DecayFn::SIGMOID)), -1.25, "{platform} bounded gate");
        let silu = |x: Tensor<1>| {
            let tap = Tensor::ones([1, 1, 1], (&x.device(), x.dtype()));
            flat(short_convolution(x.reshape([1, 1, 1]), tap, None, None).y)
        };
        assert_eq!(slope(&silu), 0.5, "{platform} silu");
    }
}

#[test]
fn saturated_gates_have_their_limit_and_no_gradient() {
    let far = [-f64::INFINITY, f64::from(f32::MIN), -1e4, -1e3, 1e3, 1e4, f64::from(f32::MAX), f64::INFINITY];
    for (platform, device, dtype) in platforms() {
        let gate = |decay, a_log: f64| {
            move |x: Tensor<1>| {
                let points = x.dims()[0];
                let a_log = Tensor::full([1], a_log, (&x.device(), x.dtype()));
                flat(decay_gate(x.reshape([1, points, 1, 1]), Some(a_log), None, decay))
            }
        };
        for a_log in [-50.0, 0.0, 2.0, 50.0] {
            let (g, slope) = values_and_slopes(&far, &device, dtype, gate(DecayFn::Softplus, a_log));
            for (i, x) in far.iter().enumerate() {
                let what = format!("{platform} softplus gate, A_log {a_log}, z {x}: {} and {}", g[i], slope[i]);
                // Below, nothing decays; above, the gate is the line -exp(A_log) z.
                let rate = f64::exp(a_log.clamp(-10.0, 20.0));
                let (limit, steepness) = if *x < 0.0 { (0.0, 0.0) } else { (-rate * x, -rate) };
                let close = |got: f64, want: f64| got == want || (got / want - 1.0).abs() < 1e-6;
                let overflows = dtype == DType::F32 && limit < f64::from(f32::MIN);
                assert!(close(g[i], if overflows { f64::NEG_INFINITY } else { limit }), "{what}");
                assert!(close(slope[i], steepness), "{what}");
            }
        }
        for a_log in [0.0, 2.0, 50.0] {
            let (g, slope) = values_and_slopes(&far, &device, dtype, gate(DecayFn::SIGMOID, a_log));
            for (i, x) in far.iter().enumerate() {
                let what = format!("{platform} sigmoid gate, A_log {a_log}, z {x}: {} and {}", g[i], slope[i]);
                assert_eq!(g[i], if *x < 0.0 { 0.0 } else { -5.0 }, "{what}");
                assert_eq!(slope[i], 0.0, "{what}");
            }
        }
        for twice in [false, true] {
            let beta = |x: Tensor<1>| {
                let points = x.dims()[0];
                flat(write_strength(x.reshape([1, points, 1]), twice))
            };
            let (beta, slope) = values_and_slopes(&far, &device, dtype, beta);
            for (i, x) in far.iter().enumerate() {
                let limit = if *x < 0.0 { 0.0 } else { 1.0 + f64::from(u8::from(twice)) };
                assert_eq!((beta[i], slope[i]), (limit, 0.0), "{platform} beta of {x}");
            }
        }
    }
}

/// At `g = -inf` the state is forgotten, whatever the rate; but for Burn's own product of zero and infinity, where it
/// differentiates each operation.
#[test]
fn an_infinite_gate_has_no_gradient() {
    if std::env::var("BURN_KDA_PLAIN").is_ok_and(|mode| mode == "composed") {
        return;
    }
    for (platform, device, dtype) in platforms() {
        for decay in [DecayFn::Softplus, DecayFn::SIGMOID] {
            let a_log = Array::new(vec![1], vec![1.0]).leaf::<1>(&device, dtype);
            let raw = Array::new(vec![1, 2, 1, 1], vec![f64::INFINITY, 0.5]).leaf::<4>(&device, dtype);
            let weight = Array::new(vec![1, 2, 1, 1], vec![1.0, 0.0]).tensor(&raw.device(), dtype);
            let loss = (decay_gate(raw.clone(), Some(a_log.clone()), None, decay).exp() * weight).sum();
            let gradients = loss.backward();
            let slopes = [gradient(&a_log, &gradients).values, gradient(&raw, &gradients).values].concat();
            assert_eq!(slopes, [0.0; 3], "{platform} {decay:?}");
        }
    }
}

/// Outside its range `A_log` is a constant.
#[test]
fn clamped_a_log_has_no_gradient() {
    for (platform, device, dtype) in platforms() {
        for decay in [DecayFn::Softplus, DecayFn::SIGMOID] {
            let gate = |a_log: Tensor<1>| {
                let raw = Tensor::full([1, 1, 4, 1], 0.3, (&a_log.device(), a_log.dtype()));
                flat(decay_gate(raw, Some(a_log), None, decay))
            };
            let (g, slope) = values_and_slopes(&[-1e4, -10.5, 20.5, 1e4], &device, dtype, gate);
            assert!(g.iter().all(|g| g.is_finite()), "{platform} {decay:?}: {g:?}");
            assert_eq!(slope, [0.0; 4], "{platform} {decay:?}");
        }
    }
}
