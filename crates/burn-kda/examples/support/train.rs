//! One optimisation step: AdamW, clipped gradients, linear warm-up and cosine decay.

use anyhow::{Result, anyhow};
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;

use super::model::Model;

pub struct Trainer {
    optimizer: ModuleOptimizer,
    schedule: ModuleLrScheduler,
}

impl Trainer {
    /// The learning rate rises to `peak_lr` in the first tenth of `steps` and falls to a hundredth of it at the end.
    pub fn new(steps: usize, peak_lr: f64) -> Result<Self> {
        let warm_up = (steps / 10).max(1);
        let decay = steps.saturating_sub(warm_up).max(1);
        let schedule = SequentialLrSchedulerConfig::new(
            vec![
                LinearLrSchedulerConfig::new(peak_lr / warm_up as f64, peak_lr, warm_up).into(),
                CosineAnnealingLrSchedulerConfig::new(peak_lr, decay).with_min_lr(peak_lr / 100.0).into(),
            ],
            vec![warm_up],
        );
        let optimizer = AdamWConfig::new()
            .with_beta_2(0.98)
            .with_epsilon(1e-8)
            .with_weight_decay(0.01)
            .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
        Ok(Self {
            optimizer: optimizer.init(),
            schedule: schedule.init().map_err(|error| anyhow!("learning-rate schedule: {error}"))?,
        })
    }

    /// One step down the gradient of `loss`.
    pub fn step(&mut self, model: Model, loss: Tensor<1>) -> Model {
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        self.optimizer.step(self.schedule.step(), model, gradients)
    }
}
