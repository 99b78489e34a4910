//! How far the runs are, for people who wait.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A line on stderr while runs are made; nothing where nobody looks.
pub(crate) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(crate) fn new(runs: usize, wanted: bool) -> Self {
        if !wanted || !io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::new(runs as u64);
        if let Ok(style) = ProgressStyle::with_template("{spinner} simulating: {pos} of {len} runs [{elapsed}]") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        Self(Some(bar))
    }

    pub(crate) fn run_done(&self) {
        if let Some(bar) = &self.0 {
            bar.inc(1);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
