//! Checkpoints of published models: configurations, weights, caches and files that are not what they say.
//!
//! The fixtures are small checkpoints written from the published Python layers, with their answers in float64; see
//! `tests/oracle/README.md`.

#[path = "checkpoint/answers.rs"]
mod answers;
mod common;
#[path = "checkpoint/configs.rs"]
mod configs;
#[path = "checkpoint/errors.rs"]
mod errors;
#[path = "checkpoint/hostile.rs"]
mod hostile;
#[path = "checkpoint/presets.rs"]
mod presets;
#[path = "checkpoint/round_trip.rs"]
mod round_trip;

use std::path::PathBuf;

use common::fixture;

/// Every small checkpoint with the layers that have answers.
const FOLDERS: [(&str, &[usize]); 8] = [
    ("kimi_linear", &[0, 1, 4]),
    ("kimi_linear_native", &[1]),
    ("kimi_k3", &[0, 1]),
    ("glm5_next", &[0, 4]),
    ("glm5_next_native", &[1]),
    ("bailing_hybrid", &[0, 1]),
    ("bailing_hybrid_native", &[1]),
    ("kda", &[0]),
];

fn folder(name: &str) -> PathBuf {
    fixture::folder(&format!("checkpoints/{name}"))
}

/// An empty folder of this name for files of a test.
fn scratch(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("checkpoint").join(name);
    drop(std::fs::remove_dir_all(&path));
    std::fs::create_dir_all(&path).unwrap();
    path
}
