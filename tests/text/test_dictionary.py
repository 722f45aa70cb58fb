"""fairseq's dictionaries, read without fairseq: equal to what fairseq reads, also from odd files."""

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.text.dictionary import Dictionary

ODD = {
    "empty": b"",
    "plain": b"the 10\nhouse 3\n",
    "no line end": b"the 10\nhouse 3",
    "CRLF": b"the 10\r\nhouse 3\r\n",
    "CR alone": b"the 10\rhouse 3\r",
    "spaces inside": b"New York 5\n  two before 4\n",
    "an empty symbol": b" 7\n",
    "white space at the end": b"the 10  \t\nhouse 3\x0c\n",
    "no-break space": "the\u00a0house 10\n\u00a0 4\nx 5\u00a0\n".encode(),
    "line separators": "a\u2028b 3\nc\u2029 2\nd\x85e 1\nf\x0bg 1\nh\x1ci 1\n".encode(),
    "separators at the end": "a 3\u2028\nb 2\x85\n".encode(),
    "byte order mark": "\ufeffthe 10\nhouse 3\n".encode(),
    "overwrite": b"the 10\nhouse 3\nthe 4 #fairseq:overwrite\n<unk> 2 #fairseq:overwrite\n",
    "overwrite of nothing": b"the 10 #fairseq:overwrite\n",
    "counts as int takes them": "a -5\nb +5\nc 1_000\nd ٣\ne 007\n".encode(),
    "marks": "▁the 3\nhou@@ 2\n madeupword0000 0\n".encode(),
    "tab": b"the\t10 3\n",
    "control": b"a\x00b 1\n\x1b[31m 2\n",
    "astral": "😀 1\n\U0001f1e9\U0001f1ea 2\n".encode(),
}
BAD = {
    "an empty line": b"the 10\n\nhouse 3\n",
    "no count": b"the 10\nhouse\n",
    "count is no number": b"the ten\n",
    "count is broken": b"the 1.5\n",
    "a tab for the space": b"the\t10\n",
    "twice": b"the 10\nthe 3\n",
    "a special symbol": b"<pad> 10\n",
    "overwrite without a count": b"the #fairseq:overwrite\n",
    "not UTF-8": b"gr\xfcn 3\n",
    "a surrogate": b"\xed\xa0\x80 3\n",
    "a count of 5,000 digits": b"the " + b"9" * 5000 + b"\n",
}


@pytest.fixture(scope="module")
def fairseqs():
    return pytest.importorskip("fairseq.data").Dictionary


def compare(content, path, fairseqs):
    path.write_bytes(content)
    theirs, ours = fairseqs.load(str(path)), Dictionary.load(path)
    assert (ours.symbols, ours.count, ours.indices) == (theirs.symbols, theirs.count, theirs.indices)
    assert len(ours) == len(theirs) and ours.nspecial == theirs.nspecial
    for name in ("bos", "pad", "eos", "unk"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    for symbol in [*theirs.symbols, "not there", ""]:
        assert ours.index(symbol) == theirs.index(symbol)
        assert (symbol in ours) == (symbol in theirs)
    for index in [*range(len(theirs) + 3), 10**9]:
        assert ours[index] == theirs[index]


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_read_as_fairseq_reads_them(name, tmp_path, fairseqs):
    compare(ODD[name], tmp_path / "dict.txt", fairseqs)


def test_a_file_that_fairseq_wrote(tmp_path, fairseqs):
    made = fairseqs()
    for number, word in enumerate("the small dog runs – läuft 東京 a\u00a0b \u2028 x@@".split(" ")):
        made.add_symbol(word, n=number)
    made.finalize(padding_factor=8)
    made.save(str(tmp_path / "saved.txt"))
    compare((tmp_path / "saved.txt").read_bytes(), tmp_path / "dict.txt", fairseqs)


@pytest.mark.parametrize("name", BAD)
def test_what_fairseq_refuses_is_one_error(name, tmp_path, request):
    path = tmp_path / "dict.txt"
    path.write_bytes(BAD[name])
    with pytest.raises(InputError) as caught:
        Dictionary.load(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 400
    fairseqs = request.getfixturevalue("fairseqs")
    with pytest.raises(Exception, match=r"Duplicate|Incorrect|not enough values"):
        fairseqs.load(str(path))


def test_errors_name_the_line():
    with pytest.raises(InputError, match=r"dict, line 2: expected a symbol, a space and its count, got 'house\\n'"):
        Dictionary.of_bytes(b"the 1\nhouse\n", "dict")
    with pytest.raises(InputError, match="dict, line 3: 'a' occurs twice"):
        Dictionary.of_bytes(b"a 1\nb 1\na 1\n", "dict")
    with pytest.raises(InputError, match="dict is not UTF-8: byte 0xfc at 3"):
        Dictionary.of_bytes(b"gr\xfcn 1\n", "dict")


def test_equality():
    one, same, other = (Dictionary.of_bytes(content, "dict") for content in (b"a 1\n", b"a 2\n", b"b 1\n"))
    assert one == same and one != other and one != "a"
