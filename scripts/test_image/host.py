"""What this machine lends to the chroots while they run: its ways to Debian's mirrors and to crates, and its Rust toolchain.

Nothing of it stays in a tree. It is in /dev, which is of no image, or mounted over what a tree has.
"""

import os
import pathlib
import re
import shutil
import subprocess

from ends import CannotRun

# Variables that say how registries are reached, and how many processors a build may take.
NETWORK = re.compile(
    r"(?i:(https?|ftp|all|no)_proxy)|CARGO_(HTTP|NET|REGISTR|SOURCE)\w*|CARGO_BUILD_JOBS|SSL_CERT_(FILE|DIR)"
    r"|PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|PROXY|CERT|CONFIG_FILE)|CURL_CA_BUNDLE|REQUESTS_CA_BUNDLE"
)
INSIDE = "/dev/host"
TOOLCHAIN = "/usr/local/rustup/toolchains/host"


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout


class Host:
    def __init__(self, folder):
        """Collects it in `folder`, which is INSIDE in a chroot."""
        self.folder = folder
        folder.mkdir()
        self.mirrors = self.find_mirrors()
        self.environment = {"APT_CONFIG": f"{INSIDE}/apt.conf", "DEBIAN_FRONTEND": "noninteractive"}
        for name, value in os.environ.items():
            if NETWORK.fullmatch(name):
                self.environment[name] = self.lend(name, value)
        cargo = pathlib.Path(os.environ.get("CARGO_HOME") or pathlib.Path.home() / ".cargo")
        self.cargo_config = next((path for path in (cargo / "config.toml", cargo / "config") if path.is_file()), None)
        home = pathlib.Path.home()
        for path in (home / ".config/pip/pip.conf", home / ".pip/pip.conf", pathlib.Path("/etc/pip.conf")):
            if path.is_file() and "PIP_CONFIG_FILE" not in self.environment:
                self.environment["PIP_CONFIG_FILE"] = self.lend("PIP_CONFIG_FILE", str(path))

    def lend(self, name, value):
        """A variable's value in a chroot. If it names a file or a folder of this machine, that is copied."""
        if not value.startswith("/") or not os.path.exists(value):
            return value
        if os.path.isdir(value):
            shutil.copytree(value, self.folder / name, ignore_dangling_symlinks=True)
        else:
            shutil.copy(value, self.folder / name)
        return f"{INSIDE}/{name}"

    def find_mirrors(self):
        """Where apt has Debian's suites from: {"debian": URI, "security": URI}."""
        listed = output("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT) $(LABEL)", "Created-By: Packages")
        found = {}
        for uri, suite, component, label in (line.split(maxsplit=3) for line in listed.splitlines() if len(line.split()) >= 4):
            if label == "Debian" and component == "main" and "-" not in suite:
                found["debian"] = uri
            elif label == "Debian-Security" and component == "main":
                found["security"] = uri
        if "debian" not in found:
            raise CannotRun("apt has no lists of a mirror of Debian (apt-get update)")
        return found

    def apt(self, codename):
        """Writes apt's configuration for chroots of this release: the same mirrors, and ways to them, as here."""
        main = self.mirrors["debian"]
        sources = [f"deb {main} {codename} main", f"deb {main} {codename}-updates main"]
        if "security" in self.mirrors:
            sources.append(f"deb {self.mirrors['security']} {codename}-security main")
        (self.folder / "sources.list").write_text("".join(f"{line}\n" for line in sources))
        ways = [line for line in output("apt-config", "dump").splitlines() if re.match(r"Acquire::(https?|Retries|Check-|Force)", line)]
        (self.folder / "apt.conf").write_text("\n".join([f'Dir::Etc::sourcelist "{INSIDE}/sources.list";', *ways, ""]))
        # debootstrap knows of proxies from the environment alone.
        proxies = dict(re.findall(r'(?m)^Acquire::(https?)::Proxy "(.+)";$', "\n".join(ways)))
        return {f"{scheme}_proxy": proxy for scheme, proxy in proxies.items()}

    def toolchain(self, version):
        """(folder of this machine's Rust toolchain, why it is not quite the image's, or nothing)."""
        try:
            root = output("rustc", "--print", "sysroot").strip()
            own = output("rustc", "--version").split()[1]
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotRun(f"no Rust toolchain: {error}") from error
        if not os.access(f"{root}/bin/cargo", os.X_OK) or root in ("/usr", "/usr/local"):
            raise CannotRun(f"the Rust toolchain in {root} is not one folder, as rustup's are")
        return root, "" if own.startswith(version) else f"the image takes Rust {version}; built with this machine's {own}"
