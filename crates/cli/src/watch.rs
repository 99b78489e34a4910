//! Commands that print once, or again and again.

use std::io::IsTerminal;
use std::time::Duration;

use crate::error::CliError;
use crate::screen::line;

/// Prints what `look` gives: once, or every so many seconds until Ctrl-C.
pub async fn watch(
    every: Option<f64>,
    json: bool,
    look: impl AsyncFn() -> Result<String, CliError>,
) -> Result<(), CliError> {
    let Some(seconds) = every else { return Ok(line(&look().await?)?) };
    let mut ticks = baton_runtime::interval(Duration::from_secs_f64(seconds));
    let clear = std::io::stdout().is_terminal() && !json;
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let text = look().await?;
                // Home and erase below: no flicker, unlike clearing the whole screen.
                line(&if clear { format!("\x1b[H\x1b[J{text}") } else { text })?;
            }
            signal = tokio::signal::ctrl_c() => return Ok(signal?),
        }
    }
}
