//! Which backend an example runs on.

use burn::tensor::Device;
use clap::ValueEnum;

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Backend {
    Ndarray,
    Flex,
}

/// The backend asked for, else Burn's default: `BURN_DEVICE`, or the first compiled in, which is Flex on a CPU.
pub fn select(backend: Option<Backend>) -> Device {
    match backend {
        #[allow(deprecated)]
        Some(Backend::Ndarray) => Device::ndarray(),
        Some(Backend::Flex) => Device::flex(),
        None => Device::default(),
    }
}
