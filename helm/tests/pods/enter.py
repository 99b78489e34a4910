"""Becomes a container: run in new mount and PID namespaces, it makes the file system, gives up rights and starts the
command. Its argument is a file that `containers.py` writes.
"""

import ctypes
import json
import os
import pathlib
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
# From <sys/mount.h>.
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC = 1, 2, 4, 8, 32, 4096, 16384
DETACH = 2
DEVICES = ("null", "zero", "full", "random", "urandom")
# As the runtime's own /etc of an image with a user that has no name.
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "group": "root:x:0:\n",
    # Else a name has the address of its first line alone.
    "host.conf": "multi on\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def check(result, what):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source, target, kind=None, flags=0, data=None):
    arguments = [None if one is None else os.fsencode(one) for one in (source, target, kind)]
    check(LIBC.mount(*arguments, flags, data and data.encode()), f"mount {source} on {target}")


def bind(source, target, read_only):
    mount(source, target, flags=BIND | REC)
    if read_only:
        mount(None, target, flags=REMOUNT | BIND | RDONLY)


def make(root, spec):
    mount("tmpfs", root, "tmpfs", data="mode=755")
    for name in ("usr", "etc", "proc", "sys", "dev", "run", "tmp", "var", "root"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    bind("/usr", root / "usr", read_only=True)
    bind(spec["programs"], root / "usr/local/bin", read_only=True)
    mount("proc", root / "proc", "proc", NOSUID | NODEV | NOEXEC)
    mount("sysfs", root / "sys", "sysfs", RDONLY | NOSUID | NODEV | NOEXEC)
    mount("tmpfs", root / "dev", "tmpfs", NOSUID, "mode=755,size=64k")
    for name in DEVICES:
        (root / "dev" / name).touch()
        bind(f"/dev/{name}", root / "dev" / name, read_only=False)
    (root / "dev/shm").mkdir()
    mount("tmpfs", root / "dev/shm", "tmpfs", NOSUID | NODEV | NOEXEC, "mode=1777,size=64m")
    for name, text in ETC.items():
        (root / "etc" / name).write_text(text)
    # A link into a folder: so the file changes as a whole, while processes read it.
    (root / "names").mkdir()
    bind(spec["names"], root / "names", read_only=True)
    (root / "etc/hosts").symlink_to("/names/hosts")
    for one in spec["mounts"]:
        target = root / one["path"].lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        bind(one["source"], target, one["read_only"])
    if spec["read_only"]:
        mount(None, root, flags=REMOUNT | BIND | RDONLY)


def main():
    spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
    root = pathlib.Path(spec["root"])
    make(root, spec)
    os.chdir(root)
    check(LIBC.pivot_root(b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", DETACH), "umount the machine's files")
    os.chdir("/")
    os.execve("/usr/bin/setpriv", ["setpriv", *spec["rights"], "--", *spec["command"]], spec["environment"])


main()
