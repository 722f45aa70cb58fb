"""Multi30k: the text of task 1, English and German, with settings for a corpus of this size."""

from __future__ import annotations

from lightconv_plugin.recipes.data import parallel_text
from lightconv_plugin.recipes.data.options import Request
from lightconv_plugin.recipes.data.stages import Plan

ABOUT = """Multi30k (task 1), English → German: 29,000 training pairs

--data is a folder with train, val and test_2016_flickr .en and .de, plain or .gz;
test_2017_flickr and test_2017_mscoco, if present, become test1 and test2. Written: raw/ tok/ bpe/
data-bin/

Punctuation is normalised, text tokenised by Moses' rules and lower-cased; 4,000 joint BPE merges
(29,000 sentences are too few for the usual 10,000), one dictionary. Free disk space: 0.1 GiB.
"""
TESTS = ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco")


def plan(request: Request) -> Plan:
    """The stages; the test sets are those of TESTS that are in the folder, unless the options name others."""
    tests = [name for name in TESTS[1:] if _is_pair(request, name)]
    return parallel_text.plan(request, (TESTS[0], *tests), keep_last=True)


def _is_pair(request: Request, name: str) -> bool:
    """Whether the folder has a test set in both languages: not all have been published in all of them."""
    langs = {path.name.removesuffix(".gz").rpartition(".")[2] for path in request.data.glob(f"{name}.*")}
    return len(langs) >= 2 and {request.options.src, request.options.tgt} - {None} <= langs
