"""A pod: a sandbox, volumes, and containers that run until it is deleted."""

import threading
import time

from . import containers, sandbox, spec


class Pod(threading.Thread):
    def __init__(self, cluster, name, template, owner=None, revision=None, volumes=(), host_names=()):
        super().__init__(name=name, daemon=True)
        self.cluster = cluster
        self.name = name
        self.namespace = cluster.namespace
        self.labels = template["metadata"].get("labels", {})
        self.spec = template["spec"]
        self.owner = owner
        self.revision = revision
        # With those of a StatefulSet's claims.
        self.volumes = [*self.spec.get("volumes", []), *volumes]
        # Its own names in DNS, of a StatefulSet's Service.
        self.host_names = list(host_names)
        spec.check(self.spec)
        self.grace_seconds = self.spec.get("terminationGracePeriodSeconds", 30)
        self.folder = cluster.new_folder(name)
        # Mounted in each container: has the file /etc/hosts.
        self.names = self.folder / "names"
        self.names.mkdir()
        self.sandbox = sandbox.Sandbox(name, cluster.new_number())
        self.address = self.sandbox.address
        self.containers = [containers.Container(self, one) for one in self.spec["containers"]]
        self.init = [containers.Container(self, one) for one in self.spec.get("initContainers", [])]
        self.deleted = threading.Event()
        self.is_gone = False
        self.created_at = time.monotonic()
        self.ready_since = None

    @property
    def is_terminating(self):
        return self.deleted.is_set()

    @property
    def is_ready(self):
        return not self.is_gone and all(one.is_ready for one in self.containers)

    def ready_seconds(self):
        """For how long it has been ready, as the cluster's loop saw it."""
        return 0 if self.ready_since is None else time.monotonic() - self.ready_since

    def run(self):
        try:
            for one in self.init:
                one.run_to_end()
            for one in self.containers:
                one.start()
            for one in self.containers:
                one.join()
        finally:
            # A pod whose containers are not started again stays, as one that is completed.
            self.deleted.wait()
            self.sandbox.remove()
            self.is_gone = True

    def delete(self):
        self.deleted.set()

    def container(self):
        return self.containers[0]

    def ends(self):
        return [end for one in self.containers for end in one.ends]

    def __repr__(self):
        state = "terminating" if self.is_terminating else "ready" if self.is_ready else "not ready"
        return f"{self.name} {self.address} {state} {self.ends()}"
