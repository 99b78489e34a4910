"""A pod's namespaces of network, host name and System V IPC, which its containers share, and its cable to the bridge."""

import subprocess

BRIDGE = "bpod0"
# Inside a network namespace of the tests' own, so it meets no other.
GATEWAY = "10.244.0.1"


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def make_bridge():
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{GATEWAY}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


class Sandbox:
    """Lives as long as the process that holds its namespaces: Kubernetes' pause container."""

    def __init__(self, name, number):
        self.address = f"10.244.{number >> 8}.{number & 255}"
        self.cable = f"bpod{number}"
        script = 'echo "$0" >/proc/sys/kernel/hostname && echo there && exec sleep infinity'
        # Its input is empty and its output is read to the end of the first line: then the namespaces are there.
        self.pause = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "sh", "-c", script, name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert self.pause.stdout.readline() == b"there\n", f"no namespaces for {name}"
        pid = str(self.pause.pid)
        run("ip", "link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", pid)
        run("ip", "link", "set", self.cable, "master", BRIDGE, "up")
        inside = f"ip link set lo up && ip address add {self.address}/16 dev eth0 && ip link set eth0 up && ip route add default via {GATEWAY}"
        run("nsenter", "--target", pid, "--net", "sh", "-c", inside)

    def enter(self):
        """Words before a command that is to run in here."""
        return ["nsenter", "--target", str(self.pause.pid), "--net", "--uts", "--ipc", "--"]

    def remove(self):
        self.pause.kill()
        self.pause.wait()
        self.pause.stdout.close()
        # By itself it would go with the last connection of its namespace, which may take minutes.
        subprocess.run(["ip", "link", "delete", self.cable], capture_output=True, check=False)
