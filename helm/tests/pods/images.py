"""Images by their names. Their programs are this machine's."""

import dataclasses
import json
import pathlib
import re
import shutil


@dataclasses.dataclass(frozen=True)
class Image:
    # Folder that becomes /usr/local/bin.
    programs: pathlib.Path
    user: tuple[int, int] = (0, 0)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def of_dockerfile(text, programs):
    """The image that a Dockerfile makes of these programs."""
    last = re.split(r"(?m)^FROM .*$", text)[-1]

    def words(instruction):
        found = re.search(rf"(?m)^{instruction} (\[.*\])$", last)
        return tuple(json.loads(found.group(1))) if found else ()

    user = re.search(r"(?m)^USER (\d+):(\d+)$", last)
    copied = re.search(r"(?m)^COPY --from=build /binaries/ (\S+)$", last).group(1)
    assert copied == "/usr/local/bin/", f"programs are in {copied}"
    return Image(programs, tuple(map(int, user.groups())) if user else (0, 0), words("ENTRYPOINT"), words("CMD"))


def holding(folder, *programs):
    """An image of programs that this machine has."""
    folder.mkdir(parents=True)
    for program in programs:
        shutil.copy2(shutil.which(program), folder)
    return Image(folder)


class Registry:
    """Repository to image, or repository:tag."""

    def __init__(self, images):
        self.images = images

    def pull(self, name):
        found = self.images.get(name) or self.images.get(name.rsplit(":", 1)[0])
        assert found, f"no image {name}: {sorted(self.images)}"
        return found
