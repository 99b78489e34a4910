"""Alerts, dashboard and autoscaling ask for metrics that exist, and alerts fire when they should."""

import copy
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import yaml

import chart

SELECTOR = 'namespace="serving",baton_cluster="baton"'
ON = {name: {"enabled": True} for name in ("podMonitor", "alerts", "dashboard")}
SLO = {"ttft_slo_ms": 2000, "tbt_slo_ms": 200}
RDMA = {"rdma": {"enabled": True}, "autoscaling": {"enabled": True}, "groups": {"default": {}, "b": {"autoscaling": {"sloMs": 50}}}}


@functools.cache
def rendered():
    monitoring = {**ON, "prometheusAddress": "http://p:9090", "authenticationRef": {"name": "a"}, "authModes": "bearer"}
    conductor = {"settings": SLO, "autoscaling": {"enabled": True}}
    return chart.render({"monitoring": monitoring, "conductor": conductor, "prefill": RDMA, "decode": RDMA})


def rules(objects=None):
    return chart.of(objects or rendered(), "PrometheusRule")["spec"]["groups"][0]["rules"]


def dashboard():
    return json.loads((chart.CHART / "files/dashboard.json").read_text())


def expressions():
    """All queries, by where they are."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in dashboard()["panels"]:
        found.update({f"panel {panel['title']} {target['refId']}": target["expr"] for target in panel.get("targets", [])})
    for one in rendered():
        if one["kind"] == "ScaledObject":
            name = one["metadata"]["name"]
            found.update({f"scaling {name} {n}": trigger["metadata"]["query"] for n, trigger in enumerate(one["spec"]["triggers"])})
    return found


def known():
    """Metric to kind and labels, of docs/metrics.md."""
    page = (chart.ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(baton_\w+)` \| (\w+) \| ([^|]*) \|", page, re.M)
    return {name: (kind, {label.strip() for label in labels.split(",") if label.strip()}) for name, kind, labels in rows}


class Metrics(unittest.TestCase):
    def test_all_exist_with_the_labels_asked_for(self):
        metrics = known()
        # What a scrape adds.
        added = {"namespace", "pod", "baton_cluster", "baton_role", "baton_group", "le"}
        for where, expression in expressions().items():
            names = chart.metric_names(expression)
            self.assertTrue(names, where)
            labels = set()
            for name in names:
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                kind, own = metrics[base] if base in metrics else metrics[name]
                self.assertEqual(kind == "histogram", base != name and base in metrics, (where, name))
                if kind == "counter":
                    self.assertRegex(expression, rf"(rate|increase)\({name}|count by .*\({name}", where)
                labels |= own
            asked = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
            asked |= {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
            self.assertLessEqual(asked, labels | added, where)

    def test_all_queries_are_of_this_cluster_alone(self):
        for where, expression in expressions().items():
            selected = re.findall(r"\bbaton_\w+?\{([^}]*)\}", expression)
            self.assertEqual(len(selected), len(re.findall(r"\bbaton_(?:build|process|conductor|node|prefill|decode|transfer)_\w+", expression)), where)
            for selector in selected:
                wanted = 'namespace="$namespace",baton_cluster="$cluster"' if where.startswith("panel") else SELECTOR
                self.assertTrue(selector.startswith(wanted), where)


class PodMonitors(unittest.TestCase):
    def test_they_find_all_processes(self):
        for name, port, components in (("conductor", "operators", ["conductor"]), ("nodes", "http", ["prefill", "decode"])):
            monitor = chart.of(rendered(), "PodMonitor", f"baton-{name}")["spec"]
            self.assertEqual(monitor["selector"]["matchExpressions"][0]["values"], components)
            endpoint = monitor["podMetricsEndpoints"][0]
            self.assertEqual((endpoint["port"], endpoint["path"], endpoint["interval"]), (port, "/metrics", "15s"))
            for workload in chart.roles(rendered()):
                if chart.component(workload) in components:
                    self.assertIn(port, [one["name"] for one in chart.container(workload)["ports"]])
                    labels = workload["spec"]["template"]["metadata"]["labels"]
                    self.assertLessEqual(monitor["selector"]["matchLabels"].items(), labels.items())

    def test_labels_and_interval(self):
        on = {"enabled": True, "labels": {"release": "p"}, "interval": "5s"}
        monitor = chart.of(chart.render(monitoring__podMonitor=on), "PodMonitor", "baton-nodes")
        self.assertEqual(monitor["metadata"]["labels"]["release"], "p")
        self.assertEqual(monitor["spec"]["podMetricsEndpoints"][0]["interval"], "5s")


class Dashboard(unittest.TestCase):
    def test_it_is_found_and_whole(self):
        found = chart.of(rendered(), "ConfigMap", "baton-dashboard")
        self.assertEqual(found["metadata"]["labels"]["grafana_dashboard"], "1")
        shown = json.loads(found["data"]["baton.json"])
        self.assertEqual({**shown, "uid": "baton"}, dashboard())
        other = json.loads(chart.of(chart.render({"monitoring": ON}, namespace="b"), "ConfigMap", "baton-dashboard")["data"]["baton.json"])
        self.assertNotEqual(shown["uid"], other["uid"], "one of each release")
        self.assertLessEqual(len(shown["uid"]), 40)
        other = {"enabled": True, "labels": {"mine": "x"}, "annotations": {"grafana_folder": "LLM"}}
        found = chart.of(chart.render(monitoring__dashboard=other), "ConfigMap", "baton-dashboard")
        self.assertEqual((found["metadata"]["labels"]["mine"], found["metadata"]["annotations"]), ("x", {"grafana_folder": "LLM"}))

    def test_panels_have_places_and_ids_of_their_own(self):
        panels = dashboard()["panels"]
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in panels)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        self.assertEqual(len(cells), len(set(cells)))


class Scaling(unittest.TestCase):
    def test_each_group_scales_by_what_waits_and_by_its_objective(self):
        for role, suffix, seconds in (("prefill", "", "2"), ("prefill", "-b", "0.05"), ("decode", "", "0.2"), ("decode", "-b", "0.05")):
            one = chart.of(rendered(), "ScaledObject", f"baton-{role}{suffix}")["spec"]
            waiting, objective = one["triggers"]
            self.assertIn(f'baton_node_requests_waiting{{{SELECTOR},baton_role="{role}",baton_group="{suffix[1:] or "default"}"}}', waiting["metadata"]["query"])
            self.assertEqual((waiting["metricType"], waiting["metadata"]["threshold"]), ("AverageValue", "2"))
            self.assertIn(f"/ {seconds} > 0) or vector(0)", objective["metadata"]["query"])
            self.assertEqual((objective["metricType"], objective["metadata"]["threshold"]), ("Value", "0.8"))
            self.assertEqual(objective["authenticationRef"], {"name": "a"})
            self.assertEqual(objective["metadata"]["authModes"], "bearer")
            self.assertEqual(one["scaleTargetRef"], {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": f"baton-{role}{suffix}"})
            self.assertEqual(chart.of(rendered(), "StatefulSet", f"baton-{role}{suffix}")["spec"]["replicas"], 1)
        one = chart.of(rendered(), "ScaledObject", "baton-conductor")["spec"]
        self.assertIn("baton_conductor_requests_running", one["triggers"][0]["metadata"]["query"])
        self.assertEqual(chart.of(rendered(), "Deployment")["spec"]["replicas"], 2)

    def test_an_upgrade_leaves_the_number_that_there_is(self):
        there = chart.render({"conductor": {"replicas": 5}, "decode": {"replicas": 7}})
        scaling = {"autoscaling": {"enabled": True}}
        values = {"monitoring": {"prometheusAddress": "http://p"}, "conductor": scaling, "decode": scaling}
        after = chart.upgrade(there, values)
        self.assertEqual(chart.of(after, "Deployment")["spec"]["replicas"], 5)
        self.assertEqual(chart.of(after, "StatefulSet", "baton-decode")["spec"]["replicas"], 7)
        # Without autoscaling the values say it.
        self.assertEqual(chart.of(chart.upgrade(there, {}), "StatefulSet", "baton-decode")["spec"]["replicas"], 1)

    def test_pods_go_one_at_a_time_and_no_faster_than_they_drain(self):
        for objects in (rendered(), *map(chart.example, chart.EXAMPLES)):
            targets = {one["metadata"]["name"]: one for one in chart.roles(objects)}
            for one in objects:
                if one["kind"] == "ScaledObject":
                    down = one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
                    self.assertEqual([policy["type"] for policy in down["policies"]], ["Pods"])
                    drain = chart.pod(targets[one["spec"]["scaleTargetRef"]["name"]])["terminationGracePeriodSeconds"]
                    self.assertGreaterEqual(down["policies"][0]["periodSeconds"], drain)

    def test_numbers_are_the_values(self):
        scaling = {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "waitingPerReplica": 5, "pollingInterval": 7, "quantile": 0.5, "sloShare": 0.7, "sloMs": 100, "scaleDown": {"stabilizationSeconds": 60, "periodSeconds": 200}}
        values = {"monitoring": {"prometheusAddress": "http://p"}, "decode": {"autoscaling": scaling}}
        spec = chart.of(chart.render(values), "ScaledObject")["spec"]
        self.assertEqual((spec["minReplicaCount"], spec["maxReplicaCount"], spec["pollingInterval"]), (3, 9, 7))
        self.assertEqual([trigger["metadata"]["threshold"] for trigger in spec["triggers"]], ["5", "0.7"])
        self.assertIn("histogram_quantile(0.5,", spec["triggers"][1]["metadata"]["query"])
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        self.assertEqual((down["stabilizationWindowSeconds"], down["policies"][0]["periodSeconds"]), (60, 200))
        conductor = {"enabled": True, "minReplicas": 3, "maxReplicas": 9, "runningPerReplica": 5}
        spec = chart.of(chart.render({"monitoring": values["monitoring"], "conductor": {"autoscaling": conductor}}), "ScaledObject")["spec"]
        self.assertEqual((spec["minReplicaCount"], spec["triggers"][0]["metadata"]["threshold"]), (3, "5"))

    def test_without_an_objective_there_is_no_trigger_for_it(self):
        values = {"monitoring": {"prometheusAddress": "http://p"}, "prefill": {"autoscaling": {"enabled": True}}}
        self.assertEqual(len(chart.of(chart.render(values), "ScaledObject")["spec"]["triggers"]), 1)


class Alerts(unittest.TestCase):
    def test_what_is_only_there_if_it_is_asked_for(self):
        def names(**paths):
            return {rule["alert"] for rule in rules(chart.render(monitoring__alerts={"enabled": True, **paths.pop("alerts", {})}, **paths))}

        few = names()
        self.assertEqual(names(conductor__settings=SLO) - few, {"BatonTimeToFirstTokenHigh", "BatonTimeBetweenTokensHigh"})
        self.assertEqual(names(alerts={"ttftMs": 5}) - few, {"BatonTimeToFirstTokenHigh"})
        self.assertEqual(names(prefill__rdma__enabled=True) - few, {"BatonTransfersFallBack"})

    def test_each_says_what_to_do(self):
        for rule in rules():
            self.assertIn(rule["labels"]["severity"], ("critical", "warning"))
            self.assertTrue(rule["annotations"]["summary"] and rule["annotations"]["description"], rule["alert"])

    def test_promtool_agrees(self):
        promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
        tests = yaml.safe_load((chart.TESTS / "alerts.yaml").read_text())
        fired = {check["alertname"] for group in tests["tests"] for check in group["alert_rule_test"] if check.get("exp_alerts")}
        self.assertEqual(fired, {rule["alert"] for rule in rules()}, "every alert fires in alerts.yaml")
        if not promtool:
            self.skipTest("no promtool: PROMTOOL")
        with tempfile.TemporaryDirectory() as folder:
            spec = copy.deepcopy(chart.of(rendered(), "PrometheusRule")["spec"])
            pathlib.Path(folder, "rules.yaml").write_text(yaml.safe_dump(spec))
            self.promtool(promtool, folder, "check", "rules", "rules.yaml")
            # The test is about what fires when, not about its words, which promtool would compare, too.
            for rule in spec["groups"][0]["rules"]:
                rule.pop("annotations")
            pathlib.Path(folder, "rules.yaml").write_text(yaml.safe_dump(spec))
            pathlib.Path(folder, "alerts.yaml").write_text(yaml.safe_dump(tests))
            self.promtool(promtool, folder, "test", "rules", "alerts.yaml")
            # PromQL of the dashboard and of the triggers is parsed, too.
            others = [
                {"record": f"x:{n}", "expr": re.sub(r"\$__\w+", "5m", query)}
                for n, (where, query) in enumerate(expressions().items())
                if where.startswith(("panel", "scaling"))
            ]
            pathlib.Path(folder, "others.yaml").write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": others}]}))
            self.promtool(promtool, folder, "check", "rules", "others.yaml")

    def promtool(self, promtool, folder, *arguments):
        done = subprocess.run([promtool, *arguments], cwd=folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
