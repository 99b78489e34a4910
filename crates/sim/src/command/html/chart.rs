//! Line charts as SVG.

use super::escape::escape;
use super::scale::{Scale, label};

/// Size of the drawing. It scales with the page's width; on a phone the text is still large enough to read.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 300.0;
/// What the labels need around the plot.
const LEFT: f64 = 54.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 28.0;
const BOTTOM: f64 = 44.0;
/// Half of the longest mark's text.
const MARK_ROOM: f64 = 38.0;
/// Up to so many points, each has a dot: they were measured apart.
const MAX_DOTS: usize = 30;

/// An axis: what it shows, with the unit.
#[derive(Debug)]
pub(super) struct Axis {
    pub label: &'static str,
    pub scale: Scale,
    /// Whether values are shares, shown as percent.
    pub percent: bool,
}

/// A line, and its name in the legend.
#[derive(Debug)]
pub(super) struct Line {
    pub name: &'static str,
    /// Number of its colour.
    pub colour: usize,
    pub points: Vec<(f64, f64)>,
}

/// Where a mark stands.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mark {
    /// At this value of x, from bottom to top.
    X(f64, &'static str),
    /// At this value of y, from left to right.
    Y(f64, &'static str),
}

/// A chart of lines over one axis.
#[derive(Debug)]
pub(super) struct Chart {
    pub title: String,
    pub x: Axis,
    pub y: Axis,
    pub lines: Vec<Line>,
    pub mark: Option<Mark>,
}

impl Axis {
    fn tick(&self, value: f64) -> String {
        if self.percent { format!("{} %", label(value * 100.0)) } else { label(value) }
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + self.scale.position(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.scale.position(value) * (HEIGHT - TOP - BOTTOM)
    }
}

impl Chart {
    /// Drawing, title and legend.
    pub(super) fn figure(&self) -> String {
        let title = escape(&self.title);
        let legend: String = self.lines.iter().map(legend_entry).collect();
        format!("<figure><figcaption>{title}</figcaption><ul class=\"legend\">{legend}</ul>{}</figure>\n", self.svg())
    }

    fn svg(&self) -> String {
        let lines: String = self.lines.iter().map(|line| self.line(line)).collect();
        let title = escape(&self.title);
        format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">{}{}{lines}{}{}</svg>",
            self.x_ticks(),
            self.y_ticks(),
            self.mark.map_or_else(String::new, |mark| self.mark(mark)),
            self.labels()
        )
    }

    fn x_ticks(&self) -> String {
        let bottom = HEIGHT - BOTTOM;
        let tick = |value: f64| {
            let (x, text) = (self.x.x(value), self.x.tick(value));
            let line = format!("<path class=\"grid\" d=\"M{x:.1} {TOP}V{bottom}\"/>");
            format!("{line}<text class=\"middle\" x=\"{x:.1}\" y=\"{:.1}\">{text}</text>", bottom + 17.0)
        };
        self.x.scale.ticks().into_iter().map(tick).collect()
    }

    fn y_ticks(&self) -> String {
        let right = WIDTH - RIGHT;
        let tick = |value: f64| {
            let (y, text) = (self.y.y(value), self.y.tick(value));
            let line = format!("<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>");
            format!("{line}<text class=\"end\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>", LEFT - 6.0, y + 4.0)
        };
        self.y.scale.ticks().into_iter().map(tick).collect()
    }

    fn labels(&self) -> String {
        let (x, y) = (escape(self.x.label), escape(self.y.label));
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - 8.0);
        format!(
            "<text class=\"end axis\" x=\"{right}\" y=\"{bottom}\">{x}</text><text class=\"axis\" x=\"4\" y=\"14\">{y}</text>"
        )
    }

    fn mark(&self, mark: Mark) -> String {
        let (path, anchor, x, y, text) = match mark {
            Mark::X(value, text) => {
                let x = self.x.x(value);
                (
                    format!("M{x:.1} {TOP}V{:.1}", HEIGHT - BOTTOM),
                    "middle",
                    x.clamp(MARK_ROOM, WIDTH - MARK_ROOM),
                    TOP - 5.0,
                    text,
                )
            }
            Mark::Y(value, text) => {
                let y = self.y.y(value);
                (format!("M{LEFT} {y:.1}H{:.1}", WIDTH - RIGHT), "end", WIDTH - RIGHT, y - 4.0, text)
            }
        };
        let text = escape(text);
        format!(
            "<path class=\"mark\" d=\"{path}\"/><text class=\"{anchor} halo\" x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>"
        )
    }

    fn line(&self, line: &Line) -> String {
        let place = |(x, y): &(f64, f64)| (self.x.x(*x), self.y.y(*y));
        let points: Vec<_> = line.points.iter().map(place).collect();
        let path: Vec<_> = points.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        let (colour, name) = (line.colour, escape(line.name));
        let dot = |(x, y): &(f64, f64)| format!("<circle class=\"c{colour}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        let dots: String = points.iter().filter(|_| points.len() <= MAX_DOTS).map(dot).collect();
        let path = if path.is_empty() { String::new() } else { format!("M{}", path.join("L")) };
        format!("<g><title>{name}</title><path class=\"line c{colour}\" d=\"{path}\"/>{dots}</g>")
    }
}

fn legend_entry(line: &Line) -> String {
    format!("<li class=\"c{}\">{}</li>", line.colour, escape(line.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        let axis = |label| Axis { label, scale: Scale::Linear(10.0), percent: false };
        let lines = vec![Line { name: "a<b", colour: 3, points }];
        Chart { title: "t & u".into(), x: axis("minutes"), y: axis("load"), lines, mark: Some(Mark::Y(5.0, "half")) }
    }

    #[test]
    fn lines_go_from_corner_to_corner() {
        let svg = chart(vec![(0.0, 0.0), (10.0, 10.0)]).svg();
        assert!(svg.contains("class=\"line c3\" d=\"M54.0 256.0L454.0 28.0\""), "{svg}");
    }

    #[test]
    fn text_is_escaped_and_axes_have_labels() {
        let figure = chart(vec![(1.0, 1.0)]).figure();
        for part in ["a&lt;b", "t &amp; u", "minutes", "load", "half"] {
            assert!(figure.contains(part), "{part}: {figure}");
        }
        assert!(!figure.contains("a<b"), "{figure}");
    }

    #[test]
    fn a_line_without_points_is_no_path() {
        assert!(chart(Vec::new()).svg().contains("class=\"line c3\" d=\"\""));
    }
}
