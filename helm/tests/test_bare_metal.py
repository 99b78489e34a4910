"""The systemd units and settings of docs/deploy: what the binaries take, the same as the chart's."""

import pathlib
import re
import shutil
import subprocess
import tempfile
import tomllib
import unittest

import chart
import test_settings

FOLDER = chart.ROOT / "docs" / "deploy" / "systemd"
ROLES = ("conductor", "prefill", "decode")


def settings(role):
    return tomllib.loads((FOLDER / f"{role}.toml").read_text())


def unit(role):
    return FOLDER / (f"baton-{role}.service" if role == "conductor" else f"baton-{role}@.service")


class BareMetal(unittest.TestCase):
    def test_settings_are_the_binaries_own(self):
        for role in ROLES:
            source = test_settings.SOURCES["conductor" if role == "conductor" else "node"]
            self.assertLessEqual(set(settings(role)), test_settings.fields(source), role)

    def test_what_all_must_agree_on_is_the_same(self):
        for key in ("model", "block_tokens", "kv_dtype"):
            self.assertEqual(len({settings(role)[key] for role in ROLES}), 1, key)
        nodes_port = settings("conductor")["nodes"].split(":")[1]
        for role in ("prefill", "decode"):
            for conductor in settings(role)["conductor"].split(","):
                self.assertEqual(conductor.split(":")[1], nodes_port)

    def test_ports_are_the_charts(self):
        values = chart.values()
        for role in ROLES:
            for name, port in values[role]["ports"].items():
                key = "transfer_listen" if name == "transfer" else name
                self.assertEqual(settings(role)[key], f"0.0.0.0:{port}")

    def test_systemd_waits_longer_than_a_drain_takes(self):
        for role in ROLES:
            given = settings(role)
            closing = 2 * test_settings.close_timeout("conductor/src/server.rs")
            stop = int(re.search(r"(?m)^TimeoutStopSec=(\d+)$", unit(role).read_text()).group(1))
            self.assertGreater(stop, given.get("not_ready_s", 0) + given["grace_s"] + closing, role)

    def test_systemd_takes_the_units(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("no systemd-analyze")
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for role in ROLES:
                path = pathlib.Path(folder, unit(role).name.replace("@", "@1"))
                # It looks for the programs, too.
                path.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit(role).read_text()))
                paths.append(str(path))
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True)
            said = [line for line in done.stderr.splitlines() if folder in line or "baton" in line]
            self.assertEqual((done.returncode, said), (0, []), done.stderr)

    def test_the_binaries_take_the_settings(self):
        folder = test_settings.binaries()
        if not folder:
            self.skipTest("no binaries: BATON_BIN")
        for role in ROLES:
            command = [folder / f"baton-{role}", "--config", FOLDER / f"{role}.toml", "--print-config"]
            done = subprocess.run(command, capture_output=True, text=True, env={"BATON_ADVERTISE_HOST": "10.0.0.1"})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("# BATON_ADVERTISE_HOST", done.stdout)
