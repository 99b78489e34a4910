"""Google's own compiler over all files of proto/: each is accepted, alone too, and names nothing that a language of its clients reserves. Needs no cluster."""

import keyword
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2, message
from grpc_tools import protoc

from common import run

PROTO = Path(__file__).resolve().parents[2] / "proto" / "proto"
FILES = sorted(str(file.relative_to(PROTO)) for file in PROTO.rglob("*.proto"))
# Keywords of Go and Java that Python's list lacks.
RESERVED = set(keyword.kwlist) | set("chan const default defer fallthrough func go goto interface map package range select struct switch type var".split())
RESERVED |= set("abstract boolean byte case catch char class double enum extends final float implements int long native new private protected public short static super synchronized this throw throws transient try void volatile".split())


def generated(*flags, files=FILES):
    with tempfile.TemporaryDirectory() as folder:
        failed = protoc.main(["protoc", f"--proto_path={PROTO}", *(flag.format(folder=folder) for flag in flags), *files])
        assert not failed, f"{files}: exit status {failed}"
        return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def descriptors():
    written = generated("--descriptor_set_out={folder}/all")["all"]
    return descriptor_pb2.FileDescriptorSet.FromString(written).file


def each_file_alone_is_accepted():
    assert len(FILES) == 4, FILES
    for file in FILES:
        generated("--descriptor_set_out={folder}/all", files=[file])


def python_stubs_are_generated_with_types():
    files = generated("--python_out={folder}", "--pyi_out={folder}", "--grpc_python_out={folder}")
    stems = [file.removesuffix(".proto") for file in FILES]
    assert sorted(files) == sorted(stem + end for stem in stems for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")), sorted(files)
    for name, text in files.items():
        compile(text, name, "exec")


def no_name_is_reserved():
    # A field of such a name is no attribute of the message.
    taken = RESERVED | {name for name in dir(message.Message) if not name.startswith("_")}
    for file in descriptors():
        for kind in file.message_type:
            names = [field.name for field in kind.field] + [kind.name]
            assert not taken.intersection(names), f"{file.name}: {kind.name}: {taken.intersection(names)}"


def go_has_a_package():
    assert {file.options.go_package for file in descriptors()} == {"baton/v1;batonv1"}


run(each_file_alone_is_accepted, python_stubs_are_generated_with_types, no_name_is_reserved, go_has_a_package)
