//! Line plots as SVG.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;

pub struct Curve {
    pub label: String,
    pub points: Vec<(f64, f64)>,
}

/// One pair of linear axes, which begin at 0: a cost linear in x is a straight line.
pub struct Panel {
    pub x: &'static str,
    pub y: &'static str,
    pub curves: Vec<Curve>,
}

/// Draws the panels below each other.
pub fn write_svg(path: &Path, panels: &[Panel]) -> Result<()> {
    let root = SVGBackend::new(path, (760, 320 * panels.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
        let points = || panel.curves.iter().flat_map(|curve| &curve.points);
        let x_max = points().fold(f64::MIN_POSITIVE, |max, &(x, _)| max.max(x));
        let y_max = points().fold(f64::MIN_POSITIVE, |max, &(_, y)| max.max(y));
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .margin_right(24)
            .x_label_area_size(36)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..x_max, 0.0..1.05 * y_max)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .x_desc(panel.x)
            .y_desc(panel.y)
            .draw()?;
        for (i, curve) in panel.curves.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            chart
                .draw_series(LineSeries::new(curve.points.iter().copied(), color.stroke_width(2)).point_size(3))?
                .label(&curve.label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        }
        // Where a rising curve leaves room.
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
