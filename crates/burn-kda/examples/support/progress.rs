//! A progress bar on a terminal, ten lines anywhere else.

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

pub struct Progress {
    bar: ProgressBar,
    steps: usize,
}

impl Progress {
    pub fn new(steps: usize) -> Result<Self> {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed}, {eta} left] {msg}")?;
        Ok(Self { bar: ProgressBar::new(steps as u64).with_style(style), steps })
    }

    /// Shows the state after `done` steps.
    pub fn show(&self, done: usize, message: String) {
        if self.bar.is_hidden() && done.is_multiple_of((self.steps / 10).max(1)) {
            eprintln!("step {done}/{} [{:.0?}] {message}", self.steps, self.bar.elapsed());
        }
        self.bar.set_message(message);
        self.bar.set_position(done as u64);
        if done == self.steps {
            self.bar.abandon();
        }
    }
}
