"""What the image's tree must be, told from its files. Each check raises `Failed`."""

import json
import os
import re
import stat
import subprocess

import chroot
from ends import Failed

# All files of the tree, and the four binaries, in MB (10^6 bytes): 1.25 times what they were when these were set.
MOST_MB = 250
MOST_BINARIES_MB = 150
# Debian's own folders that all may write into. A read-only root closes these, too.
STICKY = {"tmp", "var/tmp", "run/lock"}
BUILD_TOOL = re.compile(
    r"(?:.+-)?(?:gcc|g\+\+|cc|c\+\+|cpp|c[89]9|clang|clang\+\+|ld|ld\.(?:bfd|gold|lld)|as|ar|strip|make|cmake|ninja|pkg-config|pkgconf"
    r"|cargo|rustc|rustdoc|rustup|protoc|python|git)(?:-?\d[\d.]*)?"
)
BUILD_FOLDER = re.compile(r"source|binaries|usr/local/(?:cargo|rustup)|usr/lib/gcc(?:-cross)?|usr/lib/llvm-.*|root/\.(?:cargo|rustup)")
BINARIES = ("baton", "baton-conductor", "baton-prefill", "baton-decode")
FOLDER = "usr/local/bin"
# What its user may write. What is mounted from elsewhere, as /dev and /proc of the runtime, is left out.
WRITABLE = ["find", "/", "-xdev", "(", "-type", "f", "-o", "-type", "d", ")", "-writable", "-print"]


def files(tree):
    """Path in the tree and state of each file and folder."""
    for folder, folders, names in os.walk(tree):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            yield os.path.relpath(path, tree), os.lstat(path)


def some(found):
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def user(stage):
    """(UID, GID) of the image's user."""
    found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", stage.user)
    if not found:
        raise Failed(f"USER is '{stage.user}': Kubernetes' runAsNonRoot needs numbers that are not 0")
    return int(found[1]), int(found[2])


def nothing_is_writable(stage):
    uid, gid = user(stage)
    found = []
    for path, state in files(stage.tree):
        may_write = (
            state.st_mode & stat.S_IWOTH or (state.st_uid == uid and state.st_mode & stat.S_IWUSR) or (state.st_gid == gid and state.st_mode & stat.S_IWGRP)
        )
        if may_write and not stat.S_ISLNK(state.st_mode) and not (path in STICKY and state.st_mode & stat.S_ISVTX):
            found.append(f"/{path}")
    if found:
        raise Failed(f"user {uid} may write: {some(found)}")


def nothing_can_be_written(stage, is_root_read_only=True):
    """The same, as the user finds it in a container."""
    _, printed = chroot.run(stage.tree, WRITABLE, environment={}, user=user(stage), is_root_read_only=is_root_read_only)
    found = [line for line in printed.splitlines() if not line.endswith("Permission denied")]
    if found:
        raise Failed(f"the user may write, with the root read-only: {some(found)}")


def no_build_tools(stage):
    found = []
    for path, state in files(stage.tree):
        folder, name = os.path.split(path)
        is_program = re.fullmatch(r"(?:usr/)?(?:local/)?s?bin", folder) and BUILD_TOOL.fullmatch(name)
        if is_program or BUILD_FOLDER.fullmatch(path) or re.search(r"\.(?:h|hpp|a|rs|proto)$", name):
            found.append(f"/{path}")
    if found:
        raise Failed(f"it has what only building takes: {some(found)}")


def sizes(stage):
    """MB of the tree, and of each binary."""
    missing = [name for name in BINARIES if not (stage.tree / FOLDER / name).is_file()]
    if missing:
        raise Failed(f"no {some(missing)} in /{FOLDER}")
    # A file of several names counts once.
    whole = {(state.st_dev, state.st_ino): state.st_size for _, state in files(stage.tree) if stat.S_ISREG(state.st_mode)}
    return sum(whole.values()) / 1e6, {name: (stage.tree / FOLDER / name).stat().st_size / 1e6 for name in BINARIES}


def it_is_small(stage):
    whole, binaries = sizes(stage)
    if whole > MOST_MB:
        raise Failed(f"it has {whole:.0f} MB; at most {MOST_MB} are expected")
    if sum(binaries.values()) > MOST_BINARIES_MB:
        raise Failed(f"the binaries have {sum(binaries.values()):.0f} MB; at most {MOST_BINARIES_MB} are expected")


def all_is_listed(stage):
    """The SBOM lists the packages that the tree has, and crates."""
    document = json.loads((stage.tree / "usr/share/doc/baton/sbom.cdx.json").read_text())
    listed = {"cargo": set(), "deb": set()}
    for one in document["components"]:
        listed[one["purl"].split("/")[0].removeprefix("pkg:")].add(f"{one['name']} {one['version']}")
    command = ["dpkg-query", "--admindir", str(stage.tree / "var/lib/dpkg"), "--show", "--showformat", "${Package} ${Version}\n"]
    installed = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    if installed ^ listed["deb"]:
        raise Failed(f"the SBOM and dpkg differ: {some(sorted(installed ^ listed['deb']))}")
    crates = {one.split()[0] for one in listed["cargo"]}
    if not {"baton-conductor", "baton-prefill-node", "baton-decode-node", "baton-cli", "ibverbs-sys", "tokio"} <= crates:
        raise Failed(f"the SBOM has {len(crates)} crates, but not those of all binaries")
    return {kind: len(found) for kind, found in listed.items()}


def libraries(stage):
    """Names of the libraries that each binary links. Those, and what libibverbs loads by itself, find all of theirs."""
    programs = [f"/{FOLDER}/{name}" for name in BINARIES]
    providers = sorted(f"/{path}" for path, _ in files(stage.tree) if re.fullmatch(r"usr/lib/[^/]+/libibverbs/.*\.so", path))
    if not providers:
        raise Failed("it has no libraries of RDMA adapters")
    status, printed = chroot.run(stage.tree, ["ldd", *programs, *providers], environment={}, user=user(stage), is_root_read_only=True)
    missing = sorted(set(re.findall(r"(\S+) => not found", printed)))
    if missing:
        raise Failed(f"libraries are missing: {some(missing)}")
    linked = {path: set(re.findall(r"(?m)^\s+(\S+) =>", text)) for path, text in re.findall(r"(?m)^(/\S+):\n((?:\s+.*\n)+)", printed)}
    if status != 0 or set(linked) != {*programs, *providers}:
        raise Failed(f"ldd: exit status {status}: {printed[-500:]}")
    return {name: linked[f"/{FOLDER}/{name}"] for name in BINARIES}


def rdma_is_linked(stage):
    found = libraries(stage)
    without = [name for name in ("baton", "baton-prefill", "baton-decode") if "libibverbs.so.1" not in found[name]]
    if without:
        raise Failed(f"without RDMA: {some(without)}")


def each_runs(stage, version):
    """Each binary runs as the image's user, and says its version. The image's own command runs, too."""
    as_user = {"environment": stage.environment, "user": user(stage), "is_root_read_only": True}
    for name in BINARIES:
        status, printed = chroot.run(stage.tree, [name, "--version"], **as_user)
        if status != 0 or not printed.strip().endswith(f" {version}"):
            raise Failed(f"{name} --version: exit status {status}: {printed[-500:]}")
    status, printed = chroot.run(stage.tree, stage.command, **as_user)
    if status != 0 or "Usage" not in printed:
        raise Failed(f"{' '.join(stage.command)}: exit status {status}: {printed[-500:]}")
