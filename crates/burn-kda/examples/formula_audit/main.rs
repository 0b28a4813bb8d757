//! Prints `docs/reviews/formula-audit.md`: the gate and the read scale of this crate beside the forms that an earlier
//! KDA crate had wrong, in numbers.
//!
//! ```sh
//! cargo run --release --example formula_audit > docs/reviews/formula-audit.md
//! ```

use burn::tensor::{Device, Tensor};
use burn_kda::{DecayFn, KdaInput, KdaOptions, chunk_kda, decay_gate, fla_read_scale, recurrent_kda};

fn main() {
    let device = Device::default();
    println!("# Formula audit\n");
    println!(
        "Printed by `cargo run --release --example formula_audit`. The reference values behind these formulas are"
    );
    println!("flash-linear-attention's own, pinned by sha256: `tests/oracle`.\n");
    gate(&device);
    read_scale(&device);
}

fn gate(device: &Device) {
    println!("## The softplus gate: `exp(A)` stands outside\n");
    println!(
        "FLA (`naive_kda_gate`): `g = -exp(A_log) * softplus(z)`. The other form, `g = -softplus(exp(A_log) * z)`,"
    );
    println!("is a different function: the two agree only at `A_log = 0`.\n");
    println!(
        "| A_log | z | g, `exp(A)` outside (this crate) | g, `exp(A)` inside | decay kept per step | with the other form |"
    );
    println!("|---:|---:|---:|---:|---:|---:|");
    for (a_log, label) in [(-3.0_f64, "-3"), (0.0, "0"), (4.0_f64.ln(), "ln 4"), (16.0_f64.ln(), "ln 16")] {
        for z in [-4.0_f64, -1.0, 0.0, 1.0, 4.0] {
            let outside = softplus_gate(a_log, z, device);
            let inside = -(a_log.exp() * z).exp().ln_1p();
            println!("| {label} | {z} | {outside:.6} | {inside:.6} | {:.4} | {:.4} |", outside.exp(), inside.exp());
        }
    }
    let same = [-4.0, -1.0, 0.0, 1.0, 4.0].iter().all(|&z| {
        let inside = -f64::ln_1p(f64::exp(z));
        (softplus_gate(0.0, z, device) - inside).abs() < 1e-12
    });
    println!("\nAt `A_log = 0` all five values agree to 1e-12: {}.\n", if same { "yes" } else { "NO" });
}

fn softplus_gate(a_log: f64, z: f64, device: &Device) -> f64 {
    let scalar = |x: f64| Tensor::<1>::from_data([x], (device, burn::tensor::DType::F64));
    let raw = scalar(z).reshape([1, 1, 1, 1]);
    decay_gate(raw, Some(scalar(a_log)), None, DecayFn::Softplus).into_scalar()
}

fn read_scale(device: &Device) {
    println!("## The read scale touches the read, not the state\n");
    println!(
        "FLA: `scale = K^-0.5`, on the query. With a scale of 1 every output is `sqrt(K)` times too large; a scale on"
    );
    println!(
        "the state would shrink it again at every step. Ratios of RMS between this crate's default and a scale of 1:\n"
    );
    println!("| K | `fla_read_scale(K)` | output ratio, chunk | output ratio, recurrent | state ratio |");
    println!("|---:|---:|---:|---:|---:|");
    for key_dim in [16, 64, 128] {
        let waves = |width: usize, phase: f64| {
            let values: Vec<f64> = (0..40 * width).map(|i| (0.37 * i as f64 + phase).sin()).collect();
            let data = burn::tensor::TensorData::new(values, [1, 40, 1, width]);
            Tensor::<4>::from_data(data, (device, burn::tensor::DType::F64))
        };
        let input = KdaInput {
            q: burn_kda::l2_normalize(waves(key_dim, 0.1)),
            k: burn_kda::l2_normalize(waves(key_dim, 0.7)),
            v: waves(key_dim, 1.3),
            g: waves(key_dim, 0.2).abs().neg(),
            beta: waves(1, 0.5).abs().squeeze_dim(3),
        };
        let rms = |x: Tensor<4>| -> f64 { x.square().mean().into_scalar::<f64>().sqrt() };
        let with = KdaOptions::default;
        let without = || KdaOptions::default().with_scale(1.0);
        let chunk = [chunk_kda(input.clone(), with()), chunk_kda(input.clone(), without())];
        let recurrent = [recurrent_kda(input.clone(), with()), recurrent_kda(input, without())];
        let [state, state_one] = [&chunk[0], &chunk[1]].map(|output| rms(output.final_state.clone()));
        let [chunk, recurrent] = [chunk, recurrent].map(|[a, b]| rms(a.o) / rms(b.o));
        let scale = fla_read_scale(key_dim);
        println!("| {key_dim} | {scale:.6} | {chunk:.6} | {recurrent:.6} | {:.6} |", state / state_one);
    }
}
