"""Clients: each asks one question after the other over HTTP, streams the answer, and knows what it must be."""

import collections
import http.client
import itertools
import json
import random
import threading
import time
import uuid

# Longer than any pause that a client is to see; a request that takes longer has failed.
TIMEOUT_SECONDS = 40
TOPICS = ("Paris", "rivers", "the moon", "bread", "horses", "trains", "winter", "music")
# Short answers, and streams that are there while a pod goes.
TOKENS = (16, 96)


class Failed(Exception):
    """What a client saw instead of an answer."""


def bodies():
    """Short and long prompts, drawn with a seed: so the same one has the same answer on any node."""
    for number, topic in enumerate(TOPICS):
        words = f"Tell me about {topic}. " + "It is a long story, and I like stories. " * (number % 4 * 6)
        yield {
            "model": "",
            "messages": [{"role": "user", "content": words}],
            "max_tokens": TOKENS[number % 2],
            "temperature": 0.8,
            "seed": number,
            "stream": True,
        }


def ask(endpoint, body, headers=None):
    """The streamed answer: its text and why it ended. Whatever is not a whole answer is a failure."""
    connection = http.client.HTTPConnection(*endpoint, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        if response.status != 200:
            raise Failed(f"{response.status} {response.read()[:300]!r}")
        text, finish, is_done = "", None, False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                is_done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise Failed(f"in the stream: {event['error']}")
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
        if not is_done or not finish:
            raise Failed(f"the stream broke off after {text!r}")
        return text, finish
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


class Load:
    """Clients of a Service, until the block ends. With `asks_again` each request has an idempotency key, and a client
    whose answer breaks off asks another conductor with it.
    """

    def __init__(self, endpoints, answers, clients=3, asks_again=False):
        self.endpoints = endpoints
        self.answers = answers
        self.asks_again = asks_again
        self.done = 0
        self.asked_again = 0
        self.longest = 0.0
        self.failures = []
        # Conductor to how many answers it gave.
        self.by_endpoint = collections.Counter()
        self.is_over = threading.Event()
        self.lock = threading.Lock()
        self.turns = itertools.count()
        self.threads = [threading.Thread(target=self.client, daemon=True) for _ in range(clients)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self.is_over.set()
        for thread in self.threads:
            thread.join(2 * TIMEOUT_SECONDS)

    def client(self):
        bodies_of_all = list(bodies())
        while not self.is_over.is_set():
            number = next(self.turns) % len(bodies_of_all)
            began = time.monotonic()
            try:
                answer = self.request(bodies_of_all[number])
                if answer != self.answers[number]:
                    raise Failed(f"another answer: {answer}, and not {self.answers[number]}")
            except Failed as failure:
                with self.lock:
                    self.failures.append(f"{time.strftime('%X')} prompt {number} after {time.monotonic() - began:.1f} s: {failure}")
                # Else one failure would be counted a thousand times.
                self.is_over.wait(0.5)
            else:
                with self.lock:
                    self.done += 1
            with self.lock:
                self.longest = max(self.longest, time.monotonic() - began)

    def request(self, body):
        headers = {"Idempotency-Key": str(uuid.uuid4())} if self.asks_again else {}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        last = None
        while True:
            # As kube-proxy: any of those that are ready now. A client that asks again knows all, and takes another one.
            endpoints = self.endpoints()
            others = [one for one in endpoints if one != last] if self.asks_again else endpoints
            try:
                if not endpoints:
                    raise Failed("the Service has no ready pod")
                last = random.choice(others or endpoints)
                answer = ask(last, body, headers)
                with self.lock:
                    self.by_endpoint[last] += 1
                return answer
            except Failed:
                if not self.asks_again or time.monotonic() > deadline:
                    raise
                with self.lock:
                    self.asked_again += 1
                time.sleep(0.2)

    def __str__(self):
        again = f", asked again {self.asked_again} times" if self.asks_again else ""
        return f"{self.done} answers, {len(self.failures)} failures{again}, longest {self.longest:.1f} s, by {len(self.by_endpoint)} conductors"
