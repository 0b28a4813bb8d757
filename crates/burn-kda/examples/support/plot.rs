//! Line plots as SVG.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;

pub struct Series {
    pub label: String,
    pub points: Vec<(f64, f64)>,
}

/// One pair of axes.
pub struct Panel {
    pub title: String,
    pub y_label: String,
    pub series: Vec<Series>,
}

/// Draws `panels` below each other over training steps.
pub fn write_svg(path: &Path, panels: &[Panel]) -> Result<()> {
    let root = SVGBackend::new(path, (760, 320 * panels.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, panel) in root.split_evenly((panels.len(), 1)).iter().zip(panels) {
        let points = || panel.series.iter().flat_map(|series| &series.points).filter(|(_, y)| y.is_finite());
        let x_max = points().fold(1.0, |max: f64, &(x, _)| max.max(x));
        let y_max = points().fold(0.0, |max: f64, &(_, y)| max.max(y)) * 1.05;
        let mut chart = ChartBuilder::on(area)
            .caption(&panel.title, ("sans-serif", 16))
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(48)
            .build_cartesian_2d(0.0..x_max, 0.0..y_max.max(f64::MIN_POSITIVE))?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_label_formatter(&|x| format!("{x:.0}"))
            .x_desc("step")
            .y_desc(&panel.y_label)
            .draw()?;
        for (i, series) in panel.series.iter().enumerate() {
            let color = Palette99::pick(i).to_rgba();
            let finite = series.points.iter().copied().filter(|(_, y)| y.is_finite());
            chart
                .draw_series(LineSeries::new(finite, color.stroke_width(2)))?
                .label(&series.label)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        }
        // The free corner: below a rising curve, above a falling one.
        let rises = panel.series.iter().filter_map(|series| series.points.last()).any(|&(_, y)| y > y_max / 2.0);
        let corner = if rises { SeriesLabelPosition::LowerRight } else { SeriesLabelPosition::UpperRight };
        chart
            .configure_series_labels()
            .position(corner)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
    }
    root.present()?;
    Ok(())
}
