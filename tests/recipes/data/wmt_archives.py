"""Miniatures of WMT's archives: their names, folders, members and sgm files, with text of a few words."""

import gzip
import itertools
import random
import zipfile

from tests.recipes.data.archive_server import write_tar

FRENCH = "l'homme la maison d'été où naïve « œuvre » vu ; voit aujourd'hui porte-parole 3,5 % . , ?".split()
ENGLISH = "the house man's summer where naive “ work ” seen well-known today it’s 3.5 % & . , ?".split()
CHINESE = "联合国 大会 和 会议 管理部 今天 我们 看到 语言 翻译 系统 ABC 3.5 。 , ？".split()
SIZES = {"first": 90, "second": 70, "third": 60, "small": 40, "set": 12}


CWMT = {
    "casia2015": [("casia2015_ch", "casia2015_en")],
    "casict2011": [("casict-A_ch", "casict-A_en"), ("casict-B_ch", "casict-B_en")],
    "casict2015": [("casict2015_ch", "casict2015_en")],
    "datum2015": [("datum_ch", "datum_en")],
    "datum2017": [(f"Book{i}_cn", f"Book{i}_en") for i in (1, 10, 2)],
    "neu2017": [("NEU_cn", "NEU_en")],
}


def _drawn(words, lines, seed, between=" "):
    draw = random.Random(seed)
    return [between.join(draw.choices(words, k=draw.randint(2, 9))) for _ in range(lines)]


def sides(langs, lines, seed):
    """Two texts of equal length; the line's number in both, so that no two lines are alike and any shift is seen."""
    words = {"en": ENGLISH, "de": ENGLISH, "fr": FRENCH, "zh": CHINESE}
    if set(langs) == {"en", "de"}:
        from lightconv_plugin.recipes.grammar.corpus import pairs

        english, german = zip(*itertools.islice(pairs(seed), lines), strict=True)
        texts = {"en": list(english), "de": list(german)}
    else:
        texts = {lang: _drawn(words[lang], lines, f"{seed}{lang}", "" if lang == "zh" else " ") for lang in langs}
    return [[f"{seed}{i} {line}" for i, line in enumerate(texts[lang])] for lang in langs]


def as_bytes(lines):
    return "".join(line + "\n" for line in lines).encode()


def sgm(lines, kind, lang, name="newstest2014"):
    """A source (kind src) or reference (ref) file as WMT has it: two documents, headlines in <hl>, several <p>."""
    tag = "srcset" if kind == "src" else "refset"
    rows = [f'<{tag} setid="{name}" srclang="any" trglang="{lang}">']
    half = len(lines) // 2
    for number, part in enumerate((lines[:half], lines[half:])):
        rows.append(f'<doc sysid="{kind}" docid="paper-{number}" genre="news" origlang="en">')
        rows += ["<hl>", f'<seg id="1">{part[0]}</seg>', "</hl>", "<p>"]
        rows += [f'<seg id="{i}">{line}</seg>' for i, line in enumerate(part[1:], 2)]
        rows += ["</p>", "</doc>"]
    return as_bytes([*rows, f"</{tag}>"])


def parallel(archive, stem, langs, lines, seed, packing="gz", extra=None):
    """A tar with STEM.LANG of two languages, and their lines."""
    texts = sides(langs, lines, seed)
    content = {f"{stem}.{lang}": as_bytes(text) for lang, text in zip(langs, texts, strict=True)}
    write_tar(archive, (extra or {}) | content, packing)
    return texts


def _set(archive, folder, name, pair, langs, seed):
    texts = sides(langs, SIZES["set"], seed)
    kinds = [("src", langs[0]), ("ref", langs[1])]
    content = {
        f"{folder}/{name}-{pair}-{kind}.{lang}.sgm": sgm(text, kind, lang, name)
        for (kind, lang), text in zip(kinds, texts, strict=True)
    }
    content[f"{folder}/{name}-csen-src.cs.sgm"] = sgm(["Něco jiného .", "Ahoj"], "src", "cs")
    write_tar(archive, content)
    return texts


def en_de(folder, news="v12"):
    """fairseq's prepare-wmt14en2de.sh: ([the lines of each source, side by side], the test set's)."""
    langs = ("en", "de")
    train = [
        parallel(
            folder / "training-parallel-europarl-v7.tgz",
            "training/europarl-v7.de-en",
            langs,
            SIZES["first"],
            1,
            extra={"training/europarl-v7.cs-en.cs": b"jine\n"},
        ),
        parallel(
            folder / "training-parallel-commoncrawl.tgz",
            "commoncrawl.de-en",
            langs,
            SIZES["second"],
            2,
            extra={"commoncrawl.de-en.annotation": b"http://x\n"},
        ),
        parallel(
            folder / f"training-parallel-nc-{news}.tgz",
            f"training/news-commentary-{news}.de-en",
            langs,
            SIZES["third"],
            3,
        ),
    ]
    return train, _set(folder / "test-full.tgz", "test-full", "newstest2014", "deen", langs, 4)


def en_fr(folder):
    """fairseq's prepare-wmt14en2fr.sh; giga-fren is a tar of two .gz."""
    langs = ("en", "fr")
    names = [
        ("training-parallel-europarl-v7.tgz", "training/europarl-v7.fr-en", 700),
        ("training-parallel-commoncrawl.tgz", "commoncrawl.fr-en", 300),
        ("training-parallel-un.tgz", "un/undoc.2000.fr-en", 300),
        ("training-parallel-nc-v9.tgz", "training/news-commentary-v9.fr-en", 40),
    ]
    train = [parallel(folder / name, stem, langs, size, i) for i, (name, stem, size) in enumerate(names, 1)]
    train.append(sides(langs, 1400, 5))
    giga = {
        f"giga-fren.release2.fixed.{lang}.gz": gzip.compress(as_bytes(text))
        for lang, text in zip(langs, train[-1], strict=True)
    }
    write_tar(folder / "training-giga-fren.tar", giga, "")
    return train, _set(folder / "test-full.tgz", "test-full", "newstest2014", "fren", langs, 6)


def zh_en(folder, cwmt=True):
    """News Commentary, UN, CWMT's zips (datum2017 in several books, words divided), dev and test sets."""
    langs = ("zh", "en")
    news, un = folder / "training-parallel-nc-v12.tgz", folder / "UNv1.0.en-zh.tar.gz"
    train = [
        parallel(news, "training/news-commentary-v12.zh-en", langs, SIZES["third"], 1),
        parallel(un, "en-zh/UNv1.0.en-zh", langs, SIZES["second"], 2, extra={"en-zh/README": b"read\n"}),
    ]
    for number, (name, files) in enumerate(CWMT.items() if cwmt else (), 10):
        texts = {}
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as file:
            for book, stems in enumerate(files):
                texts[stems[0]] = sides(langs, 15 if len(files) > 1 else SIZES["small"], 10 * number + book)
                if name == "datum2017":
                    texts[stems[0]][0] = [" ".join(line) for line in texts[stems[0]][0]]
                for stem, text in zip(stems, texts[stems[0]], strict=True):
                    bom = b"\xef\xbb\xbf" if name == "casict2011" else b""
                    file.writestr(f"{name}/{stem}.txt", bom + as_bytes(text))
            file.writestr(f"{name}/readme.doc", b"about")
        order = sorted(texts, key=lambda stem: (len(stem), stem))  # Book2 before Book10
        train.append([list(itertools.chain.from_iterable(texts[stem][side] for stem in order)) for side in (0, 1)])
    valid = _set(folder / "dev.tgz", "dev", "newsdev2017", "zhen", langs, 7)
    return train, valid, _set(folder / "test.tgz", "test", "newstest2017", "zhen", langs, 8)


def google_en_de(folder, raw=True):
    """Google's wmt16_en_de.tar.gz: {part: [English, German]} of the encoded text; its raw text only if `raw`."""
    langs, encoded, content = ("en", "de"), {}, {}
    for seed, (part, lines) in enumerate((("train", 120), ("newstest2013", 10), ("newstest2014", 14))):
        texts = sides(langs, lines, seed)
        stem = "train.tok.clean.bpe.32000" if part == "train" else f"{part}.tok.bpe.32000"
        encoded[part] = [[line.replace("ing", "in@@ g").replace(".", " .") for line in text] for text in texts]
        for lang, text, pieces in zip(langs, texts, encoded[part], strict=True):
            content[f"{stem}.{lang}"] = as_bytes(pieces)
            if raw or part == "train":
                content[f"{part}.{lang}"] = as_bytes(text)
    content["newstest2016.en"] = b"of another year\n"
    content |= {"bpe.32000": b"#version: 0.2\ni n\n", "vocab.bpe.32000": b"the\n"}
    write_tar(folder / "wmt16_en_de.tar.gz", content)
    return encoded
