//! The store's folder. Others may have been there before: nothing of theirs is followed, emptied or
//! written to.

use std::fs::{DirBuilder, File, read_link};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, lstat, open, openat};
use rustix::process::geteuid;

use crate::StoreError;

/// What the group and all others may do to a file or a folder.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Links that lead to links that are looked at.
const MAX_LINKS: usize = 8;

/// An open folder of this user's, that no other may write to. What is opened in it is in this
/// folder, whatever takes the place of its name.
#[derive(Debug)]
pub(crate) struct Folder {
    /// For errors.
    pub(crate) path: PathBuf,
    descriptor: OwnedFd,
}

impl Folder {
    /// Creates it if it is missing.
    pub(crate) fn open(path: &Path) -> Result<Self, StoreError> {
        // Without a slash at its end, which would follow a link.
        let path: PathBuf = path.components().collect();
        if let Some(parent) = path.parent() {
            check_links(parent, MAX_LINKS)?;
        }
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        created.map_err(|error| StoreError::io("create folder", &path, &error))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = open(&path, flags, Mode::empty());
        let descriptor = opened.map_err(|error| {
            if path.is_symlink() {
                return StoreError::foreign(&path, "it is a symbolic link: name the folder that it leads to");
            }
            StoreError::io("open", &path, &error.into())
        })?;
        check_owner(&path, &status(&path, &descriptor)?)?;
        Ok(Self { path, descriptor })
    }

    /// Opens one of the store's files, and creates it if it is missing. For its owner's eyes only:
    /// it holds conversations.
    pub(crate) fn file(&self, name: &str) -> Result<File, StoreError> {
        let path = self.path.join(name);
        // A pipe or a device does not make the call wait.
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = openat(&self.descriptor, name, flags, Mode::RUSR | Mode::WUSR);
        let file = opened.map_err(|error| {
            if path.is_symlink() {
                return StoreError::foreign(&path, "it is a symbolic link: remove it");
            }
            StoreError::io("open", &path, &error.into())
        })?;
        let status = status(&path, &file)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(StoreError::foreign(&path, "it is no regular file: remove it"));
        }
        if status.st_nlink != 1 {
            let problem = format!("it has {} names (hard links): remove this one", status.st_nlink);
            return Err(StoreError::foreign(&path, problem));
        }
        check_owner(&path, &status)?;
        Ok(file.into())
    }
}

/// Refuses a path on which another user's link lies: that user may let it lead anywhere. Links of
/// this user and of root, as `/var/run`, are followed.
fn check_links(path: &Path, links: usize) -> Result<(), StoreError> {
    for part in path.ancestors() {
        // What is missing is created.
        let Ok(status) = lstat(part) else { continue };
        if FileType::from_raw_mode(status.st_mode) != FileType::Symlink {
            continue;
        }
        let owner = status.st_uid;
        if links == 0 || (owner != 0 && owner != geteuid().as_raw()) {
            let problem = format!("it is a symbolic link of user {owner}: name the folder that it leads to");
            return Err(StoreError::foreign(part, problem));
        }
        let target = read_link(part).map_err(|error| StoreError::io("read", part, &error))?;
        check_links(&part.parent().unwrap_or(Path::new("")).join(target), links - 1)?;
    }
    Ok(())
}

fn status(path: &Path, file: impl AsFd) -> Result<Stat, StoreError> {
    fstat(file).map_err(|error| StoreError::io("look at", path, &error.into()))
}

/// Refuses what is another user's, and what others may write to.
fn check_owner(path: &Path, status: &Stat) -> Result<(), StoreError> {
    let us = geteuid().as_raw();
    if status.st_uid != us {
        let owner = status.st_uid;
        let problem = format!("it belongs to user {owner}, and this process is user {us}: name a folder of its own");
        return Err(StoreError::foreign(path, problem));
    }
    if status.st_mode & WRITABLE_BY_OTHERS != 0 {
        let mode = status.st_mode & 0o7777;
        return Err(StoreError::foreign(path, format!("others may write to it (mode {mode:04o}): chmod go-w")));
    }
    Ok(())
}
