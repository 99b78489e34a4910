"""Anthropic's client and messages: anthropic_messages.py HOST:PORT, of a cluster whose chat template knows tools and marks no thoughts."""

import contextlib
from typing import Literal

import anthropic
from pydantic import BaseModel

from common import QUESTION, address, anthropic_client, anthropic_tools, checked, raises, run, running, wait_for

ADDRESS = address()
client = anthropic_client(ADDRESS)
MODEL = client.models.list().data[0].id
TOOLS = anthropic_tools()
HELLO = [{"role": "user", "content": "Name three colours."}]
ASK = [{"role": "user", "content": QUESTION}]


class Paint(BaseModel):
    colour: Literal["red", "green", "blue"]
    litres: Literal[1, 2, 3]


def options(messages, temperature=0, **more):
    # The client of this version has no argument for the temperature.
    return {"model": MODEL, "max_tokens": 12, "messages": messages, "extra_body": {"temperature": temperature}, **more}


def say(messages=HELLO, **more):
    return client.messages.create(**options(messages, **more))


def stream(messages=HELLO, **more):
    return client.messages.stream(**options(messages, **more))


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


def calls(message):
    return [block for block in message.content if block.type == "tool_use"]


def whole():
    message = say(system="Be brief.")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL) and text(message)
    assert message.stop_reason in ("end_turn", "max_tokens") and message.id.endswith(message._request_id)
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Name three "}, {"type": "text", "text": "colours."}]}]
    assert say(blocks, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]).content
    assert say(system="Be brief.").usage.output_tokens == message.usage.output_tokens


def stop_sequences():
    words = text(say()).split()
    stopped = say(stop_sequences=["no such text", words[1]])
    assert (stopped.stop_reason, stopped.stop_sequence, text(stopped).split()) == ("stop_sequence", words[1], words[:1])
    assert say(stop_sequences=["no such text"], max_tokens=1).stop_reason == "max_tokens"
    with stream(stop_sequences=[words[1]]) as events:
        assert events.get_final_message().stop_sequence == words[1]


def stream_helper():
    with stream() as events:
        texts = "".join(events.text_stream)
        final = events.get_final_message()
    assert texts == text(final) == text(say()) and final.usage.output_tokens == say().usage.output_tokens
    types = [event.type for event in say(stream=True)]
    assert types[:2] == ["message_start", "content_block_start"] and types[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def models():
    [model] = client.models.list()
    assert model == client.models.retrieve(MODEL) and (model.type, model.display_name) == ("model", MODEL)
    assert raises(anthropic.NotFoundError, lambda: client.models.retrieve("gpt")).body["error"]["type"] == "not_found_error"


def count_tokens():
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, tools=TOOLS, system="Be brief.").input_tokens
    usage = say(ASK, tools=TOOLS, system="Be brief.").usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    # The second time most of it is cached.
    usage = say(ASK, tools=TOOLS, system="Be brief.").usage
    assert usage.cache_read_input_tokens > 0 and counted == usage.input_tokens + usage.cache_read_input_tokens


def tool_choices():
    none = say(ASK, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=40)
    # A call would have more tokens before it is one.
    auto = say(ASK, tools=TOOLS, tool_choice={"type": "auto"}, max_tokens=8)
    assert not calls(none) and not calls(auto) and text(none) and text(auto)
    for tools in (TOOLS, anthropic_tools(strict=False)):
        [block] = say(ASK, tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=100).content
        assert checked(block.name, block.input)
    for name in ("get_weather", "get_time"):
        [block] = say(ASK, tools=TOOLS, tool_choice={"type": "tool", "name": name}, max_tokens=100).content
        assert block.name == name and checked(name, block.input)


def streamed_arguments_and_a_second_turn():
    pieces, inputs = [], []
    with stream(ASK, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=300) as events:
        for event in events:
            if event.type == "input_json":
                pieces.append(event.partial_json)
            elif event.type == "content_block_stop":
                inputs.append(event.content_block.input)
        final = events.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [block.input for block in calls(final)] == inputs and len(pieces) > 2 * len(inputs), "arguments come in pieces"
    assert all(checked(block.name, block.input) for block in calls(final))
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "12"}]} for block in calls(final)]
    results[0]["is_error"] = True
    turn = [*ASK, {"role": "assistant", "content": final.content}, {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]}]
    assert text(say(turn, tools=TOOLS, tool_choice={"type": "none"}))


def structured_output():
    form = options(HELLO, max_tokens=200, output_format=Paint)
    parsed = client.messages.parse(**form)
    assert isinstance(parsed.parsed_output, Paint) and parsed.stop_reason == "end_turn"
    with client.messages.stream(**form) as events:
        assert events.get_final_message().parsed_output == parsed.parsed_output
    again = [*HELLO, {"role": "assistant", "content": parsed.content}, *HELLO]
    assert text(say(again))


def tool_runner():
    asked = []

    @anthropic.beta_tool
    def get_hour(city: Literal["Paris"]) -> str:
        """The hour in a city

        Args:
            city: Which
        """
        asked.append(city)
        return "12"

    # Threads are conversations that the server keeps.
    ask = {"messages": ASK, "tools": [get_hour], "tool_choice": {"type": "tool", "name": "get_hour"}, "thread": False}
    for message in client.beta.messages.tool_runner(model=MODEL, max_tokens=100, max_iterations=8, **ask):
        if asked:
            break
    assert "Paris" in asked


def errors():
    assert raises(anthropic.NotFoundError, lambda: say(model="claude")).body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    for what, more in {
        "max_tokens": {"max_tokens": 0},
        "temperature": {"extra_body": {"temperature": -1}},
        "messages[0].content[0].type": {"messages": [{"role": "user", "content": [image]}]},
        "tool_choice": {"tool_choice": {"type": "any"}},
        "colour": {"extra_body": {"colour": 1}},
    }.items():
        error = raises(anthropic.BadRequestError, lambda: say(**more))
        assert error.body["error"]["type"] == "invalid_request_error" and error.body["error"]["message"].startswith(what), error
    assert raises(anthropic.BadRequestError, lambda: say(max_tokens=0, extra_headers={"x-request-id": "mine"})).request_id == "mine"


def a_closed_stream_ends_its_request():
    numbers = {"type": "json_schema", "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 2000}}
    with contextlib.closing(say(stream=True, max_tokens=4000, output_config={"format": numbers})) as events:
        while next(events).type != "content_block_delta":
            pass
        assert running(ADDRESS) == 1
    wait_for("end of the request", lambda: running(ADDRESS) == 0)


run(
    whole,
    stop_sequences,
    stream_helper,
    models,
    count_tokens,
    tool_choices,
    streamed_arguments_and_a_second_turn,
    structured_output,
    tool_runner,
    errors,
    a_closed_stream_ends_its_request,
)
