"""The operator's example: grpc_cluster.py HTTP-HOST:PORT GRPC-HOST:PORT, of a mock cluster of 1 + 1."""

import subprocess
import sys
from pathlib import Path

import grpc

from common import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
sys.path.insert(0, str(EXAMPLES))
from generate import stubs

_, _, CONDUCTOR = sys.argv
pb, pb_grpc = stubs("cluster")
cluster = pb_grpc.ClusterStub(grpc.insecure_channel(CONDUCTOR))


def operate(*words, status=0):
    command = [sys.executable, EXAMPLES / "operate.py", "--conductor", CONDUCTOR, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, f"{words}: {done.returncode}: {done.stderr}"
    return (done.stderr if status else done.stdout).splitlines()


def state(name):
    [node] = [node for node in cluster.ListNodes(pb.ListNodesRequest()).nodes if node.info.name == name]
    return node.state


def nodes_are_listed():
    lines = sorted(operate("nodes"))
    assert [line.split(",")[:2] for line in lines] == [["decode-0: decode", " ready"], ["prefill-0: prefill", " ready"]], lines


def load_is_shown():
    prefill, decode, goodput = operate("load")
    assert prefill == "prefill-0: 0 prompts pending, 0.000 s of work queued", prefill
    assert decode.startswith("decode-0: 0 sequences") and goodput.startswith("goodput: "), (decode, goodput)


def placement_is_explained():
    *nodes, decision = operate("explain", "Hi")
    # A decode node may compute a short prompt itself.
    assert nodes in (["prefill-0: chosen", "decode-0: chosen"], ["prefill-0: not chosen", "decode-0: chosen"]), nodes
    assert " tokens, 0 of them cached: the first token after " in decision, decision


def node_is_drained_and_undrained():
    assert operate("drain", "decode-0") == ["decode-0: drained"]
    assert state("decode-0") in ("draining", "drained")
    assert operate("explain", "Hi")[-1].startswith("rejected: ")
    assert operate("undrain", "decode-0") == ["decode-0: accepts requests"]


def unknown_node_is_refused_by_name():
    [error] = operate("drain", "missing-0", status=1)
    assert "missing-0" in error, error


run(nodes_are_listed, load_is_shown, placement_is_explained, node_is_drained_and_undrained, unknown_node_is_refused_by_name)
