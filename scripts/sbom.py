#!/usr/bin/env python3
"""Prints what the image is made of, as CycloneDX 1.5: crates by Cargo.lock, and Debian's packages.

Crates are those that the four binaries are built from, with all features: dependencies, and those of build scripts.
Dependencies of tests alone are left out. --debian FILE has lines of `package version architecture`.
"""

import argparse
import json
import pathlib
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARIES = ("baton-cli", "baton-conductor", "baton-prefill-node", "baton-decode-node")


def names_built(manifest):
    """Names of the packages that a manifest needs to be built, not to be tested."""
    tables = [manifest, *manifest.get("target", {}).values()]
    found = set()
    for table in tables:
        for kind in ("dependencies", "build-dependencies"):
            for name, given in table.get(kind, {}).items():
                found.add(given.get("package", name) if isinstance(given, dict) else name)
    return found


def members():
    """Name to names built, of the crates of this tree."""
    found = {}
    for path in sorted(ROOT.glob("*/Cargo.toml")) + sorted(ROOT.glob("crates/*/Cargo.toml")):
        manifest = tomllib.loads(path.read_text())
        if "package" in manifest:
            found[manifest["package"]["name"]] = names_built(manifest)
    return found


def crates():
    """The packages of Cargo.lock that the binaries are built from."""
    packages = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    by_name = {}
    for package in packages:
        by_name.setdefault(package["name"], []).append(package)
    own, seen = members(), {}
    waiting = [by_name[name][0] for name in BINARIES]
    while waiting:
        package = waiting.pop()
        key = (package["name"], package["version"])
        if key in seen:
            continue
        seen[key] = package
        for dependency in package.get("dependencies", []):
            name, *version = dependency.split(" ")
            if package["name"] in own and "source" not in package and name not in own[package["name"]]:
                continue
            waiting += [one for one in by_name[name] if not version or one["version"] == version[0]]
    return [seen[key] for key in sorted(seen)]


def crate(package):
    purl = f"pkg:cargo/{package['name']}@{package['version']}"
    found = {"type": "library", "bom-ref": purl, "name": package["name"], "version": package["version"], "purl": purl}
    if "checksum" in package:
        found["hashes"] = [{"alg": "SHA-256", "content": package["checksum"]}]
    return found


def debian(line):
    name, version, architecture = line.split()
    purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debian", type=pathlib.Path)
    arguments = parser.parse_args()
    lines = arguments.debian.read_text().splitlines() if arguments.debian else []
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "baton", "version": version}},
        "components": [*map(crate, crates()), *map(debian, filter(None, lines))],
    }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
