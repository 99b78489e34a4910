"""gRPC with stubs that Google's generator makes: grpc_generate.py HTTP-HOST:PORT GRPC-HOST:PORT, of a cluster whose chat template knows tools."""

import argparse
import json
import sys
import time
from pathlib import Path

import grpc

from common import QUESTION, TOOLS, checked, raises, run, running, schema, wait_for

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "python"))
from generate import stubs

parser = argparse.ArgumentParser()
parser.add_argument("http")
parser.add_argument("grpc")
ARGUMENTS = parser.parse_args()
pb, pb_grpc = stubs()
inference = pb_grpc.InferenceStub(grpc.insecure_channel(ARGUMENTS.grpc))
FUNCTIONS = [json.dumps({"type": "function", "function": {"name": tool.__name__, "parameters": schema(tool)}}) for tool in TOOLS]


def asked(content=QUESTION, sampling=None, n=0, **prompt):
    messages = pb.MessagesPrompt(messages=[pb.ChatMessage(role="user", content=content)], **prompt)
    return pb.GenerateRequest(messages=messages, sampling=pb.SamplingParameters(**{"max_tokens": 8, "seed": 7, **(sampling or {})}), n=n)


ENDLESS = asked(sampling={"max_tokens": 4000, "ignore_eos": True})


def events(request, **options):
    return [(response.WhichOneof("event"), response) for response in inference.Generate(request, **options)]


def code(request, **options):
    return raises(grpc.RpcError, lambda: events(request, **options)).code()


def text(answer, completion=0):
    return "".join(response.delta.text for kind, response in answer if kind == "delta" and response.completion == completion)


def models():
    [model] = inference.ListModels(pb.ListModelsRequest()).models
    assert model.name and model.context_length > 1000 and (model.prefill_nodes, model.decode_nodes) == (1, 1)


def order_of_events():
    answer = events(asked(sampling={"logprobs": 2, "prompt_logprobs": 0}))
    kinds = [kind for kind, _ in answer]
    assert kinds[0] == "accepted" and kinds[-1] == "finished" and kinds.count("prompt_logprobs") == 1, kinds
    accepted, finished = answer[0][1].accepted, answer[-1][1].finished
    deltas = [response.delta for kind, response in answer if kind == "delta"]
    assert accepted.seed == 7 and len(accepted.request_id) == 32 and finished.usage.prompt_tokens == len(accepted.prompt_token_ids)
    tokens = 0
    for delta in deltas:
        assert delta.index == tokens and len(delta.logprobs) == len(delta.token_ids)
        tokens += len(delta.token_ids)
    assert tokens == finished.usage.completion_tokens and finished.finish_reason in ("stop", "length")
    assert finished.timeline.total_s >= finished.timeline.ttft_s > 0


def several_answers():
    answer = events(asked(sampling={"temperature": 1}, n=3))
    texts = [text(events(asked(sampling={"temperature": 1, "seed": seed}))) for seed in (7, 8, 9)]
    assert [text(answer, completion) for completion in range(3)] == texts
    assert sorted(response.completion for kind, response in answer if kind == "finished") == [0, 1, 2]


def tools():
    answer = events(asked(sampling={"max_tokens": 300}, tools=FUNCTIONS, tool_choice=pb.ToolChoice(required=True)))
    calls = {}
    for call in (call for kind, response in answer if kind == "delta" for call in response.delta.tool_calls):
        name, arguments = calls.get(call.index, (call.name, ""))
        assert (call.index in calls) != bool(call.id and call.name), "id and name come once, with the first piece"
        calls[call.index] = (name, arguments + call.arguments)
    assert calls and all(checked(*call) for call in calls.values()) and answer[-1][1].finished.finish_reason == "tool_calls"


def structured_output():
    for form, is_right in [
        ({"choices": pb.Choices(texts=["red", "blue"])}, lambda said: said in ("red", "blue")),
        ({"regex": "[0-9]{3}"}, lambda said: len(said) == 3 and said.isdigit()),
        ({"json_schema": '{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}'}, lambda said: set(json.loads(said)) <= {1, 2}),
        ({"grammar": 'start: "a" "b"+ "."'}, lambda said: said.startswith("ab") and said.endswith(".")),
    ]:
        answer = events(asked(sampling={"max_tokens": 60, "structured_output": pb.StructuredOutput(**form)}))
        assert answer[-1][1].finished.finish_reason == "length" or is_right(text(answer)), (form, text(answer))


def errors():
    assert code(asked(sampling={"temperature": -1})) == grpc.StatusCode.INVALID_ARGUMENT
    assert code(pb.GenerateRequest()) == grpc.StatusCode.INVALID_ARGUMENT
    assert code(pb.GenerateRequest(model="gpt", text=pb.TextPrompt(text="x"))) == grpc.StatusCode.NOT_FOUND
    assert code(asked(sampling={"structured_output": pb.StructuredOutput(regex="(")})) == grpc.StatusCode.INVALID_ARGUMENT
    unknown = raises(grpc.RpcError, lambda: inference.Abort(pb.AbortRequest(request_id="0" * 32)))
    assert unknown.code() == grpc.StatusCode.NOT_FOUND


def an_objective_that_idle_nodes_miss_has_no_retry_time():
    refused = asked()
    refused.slo.ttft_ms = 0.001
    error = raises(grpc.RpcError, lambda: events(refused))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "even on idle nodes" in error.details(), error
    assert "retry-after" not in dict(error.trailing_metadata()), error


def is_idle():
    return running(ARGUMENTS.http) == 0


def a_cancelled_stream_ends_its_request():
    stream = inference.Generate(ENDLESS)
    for response in stream:
        if response.WhichOneof("event") == "delta":
            break
    assert not is_idle()
    stream.cancel()
    wait_for("end of the request", is_idle)


def a_deadline_ends_its_request():
    began = time.monotonic()
    assert code(ENDLESS, timeout=0.5) == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0.5 <= time.monotonic() - began < 2
    wait_for("end of the request", is_idle)


def another_stream_aborts_a_request():
    stream = inference.Generate(ENDLESS)
    inference.Abort(pb.AbortRequest(request_id=next(stream).accepted.request_id))
    assert raises(grpc.RpcError, lambda: list(stream)).code() == grpc.StatusCode.CANCELLED
    wait_for("end of the request", is_idle)


def an_idempotency_key_runs_once():
    keyed = pb.GenerateRequest()
    keyed.CopyFrom(ENDLESS)
    keyed.idempotency_key = "mine"
    stream = inference.Generate(keyed)
    request = next(stream).accepted.request_id
    stream.cancel()
    again = inference.Generate(keyed)
    assert next(again).accepted.request_id == request, "the same one"
    keyed.n = 2
    assert code(keyed) == grpc.StatusCode.ALREADY_EXISTS
    inference.Abort(pb.AbortRequest(request_id=request))
    assert raises(grpc.RpcError, lambda: list(again)).code() == grpc.StatusCode.CANCELLED
    wait_for("end of the request", is_idle)


run(
    models,
    order_of_events,
    several_answers,
    tools,
    structured_output,
    errors,
    an_objective_that_idle_nodes_miss_has_no_retry_time,
    a_cancelled_stream_ends_its_request,
    a_deadline_ends_its_request,
    another_stream_aborts_a_request,
    an_idempotency_key_runs_once,
)
