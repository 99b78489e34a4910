//! The layers of the workspace: arrows point down only.

use std::collections::BTreeMap;

use cargo_metadata::{DependencyKind, MetadataCommand};

/// Layer of each crate; a crate may depend on crates of lower layers only. ARCHITECTURE.md says what each is for.
const LAYERS: [(&str, u8); 21] = [
    ("baton-types", 0),
    ("baton-memory", 0),
    ("baton-proto", 1),
    ("baton-profile", 1),
    ("baton-runtime", 1),
    ("baton-formats", 1),
    ("baton-kv-cache", 1),
    ("baton-kv-store", 1),
    ("baton-verbs", 1),
    ("baton-text", 2),
    ("baton-transfer-engine", 2),
    ("baton-scheduler", 2),
    ("baton-engine", 2),
    ("baton-worker", 3),
    ("baton-sim", 3),
    ("baton-bench", 4),
    ("baton-conductor", 4),
    ("baton-prefill-node", 4),
    ("baton-decode-node", 4),
    ("baton-cli", 5),
    ("baton-cluster-tests", 5),
];

/// Even though the layers would allow it: (crate, what it must never depend on, directly or not).
const NEVER: [(&str, &str); 9] = [
    ("baton-conductor", "baton-engine"),
    ("baton-conductor", "baton-transfer-engine"),
    ("baton-transfer-engine", "baton-proto"),
    ("baton-scheduler", "tokio"),
    ("baton-kv-cache", "tokio"),
    ("baton-kv-store", "tokio"),
    ("baton-types", "tokio"),
    ("baton-engine", "tokio"),
    ("baton-sim", "tokio"),
];

/// Normal dependencies of each crate of the workspace, by name.
fn dependencies() -> BTreeMap<String, Vec<String>> {
    let metadata = MetadataCommand::new().no_deps().exec().expect("cargo metadata");
    let normal = |p: &cargo_metadata::Package| {
        let deps = p.dependencies.iter().filter(|d| d.kind == DependencyKind::Normal);
        deps.map(|d| d.name.clone()).collect()
    };
    metadata.packages.iter().map(|p| (p.name.to_string(), normal(p))).collect()
}

fn layer(name: &str) -> Option<u8> {
    LAYERS.iter().find(|row| row.0 == name).map(|row| row.1)
}

#[test]
fn arrows_point_down_only() {
    for (name, dependencies) in dependencies() {
        let own = layer(&name).unwrap_or_else(|| panic!("{name} has no layer"));
        for dependency in dependencies.iter().filter(|d| d.starts_with("baton-")) {
            let below = layer(dependency).unwrap_or_else(|| panic!("{dependency} has no layer"));
            assert!(below < own, "{name} (layer {own}) depends on {dependency} (layer {below})");
        }
    }
}

#[test]
fn what_must_never_be_reached_is_not_reached() {
    let all = dependencies();
    for (from, never) in NEVER {
        let mut reached = vec![from.to_string()];
        let mut next = 0;
        while next < reached.len() {
            for dependency in all.get(&reached[next]).into_iter().flatten() {
                if !reached.contains(dependency) {
                    reached.push(dependency.clone());
                }
            }
            next += 1;
        }
        assert!(!reached.iter().any(|name| name == never), "{from} reaches {never}");
    }
}
