"""Renders the chart: what the tests share."""

import contextlib
import functools
import http.server
import json
import os
import pathlib
import pickle
import re
import subprocess
import tempfile
import threading

import yaml

HELM = os.environ.get("HELM", "helm")
TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parent.parent
CHART = ROOT / "helm" / "baton"
EXAMPLES = sorted((ROOT / "helm" / "examples").glob("*.yaml"))
# libyaml, if PyYAML has it: ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Refused(Exception):
    """Helm refused the values."""


def load(text):
    return yaml.load(text, Loader=LOADER)


def values():
    return load((CHART / "values.yaml").read_text())


def helm(*arguments):
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return done.stdout


def deep(path, value):
    """{"a": {"b": value}} of a.b."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def merged(*maps):
    result = {}
    for one in maps:
        for key, value in one.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def text(values, release="baton", namespace="serving", chart=CHART, more=()):
    """What `helm template` prints."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values, file)
        file.flush()
        return helm("template", release, str(chart), "--namespace", namespace, "--values", file.name, *more)


@functools.cache
def _pickled(values, *where):
    # Callers may change what they get; to read YAML anew takes longer than this.
    return pickle.dumps([one for one in yaml.load_all(text(json.loads(values), *where), Loader=LOADER) if one])


def render(values=None, release="baton", namespace="serving", engine="mock", chart=CHART, **paths):
    """The objects that the chart makes of these values. `conductor__replicas=1` is conductor.replicas."""
    given = [values or {}, *(deep(path.replace("__", "."), value) for path, value in paths.items())]
    if engine:
        given.insert(0, {"engine": engine})
    return pickle.loads(_pickled(json.dumps(merged(*given)), release, namespace, str(chart)))


@contextlib.contextmanager
def server(there=()):
    """The address of as much of a Kubernetes as Helm asks before it renders: its version, and these workloads."""

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            kinds = [{"name": kind.lower() + "s", "kind": kind, "namespaced": True} for kind in ("Deployment", "StatefulSet")]
            known = {
                "/version": {"major": "1", "minor": "28", "gitVersion": "v1.28.0"},
                "/api": {"kind": "APIVersions", "versions": []},
                "/apis": {"kind": "APIGroupList", "groups": []},
                "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": kinds},
            }
            for one in there:
                where = one["metadata"]
                known[f"/apis/apps/v1/namespaces/{where['namespace']}/{one['kind'].lower()}s/{where['name']}"] = one
            found = known.get(self.path.split("?")[0])
            body = json.dumps(found or {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()


def upgrade(there, values):
    """The objects that the chart makes where these workloads are: `lookup` asks a server that has them."""
    with server(there) as address:
        more = ("--dry-run=server", "--kube-apiserver", address)
        return [one for one in yaml.load_all(text(merged({"engine": "mock"}, values), more=more), Loader=LOADER) if one]


def example(path):
    return render(load(path.read_text()), engine=None)


def of(rendered, kind, name=None):
    """The one object of a kind and name."""
    found = [one for one in rendered if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name}: {[o['metadata']['name'] for o in rendered if o['kind'] == kind]}"
    return found[0]


def has(rendered, kind, name=None):
    return any(one["kind"] == kind and name in (None, one["metadata"]["name"]) for one in rendered)


def workloads(rendered):
    return [one for one in rendered if one["kind"] in ("Deployment", "StatefulSet")]


def roles(rendered):
    """The workloads of Baton's own processes."""
    return [one for one in workloads(rendered) if component(one) in ("conductor", "prefill", "decode")]


def component(one):
    return one["metadata"]["labels"]["app.kubernetes.io/component"]


def pod(workload):
    return workload["spec"]["template"]["spec"]


def container(workload):
    return pod(workload)["containers"][0]


def flags(workload):
    """Flag to value of a container's arguments."""
    return dict(argument.split("=", 1) for argument in container(workload)["args"] if argument.startswith("--"))


def leaves(values, path=""):
    """Path and value of each leaf."""
    for key, value in values.items():
        below = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from leaves(value, below)
        else:
            yield below, value


def at(values, path):
    """The value of a path, if it is there."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def metric_names(text):
    return set(re.findall(r"\bbaton_(?:build_info|(?:process|conductor|node|prefill|decode|transfer)_[a-z0-9_]+)", text))
