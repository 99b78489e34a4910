"""Carries out the Dockerfile in chroots, and tries what comes out: scripts/test-image.sh, which gives it namespaces of its own."""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys

import bases
import build
import check
import damage
import host
import serve
from ends import CannotRun, Failed

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "helm/tests/golden/cpu"


def say(text):
    print(f"test-image: {text}", file=sys.stderr, flush=True)


def carry_out(given):
    """The last stage, and whether its binaries were compiled by it."""
    lent = host.Host(given.work / "host")
    from_images = bases.Bases(given.cache, lent, say)
    arguments = {"VERSION": given.version, "REVISION": given.revision}
    caches = given.cache / "mounts"
    step = build.Build(ROOT, given.work, from_images, arguments=arguments, caches=caches, binaries=given.binaries, say=say)
    stage = step.run()
    if not step.compiled and not given.binaries:
        raise Failed("Dockerfile: no step compiles")
    return stage, step.compiled


def check_tree(stage, compiled, version):
    if stage.labels.get("org.opencontainers.image.version") != version:
        raise Failed(f"its labels do not have the version {version}: {stage.labels}")
    whole, binaries = check.sizes(stage)
    say(f"size: {whole:.1f} MB, of which binaries {sum(binaries.values()):.1f} MB")
    say("size: " + ", ".join(f"{name} {size:.1f} MB" for name, size in binaries.items()))
    check.nothing_is_writable(stage)
    check.nothing_can_be_written(stage)
    check.no_build_tools(stage)
    check.it_is_small(stage)
    listed = check.all_is_listed(stage)
    say(f"the SBOM lists {listed['cargo']} crates and {listed['deb']} Debian packages")
    if compiled:
        check.rdma_is_linked(stage)
    else:
        check.libraries(stage)
    check.each_runs(stage, version)


def start_cluster(stage, given):
    """In a network of its own, so that ports are free and nothing outside is asked."""
    file = given.work / "stage.json"
    file.write_text(json.dumps(dataclasses.asdict(stage) | {"tree": str(stage.tree), "mounts": []}))
    me = [sys.executable, str(pathlib.Path(__file__).parent), "serve", str(file), str(given.model)]
    done = subprocess.run(["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *me], check=False)
    if done.returncode != 0:
        raise Failed("the cluster does not serve")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    modes = parser.add_subparsers(dest="mode", required=True)
    whole = modes.add_parser("run")
    for name in ("work", "cache", "model", "binaries"):
        whole.add_argument(f"--{name}", type=pathlib.Path)
    for name in ("version", "revision"):
        whole.add_argument(f"--{name}")
    inner = modes.add_parser("serve")
    inner.add_argument("stage", type=pathlib.Path)
    inner.add_argument("model", type=pathlib.Path)
    given = parser.parse_args()
    try:
        if given.mode == "serve":
            stage = build.Stage(**json.loads(given.stage.read_text()))
            stage.tree = pathlib.Path(stage.tree)
            serve.Cluster(stage, given.model, GOLDEN, given.stage.parent / "cluster", say).run()
            return
        stage, compiled = carry_out(given)
        check_tree(stage, compiled, given.version)
        start_cluster(stage, given)
        say(f"{damage.each_is_found(stage, given.version)} ways to damage the tree were found by the checks")
        say("the image passes" if compiled else f"the image passes, but NOT RUN: compiling (binaries of {given.binaries})")
    except CannotRun as error:
        say(error)
        sys.exit(77)
    except Failed as error:
        say(f"FAILED: {error}")
        sys.exit(1)


main()
