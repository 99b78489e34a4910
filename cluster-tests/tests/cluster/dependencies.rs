//! The layers of the workspace: arrows point down only.

use std::collections::BTreeMap;
use std::process::Command;

use serde::Deserialize;

/// Layer of each crate; a crate may depend on crates of lower layers only. ARCHITECTURE.md says
/// what each is for.
const LAYERS: [(&str, u8); 26] = [
    ("baton-types", 0),
    ("baton-memory", 0),
    ("baton-proto", 1),
    ("baton-profile", 1),
    ("baton-runtime", 1),
    ("baton-formats", 1),
    ("baton-kv-cache", 1),
    ("baton-kv-store", 1),
    ("baton-verbs", 1),
    ("baton-api", 2),
    ("baton-text", 2),
    ("baton-transfer-engine", 2),
    ("baton-scheduler", 2),
    ("baton-engine", 2),
    ("baton-intake", 2),
    ("baton-grammar", 3),
    ("baton-membership", 3),
    ("baton-sim", 3),
    ("baton-worker", 4),
    ("baton-bench", 4),
    ("baton-conductor", 4),
    ("baton-prefill-node", 5),
    ("baton-decode-node", 5),
    ("baton-cli", 6),
    ("baton-fuzz", 6),
    ("baton-cluster-tests", 6),
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

/// Normal dependencies of each crate of the workspace, by name. (The crate `cargo_metadata` would
/// give serde_json another feature, and the engine a second build.)
fn dependencies() -> BTreeMap<String, Vec<String>> {
    let arguments = ["metadata", "--no-deps", "--locked", "--format-version", "1"];
    let output = Command::new(env!("CARGO")).args(arguments).output().expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Metadata = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
    let normal = |package: Package| {
        let dependencies = package.dependencies.into_iter().filter(|dependency| dependency.kind.is_none());
        (package.name, dependencies.map(|dependency| dependency.name).collect())
    };
    metadata.packages.into_iter().map(normal).collect()
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `dev` or `build`; none of normal ones.
    kind: Option<String>,
}

fn layer(name: &str) -> Option<u8> {
    LAYERS.iter().find(|row| row.0 == name).map(|row| row.1)
}

#[test]
fn crates_depend_only_on_lower_layers() {
    for (name, dependencies) in dependencies() {
        let own = layer(&name).unwrap_or_else(|| panic!("{name} has no layer"));
        for dependency in dependencies.iter().filter(|d| d.starts_with("baton-")) {
            let below = layer(dependency).unwrap_or_else(|| panic!("{dependency} has no layer"));
            assert!(below < own, "{name} (layer {own}) depends on {dependency} (layer {below})");
        }
    }
}

#[test]
fn forbidden_crate_dependencies_are_not_reached() {
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
