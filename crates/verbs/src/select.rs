//! Which devices to use, and in which order.

use std::fs;
use std::str::FromStr;

use crate::VerbsError;

/// Names of devices, separated by commas; a name may end in `*`. The empty filter matches all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceFilter {
    patterns: Vec<String>,
}

impl DeviceFilter {
    /// Whether a device of this name is wanted.
    pub fn matches(&self, name: &str) -> bool {
        self.patterns.is_empty() || self.patterns.iter().any(|pattern| matches(pattern, name))
    }
}

impl FromStr for DeviceFilter {
    type Err = VerbsError;

    fn from_str(filter: &str) -> Result<Self, VerbsError> {
        let parts = filter.split(',').map(str::trim).filter(|_| !filter.trim().is_empty());
        let checked = parts.map(|part| match part.strip_suffix('*').unwrap_or(part) {
            name if name.contains('*') || part.is_empty() => {
                Err(VerbsError::BadFilter { filter: filter.into(), part: part.into() })
            }
            _ => Ok(part.to_string()),
        });
        Ok(Self { patterns: checked.collect::<Result<_, _>>()? })
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern,
    }
}

/// Sorts devices so that those nearest to NUMA node `from` come first; equally near ones keep their
/// order, and those of an unknown node come last.
pub fn by_numa_distance<T>(devices: &mut [T], from: u32, node: impl Fn(&T) -> Option<u32>) {
    let path = format!("/sys/devices/system/node/node{from}/distance");
    let distances = parse_distances(&fs::read_to_string(path).unwrap_or_default());
    devices.sort_by_key(|device| distance(&distances, from, node(device)));
}

/// The kernel's distances from one node to each: "10 21\n".
fn parse_distances(text: &str) -> Vec<u32> {
    text.split_whitespace().map_while(|number| number.parse().ok()).collect()
}

fn distance(distances: &[u32], from: u32, to: Option<u32>) -> u32 {
    match to {
        None => u32::MAX,
        Some(to) => match distances.get(to as usize) {
            Some(&known) => known,
            // What the kernel gives where firmware says nothing: 10 for a node to itself, 20 for
            // others.
            None => [20, 10][usize::from(to == from)],
        },
    }
}

/// A device's NUMA node as the kernel writes it; -1 where it has none.
#[cfg_attr(not(feature = "ibverbs"), allow(dead_code))] // devices are listed with the feature only
pub(crate) fn parse_numa_node(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

/// A port's speed as the kernel writes it, "100 Gb/sec (4X EDR)", in Gbit/s.
#[cfg_attr(not(feature = "ibverbs"), allow(dead_code))] // ports are listed with the feature only
pub(crate) fn parse_rate(text: &str) -> Option<f64> {
    text.split_once(" Gb/sec")?.0.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_filter_matches_names_and_prefixes() {
        let filter: DeviceFilter = "mlx5_0, rxe*".parse().unwrap();
        for (name, wanted) in [("mlx5_0", true), ("mlx5_01", false), ("rxe1", true), ("efa_0", false), ("rx", false)] {
            assert_eq!(filter.matches(name), wanted, "{name}");
        }
        assert!("".parse::<DeviceFilter>().unwrap().matches("anything"));
        assert!("*".parse::<DeviceFilter>().unwrap().matches("anything"));
    }

    #[test]
    fn invalid_device_filter_names_the_wrong_part() {
        for (filter, part) in [("a,,b", "''"), ("m*x_0", "'m*x_0'"), ("**", "'**'")] {
            let error = filter.parse::<DeviceFilter>().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(filter), "{error}");
        }
    }

    #[test]
    fn devices_are_ordered_by_numa_distance_and_unknown_is_last() {
        let distances = parse_distances("21 10 31\n");
        let mut devices = [("far", Some(2)), ("none", None), ("near", Some(0)), ("own", Some(1))];
        devices.sort_by_key(|device| distance(&distances, 1, device.1));
        assert_eq!(devices.map(|device| device.0), ["own", "near", "far", "none"]);
        assert_eq!(distance(&[], 1, Some(1)), 10);
        assert_eq!(distance(&[], 1, Some(0)), 20);
    }

    #[test]
    fn sysfs_numa_node_and_link_rate_are_parsed() {
        assert_eq!(parse_numa_node("1\n"), Some(1));
        assert_eq!(parse_numa_node("-1\n"), None);
        assert_eq!(parse_rate("100 Gb/sec (4X EDR)\n"), Some(100.0));
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)\n"), Some(2.5));
        assert_eq!(parse_rate("?"), None);
    }
}
