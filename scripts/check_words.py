#!/usr/bin/env python3
"""The rules for words that a program can check: docs/glossary.md has the others.

- Documents, help and metrics: the median sentence has at most 18 words, the 90th percentile at most 28.
- No line of a document over 120 columns (tables aside), no comment in Rust or .proto over 100.
- No `code` that breaks over two lines of a document: it cannot be copied.
- None of the words below, in any of them or in a comment.
"""

import pathlib
import re
import statistics
import subprocess
import sys

FORBIDDEN = re.compile(
    r"front.?door|hand-?over|redirect|numerics|hit-density|\bseat|\b(?:some|no|any|every)body\b|\b(?:any|every|some)one\b|whoever|_microseconds_total", re.I
)
# Curl's and Kubernetes' redirects.
ALLOWED = re.compile(r"\bhost is redirected to\b|followRedirects")
NOT_OURS = re.compile(r"proptest-regressions/|^(docs/glossary\.md|scripts/check_words\.py|Cargo\.lock|helm/tests/schemas/)|/fixtures/")
MEDIAN, P90 = 18, 28


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", "--", *patterns], capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if not NOT_OURS.search(name) and pathlib.Path(name).exists()]


def prose(text):
    """Markdown without code, tables and headings; list items are paragraphs."""
    kept, is_code = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
            continue
        if is_code or line.startswith("    ") or line.lstrip().startswith("|") or line.startswith("#"):
            kept.append("")
            continue
        kept.append(re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", line))
    return "\n".join(kept)


def sentences(text):
    for paragraph in text.split("\n\n"):
        for sentence in re.split(r"(?<=[.!?:])\s+", paragraph.replace("\n", " ")):
            words = len(re.findall(r"[A-Za-z0-9`'/_-]+", sentence))
            if words >= 3:
                yield words


def helps(text):
    """Doc comments of clap's fields and of settings, and what metrics tell."""
    blocks = re.findall(r"((?: *///[^\n]*\n)+)(?: *#\[[^\n]*\n)* *#\[(?:arg|command)", text)
    for declared in re.findall(r"settings! \{\n(.*?)\n(?:    )?\}\n", text, re.S):
        blocks += re.findall(r"((?: *///[^\n]*\n)+)(?: *#\[[^\n]*\n)* *\w+: ", declared)
    yield from (re.sub(r" *///", "", block) for block in blocks)
    yield from re.findall(r'help: "((?:[^"\\]|\\.)*)"', text)


def main():
    problems, lengths = [], {"documents": [], "help and metrics": []}
    for name in tracked("*.md"):
        text = pathlib.Path(name).read_text()
        lengths["documents"] += sentences(prose(text))
        # Lines of code, too: an output that wraps cannot be read. Tables cannot be narrower.
        wide = [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")]
        problems += [f"{name}: a line of {len(line)} columns: {line[:60]}..." for line in wide]
        blocks = text.split("```")[::2]
        broken = [line for block in blocks for line in block.splitlines() if line.count("`") % 2]
        problems += [f"{name}: code that breaks over two lines: {line[-60:]}" for line in broken]
    for name in tracked("*.rs", "*.proto"):
        text = pathlib.Path(name).read_text()
        for about in helps(text):
            lengths["help and metrics"] += sentences(about)
        is_code = False
        for number, line in enumerate(text.splitlines(), 1):
            comment = line.lstrip().startswith("//")
            # Drawings, layouts and formulas are code.
            is_code = comment and is_code != ("```" in line)
            if comment and not is_code and len(line) > 100:
                problems.append(f"{name}:{number}: a comment of {len(line)} columns")
    for name in tracked():
        try:
            lines = pathlib.Path(name).read_text().splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            found = FORBIDDEN.search(ALLOWED.sub("", line))
            if found:
                problems.append(f"{name}:{number}: '{found.group()}' (docs/glossary.md)")
    for what, words in lengths.items():
        words.sort()
        median, p90 = statistics.median(words), words[int(0.9 * len(words))]
        print(f"{what}: {len(words)} sentences, median {median:.0f} words, 90th percentile {p90}, longest {words[-1]}")
        if median > MEDIAN or p90 > P90:
            problems.append(f"{what}: longer sentences than {MEDIAN} and {P90} words")
    print("\n".join(problems), file=sys.stderr)
    if problems:
        sys.exit(f"{len(problems)} problems")


main()
