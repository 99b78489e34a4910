#!/usr/bin/env python3
"""What a cluster does that one process cannot, on this machine, with each claim checked.

1. A long prompt on a prefill node: its KV is pushed to a decode node layer by layer, while the prompt is computed.
2. The next turn of the same conversation: its prefix comes from the cache.
3. A decode node is killed in the middle of an answer: the stream goes on, and no token is lost, repeated or changed.

Usage: demo.py BATON READY_FILE, with BATON_CONDUCTOR set. Exits with 1 if one of them did not happen.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

# Notes that make a prompt of some 700 tokens. A short one may be computed at a decode node.
RIVERS = """Amsterdam Netherlands Amstel; Baghdad Iraq Tigris; Bangkok Thailand Chao Phraya; Belgrade Serbia Danube;
Berlin Germany Spree; Bern Switzerland Aare; Bratislava Slovakia Danube; Brussels Belgium Senne; Budapest Hungary Danube;
Cairo Egypt Nile; Canberra Australia Molonglo; Damascus Syria Barada; Delhi India Yamuna; Dublin Ireland Liffey;
Hanoi Vietnam Red River; Helsinki Finland Vantaa; Khartoum Sudan Nile; Kyiv Ukraine Dnieper; Lisbon Portugal Tagus;
Ljubljana Slovenia Ljubljanica; London England Thames; Madrid Spain Manzanares; Minsk Belarus Svislach;
Moscow Russia Moskva; Ottawa Canada Ottawa River; Paris France Seine; Prague Czechia Vltava; Riga Latvia Daugava;
Rome Italy Tiber; Seoul Korea Han; Sofia Bulgaria Iskar; Tirana Albania Lana; Tokyo Japan Sumida; Vienna Austria Danube;
Vilnius Lithuania Neris; Warsaw Poland Vistula; Washington America Potomac; Zagreb Croatia Sava"""
OUTPUT_TOKENS = 48
# Long enough to be in the middle when the kill comes, and after it for seconds.
LONG_OUTPUT_TOKENS = 160
CHARACTERS_BEFORE_KILL = 200


def fail(problem):
    sys.exit(f"demo: {problem}")


def notes():
    """A sentence for each capital."""
    sentences = []
    for entry in RIVERS.replace("\n", " ").split(";"):
        capital, country, river = entry.strip().split(" ", 2)
        sentences.append(f"{capital} is the capital of {country} and lies on the {river}.")
    return "\n".join(sentences)


def seconds(text):
    """A time as the timeline writes it."""
    value, unit = text.split()
    return float(value) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


class Demo:
    def __init__(self, baton, ready_file):
        self.baton = baton
        self.ready_file = ready_file

    def say(self, *arguments):
        """What the command says, as JSON."""
        return json.loads(subprocess.run([self.baton, "--json", *arguments], stdout=subprocess.PIPE, check=True).stdout)

    def generate(self, messages, tokens, on_text=lambda text: None):
        """Streams an answer to this terminal; gives its text and the rows of its timeline."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file, tempfile.TemporaryFile("w+") as told:
            json.dump(messages, file)
            file.flush()
            command = [self.baton, "generate", "--timeline", "--max-tokens", str(tokens), "--messages", file.name]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told) as running:
                text = b""
                while piece := running.stdout.read1(64):
                    text += piece
                    sys.stdout.buffer.write(piece)
                    sys.stdout.flush()
                    on_text(text.decode("utf-8", "replace"))
            told.seek(0)
            timeline = told.read()
        print(f"\n\n{timeline}", end="")
        if running.returncode != 0:
            fail("the answer did not come to its end")
        rows = dict(re.findall(r"^  (.{14}) (.*)$", timeline, re.M))
        return text.decode("utf-8"), {name.strip(): value for name, value in rows.items()}

    def pid(self, name):
        nodes = json.loads(pathlib.Path(self.ready_file).read_text(encoding="utf-8"))["nodes"]
        return next(node["pid"] for node in nodes if node["name"] == name)

    def kill_busy_decode_node(self):
        busy = [node["name"] for node in self.say("nodes") if node["role"] == "decode" and node["placed"] > 0]
        if len(busy) != 1:
            fail(f"the answer is decoded by {busy or 'no node'}")
        os.kill(self.pid(busy[0]), signal.SIGKILL)
        print(f"\n\n*** {busy[0]} killed (SIGKILL); the stream goes on ***\n")
        return busy[0]


def question(title, text):
    print(f"\n== {title}\n\n> {text}\n", flush=True)


def push(demo):
    """A long prompt, whose KV is pushed while it is computed."""
    asked = "Tell me about the capital of France."
    title = "1. A long prompt: computed on a prefill node, its KV pushed layer by layer"
    question(title, f"[notes on 38 capitals] {asked}")
    messages = [{"role": "user", "content": f"{notes()}\n\n{asked}"}]
    answer, timeline = demo.generate(messages, OUTPUT_TOKENS)
    if " on prefill-" not in timeline["prefill"]:
        fail(f"the prompt was not computed on a prefill node: {timeline['prefill']}")
    pushed = re.search(r" to decode-\d+ in (.*), (.*) of it exposed beyond compute", timeline["KV transferred"])
    if not pushed:
        fail(f"no KV was pushed to a decode node: {timeline['KV transferred']}")
    if seconds(pushed[2]) > 0.5 * seconds(pushed[1]):
        fail(f"most of the push was not hidden behind compute: {timeline['KV transferred']}")
    if "Paris" not in answer:
        fail("the answer does not name Paris")
    return [*messages, {"role": "assistant", "content": answer}]


def follow_up(demo, messages):
    """The next turn: nearly all of its prompt is in the cache."""
    asked = "And which river flows through it?"
    question("2. The next turn: its prefix comes from the cache", asked)
    messages = [*messages, {"role": "user", "content": asked}]
    _, timeline = demo.generate(messages, OUTPUT_TOKENS)
    cached, prompt = map(int, re.match(r"(\d+) of (\d+)", timeline["cached tokens"]).groups())
    if cached < 0.8 * prompt:
        fail(f"of {prompt} tokens of the prompt {cached} were cached")


def survive(demo):
    """A decode node dies in the middle of an answer."""
    asked = "Write a story about a lighthouse keeper and a storm."
    messages = [{"role": "user", "content": asked}]
    question("3. An answer, and then once more with its decode node killed in the middle", asked)
    whole, _ = demo.generate(messages, LONG_OUTPUT_TOKENS)
    killed = []

    def kill_once(text):
        if not killed and len(text) >= CHARACTERS_BEFORE_KILL:
            killed.append(demo.kill_busy_decode_node())

    print(f"\n> {asked}\n", flush=True)
    again, timeline = demo.generate(messages, LONG_OUTPUT_TOKENS, kill_once)
    if not killed:
        fail("the answer ended before its decode node could be killed")
    if again != whole:
        fail("the answer is not the one that it was without the kill")
    print("\nNot one character differs from the answer without the kill. What was decided:\n", flush=True)
    subprocess.run([demo.baton, "explain", "--request", timeline["request"]], check=True)


def main():
    demo = Demo(*sys.argv[1:])
    follow_up(demo, push(demo))
    survive(demo)


if __name__ == "__main__":
    main()
