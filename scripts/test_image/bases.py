"""The images that a Dockerfile starts from, made by debootstrap and kept in the cache: Debian's slim ones, and Rust's slim ones."""

import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import chroot
from ends import CannotRun, Failed
from host import INSIDE, TOOLCHAIN

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# What Debian's slim images leave out, and keep leaving out.
SLIM = """\
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/groff/*
path-exclude /usr/share/info/*
path-exclude /usr/share/lintian/*
path-exclude /usr/share/locale/*
path-include /usr/share/locale/locale.alias
path-exclude /usr/share/man/*
"""
APT = """\
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/archives/partial/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::Languages "none";
"""
# As Rust's images set them; what they install; names in the folder of cargo's programs.
RUST = {"RUSTUP_HOME": "/usr/local/rustup", "CARGO_HOME": "/usr/local/cargo", "PATH": f"/usr/local/cargo/bin:{chroot.PATH}"}
RUST_PACKAGES = "ca-certificates gcc libc6-dev"
PROGRAMS = ("cargo", "rustc", "rustdoc")


@dataclasses.dataclass
class Base:
    tree: pathlib.Path
    environment: dict
    mounts: list


class Bases:
    def __init__(self, cache, host, say):
        self.cache = cache
        self.host = host
        self.say = say
        self.codename = None

    def get(self, name, error):
        """The base that an image's name means; `error` makes one of a reason."""
        debian = re.fullmatch(r"docker\.io/library/debian:([a-z]+)-slim", name)
        if debian:
            self.of_release(debian[1], error)
            return Base(self.kept(f"debian-{debian[1]}", lambda tree: self.debian(tree, debian[1])), {}, [])
        rust = re.fullmatch(r"docker\.io/library/rust:(\d+(?:\.\d+)*)-slim-([a-z]+)", name)
        if rust:
            self.of_release(rust[2], error)
            toolchain, note = self.host.toolchain(rust[1])
            if note:
                self.say(note)
            mounts = [chroot.Mount(toolchain, TOOLCHAIN)]
            if self.host.cargo_config:
                mounts.append(chroot.Mount(self.host.cargo_config, "/usr/local/cargo/config.toml"))
            return Base(self.kept(f"rust-{rust[2]}", lambda tree: self.rust(tree, rust[2])), dict(RUST), mounts)
        raise error("expected docker.io/library/debian:CODENAME-slim or docker.io/library/rust:VERSION-slim-CODENAME")

    def of_release(self, codename, error):
        if self.codename not in (None, codename):
            raise error(f"another release of Debian than {self.codename} is not supported")
        self.codename = codename
        self.host.apt(codename)

    def kept(self, name, make):
        """The tree in the cache. It is made under another name, so that what is there is whole, and anew if this file changed."""
        recipe = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:8]
        tree = self.cache / f"{name}-{recipe}"
        if not tree.exists():
            for old in self.cache.glob(f"{name}-*"):
                shutil.rmtree(old)
            new = self.cache / f"{name}-new"
            make(new)
            new.rename(tree)
        return tree

    def debian(self, tree, codename):
        self.say(f"debootstrap of {codename} into {self.cache}")
        environment = {**os.environ, **self.host.apt(codename)}
        # In namespaces of its own: it mounts.
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "debootstrap", "--variant=minbase"]
        command += [f"--keyring={KEYRING}", codename, str(tree), self.host.mirrors["debian"]]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False)
        if done.returncode != 0:
            sys.stderr.write(done.stdout[-2000:])
            raise CannotRun(f"debootstrap cannot make {codename}")
        (tree / "etc/dpkg/dpkg.cfg.d/docker").write_text(SLIM)
        (tree / "etc/apt/apt.conf.d/docker-clean").write_text(APT)
        # A runtime brings its own.
        shutil.rmtree(tree / "dev")
        (tree / "dev").mkdir(mode=0o755)
        # What debootstrap took from this machine, and where a chroot's are mounted.
        for name in ("etc/apt/sources.list", "etc/resolv.conf", "etc/hostname", "etc/hosts"):
            (tree / name).write_text("")
        self.run(
            tree,
            "apt-get clean && rm -rf /var/lib/apt/lists/* /var/log/bootstrap.log /var/log/dpkg.log /var/log/alternatives.log && "
            "find /usr/share/doc -type f ! -name copyright -delete && find /usr/share/doc -type l -delete && "
            "find /usr/share/doc -type d -empty -delete && "
            "find /usr/share/locale -mindepth 1 -maxdepth 1 ! -name locale.alias -exec rm -rf {} + && "
            "for name in groff info lintian man; do rm -rf /usr/share/$name/*; done",
        )

    def rust(self, tree, codename):
        debian = self.kept(f"debian-{codename}", lambda new: self.debian(new, codename))
        subprocess.run(["cp", "--archive", debian, tree], check=True)
        self.run(tree, f"apt-get update && apt-get install --yes --no-install-recommends {RUST_PACKAGES} && rm -rf /var/lib/apt/lists/*")
        programs = tree / "usr/local/cargo/bin"
        programs.mkdir(parents=True)
        (tree / TOOLCHAIN.lstrip("/")).mkdir(parents=True)
        (tree / "usr/local/cargo/config.toml").touch()
        for name in PROGRAMS:
            (programs / name).symlink_to(f"{TOOLCHAIN}/bin/{name}")

    def run(self, tree, command):
        mounts = [chroot.Mount(self.host.folder, INSIDE)]
        status, printed = chroot.run(tree, ["/bin/sh", "-ec", command], environment=self.host.environment, mounts=mounts)
        if status != 0:
            sys.stderr.write(printed[-2000:])
            raise Failed(f"a base cannot be made: {command}")
