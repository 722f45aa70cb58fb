"""Miniatures of the published files of every task, in the form of the real ones."""

import gzip
import itertools
import random
import zipfile

from tests.recipes import conftest
from tests.recipes.data import wmt_archives
from tests.recipes.data.archive_server import iwslt_archive, write_tar

WORDS = "the a dog cat sees hears house in of and old new , . ' \" café naïve".split()
WIKITEXT103, GBW = "wikitext-103-v1.zip", "1-billion-word-language-modeling-benchmark-r13output"
WIKITEXT_LINES = {"train": 60, "valid": 9, "test": 11}
GBW_TRAIN = GBW + "/training-monolingual.tokenized.shuffled/news.en-{:05}-of-00100"
GBW_HELD_OUT = GBW + "/heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05}-of-00050"


def sentences(seed, lines):
    """Text of a few words; the first word of a line is seen in the text of this seed only."""
    draw = random.Random(seed)
    rows = [[f"only{seed}", *draw.choices(WORDS, k=draw.randint(1, 9))] for _ in range(lines)]
    return "".join(" ".join(row) + "\n" for row in rows).encode()


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


def wikitext(part):
    """As in the corpus: a title between empty lines, a space at both ends of each line, <unk> in the text."""
    lines = sentences(WIKITEXT_LINES[part], WIKITEXT_LINES[part]).decode().splitlines()
    text = [" ", f" = {part} = ", " ", *(f" {line} <unk> . " for line in lines)]
    return "".join(line + "\n" for line in text).encode()


def wikitext103():
    """Name → bytes of the archive's files."""
    return {f"wikitext-103/wiki.{part}.tokens": wikitext(part) for part in ("test", "valid", "train")}


def gbw():
    """Name → bytes: 99 files of training text in another order than their names', and 50 of held-out text."""
    numbers = list(range(1, 100))
    random.Random(1).shuffle(numbers)
    files = {f"{GBW}/README": b"about the corpus\n"}
    files |= {GBW_TRAIN.format(i): sentences(i, 2 + i % 2) for i in numbers}
    split = GBW_TRAIN.format(50)
    files[split] = files[split].replace(b" ", b"\r", 1)  # only fairseq would end a line there
    return files | {GBW_HELD_OUT.format(i): sentences(1000 + i, 3 + i) for i in range(50)}


def _multi30k(folder):
    parts = ("train", "val", "test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")
    conftest.write_parts(folder, parts, (120, 10, 10, 5, 5))
    for path in list(folder.iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()


def _wikitext2(folder):
    for seed, part in enumerate(("train", "valid", "test")):
        (folder / f"{part}.txt").write_bytes(sentences(seed, 40))


def _cnndm(folder):
    from tests.recipes.data.test_prepare_cnndm import write_all

    write_all(folder)


def _iwslt(folder):
    from lightconv_plugin.recipes.grammar.corpus import pairs

    (folder / "de-en.tgz").write_bytes(iwslt_archive(itertools.islice(pairs(3), 140)))


PUBLISHED = {
    "multi30k_en_de": _multi30k,
    "wikitext2": _wikitext2,
    "wikitext103": lambda folder: write_zip(folder / WIKITEXT103, wikitext103()),
    "gbw": lambda folder: write_tar(folder / f"{GBW}.tar.gz", gbw()),
    "cnndm": _cnndm,
    "iwslt14_de_en": _iwslt,
    "wmt16_en_de": wmt_archives.google_en_de,
    "wmt14_en_de": wmt_archives.en_de,
    "wmt14_en_fr": wmt_archives.en_fr,
    "wmt17_zh_en": wmt_archives.zh_en,
}
"""Task → a function that writes its published files into an existing folder."""
