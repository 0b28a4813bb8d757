//! The same launches give the same bits with burn-fusion and past it. `BURN_DEVICE` names the device.

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Device, Distribution, Tensor, TensorData};

use super::*;
use crate::ops::TensorBridge;

/// Both at once: a tensor of the graph of fusion, and one of the same numbers outside of it.
struct Pair {
    fused: FloatTensor<Cube>,
    direct: FloatTensor<CubeBackend>,
}

fn pair<const D: usize>(shape: [usize; D], device: &Device, low: f64, high: f64) -> Pair {
    let x = Tensor::<D>::random(shape, Distribution::Uniform(low, high), device);
    let fused = Cube::primitive(x.clone());
    let direct = CubeBackend::float_from_data(x.into_data(), &fused.device());
    Pair { fused, direct }
}

fn data(direct: FloatTensor<CubeBackend>) -> TensorData {
    burn::tensor::try_read_sync(CubeBackend::float_into_data(direct)).expect("native").expect("data")
}

fn assert_same<const D: usize>(what: &str, fused: FloatTensor<Cube>, direct: FloatTensor<CubeBackend>) {
    let (fused, direct) = (Cube::tensor::<D>(fused).into_data(), data(direct));
    assert_eq!(fused.shape(), direct.shape(), "{what}");
    assert!(fused.iter::<f32>().zip(direct.iter::<f32>()).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}");
}

#[test]
fn fusion_changes_no_bit() {
    if std::env::var_os("BURN_DEVICE").is_none() {
        return;
    }
    let device = Device::default();
    for (batch, time, heads, group, key_dim, value_dim) in
        [(1, 1, 2, 1, 16, 16), (2, 75, 1, 2, 20, 24), (1, 130, 2, 1, 16, 9)]
    {
        let (q_shape, hv) = ([batch, time, heads, key_dim], heads * group);
        let [q, k] = [q_shape, q_shape].map(|shape| pair(shape, &device, -0.5, 0.5));
        let v = pair([batch, time, hv, value_dim], &device, -1.0, 1.0);
        let g = pair([batch, time, hv, key_dim], &device, -2.0, 0.0);
        let beta = pair([batch, time, hv], &device, 0.0, 1.0);
        let state = pair([batch, hv, key_dim, value_dim], &device, -1.0, 1.0);
        let d_o = pair([batch, time, hv, value_dim], &device, -1.0, 1.0);
        let what = format!("B {batch}, T {time}, H {heads}, HV {hv}, K {key_dim}, V {value_dim}");

        macro_rules! inputs {
            ($side:ident) => {
                KdaTensors {
                    q: q.$side.clone(),
                    k: k.$side.clone(),
                    v: v.$side.clone(),
                    g: g.$side.clone(),
                    beta: beta.$side.clone(),
                }
            };
        }
        let properties = client([&q.fused]).expect("kernels").properties().clone();
        let dims = dims::<Cube>(&inputs!(fused));
        for tensor_cores in [false, true] {
            let plan = ForwardPlan::new(dims, tensor_cores, &properties).expect("a plan");
            let fused =
                <Cube as KernelOps>::forward(inputs!(fused), MaybeTensor::Some(state.fused.clone()), 0.3, true, plan);
            let direct = <CubeBackend as KernelOps>::forward(
                inputs!(direct),
                MaybeTensor::Some(state.direct.clone()),
                0.3,
                true,
                plan,
            );
            assert_same::<4>(&what, fused.0, direct.0);
            assert_same::<4>(&what, fused.1, direct.1);

            let plan = BackwardPlan::new(dims, tensor_cores, &properties).expect("a plan");
            let wanted = WantedGradients { q: true, k: true, v: true, g: true, beta: true, initial_state: true };
            macro_rules! backward {
                ($backend:ty, $side:ident, $kept:expr) => {
                    <$backend as KernelOps>::backward(
                        inputs!($side),
                        MaybeTensor::Some(state.$side.clone()),
                        $kept,
                        MaybeTensor::Some(d_o.$side.clone()),
                        MaybeTensor::None,
                        0.3,
                        wanted,
                        plan,
                    )
                };
            }
            let (fused, direct) = (backward!(Cube, fused, fused.2), backward!(CubeBackend, direct, direct.2));
            let given = |x: MaybeTensor<Cube>| x.into_option().expect("wanted");
            let given_direct = |x: MaybeTensor<CubeBackend>| x.into_option().expect("wanted");
            assert_same::<4>(&what, given(fused.q), given_direct(direct.q));
            assert_same::<4>(&what, given(fused.k), given_direct(direct.k));
            assert_same::<4>(&what, given(fused.v), given_direct(direct.v));
            assert_same::<4>(&what, given(fused.g), given_direct(direct.g));
            assert_same::<3>(&what, given(fused.beta), given_direct(direct.beta));
            assert_same::<4>(&what, given(fused.initial_state), given_direct(direct.initial_state));
        }
    }
}
