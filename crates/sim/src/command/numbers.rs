//! Numbers of the command line. Each says what it takes.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use crate::trace::BLOCK_TOKENS;

/// Longest objective, jitter or part: about twelve days.
const MAX_SECONDS: f64 = 1e6;
/// How fast a trace may be played. Slower, and virtual time would not fit into a clock.
const SPEEDS: RangeInclusive<f64> = 0.001..=1000.0;
/// Most points of a curve.
const MAX_POINTS: usize = 100;

/// Speeds, from the first to the last at equal steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve(Vec<f64>);

impl Curve {
    /// The speeds, ascending.
    pub fn speeds(&self) -> &[f64] {
        &self.0
    }
}

impl FromStr for Curve {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || "expected FROM:TO:STEP, speeds such as 0.5:3:0.5".to_owned();
        let parts: Vec<_> = text.split(':').collect();
        let [from, to, step] = parts[..] else { return Err(form()) };
        let from = speed(from)?;
        let to = speed(to)?;
        let step = speed(step)?;
        if to < from {
            return Err(format!("expected FROM to be at most TO, but {from} is more than {to}"));
        }
        let points = points(from, to, step);
        if points > MAX_POINTS {
            return Err(format!("expected at most {MAX_POINTS} speeds, but these are {points}"));
        }
        Ok(Self(steps(from, to, step)))
    }
}

/// Half a millionth of a step is for what binary fractions lose.
fn points(from: f64, to: f64, step: f64) -> usize {
    ((to - from) / step + 0.5e-6) as usize + 1
}

/// Speeds, from the first to the last at equal steps.
pub(crate) fn steps(from: f64, to: f64, step: f64) -> Vec<f64> {
    (0..points(from, to, step)).map(|point| rounded(from + step * point as f64)).collect()
}

/// 0.1 + 2 x 0.1 is 0.3.
fn rounded(speed: f64) -> f64 {
    (speed * 1e6).round() / 1e6
}

fn within(text: &str, range: &RangeInclusive<f64>) -> Option<f64> {
    text.parse().ok().filter(|value| range.contains(value))
}

pub(crate) fn speed(text: &str) -> Result<f64, String> {
    let least = SPEEDS.start();
    let most = SPEEDS.end();
    within(text, &SPEEDS).ok_or_else(|| format!("expected a speed from {least} to {most}"))
}

/// A time that is not 0.
pub(crate) fn positive_seconds(text: &str) -> Result<Duration, String> {
    let seconds = within(text, &(1e-6..=MAX_SECONDS)).map(Duration::from_secs_f64);
    seconds.ok_or_else(|| format!("expected seconds, more than 0 and at most {MAX_SECONDS}"))
}

/// An objective, from milliseconds.
pub(crate) fn positive_millis(text: &str) -> Result<Duration, String> {
    let millis = within(text, &(1e-3..=MAX_SECONDS * 1e3)).map(|millis| Duration::from_secs_f64(millis / 1e3));
    millis.ok_or_else(|| format!("expected milliseconds, more than 0 and at most {}", MAX_SECONDS * 1e3))
}

/// A bound that may be off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MillisOrOff(pub Option<Duration>);

pub(crate) fn millis_or_off(text: &str) -> Result<MillisOrOff, String> {
    match text {
        "off" => Ok(MillisOrOff(None)),
        _ => positive_millis(text).map(|time| MillisOrOff(Some(time))).map_err(|error| format!("{error}, or off")),
    }
}

/// Blocks must end where the trace's do.
pub(crate) fn block_tokens(text: &str) -> Result<u32, String> {
    let tokens = text.parse().ok().filter(|tokens| *tokens > 0 && BLOCK_TOKENS.is_multiple_of(*tokens));
    tokens.ok_or_else(|| format!("expected a divisor of {BLOCK_TOKENS}"))
}

/// A time that may be 0.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = within(text, &(0.0..=MAX_SECONDS)).map(Duration::from_secs_f64);
    seconds.ok_or_else(|| format!("expected seconds from 0 to {MAX_SECONDS}"))
}

/// A factor between two prefixes.
pub(crate) fn threshold(text: &str) -> Result<f64, String> {
    within(text, &(1.0..=1e6)).ok_or_else(|| "expected a factor of 1 or more".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_curve_includes_both_ends() {
        let speeds = |text: &str| text.parse::<Curve>().map(|curve| curve.0);
        assert_eq!(speeds("0.5:2:0.5"), Ok(vec![0.5, 1.0, 1.5, 2.0]));
        assert_eq!(speeds("0.1:0.3:0.1"), Ok(vec![0.1, 0.2, 0.3]));
        assert_eq!(speeds("1:1:1"), Ok(vec![1.0]));
        for text in ["", "1", "1:2", "1:2:3:4", "2:1:1", "1:2:0", "1:2:-1", "0:2:1", "1:inf:1", "1:NaN:1", "1:900:1"] {
            assert!(speeds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn option_numbers_out_of_bounds_are_refused() {
        for text in ["0", "-1", "inf", "NaN", "fast", "1e300", ""] {
            assert!(speed(text).is_err(), "{text}");
            assert!(positive_seconds(text).is_err(), "{text}");
        }
        assert_eq!((speed("2.5"), positive_seconds("0.1")), (Ok(2.5), Ok(Duration::from_millis(100))));
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        assert!(seconds("-0.5").is_err() && threshold("0.9").is_err());
    }
}
