"""The image and the chart agree, and the list of what is in the image is whole. No image is built here."""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import unittest

import chart

DOCKERFILE = (chart.ROOT / "Dockerfile").read_text()


class Image(unittest.TestCase):
    def test_its_user_is_the_charts(self):
        user = re.search(r"(?m)^USER (\d+):(\d+)$", DOCKERFILE)
        for workload in chart.roles(chart.render()):
            context = chart.pod(workload)["securityContext"]
            self.assertEqual((context["runAsUser"], context["runAsGroup"]), tuple(map(int, user.groups())))

    def test_it_has_the_commands_that_pods_run(self):
        built = set(re.findall(r"target/release/([\w-]+)", DOCKERFILE))
        rendered = chart.render()
        run = {chart.container(workload)["command"][0] for workload in chart.roles(rendered)}
        run |= {one["command"][0] for one in chart.of(rendered, "Pod")["spec"]["containers"]}
        self.assertEqual(run, built)

    def test_rdma_is_on_where_there_is_such_a_feature(self):
        paths = [*chart.ROOT.glob("*/Cargo.toml"), *chart.ROOT.glob("crates/*/Cargo.toml")]
        manifests = {one["package"]["name"]: one for one in map(tomllib.loads, (path.read_text() for path in paths))}
        for package in re.findall(r"--package (\S+)", DOCKERFILE):
            features = manifests[package].get("features", {})
            self.assertEqual("rdma" in features, f"{package}/rdma" in DOCKERFILE, package)

    def test_its_tag_is_what_the_chart_asks_for(self):
        version = tomllib.loads((chart.ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
        self.assertEqual(chart.load((chart.CHART / "Chart.yaml").read_text())["appVersion"], version)

    def test_what_is_in_it_is_listed(self):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("libibverbs1 44.0-2 amd64\nlibc6 2:2.36-9+deb12u10 amd64\n")
            file.flush()
            listed = subprocess.run([sys.executable, chart.ROOT / "scripts/sbom.py", "--debian", file.name], capture_output=True, check=True)
        components = json.loads(listed.stdout)["components"]
        names = {one["name"] for one in components}
        self.assertLessEqual({"baton-conductor", "tokio", "ibverbs-sys", "libibverbs1", "etcd-client"}, names)
        self.assertFalse({"proptest", "insta", "baton-cluster-tests"} & names, "for tests alone")
        references = [one["bom-ref"] for one in components]
        self.assertEqual(len(references), len(set(references)))
        self.assertIn("pkg:deb/debian/libc6@2%3A2.36-9%2Bdeb12u10?arch=amd64", references)
        for one in components:
            if one["purl"].startswith("pkg:cargo/") and not one["name"].startswith("baton-"):
                self.assertRegex(one["hashes"][0]["content"], r"^[0-9a-f]{64}$")
