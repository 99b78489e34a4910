//! What a store finds in its folder when it is opened, and what it says if it cannot be.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};

use baton_kv_store::{KvStore, ReadOutcome, Recovery, StoreError, StoreOptions};
use baton_types::ErrorKind;

use crate::other_process::OtherProcess;
use crate::records::{SMALL, numbers, open, put_all, put_ok, read, with_slots};

const SLOTS: u64 = 4;

#[test]
fn records_survive_reopen_in_put_order() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    assert_eq!(store.recovery(), Recovery::default());
    for n in [3, 1, 2, 0] {
        assert_eq!(put_ok(&mut store, n, &options), None);
    }
    assert_eq!(put_ok(&mut store, 9, &options), Some(3));
    drop(store);
    let mut store = open(folder.path(), &options);
    assert_eq!(store.recovery(), Recovery { records: 4, dropped: 0, reset: false });
    assert_eq!(numbers(&store), [1, 2, 0, 9]);
    assert_eq!(put_ok(&mut store, 4, &options), Some(1), "numbered after those of before");
    drop(store);
    assert_eq!(numbers(&open(folder.path(), &options)), [2, 0, 9, 4]);
}

#[test]
fn second_store_in_a_folder_is_refused_with_folder_name() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    put_ok(&mut store, 1, &options);
    let error = KvStore::open(folder.path(), &options).unwrap_err();
    assert_eq!(error, StoreError::Locked { folder: folder.path().display().to_string() });
    assert!(error.to_string().contains(&*folder.path().to_string_lossy()) && error.kind() == ErrorKind::Unavailable);
    let record = store.locate(crate::records::hash(1)).unwrap();
    drop(store);
    assert!(KvStore::open(folder.path(), &options).is_err(), "a handle still reads");
    drop(record);
    open(folder.path(), &options);
}

#[test]
fn store_folder_is_locked_until_other_process_dies() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut other = OtherProcess::start("hold", folder.path());
    other.wait_ready();
    assert!(matches!(KvStore::open(folder.path(), &options), Err(StoreError::Locked { .. })));
    other.kill();
    open(folder.path(), &options);
}

#[test]
fn records_of_other_layout_are_discarded_and_foreign_files_kept() {
    let options = with_slots(&SMALL, SLOTS);
    let others = [
        StoreOptions { fingerprint: [9; 16], ..options.clone() },
        StoreOptions { parts: 2, ..options.clone() },
        StoreOptions { part_bytes: 1000, ..options.clone() },
    ];
    for other in others {
        let folder = tempfile::tempdir().unwrap();
        let foreign = folder.path().join("notes.txt");
        fs::write(&foreign, "not ours").unwrap();
        let mut store = open(folder.path(), &options);
        put_all(&mut store, 0..SLOTS, &options);
        drop(store);
        let mut store = open(folder.path(), &other);
        assert_eq!(store.recovery(), Recovery { records: 0, dropped: 0, reset: true });
        assert_eq!(fs::metadata(folder.path().join("baton-kv.payloads")).unwrap().len(), 0, "the room is given back");
        put_ok(&mut store, 7, &other);
        assert_eq!(read(&mut store, 7, &other), ReadOutcome::Found);
        drop(store);
        assert!(open(folder.path(), &options).is_empty(), "nor are they back");
        assert_eq!(fs::read(&foreign).unwrap(), b"not ours");
    }
}

#[test]
fn disk_bytes_are_those_of_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    let before = store.disk_bytes().unwrap();
    put_all(&mut store, 0..SLOTS, &options);
    let written = store.disk_bytes().unwrap() - before;
    assert!(written >= SLOTS * options.record_bytes(), "{written}");
    fs::write(folder.path().join("notes.txt"), vec![7; 1 << 20]).unwrap();
    assert_eq!(store.disk_bytes().unwrap() - before, written, "foreign files are not its own");
}

#[test]
fn smaller_capacity_truncates_files_and_larger_keeps_records() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(folder.path(), &options);
    put_all(&mut store, 0..SLOTS, &options);
    drop(store);
    let smaller = with_slots(&SMALL, 2);
    let mut store = open(folder.path(), &smaller);
    assert_eq!((store.len(), store.recovery().dropped, store.capacity()), (2, 2, 2 * smaller.record_bytes()));
    let length = |file| fs::metadata(folder.path().join(file)).unwrap().len();
    assert!(length("baton-kv.payloads") + length("baton-kv.headers") <= smaller.capacity_bytes);
    assert!(put_ok(&mut store, 9, &smaller).is_some());
    let kept = numbers(&store);
    drop(store);
    let mut store = open(folder.path(), &with_slots(&SMALL, 3));
    assert_eq!(numbers(&store), kept);
    assert_eq!(put_ok(&mut store, 10, &options), None);
    assert!(put_ok(&mut store, 11, &options).is_some());
}

#[test]
fn truncated_or_missing_files_lose_only_their_own_records() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let fill = || {
        let mut store = open(folder.path(), &options);
        put_all(&mut store, 0..SLOTS, &options);
    };
    let cut = |file: &str, length| {
        fs::OpenOptions::new().write(true).open(folder.path().join(file)).unwrap().set_len(length).unwrap();
    };
    fill();
    cut("baton-kv.payloads", 2 * 4096 + 100);
    assert_eq!(open(folder.path(), &options).recovery(), Recovery { records: 2, dropped: 2, reset: false });
    fill();
    cut("baton-kv.headers", 4096 + 3 * 128 + 5);
    assert_eq!(open(folder.path(), &options).len(), 3);
    fill();
    cut("baton-kv.headers", 17);
    assert_eq!(open(folder.path(), &options).recovery(), Recovery { records: 0, dropped: 0, reset: true });
    fill();
    fs::remove_file(folder.path().join("baton-kv.payloads")).unwrap();
    let mut store = open(folder.path(), &options);
    assert_eq!((store.len(), store.recovery().dropped), (0, 4));
    put_all(&mut store, 0..SLOTS, &options);
    assert_eq!(store.len() as u64, SLOTS);
}

#[test]
fn unusable_store_folder_is_named_in_error() {
    let folder = tempfile::tempdir().unwrap();
    let options = with_slots(&SMALL, SLOTS);
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = KvStore::open(&file.join("store"), &options).unwrap_err().to_string();
    assert!(error.contains("create folder") && error.contains("file/store"), "{error}");

    let taken = folder.path().join("taken");
    fs::create_dir_all(taken.join("baton-kv.headers")).unwrap();
    let error = KvStore::open(&taken, &options).unwrap_err().to_string();
    assert!(error.contains("open") && error.contains("baton-kv.headers"), "{error}");
}

#[test]
#[ignore = "needs a user who may not write everywhere: not root"]
fn store_folder_without_write_permission_is_named_in_error() {
    let folder = tempfile::tempdir().unwrap();
    let closed = folder.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    let error = KvStore::open(&closed, &with_slots(&SMALL, SLOTS)).unwrap_err().to_string();
    assert!(error.contains("closed/baton-kv.lock"), "{error}");
}

#[test]
fn store_files_are_readable_by_owner_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b");
    drop(open(&path, &with_slots(&SMALL, SLOTS)));
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(path.clone()) & 0o077, 0);
    assert_eq!(mode(path.join("baton-kv.payloads")) & 0o077, 0);
}

/// Opens a store where it must be refused; gives the error, whose path is checked.
fn refused(folder: &Path, path: &Path) -> String {
    let error = KvStore::open(folder, &with_slots(&SMALL, SLOTS)).unwrap_err();
    assert!(matches!(error, StoreError::Foreign { .. }) && error.kind() == ErrorKind::Invalid, "{error}");
    let told = error.to_string();
    assert!(told.starts_with(&format!("kv store: {}: ", path.display())), "{told}");
    told
}

#[test]
fn store_folder_that_is_a_link_is_refused_and_what_it_leads_to_is_left() {
    let root = tempfile::tempdir().unwrap();
    let victim = root.path().join("victim");
    fs::create_dir(&victim).unwrap();
    let link = root.path().join("link");
    symlink(&victim, &link).unwrap();
    for spelled in ["link", "link/", "link/.", "link//"] {
        let told = refused(&root.path().join(spelled), &link);
        assert!(told.ends_with("it is a symbolic link: name the folder that it leads to"), "{told}");
    }
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
#[ignore = "needs root, to give a link to another user"]
fn store_folder_behind_a_link_of_another_user_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let victim = root.path().join("victim");
    fs::create_dir(&victim).unwrap();
    let link = root.path().join("link");
    symlink(&victim, &link).unwrap();
    // A link of our own that leads through it.
    let ours = root.path().join("ours");
    symlink("link/deeper", &ours).unwrap();
    fs::create_dir(victim.join("deeper")).unwrap();
    drop(open(&ours.join("kv"), &with_slots(&SMALL, SLOTS)));
    fs::remove_dir_all(victim.join("deeper")).unwrap();
    lchown(&link, Some(12_345), None).unwrap();
    for spelled in ["link/kv", "link/a/b/kv", "link/../kv", "ours/kv"] {
        let told = refused(&root.path().join(spelled), &link);
        assert!(told.ends_with("it is a symbolic link of user 12345: name the folder that it leads to"), "{told}");
    }
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
fn store_file_that_is_a_link_a_pipe_or_a_second_name_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let victim = root.path().join("victim");
    fs::write(&victim, "dear to its owner").unwrap();
    for name in ["baton-kv.lock", "baton-kv.headers", "baton-kv.payloads"] {
        let folder = root.path().join(format!("of {name}"));
        fs::create_dir(&folder).unwrap();
        let path = folder.join(name);
        symlink(&victim, &path).unwrap();
        assert!(refused(&folder, &path).ends_with("it is a symbolic link: remove it"));
        fs::remove_file(&path).unwrap();
        symlink(root.path().join("new"), &path).unwrap();
        assert!(refused(&folder, &path).ends_with("it is a symbolic link: remove it"), "to nothing");
        fs::remove_file(&path).unwrap();
        fs::hard_link(&victim, &path).unwrap();
        assert!(refused(&folder, &path).ends_with("it has 2 names (hard links): remove this one"));
        fs::remove_file(&path).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success() && refused(&folder, &path).ends_with("it is no regular file: remove it"));
        fs::remove_file(&path).unwrap();
        open(&folder, &with_slots(&SMALL, SLOTS));
    }
    assert_eq!(fs::read(&victim).unwrap(), b"dear to its owner");
    assert!(!root.path().join("new").exists());
}

#[test]
fn store_folder_or_file_that_others_may_write_to_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("kv");
    let options = with_slots(&SMALL, SLOTS);
    drop(open(&folder, &options));
    let payloads = folder.join("baton-kv.payloads");
    for path in [&folder, &payloads] {
        let before = fs::metadata(path).unwrap().permissions();
        for mode in [0o777, 0o1777, 0o770] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            let told = refused(&folder, path);
            assert!(told.ends_with(&format!("others may write to it (mode {mode:04o}): chmod go-w")), "{told}");
        }
        fs::set_permissions(path, before).unwrap();
    }
    open(&folder, &options);
}

/// A folder of another user: root makes one, and others have root's.
fn foreign_folder(root: &Path) -> PathBuf {
    let folder = root.join("theirs");
    fs::create_dir(&folder).unwrap();
    match chown(&folder, Some(12_345), None) {
        Ok(()) => folder,
        Err(_) => PathBuf::from("/usr"),
    }
}

#[test]
fn store_folder_of_another_user_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let folder = foreign_folder(root.path());
    let told = refused(&folder, &folder);
    assert!(told.contains("it belongs to user ") && told.ends_with(": name a folder of its own"), "{told}");
    assert!(!folder.join("baton-kv.lock").exists());
}

#[test]
#[ignore = "needs root, to give a file to another user"]
fn store_file_of_another_user_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("baton-kv.headers");
    fs::write(&path, "").unwrap();
    chown(&path, Some(12_345), None).unwrap();
    assert!(refused(folder.path(), &path).contains("it belongs to user 12345"));
}

#[test]
fn files_that_no_store_made_are_not_emptied() {
    let folder = tempfile::tempdir().unwrap();
    let headers = folder.path().join("baton-kv.headers");
    let payloads = folder.path().join("baton-kv.payloads");
    let long = "a".repeat(5000);
    for (name, text) in [(&headers, "notes"), (&headers, &*long), (&headers, "batonkv"), (&payloads, "notes")] {
        fs::write(name, text).unwrap();
        let told = refused(folder.path(), &headers);
        assert!(told.contains("no kv store made it, or it is damaged: it is left as it is"), "{told}");
        assert_eq!(fs::read_to_string(name).unwrap(), text);
        fs::remove_file(name).unwrap();
    }
    drop(open(folder.path(), &with_slots(&SMALL, SLOTS)));
    let mut damaged = fs::read(&headers).unwrap();
    damaged[3] ^= 1;
    fs::write(&headers, &damaged).unwrap();
    refused(folder.path(), &headers);
    assert_eq!(fs::read(&headers).unwrap(), damaged);
}

#[test]
fn folder_that_takes_the_place_of_an_open_store_is_not_written_to() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("kv");
    let options = with_slots(&SMALL, SLOTS);
    let mut store = open(&folder, &options);
    fs::rename(&folder, root.path().join("moved")).unwrap();
    symlink(root.path(), &folder).unwrap();
    put_ok(&mut store, 1, &options);
    store.clear().unwrap();
    put_ok(&mut store, 2, &options);
    assert_eq!(read(&mut store, 2, &options), ReadOutcome::Found);
    let mut names: Vec<_> = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["kv", "moved"]);
}
