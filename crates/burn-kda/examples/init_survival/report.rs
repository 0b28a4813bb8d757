//! The runs as Markdown and SVG.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::corpus::Corpus;
use crate::initial::Initial;
use crate::plot::{self, Panel, Series};
use crate::run::{HELD_OUT, Run, Setup};

/// The runs of one initialisation, one per seed.
pub struct Trial {
    pub initial: Initial,
    pub runs: Vec<Run>,
}

/// Mean and half the range over seeds.
struct Spread {
    mean: f64,
    half_range: f64,
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.3} ± {:.3}", self.mean, self.half_range)
    }
}

impl Trial {
    fn spread(&self, value: impl Fn(&Run) -> f64) -> Spread {
        let values: Vec<_> = self.runs.iter().map(value).collect();
        let (min, max) = values.iter().fold((f64::MAX, f64::MIN), |(min, max), &x| (min.min(x), max.max(x)));
        Spread { mean: values.iter().sum::<f64>() / values.len() as f64, half_range: (max - min) / 2.0 }
    }

    fn held_out(&self) -> Spread {
        self.spread(|run| run.held_out)
    }

    fn last_losses(&self) -> Spread {
        self.spread(|run| {
            let last = &run.loss[run.loss.len().saturating_sub(10)..];
            last.iter().sum::<f64>() / last.len() as f64
        })
    }

    fn bad(&self) -> usize {
        self.runs.iter().map(|run| run.bad_losses + run.bad_parameters).sum()
    }
}

/// Writes `init-survival.md` and `init-survival.svg` into `directory`.
pub fn write(directory: &Path, setup: &Setup, corpus: &Corpus, trials: &[Trial; 2], device: &str) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
    let series = trials.iter().map(|trial| {
        let points = (0..setup.steps).map(|step| {
            let mean = trial.runs.iter().map(|run| run.loss[step]).sum::<f64>() / trial.runs.len() as f64;
            ((step + 1) as f64, mean)
        });
        Series { label: trial.initial.label().into(), points: points.collect() }
    });
    let panel = Panel {
        title: "Training loss by initialisation of the decay".into(),
        y_label: "bits per byte".into(),
        series: series.collect(),
    };
    plot::write_svg(&directory.join("init-survival.svg"), &[panel])?;
    let path = directory.join("init-survival.md");
    fs::write(&path, markdown(setup, corpus, trials, device)?).with_context(|| format!("writing {}", path.display()))
}

fn markdown(setup: &Setup, corpus: &Corpus, trials: &[Trial; 2], device: &str) -> Result<String> {
    let kda = &setup.config.kda;
    let seeds = trials[0].runs.len();
    let mut text = format!(
        "# Does the softplus gate survive its initialisation?

Written by `cargo run --release --example init_survival`; every number below comes from that run.

`KdaConfig::init` starts the decay as FLA does: `A_log = log U(1, 16)` per head, `dt_bias` the inverse softplus of a
step log-uniform in [0.001, 0.1] per channel. The older way starts every head and channel at `A_log = -3`,
`dt_bias = 1`. Both train the same byte-level model here, from the same other weights, on the same windows.

- model: d_model {}, {} heads x {}, {} block(s) of KDA and SwiGLU
- {} steps of {} windows x {} bytes, AdamW, peak learning rate {}, {seeds} seed(s), f32, {device}
- corpus: this repository's Markdown and Rust, {} bytes to learn, {} held out, of which {} are read

![loss curves](init-survival.svg)

| initialisation | held out, bits per byte | mean of the last 10 losses | NaN or infinite losses | NaN or infinite parameters |
|---|---|---|---|---|
",
        kda.hidden_size,
        kda.num_heads,
        kda.head_dim,
        setup.config.layers,
        setup.steps,
        setup.batch,
        setup.length,
        setup.lr,
        corpus.train.len(),
        corpus.held_out.len(),
        corpus.held_out.len().min(HELD_OUT),
    );
    for trial in trials {
        let losses: usize = trial.runs.iter().map(|run| run.bad_losses).sum();
        let parameters: usize = trial.runs.iter().map(|run| run.bad_parameters).sum();
        writeln!(
            text,
            "| {} | {} | {} | {losses} | {parameters} |",
            trial.initial.label(),
            trial.held_out(),
            trial.last_losses()
        )?;
    }
    text += "
± is half the range over the seeds.

## How long a channel remembers, before training

Half-life `ln 2 / -g` in tokens, over all key channels of the first block and all tokens of one batch:

| initialisation | shortest | 5 % | median | 95 % | longest |
|---|---|---|---|---|---|
";
    for trial in trials {
        let lives = &trial.runs[0].half_lives;
        writeln!(
            text,
            "| {} | {:.2} | {:.2} | {:.1} | {:.1} | {:.0} |",
            trial.initial.label(),
            lives.shortest,
            lives.p05,
            lives.median,
            lives.p95,
            lives.longest
        )?;
    }
    write!(text, "\n## Verdict\n\n{}\n", verdict(trials))?;
    Ok(text)
}

fn verdict(trials: &[Trial; 2]) -> String {
    let broken: Vec<_> = trials.iter().filter(|trial| trial.bad() > 0).map(|trial| trial.initial.label()).collect();
    let mut text = match broken.is_empty() {
        true => "Both survive: no loss and no parameter is NaN or infinite.".to_string(),
        false => format!("Does not survive: {}.", broken.join(" and ")),
    };
    let [fla, constant] = trials;
    let gains: Vec<_> = fla.runs.iter().zip(&constant.runs).map(|(a, b)| b.held_out - a.held_out).collect();
    let mean = gains.iter().sum::<f64>() / gains.len() as f64;
    let agree = gains.iter().filter(|gain| gain.signum() == mean.signum()).count();
    let spread = |trial: &Trial| trial.runs[0].half_lives.p95 / trial.runs[0].half_lives.p05;
    text += &format!(
        "\n\nOn held-out text FLA's ends {:.3} bits per byte {} on average, with that sign in {agree} of {} seeds.\n\
         Before training its half-lives span a factor of {:.0} from the 5 % to the 95 % quantile, the constant one's {:.1}:\n\
         short and long memories side by side against a single time scale. {:.0} % of FLA's exceed a window ({:.0} % of the\n\
         constant one's); windows this short cannot reward those. `KdaConfig::init` keeps FLA's, the reference layer's.",
        mean.abs(),
        if mean > 0.0 { "better" } else { "worse" },
        gains.len(),
        spread(fla),
        spread(constant),
        100.0 * fla.runs[0].half_lives.beyond_window,
        100.0 * constant.runs[0].half_lives.beyond_window,
    );
    text
}
