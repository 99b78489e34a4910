"""Reads a Dockerfile and a .dockerignore: only what ours use. All else is an error with its line, so no step is left out in silence."""

import dataclasses
import os
import re
import shlex

from ends import Failed

# Parser directives, such as escape=, change what all the rest means.
DIRECTIVE = re.compile(r"#\s*(\w+)\s*=")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


@dataclasses.dataclass
class Instruction:
    line: int
    word: str
    text: str

    def error(self, reason):
        return Failed(f"Dockerfile:{self.line}: {reason}: {self.word} {self.text}")

    def expand(self, variables):
        """Its text with variables. One that is not set is an error, though Docker puts nothing."""

        def value(found):
            name = found[1] or found[2]
            if name not in variables:
                raise self.error(f"{name} is not set")
            return variables[name]

        text = VARIABLE.sub(value, self.text)
        if "$" in VARIABLE.sub("", self.text) or "\\" in self.text:
            raise self.error("escapes and ${NAME:-...} are not supported")
        return text

    def pairs(self, variables):
        """KEY=VALUE KEY=VALUE..."""
        words = shlex.split(self.expand(variables))
        if not words or any("=" not in word for word in words):
            raise self.error("expected KEY=VALUE")
        return dict(word.split("=", 1) for word in words)

    def flags(self, text):
        """Flags --NAME=VALUE before the rest: (name, value) of each, and the rest."""
        found = []
        while match := re.match(r"--([\w-]+)=(\S+)\s+", text):
            found.append((match[1], match[2]))
            text = text[match.end() :]
        if text.startswith("--"):
            raise self.error("a flag that is not supported")
        return found, text


def instructions(text):
    """The instructions of a Dockerfile, with the line where each begins. Lines that end with a backslash go on."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("#"):
            break
        directive = DIRECTIVE.match(line)
        if directive and directive[1] != "syntax":
            raise Failed(f"Dockerfile:{number}: directive {directive[1]} is not supported")
    found = []
    begun, first = "", 0
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        first = first if begun else number
        begun += line.rstrip()
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        word, _, rest = begun.strip().partition(" ")
        found.append(Instruction(first, word, rest.strip()))
        begun = ""
    if begun:
        raise Failed(f"Dockerfile:{first}: the last line goes on, but there is none")
    return found


class Ignored:
    """What a .dockerignore keeps out. The last pattern that matches counts, and one of a folder is one of all in it."""

    def __init__(self, text):
        self.patterns = []
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            pattern = line.removeprefix("!").strip("/")
            if re.search(r"[?\[\]\\]", pattern) or (line.startswith("!") and "*" in pattern):
                raise Failed(f".dockerignore:{number}: a pattern that is not supported: {line}")
            self.patterns.append((line.startswith("!"), pattern, self.regex(pattern)))

    @staticmethod
    def regex(pattern):
        parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
        text = re.sub(r"\*\*/|\*\*|\*|[^*]+", lambda found: parts.get(found[0], re.escape(found[0])), pattern)
        return re.compile(f"{text}(?:/.*)?")

    def has(self, path):
        is_out = False
        for is_exception, _, regex in self.patterns:
            if regex.fullmatch(path):
                is_out = not is_exception
        return is_out

    def has_all_of(self, folder):
        """Whether nothing below this folder is let in."""
        exceptions = (pattern for is_exception, pattern, _ in self.patterns if is_exception)
        return self.has(folder) and not any(pattern.startswith(f"{folder}/") for pattern in exceptions)

    def left(self, root):
        """Paths below `root`, folders first, that are not kept out."""
        for folder, folders, files in os.walk(root):
            below = os.path.relpath(folder, root)
            at = "" if below == "." else below + "/"
            folders[:] = sorted(name for name in folders if not self.has_all_of(at + name))
            # A link to a folder is among folders, but is not entered.
            yield from (at + name for name in [*folders, *sorted(files)] if not self.has(at + name))
