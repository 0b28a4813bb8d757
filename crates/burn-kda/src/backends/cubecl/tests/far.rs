//! Places past 2^32 numbers, for which addresses of 32 bits are too few, where a device has room for so many.

use burn::tensor::FloatDType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::AddressType;

use super::*;
use crate::kernel::layer;

const TOKENS: usize = 35;

/// Numbers from one token to the next: the last three tokens are past 2^32.
const APART: usize = 1 << 27;

/// Numbers from the start of one tensor to that of the next, which is aligned as every device wants it.
const BESIDE: usize = 1 << 16;

/// The tensors `[1, TOKENS, ..]` of one dtype side by side in one buffer, their tokens far apart; none without room.
fn far_apart<const N: usize>(tensors: [CubeTensor; N]) -> Option<[CubeTensor; N]> {
    let CubeTensor { client, device, dtype, .. } = &tensors[0];
    let most = client.properties().memory.max_page_size;
    if most < (TOKENS * APART * dtype.size()) as u64 {
        println!("skipped: buffers of {most} bytes at most");
        return None;
    }
    let mut buffer = CubeBackend::float_empty([TOKENS, APART].into(), device, (*dtype).into());
    for (n, x) in tensors.iter().enumerate() {
        let width = x.shape().num_elements() / TOKENS;
        let rows = CubeBackend::float_reshape(x.clone(), [TOKENS, width].into());
        let columns = n * BESIDE..n * BESIDE + width;
        buffer = CubeBackend::float_slice_assign(buffer, &[(0..TOKENS).into(), columns.into()], rows);
    }
    let view = |n: usize| {
        let mut x = buffer.clone();
        x.handle = x.handle.offset_start((n * BESIDE * dtype.size()) as u64);
        let to_next = x.meta.strides()[0];
        x.meta = tensors[n].meta.clone();
        let shape = x.meta.shape().clone();
        let inner = |axis: usize| shape[axis + 1..].iter().product();
        *x.meta.strides_mut() = (0..shape.rank()).map(|axis| if axis < 2 { to_next } else { inner(axis) }).collect();
        assert_eq!(x.required_address_type(), AddressType::U64);
        x
    };
    Some(std::array::from_fn(view))
}

fn half(pair: Pair) -> CubeTensor {
    CubeBackend::float_cast(pair.direct, FloatDType::F16)
}

/// With these tensors past fusion.
fn with_direct(case: &Case, direct: [CubeTensor; 6]) -> Case {
    let mut direct = direct.into_iter();
    case.with(case.tensors().map(|pair| Pair { direct: direct.next().expect("as many"), ..pair }))
}

fn assert_same(what: &str, got: Vec<CubeTensor>, want: Vec<CubeTensor>) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (n, (got, want)) in got.into_iter().zip(want).enumerate() {
        assert_eq!(CubeBackend::data(got), CubeBackend::data(want), "{what}, result {n}");
    }
}

#[test]
fn inputs_of_the_operator_past_32_bits() {
    let Some(device) = device() else { return };
    for [key_dim, value_dim] in [[2, 3], [20, 24]] {
        let case = Case::new([1, TOKENS, 1, 2, key_dim, value_dim], &device);
        let (dims, properties) = (case.dims, properties(&case.q));
        let near = case.tensors().map(half);
        let Some(far) = far_apart(near.clone()) else { return };
        let [far, near] = [far, near].map(|direct| with_direct(&case, direct));
        let forward = ForwardPlan::recurrent(dims, &properties);
        let chunk = ChunkPlan::forward(dims, &properties, false).map(ForwardPlan::Chunk);
        let chunk_backward = ChunkPlan::backward(dims, &properties, false);
        let plans = [
            forward.map(|plan| (plan, ScanPlan::new(dims, &properties).map(|scan| BackwardPlan::Scan(plan, scan)))),
            chunk.map(|plan| (plan, chunk_backward.map(|back| BackwardPlan::Chunk(plan, back)))),
        ];
        for (forward, backward) in plans.into_iter().flatten() {
            println!("{forward:?}, {backward:?}");
            let [got, want] = [&far, &near].map(|case| case.results::<CubeBackend>(forward, backward));
            assert_same(&format!("{forward:?}"), got, want);
        }
    }
}

#[test]
fn inputs_of_the_layer_past_32_bits() {
    let Some(device) = device() else { return };
    let (heads, dim) = (2, 6);
    let sizes @ [_, time, ..] = [1, TOKENS, heads, dim];
    let channels = heads * dim;
    let of_channels = || half(pair([1, time, channels], &device, -1.0, 1.0));
    let of_heads = || half(pair(sizes, &device, -4.0, 4.0));
    let logit = half(pair([1, time, heads], &device, -4.0, 4.0));
    let near = [of_channels(), of_channels(), of_heads(), of_heads(), of_heads(), logit];
    let Some(far) = far_apart(near.clone()) else { return };
    let weight = pair([channels, 1, 4], &device, -1.0, 1.0).direct;
    let [a_log, bias, norm] = [heads, channels, dim].map(|len| pair([len], &device, 0.5, 1.5).direct);
    let state = half(pair([1, channels, 3], &device, -1.0, 1.0));
    let d_g = pair(sizes, &device, -1.0, 1.0);
    let d_beta = pair([1, time, heads], &device, -1.0, 1.0);
    // Enough for every kernel.
    let plan = HeadPlan::new(sizes, 6, 2, &properties(&d_g)).expect("a plan");
    let params = ConvParams { head_dim: Some(dim), dtype: DType::F16 };

    let results = |[x, d_y, o, gate, d_o, logit]: [CubeTensor; 6]| {
        let (weight, bias, state, a_log) =
            (|| weight.clone(), || Some(bias.clone()), || Some(state.clone()), || Some(a_log.clone()));
        let (y, next) = layer::convolution(x.clone(), weight(), bias(), state(), params, [heads, dim], plan);
        let (d_x, sums, d_state) = layer::convolution_gradients(
            x,
            weight(),
            bias(),
            state(),
            [Some(d_y), state()],
            params,
            [heads, dim],
            plan,
        );
        let g = layer::decay_gate(o.clone(), a_log(), bias(), DecayFn::Softplus);
        let gate_gradients =
            layer::decay_gate_gradients(o.clone(), a_log(), bias(), d_g.direct.clone(), DecayFn::Softplus, plan);
        let normed = layer::output_norm(o.clone(), norm.clone(), gate.clone(), 1e-5, DType::F16, plan);
        let norm_gradients = layer::output_norm_gradients(o, norm.clone(), gate, d_o, 1e-5, plan);
        let beta = layer::write_strength(logit.clone(), 2.0);
        let d_logit = layer::write_strength_gradient(logit, d_beta.direct.clone(), 2.0);
        let ones = [y, next, d_x, sums, d_state.expect("of a state"), g, normed, beta, d_logit];
        ones.into_iter().chain(gate_gradients).chain(norm_gradients).collect::<Vec<_>>()
    };
    assert_same("layer", results(far), results(near));
}
