"""Runs a command in a tree, in mount, PID, IPC and UTS namespaces of its own: when it ends, its processes and mounts are gone."""

import dataclasses
import os
import shlex
import subprocess

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# As Docker's for processes of an image that sets none.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a runtime writes for each container.
NAMES = ("/etc/resolv.conf", "/etc/hosts")


@dataclasses.dataclass
class Mount:
    source: str
    target: str
    is_read_only: bool = True


def script(tree, mounts, is_root_read_only):
    """A shell script that makes the file system of `tree`, with {} where the command goes."""
    root = shlex.quote(str(tree))
    lines = [
        f"mount --bind {root} {root}",
        f"mount -t proc -o nosuid,nodev,noexec proc {root}/proc",
        f"mount -t sysfs -o ro,nosuid,nodev,noexec sysfs {root}/sys",
        f"mount -t tmpfs -o nosuid,mode=755,size=16m dev {root}/dev",
        f"mkdir -m 1777 {root}/dev/shm",
        f"mount -t tmpfs -o nosuid,nodev,noexec,mode=1777,size=64m shm {root}/dev/shm",
        f"ln -s /proc/self/fd {root}/dev/fd",
    ]
    for name in DEVICES:
        lines += [f"touch {root}/dev/{name}", f"mount --bind /dev/{name} {root}/dev/{name}"]
    for one in mounts:
        source, target = shlex.quote(str(one.source)), f"{root}{shlex.quote(one.target)}"
        # Of what a Dockerfile mounts, the tree need not have the folder.
        lines.append(f"if [ -d {source} ]; then mkdir -p {target}; elif [ ! -e {target} ]; then touch {target}; fi")
        lines.append(f"mount --bind {source} {target}")
        if one.is_read_only:
            lines.append(f"mount -o remount,bind,ro {target}")
    if is_root_read_only:
        lines.append(f"mount -o remount,bind,ro {root}")
    return "\n".join(["set -e", *lines, f"exec chroot {root} {{}}"])


def start(tree, command, *, environment, mounts=(), folder="/", user=None, is_root_read_only=False, **options):
    """Starts a command. With a user (UID, GID) it has the rights of the chart's containers: no capability, nor a way to one."""
    rights = []
    if user:
        rights = ["setpriv", f"--reuid={user[0]}", f"--regid={user[1]}", "--clear-groups", "--no-new-privs"]
        rights += ["--bounding-set=-all", "--inh-caps=-all", "--"]
    # env -C: chroot itself goes to the root.
    inside = shlex.join(["/usr/bin/env", "-C", folder, *rights, *command])
    own = [Mount(os.path.realpath(name), name) for name in NAMES if all(one.target != name for one in mounts)]
    text = script(tree, [*own, *mounts], is_root_read_only).replace("{}", inside)
    namespaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--propagation", "private"]
    return subprocess.Popen([*namespaces, "/bin/sh", "-c", text], env={"PATH": PATH, "HOME": "/root", **environment}, **options)


def run(tree, command, **options):
    """(exit status, what it printed)."""
    process = start(tree, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    printed, _ = process.communicate()
    return process.returncode, printed
