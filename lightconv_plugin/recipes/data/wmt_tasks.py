"""The WMT tasks: their published files and how they are used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightconv_plugin.recipes.data.wmt_sources import Source

ABOUT_EN_DE = """WMT14 English → German from the raw corpora, by the steps of fairseq's prepare-wmt14en2de.sh

--data is a folder with training-parallel-europarl-v7.tgz, training-parallel-commoncrawl.tgz,
training-parallel-nc-v12.tgz (or -v9) and test-full.tgz. Written: text/ tok/ encoded/ bpe/ raw/
data-bin/, with --icml17 to data/wmt14_en_de_icml17.

europarl-v7 (1,920,209 pairs), commoncrawl (2,399,123) and news-commentary (v9: 201,288) in this
order; punctuation normalised, non-printing characters removed, Moses-tokenised with hyphens split
off (-a); every 100th pair for validation; 40,000 BPE merges learned on the training text of both
languages; pairs of 1 to 250 pieces a side with a ratio of at most 1.5 are kept, in the validation
text too. Test: newstest2014 (3,003 segments), ’ replaced by ', tokenised, nothing dropped. raw/
holds the raw lines of valid and test. (fairseq's script also downloads dev.tgz and does not use
it.) The papers' own En-De results are on the task wmt16_en_de.

Free disk space: archives 0.66 + 0.92 + 0.17 GB = 1.8 GB; raw text 4.6 M pairs x 300 bytes = 1.4
GB, tokenised 1.5, encoded 1.7, cleaned 1.5, binary 4.5 M x 60 pieces x 2 bytes = 0.6 GB, a
temporary copy of the raw text: 11 GiB with the archives.
"""
ABOUT_EN_FR = """WMT14 English → French from the raw corpora, by the steps of fairseq's prepare-wmt14en2fr.sh

--data is a folder with training-parallel-europarl-v7.tgz, training-parallel-commoncrawl.tgz,
training-parallel-un.tgz, training-parallel-nc-v9.tgz, training-giga-fren.tar and test-full.tgz.
Written: text/ tok/ encoded/ bpe/ raw/ data-bin/

europarl-v7 (2,007,723 pairs), commoncrawl (3,244,152), undoc.2000 (12,886,831),
news-commentary-v9 (183,251) and giga-fren.release2.fixed (about 22.5 million) in this order;
punctuation normalised, non-printing characters removed, Moses-tokenised with hyphens split off
(-a); every 1333rd pair for validation; 40,000 BPE merges learned on the training text of both
languages; pairs of 1 to 250 pieces a side with a ratio of at most 1.5 are kept, in the validation
text too. Test: newstest2014 (3,003 segments), ’ replaced by ', tokenised, nothing dropped. raw/
holds the raw lines of valid and test. Expected: about 35.48 million training and 26.7 thousand
validation pairs. fairseq's authors had 35,482,654 and 26,663, with at most 175 words a side.

Free disk space: archives 0.66 + 0.92 + 2.37 + 0.08 + 2.60 GB = 6.6 GB; raw text 40.8 M pairs x
355 bytes = 14.5 GB, tokenised 15.5, encoded 17, cleaned 15, binary 35.5 M x 64 pieces x 2 bytes =
4.5 GB, a part of it temporarily twice: 80 GiB with the archives. Memory: about 130 MB per
process, except for learning the merges, which holds the counts of all different words of the
training text; that was not measured.
"""
ABOUT_ZH_EN = """WMT17 Chinese → English from the raw corpora; the choices are ours

--data is a folder with training-parallel-nc-v12.tgz, UNv1.0.en-zh.tar.gz, dev.tgz and test.tgz of
WMT17, and CWMT's zips. Written: text/ tok/ encoded/ bpe/ raw/ data-bin/, with --without-cwmt to
data/wmt17_zh_en_without_cwmt.

CWMT's corpora (9 million of the 25 million pairs) are distributed by its organisers, without a
permanent address: put casia2015.zip, casict2011.zip, casict2015.zip, datum2015.zip, datum2017.zip
and neu2017.zip into the --data folder, or into download/ in the --out folder, or use
--without-cwmt.

The paper's preparation was not published: neither its training text and what was dropped from it,
nor its Chinese word segmentation, nor its merges. A score on these data shows how good this system
is, but not whether the paper's result is reproduced. What is done here:
news-commentary-v12, UNv1.0 (15,886,041 pairs) and CWMT (casia2015 1,050,000, casict2011,
casict2015 2,036,833, datum2015 1,000,003, datum2017 999,984, neu2017 2,000,000) in this order;
Chinese segmented by jieba, after spaces between its characters are removed; English punctuation
normalised, non-printing characters removed, Moses-tokenised with hyphens split (-a); 32,000
BPE merges and a dictionary for each language; training pairs of 1 to 250 pieces a side with a
ratio of at most 1.5 are kept. Validation: newsdev2017; test: newstest2017 (2,001 segments); both
are complete and not normalised, except that ’ is replaced by '.

Free disk space: archives 0.2 + 1.4 + 0.7 GB = 2.3 GB; raw text 25 M pairs x 260 bytes = 6.5 GB,
tokenised 7.2, encoded 8, cleaned 7, binary 25 M x 60 pieces x 2 bytes = 3 GB, a part of it
temporarily twice: 40 GiB with the archives. (The bytes and pieces of a pair are estimates.)
"""


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
