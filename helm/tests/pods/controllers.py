"""Deployments and StatefulSets: how many pods there are, and how a rollout replaces them. `step` is called again and
again, and does what can be done now.
"""

import hashlib
import json
import random
import string

from . import spec

WORKLOAD_FIELDS = {"replicas", "selector", "template", "minReadySeconds"}


def revision_of(template):
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


class Workload:
    def __init__(self, cluster, given):
        self.cluster = cluster
        self.name = given["metadata"]["name"]
        self.component = given["metadata"]["labels"].get("app.kubernetes.io/component")
        self.apply(given)

    def apply(self, given):
        self.given = given["spec"]
        spec.only(self.given, WORKLOAD_FIELDS | self.FIELDS, f"{given['kind']} {self.name}")
        self.replicas = self.given["replicas"]
        self.template = self.given["template"]
        self.revision = revision_of(self.template)
        selected = self.given["selector"]["matchLabels"].items()
        assert selected <= self.template["metadata"]["labels"].items(), f"{self.name} does not select its own pods"

    def pods(self):
        """Pods that are there, those that end too."""
        return [pod for pod in self.cluster.pods.values() if pod.owner == self.name]

    def is_available(self, pod):
        return pod.is_ready and not pod.is_terminating and pod.ready_seconds() >= self.given.get("minReadySeconds", 0)

    def is_rolled_out(self):
        """What `kubectl rollout status` waits for."""
        alive = [pod for pod in self.pods() if not pod.is_terminating]
        new = [pod for pod in alive if pod.revision == self.revision]
        return len(new) == len(alive) == self.replicas and all(map(self.is_available, new))


class Deployment(Workload):
    FIELDS = {"strategy", "progressDeadlineSeconds"}

    def step(self):
        alive = [pod for pod in self.pods() if not pod.is_terminating]
        new = [pod for pod in alive if pod.revision == self.revision]
        old = [pod for pod in alive if pod.revision != self.revision]
        strategy = self.given["strategy"]
        if strategy["type"] == "Recreate":
            surge, unavailable = 0, self.replicas
            if old or any(pod.revision != self.revision for pod in self.pods()):
                for pod in old:
                    pod.delete()
                return
        else:
            surge = strategy["rollingUpdate"]["maxSurge"]
            unavailable = strategy["rollingUpdate"]["maxUnavailable"]
        for _ in range(min(self.replicas - len(new), self.replicas + surge - len(alive))):
            suffix = "".join(random.choices(string.ascii_lowercase + string.digits, k=5))
            self.cluster.start(f"{self.name}-{self.revision}-{suffix}", self.template, owner=self.name, revision=self.revision)
        # One that is not ready goes first, and of the others the youngest.
        for pod in sorted(new, key=lambda pod: (pod.is_ready, -pod.created_at))[: max(len(new) - self.replicas, 0)]:
            pod.delete()
        at_least = self.replicas - unavailable
        may_go = len(alive) - at_least - sum(not self.is_available(pod) for pod in new)
        for pod in sorted(old, key=self.is_available):
            available = sum(self.is_available(one) for one in alive if not one.is_terminating)
            if may_go <= 0 or (self.is_available(pod) and available <= at_least):
                break
            pod.delete()
            may_go -= 1


class StatefulSet(Workload):
    FIELDS = {"serviceName", "podManagementPolicy", "updateStrategy", "volumeClaimTemplates"}

    def apply(self, given):
        before = getattr(self, "template", None)
        super().apply(given)
        # What pods below the partition are made from.
        self.current = getattr(self, "current", None) or before or self.template
        if self.given["podManagementPolicy"] != "Parallel":
            raise spec.Unsupported(f"{self.name}: podManagementPolicy")

    def partition(self):
        strategy = self.given.get("updateStrategy", {"type": "RollingUpdate"})
        if strategy["type"] != "RollingUpdate":
            raise spec.Unsupported(f"{self.name}: updateStrategy {strategy['type']}")
        return strategy.get("rollingUpdate", {}).get("partition", 0)

    def step(self):
        pods = {int(pod.name.rsplit("-", 1)[1]): pod for pod in self.pods()}
        for number in range(self.replicas):
            if number not in pods:
                self.create(number)
        for number, pod in pods.items():
            if number >= self.replicas and not pod.is_terminating:
                pod.delete()
        self.roll(pods)

    def create(self, number):
        template = self.template if number >= self.partition() else self.current
        name = f"{self.name}-{number}"
        volumes = []
        for claim in self.given.get("volumeClaimTemplates", []):
            claim_name = f"{claim['metadata']['name']}-{name}"
            self.cluster.claims.setdefault(claim_name, self.cluster.new_folder(claim_name))
            volumes.append({"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": claim_name}})
        service = self.cluster.objects["Service", self.given["serviceName"]]["metadata"]["name"]
        self.cluster.start(
            name, template, owner=self.name, revision=revision_of(template), volumes=volumes, host_names=[f"{name}.{service}"]
        )

    def roll(self, pods):
        """One at a time, from the highest number down; the next follows when all above it are available."""
        numbers = range(self.replicas - 1, self.partition() - 1, -1)
        for number in numbers:
            pod = pods.get(number)
            if pod is None:
                return
            if pod.revision != self.revision and not pod.is_terminating:
                pod.delete()
                return
            if not self.is_available(pod):
                return
        if self.partition() == 0:
            self.current = self.template

    def is_rolled_out(self):
        if self.partition() == 0:
            return super().is_rolled_out()
        # Of a rollout in parts, those above the partition.
        pods = {int(pod.name.rsplit("-", 1)[1]): pod for pod in self.pods()}
        numbers = range(self.partition(), self.replicas)
        return all(n in pods and pods[n].revision == self.revision and self.is_available(pods[n]) for n in numbers)


KINDS = {"Deployment": Deployment, "StatefulSet": StatefulSet}
