#![allow(deprecated, missing_docs)]
use burn::tensor::*;
use burn_kda::*;
use std::time::Instant;
fn main() {
    for (name, dev) in [("flex", Device::flex()), ("ndarray", Device::ndarray())] {
        for (t, h, d) in [(1024usize, 1usize, 128usize), (1024, 8, 64), (4096, 16, 128)] {
            let rnd = |s: [usize; 4]| Tensor::<4>::random(s, Distribution::Normal(0., 1.), &dev);
            let q = l2_normalize(rnd([1, t, h, d]));
            let k = l2_normalize(rnd([1, t, h, d]));
            let v = rnd([1, t, h, d]);
            let g = rnd([1, t, h, d]).abs().neg();
            let beta = Tensor::<3>::random([1, t, h], Distribution::Uniform(0., 1.), &dev);
            let input = KdaInput { q, k, v, g, beta };
            for c in [16, 32, 64] {
                let mut best = f64::MAX;
                for _ in 0..3 {
                    let i = input.clone();
                    let s = Instant::now();
                    let o = chunk_kda(i, KdaOptions::default().with_chunk_size(c));
                    std::hint::black_box(&o);
                    best = best.min(s.elapsed().as_secs_f64());
                }
                let flop = 7.0 * (d * d * t * h) as f64;
                println!("{name} T={t} H={h} D={d} C={c}: {:.2} ms {:.2} GFLOP/s", best * 1e3, flop / best / 1e9);
            }
        }
        let dev = &dev;
        let time = |label: &str, f: &dyn Fn()| {
            f();
            let s = Instant::now();
            for _ in 0..10 { f() }
            println!("{name} {label}: {:.1} us", s.elapsed().as_secs_f64() * 1e5);
        };
        let r3 = |s: [usize; 3]| Tensor::<3>::random(s, Distribution::Normal(0., 1.), dev);
        let x = r3([32, 64, 128]);
        time("exp 256k", &|| { std::hint::black_box(x.clone().exp()); });
        time("mul same 256k", &|| { std::hint::black_box(x.clone() * x.clone()); });
        let y = r3([32, 1, 128]);
        time("mul bcast rows=64", &|| { std::hint::black_box(x.clone() * y.clone()); });
        let x2 = r3([1024, 2, 128]); let y2 = r3([1024, 1, 128]);
        time("mul bcast rows=2", &|| { std::hint::black_box(x2.clone() * y2.clone()); });
        time("slice+matmul 1024x[1,128]x[128,1]", &|| {
            let l = x2.clone().slice_dim(1, 0..1); let r = x2.clone().slice_dim(1, 1..2).swap_dims(1, 2);
            std::hint::black_box(l.matmul(r)); });
        time("slice 1024", &|| { std::hint::black_box(x2.clone().slice_dim(1, 0..1)); });
        for (m, s) in [(1024usize, 1usize), (512, 2), (256, 4), (128, 8), (64, 16), (32, 32)] {
            let a = r3([m, s, 128]); let b = r3([m, s, 128]);
            time(&format!("matmul {m}x[{s},128]x[128,{s}]"), &|| { std::hint::black_box(a.clone().matmul(b.clone().swap_dims(1, 2))); });
            let a = r3([m, s, s]); let b = r3([m, s, s]);
            time(&format!("matmul {m}x[{s},{s}]x[{s},{s}]"), &|| { std::hint::black_box(a.clone().matmul(b.clone())); });
        }
        let s = r3([16, 128, 128]);
        let a = r3([16, 64, 128]);
        time("matmul 16x[64,128]x[128,128] (33.5 MFLOP)", &|| { std::hint::black_box(a.clone().matmul(s.clone())); });
        time("matmul 16x[128,64]T x[64,128]", &|| { std::hint::black_box(a.clone().swap_dims(1,2).matmul(a.clone())); });
        let p = Tensor::<5>::random([1, 2, 64, 16, 128], Distribution::Normal(0., 1.), dev);
        time("permute 256k", &|| { std::hint::black_box(p.clone().permute([1, 0, 3, 2, 4]).reshape([32, 64, 128])); });
        time("sumdim 256k", &|| { std::hint::black_box(x.clone().sum_dim(2)); });
        time("cat dim1 256k", &|| { std::hint::black_box(Tensor::cat(vec![x2.clone().slice_dim(1, 0..1), x2.clone().slice_dim(1, 1..2)], 1)); });
    }
}
