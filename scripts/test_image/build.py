"""Carries out a Dockerfile: each stage is a tree, each RUN a chroot."""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import chroot
import dockerfile
from ends import Failed
from host import INSIDE

# A step that compiles, which `binaries` may take the place of.
COMPILES = re.compile(r"\bcargo build\b")


@dataclasses.dataclass
class Stage:
    tree: pathlib.Path
    # What ENV set, and what ARG did: RUN sees both, and ENV goes before ARG.
    environment: dict
    mounts: list
    arguments: dict = dataclasses.field(default_factory=dict)
    labels: dict = dataclasses.field(default_factory=dict)
    folder: str = "/"
    user: str = ""
    command: tuple = ()

    def variables(self):
        return {**self.arguments, **self.environment}

    def path(self, name, error):
        """A path of the stage on this machine. Links that lead out of the tree are an error."""
        path = self.tree / os.path.normpath(os.path.join(self.folder, name)).lstrip("/")
        if not path.resolve().is_relative_to(self.tree.resolve()):
            raise error("it leads out of the tree")
        return path


class Build:
    def __init__(self, context, work, bases, *, arguments, caches, binaries, say):
        self.context = context
        self.work = work
        self.bases = bases
        self.given = arguments
        # Folder of what --mount=type=cache keeps from one run to the next.
        self.caches = caches
        self.binaries = binaries
        self.say = say
        # Of all stages: values of ARG before the first FROM.
        self.globals = {}
        self.stages = []
        self.names = {}
        self.compiled = False

    def run(self):
        """The last stage."""
        self.ignored = dockerfile.Ignored((self.context / ".dockerignore").read_text())
        for one in dockerfile.instructions((self.context / "Dockerfile").read_text()):
            step = getattr(self, f"do_{one.word.lower()}", None)
            if step is None:
                raise one.error("an instruction that is not supported")
            if not self.stages and one.word not in ("ARG", "FROM"):
                raise one.error("no FROM before it")
            self.say(f"Dockerfile:{one.line}: {one.word} {one.text if len(one.text) < 90 else one.text[:87] + '...'}")
            step(one)
        if not self.stages:
            raise Failed("Dockerfile: no FROM")
        unknown = sorted(set(self.given) - set().union(self.globals, *(stage.arguments for stage in self.stages)))
        if unknown:
            raise Failed(f"Dockerfile: no ARG takes {', '.join(unknown)}, which scripts/image.sh gives")
        return self.stages[-1]

    @property
    def stage(self):
        return self.stages[-1]

    def do_arg(self, one):
        name, equals, value = one.text.partition("=")
        if not re.fullmatch(r"\w+", name):
            raise one.error("expected NAME or NAME=VALUE")
        scope = self.stage.arguments if self.stages else self.globals
        if name in self.given:
            scope[name] = self.given[name]
        elif equals:
            value = dataclasses.replace(one, text=value).expand(self.stage.variables() if self.stages else self.globals)
            scope[name] = "".join(shlex.split(value))
        elif name in self.globals:
            scope[name] = self.globals[name]
        else:
            raise one.error(f"nothing gives {name}")

    def do_from(self, one):
        match = re.fullmatch(r"(\S+)(?: AS (\S+))?", one.expand(self.globals))
        if not match:
            raise one.error("expected IMAGE or IMAGE AS NAME")
        image, name = match.groups()
        tree = self.work / f"stage{len(self.stages)}"
        if image in self.names:
            before = self.names[image]
            stage = dataclasses.replace(before, tree=tree, environment=dict(before.environment), arguments={}, labels=dict(before.labels))
        else:
            before = self.bases.get(image, one.error)
            stage = Stage(tree, dict(before.environment), before.mounts)
        subprocess.run(["cp", "--archive", "--reflink=auto", before.tree, tree], check=True)
        self.stages.append(stage)
        if name:
            self.names[name] = stage

    def do_env(self, one):
        self.stage.environment.update(one.pairs(self.stage.variables()))

    def do_label(self, one):
        self.stage.labels.update(one.pairs(self.stage.variables()))

    def do_workdir(self, one):
        self.stage.folder = os.path.normpath(os.path.join(self.stage.folder, one.expand(self.stage.variables())))
        self.stage.path(".", one.error).mkdir(parents=True, exist_ok=True)

    def do_user(self, one):
        self.stage.user = one.expand(self.stage.variables())

    def do_cmd(self, one):
        if not one.text.startswith("["):
            raise one.error("the form without a shell is expected")
        self.stage.command = tuple(json.loads(one.text))

    def do_copy(self, one):
        flags, rest = one.flags(one.expand(self.stage.variables()))
        if any(name != "from" for name, _ in flags):
            raise one.error("a flag that is not supported")
        *sources, target = rest.split()
        if not sources or any(character in rest for character in "*?[<\"'"):
            raise one.error("expected SOURCE... TARGET, without patterns")
        is_folder = target.endswith("/") or len(sources) > 1
        target = self.stage.path(target, one.error)
        for source in sources:
            if flags:
                name = flags[0][1]
                if name not in self.names:
                    raise one.error(f"no stage {name}")
                found = dataclasses.replace(self.names[name], folder="/").path(source, one.error)
                below = None
            else:
                found = (self.context / source.lstrip("/")).resolve()
                if not found.is_relative_to(self.context):
                    raise one.error("it leads out of the context")
                below = os.path.relpath(found, self.context)
            if not os.path.lexists(found) or (below not in (None, ".") and self.ignored.has(below)):
                raise one.error(f"no {source} (or .dockerignore keeps it out)")
            if found.is_dir() and below is None:
                copy(found, target, walk(found))
            elif found.is_dir():
                if below != ".":
                    raise one.error("of the context, files or all of it are expected")
                copy(found, target, self.ignored.left(found))
            else:
                copy_one(found, target / found.name if is_folder or target.is_dir() else target)

    def do_run(self, one):
        flags, command = one.flags(one.text)
        if not command or command.startswith("[") or "<<" in command:
            raise one.error("the form of a shell is expected")
        if self.stage.user:
            raise one.error("after USER it is not supported")
        mounts = []
        for name, value in flags:
            options = dict(option.partition("=")[::2] for option in value.split(","))
            if name != "mount" or set(options) != {"type", "target"} or options["type"] != "cache":
                raise one.error("expected --mount=type=cache,target=FOLDER")
            kept = self.caches / options["target"].strip("/").replace("/", "-")
            kept.mkdir(parents=True, exist_ok=True)
            mounts.append(chroot.Mount(kept, options["target"], is_read_only=False))
        if COMPILES.search(command) and self.binaries:
            command = self.take_binaries()
        elif COMPILES.search(command):
            self.compiled = True
        mounts = [*self.stage.mounts, chroot.Mount(self.bases.host.folder, INSIDE), *mounts]
        environment = {"PATH": chroot.PATH, **self.bases.host.environment, **self.stage.variables()}
        began = time.monotonic()
        log = self.work / "log"
        with log.open("wb") as file:
            process = chroot.start(
                self.stage.tree,
                ["/bin/sh", "-c", command],
                environment=environment,
                mounts=mounts,
                folder=self.stage.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            status = process.wait()
        if status != 0:
            sys.stderr.write(log.read_text(errors="replace")[-6000:])
            raise one.error(f"exit status {status}")
        self.say(f"Dockerfile:{one.line}: took {time.monotonic() - began:.0f} s")

    def take_binaries(self):
        """Takes the place of compiling: puts binaries that were built before to the step's places, as its profile strips them."""
        folder = self.stage.tree / "binaries"
        folder.mkdir()
        for path in self.binaries.iterdir():
            if path.name in ("baton", "baton-conductor", "baton-prefill", "baton-decode"):
                shutil.copy2(path, folder)
        return "chown -R 0:0 /binaries && strip --strip-debug /binaries/*"


def walk(root):
    """Paths below `root`, folders first."""
    for folder, folders, files in os.walk(root):
        yield from (os.path.relpath(os.path.join(folder, name), root) for name in [*folders, *files])


def copy(source, target, paths):
    """Copies these paths of a folder, into a folder."""
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        copy_one(source / path, target / path)


def copy_one(source, target):
    """One file, link or folder without what is in it: root's, as COPY makes them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        target.mkdir(exist_ok=True)
        shutil.copystat(source, target)
    else:
        if os.path.lexists(target):
            target.unlink()
        shutil.copy2(source, target, follow_symlinks=False)
    os.chown(target, 0, 0, follow_symlinks=False)
