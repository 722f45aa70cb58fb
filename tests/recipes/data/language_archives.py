"""Miniatures of published archives, for the tests of the preparations."""

import random
import zipfile

from tests.recipes.data.archive_server import tar_gz

WORDS = "the a dog cat sees hears house in of and old new , . ' \" café naïve".split()


def sentences(seed, lines):
    """Text of a few words; the first word of a line is seen in the text of this seed only."""
    draw = random.Random(seed)
    rows = [[f"only{seed}", *draw.choices(WORDS, k=draw.randint(1, 9))] for _ in range(lines)]
    return "".join(" ".join(row) + "\n" for row in rows).encode()


def write_tar(path, content):
    """A .tar.gz of {name: bytes}, in that order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_gz(content))
    return path


def write_zip(path, content):
    """A .zip of {name: bytes}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in content.items():
            file.writestr(name, data)
    return path


def files_of(folder):
    """{name: bytes} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def no_leftovers(out):
    """Whether nothing half-made lies in a prepared folder."""
    return not [path for path in out.rglob("*") if path.suffix in (".tmp", ".part")]
