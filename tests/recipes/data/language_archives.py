"""Miniatures of published archives, and a checkout of the scripts alone, for the tests of prepare_*.sh."""

import os
import random
import shutil
import subprocess
import zipfile

from tests.recipes.conftest import ROOT, heed_ctrl_c, script_environment
from tests.recipes.data.archive_server import LOCAL, tar_gz

WORDS = "the a dog cat sees hears house in of and old new , . ' \" café naïve".split()


def make_checkout(folder):
    """A checkout in which scripts may write: downloads go below it."""
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "lightconv_plugin").symlink_to(ROOT / "lightconv_plugin")
    return folder


def run_in(checkout, script, *arguments, timeout=240):
    """Run a checkout's script; the result has returncode, stdout, stderr."""
    command = [str(checkout / "scripts" / script), *map(str, arguments)]
    return subprocess.run(
        command, env=script_environment(**LOCAL), capture_output=True, text=True, timeout=timeout, check=False
    )


def stop_at(message, signal_number, checkout, script, *arguments):
    """Start a checkout's script and send its whole process group a signal when it says `message`; (status, stderr)."""
    process = subprocess.Popen(
        [str(checkout / "scripts" / script), *map(str, arguments)],
        env=script_environment(**LOCAL),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    said = []
    with process.stderr:
        for line in process.stderr:
            said.append(line)
            if message in line:
                os.killpg(process.pid, signal_number)
    return process.wait(timeout=60), "".join(said)


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
