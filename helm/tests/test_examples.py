"""helm lint, the schemas of every object that is rendered, and golden renderings of the examples."""

import functools
import json
import os
import re
import unittest

import jsonschema
import kubernetes_validate.utils

import chart

# The oldest that Chart.yaml takes, and the newest that the package knows.
KUBERNETES = ("1.28", kubernetes_validate.latest_version())
# Each call reads two megabytes of schemas anew.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
GOLDEN = chart.TESTS / "golden"
# All switches at once.
EVERYTHING = chart.merged(
    {"engine": "cpu", "model": {"uri": "pvc:///model.gguf", "chatTemplate": "{{ messages }}", "pvc": {"create": True}}},
    {"ingress": {"enabled": True, "hosts": [{"host": "a.example"}]}},
    {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}},
    {"etcd": {"bundled": {"replicas": 3}}, "networkPolicy": {"nodes": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}},
    {"monitoring": {"prometheusAddress": "http://p:9090", "authenticationRef": {"name": "p"}, "authModes": "bearer"}},
    {"monitoring": {name: {"enabled": True} for name in ("podMonitor", "alerts", "dashboard")}},
    {"conductor": {"autoscaling": {"enabled": True}, "settings": {"ttft_slo_ms": 500, "tbt_slo_ms": 50}}},
    *(
        {
            role: {
                **{name: {"enabled": True} for name in ("rdma", "hugepages", "devShm", "shm", "autoscaling")},
                "ssd": {"enabled": True, "volume": {"emptyDir": {}}},
                "hostNetwork": True,
                "groups": {"default": {}, "b": {"replicas": 2}},
            }
        }
        for role in ("prefill", "decode")
    ),
)


@functools.cache
def own_schema(kind):
    path = chart.TESTS / "schemas" / f"{kind}.json"
    return jsonschema.Draft7Validator(json.loads(path.read_text())) if path.exists() else None


def check(one):
    own = own_schema(one["kind"])
    if own:
        own.validate(one)
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(one, version, strict=True)


class Lint(unittest.TestCase):
    def test_chart_is_clean(self):
        for example in [None, *chart.EXAMPLES]:
            said = chart.helm("lint", "--strict", str(chart.CHART), *(["--values", str(example)] if example else []))
            self.assertIn("0 chart(s) failed", said)
            self.assertNotRegex(said, r"\[(WARNING|ERROR)\]")


class Schemas(unittest.TestCase):
    def test_examples_pass_the_schemas_of_their_kinds(self):
        for path in chart.EXAMPLES:
            for one in chart.example(path):
                with self.subTest(example=path.stem, kind=one["kind"], name=one["metadata"]["name"]):
                    check(one)

    def test_everything_at_once_passes(self):
        kinds = set()
        for one in chart.render(EVERYTHING, engine=None):
            kinds.add(one["kind"])
            with self.subTest(kind=one["kind"], name=one["metadata"]["name"]):
                check(one)
        self.assertLessEqual({"PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "Ingress"}, kinds)

    def test_a_wrong_object_is_found(self):
        rendered = chart.render(EVERYTHING, engine=None)
        wrong = chart.of(rendered, "Service", "baton-http")
        wrong["spec"]["portz"] = []
        with self.assertRaises(kubernetes_validate.ValidationError):
            check(wrong)
        for kind, spoil in {
            "PodMonitor": lambda spec: spec.update(podMetricsEndpoint=[]),
            "ScaledObject": lambda spec: spec["triggers"][0].update(metricType="Sum"),
            "HTTPRoute": lambda spec: spec["rules"][0].update(timeouts={"request": "1 hour"}),
            "PrometheusRule": lambda spec: spec["groups"][0]["rules"][0].pop("expr"),
        }.items():
            wrong = next(one for one in rendered if one["kind"] == kind)
            spoil(wrong["spec"])
            with self.subTest(kind=kind), self.assertRaises(jsonschema.ValidationError):
                check(wrong)

    def test_names_are_unique_and_short(self):
        longest = "a-release-with-a-very-long-name-that-goes-on"
        self.assertFalse({one["metadata"]["name"] for one in chart.render(release=longest)} & {one["metadata"]["name"] for one in chart.render(release=longest + "-2")})
        groups = {"groups": {"abcdefghijklmno": {}}}
        rendered = chart.render({"prefill": groups, "decode": groups}, release=longest)
        names = [(one["kind"], one["metadata"]["name"]) for one in rendered]
        self.assertEqual(len(names), len(set(names)))
        for kind, name in names:
            # A StatefulSet's pods have a label of its name and a hash of 10 characters.
            self.assertLessEqual(len(name), 52, (kind, name))


def golden_files(path):
    """Template to text, as `helm template` writes it; the dashboard is a file of the chart."""
    text = chart.helm("template", "baton", str(chart.CHART), "--namespace", "serving", "--values", str(path))
    files = {}
    for document in re.split(r"(?m)^---\n", text)[1:]:
        source = re.match(r"# Source: baton/templates/(\S+)\n", document).group(1)
        if source != "dashboard.yaml":
            files.setdefault(source.replace("/", "-"), []).append(document)
    return {name: "".join(f"---\n{document.rstrip()}\n" for document in documents) for name, documents in files.items()}


class Golden(unittest.TestCase):
    maxDiff = None

    def test_examples_render_as_they_did(self):
        for path in chart.EXAMPLES:
            folder = GOLDEN / path.stem
            now = golden_files(path)
            if os.environ.get("UPDATE"):
                folder.mkdir(parents=True, exist_ok=True)
                for old in folder.glob("*"):
                    old.unlink()
                for name, text in now.items():
                    (folder / name).write_text(text)
            then = {file.name: file.read_text() for file in folder.glob("*")}
            self.assertEqual(sorted(now), sorted(then), f"{path.stem}: UPDATE=1 scripts/test-helm.sh writes them anew")
            for name, text in now.items():
                with self.subTest(example=path.stem, template=name):
                    self.assertEqual(text, then[name], "UPDATE=1 scripts/test-helm.sh writes it anew")
