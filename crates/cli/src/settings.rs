//! `baton settings`.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use baton_proto::v1;
use baton_runtime::{Clock, SystemClock};
use serde_json::{Value, json};

use crate::args::{SettingsCommand, SettingsSetArgs};
use crate::client::Conductor;
use crate::error::CliError;
use crate::screen::{Paint, line};
use crate::table::table;

/// How long the other conductors may take to follow.
const FOLLOW: Duration = Duration::from_secs(2);
/// How often they are asked.
const LOOK: Duration = Duration::from_millis(20);

/// Shows settings, sets them, or says when they change.
pub async fn run(command: &SettingsCommand, conductor: &str, json: bool) -> Result<(), CliError> {
    match command {
        SettingsCommand::Get { keys } => get(keys, conductor, json).await,
        SettingsCommand::Set(args) => set(args, conductor, json).await,
        SettingsCommand::Watch => watch(conductor, json).await,
    }
}

async fn get(keys: &[String], conductor: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(conductor).await?;
    let mut settings = conductor.cluster().get_settings(v1::GetSettingsRequest {}).await?.into_inner();
    if let Some(unknown) = keys.iter().find(|key| settings.settings.iter().all(|setting| setting.key != **key)) {
        let known: Vec<_> = settings.settings.into_iter().map(|setting| setting.key).collect();
        return Err(CliError::invalid(
            unknown,
            format!("not among those that change at run time: {}", known.join(", ")),
        ));
    }
    settings.settings.retain(|setting| keys.is_empty() || keys.contains(&setting.key));
    let text = if json { to_json(&settings).to_string() } else { render(&settings, Paint::stdout()) };
    Ok(line(&text)?)
}

async fn set(args: &SettingsSetArgs, addresses: &str, json: bool) -> Result<(), CliError> {
    let values = args.values.iter().cloned().collect();
    let by = args.by.clone().unwrap_or_else(user);
    let conductor = Conductor::connect(addresses).await?;
    let set = conductor.cluster().set_settings(v1::SetSettingsRequest { values, by }).await?.into_inner();
    let all = Conductor::each(addresses)?;
    let mut late = Vec::new();
    for other in &all {
        if let Err(reason) = follows(other, set.version).await {
            late.push(format!("{} ({reason})", other.address()));
        }
    }
    if !late.is_empty() {
        let version = set.version;
        let late = late.join(", ");
        return Err(CliError::Cluster(format!("version {version} is set, but not in force yet at {late}")));
    }
    let text = if json {
        to_json(&set).to_string()
    } else {
        format!("version {} is in force at {} of {} conductors", set.version, all.len(), all.len())
    };
    Ok(line(&text)?)
}

/// Waits until a conductor follows. Else says why it does not, as far as is known.
async fn follows(conductor: &Conductor, version: u64) -> Result<(), String> {
    let mut reason = "no answer".to_owned();
    let followed = async {
        loop {
            reason = match conductor.cluster().get_settings(v1::GetSettingsRequest {}).await {
                Ok(settings) if settings.get_ref().version >= version => return,
                Ok(settings) => format!("it has version {}", settings.get_ref().version),
                Err(status) => CliError::from(status).to_string(),
            };
            baton_runtime::sleep(LOOK).await;
        }
    };
    let followed = tokio::time::timeout(FOLLOW, followed).await;
    followed.map_err(|_| reason)
}

async fn watch(conductor: &str, json: bool) -> Result<(), CliError> {
    let mut conductor = Conductor::connect(conductor).await?;
    let mut before: Option<v1::RunTimeSettings> = None;
    loop {
        let ended = tokio::select! {
            ended = watch_at(&conductor, &mut before, json) => ended,
            signal = tokio::signal::ctrl_c() => return Ok(signal?),
        };
        // It goes down, or has gone: another one tells, too.
        match ended {
            Err(CliError::Output(error)) => return Err(CliError::Output(error)),
            _ if conductor.conductors() > 1 => conductor = conductor.another().await?,
            Err(error) => return Err(error),
            Ok(()) => return Err(CliError::Cluster("the conductor goes down: ask another one".to_owned())),
        }
        baton_runtime::sleep(LOOK).await;
    }
}

/// Shows changes until the conductor goes down.
async fn watch_at(conductor: &Conductor, before: &mut Option<v1::RunTimeSettings>, json: bool) -> Result<(), CliError> {
    let mut changes = conductor.cluster().watch_settings(v1::WatchSettingsRequest {}).await?.into_inner();
    while let Some(settings) = changes.message().await? {
        let text = match before {
            // Another conductor tells it again.
            Some(before) if before.version == settings.version => continue,
            _ if json => to_json(&settings).to_string(),
            None => render(&settings, Paint::stdout()),
            Some(before) => changed(before, &settings),
        };
        line(&text)?;
        *before = Some(settings);
    }
    Ok(())
}

/// Who asks: `user@host`.
fn user() -> String {
    let named = std::env::var("USER").ok().filter(|user| !user.is_empty());
    // A container often has no name for its user.
    let numbered =
        || std::fs::metadata("/proc/self").map_or_else(|_| "unknown".into(), |own| format!("uid-{}", own.uid()));
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}@{}", named.unwrap_or_else(numbered), host.trim())
}

/// `version 2 by me@here: ttft_slo_ms = 500 (was off)`.
fn changed(before: &v1::RunTimeSettings, after: &v1::RunTimeSettings) -> String {
    let value = |setting: &v1::RunTimeSetting| setting.value.clone().unwrap_or_default();
    let changes = after.settings.iter().filter_map(|setting| {
        let was = before.settings.iter().find(|was| was.key == setting.key)?;
        (was.value != setting.value).then(|| format!("{} = {} (was {})", setting.key, value(setting), value(was)))
    });
    let mut changes = changes.collect::<Vec<_>>().join(", ");
    if changes.is_empty() {
        changes = "the same values".to_owned();
    }
    format!("version {} by {}: {changes}", after.version, after.by)
}

fn render(settings: &v1::RunTimeSettings, paint: Paint) -> String {
    let row = |setting: &v1::RunTimeSetting| {
        vec![setting.key.clone(), setting.value.clone().unwrap_or_else(|| "-".to_owned()), setting.origin.clone()]
    };
    let rows: Vec<_> = settings.settings.iter().map(row).collect();
    let rows = table(&["SETTING", "VALUE", "FROM"], &rows, paint, |_, _, cell| cell.to_owned());
    match settings.version {
        0 => format!("{rows}\n\nversion 0: nothing was set at run time"),
        version => {
            let age_s = SystemClock.unix_ms().saturating_sub(settings.set_at_ms) / 1000;
            format!("{rows}\n\nversion {version}, set by {} {} ago", settings.by, age(age_s))
        }
    }
}

/// `45 s`, `12 min`, `5 h` or `3 days`.
fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

fn to_json(settings: &v1::RunTimeSettings) -> Value {
    let values = settings
        .settings
        .iter()
        .map(|setting| (setting.key.clone(), json!({ "value": setting.value, "from": setting.origin })));
    json!({
        "version": settings.version, "by": settings.by, "set_at_ms": settings.set_at_ms,
        "settings": values.collect::<serde_json::Map<_, _>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(version: u64, ttft: &str) -> v1::RunTimeSettings {
        let setting = |key: &str, value: &str, origin: &str| v1::RunTimeSetting {
            key: key.into(),
            value: Some(value.into()),
            origin: origin.into(),
        };
        let settings = vec![setting("log", "info", "default"), setting("ttft_slo_ms", ttft, "set at run time")];
        let set_at_ms = SystemClock.unix_ms() - 750_000;
        v1::RunTimeSettings { version, by: "me@here".into(), set_at_ms, settings }
    }

    #[test]
    fn settings_table_shows_values_and_origins() {
        let expected = "\
SETTING      VALUE  FROM
log          info   default
ttft_slo_ms  500    set at run time

version 2, set by me@here 12 min ago";
        assert_eq!(render(&settings(2, "500"), Paint::none()), expected);
        assert_eq!(to_json(&settings(2, "500"))["settings"]["ttft_slo_ms"]["value"], json!("500"));
    }

    #[test]
    fn age_has_the_unit_that_fits() {
        assert_eq!([45, 750, 18_500, 260_000].map(age), ["45 s", "12 min", "5 h", "3 days"]);
    }

    #[test]
    fn settings_change_is_shown_with_the_value_before() {
        let told = changed(&settings(1, "off"), &settings(2, "500"));
        assert_eq!(told, "version 2 by me@here: ttft_slo_ms = 500 (was off)");
    }
}
