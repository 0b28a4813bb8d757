//! Results on the device against the definition in f64 on the CPU.

use burn::tensor::{DType, Device, Tensor};
use burn_kda::{KdaInput, KdaOptions, chunk_kda, recurrent_kda};

use super::common::{Shape, input};

/// Odd heads, several segments, and the heads of published models.
const SHAPES: [Shape; 3] = [(2, 37, 3, 20, 33), (1, 300, 2, 64, 64), (1, 150, 2, 128, 128)];

/// Relative RMS errors of output, final state and gradients.
pub fn errors(device: &Device) -> Vec<(Shape, &'static str, f64)> {
    SHAPES.into_iter().flat_map(|shape| of_shape(shape, device)).collect()
}

fn of_shape(shape: Shape, device: &Device) -> Vec<(Shape, &'static str, f64)> {
    let cpu = Device::flex();
    let input = input(shape, &cpu);
    let want = results(input.clone(), &cpu.autodiff(), DType::F64, recurrent_kda);
    let got = results(input, &device.clone().autodiff(), DType::F32, chunk_kda);
    let names = ["o", "final state", "dq", "dk", "dv", "dg", "dbeta"];
    names.into_iter().zip(got.iter().zip(&want)).map(|(name, (got, want))| (shape, name, error(got, want))).collect()
}

fn results(
    input: KdaInput,
    device: &Device,
    dtype: DType,
    form: fn(KdaInput, KdaOptions) -> burn_kda::KdaOutput,
) -> Vec<Vec<f64>> {
    let leaf =
        |x: Tensor<4>| Tensor::<4>::from_data(x.into_data().convert_dtype(dtype), (device, dtype)).require_grad();
    let beta = Tensor::<3>::from_data(input.beta.into_data().convert_dtype(dtype), (device, dtype)).require_grad();
    let leaves = KdaInput { q: leaf(input.q), k: leaf(input.k), v: leaf(input.v), g: leaf(input.g), beta };
    let output = form(leaves.clone(), KdaOptions::default());
    let gradients = (output.o.clone().powf_scalar(2.0).sum() + output.final_state.clone().sum()).backward();
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
