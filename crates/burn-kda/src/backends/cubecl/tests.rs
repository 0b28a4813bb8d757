//! The kernels by burn-fusion and past it, and by ways that this device would not choose. `BURN_DEVICE` names it.

mod far;

use burn::backend::tensor::FloatTensor;
use burn::tensor::{Device, Distribution, Tensor, TensorData};

use super::*;
use crate::kernel::layer::HeadPlan;
use crate::kernel::{ChunkPlan, Plan, ScanPlan};
use crate::ops::TensorBridge;

/// The same numbers twice: a tensor of the graph of fusion, and one outside of it.
#[derive(Clone)]
pub(super) struct Pair {
    fused: FloatTensor<Cube>,
    direct: FloatTensor<CubeBackend>,
}

/// One of the two.
pub(super) trait Side: Backend {
    fn of(pair: &Pair) -> FloatTensor<Self>;

    fn data(tensor: FloatTensor<Self>) -> TensorData {
        burn::tensor::try_read_sync(Self::float_into_data(tensor)).expect("native").expect("data")
    }
}

impl Side for Cube {
    fn of(pair: &Pair) -> FloatTensor<Self> {
        pair.fused.clone()
    }
}

impl Side for CubeBackend {
    fn of(pair: &Pair) -> FloatTensor<Self> {
        pair.direct.clone()
    }
}

/// None if the tests are to run without one.
pub(super) fn device() -> Option<Device> {
    std::env::var_os("BURN_DEVICE").map(|_| Device::default())
}

pub(super) fn pair<const D: usize>(shape: [usize; D], device: &Device, low: f64, high: f64) -> Pair {
    let x = Tensor::<D>::random(shape, Distribution::Uniform(low, high), device);
    let fused = Cube::primitive(x.clone());
    let direct = CubeBackend::float_from_data(x.into_data(), &fused.device());
    Pair { fused, direct }
}

pub(super) fn properties(pair: &Pair) -> DeviceProperties {
    pair.direct.client.properties().clone()
}

pub(super) fn assert_same_bits(what: &str, fused: Vec<FloatTensor<Cube>>, direct: Vec<FloatTensor<CubeBackend>>) {
    assert_eq!(fused.len(), direct.len(), "{what}");
    for (n, (fused, direct)) in fused.into_iter().zip(direct).enumerate() {
        let (fused, direct) = (Cube::data(fused), CubeBackend::data(direct));
        assert_eq!(fused.shape(), direct.shape(), "{what}, result {n}");
        let bits = |data: &TensorData| data.iter::<f32>().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(&fused), bits(&direct), "{what}, result {n}");
    }
}

struct Case {
    q: Pair,
    k: Pair,
    v: Pair,
    g: Pair,
    beta: Pair,
    state: Pair,
    d_o: Pair,
    dims: Dims,
}

impl Case {
    fn new([batch, time, heads, value_heads, key_dim, value_dim]: [usize; 6], device: &Device) -> Self {
        let [q, k] = [(); 2].map(|()| pair([batch, time, heads, key_dim], device, -0.5, 0.5));
        let [v, d_o] = [(); 2].map(|()| pair([batch, time, value_heads, value_dim], device, -1.0, 1.0));
        Self {
            q,
            k,
            v,
            g: pair([batch, time, value_heads, key_dim], device, -2.0, 0.0),
            beta: pair([batch, time, value_heads], device, 0.0, 1.0),
            state: pair([batch, value_heads, key_dim, value_dim], device, -1.0, 1.0),
            d_o,
            dims: Dims::new([batch, time, heads, key_dim], [batch, time, value_heads, value_dim]),
        }
    }

    /// The inputs and the cotangent of the output.
    fn tensors(&self) -> [Pair; 6] {
        [&self.q, &self.k, &self.v, &self.g, &self.beta, &self.d_o].map(Pair::clone)
    }

    /// With other [`tensors`](Self::tensors).
    fn with(&self, [q, k, v, g, beta, d_o]: [Pair; 6]) -> Self {
        Self { q, k, v, g, beta, state: self.state.clone(), d_o, dims: self.dims }
    }

    fn inputs<B: Side>(&self) -> KdaTensors<B> {
        let Self { q, k, v, g, beta, .. } = self;
        KdaTensors { q: B::of(q), k: B::of(k), v: B::of(v), g: B::of(g), beta: B::of(beta) }
    }

    /// Output, final state and all gradients, if there is a plan for them.
    fn results<B: Side + KernelOps>(
        &self,
        forward: ForwardPlan,
        backward: impl Into<Option<BackwardPlan>>,
    ) -> Vec<FloatTensor<B>> {
        let state = || MaybeTensor::Some(B::of(&self.state));
        let (o, final_state, kept) = B::forward(self.inputs(), state(), 0.3, true, forward);
        let Some(backward) = backward.into() else { return vec![o, final_state] };
        let wanted = WantedGradients { q: true, k: true, v: true, g: true, beta: true, initial_state: true };
        let d_o = MaybeTensor::Some(B::of(&self.d_o));
        let gradients = B::backward(self.inputs(), state(), kept, d_o, state(), 0.3, wanted, backward);
        let KdaGradients { q, k, v, g, beta, initial_state } = gradients;
        let gradients = [q, k, v, g, beta, initial_state].map(|x| x.into_option().expect("wanted"));
        [o, final_state].into_iter().chain(gradients).collect()
    }

    fn assert_same_by_fusion(&self, forward: ForwardPlan, backward: BackwardPlan) {
        let (fused, direct) = (self.results::<Cube>(forward, backward), self.results::<CubeBackend>(forward, backward));
        assert_same_bits(&format!("{:?}", self.dims), fused, direct);
    }
}

#[test]
fn fusion_changes_no_bit() {
    let Some(device) = device() else { return };
    for sizes in [[1, 1, 2, 2, 16, 16], [2, 75, 1, 2, 24, 16], [1, 130, 2, 2, 16, 9]] {
        let case = Case::new(sizes, &device);
        let properties = properties(&case.q);
        let forward = ForwardPlan::recurrent(case.dims, &properties).expect("a plan");
        let backward = BackwardPlan::new(case.dims, false, &properties).expect("a plan");
        case.assert_same_by_fusion(forward, backward);
    }
}

/// Their units multiply as a tensor core would.
#[test]
fn fusion_changes_no_bit_of_the_chunk_form() {
    let Some(device) = device() else { return };
    let case = Case::new([1, 75, 2, 2, 16, 20], &device);
    let plan = |of: fn(Dims, &DeviceProperties, bool) -> Option<ChunkPlan>| {
        of(case.dims, &properties(&case.q), false).expect("a plan")
    };
    let forward = ForwardPlan::Chunk(plan(ChunkPlan::forward));
    case.assert_same_by_fusion(forward, BackwardPlan::Chunk(forward, plan(ChunkPlan::backward)));
}

/// Fusion may hand the kernels copies; without it they get the strides.
#[test]
fn strided_inputs_past_fusion() {
    let Some(device) = device() else { return };
    let case = Case::new([2, 37, 2, 4, 20, 24], &device);
    let properties = properties(&case.q);
    let forward = ForwardPlan::recurrent(case.dims, &properties).expect("a plan");
    let backward = BackwardPlan::new(case.dims, false, &properties).expect("a plan");
    let want = case.results::<CubeBackend>(forward, backward);
    let strided = |Pair { fused, direct }| {
        let swapped = CubeBackend::data(CubeBackend::float_swap_dims(direct, 1, 2));
        let direct = CubeBackend::float_swap_dims(CubeBackend::float_from_data(swapped, &fused.device()), 1, 2);
        Pair { fused, direct }
    };
    let got = case.with(case.tensors().map(strided)).results::<CubeBackend>(forward, backward);
    for (n, (got, want)) in got.into_iter().zip(want).enumerate() {
        assert_eq!(CubeBackend::data(got), CubeBackend::data(want), "result {n}");
    }
}

/// CubeCL's CPU runtime has as many units as cores.
#[test]
fn no_plan_has_more_units_than_the_device() {
    let Some(device) = device() else { return };
    let mut properties = properties(&pair([1], &device, 0.0, 1.0));
    for units in [1, 2, 8, 63, 64, 128, 256_usize] {
        properties.hardware.max_units_per_cube = units as u32;
        for (key_dim, value_dim) in (1..=256).flat_map(|key_dim| (1..=256).map(move |value_dim| (key_dim, value_dim))) {
            let dims = Dims::new([1, 100, 2, key_dim], [1, 100, 2, value_dim]);
            let chunk = ChunkPlan::forward(dims, &properties, false).into_iter();
            let chunks = chunk.chain(ChunkPlan::backward(dims, &properties, false)).map(|plan| plan.units());
            let scan = ScanPlan::new(dims, &properties).map(|plan| plan.largest_cube());
            let recurrence = Plan::new(dims, &properties).map(|plan| plan.units());
            let head = HeadPlan::new([1, 100, 2, key_dim], 0, 1, &properties).map(|plan| plan.units);
            for of_plan in chunks.chain(scan).chain(recurrence).chain(head) {
                assert!((1..=units).contains(&of_plan), "{of_plan} of {units} at {key_dim}x{value_dim}");
            }
        }
    }
}

/// Burn reports no planes on a Vulkan device in software, which has them.
#[test]
fn planes_sum_as_shared_memory_does() {
    let Some(device) = device() else { return };
    let case = Case::new([2, 37, 2, 2, 128, 24], &device);
    let properties = properties(&case.q);
    let plan = Plan::new(case.dims, &properties).expect("a plan");
    assert!(plan.slices > 1);
    if plan.slices > properties.hardware.plane_size_min as usize {
        return println!("skipped: planes of {} units", properties.hardware.plane_size_min);
    }
    let run = |planes: bool| {
        let plan = ForwardPlan::Recurrent(Plan { planes, ..plan });
        let state = MaybeTensor::Some(case.state.direct.clone());
        let (o, final_state, _) = <CubeBackend as KernelOps>::forward(case.inputs(), state, 0.3, false, plan);
        [o, final_state].map(CubeBackend::data)
    };
    for (by_plane, by_memory) in run(true).into_iter().zip(run(false)) {
        let largest = by_memory.iter::<f32>().fold(0.0f32, |a, b| a.max(b.abs()));
        for (a, b) in by_plane.iter::<f32>().zip(by_memory.iter::<f32>()) {
            assert!((a - b).abs() <= 1e-6 * largest, "{a} and {b} of {largest}");
        }
    }
}
