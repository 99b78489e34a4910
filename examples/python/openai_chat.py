#!/usr/bin/env python3
"""Asks a question by OpenAI's client, which has one address: if a conductor is lost, the next one is asked. Needs openai."""

import argparse
import itertools
import os
import sys
import uuid

import openai


def ask(clients, messages):
    # Another conductor gives the same answer for the same key, mostly from the nodes' caches.
    key = str(uuid.uuid4())
    last = None
    for client in itertools.islice(itertools.cycle(clients), 2 * len(clients)):
        try:
            return client.chat.completions.create(model="", messages=messages, max_tokens=64, temperature=0, extra_headers={"Idempotency-Key": key})
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            last = error
    raise last


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    hosts = os.environ.get("BATON_HTTP", "127.0.0.1:8080")
    parser.add_argument("--http", metavar="ADDR", default=hosts, help="HTTP ports of the conductors, with commas [%(default)s]")
    options = parser.parse_args()
    # A conductor that hangs takes connections: without a timeout the client would wait for ten minutes.
    clients = [openai.OpenAI(base_url=f"http://{host.strip()}/v1", api_key="none", max_retries=0, timeout=60) for host in options.http.split(",")]
    print(ask(clients, [{"role": "user", "content": options.question}]).choices[0].message.content)


if __name__ == "__main__":
    sys.exit(main())
