//! A control group with a limit of memory, of either version.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// A group that processes are started in. It goes once they have ended.
#[derive(Debug)]
pub struct ControlGroup {
    folder: PathBuf,
}

/// Where groups may be made, and the file of the limit.
const MOUNTS: [(&str, &str); 2] =
    [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];

impl ControlGroup {
    /// A group of at most so many bytes.
    ///
    /// # Errors
    /// None can be made here.
    pub fn new(bytes: u64) -> anyhow::Result<Self> {
        let mut failed = anyhow::anyhow!("no control groups");
        for (mount, limit) in MOUNTS {
            match Self::below(Path::new(mount), limit, bytes) {
                Ok(group) => return Ok(group),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn below(mount: &Path, limit: &str, bytes: u64) -> anyhow::Result<Self> {
        let folder = mount.join(format!("baton-test-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        let group = Self { folder };
        let limit = group.folder.join(limit);
        anyhow::ensure!(limit.exists(), "{} does not exist", limit.display());
        fs::write(&limit, bytes.to_string()).with_context(|| limit.display().to_string())?;
        Ok(group)
    }

    /// The file that takes in processes.
    pub fn processes(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // It is empty, or the machine's end of it.
        let _ = fs::remove_dir(&self.folder);
    }
}
