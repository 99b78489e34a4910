#!/usr/bin/env python3
"""Streams an answer over gRPC. Needs grpcio and grpcio-tools: the stubs are made from proto/ at each start."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import grpc
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parents[2] / "proto" / "proto"
EXIT_STATUS = {grpc.StatusCode.INVALID_ARGUMENT: 2, grpc.StatusCode.RESOURCE_EXHAUSTED: 3, grpc.StatusCode.UNAVAILABLE: 4}


def stubs():
    """The modules of baton/v1/inference.proto: messages, and the service's stub."""
    with tempfile.TemporaryDirectory() as folder:
        failed = protoc.main(["protoc", f"--proto_path={PROTO}", f"--python_out={folder}", f"--grpc_python_out={folder}", "baton/v1/inference.proto"])
        if failed:
            raise RuntimeError(f"no stubs could be made of {PROTO}")
        sys.path.insert(0, folder)
        from baton.v1 import inference_pb2, inference_pb2_grpc

        sys.path.remove(folder)
        return inference_pb2, inference_pb2_grpc


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", help="a question to the model; with --raw, a text to go on with")
    conductor = os.environ.get("BATON_CONDUCTOR", "127.0.0.1:7070")
    parser.add_argument("--conductor", metavar="ADDR", default=conductor, help="its gRPC port, with or without http:// [%(default)s]")
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


def show(stream, cancel_after):
    tokens = 0
    for response in stream:
        event = response.WhichOneof("event")
        if event == "accepted":
            print(f"request {response.accepted.request_id}", file=sys.stderr)
        elif event == "delta":
            print(response.delta.text, end="", flush=True)
            tokens += len(response.delta.token_ids)
            if cancel_after is not None and tokens >= cancel_after:
                # The conductor ends the request, and its blocks are free again.
                stream.cancel()
                print(f"\ncancelled after {tokens} tokens", file=sys.stderr)
                return
        elif event == "finished":
            finished = response.finished
            print(f"\n{finished.finish_reason}: {finished.usage.completion_tokens} tokens, the first after {finished.timeline.ttft_s:.3f} s", file=sys.stderr)


def main():
    options = arguments()
    pb, pb_grpc = stubs()
    with grpc.insecure_channel(options.conductor.removeprefix("http://")) as channel:
        stream = pb_grpc.InferenceStub(channel).Generate(request(pb, options), timeout=options.deadline)
        try:
            show(stream, options.cancel_after)
        except grpc.RpcError as error:
            retry_after = dict(error.trailing_metadata() or ()).get("retry-after")
            hint = f"; come again after {retry_after} s" if retry_after else ""
            print(f"{error.code().name}: {error.details()}{hint}", file=sys.stderr)
            return EXIT_STATUS.get(error.code(), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
