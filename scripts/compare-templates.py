"""Prints the chat templates in wheels, or in a folder, with what Jinja2 makes of them: the input of a test of baton-text.

    compare-templates.py FILE.whl... FOLDER... > templates.json

Templates are files that end with .jinja, and the fields chat_template of JSON files. Each is taken once. Those that are not text with messages
are left out.
"""

import json
import pathlib
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "crates/text/tests/fixtures"))
import generate_templates  # noqa: E402


def files(path):
    """Names and bytes of the files that may hold templates."""
    if path.is_dir():
        for file in sorted(path.rglob("*.jinja")):
            yield str(file.relative_to(path)), file.read_bytes()
        return
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith((".jinja", ".json")):
                yield name, wheel.read(name)


def fields(value):
    """The fields chat_template of a JSON value, at any depth."""
    if isinstance(value, list):
        for item in value:
            yield from fields(item)
    elif isinstance(value, dict):
        if isinstance(value.get("chat_template"), str):
            yield value["chat_template"]
        for item in value.values():
            yield from fields(item)


def templates(path):
    for name, content in files(path):
        text = content.decode(errors="replace")
        if name.endswith(".jinja"):
            yield name, text
        elif '"chat_template"' in text:
            for index, source in enumerate(fields(json.loads(text))):
                yield f"{name}#{index}", source


def main():
    found = {}
    for path in sys.argv[1:]:
        for name, source in templates(pathlib.Path(path)):
            if "messages" in source:
                found.setdefault(source, name)
    json.dump(generate_templates.rendered({name: source for source, name in found.items()}), sys.stdout)


if __name__ == "__main__":
    main()
