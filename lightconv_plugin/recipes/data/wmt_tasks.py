"""The WMT tasks: their published files and how they are used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightconv_plugin.recipes.data.wmt_sources import Source


@dataclass(frozen=True)
class Task:
    """The published files of a task and how they are used."""

    src: str
    tgt: str
    train: tuple[Source, ...]  # concatenated in this order
    valid: int | Source  # every N-th pair of the training text, or a separate set
    test: Source
    joint: bool  # joint merges, and one dictionary for both languages unless the options separate them


def _pair(archive: str, name: str, stem: str, langs: str, gib: int, pairs: int | None = None) -> Source:
    """A source whose two files differ only in their suffix."""
    src, tgt = langs.split()
    return Source(name, archive, (f"{stem}.{src}", f"{stem}.{tgt}"), gib, pairs)


def _sgm(archive: str, name: str, stem: str, src: str, tgt: str, pairs: int | None) -> Source:
    return Source(name, archive, (f"{stem}-src.{src}.sgm", f"{stem}-ref.{tgt}.sgm"), 1, pairs)


_EUROPARL, _CRAWL, _UN = (f"training-parallel-{name}.tgz" for name in ("europarl-v7", "commoncrawl", "un"))
_NEWS9, _NEWS12 = "training-parallel-nc-v9.tgz", "training-parallel-nc-v12.tgz"

_EN_DE = Task(
    src="en",
    tgt="de",
    train=(
        _pair(_EUROPARL, "europarl-v7", "training/europarl-v7.de-en", "en de", 2, 1_920_209),
        _pair(_CRAWL, "commoncrawl", "commoncrawl.de-en", "en de", 2, 2_399_123),
        _pair(_NEWS12, "news-commentary-v12", "training/news-commentary-v12.de-en", "en de", 1),
    ),
    valid=100,
    test=_sgm("test-full.tgz", "newstest2014", "test-full/newstest2014-deen", "en", "de", 3003),
    joint=True,
)
_EN_FR = Task(
    src="en",
    tgt="fr",
    train=(
        _pair(_EUROPARL, "europarl-v7", "training/europarl-v7.fr-en", "en fr", 2, 2_007_723),
        _pair(_CRAWL, "commoncrawl", "commoncrawl.fr-en", "en fr", 3, 3_244_152),
        _pair(_UN, "undoc.2000", "un/undoc.2000.fr-en", "en fr", 16, 12_886_831),
        _pair(_NEWS9, "news-commentary-v9", "training/news-commentary-v9.fr-en", "en fr", 1, 183_251),
        _pair("training-giga-fren.tar", "giga-fren", "giga-fren.release2.fixed", "en.gz fr.gz", 4),
    ),
    valid=1333,
    test=_sgm("test-full.tgz", "newstest2014", "test-full/newstest2014-fren", "en", "fr", 3003),
    joint=True,
)
_CWMT = {
    "casia2015": 1_050_000,
    "casict2011": None,
    "casict2015": 2_036_833,
    "datum2015": 1_000_003,
    "datum2017": 999_984,
    "neu2017": 2_000_000,
}
_ZH_EN = Task(
    src="zh",
    tgt="en",
    train=(
        _pair(_NEWS12, "news-commentary-v12", "training/news-commentary-v12.zh-en", "zh en", 1),
        _pair("UNv1.0.en-zh.tar.gz", "UNv1.0", "en-zh/UNv1.0.en-zh", "zh en", 16, 15_886_041),
        *(Source(name, f"{name}.zip", (f"{name}/*_c[hn].txt", f"{name}/*_en.txt"), 2, _CWMT[name]) for name in _CWMT),
    ),
    valid=_sgm("dev.tgz", "newsdev2017", "dev/newsdev2017-zhen", "zh", "en", None),
    test=_sgm("test.tgz", "newstest2017", "test/newstest2017-zhen", "zh", "en", 2001),
    joint=False,
)
_NEWS9_DE = _pair(_NEWS9, "news-commentary-v9", "training/news-commentary-v9.de-en", "en de", 1, 201_288)
TASKS = {
    "wmt14_en_de": _EN_DE,
    "wmt14_en_de_icml17": replace(_EN_DE, train=(*_EN_DE.train[:2], _NEWS9_DE)),
    "wmt14_en_fr": _EN_FR,
    "wmt17_zh_en": _ZH_EN,
    "wmt17_zh_en_without_cwmt": replace(_ZH_EN, train=_ZH_EN.train[:2]),
}
