//! Memory that this process may still take: of the machine, and of the control groups it is in.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory of a node with a packed model, over the bytes of the model's file.
const WEIGHTS_FACTOR: f64 = 1.4;
/// Part of what the weights leave that caches take. The rest is for other processes, for buffers,
/// and for page caches.
const CACHE_SHARE: f64 = 0.5;
/// Least cache of a node, bytes: a machine with less to spare is told so by its kernel.
const MIN_CACHE_BYTES: u64 = 64 << 20;

/// Bytes that this process may still take; `None` if the system does not say.
pub fn available_memory() -> Option<u64> {
    available_below(Path::new("/"))
}

/// Bytes of KV cache for each of `nodes` nodes of one machine that load a model of so many bytes.
pub fn default_cache_bytes(available_bytes: u64, model_bytes: u64, nodes: u32) -> u64 {
    let nodes = f64::from(nodes.max(1));
    let weights = model_bytes as f64 * WEIGHTS_FACTOR * nodes;
    let caches = (available_bytes as f64 - weights).max(0.0) * CACHE_SHARE;
    ((caches / nodes) as u64).max(MIN_CACHE_BYTES)
}

/// Bytes of a model: of its file, of all files of its folder, or of all that a GGUF in several
/// files has.
pub fn model_bytes(model: &Path) -> u64 {
    let bytes = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
    if let Ok(entries) = fs::read_dir(model) {
        return entries.filter_map(|entry| Some(bytes(&entry.ok()?.path()))).sum();
    }
    let name = model.file_name().unwrap_or_default().to_string_lossy();
    let Some((stem, rest)) = name.rsplit_once("-00001-of-") else { return bytes(model) };
    let count: u32 = rest.strip_suffix(".gguf").and_then(|count| count.parse().ok()).unwrap_or(1);
    // No model has more files than names have room for.
    let files = (1..=count.min(99_999)).map(|index| model.with_file_name(format!("{stem}-{index:05}-of-{rest}")));
    files.map(|file| bytes(&file)).sum()
}

/// As the files below `root` say.
fn available_below(root: &Path) -> Option<u64> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok();
    let machine = meminfo.and_then(|text| field(&text, "MemAvailable:")).map(|kib| kib.saturating_mul(1024));
    let groups = control_groups(root).into_iter().filter_map(|group| group.left());
    machine.into_iter().chain(groups).min()
}

/// A control group that limits memory, in the files of its version.
struct ControlGroup {
    folder: PathBuf,
    limit: &'static str,
    usage: &'static str,
    inactive: &'static str,
}

impl ControlGroup {
    fn v1(folder: PathBuf) -> Self {
        let limit = "memory.limit_in_bytes";
        Self { folder, limit, usage: "memory.usage_in_bytes", inactive: "total_inactive_file" }
    }

    fn v2(folder: PathBuf) -> Self {
        Self { folder, limit: "memory.max", usage: "memory.current", inactive: "inactive_file" }
    }

    /// Bytes below its limit; `None` if it has none. Pages of files that are not in use count as
    /// free, as they do in `MemAvailable`.
    fn left(&self) -> Option<u64> {
        let read = |name: &str| fs::read_to_string(self.folder.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let limit = number(self.limit)?;
        let inactive = read("memory.stat").and_then(|text| field(&text, self.inactive)).unwrap_or(0);
        let usage = number(self.usage).unwrap_or(0).saturating_sub(inactive);
        Some(limit.saturating_sub(usage))
    }
}

/// The control groups of this process, up to the outermost that it sees.
fn control_groups(root: &Path) -> Vec<ControlGroup> {
    let lines = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut groups = Vec::new();
    for line in lines.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let is_v2 = controllers.is_empty();
        if !is_v2 && !controllers.split(',').any(|controller| controller == "memory") {
            continue;
        }
        let mount = root.join(if is_v2 { "sys/fs/cgroup" } else { "sys/fs/cgroup/memory" });
        for folder in Path::new(path.trim_start_matches('/')).ancestors() {
            let folder = mount.join(folder);
            let group = if is_v2 { ControlGroup::v2(folder) } else { ControlGroup::v1(folder) };
            groups.push(group);
        }
    }
    groups
}

/// The number after a word at the beginning of a line.
fn field(text: &str, word: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(word))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable:   16777216 kB\n");

    #[test]
    fn memory_without_limits_is_the_machines() {
        assert_eq!(available_below(root(&[MEMINFO]).path()), Some(16 * GIB));
        assert_eq!(available_below(root(&[]).path()), None);
        let unlimited = [MEMINFO, ("proc/self/cgroup", "0::/a\n"), ("sys/fs/cgroup/a/memory.max", "max\n")];
        assert_eq!(available_below(root(&unlimited).path()), Some(16 * GIB));
    }

    #[test]
    fn bytes_of_a_model_are_those_of_all_its_files() {
        let parts = [("m-00001-of-00003.gguf", "1"), ("m-00002-of-00003.gguf", "22"), ("m-00003-of-00003.gguf", "333")];
        let folder = root(&parts);
        assert_eq!(model_bytes(&folder.path().join(parts[0].0)), 6);
        assert_eq!(model_bytes(&folder.path().join(parts[1].0)), 2);
        assert_eq!(model_bytes(folder.path()), 6);
        assert_eq!(model_bytes(&folder.path().join("gone")), 0);
    }

    #[test]
    fn limit_of_a_control_group_above_counts() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/pod/container\n"),
            ("sys/fs/cgroup/pod/memory.max", "4294967296"),
            ("sys/fs/cgroup/pod/memory.current", "2147483648"),
            ("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 1073741824\n"),
            ("sys/fs/cgroup/pod/container/memory.max", "max"),
        ];
        assert_eq!(available_below(root(&files).path()), Some(3 * GIB));
        let first = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpu:/x\n4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824"),
        ];
        assert_eq!(available_below(root(&first).path()), Some(GIB));
    }

    #[test]
    fn nodes_of_a_machine_share_what_their_weights_leave() {
        assert_eq!(default_cache_bytes(16 * GIB, 0, 1), 8 * GIB);
        assert_eq!(default_cache_bytes(16 * GIB, 0, 4), 2 * GIB);
        assert_eq!(default_cache_bytes(16 * GIB, 5 * GIB, 2), GIB / 2);
        assert_eq!(default_cache_bytes(GIB, 5 * GIB, 1), MIN_CACHE_BYTES);
        assert_eq!(default_cache_bytes(16 * GIB, 0, 0), 8 * GIB);
    }
}
