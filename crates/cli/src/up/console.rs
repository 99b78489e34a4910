//! What people see of `baton up`, and where the roles' logs go.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use rustix::process::geteuid;

use crate::error::CliError;
use crate::screen::Paint;

/// A role's log file is put aside at this size, and the one put aside before it is removed.
const MAX_LOG_BYTES: u64 = 64 << 20;
/// Last lines kept of each role, to be shown when it dies.
const TAIL_LINES: usize = 8;

/// Stderr: lines, and bars below them. Bars are shown on a terminal only. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Console {
    multi: MultiProgress,
    bars: Arc<Mutex<HashMap<String, ProgressBar>>>,
    /// For stderr.
    pub paint: Paint,
}

impl Console {
    /// Stderr of this process.
    pub fn new() -> Self {
        Self { multi: MultiProgress::new(), bars: Arc::default(), paint: Paint::stderr() }
    }

    /// A line above the bars. A closed stderr is no reason to stop a cluster.
    pub fn say(&self, text: &str) {
        self.multi.suspend(|| {
            let _ = writeln!(io::stderr(), "{text}");
        });
    }

    /// A role is being waited for: with `what`, and done by so much if that is known.
    pub fn waiting(&self, name: &str, done: Option<f64>, what: &str) {
        let mut bars = self.bars.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = bars.entry(name.to_owned()).or_insert_with(|| self.new_bar(name));
        if let Some(done) = done {
            bar.set_style(style("{spinner} {prefix:12} [{bar:32}] {percent:>3} % {msg}"));
            bar.set_position((done * 100.0) as u64);
        }
        bar.set_message(what.to_owned());
    }

    fn new_bar(&self, name: &str) -> ProgressBar {
        let bar = self.multi.add(ProgressBar::new(100).with_style(style("{spinner} {prefix:12} {msg}")));
        bar.set_prefix(name.to_owned());
        bar.enable_steady_tick(Duration::from_millis(100));
        bar
    }

    /// A role is not waited for any more.
    pub fn done(&self, name: &str) {
        let bar = self.bars.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    // Both templates are constants above; the default stands in should one of them be wrong.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Where the lines of one role go.
#[derive(Debug)]
pub struct RoleLog {
    name: String,
    console: Console,
    file: Option<Mutex<LogFile>>,
    tail: Mutex<VecDeque<String>>,
}

impl RoleLog {
    /// Into `folder/name.log`, or with a prefix to stderr.
    pub fn new(name: &str, folder: Option<&Path>, console: Console) -> Result<Self, CliError> {
        let open = |folder: &Path| {
            let path = folder.join(format!("{name}.log"));
            let cannot = |error| CliError::invalid("--log-dir", format!("cannot write {}: {error}", path.display()));
            LogFile::open(path.clone()).map(Mutex::new).map_err(cannot)
        };
        Ok(Self { name: name.to_owned(), console, file: folder.map(open).transpose()?, tail: Mutex::default() })
    }

    /// One more line.
    pub fn line(&self, text: String) {
        match &self.file {
            // A full disk must not end a cluster; the last lines in memory still have it.
            Some(file) => _ = file.lock().unwrap_or_else(PoisonError::into_inner).write(&text),
            None => self.console.say(&format!("{} {text}", self.console.paint.dim(&format!("{:>10} |", self.name)))),
        }
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(text);
    }

    /// The last lines since this was last asked.
    pub fn take_tail(&self) -> Vec<String> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }
}

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl LogFile {
    fn open(path: PathBuf) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        // A folder that others may write to: the name may be a link to another file, or a pipe.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        if path.is_symlink() {
            return Err(io::Error::other("it is a symbolic link: remove it"));
        }
        let file = OpenOptions::new().create(true).append(true).custom_flags(flags).open(&path)?;
        let found = file.metadata()?;
        if !found.is_file() || found.nlink() != 1 || found.uid() != geteuid().as_raw() {
            return Err(io::Error::other("it is not a regular file of this user's, with one name: remove it"));
        }
        Ok(Self { path, file, bytes: found.len() })
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        if self.bytes > MAX_LOG_BYTES {
            std::fs::rename(&self.path, self.path.with_extension("log.1"))?;
            *self = Self::open(self.path.clone())?;
        }
        self.bytes += text.len() as u64 + 1;
        self.file.write_all(format!("{text}\n").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn role_log_keeps_its_last_lines_and_rotates_a_large_file() {
        let folder = tempfile::tempdir().unwrap();
        let log = RoleLog::new("prefill-0", Some(&folder.path().join("new")), Console::new()).unwrap();
        for index in 0..TAIL_LINES + 3 {
            log.line(format!("line {index}"));
        }
        let tail = log.take_tail();
        assert_eq!((tail.len(), tail[0].as_str()), (TAIL_LINES, "line 3"));
        assert!(log.take_tail().is_empty());

        let path = folder.path().join("new/prefill-0.log");
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("line 0\nline 1\n"));
        log.file.as_ref().unwrap().lock().unwrap().bytes = MAX_LOG_BYTES + 1;
        log.line("after".into());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "after\n");
        assert!(path.with_extension("log.1").exists());
    }

    #[test]
    fn log_file_that_is_a_link_or_a_pipe_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "dear to its owner").unwrap();
        let path = folder.path().join("a.log");
        let made_as: [&dyn Fn() -> bool; 4] = [
            &|| symlink(&victim, &path).is_ok(),
            &|| symlink(folder.path().join("new"), &path).is_ok(),
            &|| std::fs::hard_link(&victim, &path).is_ok(),
            &|| std::process::Command::new("mkfifo").arg(&path).status().is_ok_and(|made| made.success()),
        ];
        for make in made_as {
            assert!(make());
            let error = RoleLog::new("a", Some(folder.path()), Console::new()).unwrap_err();
            assert!(error.to_string().starts_with("--log-dir: cannot write"), "{error}");
            std::fs::remove_file(&path).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "dear to its owner");
        assert!(!folder.path().join("new").exists());
    }

    #[test]
    fn unwritable_log_folder_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = RoleLog::new("a", Some(file.path()), Console::new()).unwrap_err();
        assert!(error.to_string().starts_with("--log-dir: cannot write"), "{error}");
    }
}
