#!/usr/bin/env python3
"""Streams an answer over gRPC; with several conductors, from another one if the first is lost. Needs grpcio and grpcio-tools: the stubs are made from proto/ at each start."""

import argparse
import importlib
import os
import sys
import tempfile
import uuid
from pathlib import Path

import grpc
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parents[2] / "proto" / "proto"
CONDUCTOR = os.environ.get("BATON_CONDUCTOR", "127.0.0.1:7070")
# What another conductor may answer: this one cannot be reached, has died, or goes down.
ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
EXIT_STATUS = {grpc.StatusCode.INVALID_ARGUMENT: 2, grpc.StatusCode.RESOURCE_EXHAUSTED: 3, grpc.StatusCode.UNAVAILABLE: 4}


def stubs(name="inference"):
    """The modules of baton/v1/NAME.proto: messages, and the service's stub."""
    files = [str(file.relative_to(PROTO)) for file in PROTO.rglob("*.proto")]
    with tempfile.TemporaryDirectory() as folder:
        failed = protoc.main(["protoc", f"--proto_path={PROTO}", f"--python_out={folder}", f"--grpc_python_out={folder}", *files])
        if failed:
            raise RuntimeError(f"no stubs could be made of {PROTO}")
        sys.path.insert(0, folder)
        modules = [importlib.import_module(f"baton.v1.{name}_{kind}") for kind in ("pb2", "pb2_grpc")]
        sys.path.remove(folder)
        return modules


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", help="a question to the model; with --raw, a text to go on with")
    parser.add_argument("--conductor", metavar="ADDR", default=CONDUCTOR, help="gRPC ports of the conductors, with commas, with or without http:// [%(default)s]")
    parser.add_argument("--raw", action="store_true", help="without the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--deadline", metavar="SECONDS", type=float, help="of the whole answer")
    parser.add_argument("--cancel-after", metavar="TOKENS", type=int, help="close the stream once so many tokens came")
    return parser.parse_args()


def request(pb, arguments):
    sampling = pb.SamplingParameters(max_tokens=arguments.max_tokens, temperature=arguments.temperature)
    if arguments.raw:
        return pb.GenerateRequest(text=pb.TextPrompt(text=arguments.prompt), sampling=sampling)
    messages = [pb.ChatMessage(role="system", content=arguments.system)] if arguments.system else []
    messages.append(pb.ChatMessage(role="user", content=arguments.prompt))
    return pb.GenerateRequest(messages=pb.MessagesPrompt(messages=messages), sampling=sampling)


class Shown:
    """What is on the screen. Another conductor begins with the first token again, and only what comes after this is new."""

    def __init__(self, cancel_after):
        self.text = ""
        self.tokens = 0
        self.cancel_after = cancel_after

    def show(self, stream):
        text, tokens = "", 0
        for response in stream:
            event = response.WhichOneof("event")
            if event == "accepted":
                print(f"request {response.accepted.request_id}", file=sys.stderr)
            elif event == "delta":
                text += response.delta.text
                tokens += len(response.delta.token_ids)
                if len(text) > len(self.text):
                    print(text[len(self.text) :], end="", flush=True)
                    self.text, self.tokens = text, tokens
                if self.cancel_after is not None and self.tokens >= self.cancel_after:
                    # The conductor ends the request, and its blocks are free again.
                    stream.cancel()
                    print(f"\ncancelled after {self.tokens} tokens", file=sys.stderr)
                    return
            elif event == "finished":
                finished = response.finished
                print(f"\n{finished.finish_reason}: {finished.usage.completion_tokens} tokens, the first after {finished.timeline.ttft_s:.3f} s", file=sys.stderr)


def ask(pb_grpc, conductor, asked, options, shown):
    """Shows the answer of one conductor; the error if there is none."""
    # One that hangs is given up after 10 s without an answer to a ping.
    alive = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]
    with grpc.insecure_channel(conductor, options=alive) as channel:
        stream = pb_grpc.InferenceStub(channel).Generate(asked, timeout=options.deadline)
        try:
            shown.show(stream)
        except grpc.RpcError as error:
            return error
    return None


def main():
    options = arguments()
    pb, pb_grpc = stubs()
    conductors = [address.strip().removeprefix("http://") for address in options.conductor.split(",")]
    asked = request(pb, options)
    # Another conductor gives the same tokens for the same key.
    asked.idempotency_key = str(uuid.uuid4())
    shown = Shown(options.cancel_after)
    for conductor in conductors:
        error = ask(pb_grpc, conductor, asked, options, shown)
        if error is None:
            return 0
        if error.code() not in ELSEWHERE:
            break
    retry_after = dict(error.trailing_metadata() or ()).get("retry-after")
    hint = f"; retry after {retry_after} s" if retry_after else ""
    print(f"{chr(10) if shown.text else ''}{error.code().name}: {error.details()}{hint}", file=sys.stderr)
    return EXIT_STATUS.get(error.code(), 1)


if __name__ == "__main__":
    sys.exit(main())
