"""What a container gets of its pod's description: variables, command, files and rights."""

import os
import pathlib
import re
import shutil

# Left out, each for a reason. Any other field that is not carried out is refused.
LEFT_OUT = {
    "pod": {
        "serviceAccountName", "imagePullSecrets",  # nothing asks an API server or a registry
        "topologySpreadConstraints", "nodeSelector", "tolerations", "affinity", "priorityClassName",  # one machine
        "activeDeadlineSeconds",  # the tests have deadlines of their own
    },
    "container": {"imagePullPolicy", "resources"},  # no registry, no limits
    "security": {"seccompProfile", "fsGroupChangePolicy"},
}  # fmt: skip
CARRIED_OUT = {
    "pod": {
        "containers", "initContainers", "volumes", "securityContext", "terminationGracePeriodSeconds", "restartPolicy",
        "automountServiceAccountToken", "enableServiceLinks",
    },
    "container": {
        "name", "image", "command", "args", "env", "ports", "volumeMounts", "securityContext",
        "startupProbe", "livenessProbe", "readinessProbe",
    },
    "security": {
        "runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "allowPrivilegeEscalation", "readOnlyRootFilesystem",
        "capabilities",
    },
}  # fmt: skip
# What containerd leaves a container that drops nothing.
CAPABILITIES = (
    "chown dac_override fsetid fowner mknod net_raw setgid setuid setfcap setpcap net_bind_service sys_chroot kill audit_write"
).split()
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Unsupported(Exception):
    """The chart renders something that these pods cannot do."""


def only(given, allowed, where):
    unknown = set(given) - set(allowed)
    if unknown:
        raise Unsupported(f"{where}: {', '.join(sorted(unknown))}")


def check(pod):
    """Refuses what would be passed over."""
    only(pod, CARRIED_OUT["pod"] | LEFT_OUT["pod"], "pod")
    # Else a pod would have a token, and variables for each Service.
    if pod.get("automountServiceAccountToken", True) or pod.get("enableServiceLinks", True):
        raise Unsupported("a token, or variables of Services")
    contexts = [pod.get("securityContext", {})]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        only(container, CARRIED_OUT["container"] | LEFT_OUT["container"], f"container {container['name']}")
        contexts.append(container.get("securityContext", {}))
    for context in contexts:
        only(context, CARRIED_OUT["security"] | LEFT_OUT["security"], "securityContext")


def expand(text, variables):
    """`$(NAME)` is a variable's value, and `$$` is `$`. An unknown name stays, as the kubelet leaves it."""

    def one(match):
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", one, text)


def environment(container, pod):
    """The variables of a container."""
    fields = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "status.podIP": pod.address,
    }
    variables = {"PATH": PATH, "HOSTNAME": pod.name}
    for one in container.get("env", []):
        if "value" in one:
            variables[one["name"]] = expand(one["value"], variables)
            continue
        source = one["valueFrom"]
        only(source, {"fieldRef", "secretKeyRef", "configMapKeyRef"}, f"variable {one['name']}")
        if "fieldRef" in source:
            variables[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
        else:
            kind, ref = ("Secret", source["secretKeyRef"]) if "secretKeyRef" in source else ("ConfigMap", source["configMapKeyRef"])
            variables[one["name"]] = pod.cluster.data(kind, ref["name"])[ref["key"]]
    return variables


def command(container, image, variables):
    """`command` goes before the image's ENTRYPOINT, and then its CMD does not count; `args` before its CMD."""
    first = container.get("command") or list(image.entrypoint)
    rest = container.get("args") or ([] if container.get("command") else list(image.command))
    return [expand(word, variables) for word in [*first, *rest]]


def security(container, pod_spec):
    """The container's security context over the pod's."""
    return {**pod_spec.get("securityContext", {}), **container.get("securityContext", {})}


def rights(context, image):
    """Arguments of setpriv: user, groups, capabilities, and whether programs may give more."""
    user = context.get("runAsUser", image.user[0])
    group = context.get("runAsGroup", image.user[1])
    if context.get("runAsNonRoot") and user == 0:
        raise Unsupported("runAsNonRoot, but the user is 0")
    changes = context.get("capabilities", {})
    kept = set() if "ALL" in changes.get("drop", []) else set(CAPABILITIES)
    kept -= {name.lower() for name in changes.get("drop", [])}
    kept |= {name.lower() for name in changes.get("add", [])}
    groups = ",".join(str(one) for one in dict.fromkeys([group, context.get("fsGroup", group)]))
    bounding = ",".join(["-all", *(f"+{name}" for name in sorted(kept))])
    made = [f"--reuid={user}", f"--regid={group}", f"--groups={groups}", f"--bounding-set={bounding}", "--inh-caps=-all"]
    if not context.get("allowPrivilegeEscalation", True):
        made.append("--no-new-privs")
    return made


def give_to_group(folder, group):
    """What fsGroup does to a volume that it owns."""
    if group is not None:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))


def write_files(folder, data, mode, group):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in data.items():
        # A new file each time: what is mounted elsewhere does not change in part.
        new = folder / f".{name}"
        new.write_text(text)
        new.chmod(mode)
        if group is not None:
            os.chown(new, -1, group)
        new.rename(folder / name)


def volume(one, pod):
    """The folder that a volume is, and whether it is read-only."""
    folder = pod.folder / "volumes" / one["name"]
    group = pod.spec.get("securityContext", {}).get("fsGroup")
    only(one, {"name", "configMap", "secret", "emptyDir", "persistentVolumeClaim", "hostPath"}, f"volume {one['name']}")
    if "configMap" in one:
        only(one["configMap"], {"name"}, "configMap")
        write_files(folder, pod.cluster.data("ConfigMap", one["configMap"]["name"]), 0o644, group)
        return folder, True
    if "secret" in one:
        secret = one["secret"]
        data = pod.cluster.data("Secret", secret["secretName"])
        if "items" in secret:
            data = {item["path"]: data[item["key"]] for item in secret["items"]}
        write_files(folder, data, secret.get("defaultMode", 0o644), group)
        return folder, True
    if "persistentVolumeClaim" in one:
        claim = one["persistentVolumeClaim"]
        folder = pod.cluster.claim(claim["claimName"])
        if not claim.get("readOnly", False):
            give_to_group(folder, group)
        return folder, claim.get("readOnly", False)
    if "hostPath" in one:
        folder = pathlib.Path(one["hostPath"]["path"])
        if one["hostPath"].get("type") == "Directory" and not folder.is_dir():
            raise Unsupported(f"hostPath {folder}: no such folder")
        return folder, False
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        give_to_group(folder, group)
    return folder, False


def mounts(container, pod):
    """Where each volume is mounted. Files of ConfigMaps and Secrets are those of now."""
    volumes = {one["name"]: one for one in pod.volumes}
    made = []
    for one in container.get("volumeMounts", []):
        only(one, {"name", "mountPath", "readOnly"}, f"mount {one['name']}")
        folder, is_read_only = volume(volumes[one["name"]], pod)
        made.append({"source": str(folder), "path": one["mountPath"], "read_only": is_read_only or one.get("readOnly", False)})
    return made


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)
