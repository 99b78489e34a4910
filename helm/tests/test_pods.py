"""The chart's pods run and serve: started from what is rendered, probed, asked, scaled, rolled, killed.

Needs root, and network, mount and PID namespaces of its own, which end with all that is in them: scripts/test-helm.sh.
"""

import atexit
import functools
import hashlib
import http.server
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import chart
from pods import cluster, images, load, monitoring, sandbox

NAMESPACE = "serving"
TOKEN = "a token of a registry of models"
MODEL = pathlib.Path(os.environ["BATON_MODEL"])
BINARIES = pathlib.Path(os.environ["BATON_BIN"])
# Binaries of the version before, if there are any: then the upgrade is one.
BEFORE = pathlib.Path(os.environ.get("BATON_PREVIOUS_BIN") or BINARIES)
# Folder of prometheus and promtool, if they are there.
PROMETHEUS = pathlib.Path(os.environ["PROMETHEUS"]).parent if os.environ.get("PROMETHEUS") else None
ROLES = ("conductor", "prefill", "decode")
OLD, NEW = "0.1.0", "0.2.0"
SHORTER = {"settings": {"threads": 1, "cache_bytes": 268435456}, "minReadySeconds": 5}
# What cpu.yaml leaves out: whose the image and the model are. One thread for each node, as four share a machine here;
# five seconds of readiness instead of fifteen, as the tests roll eight nodes.
VALUES = chart.merged(
    chart.load((chart.ROOT / "helm/examples/cpu.yaml").read_text()),
    {
        "image": {"tag": OLD},
        "model": {"uri": f"pvc://models/{MODEL.name}", "sha256": hashlib.file_digest(MODEL.open("rb"), "sha256").hexdigest()},
        "prefill": SHORTER,
        "decode": SHORTER,
        "monitoring": {"podMonitor": {"interval": "2s"}},
    },
)
# The next version comes with another way to the model, which an init container fetches, and with gRPC's own probe.
UPGRADE = {
    "image": {"tag": NEW},
    "model": {"uri": f"hf://example/{MODEL.stem}@main/{MODEL.name}", "fetch": {"hfEndpoint": f"http://{sandbox.GATEWAY}:8000"}},
    "conductor": {"readinessProbe": {"grpc": {"port": 7070}}},
}
SECRET = {
    "kind": "Secret",
    "metadata": {"name": "hf-token", "namespace": NAMESPACE},
    "stringData": {"token": TOKEN},
}


def say(text):
    print(f"test-helm: pods: {text}", file=sys.stderr, flush=True)


class Models(http.server.SimpleHTTPRequestHandler):
    """Where hf:// models are, for those who have the token."""

    fetched = 0

    def do_GET(self):
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.send_error(401)
        if self.path != f"/example/{MODEL.stem}/resolve/main/{MODEL.name}":
            return self.send_error(404)
        Models.fetched += 1
        self.send_response(200)
        self.send_header("content-length", str(MODEL.stat().st_size))
        self.end_headers()
        with MODEL.open("rb") as file:
            shutil.copyfileobj(file, self.wfile)

    def log_message(self, *_):
        pass


def rendered(*values):
    """What Helm makes of the values, without the hook, and the secret that its user made."""
    objects = chart.render(chart.merged(VALUES, *values), engine=None, namespace=NAMESPACE)
    return [*(one for one in objects if not one["metadata"].get("annotations", {}).get("helm.sh/hook")), SECRET]


@functools.cache
def smoke(tag):
    """What `helm test` starts."""
    return chart.of(chart.render(VALUES, image__tag=tag, engine=None, namespace=NAMESPACE), "Pod", "baton-test")


def queries():
    """Name and expression of each query that the chart makes, as Grafana, Prometheus and KEDA ask it."""
    scaling = {"autoscaling": {"enabled": True}}
    more = {"prefill": {"rdma": {"enabled": True}, **scaling}, "decode": scaling, "conductor": scaling}
    objects = rendered({"monitoring": {"prometheusAddress": "http://prometheus"}}, more)
    dashboard = json.loads(chart.of(objects, "ConfigMap", "baton-dashboard")["data"]["baton.json"])
    variables = {"$namespace": NAMESPACE, "$cluster": "baton", "$__rate_interval": "5m"}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            yield f"panel {panel['title']} {target['refId']}", expression
    for rule in chart.of(objects, "PrometheusRule")["spec"]["groups"][0]["rules"]:
        absent = re.fullmatch(r"absent\((.*)\)", rule["expr"])
        yield f"alert {rule['alert']}", absent[1] if absent else re.sub(r"\s*(==|>)\s*[\d.]+\s*$", "", rule["expr"])
    for one in objects:
        if one["kind"] == "ScaledObject":
            for trigger in one["spec"]["triggers"]:
                yield f"trigger {one['metadata']['name']} {trigger['metadata']['threshold']}", trigger["metadata"]["query"]


class Pods(unittest.TestCase):
    # Containers that were killed on purpose.
    killed = 0

    @classmethod
    def setUpClass(cls):
        assert os.getpid() == 1, "not in namespaces of its own: scripts/test-helm.sh"
        cls.began = time.monotonic()
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="bpod-"))
        sandbox.run("mount", "-t", "tmpfs", "-o", "mode=755", "none", str(cls.folder))
        atexit.register(cls.remove)
        # Process 1 of a namespace passes over signals that it has no handler for.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        dockerfile = (chart.ROOT / "Dockerfile").read_text()
        registry = images.Registry(
            {
                f"{VALUES['image']['repository']}:{OLD}": images.of_dockerfile(dockerfile, BEFORE),
                f"{VALUES['image']['repository']}:{NEW}": images.of_dockerfile(dockerfile, BINARIES),
                "quay.io/coreos/etcd": images.holding(cls.folder / "etcd", "etcd"),
                "docker.io/curlimages/curl": images.holding(cls.folder / "curl", "curl"),
            }
        )
        cls.cluster = cluster.Cluster(cls.folder, registry, NAMESPACE)
        cls.addClassCleanup(cls.cluster.close)
        models = cls.cluster.claims["models"] = cls.cluster.new_folder("models")
        shutil.copyfile(MODEL, models / MODEL.name)
        server = http.server.ThreadingHTTPServer((sandbox.GATEWAY, 8000), Models)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            cls.cluster.apply(rendered())
            for role in ("etcd", *ROLES):
                cls.cluster.rollout_status(f"baton-{role}", 60)
        except AssertionError:
            print(cls.cluster.last_words(), file=sys.stderr)
            raise
        say(f"{len(cls.cluster.pods)} pods are ready after {time.monotonic() - cls.began:.1f} s")
        cls.prometheus = monitoring.Prometheus(cls.cluster, PROMETHEUS, rendered()) if PROMETHEUS else None
        if PROMETHEUS:
            cls.addClassCleanup(cls.prometheus.close)
        cls.cluster.wait("known to clients", lambda: len(cls.endpoints()) == 2, 10)
        # In peace, of one conductor: what each answer must be, whatever happens.
        cls.answers = [load.ask(cls.endpoints()[0], body) for body in load.bodies()]

    @classmethod
    def remove(cls):
        sandbox.run("umount", "--lazy", str(cls.folder))
        cls.folder.rmdir()

    @classmethod
    def endpoints(cls):
        return cls.cluster.endpoints("baton-http", "http")

    def run(self, result=None):
        before = len(result.failures) + len(result.errors) if result else 0
        super().run(result)
        if result and len(result.failures) + len(result.errors) > before:
            print(self.cluster.last_words(), file=sys.stderr)

    # What the stories are told with

    def load(self, **options):
        return load.Load(self.endpoints, self.answers, **options)

    def check_load(self, what, clients):
        say(f"{what}: {clients}")
        self.assertEqual(clients.failures, [])
        self.assertGreater(clients.done, 0)

    def execute(self, component, *command):
        """kubectl exec"""
        pod = next(pod for pod in self.cluster.pods_of(component) if pod.is_ready and not pod.is_terminating)
        done = pod.container().execute(command)
        self.assertEqual(done.returncode, 0, f"{pod}: {command}: {done.stdout}{done.stderr}")
        return done.stdout

    def metric(self, pod, name):
        port = pod.container().port("http" if "conductor" not in pod.name else "operators")
        text = subprocess.run(["curl", "-sS", f"http://{pod.address}:{port}/metrics"], capture_output=True, text=True, check=True).stdout
        return sum(float(value) for value in re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", text))

    def is_streaming(self, pod):
        before = self.metric(pod, "baton_decode_tokens_total")
        time.sleep(0.2)
        return self.metric(pod, "baton_decode_tokens_total") > before

    def helm_test(self, tag):
        given = smoke(tag)
        pod = self.cluster.start(given["metadata"]["name"], given)
        self.cluster.wait("tested", lambda: all(one.is_over for one in pod.containers), 60)
        ends = pod.ends()
        pod.delete()
        self.cluster.wait("gone", lambda: pod.name not in self.cluster.pods, 5)
        self.assertEqual(ends, [("ended", 0)])

    def rollout(self, objects, roles=ROLES):
        """`helm upgrade`, and `kubectl rollout status` of each role, as docs/deploy/kubernetes.md has it."""
        self.cluster.apply(objects)
        for role in roles:
            self.cluster.rollout_status(f"baton-{role}", 120)

    def tags(self, role):
        """Pod to the tag of its image, of those that stay."""
        return {pod.name: pod.container().given["image"].rsplit(":")[1] for pod in self.cluster.pods_of(role) if not pod.is_terminating}

    def check_rolled(self, tag):
        self.assertEqual({one for role in ROLES for one in self.tags(role).values()}, {tag})
        self.cluster.wait("gone", lambda: not any(pod.is_terminating for pod in self.cluster.pods.values()), 60)
        self.check_ends()

    def check_ends(self):
        """No container ended but those that were asked to, in time and well, and those that were killed."""
        ends = self.cluster.ends()
        others = [end for end in ends if end[1:] != ("deleted", 0) and end[1] != "killed" and end[0] != "baton-test"]
        self.assertEqual(others, [])
        self.assertEqual(sum(end[1] == "killed" for end in ends), self.killed)

    # Stories, in the order of their names

    def test_1_pods_are_as_rendered(self):
        for pod in self.cluster.pods.values():
            status = pathlib.Path(f"/proc/{pod.container().pid}/status").read_text()
            self.assertRegex(status, r"(?m)^Uid:\t10001\t10001\t10001\t10001$", pod)
            self.assertRegex(status, r"(?m)^CapBnd:\t0{16}$", pod)
            self.assertRegex(status, r"(?m)^NoNewPrivs:\t1$", pod)
            self.assertRegex(status, r"(?m)^NSpid:.*\t1$", pod)
            touch = pod.container().execute(["touch", "/etc/x", "/x", "/usr/local/bin/x", "/model/x"])
            self.assertEqual(touch.stderr.count("Read-only file system") + touch.stderr.count("No such file"), 4, touch.stderr)
        conductors = self.cluster.pods_of("conductor")
        found = self.execute("prefill", "getent", "ahosts", "baton-conductors.serving.svc")
        self.assertEqual({line.split()[0] for line in found.splitlines()}, {pod.address for pod in conductors})
        self.assertIn("SmolLM2", self.execute("decode", "ls", "/model"))

    def test_2_it_serves(self):
        self.helm_test(OLD)
        nodes = json.loads(self.execute("conductor", "baton", "nodes", "--json"))
        self.assertEqual(len(nodes), 4, nodes)

    def test_3_decode_scales_down_and_up_under_load(self):
        fewer = rendered({"decode": {"replicas": 1}})
        # More than one node serves best: prompts that are asked again go to where they are cached.
        with self.load(clients=12) as clients:
            first, second = (self.cluster.pods[f"baton-decode-{number}"] for number in range(2))
            self.cluster.wait("streams at the second", lambda: self.is_streaming(second), 30)
            self.cluster.apply(fewer)
            self.cluster.wait("one decode pod", lambda: self.cluster.pods_of("decode") == [first], 60)
            # Its streams went on at the other one.
            self.assertGreater(self.metric(first, "baton_decode_sequences_migrated_total"), 0)
            done = clients.done
            self.cluster.wait("served by one", lambda: clients.done > done + 2, 60)
            self.cluster.scale("baton-decode", 2)
            self.cluster.rollout_status("baton-decode")
            self.cluster.wait("steps of the new one", lambda: self.metric(self.cluster.pods["baton-decode-1"], "baton_node_steps_total") > 0, 30)
        self.check_load("decode 2, 1, 2", clients)
        self.check_ends()

    def test_4_an_upgrade_fails_no_request(self):
        etcd = set(self.cluster.pods_of("etcd"))
        with self.load() as clients:
            # One decode pod first; then all.
            self.rollout(rendered(UPGRADE, {"decode": {"updateStrategy": {"rollingUpdate": {"partition": 1}}}}))
            self.assertEqual(self.tags("decode"), {"baton-decode-0": OLD, "baton-decode-1": NEW})
            self.rollout(rendered(UPGRADE))
            self.helm_test(NEW)
        self.check_load("upgrade", clients)
        self.check_rolled(NEW)
        self.assertEqual(Models.fetched, 6)
        self.assertEqual(etcd, set(self.cluster.pods_of("etcd")), "nothing of etcd changes with Baton's version")

    def test_5_it_survives_the_kill_of_each_pod(self):
        names = sorted(self.cluster.pods)
        with self.load(asks_again=True) as clients:
            for name in names:
                pod = self.cluster.pods[name]
                before = len(pod.ends())
                done = clients.done
                pod.container().kill()
                self.cluster.wait(f"started again: {name}", lambda: len(pod.ends()) > before and pod.is_ready, 60)
                self.cluster.wait("all ready", lambda: all(one.is_ready for one in self.cluster.pods.values()), 60)
                self.cluster.wait("serving", lambda: clients.done > done, 60)
        type(self).killed = len(names)
        self.check_load(f"each of {len(names)} pods killed", clients)
        self.helm_test(NEW)
        self.check_ends()

    def test_6_queries_return_data(self):
        """Every panel, every alert without its comparison, and every trigger of autoscaling."""
        if not PROMETHEUS:
            self.skipTest("no prometheus: PROMETHEUS")
        # No node has these prompts, so KV moves.
        for number in range(8):
            words = f"Tell me about the number {number}. " + "It is a long story, and I like stories. " * 24
            load.ask(self.endpoints()[0], {"messages": [{"role": "user", "content": words}], "max_tokens": 8, "stream": True})
        self.cluster.wait("KV transfers", lambda: self.prometheus.query("baton_transfer_peer_bandwidth_bytes_per_second"), 30)
        targets = self.prometheus.get("targets", state="active")["activeTargets"]
        seen = {(one["labels"]["pod"], one["labels"]["baton_role"], one["health"]) for one in targets}
        self.assertEqual(seen, {(pod.name, role, "up") for role in ROLES for pod in self.cluster.pods_of(role)})
        asked = dict(queries())
        answers = {where: [value for _, value in self.prometheus.query(expression) if not math.isnan(value)] for where, expression in asked.items()}
        empty = {where: asked[where] for where, values in answers.items() if not values}
        self.assertFalse(empty, "\n".join(f"{where}: {expression}" for where, expression in empty.items()))
        rules = [rule for group in self.prometheus.get("rules")["groups"] for rule in group["rules"]]
        self.assertEqual([rule for rule in rules if rule["health"] != "ok"], [])
        say(f"{len(targets)} targets are scraped; {len(asked)} queries, {sum(map(bool, answers.values()))} with data")

    def test_7_a_rollback_fails_no_request(self):
        with self.load() as clients:
            self.rollout(rendered())
            self.helm_test(OLD)
        self.check_load("rollback", clients)
        self.check_rolled(OLD)

    @classmethod
    def tearDownClass(cls):
        say(f"{time.monotonic() - cls.began:.0f} s in all")


if __name__ == "__main__":
    unittest.main(failfast=True)
