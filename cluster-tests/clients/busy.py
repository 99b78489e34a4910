"""Both clients come again when they are told to: busy.py HOST:PORT, of a cluster whose conductor serves one request at once."""

import threading
import time

import anthropic
import openai

from common import address, anthropic_client, openai_client, raises, run, running, wait_for

ADDRESS = address()
MODEL = openai_client(ADDRESS).models.list().data[0].id
MESSAGES = [{"role": "user", "content": "x"}]


def ask_openai(max_retries):
    return openai_client(ADDRESS, max_retries).chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)


def ask_anthropic(max_retries):
    return anthropic_client(ADDRESS, max_retries).messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)


def refused_then_served(ask, error, kind):
    long = openai_client(ADDRESS).completions.create(model=MODEL, prompt="x", max_tokens=100_000, stream=True, extra_body={"ignore_eos": True})
    next(long)
    refused = raises(error, lambda: ask(0))
    retry_after = int(refused.response.headers["retry-after"])
    assert refused.status_code == 429 and 1 <= retry_after <= 60
    assert refused.body.get("error", refused.body)["type"] == kind, refused.body
    # It ends while the client waits.
    threading.Timer(retry_after / 2, long.close).start()
    began = time.monotonic()
    ask(1)
    waited = time.monotonic() - began
    assert retry_after <= waited < retry_after + 2, f"waited {waited:.2f} s, told {retry_after}"
    wait_for("idle conductor", lambda: running(ADDRESS) == 0)


def openai_comes_again():
    refused_then_served(ask_openai, openai.RateLimitError, "overloaded")


def anthropic_comes_again():
    refused_then_served(ask_anthropic, anthropic.RateLimitError, "rate_limit_error")


run(openai_comes_again, anthropic_comes_again)
