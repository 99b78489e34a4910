//! Pages that are made from the code. `BATON_UPDATE=1` writes them anew.

use std::fmt::Write;

use baton_runtime::settings::{Declared, default_of};
use baton_runtime::telemetry::metrics_page;

fn check(path: &str, page: &str) {
    let file = format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("BATON_UPDATE").is_some() {
        std::fs::write(&file, page).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(written == page, "{path} is not what the code says: run the test with BATON_UPDATE=1");
}

#[test]
fn metrics_page_equals_registered_metrics() {
    let page = metrics_page(&[
        ("Every process", baton_runtime::telemetry::METRICS),
        ("Conductor", baton_conductor::metrics::METRICS),
        ("Prefill and decode nodes", baton_worker::METRICS),
        ("Prefill node", baton_prefill_node::METRICS),
        ("Decode node", baton_decode_node::METRICS),
        ("Transfer engine", baton_transfer_engine::METRICS),
    ]);
    check("docs/metrics.md", &page);
}

/// A table of the settings; those that change at run time have a mark.
fn table<T: Declared>(page: &mut String, at_run_time: &[&str]) {
    page.push_str("| setting | value | default | what it does |\n|---|---|---|---|\n");
    for setting in T::SETTINGS {
        let mark = if at_run_time.contains(&setting.key) { " *" } else { "" };
        let default = default_of::<T>(setting.key).map_or(String::new(), |default| format!("`{default}`"));
        let about = setting.about().replace('|', "\\|");
        writeln!(page, "| `{}`{mark} | {} | {default} | {about} |", setting.key, setting.value_name).unwrap();
    }
}

#[test]
fn configuration_page_equals_declared_settings() {
    let mut page = String::from(
        "# Configuration\n\nMade from the declarations in the code; a test keeps the two equal. The operator's command has \
         flags of its own:\n[cli.md](cli.md).\n\n\
         Each process takes settings from four places. A later one overrides an earlier one:\n\n\
         1. the default,\n\
         2. a TOML file, with `--config FILE`: `max_wait_ms = 5000`,\n\
         3. the environment: `BATON_MAX_WAIT_MS=5000`. An empty variable is not set,\n\
         4. a flag: `--max-wait-ms 5000`.\n\n\
         `--print-config` prints each setting and its source. A wrong value ends the process with status 2 and a line \
         that names\nthe setting as it was given. A setting with * also changes [at run time](operations/settings.md).\n",
    );
    page.push_str("\n## Conductor\n\n`baton-conductor`.\n\n");
    table::<baton_conductor::config::Settings>(&mut page, &baton_conductor::AT_RUN_TIME);
    page.push_str("\n## Nodes\n\n`baton-prefill` and `baton-decode`.\n\n");
    table::<baton_worker::config::Settings>(&mut page, &[]);
    assert!(page.contains("| `grpc` | ADDR | `127.0.0.1:7070` |"));
    check("docs/configuration.md", &page);
}
