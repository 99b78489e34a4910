#!/usr/bin/env python3
"""Runs clients of agents, unmodified, against clusters on this machine.

Each client does a task of three calls of a tool with the scripted mock engine, to its end: what it did is checked.
Then it asks the model (SmolLM2, whose context is said to be 131,072 for prompts of 20,000 tokens). A model of 135M
parameters does no task, so there the protocol is checked: the client reports no error of it, no request is refused, and
an answer began. One that is still answering after a quarter of an hour is ended.

Usage: run.py BATON MODEL CACHE [NAME ...]: clients whose name has one of these. Exits with 1 if one fails.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
# The model's own has no tools.
TEMPLATE = HERE.parents[1] / "cluster-tests/clients/templates/hermes2.jinja"
CITIES = ("Oslo", "Rome", "Lima")
DONE = "It is 4 in Oslo, 21 in Rome and 18 in Lima."
WEATHER = [{"calls": [{"name": "weather", "arguments": {"city": city}}]} for city in CITIES] + [{"text": DONE}]
COMMANDS = ("echo one > one.txt", "cat one.txt one.txt > two.txt", "wc -l < two.txt > lines.txt")
PROXY_KEY = "sk-0123456789abcdef0123456789abcdef"
START_LIMIT = 120
TASK_LIMIT = 900
ABORT_LIMIT = 30
# What clients say of an answer that their own limit ended: it is no fault of the protocol.
ENDED_BY_LENGTH = ("reason='max_output_tokens'", "due to a max_tokens length limit")


class Failure(Exception):
    """A client did not do what it should."""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def process(command, log, environment=None):
    """Runs a command until the block ends."""
    with open(log, "wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(60)


def wait_for(running, log, is_ready):
    for _ in range(START_LIMIT * 10):
        if is_ready():
            return
        if running.poll() is not None:
            break
        time.sleep(0.1)
    raise Failure(f"it did not start: {pathlib.Path(log).read_text(encoding='utf-8', errors='replace')[-2000:]}")


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def answers(url):
    try:
        get(url)
    except OSError:
        return False
    return True


class Cluster:
    def __init__(self, http, logs):
        self.base = f"http://{http}"
        self.logs = logs
        self.model = json.loads(get(f"{self.base}/v1/models"))["data"][0]["id"]

    def metric(self, name):
        lines = get(f"{self.base}/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def answers_begun(self):
        # It is counted at the end of a request, and a client that was ended has left one.
        for _ in range(ABORT_LIMIT * 10):
            if not self.metric("baton_conductor_requests_running"):
                break
            time.sleep(0.1)
        return self.metric("baton_conductor_time_to_first_token_seconds_count")

    def refused(self):
        """The lines about requests that were refused as wrong."""
        lines = (self.logs / "conductor.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if "request rejected" in line]


@contextlib.contextmanager
def cluster(baton, folder, *options):
    ready, log = folder / "ready.json", folder / "up.log"
    ready.unlink(missing_ok=True)
    logs = pathlib.Path(tempfile.mkdtemp(dir=folder))
    addresses = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command = [baton, "up", *addresses, "--ready-file", ready, "--log-dir", logs, *options]
    with process(command, log) as up:
        wait_for(up, log, lambda: ready.is_file() and ready.stat().st_size > 0)
        yield Cluster(json.loads(ready.read_text(encoding="utf-8"))["conductor"]["http"], logs)


def with_long_context(model, folder):
    """A copy of a GGUF file that says that its context is 131,072."""
    data = bytearray(pathlib.Path(model).read_bytes())
    key = b"llama.context_length"
    # The key is followed by the type (4: u32) and the value.
    place = data.index(key) + len(key) + 4
    data[place : place + 4] = struct.pack("<I", 131_072)
    copy = folder / "long.gguf"
    copy.write_bytes(data)
    return copy


def run(command, cwd, environment):
    ran = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TASK_LIMIT,
        check=False,
    )
    if ran.returncode != 0:
        raise Failure(f"exit status {ran.returncode}: {(ran.stdout + ran.stderr).strip()[-1500:]}")
    return ran.stdout


def check(found, expected):
    if found != expected:
        raise Failure(f"expected {expected!r}, found {found!r}")


def check_weather(output):
    done = json.loads(output.splitlines()[-1])
    check(done["asked"], list(CITIES))
    check(done["answer"], DONE)


class Client:
    """A client from PyPI or npm that calls a function of its own program."""

    def __init__(self, name, command, version, script=None, checked=check_weather):
        self.name = name
        self.command = command
        self.version = version
        self.script = script or WEATHER
        self.checked = checked

    def run(self, cluster, work):
        return run([*self.command, cluster.base, cluster.model], work, {})

    def check(self, output, _work):
        self.checked(output)


class Proxied(Client):
    """A client behind litellm's proxy."""

    def __init__(self, *client, proxy):
        super().__init__(*client)
        self.proxy = proxy

    def run(self, cluster, work):
        port = free_port()
        over = {"over-chat": ("hosted_vllm", f"{cluster.base}/v1"), "over-messages": ("anthropic", cluster.base)}
        routes = [
            {
                "model_name": name,
                "litellm_params": {"model": f"{provider}/{cluster.model}", "api_base": base, "api_key": "dummy"},
            }
            for name, (provider, base) in over.items()
        ]
        config = {
            "model_list": routes,
            "litellm_settings": {"telemetry": False},
            "general_settings": {"master_key": PROXY_KEY},
        }
        (work / "proxy.json").write_text(json.dumps(config), encoding="utf-8")
        command = [self.proxy, "--config", "proxy.json", "--host", "127.0.0.1", "--port", str(port)]
        log = work / "proxy.log"
        environment = {**os.environ, "LITELLM_TELEMETRY": "False", "PWD": str(work)}
        with contextlib.chdir(work), process(command, log, environment) as proxy:
            base = f"http://127.0.0.1:{port}"
            wait_for(proxy, log, lambda: answers(f"{base}/health/liveliness"))
            return run([*self.command, base, cluster.model], work, {"PROXY_KEY": PROXY_KEY})


class Shell(Client):
    """An agent that runs commands in its folder."""

    def check(self, output, work):
        check((work / "two.txt").read_text(encoding="utf-8"), "one\none\n")
        check((work / "lines.txt").read_text(encoding="utf-8").strip(), "2")
        if DONE not in output:
            raise Failure(f"the last answer is not in its output: {output[-500:]!r}")


class ClaudeCode(Shell):
    def run(self, cluster, work):
        home = work / "home"
        home.mkdir()
        environment = {
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": cluster.base,
            "ANTHROPIC_API_KEY": "dummy",
            "ANTHROPIC_MODEL": cluster.model,
            "ANTHROPIC_SMALL_FAST_MODEL": cluster.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            # It ends a stream without an event after five minutes, which a slow machine needs for its prompt.
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(TASK_LIMIT * 1000),
        }
        options = ["--allowedTools", "Bash", "--output-format", "json"]
        return run([*self.command, "-p", "Write a file of two lines, and count them.", *options], work, environment)


class Codex(Shell):
    def run(self, cluster, work):
        home = work / "codex"
        home.mkdir()
        provider = f'{{name="baton",base_url="{cluster.base}/v1",env_key="BATON_KEY",wire_api="responses"}}'
        settings = [
            "model_provider=baton",
            f"model={cluster.model}",
            f"model_providers.baton={provider}",
            "analytics.enabled=false",
            "check_for_update_on_startup=false",
        ]
        options = [part for setting in settings for part in ("-c", setting)]
        sandbox = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
        environment = {"CODEX_HOME": str(home), "BATON_KEY": "dummy"}
        return run([*self.command, "exec", *sandbox, *options, "Write a file of two lines."], work, environment)


class Aider(Client):
    def run(self, cluster, work):
        (work / "a.py").write_text("print('bye')\n", encoding="utf-8")
        quiet = [f"--no-{what}" for what in ("git", "analytics", "check-update", "show-release-notes", "pretty")]
        model = ["--model", f"openai/{cluster.model}", "--no-show-model-warnings"]
        options = [*model, "--yes-always", "--analytics-disable"]
        environment = {"OPENAI_API_BASE": f"{cluster.base}/v1", "OPENAI_API_KEY": "dummy", "HOME": str(work)}
        return run([*self.command, *options, *quiet, "--message", "Print hello.", "a.py"], work, environment)

    def check(self, _output, work):
        check((work / "a.py").read_text(encoding="utf-8"), "print('hello')\n")


def pip_version(python, package):
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def npm_version(cache, package):
    return json.loads((cache / "node/node_modules" / package / "package.json").read_text(encoding="utf-8"))["version"]


def shell_script(tool, argument):
    calls = [{"calls": [{"name": tool, "arguments": {argument: command}}]} for command in COMMANDS]
    return [*calls, {"text": DONE}]


def claude_script():
    script = shell_script("Bash", "command")
    for turn, command in zip(script, COMMANDS):
        turn["calls"][0]["arguments"]["description"] = command
    return script


def objects(kind):
    """What instructor's three questions are answered with."""
    if kind == "TOOLS":
        return [{"calls": [{"name": "Weather", "arguments": {"city": city}}]} for city in CITIES]
    return [{"text": json.dumps({"city": city})} for city in CITIES]


def check_objects(output):
    check(json.loads(output.splitlines()[-1])["asked"], list(CITIES))


def clients(cache):
    node = cache / "node/node_modules"
    aider = cache / "aider/bin"
    version = npm_version(cache, "@anthropic-ai/claude-code")
    yield ClaudeCode("Claude Code", [node / ".bin/claude"], version, claude_script())
    version = npm_version(cache, "@openai/codex")
    yield Codex("Codex", [node / ".bin/codex"], version, shell_script("exec_command", "cmd"))
    # Modules are looked for beside the program.
    program = cache / "node/ai_sdk.mjs"
    program.write_bytes((HERE / "ai_sdk.mjs").read_bytes())
    packages = {"responses": "openai", "chat": "openai", "anthropic": "anthropic", "compatible": "openai-compatible"}
    for provider, package in packages.items():
        version = f"{npm_version(cache, 'ai')}, {package} {npm_version(cache, f'@ai-sdk/{package}')}"
        yield Client(f"AI SDK {provider}", ["node", program, provider], version)
    edit = [{"text": "a.py\n```\nprint('hello')\n```\n"}]
    yield Aider("aider", [aider / "aider"], pip_version(aider / "python", "aider-chat"), edit)

    def of(name):
        package = name.split()[0]
        python = cache / ("pydantic-ai" if package == "pydantic-ai" else "clients") / "bin/python"
        package = {"litellm-proxy": "litellm", "pydantic-ai": "pydantic-ai-slim"}.get(package, package)
        return name, [python, HERE / "python_clients.py", name], pip_version(python, package)

    for kind in ("chat", "responses"):
        yield Client(*of(f"langchain-openai {kind}"))
    yield Client(*of("langchain-anthropic"))
    for kind in ("chat", "chat stream", "responses", "responses stream"):
        yield Client(*of(f"openai-agents {kind}"))
    for kind in ("chat", "responses", "messages"):
        yield Client(*of(f"pydantic-ai {kind}"))
    for kind in ("TOOLS", "JSON_SCHEMA"):
        yield Client(*of(f"instructor {kind}"), objects(kind), check_objects)
    for provider in ("openai", "hosted_vllm", "anthropic"):
        yield Client(*of(f"litellm {provider}"))
    for provider in ("hosted_vllm", "anthropic"):
        yield Proxied(*of(f"litellm-proxy {provider}"), proxy=cache / "clients/bin/litellm")


def tell(name, version, where, outcome):
    print(f"{name:<32} {version:<40} {where:<6} {outcome}", flush=True)


def attempt(client, cluster, work, is_checked):
    """How many answers began. Raises if the client does not do what it should."""
    refused, begun = len(cluster.refused()), cluster.answers_begun()
    try:
        output = client.run(cluster, work)
    except subprocess.TimeoutExpired as late:
        if is_checked:
            raise Failure(str(late)) from late
    except Failure as failure:
        if is_checked or not any(words in str(failure) for words in ENDED_BY_LENGTH):
            raise
    else:
        if is_checked:
            client.check(output, work)
    if lines := cluster.refused()[refused:]:
        raise Failure(f"a request was refused: {lines[0]}")
    begun = cluster.answers_begun() - begun
    if not begun:
        raise Failure("no answer began")
    return int(begun)


def try_client(client, cluster, where, is_checked):
    """Whether the client did what it should."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            begun = attempt(client, cluster, pathlib.Path(folder), is_checked)
        except (Failure, OSError, ValueError) as failure:
            tell(client.name, client.version, where, f"FAILED: {failure}")
            return False
    tell(client.name, client.version, where, f"ok, {time.monotonic() - start:.1f} s, {begun} answers")
    return True


def main():
    baton, model, cache, *names = sys.argv[1:]
    chosen = list(clients(pathlib.Path(cache)))
    if names:
        chosen = [client for client in chosen if any(name in client.name for name in names)]
    if not chosen:
        sys.exit(f"run.py: no client is called so: {', '.join(names)}")
    passed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for client in chosen:
            script = folder / "answers.json"
            script.write_text(json.dumps(client.script), encoding="utf-8")
            with cluster(baton, folder, "--engine", "mock", "--mock-answers", script) as mock:
                passed.append(try_client(client, mock, "mock", is_checked=True))
        long = with_long_context(model, folder)
        # A model that small may never end its answer.
        template = f"conductor.chat_template={TEMPLATE}"
        with cluster(baton, folder, "--model", long, "--max-model-len", "32768", "--set", template) as real:
            passed += [try_client(client, real, "model", is_checked=False) for client in chosen]
    print(f"{sum(passed)} of {len(passed)} passed")
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
