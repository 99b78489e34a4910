"""Starts the image's tree as the chart does, and asks it. It runs in a network namespace of its own: __main__.py.

Flags, settings and mounts are those that the chart renders for helm/examples/cpu.yaml, without etcd. `make test-helm` keeps these
files equal to what Helm renders.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import check
import chroot
from ends import Failed

ROLES = ("conductor", "prefill", "decode")
WAIT_S = 180
QUESTION = "Tell me about the capital of France."
ANSWER = "Paris"
# As the chart sets it in the conductor's containers.
CONDUCTOR = "http://127.0.0.1:9090"


@dataclasses.dataclass
class Container:
    """What a pod's container is given."""

    name: str
    command: str
    arguments: list
    mounts: list
    settings: str


def rendered(golden):
    """The containers of conductor, prefill and decode. What is read is Helm's output: its form does not change by itself."""
    documents = "\n".join(path.read_text() for path in sorted(golden.glob("*.yaml"))).split("\n---\n")
    found = []
    for document in documents:
        match = re.search(r"\n      containers:\n        - name: (\w+)\n(.*?)\n      volumes:\n", document, re.DOTALL)
        if not match or match[1] not in ROLES:
            continue
        name, body = match.groups()
        for expected in ("allowPrivilegeEscalation: false", "readOnlyRootFilesystem: true", "              drop:\n              - ALL\n"):
            if expected not in body:
                raise Failed(f"the chart's {name} is no longer run as here: no {expected.strip()}")
        command = re.search(r"(?m)^          command: \[([\w-]+)\]$", body)[1]
        arguments = re.findall(r'(?m)^            - "?(--.*?)"?$', body)
        mounts = re.findall(r"(?m)^            - name: (\w+)\n              mountPath: (\S+)\n(              readOnly: true\n)?", body + "\n")
        if len(mounts) != body.count("mountPath:"):
            raise Failed(f"mounts of the chart's {name} are not understood")
        settings = next(one for one in documents if f"\n  name: baton-{name}\n" in one and "\n  baton.toml: |\n" in one)
        toml = re.search(r"(?m)^  baton\.toml: \|\n((?:    .*\n?)*)", settings)[1]
        found.append(Container(name, command, arguments, mounts, re.sub(r"(?m)^    ", "", toml)))
    found.sort(key=lambda one: ROLES.index(one.name))
    if [one.name for one in found] != list(ROLES):
        raise Failed(f"the chart renders {[one.name for one in found]}")
    return found


class Cluster:
    def __init__(self, stage, model, golden, work, say):
        self.stage = stage
        self.model = model
        self.work = work
        self.say = say
        self.user = check.user(stage)
        self.containers = rendered(golden)
        # The service's name, as the cluster's DNS has it.
        nodes = next(argument for argument in self.containers[1].arguments if argument.startswith("--conductor="))
        self.host = re.fullmatch(r"--conductor=http://([\w.-]+):\d+", nodes)[1]
        self.processes = {}

    def run(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.kill)
            for one in self.containers:
                self.start(one)
            self.wait_until_ready()
            self.ask()
            self.look_inside()
            self.stop()

    def environment(self):
        return {"PATH": chroot.PATH, **self.stage.environment, "BATON_CONDUCTOR": CONDUCTOR}

    def mounts(self, one):
        """The volumes of a container: settings and model, and the names that a runtime writes."""
        folder = self.work / one.name
        (folder / "settings").mkdir(parents=True)
        (folder / "settings/baton.toml").write_text(one.settings)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.0.1 {self.host}\n")
        sources = {"settings": folder / "settings", "model": self.work / "model"}
        found = [chroot.Mount(folder / "hosts", "/etc/hosts")]
        for name, path, read_only in one.mounts:
            if name not in sources:
                raise Failed(f"the chart's {one.name} has a volume that is not known here: {name}")
            found.append(chroot.Mount(sources[name], path, bool(read_only)))
        return found

    def start(self, one):
        arguments = [argument for argument in one.arguments if not argument.startswith("--etcd")]
        model = next(argument.removeprefix("--model=/model/") for argument in arguments if argument.startswith("--model="))
        if not (self.work / "model").exists():
            (self.work / "model").mkdir(parents=True)
            copy = shutil.copytree if self.model.is_dir() else shutil.copy
            copy(self.model, self.work / "model" / model)
        values = {"$(POD_IP)": "127.0.0.1", "$(POD_NAME)": f"baton-{one.name}-0"}
        for name, value in values.items():
            arguments = [argument.replace(name, value) for argument in arguments]
        with (self.work / f"{one.name}.log").open("wb") as log:
            self.processes[one.name] = chroot.start(
                self.stage.tree,
                [one.command, *arguments],
                environment=self.environment(),
                mounts=self.mounts(one),
                user=self.user,
                is_root_read_only=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def failed(self, reason):
        logs = "".join(f"--- {name}\n{(self.work / f'{name}.log').read_text(errors='replace')[-2000:]}" for name in self.processes)
        return Failed(f"{reason}\n{logs}")

    def request(self, url, body=None):
        """What is answered, or `None` while the cluster is not ready."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise self.failed(f"{name} ended with status {process.returncode}")
        request = urllib.request.Request(url, data=body and json.dumps(body).encode(), headers={"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            # Busy machines may miss the objectives that the example sets.
            if error.code in (429, 503):
                return None
            raise self.failed(f"{url}: {error.code}: {error.read()[:500]}") from error
        except OSError:
            return None

    def until(self, what, attempt):
        deadline = time.monotonic() + WAIT_S
        while (found := attempt()) is None:
            if time.monotonic() > deadline:
                raise self.failed(f"{what}: not within {WAIT_S} s")
            time.sleep(0.2)
        return found

    def wait_until_ready(self):
        for port in (9090, 7300, 7301):
            self.until(f"port {port} is ready", lambda: self.request(f"http://127.0.0.1:{port}/ready"))

    def ask(self):
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "temperature": 0}
        answer = json.loads(self.until("an answer", lambda: self.request("http://127.0.0.1:8080/v1/chat/completions", body)))
        text = answer["choices"][0]["message"]["content"]
        if ANSWER not in text:
            raise self.failed(f"the answer to '{QUESTION}' does not have {ANSWER}: {text}")
        self.say(f"'{QUESTION}' was answered: {text.strip()!r}")

    def child(self, name):
        """Process 1 of a container."""
        process = self.processes[name]
        return int(pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])

    def look_inside(self):
        """Who the processes are, what they may write, and what an operator sees in a conductor's pod."""
        for one in self.containers:
            pid = self.child(one.name)
            status = dict(line.split(":\t", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
            uid, gid = self.user
            expected = {"Uid": "\t".join([str(uid)] * 4), "Gid": "\t".join([str(gid)] * 4), "Groups": " ", "NoNewPrivs": "1"}
            expected |= dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0" * 16)
            wrong = [f"{name} {status[name]!r}" for name in expected if status[name].strip() != expected[name].strip()]
            if wrong:
                raise self.failed(f"{one.name} runs with {', '.join(wrong)}")
            writable = self.inside(one.name, check.WRITABLE)
            if writable:
                raise self.failed(f"{one.name} may write: {check.some(writable.splitlines())}")
        nodes = self.inside("conductor", ["baton", "nodes"])
        if not all(re.search(rf"baton-{name}-0\b", nodes) for name in ("prefill", "decode")):
            raise self.failed(f"baton nodes shows not both nodes:\n{nodes}")
        self.say("`baton nodes` in the conductor's container:\n" + nodes.rstrip())

    def inside(self, name, command):
        """What a command prints in a container, as `kubectl exec`: with its user and rights."""
        pid = self.child(name)
        uid, gid = self.user
        enter = ["nsenter", f"--target={pid}", "--mount", "--pid", "--ipc", "--uts", "--root", "--wd"]
        rights = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]
        done = subprocess.run([*enter, *rights, *command], capture_output=True, text=True, env=self.environment(), timeout=120, check=False)
        # `find` says so of folders that it may not read.
        errors = [line for line in done.stderr.splitlines() if not line.endswith("Permission denied")]
        if errors or (done.returncode != 0 and command[0] != "find"):
            raise self.failed(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr[-500:]}")
        return done.stdout

    def stop(self):
        for one in reversed(self.containers):
            process = self.processes[one.name]
            os.kill(self.child(one.name), 15)
            try:
                status = process.wait(timeout=WAIT_S)
            except subprocess.TimeoutExpired:
                raise self.failed(f"{one.name} has not ended within {WAIT_S} s of SIGTERM") from None
            if status != 0:
                raise self.failed(f"{one.name} ended with status {status} after SIGTERM")

    def kill(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
