//! The kernels as a CUDA device would compile them, without one: lowered to CUDA C++, then by NVRTC and ptxas.
//!
//! `cargo test -p burn-kda --lib --no-default-features --features std,cuda-source cuda_source -- --nocapture`

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use cubecl::Compiler;
use cubecl::features::Plane;
use cubecl::ir::settings::Dim3;
use cubecl::ir::{
    AddressType, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties,
    TargetProperties,
};
use cubecl::prelude::*;
use cubecl::profile::TimingMethod;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaCmmaCompiler;
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{CompilationOptions, CppCompiler, CppSupportedFeatures, register_wmma_features};
use cubecl_cpp::target::Cuda;

use super::chunk::back::chunk_back_kernel::ChunkBackKernel;
use super::chunk::inputs::chunk_inputs_kernel::ChunkInputsKernel;
use super::chunk::scan::chunk_scan_kernel::ChunkScanKernel;
use super::chunk::scores::chunk_scores_kernel::ChunkScoresKernel;
use super::gradients::inputs::inputs_kernel::InputsKernel;
use super::gradients::scan::scan_kernel::ScanKernel;
use super::gradients::scores::scores_kernel::ScoresKernel;
use super::layer::HeadPlan;
use super::layer::convolution::convolution_kernel::ConvolutionKernel;
use super::layer::convolution_gradients::convolution_gradients_kernel::ConvolutionGradientsKernel;
use super::layer::gates::decay_gate_gradients_kernel::DecayGateGradientsKernel;
use super::layer::gates::decay_gate_kernel::DecayGateKernel;
use super::layer::norm::output_norm_gradients_kernel::OutputNormGradientsKernel;
use super::layer::norm::output_norm_kernel::OutputNormKernel;
use super::plan::{ChunkPlan, Plan, ScanPlan};
use super::recurrent::recurrent_kernel::RecurrentKernel;
use crate::functions::Dims;

/// Of an A100 and an H200: what NVRTC calls them, and shared memory of a cube in KiB.
const DEVICES: [(&str, usize); 2] = [("sm_80", 163), ("sm_90a", 227)];

/// An H200 but for its shared memory.
fn properties(shared_kib: usize) -> Arc<DeviceProperties> {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: shared_kib * 1024,
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: 16,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity { name: "none".into(), fingerprint: "none".into(), physical: None };
    let memory = MemoryDeviceProperties::new(1 << 36, 256);
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System, identity);
    register_supported_types(&mut properties);
    let architecture = CudaArchitecture { version: 80, tensor_cores: true };
    register_wmma_features(CudaCmmaCompiler::Cpp.supported_cmma_combinations(&architecture), &mut properties);
    properties.features.plane.insert(Plane::Ops);
    properties.features.memory_reinterpret = true;
    properties.features.alignment = true;
    Arc::new(properties)
}

fn source(kernel: impl CubeKernel) -> String {
    let supports_features =
        CppSupportedFeatures { grid_constants: true, fast_math: true, dp4a: true, ..Default::default() };
    let options = CompilationOptions { supports_features, ..Default::default() };
    let kernel = CppCompiler::<Cuda>::default().compile(kernel.define(), &options).expect("CUDA C++");
    format!("// {} bytes of shared memory\n{kernel}", kernel.shared_memory_size)
}

/// The heads of published models, and odd ones.
const HEADS: [(usize, usize); 4] = [(128, 128), (64, 64), (256, 256), (65, 33)];

/// The kernels for one size of heads and one dtype of `q`, `k`, `v`. Those without tensor cores differ by no more than
/// loads and stores in half precision, so one size of heads is enough there.
fn sources(properties: Arc<DeviceProperties>, heads: (usize, usize), float: FloatKind) -> Vec<(&'static str, String)> {
    let (key_dim, value_dim) = heads;
    let target = Arc::new(TargetProperties::default());
    let dims = Dims { batch: 1, time: 8192, heads: 64, value_heads: 64, key_dim, value_dim };
    let plan = Plan::new(dims, &properties).expect("a plan");
    let scan = ScanPlan::new(dims, &properties).expect("a plan");
    let settings = |units: usize, address: AddressType| {
        KernelSettings::new(Dim3 { x: units as u32, y: 1, z: 1 }, ExecutionMode::Checked, address)
    };
    // Tensors of 2^32 numbers or more; those for tensor cores have no registers to spare for them.
    let wide = |units: usize| settings(units, AddressType::U64);
    let narrow = |units: usize| settings(units, AddressType::U32);
    let mut launcher = KernelLauncher::new(narrow(32));
    let meta = TensorMeta::register(TensorMetaLaunch::new(1, 4), &mut launcher);
    let tensor = || TensorCompilationArg { meta: meta.clone(), buffer: BufferCompilationArg { inplace: None } };
    let scale = <f32 as LaunchArg>::register(1.0, &mut launcher);
    let dim = <usize as LaunchArg>::register(key_dim, &mut launcher);
    launcher.discard();
    let f32 = ElemType::Float(FloatKind::F32);
    let dtypes = [ElemType::Float(float), f32, f32];
    /// `_` is a tensor and `?` one that may be missing.
    macro_rules! kernel {
        ($name:literal, $kernel:ident, $settings:expr, [$($tensor:tt)*], $($arg:expr),*) => {
            ($name, source($kernel::new(
                $settings, properties.clone(), target.clone(), $(kernel!(@ $tensor),)* $($arg),*
            )))
        };
        (@ _) => { tensor() };
        (@ ?) => { ComptimeOptionCompilationArg::Some(tensor()) };
    }
    let mut sources = Vec::new();
    let head =
        |more: usize, sums: usize| HeadPlan::new([1, 8192, 64, key_dim], more, sums, &properties).expect("a plan");
    let (one, two, six) = (head(0, 1), head(0, 2), head(6, 2));
    let x = dtypes[0];
    if float == FloatKind::F32 || heads == HEADS[0] {
        sources.extend([
            kernel!("convolution", ConvolutionKernel, wide(one.units), [_ _ ? ? _ _], dim, 4, true, one, [x, x, x, f32]),
            kernel!("convolution_gradients", ConvolutionGradientsKernel, wide(six.units), [_ _ ? ? ? ? _ _ ?], dim, 4, true, six, [x, x, x, f32]),
            kernel!("decay_gate", DecayGateKernel, wide(128), [_ ? ? _], scale, true, [x, f32, f32]),
            kernel!("decay_gate_gradients", DecayGateGradientsKernel, wide(one.units), [_ ? ? _ _ _], scale, false, one, [x, f32, f32]),
            kernel!("output_norm", OutputNormKernel, wide(one.units), [_ _ _ _], scale, one, [f32, x, x, x]),
            kernel!("output_norm_gradients", OutputNormGradientsKernel, wide(two.units), [_ _ _ _ _ _ _], scale, two, [f32, x, x, x]),
        ]);
        sources.extend([
            kernel!("recurrent", RecurrentKernel, wide(plan.units()), [_ _ _ _ _ ? _ _ ?], scale, plan, dtypes),
            kernel!("scores", ScoresKernel, wide(super::gradients::ROWS.pow(2)), [_ _ _ _ _], key_dim, dtypes),
            kernel!("scan", ScanKernel, wide(scan.units()), [_ _ _ _ _ _ ? ? ? ? _ _ ? ?], scale, scan, dtypes),
            kernel!("inputs", InputsKernel, wide(key_dim), [_ _ _ _ ? ? ? ?], key_dim, dtypes),
        ]);
    }
    if float != FloatKind::F32 || heads == HEADS[0] {
        let [plan, back] = [ChunkPlan::forward(dims, &properties, true), ChunkPlan::backward(dims, &properties, true)];
        let (Some(plan), Some(back)) = (plan, back) else {
            assert!(key_dim > 128, "no plan for tensor cores");
            return sources;
        };
        let dtypes = [dtypes[0], f32, f32, plan.number()];
        sources.extend([
            kernel!("chunk_scores", ChunkScoresKernel, narrow(plan.units()), [_ _ _ _ _], false, plan, dtypes),
            kernel!("chunk_scan", ChunkScanKernel, narrow(plan.units()), [_ _ _ _ _ _ ? _ _ ?], scale, plan, dtypes),
            kernel!("chunk_scores_back", ChunkScoresKernel, narrow(back.units()), [_ _ _ _ _], true, back, dtypes),
            kernel!("chunk_back", ChunkBackKernel, narrow(back.units()), [_ _ _ _ _ _ ? ? ? ? _ _ ? ?], scale, back, dtypes),
            kernel!("chunk_inputs", ChunkInputsKernel, narrow(back.units()), [_ _ _ _ ? ? ? ?], back, dtypes),
        ]);
    }
    sources
}

/// For an A100 and an H200, on tensor cores where they should be, and without spilling a register at heads of 128.
#[test]
fn kernels_compile_for_cuda() {
    let folder = std::env::temp_dir().join(format!("burn-kda-cuda-{}", std::process::id()));
    let mut kernels = 0;
    for (architecture, shared_kib) in DEVICES {
        let folder = folder.join(architecture);
        std::fs::create_dir_all(&folder).expect("a folder");
        for heads @ (key_dim, value_dim) in HEADS {
            for (dtype, float) in [("f32", FloatKind::F32), ("bf16", FloatKind::BF16)] {
                for (name, source) in sources(properties(shared_kib), heads, float) {
                    let file = folder.join(format!("{name} {dtype} {key_dim}x{value_dim}.cu"));
                    std::fs::write(file, source).expect("writes");
                    kernels += 1;
                }
            }
        }
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cuda/compile.py");
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let output = Command::new(python).arg(script).arg(&folder).output();
    std::fs::remove_dir_all(&folder).expect("the folder");
    let output = match output {
        Ok(output) if output.status.code() != Some(77) => output,
        _ => return println!("skipped: the Python packages in tests/cuda/requirements.txt are not installed"),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8(output.stdout).expect("text");
    println!("{table}");
    let rows: Vec<Vec<_>> = table.lines().skip(1).map(|row| row.split(',').collect()).collect();
    assert_eq!(rows.len(), kernels, "{table}");
    for row in rows {
        let [kernel, architecture, _, spilled, _, instructions] = row[..] else { panic!("{row:?}") };
        let on_tensor_cores = kernel.starts_with("chunk");
        // ptxas gives smaller heads fewer registers than there are, and some kernels spill a few of them.
        let most = if on_tensor_cores && !kernel.ends_with("128x128") { 64 } else { 0 };
        assert!(spilled.parse::<usize>().expect("bytes") <= most, "{kernel} spills {spilled} bytes on {architecture}");
        assert_eq!(instructions != "0", on_tensor_cores, "{kernel}: tensor-core instructions");
    }
}
