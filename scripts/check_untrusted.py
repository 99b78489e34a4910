#!/usr/bin/env python3
"""Compares docs/untrusted-input.md with the code.

A row's files, functions and tests exist. Its constants are defined in its files, and have the values that it gives.
Its settings exist, and have these defaults. Every fuzz target is named.
"""

import pathlib
import re
import subprocess
import sys

PAGE = "docs/untrusted-input.md"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ms": 1e-3, "s": 1}
GIVEN = re.compile(r"`([A-Za-z_]+)`(?: = (2\^\d+|[\d.,]+(?:e\d+)?)(?: (KiB|MiB|GiB|ms|s)\b)?)?")


def sources():
    listed = subprocess.run(["git", "ls-files", "*.rs"], capture_output=True, text=True, check=True).stdout
    return {name: pathlib.Path(name).read_text() for name in listed.splitlines() if pathlib.Path(name).exists()}


def number(text):
    """The value of a constant, or of a default; None if it is not made of numbers alone."""
    text = re.sub(r"Duration::from_(secs|millis)\((.*)\)", lambda of: f"({of[2]}) * {1 if of[1] == 'secs' else 0.001}", text)
    text = re.sub(r"\bas \w+|(?<=\d)_(?=\d)", "", text.replace("MAX_MESSAGE_BYTES", str(32 << 20)))
    return eval(text, {}) if re.fullmatch(r"[\d\s.()*<+e-]+", text) else None  # nothing but digits and operators


def is_equal(value, other):
    return value is not None and abs(value - other) < 1e-9 * (1 + abs(value))


def given(digits, unit):
    power = re.fullmatch(r"2\^(\d+)", digits)
    value = 1 << int(power[1]) if power else float(digits.rstrip(",").replace(",", ""))
    return value * UNITS.get(unit, 1)


def problems_of(row, code, all_code, targets):
    _, read_in, bound, test = (cell.strip() for cell in row.strip().strip("|").split(" | "))
    paths = re.findall(r"`([\w/.-]+\.rs)`", read_in)
    yield from (f"{path}: no such file" for path in paths if path not in code)
    here = [code.get(path, "") for path in paths]
    for name, path in re.findall(r"`(\w+)` in `([\w/.-]+\.rs)`", read_in):
        if not re.search(rf"\bfn {name}\b", code.get(path, "")):
            yield f"{path}: no function {name}"
    for name, digits, unit in GIVEN.findall(bound):
        if name.isupper():
            found = [of for text in here for of in re.findall(rf"const {name}: [^=]+ = ([^;]+);", text)]
        else:
            found = re.findall(rf"^ +(?:pub )?{name}: [^=\n]+(?: = ([^,\n]+), \"|,$)", all_code, re.M) or (
                [""] if re.search(rf"(?:struct|enum) {name}\b|^ +{name}: ", all_code, re.M) else []
            )
        values = [number(of) for of in found]
        if not found:
            yield f"{name} is not in {' or '.join(paths)}"
        elif digits and not any(is_equal(value, given(digits, unit)) for value in values):
            yield f"{name} is {' or '.join(found)}, and not {digits} {unit}"
    named = re.findall(r"`((?:fuzz:)?[\w-]+)`", test)
    if not named:
        yield "no test"
    for name in named:
        if name.startswith("fuzz:"):
            if name[5:] not in targets:
                yield f"no fuzz target {name[5:]}"
        elif not re.search(rf"\bfn {name}\b", all_code):
            yield f"no test {name}"


def main():
    code = sources()
    all_code = "\n".join(code.values())
    targets = re.findall(r'^ +name: "([\w-]+)",', code["crates/fuzz/src/targets/mod.rs"], re.M)
    text = pathlib.Path(PAGE).read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| input |")]
    problems = [f"{PAGE}: {row.split(' | ')[0][2:]}: {problem}" for row in rows for problem in problems_of(row, code, all_code, targets)]
    problems += [f"{PAGE}: fuzz target {name} is not named" for name in targets if f"`fuzz:{name}`" not in text]
    print(f"{PAGE}: {len(rows)} inputs")
    print("\n".join(problems), file=sys.stderr)
    if problems:
        sys.exit(f"{len(problems)} problems")


main()
