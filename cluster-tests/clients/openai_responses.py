"""OpenAI's client and responses: openai_responses.py HOST:PORT, of a cluster whose chat template knows tools."""

import contextlib
from typing import Literal

import openai
from pydantic import BaseModel

from common import QUESTION, TOOLS, address, checked, openai_client, raises, run, running, schema, wait_for

ADDRESS = address()
client = openai_client(ADDRESS)
MODEL = client.models.list().data[0].id
FUNCTIONS = [{"type": "function", "name": tool.__name__, "parameters": schema(tool), "strict": True} for tool in TOOLS]


class Paint(BaseModel):
    colour: Literal["red", "green", "blue"]
    litres: Literal[1, 2, 3]


def respond(input="Name three colours.", **options):
    return client.responses.create(**{"model": MODEL, "input": input, "max_output_tokens": 12, "temperature": 0, **options})


def whole():
    answer = respond(instructions="Be brief.", metadata={"who": "me"})
    assert (answer.object, answer.model, answer.metadata) == ("response", MODEL, {"who": "me"}) and answer.output_text
    assert answer.status == ("incomplete" if answer.usage.output_tokens == 12 else "completed")
    assert answer.incomplete_details is None or answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens and answer.error is None
    assert answer.instructions == "Be brief." and answer.id.endswith(answer._request_id)


def stream():
    events = list(respond(stream=True))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"] and types[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == events[-1].response.output_text == respond().output_text


def stream_helper():
    # The helper takes a response that ends for want of tokens for one without an end.
    with client.responses.stream(model=MODEL, input="Which paint?", text_format=Paint, temperature=0) as events:
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        final = events.get_final_response()
    assert deltas == final.output_text and isinstance(final.output_parsed, Paint)


def parse_helper():
    parsed = client.responses.parse(model=MODEL, input="Which paint?", text_format=Paint, temperature=0)
    assert isinstance(parsed.output_parsed, Paint) and parsed.status == "completed"
    # What was parsed goes into the next turn.
    turn = [{"role": "user", "content": "Which paint?"}, *parsed.output, {"role": "user", "content": "Why?"}]
    assert respond(turn).output_text


def log_probabilities():
    answer = respond(include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = answer.output[0].content
    # The end token has a log-probability, but no text.
    assert "".join(token.token for token in part.logprobs).startswith(part.text) and len(part.logprobs[0].top_logprobs) == 2


def tools_and_a_second_turn():
    assert respond(QUESTION, tools=FUNCTIONS, tool_choice="auto", max_output_tokens=8).output[0].type == "message"
    for choice, name in (("required", None), ({"type": "function", "name": "get_time"}, "get_time")):
        answer = respond(QUESTION, tools=FUNCTIONS, tool_choice=choice, max_output_tokens=400)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert calls and all(checked(call.name, call.arguments) and call.name == (name or call.name) for call in calls)
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "12"} for call in calls]
    turn = [{"role": "user", "content": QUESTION}, *answer.output, *results]
    assert respond(turn, tools=FUNCTIONS, tool_choice="none").output_text
    one = respond(QUESTION, tools=FUNCTIONS, tool_choice="required", parallel_tool_calls=False, max_output_tokens=100)
    assert len(one.output) == 1


def streamed_arguments():
    options = {"input": QUESTION, "tools": FUNCTIONS, "tool_choice": "required"}
    with client.responses.stream(model=MODEL, temperature=0, **options) as events:
        snapshots = {}
        for event in events:
            if event.type == "response.function_call_arguments.delta":
                assert event.snapshot == snapshots.get(event.item_id, "") + event.delta
                snapshots[event.item_id] = event.snapshot
            elif event.type == "response.function_call_arguments.done":
                assert event.arguments == snapshots[event.item_id]
        final = events.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == list(snapshots.values()) and all(checked(call.name, call.arguments) for call in calls)
    assert client.responses.parse(model=MODEL, temperature=0, **options).output[0].parsed_arguments


def errors():
    assert raises(openai.NotFoundError, lambda: respond(model="gpt")).code == "model_not_found"
    for param, options in {
        "previous_response_id": {"previous_response_id": "resp_1"},
        "temperature": {"temperature": -1},
        "tools[0].type": {"tools": [{"type": "search", "name": "f", "parameters": {}}]},
        "max_output_tokens": {"max_output_tokens": 0},
    }.items():
        error = raises(openai.BadRequestError, lambda: respond(**options))
        assert error.param == param, error


def a_closed_stream_ends_its_request():
    numbers = {"type": "json_schema", "name": "n", "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 2000}}
    with contextlib.closing(respond("Count.", stream=True, max_output_tokens=4000, text={"format": numbers})) as events:
        while next(events).type != "response.output_text.delta":
            pass
        assert running(ADDRESS) == 1
    wait_for("end of the request", lambda: running(ADDRESS) == 0)


run(whole, stream, stream_helper, parse_helper, log_probabilities, tools_and_a_second_turn, streamed_arguments, errors, a_closed_stream_ends_its_request)
