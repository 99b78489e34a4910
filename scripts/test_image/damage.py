"""Damages the tree in each way that a check is for, one after the other. A check that lets one pass is none."""

import os

import check
from ends import Failed

PACKAGE = "\nPackage: added\nStatus: install ok installed\nVersion: 1\nArchitecture: all\nMaintainer: none\nDescription: none\n"


def nothing():
    pass


def large(path):
    """A file of no blocks."""
    path.touch()
    os.truncate(path, check.MOST_MB * 1_000_000)


def header(path):
    path.parent.mkdir(exist_ok=True)
    path.touch()


def each_is_found(stage, version):
    """How many ways there were. The tree is of no use afterwards."""
    uid, _ = check.user(stage)
    licence, compiler = stage.tree / "usr/share/doc/baton/LICENSE", stage.tree / "usr/bin/x86_64-linux-gnu-gcc-12"
    added, zeros = stage.tree / "usr/include/added.h", stage.tree / "zeros"
    packages, library = stage.tree / "var/lib/dpkg/status", next(stage.tree.glob("usr/lib/*/libgcc_s.so.1"))
    # What is done, the check that finds it, what that says, and how it is undone.
    ways = (
        (lambda: licence.chmod(0o666), check.nothing_is_writable, "LICENSE", lambda: licence.chmod(0o644)),
        (lambda: os.chown(licence, uid, 0), check.nothing_is_writable, "LICENSE", lambda: os.chown(licence, 0, 0)),
        (nothing, lambda stage: check.nothing_can_be_written(stage, is_root_read_only=False), "/tmp", nothing),
        (compiler.touch, check.no_build_tools, "gcc-12", compiler.unlink),
        (lambda: header(added), check.no_build_tools, "added.h", added.unlink),
        (lambda: large(zeros), check.it_is_small, "MB", zeros.unlink),
        (lambda: packages.write_text(packages.read_text() + PACKAGE), check.all_is_listed, "added 1", nothing),
        (library.unlink, check.libraries, "libgcc_s.so.1", nothing),
        (nothing, lambda stage: check.each_runs(stage, version), "libgcc_s.so.1", nothing),
    )
    for spoil, one, expected, mend in ways:
        spoil()
        try:
            one(stage)
        except Failed as error:
            if expected not in str(error):
                raise Failed(f"expected a check to name {expected}, but: {error}") from error
        else:
            raise Failed(f"no check names {expected}")
        mend()
    return len(ways)
