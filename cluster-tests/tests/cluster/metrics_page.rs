//! `docs/metrics.md` is the lists in the code. `BATON_UPDATE=1` writes it anew.

use baton_runtime::telemetry::metrics_page;

#[test]
fn metrics_page_lists_exactly_the_registered_metrics() {
    let page = metrics_page(&[
        ("Every process", baton_runtime::telemetry::METRICS),
        ("Conductor", baton_conductor::metrics::METRICS),
        ("Both kinds of node", baton_worker::METRICS),
        ("Prefill node", baton_prefill_node::METRICS),
        ("Decode node", baton_decode_node::METRICS),
        ("Transfer engine", baton_transfer_engine::METRICS),
    ]);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    if std::env::var_os("BATON_UPDATE").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(written == page, "docs/metrics.md is not what the code registers: run the test with BATON_UPDATE=1");
}
