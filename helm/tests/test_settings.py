"""What the chart gives the binaries is what they take: flags, settings, ports, and how long a drain may take."""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import tomllib
import unittest

import chart

SOURCES = {
    "conductor": (chart.ROOT / "conductor" / "src" / "config.rs").read_text(),
    "node": (chart.ROOT / "crates" / "worker" / "src" / "config.rs").read_text(),
}
# Settings that the chart makes from other values, and those that `settings` of the whole cluster has.
MADE = {
    "conductor": {
        "grpc", "http", "operators", "nodes", "etcd", "etcd_prefix", "advertise_host", "model", "engine", "chat_template",
        "served_model_name", "block_tokens", "kv_dtype", "etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file",
    },
    "node": {
        "name", "conductor", "listen", "http", "transfer_listen", "transfer_shm_folder", "advertise_host", "model",
        "served_model_name", "engine", "block_tokens", "kv_dtype", "ssd_folder", "ssd_bytes",
    },
}  # fmt: skip


def fields(source):
    """The settings that a `settings!` declares. Each is a flag, too."""
    body = re.search(r"settings! \{(.*?)\n\}", source, re.S).group(1)
    return set(re.findall(r"^        (\w+): ", body, re.M))


def side(workload):
    return "conductor" if chart.component(workload) == "conductor" else "node"


def setting(flag):
    return flag.removeprefix("--").replace("-", "_")


def file_of(rendered, workload):
    name = next(v for v in chart.pod(workload)["volumes"] if v["name"] == "settings")["configMap"]["name"]
    return chart.of(rendered, "ConfigMap", name)["data"]["baton.toml"]


def binaries():
    """Where Baton's binaries are, if they are."""
    built = chart.ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "debug"
    folder = pathlib.Path(os.environ.get("BATON_BIN") or built)
    return folder if (folder / "baton-conductor").exists() else None


def close_timeout(path):
    return int(re.search(r"const CLOSE_TIMEOUT: Duration = Duration::from_secs\((\d+)\)", (chart.ROOT / path).read_text()).group(1))


CASES = [(path.stem, chart.load(path.read_text())) for path in chart.EXAMPLES]
CASES += [
    ("defaults", {"engine": "mock"}),
    (
        "settings of all forms",
        {
            "engine": "mock",
            "conductor": {"settings": {"max_wait_ms": "off", "cors_origins": ["https://a"], "grace_s": 2.5, "max_body_bytes_total": 1 << 35}},
            "decode": {
                "settings": {"cache_bytes": 1 << 40, "log": "debug"},
                "resources": {"limits": {"memory": "2Ti"}},
                "shm": {"enabled": True},
            },
            "model": {"name": "a name", "chatTemplate": "{{ messages }}"},
        },
    ),
]


class Settings(unittest.TestCase):
    def test_the_schema_has_all_settings_and_no_other(self):
        schema = json.loads((chart.CHART / "values.schema.json").read_text())
        schemas = {
            "conductor": schema["properties"]["conductor"]["properties"]["settings"],
            "node": schema["definitions"]["nodes"]["properties"]["settings"],
        }
        for of, source in SOURCES.items():
            self.assertEqual(set(schemas[of]["properties"]), fields(source) - MADE[of], of)

    def test_flags_are_the_binaries_own(self):
        known = {of: fields(source) | {"config"} for of, source in SOURCES.items()}
        for name, values in CASES:
            for workload in chart.roles(chart.render(values, engine=None)):
                given = {setting(flag) for flag in chart.flags(workload)}
                with self.subTest(case=name, workload=workload["metadata"]["name"]):
                    self.assertLessEqual(given, known[side(workload)])

    def test_settings_files_hold_what_was_set(self):
        values = dict(CASES)["settings of all forms"]
        rendered = chart.render(values)
        conductor = tomllib.loads(file_of(rendered, chart.of(rendered, "Deployment")))
        self.assertEqual(conductor["max_wait_ms"], "off")
        self.assertEqual(conductor["cors_origins"], ["https://a"])
        self.assertEqual((conductor["grace_s"], conductor["not_ready_s"], conductor["max_body_bytes_total"]), (2.5, 10, 1 << 35))
        decode = tomllib.loads(file_of(rendered, chart.of(rendered, "StatefulSet", "baton-decode")))
        self.assertEqual((decode["cache_bytes"], decode["log"], decode["kv_dtype"]), (1 << 40, "debug", "f16"))

    def test_the_binaries_take_what_is_rendered(self):
        folder = binaries()
        if not folder:
            self.skipTest("no binaries: BATON_BIN")
        for name, values in CASES:
            rendered = chart.render(values, engine=None)
            for workload in chart.roles(rendered):
                with self.subTest(case=name, workload=workload["metadata"]["name"]), tempfile.NamedTemporaryFile("w") as file:
                    file.write(file_of(rendered, workload))
                    file.flush()
                    fill = {"$(POD_IP)": "10.1.2.3", "$(POD_NAME)": "pod-0", "/etc/baton/baton.toml": file.name}
                    arguments = []
                    for argument in chart.container(workload)["args"]:
                        for what, by in fill.items():
                            argument = argument.replace(what, by)
                        arguments.append(argument)
                    binary = pathlib.Path(folder, chart.container(workload)["command"][0])
                    done = subprocess.run([binary, *arguments, "--print-config"], capture_output=True, text=True, env={})
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertRegex(done.stdout, r'(?m)^advertise_host = "10\.1\.2\.3"')

    def test_processes_listen_where_their_ports_are(self):
        for workload in chart.roles(chart.render({"conductor": {"ports": {"http": 18080}}, "decode": {"ports": {"transfer": 17201}}})):
            ports = {port["name"]: port["containerPort"] for port in chart.container(workload)["ports"]}
            flags = {setting(flag): value for flag, value in chart.flags(workload).items()}
            flags["transfer"] = flags.get("transfer_listen")
            for name, port in ports.items():
                self.assertEqual(flags[name], f"0.0.0.0:{port}")

    def test_the_grace_period_exceeds_the_sum_of_the_drains_deadlines(self):
        closing = {
            # What is left gets its status, then tasks end.
            "conductor": 2 * close_timeout("conductor/src/server.rs"),
            "node": close_timeout("crates/worker/src/node.rs"),
        }
        given = [
            *CASES,
            ("long", {"engine": "mock", "conductor": {"settings": {"not_ready_s": 600, "grace_s": 3600.5}}, "decode": {"settings": {"grace_s": 0}}}),
            ("set", {"engine": "mock", "conductor": {"terminationGracePeriodSeconds": 141}, "prefill": {"terminationGracePeriodSeconds": 131}}),
            ("binary's default", {"engine": "mock", "conductor": {"settings": {"grace_s": None}}, "prefill": {"settings": {"grace_s": None}}}),
        ]
        for name, values in given:
            rendered = chart.render(values, engine=None)
            for workload in chart.roles(rendered):
                settings = tomllib.loads(file_of(rendered, workload))
                deadlines = settings.get("not_ready_s", 0) + settings.get("grace_s", 30) + closing[side(workload)]
                with self.subTest(case=name, workload=workload["metadata"]["name"]):
                    self.assertGreater(chart.pod(workload)["terminationGracePeriodSeconds"], deadlines)
