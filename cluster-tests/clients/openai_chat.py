"""OpenAI's client and chat completions: openai_chat.py HOST:PORT, of a cluster whose chat template knows tools."""

import contextlib
import json
from typing import Literal

import openai
from pydantic import BaseModel

from common import QUESTION, TOOLS, address, checked, openai_client, raises, run, running, said, wait_for

ADDRESS = address()
client = openai_client(ADDRESS)
MODEL = client.models.list().data[0].id
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Name three colours."}]}]
ASK = [{"role": "user", "content": QUESTION}]
STRICT_TOOLS = [openai.pydantic_function_tool(tool) for tool in TOOLS]
LOOSE_TOOLS = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in STRICT_TOOLS]
# The model may not end before so many tokens: a call has about half as many, so another one must follow.
# Ends by itself: the helpers take the end of the tokens for an error.
SENTENCE = {"extra_body": {"structured_outputs": {"regex": "[A-Za-z, ]{5,30}[.]"}}, "max_tokens": 60}
PARALLEL = {"extra_body": {"min_tokens": 60}, "max_tokens": 400}


class Paint(BaseModel):
    colour: Literal["red", "green", "blue"]
    litres: Literal[1, 2, 3]
    is_matt: bool


def chat(messages=HELLO, **options):
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "max_tokens": 12, "seed": 7, **options})


def streamed(messages=HELLO, **options):
    return list(chat(messages, stream=True, **options))


def text(chunks, index=0):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def models():
    assert client.models.retrieve(MODEL).id == MODEL


def whole():
    answer = chat()
    [choice] = answer.choices
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", MODEL, "assistant")
    assert choice.message.content and choice.finish_reason in ("stop", "length") and choice.message.tool_calls is None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.endswith(answer._request_id), (answer.id, answer._request_id)
    assert chat(seed=7).choices[0].message.content == choice.message.content


def limits():
    assert chat(max_tokens=openai.omit, max_completion_tokens=2).usage.completion_tokens == 2
    first, rest = chat(temperature=0, max_tokens=8).choices[0].message.content.strip().split(maxsplit=1)
    stopped = chat(temperature=0, max_tokens=8, stop=[rest[:3]]).choices[0]
    assert (stopped.message.content.strip(), stopped.finish_reason) == (first, "stop"), stopped


def stream():
    answer = chat()
    chunks = streamed(stream_options={"include_usage": True})
    assert text(chunks) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    *before, last = chunks
    assert before[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    assert last.choices == [] and last.usage.total_tokens == answer.usage.total_tokens
    assert not any(chunk.usage for chunk in before) and not any(chunk.usage for chunk in streamed())


def stream_helper():
    with client.chat.completions.stream(model=MODEL, messages=HELLO, seed=7, **SENTENCE) as events:
        deltas = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert deltas == final.choices[0].message.content == chat(**SENTENCE).choices[0].message.content
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=2) as events:
        raises(openai.LengthFinishReasonError, events.get_final_completion)


def log_probabilities():
    options = {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    # The end token has a log-probability, but no text.
    endless = {**options, "extra_body": {"ignore_eos": True}}
    whole = chat(**endless).choices[0]
    tokens = whole.logprobs.content
    assert "".join(token.token for token in tokens) == whole.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3 and bytes(token.bytes).decode() == token.token
        assert token.logprob == token.top_logprobs[0].logprob <= 0, "greedy takes the best"
    chunks = streamed(**endless)
    assert [token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content] == tokens
    whole = chat(**options, **SENTENCE).choices[0]
    with client.chat.completions.stream(model=MODEL, messages=HELLO, seed=7, **options, **SENTENCE) as events:
        assert events.get_final_completion().choices[0].logprobs == whole.logprobs


def several_answers():
    whole = chat(n=3)
    texts = [choice.message.content for choice in sorted(whole.choices, key=lambda choice: choice.index)]
    assert texts == [chat(seed=seed).choices[0].message.content for seed in (7, 8, 9)] and len(set(texts)) > 1
    assert whole.usage.completion_tokens > 12 and whole.usage.prompt_tokens == chat().usage.prompt_tokens
    chunks = streamed(n=3)
    assert [text(chunks, index) for index in range(3)] == texts
    with client.chat.completions.stream(model=MODEL, messages=HELLO, seed=7, n=3, **SENTENCE) as events:
        final = events.get_final_completion().choices
    assert [choice.message.content for choice in final] == [chat(seed=seed, **SENTENCE).choices[0].message.content for seed in (7, 8, 9)]


def tools_that_are_not_called():
    # A call would have more tokens before it is one.
    for options in ({"tool_choice": "auto", "max_tokens": 8}, {"tool_choice": "none", "max_tokens": 40}):
        [choice] = chat(ASK, tools=LOOSE_TOOLS, **options).choices
        assert choice.message.tool_calls is None and choice.message.content and choice.finish_reason != "tool_calls", choice
    with client.chat.completions.stream(model=MODEL, messages=ASK, tools=STRICT_TOOLS, seed=7, tool_choice="none", **SENTENCE) as events:
        assert not events.get_final_completion().choices[0].message.tool_calls


def a_tool_is_required():
    for tools in (LOOSE_TOOLS, STRICT_TOOLS):
        [choice] = chat(ASK, tools=tools, tool_choice="required", max_tokens=400).choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content, choice
        for call in choice.message.tool_calls:
            checked(call.function.name, call.function.arguments)
        assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)


def one_tool_is_named():
    for name in ("get_weather", "get_time"):
        named = {"type": "function", "function": {"name": name}}
        [choice] = chat(ASK, tools=LOOSE_TOOLS, tool_choice=named, max_tokens=100).choices
        [call] = choice.message.tool_calls
        assert call.function.name == name and checked(name, call.function.arguments)
        # OpenAI's own API says "stop" here; clients act on the calls.
        assert choice.finish_reason in ("tool_calls", "stop")


def parallel_calls():
    options = {"tools": LOOSE_TOOLS, "tool_choice": "required"}
    [choice] = chat(ASK, **options, **PARALLEL).choices
    calls = choice.message.tool_calls
    assert len(calls) >= 2 and all(checked(call.function.name, call.function.arguments) for call in calls), choice
    one = chat(ASK, **options, parallel_tool_calls=False, max_tokens=100).choices[0].message.tool_calls
    assert len(one) == 1
    chunks = [call for chunk in streamed(ASK, **options, **PARALLEL) for call in chunk.choices[0].delta.tool_calls or []]
    for index, call in enumerate(calls):
        pieces = [piece for piece in chunks if piece.index == index]
        assert pieces[0].id and not any(piece.id or piece.function.name for piece in pieces[1:])
        assert pieces[0].function.name == call.function.name and len(pieces) > 2, "arguments come in pieces"
        assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments


def streamed_arguments_and_a_second_turn():
    options = {"model": MODEL, "tools": STRICT_TOOLS, "seed": 7}
    snapshots, parsed = {}, []
    with client.chat.completions.stream(messages=ASK, tool_choice="required", **options, **PARALLEL) as events:
        for event in events:
            if event.type == "tool_calls.function.arguments.delta":
                assert event.arguments == snapshots.get(event.index, "") + event.arguments_delta
                snapshots[event.index] = event.arguments
            elif event.type == "tool_calls.function.arguments.done":
                parsed.append(event.parsed_arguments)
        message = events.get_final_completion().choices[0].message
    calls = message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == parsed and type(parsed[0]) in TOOLS
    assert [call.function.arguments for call in calls] == [snapshots[index] for index in range(len(calls))]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in calls]
    turn = [*ASK, said(message), *results]
    answer = client.chat.completions.create(messages=turn, tool_choice="none", max_tokens=12, **options)
    assert answer.choices[0].message.content and answer.usage.prompt_tokens > 100


def structured_output():
    question = [{"role": "user", "content": "Which paint do I need?"}]
    parsed = client.chat.completions.parse(model=MODEL, messages=question, response_format=Paint, max_tokens=100, seed=7)
    assert isinstance(parsed.choices[0].message.parsed, Paint)
    with client.chat.completions.stream(model=MODEL, messages=question, response_format=Paint, max_tokens=100, seed=7) as events:
        done = [event for event in events if event.type == "content.done"]
        assert events.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed == done[0].parsed
    both = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Paint, tools=STRICT_TOOLS, tool_choice="required", max_tokens=400, seed=7
    )
    assert all(type(call.function.parsed_arguments) in TOOLS for call in both.choices[0].message.tool_calls)
    raises(openai.LengthFinishReasonError, lambda: client.chat.completions.parse(model=MODEL, messages=question, response_format=Paint, max_tokens=2))
    form = {"type": "json_schema", "json_schema": {"name": "sizes", "schema": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}}}
    assert len(json.loads(chat(question, response_format=form, max_tokens=60).choices[0].message.content)) == 2


def errors():
    wrong_model = raises(openai.NotFoundError, lambda: chat(model="gpt"))
    assert (wrong_model.code, wrong_model.param, wrong_model.type) == ("model_not_found", "model", "invalid_request_error")
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
    for param, call in {
        "temperature": lambda: chat(temperature=-1),
        "messages": lambda: chat([]),
        "messages[0].content[0].type": lambda: chat([image]),
        "colour": lambda: chat(extra_body={"colour": 1}),
        "tools[0].function.name": lambda: chat(ASK, tools=[{"type": "function", "function": {"name": "a b"}}]),
        "max_tokens": lambda: chat(max_tokens=0),
    }.items():
        error = raises(openai.BadRequestError, call)
        assert (error.param, error.type) == (param, "invalid_request_error"), error
    error = raises(openai.BadRequestError, lambda: chat(temperature=-1, stream=True, extra_headers={"x-request-id": "mine"}))
    assert error.request_id == "mine"


def a_closed_stream_ends_its_request():
    events = chat([{"role": "user", "content": "Count to ten thousand."}], stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    with contextlib.closing(events):
        next(events)
        assert running(ADDRESS) == 1
    wait_for("end of the request", lambda: running(ADDRESS) == 0)


run(
    models,
    whole,
    limits,
    stream,
    stream_helper,
    log_probabilities,
    several_answers,
    tools_that_are_not_called,
    a_tool_is_required,
    one_tool_is_named,
    parallel_calls,
    streamed_arguments_and_a_second_turn,
    structured_output,
    errors,
    a_closed_stream_ends_its_request,
)
