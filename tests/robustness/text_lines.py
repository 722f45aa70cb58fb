"""Lines that break text tools: valid UTF-8, and bytes that are none."""

# By what is odd about each; every one is a single line for `wc -l`, and has a word of its own to be found again by.
ODD = {
    "nul": "eins a\0b zwei",
    "controls": "eins \x01\x02\x1b[31m\x7f zwei",
    "separators": "eins\x0bzwei\x0cdrei\x1cvier\x1dfünf\x1esechs\x1fsieben",
    "next line": "eins\x85zwei",
    "line separator": "eins\u2028zwei\u2029drei",
    "carriage return": "eins\rzwei\r\rdrei",
    "tabs": "\teins\t\tzwei\t",
    "right to left": "\u202eeins\u202c \u200fשלום\u200e עולם \u2067zwei\u2069",
    "emoji": "eins 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 zwei",
    "combining": "eins " + "e" + "\u0301" * 200 + " zwei",
    "zero width": "ei\u200bns zw\u00adei \ufeff drei",
    "not characters": "eins \ufffe \uffff \U0010ffff zwei",
    "planes": "eins 𝔢𝔦𝔫𝔰 𠀀 zwei",
    "marks of BPE": "@@ eins@@ @@zwei @-@ @@@@ drei@@",
    "marks of sentencepiece": "▁eins ▁ ▁▁zwei",
    "symbols of fairseq": "<unk> <s> </s> <pad> madeupword0000 eins #fairseq:overwrite",
    "entities": "eins &amp; &#124; &lt;b&gt; | [ ] zwei",
    "spaces of Unicode": "eins\u00a0zwei\u2009drei\u3000vier",
    "quotes": "'eins' \"zwei\" `drei` $(vier) ; fünf & \\",
    "protected": "THISISPROTECTED000 DOTDOTMULTI eins... zwei. drei .",
}
EMPTY = ("", "   ", "\t", "\u2028", "\x1c")  # nothing, for whoever divides at white space
LONG = 1_000_000
LONG_WORDS, LONG_WORD = "ein wort " * (LONG // 9), "a" * LONG
NOT_UTF8 = {
    "latin1": b"gr\xfcn",
    "half a surrogate pair": b"a \xed\xa0\x80 b",
    "overlong": b"\xc0\xaf",
    "cut": b"gr\xc3",
}
