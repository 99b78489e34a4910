"""A Prometheus that finds pods as PodMonitors say. What the Prometheus operator makes of a PodMonitor is made here: a
job whose relabelling keeps what is selected, and names it. What discovery finds in Kubernetes is written into a file.
"""

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import yaml

from . import sandbox, spec

PORT = 9091
RELABELING = {
    "sourceLabels": "source_labels",
    "targetLabel": "target_label",
    "replacement": "replacement",
    "action": "action",
    "regex": "regex",
    "separator": "separator",
    "modulus": "modulus",
}


def label_name(text):
    return re.sub(r"[^a-zA-Z0-9_]", "_", text)


def discovered(pods):
    """Each port of each pod, with the labels of Kubernetes' discovery (`role: pod`)."""
    return [
        {
            "targets": [f"{pod.address}:{port['containerPort']}"],
            "labels": {
                "__meta_kubernetes_namespace": pod.namespace,
                "__meta_kubernetes_pod_name": pod.name,
                "__meta_kubernetes_pod_container_name": container.given["name"],
                "__meta_kubernetes_pod_container_port_name": port["name"],
                **{f"__meta_kubernetes_pod_label_{label_name(key)}": value for key, value in pod.labels.items()},
            },
        }
        for pod in pods
        for container in pod.containers
        for port in container.given.get("ports", [])
    ]


def keep(label, values):
    return {"source_labels": [label], "regex": "|".join(map(re.escape, values)), "action": "keep"}


def job(monitor, number, targets):
    """One endpoint of a PodMonitor."""
    name, namespace, given = monitor["metadata"]["name"], monitor["metadata"]["namespace"], monitor["spec"]
    spec.only(given, {"selector", "podMetricsEndpoints"}, f"PodMonitor {name}")
    endpoint = given["podMetricsEndpoints"][number]
    spec.only(endpoint, {"port", "path", "interval", "relabelings"}, f"PodMonitor {name}")
    selected = {key: [value] for key, value in given["selector"]["matchLabels"].items()}
    for one in given["selector"].get("matchExpressions", []):
        if one["operator"] != "In":
            raise spec.Unsupported(f"PodMonitor {name}: {one['operator']}")
        selected[one["key"]] = one["values"]
    relabel = [keep("__meta_kubernetes_namespace", [namespace])]
    relabel += [keep(f"__meta_kubernetes_pod_label_{label_name(key)}", values) for key, values in selected.items()]
    relabel.append(keep("__meta_kubernetes_pod_container_port_name", [endpoint["port"]]))
    for label in ("namespace", "pod_container_name", "pod_name"):
        relabel.append({"source_labels": [f"__meta_kubernetes_{label}"], "target_label": label.removesuffix("_name").removeprefix("pod_")})
    relabel.append({"target_label": "job", "replacement": f"{namespace}/{name}"})
    relabel.append({"target_label": "endpoint", "replacement": endpoint["port"]})
    relabel += [{RELABELING[key]: value for key, value in one.items()} for one in endpoint.get("relabelings", [])]
    return {
        "job_name": f"podMonitor/{namespace}/{name}/{number}",
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": endpoint["interval"],
        "metrics_path": endpoint["path"],
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
        "relabel_configs": relabel,
    }


class Prometheus:
    def __init__(self, cluster, programs, objects):
        self.cluster = cluster
        self.folder = cluster.folder / "prometheus"
        self.folder.mkdir()
        self.targets = self.folder / "targets.json"
        monitors = [one for one in objects if one["kind"] == "PodMonitor"]
        rules = [one for one in objects if one["kind"] == "PrometheusRule"]
        jobs = [job(one, number, self.targets) for one in monitors for number in range(len(one["spec"]["podMetricsEndpoints"]))]
        config = {"global": {"evaluation_interval": "2s"}, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
        (self.folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [group for one in rules for group in one["spec"]["groups"]]}))
        (self.folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.discover()
        checked = subprocess.run([programs / "promtool", "check", "config", "prometheus.yaml"], cwd=self.folder, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        with (cluster.folder / "logs/prometheus").open("ab") as log:
            self.process = subprocess.Popen(
                [programs / "prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address={sandbox.GATEWAY}:{PORT}"],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        self.is_over = threading.Event()
        threading.Thread(target=self.keep_discovering, daemon=True).start()

    def discover(self):
        new = self.folder / "targets.new"
        with self.cluster.lock:
            new.write_text(json.dumps(discovered(self.cluster.pods.values())))
        new.rename(self.targets)

    def keep_discovering(self):
        while not self.is_over.wait(1):
            self.discover()

    def get(self, path, **parameters):
        with urllib.request.urlopen(f"http://{sandbox.GATEWAY}:{PORT}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        """The series of an expression, now, as (labels, value)."""
        return [(one["metric"], float(one["value"][1])) for one in self.get("query", query=expression, time=time.time())["result"]]

    def close(self):
        self.is_over.set()
        self.process.kill()
        self.process.wait()
