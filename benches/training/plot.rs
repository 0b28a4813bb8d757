//! Time and memory against T, as SVG.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;

use crate::case::Measurement;

pub struct Curve {
    pub label: String,
    /// By number of tokens.
    pub points: Vec<(usize, Measurement)>,
}

/// Draws both quantities below each other, on linear axes: a cost linear in T is a straight line.
pub fn write_svg(path: &Path, curves: &[Curve]) -> Result<()> {
    type Quantity = (&'static str, fn(&Measurement) -> Option<f64>);
    let panels: [Quantity; 2] = [("seconds", Measurement::seconds), ("peak memory, MiB", Measurement::mib)];
    let root = SVGBackend::new(path, (760, 640)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, (name, quantity)) in root.split_evenly((2, 1)).iter().zip(panels) {
        let points = |curve: &Curve| -> Vec<(f64, f64)> {
            curve.points.iter().filter_map(|(time, measured)| Some((*time as f64, quantity(measured)?))).collect()
        };
        let max =
            |pick: fn((f64, f64)) -> f64| curves.iter().flat_map(points).map(pick).fold(f64::MIN_POSITIVE, f64::max);
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .margin_right(24)
            .x_label_area_size(36)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..max(|(x, _)| x), 0.0..1.05 * max(|(_, y)| y))?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|time| format!("{time:.0}"))
            .x_desc("T")
            .y_desc(name)
            .draw()?;
        for (i, curve) in curves.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            chart
                .draw_series(LineSeries::new(points(curve), color.stroke_width(2)).point_size(3))?
                .label(&curve.label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
    }
    root.present()?;
    Ok(())
}
