//! Bytes to learn from, with a part held out.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::RngExt;
use rand::rngs::StdRng;

/// Byte values.
pub const VOCAB: usize = 256;

/// Every tenth block of this many bytes is held out, so that both parts have the same kinds of text.
const BLOCK: usize = 4096;

pub struct Corpus {
    pub train: Vec<u8>,
    pub held_out: Vec<u8>,
}

impl Corpus {
    /// One file, or the Markdown and Rust of this repository in the order of their paths.
    pub fn load(file: Option<&Path>) -> Result<Self> {
        let mut paths = Vec::new();
        match file {
            Some(file) => paths.push(file.to_path_buf()),
            None => collect(&repository_root()?, &mut paths)?,
        }
        paths.sort();
        let mut bytes = Vec::new();
        for path in paths {
            bytes.extend(fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
        }
        Self::split(&bytes)
    }

    fn split(bytes: &[u8]) -> Result<Self> {
        let need = 10 * BLOCK;
        ensure!(bytes.len() >= need, "the text needs at least {need} bytes, got {}", bytes.len());
        let mut corpus = Self { train: Vec::new(), held_out: Vec::new() };
        for (i, block) in bytes.chunks(BLOCK).enumerate() {
            let part = if i % 10 == 9 { &mut corpus.held_out } else { &mut corpus.train };
            part.extend(block);
        }
        Ok(corpus)
    }

    /// Random windows of the training part: inputs `[batch, length]` and the byte after each, `[batch * length]`.
    pub fn batch(
        &self,
        batch: usize,
        length: usize,
        rng: &mut StdRng,
        device: &Device,
    ) -> (Tensor<2, Int>, Tensor<1, Int>) {
        let last = self.train.len() - length;
        let starts: Vec<_> = (0..batch).map(|_| rng.random_range(0..last)).collect();
        windows(&self.train, &starts, length, device)
    }
}

/// The bytes of `text` from each of `starts` on, `[starts, length]`, and the byte after each, flat.
pub fn windows(text: &[u8], starts: &[usize], length: usize, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let bytes = |shift: usize| -> Vec<i64> {
        let windows = starts.iter().flat_map(|start| &text[start + shift..start + shift + length]);
        windows.map(|&byte| i64::from(byte)).collect()
    };
    let inputs = TensorData::new(bytes(0), [starts.len(), length]);
    let targets = TensorData::new(bytes(1), [starts.len() * length]);
    (Tensor::from_data(inputs, device), Tensor::from_data(targets, device))
}

/// The workspace that `cargo run` was called for, else the one around the current directory.
pub fn repository_root() -> Result<PathBuf> {
    let start = match std::env::var_os("CARGO_MANIFEST_DIR") {
        Some(directory) => PathBuf::from(directory),
        None => std::env::current_dir()?,
    };
    let root = start.ancestors().find(|directory| directory.join("Cargo.lock").exists());
    Ok(root.unwrap_or(&start).to_path_buf())
}

fn collect(directory: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, paths)?;
            }
        } else if name.ends_with(".md") || name.ends_with(".rs") {
            paths.push(path);
        }
    }
    Ok(())
}
