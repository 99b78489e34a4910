//! From values to positions on an axis, and where its ticks are.

/// How values lie on an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scale {
    /// From 0 to this.
    Linear(f64),
    /// Between these powers of ten.
    Log(i32, i32),
}

/// Most ticks of an axis.
const MAX_TICKS: f64 = 6.0;
/// Decades of an axis: what is smaller than a millionth of the largest value lies at the edge.
const MAX_DECADES: i32 = 6;

impl Scale {
    /// From 0 to a round number that no value exceeds.
    pub(super) fn linear(values: impl Iterator<Item = f64>) -> Self {
        let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        let step = tick_step(most);
        Self::Linear((most / step).ceil().max(1.0) * step)
    }

    /// From 0 to the largest value, whatever that is.
    pub(super) fn up_to_last(values: impl Iterator<Item = f64>) -> Self {
        let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
        Self::Linear(if most > 0.0 { most } else { 1.0 })
    }

    /// From the power of ten below all values to that above. Values of 0 lie at the lower end.
    pub(super) fn log(values: impl Iterator<Item = f64>) -> Self {
        let logs: Vec<_> = values.filter(|value| value.is_finite() && *value > 0.0).map(f64::log10).collect();
        let least = logs.iter().copied().fold(f64::INFINITY, f64::min);
        let most = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if logs.is_empty() {
            return Self::Log(0, 1);
        }
        let to = most.ceil() as i32;
        Self::Log((least.floor() as i32).clamp(to - MAX_DECADES, to - 1), to)
    }

    /// 0 at the lower end, 1 at the upper one.
    pub(super) fn position(self, value: f64) -> f64 {
        let position = match self {
            Self::Linear(to) => value / to,
            Self::Log(from, to) => (value.max(f64::MIN_POSITIVE).log10() - f64::from(from)) / f64::from(to - from),
        };
        position.clamp(0.0, 1.0)
    }

    /// Values that have a label.
    pub(super) fn ticks(self) -> Vec<f64> {
        match self {
            Self::Linear(to) => {
                let step = tick_step(to);
                (0..=(to / step + 1e-6) as u32).map(|tick| f64::from(tick) * step).collect()
            }
            Self::Log(from, to) => {
                let factors: &[f64] = if to - from <= 2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
                let ticks = (from..=to).flat_map(|power| factors.iter().map(move |factor| factor * 10_f64.powi(power)));
                ticks.take_while(|tick| *tick <= 10_f64.powi(to)).collect()
            }
        }
    }
}

/// The least of 1, 2, 2.5 and 5 times a power of ten that gives few enough ticks.
fn tick_step(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let rough = most / MAX_TICKS;
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 2.5, 5.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough).unwrap_or(10.0 * power)
}

/// A tick's label: no more digits than it needs.
pub(super) fn label(value: f64) -> String {
    // Six digits are more than a tick has, and binary fractions are not seen in them.
    let text = format!("{value:.6}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_axis_ends_at_a_tick() {
        for most in [0.0, 0.003, 0.7, 1.0, 9.9, 37.0, 1800.0] {
            let scale = Scale::linear([most, most / 3.0].into_iter());
            let ticks = scale.ticks();
            assert!((2..=7).contains(&ticks.len()), "{most}: {ticks:?}");
            assert!((scale.position(ticks[ticks.len() - 1]) - 1.0).abs() < 1e-9 && ticks[ticks.len() - 1] >= most);
        }
    }

    #[test]
    fn an_axis_may_end_between_ticks() {
        let scale = Scale::up_to_last([31.7, 3.0].into_iter());
        assert_eq!((scale.position(31.7), scale.ticks()), (1.0, vec![0.0, 10.0, 20.0, 30.0]));
        assert_eq!(Scale::up_to_last(std::iter::empty()), Scale::Linear(1.0));
    }

    #[test]
    fn a_log_axis_has_powers_of_ten() {
        let scale = Scale::log([0.0, 0.05, 30.0].into_iter());
        assert_eq!((scale, scale.ticks().len()), (Scale::Log(-2, 2), 5));
        assert_eq!((scale.position(0.0), scale.position(1.0), scale.position(1e9)), (0.0, 0.5, 1.0));
        assert_eq!(Scale::Log(0, 1).ticks(), [1.0, 2.0, 5.0, 10.0], "a short one has more");
        assert_eq!(Scale::log([1.0].into_iter()), Scale::Log(-1, 0));
        assert_eq!(Scale::log([1e-12, 1.0].into_iter()), Scale::Log(-6, 0));
        assert_eq!(Scale::log(std::iter::empty()), Scale::Log(0, 1));
    }

    #[test]
    fn labels_have_the_digits_that_count() {
        let labels = [0.0, 0.01, 0.25, 1.0, 2.5, 100.0, 0.001].map(label);
        assert_eq!(labels, ["0", "0.01", "0.25", "1", "2.5", "100", "0.001"]);
    }
}
