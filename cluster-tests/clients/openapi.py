"""Schemathesis and what /openapi.json says: openapi.py HOST:PORT, of a cluster with the mock engine.

Schemathesis calls every path with bodies that fit the document and with bodies that do not, and holds the answers to it. It loads this file as its hooks, too:
they keep generations short, and check what its own checks leave out.
"""

import json
import os
import re
import sys
from pathlib import Path

import schemathesis

from common import address

SEED, EXAMPLES = 1, 20
# What fits the document may still be refused: rules between fields and those of the model are not in it. `refusals_name_a_field` stands in for it.
LEFT_OUT = ["positive_data_acceptance"]
# Fields that bound an answer. If one is absent, the answer goes on until the context is full.
LENGTHS = {
    "/v1/completions": ["max_tokens"],
    "/v1/chat/completions": ["max_completion_tokens", "max_tokens"],
    "/v1/responses": ["max_output_tokens"],
    "/v1/messages": ["max_tokens"],
}
LONGEST = 8
OBJECTIVES = {"x-baton-ttft-slo-ms", "x-baton-tbt-slo-ms"}
TIMEOUT = "x-baton-timeout-ms"
REFUSED = {400, 404}
ENDS = {"response.completed", "response.incomplete", "message_stop"}
TIMEOUTS = {"deadline_exceeded", "timeout_error"}


@schemathesis.hook
def before_load_schema(_context, document):
    """The document says once, in words, that null is the same as no field: one that is not known may be null."""
    if isinstance(document, dict) and document.get("additionalProperties") is False:
        document["additionalProperties"] = {"type": "null"}
    for part in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        before_load_schema(_context, part)


@schemathesis.hook
def before_call(_context, case, _kwargs):
    """Keeps what would be taken short and possible; what would be refused stays as it is."""
    for header in OBJECTIVES & set(case.headers or {}):
        # Schemathesis likes the least number above 0, and an objective of less than a nanosecond is none.
        case.headers[header] = re.sub(r".+e-[0-9]+", "1000", str(case.headers[header]))
    if re.fullmatch(r"[0-9][0-9.e+-]*", str((case.headers or {}).get(TIMEOUT))):
        # A request that may take a millisecond ends with 504, which the checks take for a bug.
        case.headers[TIMEOUT] = "60000"
    fields = LENGTHS.get(case.path, [])
    if not fields or not isinstance(case.body, dict):
        return
    if all(case.body.get(field) is None for field in fields) and case.path != "/v1/messages":
        case.body[fields[0]] = LONGEST
    for field in fields:
        length = case.body.get(field)
        is_whole = type(length) is int or (type(length) is float and length.is_integer())
        if is_whole and length > LONGEST:
            case.body[field] = LONGEST


@schemathesis.hook
def filter_case(_context, case):
    """A header that is not in the document is no violation: gateways add theirs."""
    return "x-schemathesis-unknown-property" not in (case.headers or {})


@schemathesis.check
def refusals_name_a_field(_context, response, case):
    """A body that fits the document is taken, or a field of it is named: it is never "the body" that is wrong."""
    if response.status_code in REFUSED and case.meta.generation.mode.is_positive and case.method == "POST":
        error = response.json()["error"]
        named = error.get("param") or error["message"].partition(":")[0]
        assert named and named != "body", error


@schemathesis.check
def streams_end_as_their_api_says(_context, response, _case):
    # Schemathesis hangs up on a stream after 20 events.
    is_stream = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
    if is_stream and not response.stream_cut_short:
        last = response.content.decode().rstrip().rpartition("data: ")[2].partition("\n")[0]
        event = {} if last == "[DONE]" else json.loads(last)
        # One that had its time is told so.
        error = event.get("error") or event.get("response", {}).get("error") or {}
        is_late = error.get("type") in TIMEOUTS or "not over within" in error.get("message", "")
        assert last == "[DONE]" or event.get("type") in ENDS or is_late, last


def main():
    environment = os.environ | {"SCHEMATHESIS_HOOKS": Path(__file__).stem, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://{address()}/openapi.json", "--seed", SEED, "--max-examples", EXAMPLES]
    command += ["--exclude-checks", ",".join(LEFT_OUT), "--generation-database", "none", "--no-color"]
    os.execve(sys.executable, [str(part) for part in command], environment)


if __name__ == "__main__":
    main()
