//! Results on the device against the definition in f64 on the CPU.

use burn::tensor::{DType, Device, Tensor};
use burn_kda::{KdaInput, KdaOptions, chunk_kda, recurrent_kda};

use super::common::{Shape, input};

/// Odd heads, several segments, and the heads of published models.
const SHAPES: [Shape; 3] = [(2, 37, 3, 20, 33), (1, 300, 2, 64, 64), (1, 150, 2, 128, 128)];

/// Relative RMS errors of output, final state and gradients.
pub fn errors(device: &Device, dtype: DType) -> Vec<(Shape, &'static str, f64)> {
    SHAPES.into_iter().flat_map(|shape| of_shape(shape, device, dtype)).collect()
}

fn of_shape(shape: Shape, device: &Device, dtype: DType) -> Vec<(Shape, &'static str, f64)> {
    let cpu = Device::flex();
    // Numbers that `dtype` has, so that the inputs are the same on both sides.
    let rounded = |x: Tensor<4>| Tensor::from_data(x.into_data().convert_dtype(dtype), (&cpu, DType::F32));
    let KdaInput { q, k, v, g, beta } = input(shape, &cpu);
    let input = KdaInput { q: rounded(q), k: rounded(k), v: rounded(v), g, beta };
    let want = results(input.clone(), &cpu.autodiff(), DType::F64, recurrent_kda);
    let got = results(input, &device.clone().autodiff(), dtype, chunk_kda);
    let names = ["o", "final state", "dq", "dk", "dv", "dg", "dbeta"];
    names.into_iter().zip(got.iter().zip(&want)).map(|(name, (got, want))| (shape, name, error(got, want))).collect()
}

fn results(
    input: KdaInput,
    device: &Device,
    dtype: DType,
    form: fn(KdaInput, KdaOptions) -> burn_kda::KdaOutput,
) -> Vec<Vec<f64>> {
    let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let leaf = |x: Tensor<4>, dtype| {
        Tensor::<4>::from_data(x.into_data().convert_dtype(dtype), (device, dtype)).require_grad()
    };
    let beta = Tensor::<3>::from_data(input.beta.into_data().convert_dtype(wide), (device, wide)).require_grad();
    let [q, k, v] = [input.q, input.k, input.v].map(|x| leaf(x, dtype));
    let leaves = KdaInput { q, k, v, g: leaf(input.g, wide), beta };
    let output = form(leaves.clone(), KdaOptions::default());
    let gradients = (output.o.clone().cast(wide).powf_scalar(2.0).sum() + output.final_state.clone().sum()).backward();
    let of = |x: &Tensor<4>| values(x.grad(&gradients).expect("a gradient"));
    let KdaInput { q, k, v, g, beta } = &leaves;
    let mut all = vec![values(output.o), values(output.final_state), of(q), of(k), of(v), of(g)];
    all.push(values(beta.grad(&gradients).expect("a gradient")));
    all
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// `rms(got - want) / rms(want)`.
fn error(got: &[f64], want: &[f64]) -> f64 {
    let sum = |terms: &mut dyn Iterator<Item = f64>| terms.map(|x| x * x).sum::<f64>();
    let difference = sum(&mut got.iter().zip(want).map(|(got, want)| got - want));
    (difference / sum(&mut want.iter().copied())).sqrt()
}
