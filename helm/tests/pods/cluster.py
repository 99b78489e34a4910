"""A cluster of pods: what kubectl, the controllers' loop and DNS are."""

import base64
import itertools
import threading
import time
import traceback

from . import controllers, sandbox, spec
from .pod import Pod

TICK_SECONDS = 0.1
# How long clients of a Service take to learn of a change: what endpoints and kube-proxy take to spread it.
SPREAD_SECONDS = 2
DOMAIN = "svc.cluster.local"


class Cluster:
    """Give it a folder that is empty, and a network namespace of its own."""

    def __init__(self, folder, registry, namespace):
        self.folder = folder
        self.registry = registry
        self.namespace = namespace
        # (kind, name) to object.
        self.objects = {}
        self.workloads = {}
        self.pods = {}
        # Ends of containers of pods that are gone: (pod, reason, exit status).
        self.past_ends = []
        # Name of a claim to its folder.
        self.claims = {}
        # (time, Service to its pods), the last of which clients do not know yet.
        self.history = []
        self.numbers = itertools.count(2)
        self.lock = threading.RLock()
        self.failure = None
        self.closed = threading.Event()
        # A thread that fails is the cluster's failure: whatever waits for it says why.
        threading.excepthook = lambda what: self.fail("".join(traceback.format_exception(what.exc_type, what.exc_value, what.exc_traceback)))
        for name in ("logs", "root", "pods"):
            (folder / name).mkdir()
        sandbox.make_bridge()
        threading.Thread(target=self.loop, name="controllers", daemon=True).start()

    # What pods ask for

    def new_number(self):
        return next(self.numbers)

    def new_folder(self, name):
        folder = self.folder / "pods" / f"{name}.{next(self.numbers)}"
        folder.mkdir()
        return folder

    def data(self, kind, name):
        """The files of a ConfigMap or Secret."""
        given = self.objects[kind, name]
        encoded = {key: base64.b64decode(value).decode() for key, value in given.get("data", {}).items()} if kind == "Secret" else given["data"]
        return {**encoded, **given.get("stringData", {})}

    def claim(self, name):
        return self.claims[name]

    # kubectl

    def apply(self, rendered):
        """What `helm install`, `upgrade` and `rollback` do with the chart's objects: they become all there is."""
        with self.lock:
            self.objects = {(one["kind"], one["metadata"]["name"]): one for one in rendered}
            for one in rendered:
                if one["metadata"].get("namespace", self.namespace) != self.namespace:
                    raise AssertionError(f"{one['metadata']['name']} is in another namespace")
            given = {one["metadata"]["name"]: one for one in rendered if one["kind"] in controllers.KINDS}
            for name, one in given.items():
                if name in self.workloads:
                    self.workloads[name].apply(one)
                else:
                    self.workloads[name] = controllers.KINDS[one["kind"]](self, one)
            for name in set(self.workloads) - set(given):
                for pod in self.workloads.pop(name).pods():
                    pod.delete()

    def scale(self, name, replicas):
        """kubectl scale"""
        with self.lock:
            self.workloads[name].replicas = replicas

    def start(self, name, template, **more):
        with self.lock:
            assert name not in self.pods, f"{name} is there"
            pod = self.pods[name] = Pod(self, name, template, **more)
            self.write_names()
            pod.start()
            return pod

    def wait(self, what, is_so, seconds):
        """Waits until it is so, and fails if a controller failed meanwhile."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, f"not {what} after {seconds} s: {list(self.pods.values())}"
            time.sleep(TICK_SECONDS)

    def rollout_status(self, name, seconds=90):
        self.wait(f"rolled out: {name}", lambda: self.locked(self.workloads[name].is_rolled_out), seconds)

    def locked(self, call):
        with self.lock:
            return call()

    def pods_of(self, component):
        with self.lock:
            return [pod for pod in self.pods.values() if pod.labels.get("app.kubernetes.io/component") == component]

    def ends(self):
        """(pod, reason, exit status) of each container that has ended."""
        with self.lock:
            return [*self.past_ends, *((pod.name, *end) for pod in self.pods.values() for end in pod.ends())]

    # The loop

    def loop(self):
        while not self.closed.wait(TICK_SECONDS):
            with self.lock:
                self.step()

    def fail(self, failure):
        if not self.closed.is_set():
            self.failure = self.failure or failure

    def step(self):
        for pod in list(self.pods.values()):
            if pod.is_gone:
                self.past_ends += [(pod.name, *end) for end in pod.ends()]
                spec.remove(pod.folder)
                del self.pods[pod.name]
            elif not pod.is_ready:
                pod.ready_since = None
            elif pod.ready_since is None:
                pod.ready_since = time.monotonic()
        for workload in self.workloads.values():
            workload.step()
        self.remember_endpoints()
        self.write_names()

    # Names

    def selected(self, service):
        """The pods behind a Service."""
        selector = service["spec"]["selector"].items()
        is_for_all = service["spec"].get("publishNotReadyAddresses", False)
        return [
            pod
            for pod in self.pods.values()
            if selector <= pod.labels.items() and not pod.is_gone and (is_for_all or (pod.is_ready and not pod.is_terminating))
        ]

    def endpoints(self, name, port):
        """Address and port of each pod behind a port of a Service, as its clients know them."""
        with self.lock:
            service = self.objects["Service", name]
            target = next(one["targetPort"] for one in service["spec"]["ports"] if one["name"] == port)
            known = [selected for since, selected in self.history if since <= time.monotonic() - SPREAD_SECONDS]
            return [(pod.address, pod.container().port(target)) for pod in (known[-1].get(name, []) if known else [])]

    def remember_endpoints(self):
        selected = {name: self.selected(one) for (kind, name), one in self.objects.items() if kind == "Service"}
        if not self.history or selected != self.history[-1][1]:
            self.history.append((time.monotonic(), selected))

    def write_names(self):
        """What DNS would say, to /etc/hosts of each pod. A name with several lines has several addresses."""
        lines = []
        for (kind, name), one in self.objects.items():
            if kind == "Service":
                names = [f"{name}.{self.namespace}.{ending}" for ending in (DOMAIN, "svc")]
                names += [f"{name}.{self.namespace}", name]
                for pod in self.selected(one):
                    lines.append(f"{pod.address} {' '.join(names)}")
                    for own in pod.host_names:
                        if own.endswith(f".{name}"):
                            lines.append(f"{pod.address} {' '.join(f'{own}.{self.namespace}.{ending}' for ending in (DOMAIN, 'svc'))}")
        for pod in self.pods.values():
            text = "\n".join(["127.0.0.1 localhost", f"{pod.address} {pod.name}", *lines, ""])
            file = pod.names / "hosts"
            if not (file.exists() and file.read_text() == text):
                new = pod.names / ".hosts"
                new.write_text(text)
                new.rename(file)

    def close(self):
        """Ends all pods at once."""
        self.closed.set()
        with self.lock:
            for pod in self.pods.values():
                pod.delete()
                for one in [*pod.init, *pod.containers]:
                    one.kill()
            for pod in self.pods.values():
                pod.join(10)

    def last_words(self, lines=15):
        """The ends of all logs."""
        found = []
        for log in sorted((self.folder / "logs").iterdir()):
            found += [f"== {log.name}", *log.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(found)
