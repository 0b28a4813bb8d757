//! As `fusion_changes_no_bit`, of what surrounds the operator.

use super::super::tests::{Pair, Side, assert_same_bits, device, pair, properties};
use super::*;

struct Case {
    /// `[B, T, H, K]`.
    heads: [Pair; 2],
    /// `[B, T, H * K]`.
    channels: [Pair; 2],
    /// Of the convolution.
    weight: Pair,
    bias: Pair,
    state: Pair,
    /// `[H]`.
    a_log: Pair,
    /// `[K]`.
    norm: Pair,
    /// `[B, T, H]`.
    logit: Pair,
}

impl Case {
    fn results<B: Side + LayerOps>(&self, sizes: [usize; 2], plan: HeadPlan, decay: DecayFn) -> Vec<FloatTensor<B>> {
        let some = |pair: &Pair| MaybeTensor::<B>::Some(B::of(pair));
        let [a, b] = self.heads.each_ref().map(B::of);
        let [x, d_y] = self.channels.each_ref().map(B::of);
        let (weight, bias, state) = (B::of(&self.weight), || some(&self.bias), || some(&self.state));
        let params = ConvParams { head_dim: Some(sizes[1]), dtype: DType::F32 };
        let (y, next) = B::convolution(x.clone(), weight.clone(), bias(), state(), params, sizes, plan);
        let d_y = MaybeTensor::Some(d_y);
        let convolution = B::convolution_gradients(x, weight, bias(), state(), d_y, state(), params, sizes, plan);
        let d_state = convolution.state.into_option().expect("of a state");

        let a_log = || some(&self.a_log);
        let g = B::decay_gate(a.clone(), a_log(), bias(), decay);
        let (d_raw, gate_sums) = B::decay_gate_gradients(a.clone(), a_log(), bias(), b.clone(), decay, plan);

        let norm = || B::of(&self.norm);
        let normed = B::output_norm(a.clone(), norm(), b.clone(), 1e-5, DType::F32, plan);
        let (d_o, d_gate, norm_sums) = B::output_norm_gradients(a.clone(), norm(), b, a, 1e-5, plan);

        let beta = B::write_strength(B::of(&self.logit), 2.0);
        let d_logit = B::write_strength_gradient(B::of(&self.logit), beta.clone(), 2.0);
        let convolution = [y, next, convolution.x, convolution.sums, d_state];
        let rest = [g, d_raw, gate_sums, normed, d_o, d_gate, norm_sums, beta, d_logit];
        convolution.into_iter().chain(rest).collect()
    }
}

#[test]
fn fusion_changes_no_bit_around_the_operator() {
    let Some(device) = device() else { return };
    for sizes @ [batch, time, heads, dim] in [[1, 1, 2, 16], [2, 75, 3, 20]] {
        let channels = heads * dim;
        let case = Case {
            heads: [(); 2].map(|()| pair(sizes, &device, -4.0, 4.0)),
            channels: [(); 2].map(|()| pair([batch, time, channels], &device, -1.0, 1.0)),
            weight: pair([channels, 1, 4], &device, -1.0, 1.0),
            bias: pair([channels], &device, -1.0, 1.0),
            state: pair([batch, channels, 3], &device, -1.0, 1.0),
            a_log: pair([heads], &device, -1.0, 1.0),
            norm: pair([dim], &device, 0.5, 1.5),
            logit: pair([batch, time, heads], &device, -4.0, 4.0),
        };
        // Enough for every kernel.
        let plan = HeadPlan::new(sizes, 6, 2, &properties(&case.logit)).expect("a plan");
        for decay in [DecayFn::Softplus, DecayFn::Sigmoid { lower_bound: -5.0 }] {
            let fused = case.results::<Cube>([heads, dim], plan, decay);
            let direct = case.results::<CubeBackend>([heads, dim], plan, decay);
            assert_same_bits(&format!("{sizes:?}, {decay:?}"), fused, direct);
        }
    }
}
