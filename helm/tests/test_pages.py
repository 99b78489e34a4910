"""The pages' blocks for Helm (```sh helm), in order, and the YAML of kubernetes.md. No cluster is there.

Helm keeps releases in memory, as its own tests do: each command is run as it stands, and what it renders is checked.
An `install` begins without releases. `kubectl create secret` gets --dry-run=client, and any other kubectl fails.
"""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import chart
import test_examples
import yaml

PAGES = sorted([*chart.ROOT.glob("*.md"), *chart.ROOT.glob("docs/**/*.md"), *chart.ROOT.glob("helm/**/*.md")])
KUBERNETES = (chart.ROOT / "docs" / "deploy" / "kubernetes.md").read_text()
PRELUDE = """
set -euo pipefail
calls=0
echo '[]' >none.json
helm() {
  case " $* " in
    *" install "* | *" upgrade "*)
      [[ " $* " != *" install "* ]] || HELM_MEMORY_DRIVER_DATA=none.json
      calls=$((calls + 1))
      command "$HELM" "$@" --output json >release.json
      { echo "["; cat release.json; echo "]"; } >"release-$calls.json"
      export HELM_MEMORY_DRIVER_DATA+=":release-$calls.json" ;;
    " template "*) command "$HELM" "$@" ;;
    *) command "$HELM" "$@" >&2 ;;
  esac
}
kubectl() {
  echo ---
  command "$KUBECTL" "$@" --dry-run=client --output yaml
}
"""


def blocks(text, info):
    return re.findall(rf"(?ms)^```{info}\n(.*?)^```$", text)


def my_values():
    """my.yaml of kubernetes.md."""
    return blocks(KUBERNETES[KUBERNETES.index("here `my.yaml`") :], "yaml")[0]


class Pages(unittest.TestCase):
    def run_block(self, script):
        """The objects that a block makes."""
        with tempfile.TemporaryDirectory() as folder, chart.server() as address:
            path = pathlib.Path(folder)
            (path / "helm").symlink_to(chart.ROOT / "helm")
            (path / "my.yaml").write_text(my_values())
            for name in ("token", "password", "ca.crt", "tls.crt", "tls.key"):
                (path / name).write_text(f"a {name}\n")
            pair = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=llm", "-keyout", "llm.key", "-out", "llm.crt"]
            subprocess.run(pair, cwd=folder, check=True, capture_output=True)
            memory = {"HELM_DRIVER": "memory", "HELM_MEMORY_DRIVER_DATA": "none.json", "HELM_KUBEAPISERVER": address}
            done = subprocess.run(
                ["bash", "-c", PRELUDE + script], cwd=folder, env={**os.environ, **memory}, capture_output=True, text=True, check=False
            )
            self.assertEqual(done.returncode, 0, f"{script}\n{done.stderr}")
            releases = [json.loads(file.read_text())[0] for file in sorted(path.glob("release-*.json"))]
        texts = [done.stdout]
        for release in releases:
            texts += [release["manifest"], *("---\n" + hook["manifest"] for hook in release["hooks"])]
        return [one for text in texts for one in yaml.load_all(text, Loader=chart.LOADER) if one]

    def check(self, made):
        self.assertTrue(made)
        for one in made:
            with self.subTest(kind=one["kind"], name=one["metadata"]["name"]):
                test_examples.check(one)

    @unittest.skipUnless(os.environ.get("KUBECTL"), "no kubectl")
    def test_blocks_for_helm_run_and_make_valid_objects(self):
        count = 0
        for page in PAGES:
            found = blocks(page.read_text(), "sh helm")
            count += len(found)
            if found:
                self.check(self.run_block("\n".join(found)))
        self.assertGreaterEqual(count, 6)

    @unittest.skipUnless(os.environ.get("KUBECTL"), "no kubectl")
    def test_a_wrong_block_fails(self):
        for wrong in (
            "helm -n serving install baton ./helm/baton -f my.yaml --waits",
            "helm -n serving install baton ./helm/baton -f my.yaml --set prefil.replicas=2",
            "helm -n serving upgrade baton ./helm/baton -f my.yaml",
            "helm -n serving install baton ./helm/baton -f my.yaml\nhelm -n serving test absent",
            "kubectl -n serving create secret generic hf-token --from-file=token=./nowhere",
            "kubectl -n serving get pods",
        ):
            with self.subTest(wrong=wrong), self.assertRaises(AssertionError):
                self.run_block(wrong)

    def test_yaml_of_kubernetes_page_is_taken(self):
        mine = chart.load(my_values())
        for text in blocks(KUBERNETES, "yaml"):
            given = chart.load(text)
            made = [given] if "apiVersion" in given else chart.render(chart.merged(mine, given), engine=None)
            with self.subTest(text=text):
                self.check(made)


if __name__ == "__main__":
    unittest.main()
