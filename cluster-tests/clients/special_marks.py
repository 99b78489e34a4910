"""Writes SmolLM2 with marks of Mistral's as special tokens, in place of some that it never uses: special_marks.py FROM TO."""

import struct
import sys
from pathlib import Path


def strings(*texts):
    return b"".join(struct.pack("<Q", len(text)) + text.encode() for text in texts)


# Of one length in all, so that nothing else of the file moves.
OLD = strings("<repo_name>", "<reponame>", "<file_sep>", "<filename>")
NEW = strings("[TOOL_CALLS]", "[ARGS]", "<|unused_0|>", "<|unused_|>")
assert len(OLD) == len(NEW)

source, target = sys.argv[1:]
model = Path(source).read_bytes()
assert model.count(OLD) == 1, f"{source} has no such tokens"
Path(target).write_bytes(model.replace(OLD, NEW))
