#!/usr/bin/env python3
"""Calls the service Cluster, as an operator does: lists nodes, shows their load, explains a placement, drains a node. Needs grpcio and grpcio-tools."""

import argparse
import sys
import time

import grpc
from generate import CONDUCTOR, EXIT_STATUS, stubs

# Longest wait for an answer.
SECONDS = 30


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conductor", metavar="ADDR", default=CONDUCTOR, help="gRPC port of a conductor, or that of its --operators [%(default)s]")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("nodes", help="list the nodes: state and load")
    commands.add_parser("load", help="show the queued work of each node, and the goodput of the last minute")
    commands.add_parser("explain", help="explain the placement that a prompt would get now").add_argument("prompt")
    commands.add_parser("drain", help="drain a node, and wait until nothing is left there").add_argument("node")
    commands.add_parser("undrain", help="let a drained node accept requests again").add_argument("node")
    return parser.parse_args()


def nodes(pb, cluster, _):
    for node in cluster.ListNodes(pb.ListNodesRequest(), timeout=SECONDS).nodes:
        info, load = node.info, node.load
        print(f"{info.name}: {info.role}, {node.state}, {load.running} running, {load.waiting} waiting, {load.blocks_used} of {load.blocks_total} blocks used")


def load(pb, cluster, _):
    answer = cluster.ClusterLoad(pb.ClusterLoadRequest(), timeout=SECONDS)
    for node in answer.prefill:
        print(f"{node.node}: {node.pending} prompts pending, {node.queue_s:.3f} s of work queued")
    for node in answer.decode:
        tbt = f"{1000 * node.tbt_s:.1f} ms" if node.HasField("tbt_s") else "nothing to predict"
        print(f"{node.node}: {node.sequences} sequences, time between tokens {tbt}")
    print(f"goodput: {answer.goodput.within} of {answer.goodput.ended} requests within their objectives, in {answer.goodput.window_s:.0f} s")


def explain(pb, cluster, options):
    request = {"messages": {"messages": [{"role": "user", "content": options.prompt}]}}
    answer = cluster.Explain(pb.ExplainRequest(request=request), timeout=SECONDS)
    for node in [*answer.prefill, *answer.decode]:
        print(f"{node.node}: {node.verdict}")
    if answer.WhichOneof("decision") == "placed":
        placed = answer.placed
        print(f"{answer.prompt_tokens} tokens, {placed.cached_tokens} of them cached: the first token after {placed.ttft_s:.3f} s")
    else:
        print(f"rejected: {answer.rejected.message}")


def is_empty(node):
    load = node.load
    return node.state == "drained" or load.draining and not (node.placed or load.running or load.waiting or load.blocks_used)


def drain(pb, cluster, options):
    cluster.Drain(pb.DrainRequest(node=options.node), timeout=SECONDS)
    while True:
        listed = cluster.ListNodes(pb.ListNodesRequest(), timeout=SECONDS).nodes
        if all(is_empty(node) for node in listed if node.info.name == options.node):
            print(f"{options.node}: drained")
            return
        time.sleep(0.2)


def undrain(pb, cluster, options):
    cluster.Undrain(pb.UndrainRequest(node=options.node), timeout=SECONDS)
    print(f"{options.node}: accepts requests")


def main():
    options = arguments()
    pb, pb_grpc = stubs("cluster")
    command = {"nodes": nodes, "load": load, "explain": explain, "drain": drain, "undrain": undrain}[options.command]
    with grpc.insecure_channel(options.conductor.removeprefix("http://")) as channel:
        try:
            command(pb, pb_grpc.ClusterStub(channel), options)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return EXIT_STATUS.get(error.code(), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
