"""Conversations with two tools, through both clients: families.py HOST:PORT [OPTIONS], of a cluster with the chat template of a family of models.

The model sees an earlier question that was answered with two calls, and does so again. Templates write such calls as the family does, and the answer is read
back, so what is checked is that both are one form.
"""

import argparse
import json

import openai

from common import TOOLS, anthropic_client, anthropic_tools, checked, first, openai_client, run, said

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("--thinks", action="store_true", help="the template marks thoughts")
parser.add_argument("--untrained-marks", action="store_true", help="the model does not know its marks, and calls one tool unless it must not end")
ARGUMENTS = parser.parse_args()
QUESTION = "What are the weather and the time in {}?"
MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '"parameters"', "<think>", "</think>")
THOUGHT = "Two calls."


def arguments_of(name, city):
    return {"city": city} | ({"unit": "celsius"} if name == "get_weather" else {})


def is_whole(calls, least=2):
    """Of names and arguments: so many or more, and each as its tool's schema says."""
    return len(calls) >= least and all(checked(name, arguments) for name, arguments in calls)


def through_openai():
    client = openai_client(ARGUMENTS.address)
    model = client.models.list().data[0].id
    tools = [openai.pydantic_function_tool(tool) for tool in TOOLS]
    names = [tool.__name__ for tool in TOOLS]

    def shown(city, ids):
        calls = [{"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments_of(name, city))}} for name, id in zip(names, ids)]
        turn = [{"role": "user", "content": QUESTION.format(city)}, {"role": "assistant", "content": None, "tool_calls": calls}]
        return [*turn, *({"role": "tool", "tool_call_id": id, "content": "12"} for id in ids), {"role": "assistant", "content": f"12 and 12 in {city}."}]

    messages = [*shown("Rome", ["aaaaaaaa1", "aaaaaaaa2"]), *shown("Oslo", ["aaaaaaaa3", "aaaaaaaa4"])]
    messages.append({"role": "user", "content": QUESTION.format("Paris")})
    options = {"model": model, "tools": tools, "seed": 7}
    more = {"tool_choice": "required", "max_tokens": 400, "extra_body": {"min_tokens": 40}}
    if ARGUMENTS.thinks:
        more["extra_body"]["chat_template_kwargs"] = {"enable_thinking": False}

    def whole(**temperature):
        return client.chat.completions.create(messages=messages, **options, **more, **temperature).choices[0]

    def streamed(temperature):
        snapshots = {}
        with client.chat.completions.stream(messages=messages, temperature=temperature, **options, **more) as events:
            for event in events:
                if event.type == "tool_calls.function.arguments.delta":
                    assert event.arguments == snapshots.get(event.index, "") + event.arguments_delta
                    snapshots[event.index] = event.arguments
            message = events.get_final_completion().choices[0].message
        assert list(snapshots.values()) == [call.function.arguments for call in message.tool_calls]
        return message

    def ask(temperature):
        choice = whole(temperature=temperature)
        return (choice.message, streamed(temperature)) if choice.finish_reason == "tool_calls" else None

    once, message = first(bool, ask)
    calls = [[(call.function.name, call.function.arguments) for call in answer.tool_calls] for answer in (once, message)]
    assert calls[0] == calls[1] and is_whole(calls[0]) and not once.content and not message.content, (once, message)
    messages += [said(message), *({"role": "tool", "tool_call_id": call.id, "content": "12"} for call in message.tool_calls)]
    # The same prompt and calls as before, and the results: what was computed for them is found again.
    answer = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=12, temperature=0, **options)
    content = answer.choices[0].message.content
    assert content and not any(mark in content for mark in MARKS), content
    assert answer.usage.prompt_tokens_details.cached_tokens > 100, answer.usage


def through_anthropic():
    client = anthropic_client(ARGUMENTS.address)
    model = client.models.list().data[0].id
    tools = anthropic_tools()
    names = [tool["name"] for tool in tools]

    def shown(city, ids):
        calls = [{"type": "tool_use", "id": id, "name": name, "input": arguments_of(name, city)} for name, id in zip(names, ids)]
        results = [{"type": "tool_result", "tool_use_id": id, "content": "12"} for id in ids]
        turn = [{"role": "user", "content": QUESTION.format(city)}, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
        return [*turn, {"role": "assistant", "content": f"12 and 12 in {city}."}]

    messages = [*shown("Rome", ["bbbbbbbb1", "bbbbbbbb2"]), *shown("Oslo", ["bbbbbbbb3", "bbbbbbbb4"])]
    messages.append({"role": "user", "content": QUESTION.format("Paris")})
    options = {"model": model, "tools": tools, "max_tokens": 200}
    if ARGUMENTS.thinks:
        options["thinking"] = {"type": "disabled"}

    def calls(message):
        return [block for block in message.content if block.type == "tool_use"]

    def ask(temperature):
        pieces = []
        more = {"tool_choice": {"type": "any"}, "extra_body": {"temperature": temperature}}
        with client.messages.stream(messages=messages, **options, **more) as events:
            for event in events:
                if event.type == "content_block_start":
                    pieces.append("")
                elif event.type == "input_json":
                    pieces[-1] += event.partial_json
            message = events.get_final_message()
        if message.stop_reason == "tool_use":
            assert [json.loads(piece) for piece in pieces] == [block.input for block in message.content], message
        return message

    least = 1 if ARGUMENTS.untrained_marks else 2
    message = first(lambda message: message.stop_reason == "tool_use" and len(calls(message)) >= least, ask)
    assert is_whole([(block.name, block.input) for block in calls(message)], least)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "12"} for block in calls(message)]
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    options["max_tokens"] = 12
    answer = client.messages.create(messages=messages, tool_choice={"type": "none"}, extra_body={"temperature": 0}, **options)
    [block] = answer.content
    assert block.type == "text" and not any(mark in block.text for mark in MARKS), answer
    assert answer.usage.cache_read_input_tokens > 100, answer.usage


def thoughts_through_openai():
    """The model thinks, and calls a tool, as it did in this turn before."""
    client = openai_client(ARGUMENTS.address)
    model = client.models.list().data[0].id

    def step(city, id):
        call = {"id": id, "type": "function", "function": {"name": "get_time", "arguments": json.dumps({"city": city})}}
        return [{"role": "assistant", "reasoning_content": THOUGHT, "tool_calls": [call]}, {"role": "tool", "tool_call_id": id, "content": "12"}]

    messages = [{"role": "user", "content": "The time in Rome, Oslo and Paris?"}, *step("Rome", "cccccccc1"), *step("Oslo", "cccccccc2")]
    options = {"model": model, "messages": messages, "tools": [openai.pydantic_function_tool(tool) for tool in TOOLS], "max_tokens": 100}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}

    def ask(temperature):
        thoughts = ""
        try:
            with client.chat.completions.stream(tool_choice="required", temperature=temperature, **options) as events:
                for event in events:
                    if event.type == "chunk" and event.chunk.choices:
                        thoughts += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                message = events.get_final_completion().choices[0].message
        except openai.LengthFinishReasonError:
            return None
        assert message.reasoning_content == thoughts != "" and not any(mark in thoughts for mark in MARKS)
        return message

    message = first(bool, ask)
    assert not message.content and checked("get_time", message.tool_calls[0].function.arguments)
    options["messages"] = [*messages, said(message), *({"role": "tool", "tool_call_id": call.id, "content": "12"} for call in message.tool_calls)]
    whole = client.chat.completions.create(temperature=0, **options).choices[0].message
    assert whole.reasoning_content or whole.content


def thoughts_through_anthropic():
    client = anthropic_client(ARGUMENTS.address)
    model = client.models.list().data[0].id

    def step(city, id):
        blocks = [{"type": "thinking", "thinking": THOUGHT, "signature": ""}, {"type": "tool_use", "id": id, "name": "get_time", "input": {"city": city}}]
        return [{"role": "assistant", "content": blocks}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "12"}]}]

    messages = [{"role": "user", "content": "The time in Rome, Oslo and Paris?"}, *step("Rome", "dddddddd1"), *step("Oslo", "dddddddd2")]
    options = {"model": model, "tools": anthropic_tools(), "max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 1024}}

    def ask(temperature):
        more = {"tool_choice": {"type": "any"}, "extra_body": {"temperature": temperature}}
        with client.messages.stream(messages=messages, **options, **more) as events:
            thoughts = "".join(event.thinking for event in events if event.type == "thinking")
            message = events.get_final_message()
        assert (message.content[0].type, message.content[0].thinking) == ("thinking", thoughts) and thoughts
        return message

    message = first(lambda message: message.stop_reason == "tool_use", ask)
    calls = message.content[1:]
    assert calls and all(checked(block.name, block.input) for block in calls)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "12"} for block in calls]
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert client.messages.create(messages=messages, extra_body={"temperature": 0}, **options).content
    [cut] = client.messages.create(messages=messages[:1], extra_body={"temperature": 0}, **{**options, "max_tokens": 4}).content
    assert cut.type == "thinking" and cut.thinking


run(through_openai, through_anthropic)
if ARGUMENTS.thinks:
    run(thoughts_through_openai, thoughts_through_anthropic)
