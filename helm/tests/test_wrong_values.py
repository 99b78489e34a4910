"""Wrong values are refused, each by its path."""

import concurrent.futures
import json
import unittest

import chart


def refusals(all_values):
    """What helm says of each of several values; nothing if it takes them."""

    def refusal(values):
        try:
            chart.render(values)
        except chart.Refused as refused:
            return str(refused)
        return ""

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(refusal, all_values))


# Path and value. The path is what helm names.
WRONG_BY_SCHEMA = [
    ("replicas", 3, "(root): Additional property replicas"),
    ("nameOverride", "Not A Name"),
    ("fullnameOverride", "a-name-that-is-longer-than-28-characters"),
    ("commonLabels.team", 7),
    ("commonLabels", {"app.kubernetes.io/component": "x"}, "commonLabels: Property name of"),
    ("image.repository", ""),
    ("image.digest", "sha256:abc"),
    ("image.pullPolicy", "Sometimes"),
    ("engine", "gpu"),
    ("model.uri", "s3://bucket/model"),
    ("model.uri", "pvc://"),
    ("model.sha256", "no-sum"),
    ("model.files", [{"path": "../../etc/passwd"}], "model.files.0.path"),
    ("model.pvc.size", "a lot"),
    ("model.pvc.accessModes", ["ReadSometimes"], "model.pvc.accessModes.0"),
    ("model.token", "hf_secret", "model: Additional property token"),
    ("settings.block_tokens", 0),
    ("settings.kv_dtype", "fp8"),
    ("settings.log_format", "xml"),
    ("listenHost", "10.0.0.1"),
    ("conductor.replicas", 0),
    ("conductor.replica", 2, "conductor: Additional property replica"),
    ("conductor.settings.placement", "random"),
    ("conductor.settings.ttft_slo_ms", "fast"),
    ("conductor.settings.not_ready_s", -1),
    ("conductor.settings.grpc", "0.0.0.0:1", "conductor.settings: Additional property grpc"),
    ("conductor.ports.http", 70000),
    ("conductor.pdb.maxUnavailable", "half"),
    ("conductor.terminationGracePeriodSeconds", "long"),
    ("conductor.resources.requests.memory", "lots"),
    ("prefill.replicas", -1),
    ("prefill.hostNetwork", "yes"),
    ("prefill.settings.transport", "infiniband"),
    ("prefill.settings.kv_dtype", "f16", "prefill.settings: Additional property kv_dtype"),
    ("prefill.rdma.resource", "infiniband"),
    ("prefill.groups.Zone_A", {}, "prefill.groups"),
    ("prefill.groups.a.replicas", "two"),
    ("prefill.groups.a.groups", {}, "prefill.groups.a"),
    ("decode.hugepages.size", "4Ki"),
    ("decode.shm.hostPath", "run/baton"),
    ("decode.shm.hostPath", "/run/a,b"),
    ("decode.settings.cache_bytes", 1e20),
    ("decode.pdb.unhealthyPodEvictionPolicy", "Never"),
    ("model.fetch.image", "docker.io/curlimages/curl:8.11.1"),
    ("decode.autoscaling.quantile", 95),
    ("decode.autoscaling.scaleDown.periodSeconds", 0),
    ("decode.extraEnv", [{"value": "x"}], "decode.extraEnv.0"),
    ("services.http.type", "ExternalName"),
    ("ingress.hosts", [{"path": "/"}], "ingress.hosts.0"),
    ("httpRoute.requestTimeout", "an hour"),
    ("networkPolicy.clients", [{"cidr": "10.0.0.0/8"}], "networkPolicy.clients.0"),
    ("networkPolicy.nodes", [{"ipBlock": {}}], "networkPolicy.nodes.0.ipBlock"),
    ("etcd.mode", "embedded"),
    ("etcd.bundled.replicas", 2),
    ("etcd.external.endpoints", ["https://etcd:2379"], "etcd.external.endpoints.0"),
    ("monitoring.prometheusAddress", "prometheus:9090"),
    ("monitoring.podMonitor.interval", "often"),
    ("extraObjects", "kind: Secret"),
]

# Values that do not fit each other: values, the path that is named, and the other one if that is named, too.
WRONG_TOGETHER = [
    ({"engine": "cpu"}, "model.uri"),
    ({"engine": "cpu", "model": {"uri": "hf://org/repo"}}, "model.files"),
    ({"engine": "cpu", "model": {"uri": "pvc:///m.gguf"}}, "model.pvc.claim"),
    ({"model": {"pvc": {"create": True, "claim": "x"}}}, "model.pvc.claim"),
    ({"etcd": {"mode": "none"}}, "etcd.mode"),
    ({"etcd": {"mode": "external"}}, "etcd.external.endpoints"),
    ({"etcd": {"external": {"user": "root"}}}, "etcd.external.passwordSecret.name", "etcd.external.user"),
    ({"etcd": {"external": {"passwordSecret": {"name": "s"}}}}, "etcd.external.user", "etcd.external.passwordSecret.name"),
    ({"etcd": {"external": {"tls": {"enabled": True}}}}, "etcd.external.tls.secret", "etcd.external.tls.enabled"),
    ({"etcd": {"external": {"tls": {"secret": "s"}}}}, "etcd.external.tls.enabled", "etcd.external.tls.secret"),
    ({"etcd": {"bundled": {"replicas": 3, "persistence": {"enabled": False}}}}, "etcd.bundled.persistence.enabled"),
    ({"ingress": {"enabled": True}}, "ingress.hosts"),
    ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
    (
        {"services": {"http": {"enabled": False}}, "ingress": {"enabled": True, "hosts": [{"host": "a"}]}},
        "services.http.enabled",
    ),
    ({"prefill": {"autoscaling": {"enabled": True}}}, "monitoring.prometheusAddress"),
    (
        {
            "monitoring": {"prometheusAddress": "http://p"},
            "decode": {"autoscaling": {"enabled": True, "minReplicas": 9}},
        },
        "decode.autoscaling.minReplicas",
    ),
    ({"prefill": {"hostNetwork": True}}, "networkPolicy.nodes"),
    ({"decode": {"groups": {"a": {"ssd": {"enabled": True}}}}}, "decode.groups.a.ssd.volume"),
    ({"decode": {"settings": {"transport": "rdma"}}}, "decode.rdma.enabled"),
    ({"decode": {"settings": {"cache_bytes": (3 << 30) + 1}}}, "decode.settings.cache_bytes"),
    (
        {"prefill": {"groups": {"a": {"settings": {"cache_bytes": 1}, "resources": {"limits": {"memory": "1Gi"}}}}}},
        "prefill.groups.a.settings.cache_bytes",
    ),
    ({"conductor": {"terminationGracePeriodSeconds": 130}}, "conductor.terminationGracePeriodSeconds"),
    ({"decode": {"terminationGracePeriodSeconds": 60}}, "decode.terminationGracePeriodSeconds"),
    ({"decode": {"groups": {"a": {"terminationGracePeriodSeconds": 60}}}}, "decode.groups.a.terminationGracePeriodSeconds"),
    ({"conductor": {"extraArgs": ["--not-ready-s", "5"]}}, "conductor.extraArgs"),
    ({"prefill": {"groups": {"a": {"extraArgs": ["--grace-s=5"]}}}}, "prefill.groups.a.extraArgs"),
    ({"decode": {"extraEnv": [{"name": "BATON_GRACE_S", "value": "5"}]}}, "decode.extraEnv"),
    ({"conductor": {"ports": {"http": 7070}}}, "conductor.ports"),
    ({"prefill": {"groups": {"a": {"ports": {"http": 7200}}}}}, "prefill.groups.a.ports"),
    (
        {role: {"serviceAccount": {"name": "one", "annotations": {"of": role}}} for role in ("conductor", "decode")},
        "decode.serviceAccount.annotations",
    ),
    (
        {"prefill": {"groups": {"a": {}, "b": {"serviceAccount": {"annotations": {"of": "b"}}}}}},
        "prefill.groups.b.serviceAccount.annotations",
    ),
]


class WrongValues(unittest.TestCase):
    def test_schema_refuses_each_by_its_path(self):
        self.assertGreaterEqual(len(WRONG_BY_SCHEMA), 30)
        all_said = refusals(chart.deep(path, value) for path, value, *_ in WRONG_BY_SCHEMA)
        for (path, value, *wanted), said in zip(WRONG_BY_SCHEMA, all_said, strict=True):
            with self.subTest(path=path, value=value):
                self.assertIn("don't meet the specifications of the schema", said)
                self.assertIn(f"- {wanted[0] if wanted else path + ':'}", said)

    def test_values_that_do_not_fit_each_other_are_refused_by_path(self):
        all_said = refusals(values for values, *_ in WRONG_TOGETHER)
        for (_, path, *other), said in zip(WRONG_TOGETHER, all_said, strict=True):
            with self.subTest(path=path):
                self.assertIn(f"{path}: ", said)
                for name in other:
                    self.assertIn(f", but {name} is", said)
                self.assertNotIn("specifications of the schema", said)

    def test_the_number_of_etcds_members_cannot_change(self):
        def values(replicas):
            return {"etcd": {"bundled": {"replicas": replicas}}}

        for before, after in ((1, 3), (5, 3)):
            there = chart.render(values(before))
            with self.assertRaisesRegex(chart.Refused, f"etcd.bundled.replicas: {after} asked for, but {before} are there, and .* back etcd up"):
                chart.upgrade(there, values(after))
            self.assertTrue(chart.has(chart.upgrade(there, values(before)), "StatefulSet", "baton-etcd"))
            # Of another release.
            self.assertTrue(chart.upgrade(there, chart.merged(values(after), {"fullnameOverride": "b"})))

    def test_releases_whose_names_services_cannot_have_are_refused(self):
        for release in ("123", "1-baton", "a.b"):
            with self.assertRaisesRegex(chart.Refused, "fullnameOverride: not set, but"):
                chart.render(release=release)
            rendered = chart.render(release=release, fullnameOverride="llm")
            self.assertEqual(chart.of(rendered, "Deployment")["metadata"]["labels"]["app.kubernetes.io/instance"], release)

    def test_every_value_is_in_the_schema_and_reverse(self):
        schema = json.loads((chart.CHART / "values.schema.json").read_text())

        def follow(node):
            while "$ref" in node or "allOf" in node:
                node = node["allOf"][0] if "allOf" in node else schema["definitions"][node["$ref"].split("/")[-1]]
            return node

        # Left out of values.yaml on purpose: optional keys, listed in its comments or in the binaries' own help.
        optional = {"global", "resources.", "authenticationRef", "passwordSecret", "image.", "settings."}

        def walk(node, given, path):
            node = follow(node)
            if "properties" not in node or not isinstance(given, dict):
                return
            self.assertLessEqual(set(given), set(node["properties"]), path)
            if node.get("additionalProperties") is not False:
                self.fail(f"{path}: unknown keys are not refused")
            for key, below in node["properties"].items():
                full = f"{path}.{key}".lstrip(".")
                if key in given:
                    walk(below, given[key], full)
                elif not any(word in full for word in optional) and not full.startswith(("services.http.", "services.grpc.")):
                    self.fail(f"{full}: in the schema, but values.yaml has no default and no comment for it")

        walk(schema, chart.values(), "")
