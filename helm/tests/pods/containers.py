"""A container: started, probed, asked to end, started again."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

from . import probes, spec

# Seconds before a container that ended starts again. The kubelet begins with 10 and doubles it.
BACK_OFF = 1
ENTER = pathlib.Path(__file__).with_name("enter.py")


def first_process(process):
    """Process 1 of the container, once the container's own program runs in it; `None` if it has ended before."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    before = {os.path.realpath(program) for program in (sys.executable, "/usr/bin/nsenter", "/usr/bin/unshare", "/usr/bin/setpriv")}
    while process.poll() is None:
        try:
            child = int(children.read_text().split()[0])
            if os.readlink(f"/proc/{child}/exe") not in before:
                return child
        except (OSError, IndexError):
            # Not there yet, or just gone.
            pass
        time.sleep(0.01)
    return None


class Container(threading.Thread):
    Timeout = subprocess.TimeoutExpired

    def __init__(self, pod, given):
        super().__init__(name=f"{pod.name} {given['name']}", daemon=True)
        self.pod = pod
        self.given = given
        self.image = pod.cluster.registry.pull(given["image"])
        self.log = pod.cluster.folder / "logs" / f"{pod.name}.{given['name']}"
        # Its process 1, seen from here.
        self.pid = None
        self.run_id = 0
        self.is_started = False
        self.is_ready = False
        # Why it was asked to end, if it was.
        self.reason = None
        # (reason, exit status) of each end.
        self.ends = []
        self.is_over = False
        # Set while no process runs; `changed` when it counts as started.
        self.ended = threading.Event()
        self.changed = threading.Event()

    def port(self, name):
        """The number of a port: a number or a name of the container's own."""
        if isinstance(name, int):
            return name
        return next(one["containerPort"] for one in self.given["ports"] if one["name"] == name)

    # Life

    def run(self):
        while not self.pod.is_terminating:
            process = self.start_process()
            self.watch(process)
            policy = self.pod.spec.get("restartPolicy", "Always")
            if policy == "Never" or (policy == "OnFailure" and process.returncode == 0) or self.pod.is_terminating:
                break
            self.pod.deleted.wait(BACK_OFF)
        self.is_over = True

    def run_to_end(self):
        """An init container: until it has ended well."""
        while not self.pod.is_terminating:
            self.watch(self.start_process())
            if self.ends[-1][1] == 0:
                return
            self.pod.deleted.wait(BACK_OFF)

    def start_process(self):
        environment = spec.environment(self.given, self.pod)
        context = spec.security(self.given, self.pod.spec)
        self.rights = spec.rights(context, self.image)
        self.environment = environment
        description = {
            "root": str(self.pod.cluster.folder / "root"),
            "programs": str(self.image.programs),
            "names": str(self.pod.names),
            "mounts": spec.mounts(self.given, self.pod),
            "read_only": context.get("readOnlyRootFilesystem", False),
            "rights": self.rights,
            "environment": environment,
            "command": spec.command(self.given, self.image, environment),
        }
        file = self.pod.folder / f"{self.given['name']}.json"
        file.write_text(json.dumps(description))
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        self.ended.clear()
        self.changed.clear()
        self.reason = None
        with self.log.open("ab") as log:
            log.write(f"--- start {self.run_id}\n".encode())
            log.flush()
            command = [*self.pod.sandbox.enter(), *unshare, sys.executable, "-IS", str(ENTER), str(file)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pid = first_process(process)
        self.run_id += 1
        self.is_started = "startupProbe" not in self.given
        self.is_ready = self.is_started and "readinessProbe" not in self.given
        for kind in probes.KINDS:
            if self.given.get(kind):
                probes.Probe(self, kind, self.given[kind]).start()
        return process

    def watch(self, process):
        """Until the process has ended. It is asked to when its pod is deleted or its liveness probe failed."""
        deadline = None
        while process.poll() is None:
            if self.pod.is_terminating:
                self.reason = self.reason or "deleted"
            if self.reason and self.reason != "killed" and deadline is None:
                deadline = time.monotonic() + self.pod.grace_seconds
                self.signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                self.reason = "grace period is over"
                self.signal(signal.SIGKILL)
            time.sleep(0.05)
        self.is_ready = self.is_started = False
        self.pid = None
        self.ended.set()
        self.ends.append((self.reason or "ended", process.returncode))

    def signal(self, number):
        if self.pid is not None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def kill(self):
        """As if the machine's memory were short: the process is not asked."""
        self.reason = "killed"
        self.signal(signal.SIGKILL)

    def on_probe(self, kind, is_good):
        if kind == "readinessProbe":
            self.is_ready = is_good
        elif kind == "startupProbe" and is_good:
            self.is_started = True
            self.is_ready = "readinessProbe" not in self.given
            self.changed.set()
        elif not is_good:
            self.reason = self.reason or f"{kind} failed"

    # kubectl exec

    def execute(self, command, timeout=30):
        """Runs a command in the container, as `kubectl exec` does."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        with_rights = ["/usr/bin/setpriv", *self.rights, "--", *command]
        return subprocess.run([*enter, *with_rights], capture_output=True, text=True, timeout=timeout, env=self.environment, check=False)
