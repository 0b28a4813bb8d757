//! The half-lives of all heads of all layers as SVG.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;

use crate::half_life::HalfLife;

/// Longer than any context, where a channel that never forgets is drawn.
const LONGEST: f64 = 1e7;

/// One stroke per head, from its fastest channel to its slowest, with a dot at the median; one column per layer.
pub fn write_svg(path: &Path, title: &str, layers: &[(usize, Vec<HalfLife>)]) -> Result<()> {
    let root = SVGBackend::new(path, (960, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let heads = || layers.iter().flat_map(|(_, heads)| heads);
    let drawn = |x: f64| if x.is_finite() { x.min(LONGEST) } else { LONGEST };
    let low = heads().map(|head| drawn(head.shortest)).fold(f64::MAX, f64::min);
    let high = heads().map(|head| drawn(head.longest)).fold(f64::MIN_POSITIVE, f64::max);
    let columns = layers.len() as f64;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(-0.5..columns - 0.5, (low / 1.5..high * 1.5).log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(layers.len().min(24))
        .x_label_formatter(&|x| match layers.get(x.round() as usize) {
            Some((layer, _)) if (x - x.round()).abs() < 1e-6 => layer.to_string(),
            _ => String::new(),
        })
        .x_desc("layer, heads side by side")
        .y_desc("half-life at rest, tokens")
        .draw()?;
    for (column, (_, heads)) in layers.iter().enumerate() {
        let color = Palette99::pick(column % 4).to_rgba();
        for head in heads {
            let x = column as f64 - 0.4 + 0.8 * (head.head as f64 + 0.5) / heads.len() as f64;
            let ends = [(x, drawn(head.shortest)), (x, drawn(head.longest))];
            chart.draw_series(LineSeries::new(ends, color.mix(0.5).stroke_width(1)))?;
            chart.draw_series([Circle::new((x, drawn(head.median)), 2, color.filled())])?;
        }
    }
    root.present()?;
    Ok(())
}
