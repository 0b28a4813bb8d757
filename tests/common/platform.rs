//! Devices, dtypes and bars.

use burn::tensor::{DType, Device};

/// NdArray and Flex, or the one device that `BURN_DEVICE` names.
pub fn devices() -> Vec<(String, Device)> {
    if std::env::var_os("BURN_DEVICE").is_some() {
        let device = Device::default();
        return vec![(format!("{device:?}"), device)];
    }
    #[allow(deprecated)] // NdArray is what the crate promises to run on
    let ndarray = Device::ndarray();
    vec![("ndarray".into(), ndarray), ("flex".into(), Device::flex())]
}

/// Every device with every precision it has, and a label.
pub fn platforms() -> Vec<(String, Device, DType)> {
    let mut all = Vec::new();
    for (name, device) in devices() {
        for (label, dtype) in [("f32", DType::F32), ("f64", DType::F64)] {
            // A WebGPU device says that it has f64, which WGSL does not: what Burn's operations give there is noise.
            if device.supports_dtype(dtype) && !(dtype == DType::F64 && name.contains("Wgpu")) {
                all.push((format!("{name} {label}"), device.clone(), dtype));
            }
        }
    }
    all
}

/// Relative RMS against the f64 reference, for every regime and path.
///
/// f32 has a unit roundoff of 6e-8; a token's update is a handful of roundings that do not pile up, because the
/// state contracts: FLA's own f32 recurrence is at 1e-7 to 4e-7 on most inputs. f64 is 2^29 times finer.
pub fn bar(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-13 } else { 1e-6 }
}

/// The bar where the state does not contract: (nearly) one key for all tokens and beta near 2, so that each token
/// reflects the state and rounding errors stay.
pub fn reflecting_bar(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-13 } else { 1e-5 }
}

/// Runs the tests of this binary again without the kernels: the plain algorithm as one node of the autodiff graph, and
/// each operation of it differentiated by Burn.
pub fn again_in_plain_operations() {
    again("BURN_KDA_PLAIN", &["1", "composed"]);
}

/// And again with the kernels as machines without some vectors run them.
pub fn again_on_older_machines() {
    again("BURN_KDA_SIMD", if cfg!(target_arch = "x86_64") { &["avx2", "none"] } else { &["none"] });
}

/// In processes of their own, since each reads the variable once.
fn again(variable: &str, values: &[&str]) {
    if ["BURN_KDA_PLAIN", "BURN_KDA_SIMD"].into_iter().any(|variable| std::env::var_os(variable).is_some()) {
        return;
    }
    let tests = std::env::current_exe().expect("the test binary");
    for value in values {
        let output = std::process::Command::new(&tests).env(variable, value).output().expect("runs");
        assert!(output.status.success(), "{variable}={value}: {}", String::from_utf8_lossy(&output.stdout));
    }
}
