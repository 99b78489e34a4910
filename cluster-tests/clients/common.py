"""What the scripts of this folder share: the addresses they are given, the tools they speak of, and how checks are run.

Texts and tokens are a small model's, and differ between processors: checks compare answers with each other, or hold to a form that a grammar enforces.
"""

import argparse
import json
import time
import urllib.request
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel

City = Literal["Paris", "Rome", "Oslo"]


class get_weather(BaseModel):
    """The weather in a city"""

    city: City
    unit: Literal["celsius", "fahrenheit"]


class get_time(BaseModel):
    """The time in a city"""

    city: City


TOOLS = [get_weather, get_time]
QUESTION = "What are the weather, in celsius, and the time in Paris?"


def address():
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="HOST:PORT of the conductor's HTTP port")
    return parser.parse_args().address


def openai_client(address, max_retries=0):
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=max_retries, timeout=60)


def anthropic_client(address, max_retries=0):
    return anthropic.Anthropic(base_url=f"http://{address}", api_key="none", max_retries=max_retries, timeout=60)


def schema(tool):
    return {"type": "object", "additionalProperties": False} | {key: tool.model_json_schema()[key] for key in ("properties", "required")}


def anthropic_tools(strict=True):
    return [{"name": tool.__name__, "description": tool.__doc__, "input_schema": schema(tool), "strict": strict} for tool in TOOLS]


def checked(name, arguments):
    """Of a call, by the tool that it names: fails if its schema is not followed."""
    tool = {tool.__name__: tool for tool in TOOLS}[name]
    return tool.model_validate(arguments) if isinstance(arguments, dict) else tool.model_validate_json(arguments)


def said(message):
    """A chat message of the assistant, to send back: without what the client's parser put in."""
    message = {key: value for key, value in message.to_dict().items() if key != "parsed"}
    for call in message.get("tool_calls") or []:
        call["function"].pop("parsed_arguments", None)
    return message


def raises(error, call):
    """The error that a call ends with."""
    try:
        answer = call()
    except error as raised:
        return raised
    raise AssertionError(f"no {error.__name__}, but {answer}")


def first(is_wanted, ask):
    """The first wanted answer: the greedy one, or else of a few that are drawn. A small model may think until its tokens are used up."""
    for attempt in range(20):
        answer = ask(temperature=min(attempt, 1))
        if is_wanted(answer):
            return answer
    raise AssertionError(f"not once: {answer}")


def running(address):
    """Requests that the conductor serves now."""
    with urllib.request.urlopen(f"http://{address}/ready") as answer:
        return json.load(answer)["requests"]


def wait_for(what, condition, seconds=5):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"no {what} within {seconds} s"
        time.sleep(0.02)


def run(*checks):
    for check in checks:
        began = time.monotonic()
        print(check.__name__, end=" ", flush=True)
        check()
        print(f"{time.monotonic() - began:.1f} s")
