"""Writes helm/baton/README.md: the values, from values.yaml and its `# --` comments. --check fails if it differs."""

import re
import sys

import chart

HEAD = """# Values

Made from the comments of [values.yaml](values.yaml) by `UPDATE=1 scripts/test-helm.sh`. How to use them:
[docs/deploy/kubernetes.md](../../docs/deploy/kubernetes.md). Examples: [helm/examples](../examples).

`prefill` and `decode` have the same keys; each of `groups` may replace any of them but `groups` and `pdb`. Wrong
values are refused with their path.

| value | default | what it is |
|---|---|---|
"""


def described(text):
    """Path to comment, in order. Flow maps and lists are one value."""
    stack, comment, found = [], [], {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("# -- "):
            comment = [stripped.removeprefix("# -- ")]
            continue
        match = re.match(r"( *)(\w+):(.*)$", line)
        if not match or stripped.startswith("#"):
            continue
        depth = len(match.group(1))
        while stack and stack[-1][0] >= depth:
            stack.pop()
        covered = stack and stack[-1][2]
        stack.append((depth, match.group(2), bool(comment) or covered))
        if comment:
            found[".".join(key for _, key, _ in stack)] = comment[0]
            comment = []
        elif not covered and match.group(3).strip():
            raise SystemExit(f"values.yaml:{number}: no `# --` comment before {match.group(2)}")
    return found


def default(values, path):
    for key in path.split("."):
        values = values[key]
    text = "" if values in (None, "") else flow(values)
    return f"`{text}`" if text else ""


def flow(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def reference():
    values = chart.values()
    rows = described((chart.CHART / "values.yaml").read_text())
    return HEAD + "".join(f"| `{path}` | {default(values, path)} | {text.replace('|', chr(92) + '|')} |\n" for path, text in rows.items())


if __name__ == "__main__":
    page = chart.CHART / "README.md"
    if "--check" in sys.argv:
        sys.exit(page.read_text() != reference())
    page.write_text(reference())
