"""Every switch of the values changes what it says, and nothing is there that was not asked for."""

import pathlib
import shutil
import subprocess
import tempfile
import tomllib
import unittest

import chart
import values_reference
from chart import container, flags, has, of, pod, render

PEERS = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
HOST = {"networkPolicy": {"nodes": PEERS}}
NODES = ("prefill", "decode")


def node(role, **block):
    return of(render(chart.merged(HOST, {role: block})), "StatefulSet", f"baton-{role}")


def volume(workload, name):
    return next((one for one in pod(workload)["volumes"] if one["name"] == name), None)


def mount(workload, name):
    return next((one["mountPath"] for one in container(workload)["volumeMounts"] if one["name"] == name), None)


class Roles(unittest.TestCase):
    def test_by_default_there_are_all_roles_and_what_protects_them(self):
        rendered = render()
        self.assertEqual({chart.component(one) for one in chart.workloads(rendered)}, {"conductor", "prefill", "decode", "etcd"})
        self.assertEqual(of(rendered, "Deployment")["spec"]["replicas"], 2)
        for name in ("conductor", *NODES):
            self.assertTrue(has(rendered, "PodDisruptionBudget", f"baton-{name}"))
            self.assertTrue(has(rendered, "NetworkPolicy", f"baton-{name}"))
        for kind in ("Ingress", "HTTPRoute", "ScaledObject", "PodMonitor", "PrometheusRule", "PersistentVolumeClaim"):
            self.assertFalse(has(rendered, kind), kind)

    def test_pods_are_restricted(self):
        for workload in [*chart.workloads(render()), of(render(), "Pod")]:
            spec = workload["spec"] if workload["kind"] == "Pod" else pod(workload)
            self.assertEqual(spec["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
            self.assertTrue(spec["securityContext"]["runAsNonRoot"])
            self.assertFalse(spec["automountServiceAccountToken"])
            self.assertFalse(spec["enableServiceLinks"])
            for one in [*spec.get("initContainers", []), *spec["containers"]]:
                context = one["securityContext"]
                self.assertTrue(context["readOnlyRootFilesystem"])
                self.assertFalse(context["allowPrivilegeEscalation"])
                self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
            self.assertFalse(spec.get("hostNetwork"))
            self.assertFalse([one for one in spec.get("volumes", []) if "hostPath" in one])

    def test_liveness_asks_health_and_readiness_asks_ready(self):
        for workload in chart.roles(render()):
            one = container(workload)
            self.assertEqual(one["startupProbe"]["httpGet"]["path"], "/health")
            self.assertEqual(one["livenessProbe"]["httpGet"]["path"], "/health")
            self.assertEqual(one["readinessProbe"]["httpGet"]["path"], "/ready")
        startup = container(node("decode"))["startupProbe"]
        self.assertGreaterEqual(startup["periodSeconds"] * startup["failureThreshold"], 1800)
        # Load balancers have heard before a conductor stops taking requests.
        one = container(of(render(), "Deployment"))["readinessProbe"]
        self.assertLess(one["periodSeconds"] * one["failureThreshold"], chart.values()["conductor"]["settings"]["not_ready_s"])
        # As values.yaml has it: over the default, which is httpGet.
        grpc = {"grpc": {"port": 7070}}
        self.assertNotIn("httpGet", container(of(render(conductor__readinessProbe=grpc), "Deployment"))["readinessProbe"])

    def test_keys_that_all_roles_have(self):
        blocks = {
            "nodeSelector": {"a": "b", "kubernetes.io/arch": "arm64", "kubernetes.io/os": "linux"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "runtimeClassName": "kata",
        }
        for role in ("conductor", *NODES):
            given = {
                **blocks,
                # The rest is what the image needs.
                "nodeSelector": {"a": "b", "kubernetes.io/arch": "arm64"},
                "podAnnotations": {"note": "x"},
                "podLabels": {"team": "y"},
                "extraArgs": ["--log=debug"],
                "extraEnv": [{"name": "RUST_BACKTRACE", "value": "1"}],
                "extraVolumes": [{"name": "v", "emptyDir": {}}],
                "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
                "extraInitContainers": [{"name": "i", "image": "i"}],
                "image": {"repository": "other", "tag": "7", "pullPolicy": "Always"},
                "resources": {"limits": {"cpu": 3}},
                "podSecurityContext": {"supplementalGroups": [5]},
                "securityContext": {"runAsUser": 7},
                "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
                "livenessProbe": {"periodSeconds": 77},
                "replicas": 3,
            }
            workload = next(one for one in chart.roles(render({role: given})) if chart.component(one) == role)
            with self.subTest(role=role):
                spec, one = pod(workload), container(workload)
                for key, value in blocks.items():
                    self.assertEqual(spec[key], value)
                template = workload["spec"]["template"]["metadata"]
                self.assertEqual((template["annotations"]["note"], template["labels"]["team"]), ("x", "y"))
                self.assertEqual(one["args"][-1], "--log=debug")
                self.assertIn({"name": "RUST_BACKTRACE", "value": "1"}, one["env"])
                self.assertEqual(volume(workload, "v"), {"name": "v", "emptyDir": {}})
                self.assertEqual(mount(workload, "v"), "/v")
                self.assertEqual(spec["initContainers"][-1]["name"], "i")
                self.assertEqual((one["image"], one["imagePullPolicy"]), ("other:7", "Always"))
                # A limit of memory that is not set is the request, if that is a gibibyte or more.
                self.assertEqual(one["resources"]["limits"], {"cpu": 3, "memory": one["resources"]["requests"]["memory"]})
                self.assertEqual(spec["securityContext"]["supplementalGroups"], [5])
                self.assertEqual(one["securityContext"]["runAsUser"], 7)
                hosts, zones = spec["topologySpreadConstraints"]
                self.assertEqual((hosts["topologyKey"], zones["topologyKey"]), ("kubernetes.io/hostname", "zone"))
                self.assertEqual(zones["labelSelector"]["matchLabels"]["app.kubernetes.io/component"], role)
                self.assertEqual(one["livenessProbe"]["periodSeconds"], 77)
                self.assertEqual(workload["spec"]["replicas"], 3)

    def test_spread_pdb_and_service_account_can_be_left_out(self):
        for role in ("conductor", *NODES):
            off = {"spreadOverHosts": False, "pdb": {"enabled": False}, "serviceAccount": {"create": False}}
            rendered = render({role: off})
            workload = next(one for one in chart.roles(rendered) if chart.component(one) == role)
            self.assertNotIn("topologySpreadConstraints", pod(workload))
            self.assertFalse(has(rendered, "PodDisruptionBudget", f"baton-{role}"))
            self.assertFalse(has(rendered, "ServiceAccount", f"baton-{role}"))
            self.assertEqual(pod(workload)["serviceAccountName"], "default")
            named = render({role: {"serviceAccount": {"name": "mine", "annotations": {"a": "b"}}, "pdb": {"maxUnavailable": "25%"}}})
            self.assertEqual(of(named, "ServiceAccount", "mine")["metadata"]["annotations"], {"a": "b"})
            budget = of(named, "PodDisruptionBudget", f"baton-{role}")["spec"]
            self.assertEqual((budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]), ("25%", "AlwaysAllow"))
            careful = render({role: {"pdb": {"unhealthyPodEvictionPolicy": "IfHealthyBudget"}}})
            self.assertEqual(of(careful, "PodDisruptionBudget", f"baton-{role}")["spec"]["unhealthyPodEvictionPolicy"], "IfHealthyBudget")

    def test_roles_may_share_a_service_account(self):
        account = {"serviceAccount": {"name": "one", "annotations": {"a": "b"}}}
        rendered = render({role: account for role in ("conductor", *NODES)})
        self.assertEqual(of(rendered, "ServiceAccount")["metadata"]["name"], "one")
        self.assertEqual({pod(one)["serviceAccountName"] for one in chart.roles(rendered)}, {"one"})

    def test_a_changed_setting_replaces_pods_of_its_role_only(self):
        def sums(**paths):
            annotations = {one["metadata"]["name"]: one["spec"]["template"]["metadata"] for one in chart.roles(render(**paths))}
            return {name: one["annotations"]["checksum/settings"] for name, one in annotations.items()}

        before, after = sums(), sums(decode__settings__max_running=5)
        self.assertEqual({name for name in before if before[name] != after[name]}, {"baton-decode"})
        after = sums(model__chatTemplate="x")
        self.assertEqual({name for name in before if before[name] != after[name]}, {"baton-conductor"})

    def test_a_new_version_of_the_chart_alone_replaces_no_pod(self):
        for workload in chart.roles(render()):
            labels = workload["spec"]["template"]["metadata"]["labels"]
            self.assertFalse({"helm.sh/chart", "app.kubernetes.io/version"} & set(labels))
            self.assertIn("app.kubernetes.io/version", workload["metadata"]["labels"])


class Image(unittest.TestCase):
    def test_tag_digest_and_secrets(self):
        one = of(render(image__tag="9", image__pullSecrets=["r"], image__pullPolicy="Never"), "Deployment")
        self.assertEqual((container(one)["image"], container(one)["imagePullPolicy"]), ("baton:9", "Never"))
        self.assertEqual(pod(one)["imagePullSecrets"], [{"name": "r"}])
        digest = "sha256:" + "0" * 64
        self.assertEqual(container(of(render(image__digest=digest, image__tag="9"), "Deployment"))["image"], f"baton@{digest}")

    def test_what_a_role_or_a_group_says_goes_before_a_digest_of_all(self):
        one, two = ("sha256:" + digit * 64 for digit in "12")
        for own, image in (
            ({}, f"baton@{one}"),
            ({"pullPolicy": "Always"}, f"baton@{one}"),
            ({"tag": "7"}, "baton:7"),
            ({"repository": "other"}, "other:9"),
            ({"repository": "other", "digest": two}, f"other@{two}"),
        ):
            rendered = render(image={"digest": one, "tag": "9"}, decode__image=own, prefill={"image": {"digest": two}, "groups": {"a": {"image": own}}})
            self.assertEqual(container(of(rendered, "StatefulSet", "baton-decode"))["image"], image)
            group = image if own.get("tag") or own.get("repository") else f"baton@{two}"
            self.assertEqual(container(of(rendered, "StatefulSet", "baton-prefill-a"))["image"], group)

    def test_images_of_others_have_policies_of_their_own(self):
        values = {"image": {"pullPolicy": "Never"}, "model": {"uri": "https://h/m", "fetch": {}}}
        own = {"repository": "r", "tag": "t", "digest": "", "pullPolicy": "Always"}
        for given, policy in (({}, "IfNotPresent"), ({"image": own}, "Always")):
            rendered = render(chart.merged(values, {"model": {"fetch": given}, "etcd": {"bundled": given}}), engine="cpu")
            etcd, init = container(of(rendered, "StatefulSet", "baton-etcd")), pod(of(rendered, "Deployment"))["initContainers"][0]
            for one in (etcd, init):
                self.assertEqual(one["imagePullPolicy"], policy)
                self.assertEqual(one["image"] == "r:t", bool(given))


class Model(unittest.TestCase):
    def of_uri(self, **model):
        return of(render({"model": model}, engine="cpu"), "StatefulSet", "baton-decode")

    def test_mock_has_none(self):
        self.assertEqual(flags(node("decode"))["--engine"], "mock")
        self.assertIsNone(volume(node("decode"), "model"))

    def test_a_claim_is_mounted_read_only(self):
        workload = self.of_uri(uri="pvc://models/llama/8b", name="llama")
        self.assertEqual((flags(workload)["--model"], flags(workload)["--served-model-name"]), ("/model/llama/8b", "llama"))
        self.assertEqual(volume(workload, "model")["persistentVolumeClaim"], {"claimName": "models", "readOnly": True})
        self.assertNotIn("initContainers", pod(workload))

    def test_a_claim_is_made(self):
        pvc = {"create": True, "size": "9Gi", "storageClassName": "s", "volumeName": "v", "dataSource": {"kind": "VolumeSnapshot", "name": "n"}}
        rendered = render({"model": {"uri": "pvc:///m.gguf", "pvc": pvc}}, engine="cpu")
        claim = of(rendered, "PersistentVolumeClaim", "baton-model")
        self.assertEqual(claim["metadata"]["annotations"], {"helm.sh/resource-policy": "keep"})
        spec = claim["spec"]
        self.assertEqual((spec["accessModes"], spec["storageClassName"], spec["volumeName"]), (["ReadOnlyMany"], "s", "v"))
        workload = of(rendered, "Deployment")
        self.assertEqual(volume(workload, "model")["persistentVolumeClaim"]["claimName"], "baton-model")
        self.assertEqual(volume(self.of_uri(uri="pvc:///m", pvc={"claim": "c"}), "model")["persistentVolumeClaim"]["claimName"], "c")

    def test_a_path_of_the_image_is_taken_as_it_is(self):
        workload = self.of_uri(uri="file:///models/m.gguf")
        self.assertEqual(flags(workload)["--model"], "/models/m.gguf")
        self.assertIsNone(volume(workload, "model"))

    def test_one_file_is_fetched(self):
        workload = self.of_uri(uri="hf://org/repo@v1/sub/m.gguf", sha256="0" * 64, secret={"name": "t", "key": "k"})
        init = pod(workload)["initContainers"][0]
        url = "https://huggingface.co/org/repo/resolve/v1/sub/m.gguf"
        self.assertEqual(init["args"][1:], ["fetch", "/model", url, "m.gguf", "0" * 64])
        self.assertEqual(flags(workload)["--model"], "/model/m.gguf")
        self.assertEqual(volume(workload, "token")["secret"]["items"], [{"key": "k", "path": "token"}])
        self.assertEqual(init["securityContext"]["capabilities"], {"drop": ["ALL"]})
        plain = self.of_uri(uri="https://host/a/m.gguf?x=1", fetch={"emptyDir": {"sizeLimit": "1Gi"}})
        self.assertEqual(flags(plain)["--model"], "/model/m.gguf")
        self.assertEqual(volume(plain, "model")["emptyDir"], {"sizeLimit": "1Gi"})
        self.assertIsNone(volume(plain, "token"))
        env, resources = [{"name": "HTTPS_PROXY", "value": "http://proxy"}], {"limits": {"cpu": 1}}
        init = pod(self.of_uri(uri="https://h/m", fetch={"extraEnv": env, "resources": resources}))["initContainers"][0]
        self.assertEqual((init["env"], init["resources"]["limits"]), (env, {"cpu": 1}))
        self.assertEqual(set(init["resources"]["requests"]), {"cpu", "memory"})

    def test_a_folder_is_fetched(self):
        workload = self.of_uri(uri="hf://org/repo", files=[{"path": "config.json"}, {"path": "a/b.safetensors", "sha256": "1" * 64}])
        arguments = pod(workload)["initContainers"][0]["args"][1:]
        base = "https://huggingface.co/org/repo/resolve/main"
        self.assertEqual(arguments[:5], ["fetch", "/model/repo", f"{base}/config.json", "config.json", ""])
        self.assertEqual(arguments[5:], [f"{base}/a/b.safetensors", "a/b.safetensors", "1" * 64])
        self.assertEqual(flags(workload)["--model"], "/model/repo")

    def test_the_script_that_fetches_works(self):
        """With a curl that copies: once as it should be, then with a wrong sum, then with a file that is there."""
        init = pod(self.of_uri(uri="https://h/x", files=[{"path": "a/m"}]))["initContainers"][0]
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "curl").write_text(
                '#!/bin/sh\ncat >"$0.config"\nwhile [ $# -gt 0 ]; do case $1 in --output) out=$2; shift;; esac; url=$1; shift; done\n'
                'echo "$url" >"$out"\necho "$url" >>"$0.urls"\n'
            )
            (folder / "curl").chmod(0o755)

            def run(target, *files):
                script = init["args"][0]
                path = {"PATH": f"{folder}:/usr/bin:/bin"}
                return subprocess.run(["sh", "-ec", script, "fetch", str(target), *files], env=path, capture_output=True, text=True)

            right = "https://h/x/a;touch pwned"
            self.assertEqual(run(folder / "one", right, "a/m", "").returncode, 0)
            self.assertEqual((folder / "one/a/m").read_text(), right + "\n")
            self.assertEqual(run(folder / "one", right, "a/m", "").returncode, 0)
            self.assertEqual((folder / "curl.urls").read_text().count("\n"), 1, "what is there is not fetched again")
            self.assertNotEqual(run(folder / "two", right, "m", "0" * 64).returncode, 0)
            self.assertFalse(list((folder / "two").iterdir()))
            # What cannot go on begins anew: a server without ranges, and a part that is whole.
            for says in ("exit 33", "echo 416; exit 22", "echo 416"):
                fake = '#!/bin/sh\ncat >/dev/null\nwhile [ $# -gt 0 ]; do case $1 in --continue-at) on=1;; --output) out=$2;; esac; shift; done\n'
                (folder / "curl").write_text(f'{fake}[ -z "$on" ] || {{ {says}; exit; }}\n[ ! -e "$out" ] && echo new >"$out"\n')
                (folder / "three").mkdir(exist_ok=True)
                (folder / "three/m.part").write_text("old")
                self.assertEqual(run(folder / "three", "https://h/x", "m", "").returncode, 0)
                self.assertEqual((folder / "three/m").read_text(), "new\n")
                (folder / "three/m").unlink()
            # Others fail, and the part stays.
            (folder / "curl").write_text("#!/bin/sh\necho 503; exit 22\n")
            (folder / "three/m.part").write_text("old")
            self.assertEqual(run(folder / "three", "https://h/x", "m", "").returncode, 22)
            self.assertEqual((folder / "three/m.part").read_text(), "old")

    def test_a_chat_template_goes_before_the_models(self):
        for template in ("{{ messages }}", "\n   {{ a }}\n b", "\t{{ a }}\r\n{% x %}  \n\n", 'a: "b" # <é\u0085>\n'):
            rendered = render(model__chatTemplate=template)
            self.assertEqual(of(rendered, "ConfigMap", "baton-conductor")["data"]["chat-template.jinja"], template)
        self.assertEqual(flags(of(rendered, "Deployment"))["--chat-template"], "/etc/baton/chat-template.jinja")


class Nodes(unittest.TestCase):
    def test_names_are_stable_and_addresses_are_pods(self):
        for role in NODES:
            workload = node(role)
            self.assertEqual(workload["spec"]["podManagementPolicy"], "Parallel")
            self.assertEqual(flags(workload)["--name"], "$(POD_NAME)")
            self.assertEqual(flags(workload)["--advertise-host"], "$(POD_IP)")
            self.assertEqual(flags(workload)["--conductor"], "http://baton-conductors.serving.svc:7071")
            service = of(render(), "Service", workload["spec"]["serviceName"])["spec"]
            self.assertEqual((service["clusterIP"], service["publishNotReadyAddresses"]), ("None", True))

    def test_conductors_are_found_before_they_are_ready(self):
        service = of(render(), "Service", "baton-conductors")["spec"]
        self.assertEqual((service["clusterIP"], service["publishNotReadyAddresses"]), ("None", True))

    def test_groups_are_workloads_that_differ_in_what_they_say(self):
        for role in NODES:
            block = {
                "replicas": 2,
                "nodeSelector": {"disk": "nvme"},
                "spreadOverHosts": True,
                "groups": {"default": {}, "zone-b": {"replicas": 0, "nodeSelector": {"zone": "b"}, "spreadOverHosts": False}},
            }
            rendered = render({role: block})
            first, second = (of(rendered, "StatefulSet", f"baton-{role}{suffix}") for suffix in ("", "-zone-b"))
            self.assertEqual((first["spec"]["replicas"], second["spec"]["replicas"]), (2, 0))
            self.assertEqual({"disk": "nvme", "zone": "b"}.items() & pod(first)["nodeSelector"].items(), {("disk", "nvme")})
            self.assertLessEqual({"disk": "nvme", "zone": "b"}.items(), pod(second)["nodeSelector"].items())
            self.assertIn("topologySpreadConstraints", pod(first))
            self.assertNotIn("topologySpreadConstraints", pod(second))
            self.assertNotEqual(first["spec"]["selector"], second["spec"]["selector"])
            for kind in ("Service", "ConfigMap", "NetworkPolicy"):
                self.assertTrue(has(rendered, kind, f"baton-{role}-zone-b"), kind)
            self.assertEqual(len([one for one in rendered if one["kind"] == "PodDisruptionBudget"]), 3)

    def test_a_group_replaces_its_roles_volume(self):
        ssd = {"enabled": True, "volume": {"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}}
        groups = {"a": {"ssd": {"volume": {"emptyDir": {"sizeLimit": "1Gi"}}}}, "b": {}}
        for role in NODES:
            rendered = render({role: {"ssd": ssd, "groups": groups}})
            found = volume(of(rendered, "StatefulSet", f"baton-{role}-a"), "ssd")
            self.assertEqual(found, {"name": "ssd", "emptyDir": {"sizeLimit": "1Gi"}})
            self.assertEqual(set(volume(of(rendered, "StatefulSet", f"baton-{role}-b"), "ssd")), {"name", "ephemeral"})

    def test_rdma_has_its_device_and_pins_memory(self):
        for role in NODES:
            one = node(role, rdma={"enabled": True, "resource": "rdma/ib", "count": 2})
            resources = container(one)["resources"]
            self.assertEqual((resources["limits"]["rdma/ib"], resources["requests"]["rdma/ib"]), (2, 2))
            self.assertEqual(container(one)["securityContext"]["capabilities"], {"drop": ["ALL"], "add": ["IPC_LOCK"]})
            self.assertEqual(pod(one)["securityContext"]["runAsUser"], 0)
            self.assertTrue(container(one)["securityContext"]["readOnlyRootFilesystem"])
            one = node(role, rdma={"enabled": True, "runAsRoot": False})
            self.assertEqual(pod(one)["securityContext"]["runAsUser"], 10001)

    def test_hugepages_shared_memory_and_ssd(self):
        for role in NODES:
            one = node(role, hugepages={"enabled": True, "size": "1Gi", "amount": "4Gi"})
            self.assertEqual(container(one)["resources"]["limits"]["hugepages-1Gi"], "4Gi")
            self.assertEqual(volume(one, "hugepages")["emptyDir"], {"medium": "HugePages-1Gi"})
            one = node(role, devShm={"enabled": True, "sizeLimit": "3Gi"})
            self.assertEqual(volume(one, "dev-shm")["emptyDir"], {"medium": "Memory", "sizeLimit": "3Gi"})
            self.assertEqual(mount(one, "dev-shm"), "/dev/shm")
            one = node(role, shm={"enabled": True, "hostPath": "/run/kv"})
            self.assertEqual((volume(one, "shm")["hostPath"]["path"], mount(one, "shm"), flags(one)["--transfer-shm-folder"]), ("/run/kv",) * 3)
            one = node(role, ssd={"enabled": True, "bytes": 1 << 40, "volume": {"emptyDir": {}}})
            self.assertEqual((flags(one)["--ssd-folder"], mount(one, "ssd")), ("/ssd/kv", "/ssd"))
            self.assertIn("ssd_bytes = 1099511627776", of(render({role: {"ssd": {"enabled": True, "bytes": 1 << 40, "volume": {"emptyDir": {}}}}}), "ConfigMap", f"baton-{role}")["data"]["baton.toml"])

    def test_host_network_and_rollouts(self):
        for role in NODES:
            one = node(role, hostNetwork=True, minReadySeconds=3, updateStrategy={"rollingUpdate": {"partition": 2}})
            self.assertEqual((pod(one)["hostNetwork"], pod(one)["dnsPolicy"]), (True, "ClusterFirstWithHostNet"))
            self.assertEqual((one["spec"]["minReadySeconds"], one["spec"]["updateStrategy"]["rollingUpdate"]), (3, {"partition": 2}))
        ports = [port for role in NODES for port in chart.values()[role]["ports"].values()]
        self.assertEqual(len(ports), len(set(ports)), "one machine takes a node of each role with hostNetwork")


class Conductors(unittest.TestCase):
    def test_one_without_etcd_is_replaced_not_doubled(self):
        rendered = render(conductor__replicas=1, etcd__mode="none")
        one = of(rendered, "Deployment")
        self.assertEqual(one["spec"]["strategy"], {"type": "Recreate"})
        self.assertFalse([flag for flag in flags(one) if "etcd" in flag])
        self.assertFalse(has(rendered, "StatefulSet", "baton-etcd"))
        self.assertFalse(has(rendered, "NetworkPolicy", "baton-etcd"))

    def test_bundled_etcd(self):
        rendered = render(etcd__bundled={"replicas": 3, "persistence": {"size": "2Gi", "storageClassName": "s"}})
        etcd = of(rendered, "StatefulSet", "baton-etcd")
        endpoints = ",".join(f"baton-etcd-{n}.baton-etcd.serving.svc:2379" for n in range(3))
        self.assertEqual(flags(of(rendered, "Deployment"))["--etcd"], endpoints)
        self.assertEqual(flags(of(rendered, "Deployment"))["--etcd-prefix"], "/baton/serving/baton")
        self.assertEqual(etcd["spec"]["volumeClaimTemplates"][0]["spec"]["storageClassName"], "s")
        self.assertEqual(len(flags(etcd)["--initial-cluster"].split(",")), 3)
        self.assertTrue(has(rendered, "PodDisruptionBudget", "baton-etcd"))
        small = render(etcd__bundled__persistence__enabled=False)
        self.assertEqual(volume(of(small, "StatefulSet", "baton-etcd"), "data"), {"name": "data", "emptyDir": {}})
        self.assertFalse(has(small, "PodDisruptionBudget", "baton-etcd"))
        placed = render(etcd__bundled={"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}], "affinity": {"x": {}}, "priorityClassName": "p"})
        for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            self.assertIn(key, pod(of(placed, "StatefulSet", "baton-etcd")))
        own = {"podAnnotations": {"a": "b"}, "podSecurityContext": {"runAsUser": 7}, "securityContext": {"runAsGroup": 8}, "resources": {"limits": {"cpu": 1}}}
        etcd = of(render(etcd__bundled=own), "StatefulSet", "baton-etcd")
        self.assertEqual(etcd["spec"]["template"]["metadata"]["annotations"], {"a": "b"})
        self.assertEqual((pod(etcd)["securityContext"]["runAsUser"], pod(etcd)["securityContext"]["fsGroup"]), (7, 10001))
        self.assertEqual((container(etcd)["securityContext"]["runAsGroup"], container(etcd)["resources"]["limits"]), (8, {"cpu": 1, "memory": "1Gi"}))

    def test_limit_of_memory_that_is_not_set_is_the_request_but_a_gibibyte(self):
        quantities = {"128Mi": "1Gi", "1023Mi": "1Gi", "1.5Gi": "1.5Gi", "2G": "2G", "900M": "1Gi", "5368709120": "5368709120", "64k": "1Gi"}
        for request, limit in quantities.items():
            asked = {"resources": {"requests": {"memory": request}}}
            rendered = render(conductor=asked, prefill=asked, decode=asked, etcd__bundled=asked)
            for one in [*chart.roles(rendered), of(rendered, "StatefulSet", "baton-etcd")]:
                with self.subTest(request=request, component=chart.component(one)):
                    self.assertEqual(container(one)["resources"]["limits"]["memory"], limit)
        own = render(conductor__resources={"requests": {"memory": "128Mi"}, "limits": {"memory": "256Mi"}})
        self.assertEqual(container(of(own, "Deployment"))["resources"]["limits"]["memory"], "256Mi")

    def test_external_etcd(self):
        external = {
            "endpoints": ["a:2379", "b:2379"],
            "tls": {"enabled": True, "secret": "s"},
            "user": "u",
            "passwordSecret": {"name": "p", "key": "k"},
        }
        rendered = render(etcd={"mode": "external", "prefix": "/x", "external": external})
        one = of(rendered, "Deployment")
        given = flags(one)
        self.assertEqual((given["--etcd"], given["--etcd-prefix"]), ("a:2379,b:2379", "/x"))
        for flag, key in {"--etcd-ca": "ca.crt", "--etcd-cert": "tls.crt", "--etcd-key": "tls.key"}.items():
            self.assertEqual(given[flag], f"/etcd-tls/{key}")
        self.assertEqual((given["--etcd-user"], given["--etcd-password-file"]), ("u", "/etcd-password/k"))
        self.assertEqual((volume(one, "etcd-tls")["secret"]["secretName"], volume(one, "etcd-password")["secret"]["secretName"]), ("s", "p"))
        self.assertFalse(has(rendered, "StatefulSet", "baton-etcd"))
        external["tls"].update(certKey="")
        given = flags(of(render(etcd={"mode": "external", "external": external}), "Deployment"))
        self.assertFalse({"--etcd-cert", "--etcd-key"} & set(given))

    def test_a_strategy_of_ones_own(self):
        self.assertEqual(of(render(conductor__strategy={"type": "Recreate"}), "Deployment")["spec"]["strategy"], {"type": "Recreate"})


class Network(unittest.TestCase):
    def port_sources(self, policy):
        return {port["port"]: rule.get("from") for rule in policy["spec"]["ingress"] for port in rule["ports"]}

    def components(self, peers):
        return {peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component") for peer in peers if "podSelector" in peer}

    def test_only_clients_ports_are_open(self):
        conductor = self.port_sources(of(render(), "NetworkPolicy", "baton-conductor"))
        self.assertEqual((conductor[8080], conductor[7070]), (None, None))
        self.assertEqual(self.components(conductor[7071]), {"conductor", "prefill", "decode"})
        self.assertEqual(self.components(conductor[9090]), {"conductor", "test", None})
        for role, (listen, transfer, http) in {"prefill": (7100, 7200, 7300), "decode": (7101, 7201, 7301)}.items():
            ports = self.port_sources(of(render(), "NetworkPolicy", f"baton-{role}"))
            self.assertEqual(self.components(ports[listen]), {"conductor", "prefill", "decode"})
            self.assertEqual(self.components(ports[transfer]), {"prefill", "decode"})
            self.assertEqual(ports[http], chart.values()["networkPolicy"]["prometheus"])
        etcd = self.port_sources(of(render(), "NetworkPolicy", "baton-etcd"))
        self.assertEqual((self.components(etcd[2379]), self.components(etcd[2380])), ({"conductor", "etcd"}, {"etcd"}))
        # Everything that listens is covered, and nothing else.
        rendered = render()
        for workload in chart.workloads(rendered):
            policy = self.port_sources(of(rendered, "NetworkPolicy", workload["metadata"]["name"]))
            self.assertEqual(set(policy), {port["containerPort"] for port in container(workload)["ports"]})

    def test_peers_of_ones_own(self):
        rendered = render(networkPolicy={"clients": PEERS, "operators": PEERS, "nodes": PEERS, "prometheus": []})
        conductor = self.port_sources(of(rendered, "NetworkPolicy", "baton-conductor"))
        for port in (8080, 7070, 7071, 9090):
            self.assertIn(PEERS[0], conductor[port])
        self.assertIn("test", self.components(conductor[7070]))
        self.assertNotIn(7300, self.port_sources(of(rendered, "NetworkPolicy", "baton-prefill")))
        self.assertFalse(has(render(networkPolicy__enabled=False), "NetworkPolicy"))

    def test_services_of_each_listener(self):
        rendered = render()
        ports = {"http": 80, "grpc": 7070, "operators": 9090}
        for name, port in ports.items():
            self.assertEqual(of(rendered, "Service", f"baton-{name}")["spec"]["ports"][0]["port"], port)
            self.assertFalse(has(render({"services": {name: {"enabled": False}}}), "Service", f"baton-{name}"))
        self.assertEqual(of(rendered, "Service", "baton-grpc")["spec"]["clusterIP"], "None")
        balancer = {"type": "LoadBalancer", "port": 443, "nodePort": 30443, "annotations": {"a": "b"}, "labels": {"c": "d"}, "loadBalancerClass": "l", "loadBalancerSourceRanges": ["10.0.0.0/8"]}
        for name in ("http", "grpc"):
            service = of(render({"services": {name: balancer}}), "Service", f"baton-{name}")
            self.assertEqual((service["metadata"]["annotations"], service["metadata"]["labels"]["c"]), ({"a": "b"}, "d"))
            spec = service["spec"]
            self.assertEqual((spec["type"], spec["loadBalancerClass"], spec["loadBalancerSourceRanges"]), ("LoadBalancer", "l", ["10.0.0.0/8"]))
            self.assertEqual((spec["ports"][0]["port"], spec["ports"][0]["nodePort"]), (443, 30443))
            self.assertNotIn("clusterIP", spec)
        annotated = render(services__operators__annotations={"a": "b"})
        self.assertEqual(of(annotated, "Service", "baton-operators")["metadata"]["annotations"], {"a": "b"})

    def test_ingress_and_route(self):
        ingress = {"enabled": True, "className": "c", "annotations": {"a": "b"}, "hosts": [{"host": "h", "path": "/x", "pathType": "Exact"}], "tls": [{"hosts": ["h"]}]}
        spec = of(render(ingress=ingress), "Ingress")["spec"]
        self.assertEqual((spec["ingressClassName"], spec["tls"], spec["rules"][0]["host"]), ("c", [{"hosts": ["h"]}], "h"))
        self.assertEqual(spec["rules"][0]["http"]["paths"][0]["backend"], {"service": {"name": "baton-http", "port": {"name": "http"}}})
        route = {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["h"], "annotations": {"a": "b"}, "requestTimeout": "1h"}
        spec = of(render(httpRoute=route), "HTTPRoute")["spec"]
        self.assertEqual((spec["parentRefs"], spec["hostnames"]), ([{"name": "g"}], ["h"]))
        self.assertEqual(spec["rules"][0]["backendRefs"], [{"name": "baton-http", "port": 80}])
        self.assertEqual(spec["rules"][0]["timeouts"], {"request": "1h"})

    def test_other_addresses_and_names(self):
        rendered = render(listenHost="[::]", fullnameOverride="llm", commonLabels={"team": "x"}, conductor__ports__nodes=1234)
        self.assertEqual(flags(of(rendered, "StatefulSet", "llm-decode"))["--listen"], "[::]:7101")
        self.assertEqual(flags(of(rendered, "StatefulSet", "llm-decode"))["--conductor"], "http://llm-conductors.serving.svc:1234")
        for one in rendered:
            self.assertEqual(one["metadata"]["labels"]["team"], "x", one["metadata"]["name"])
        self.assertTrue(has(render(release="r"), "Deployment", "r-baton-conductor"))
        self.assertTrue(has(render(release="r", nameOverride="x"), "Deployment", "r-x-conductor"))


class Strings(unittest.TestCase):
    """What YAML would read as something else stays what it is."""

    TRAPS = ("123", "true", "null", "1e3", "a: b # c", "- x", "{y}")

    def test_values_stay_strings(self):
        for trap in self.TRAPS:
            external = {"endpoints": ["a:2379"], "tls": {"enabled": True, "secret": trap, "caKey": trap, "certKey": trap, "keyKey": trap}}
            external |= {"user": trap, "passwordSecret": {"name": trap, "key": trap}}
            role = {"priorityClassName": trap, "runtimeClassName": trap, "serviceAccount": {"create": False, "name": trap}}
            values = {"model": {"uri": f"pvc://123/{trap}", "name": trap}, "etcd": {"mode": "external", "external": external}}
            rendered = render({**values, "conductor": role, "image": {"pullSecrets": [trap]}}, engine="cpu")
            one = of(rendered, "Deployment")
            for flag, value in {"model": f"/model/{trap}", "served-model-name": trap, "etcd-user": trap, "etcd-ca": f"/etcd-tls/{trap}", "etcd-password-file": f"/etcd-password/{trap}"}.items():
                self.assertEqual(flags(one)[f"--{flag}"], value)
            self.assertEqual(volume(one, "model")["persistentVolumeClaim"]["claimName"], "123")
            self.assertEqual((volume(one, "etcd-tls")["secret"]["secretName"], volume(one, "etcd-password")["secret"]["secretName"]), (trap, trap))
            spec = pod(one)
            self.assertEqual((spec["priorityClassName"], spec["runtimeClassName"], spec["serviceAccountName"], spec["imagePullSecrets"]), (trap, trap, trap, [{"name": trap}]))
            fetched = render({"model": {"uri": "https://h/m#c", "secret": {"name": trap}}}, engine="cpu")
            self.assertEqual(volume(of(fetched, "Deployment"), "token")["secret"]["secretName"], trap)

    def test_names_stay_strings(self):
        groups = {"groups": {name: {} for name in ("true", "no", "on", "null")}}
        monitoring = {"alerts": {"enabled": True}, "podMonitor": {"enabled": True}}
        rendered = render({"prefill": groups, "monitoring": monitoring}, release="true", namespace="123", fullnameOverride="null", nameOverride="1e3")
        for one in rendered:
            self.assertEqual(one["metadata"]["namespace"], "123")
            self.assertTrue(all(isinstance(value, str) for value in one["metadata"]["labels"].values()), one["metadata"])
        labels = of(rendered, "StatefulSet", "null-prefill-true")["spec"]["selector"]["matchLabels"]
        self.assertEqual((labels["baton/group"], labels["app.kubernetes.io/instance"], labels["app.kubernetes.io/name"]), ("true", "true", "1e3"))
        self.assertEqual(of(rendered, "PrometheusRule")["spec"]["groups"][0]["name"], "123.null")
        endpoint = of(rendered, "PodMonitor", "null-nodes")["spec"]["podMetricsEndpoints"][0]
        self.assertEqual(endpoint["relabelings"][0]["replacement"], "null")

    def test_large_numbers_stay_numbers(self):
        block = {"minReadySeconds": 1000000, "shm": {"enabled": True, "hostPath": "/run/{a}#"}, "autoscaling": {"enabled": True, "maxReplicas": 1000000}}
        values = {"decode": block, "monitoring": {"prometheusAddress": "http://p"}}
        one = of(render(values), "StatefulSet", "baton-decode")
        self.assertEqual((volume(one, "shm")["hostPath"]["path"], mount(one, "shm"), flags(one)["--transfer-shm-folder"]), ("/run/{a}#",) * 3)
        text = chart.text({"engine": "mock", **values})
        for key in ("minReadySeconds", "maxReplicaCount"):
            self.assertIn(f"{key}: 1000000\n", text)
        toml = of(render(conductor__settings={"ttft_slo_ms": 1e20, "tbt_slo_ms": 1e-5, "max_prompt_bytes": 1 << 52}), "ConfigMap", "baton-conductor")["data"]["baton.toml"]
        settings = tomllib.loads(toml)
        self.assertEqual((settings["ttft_slo_ms"], settings["tbt_slo_ms"], settings["max_prompt_bytes"]), (1e20, 1e-5, 1 << 52))


class Rest(unittest.TestCase):
    def test_the_test_pod_asks_nodes_and_clients(self):
        rendered = render(tests={"prompt": "--hi", "timeoutSeconds": 9})
        spec = of(rendered, "Pod")["spec"]
        self.assertEqual((spec["activeDeadlineSeconds"], spec["containers"][0]["args"][-1]), (9, "--hi"))
        self.assertIn("--conductor=http://baton-grpc.serving.svc:7070", spec["containers"][0]["args"])
        self.assertEqual(spec["initContainers"][0]["args"][1:], ["nodes", "http://baton-conductors.serving.svc:9090", "decode", "prefill"])
        self.assertEqual(spec["restartPolicy"], "OnFailure")
        self.assertEqual(of(rendered, "Pod")["metadata"]["annotations"]["helm.sh/hook"], "test")
        for prefill, wanted in (({"replicas": 0}, False), ({"replicas": 0, "groups": {"a": {"replicas": 1}}}, True)):
            self.assertEqual("prefill" in of(render(prefill=prefill), "Pod")["spec"]["initContainers"][0]["args"], wanted)
        own = {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}], "resources": {"limits": {"cpu": 1}}, "podSecurityContext": {"runAsUser": 7}, "securityContext": {"runAsGroup": 8}}
        spec = of(render(tests=own), "Pod")["spec"]
        self.assertEqual((spec["nodeSelector"]["a"], spec["tolerations"], spec["securityContext"]["runAsUser"]), ("b", [{"key": "k"}], 7))
        for one in (*spec["initContainers"], *spec["containers"]):
            self.assertEqual((one["resources"], one["securityContext"]["runAsGroup"]), (own["resources"], 8))
        other = of(render(services__grpc={"headless": False, "port": 99}), "Pod")["spec"]["containers"][0]["args"]
        self.assertIn("--conductor=http://baton-grpc.serving.svc:99", other)
        other = of(render(services__grpc__enabled=False), "Pod")["spec"]["containers"][0]["args"]
        self.assertIn("--conductor=http://baton-conductors.serving.svc:7070", other)

    def test_the_test_pod_waits_for_a_node_of_each_role(self):
        """With a `baton` that knows a node more at each call, and a `sleep` that does not."""
        arguments = of(render(), "Pod")["spec"]["initContainers"][0]["args"]
        table = "NAME      ROLE     STATE    RUNNING\n"
        says = ["", "no node has registered\n", f"{table}p-0  prefill  ready    0\n", f"{table}d-0  decode  suspect  0\n"]
        says += [f"{table}d-0  decode   ready    0\n", f"{table}d-0  decode   ready    0\np-0  prefill  ready    0\n"]
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for number, text in enumerate(says):
                (folder / f"say{number}").write_text(text)
            checks = 'case $* in *--check*) echo checked; exit 7;; esac\n'
            counts = 'n=$(cat "$0.n" 2>/dev/null || echo 0)\necho $((n + 1)) >"$0.n"\n[ "$n" != 0 ] || exit 1\n'
            (folder / "baton").write_text(f'#!/bin/sh\n{checks}{counts}cat "{folder}/say$n"\n')
            (folder / "sleep").write_text("#!/bin/sh\n")
            for name in ("baton", "sleep"):
                (folder / name).chmod(0o755)
            done = subprocess.run(["sh", "-ec", *arguments], env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=20)
            self.assertEqual((done.returncode, (folder / "baton.n").read_text()), (7, f"{len(says)}\n"), done.stderr)
            self.assertTrue(done.stdout.endswith(f"{says[-1]}checked\n"), done.stdout)

    def test_extra_objects_are_templates(self):
        extra = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "{{ .Release.Name }}-x"}}
        self.assertTrue(has(render(extraObjects=[extra]), "Secret", "baton-x"))

    def test_notes_say_how_to_reach_it(self):
        """`helm template` leaves the notes out: here they are an object."""
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder, "baton")
            shutil.copytree(chart.CHART, copy)
            notes = (copy / "templates/NOTES.txt").read_text()
            (copy / "templates/_notes.tpl").write_text('{{- define "notes" -}}\n' + notes + "{{- end -}}\n")
            (copy / "templates/notes.yaml").write_text('kind: Notes\nmetadata: {name: x}\ntext: |\n  {{- include "notes" . | nindent 2 }}\n')

            def text(**paths):
                return of(render(chart=copy, **paths), "Notes")["text"]

            self.assertIn("port-forward svc/baton-http 8080:80", text())
            self.assertIn("exec deploy/baton-conductor -- baton nodes", text())
            self.assertIn("answers nonsense", text())
            self.assertIn("https://h/v1/models", text(ingress={"enabled": True, "hosts": [{"host": "h"}], "tls": [{}]}))
            self.assertIn("http://r/v1/models", text(httpRoute={"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["r"]}))
            self.assertIn("single point of failure", text(conductor__replicas=1, etcd__mode="none"))
            self.assertIn("can drain nodes", text(networkPolicy__enabled=False))
            self.assertIn("services.http.type is LoadBalancer", text(services__http__type="LoadBalancer"))

    def test_the_reference_of_values_is_up_to_date(self):
        page = (chart.CHART / "README.md").read_text()
        self.assertEqual(page, values_reference.reference(), "UPDATE=1 scripts/test-helm.sh writes it anew")
