"""Translations to score, and the `score` command on them."""

import json
import random

from lightconv_plugin.cli import main

SENTENCES = """\
Die Bundes-Regierung hat am 3. Oktober 2019 ein 12-Punkte-Programm vorgelegt , das nicht jeder gut findet .
Ein Mann mit einem orange-farbenen Hut starrt auf etwas .
&quot; Das ist ja unglaublich ! &quot; , rief die Frau &#124; und lief davon .
Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche .
E-Mail-Adressen &amp; Telefon-Nummern bitte nicht weiter-geben .
- - Was kostet das ? - 1,5 - 2,5 Mio. Euro , z.B. für Öl- und Gas-Heizungen .
Der kleine Hund läuft schnell , der große Hund läuft schneller , und der Hund dort schläft .
Ja .
日本 語 の 文 と e\u0301 und ß
Er stand um sechs Uhr auf , weil er den Zug nehmen wollte , der um sieben fährt .
""".splitlines()

TOKENISED = ["Das ist ein &quot; Test &quot; , nicht wahr ?", "Der Hund läuft ( schnell ) !", "well @-@ known ; done ."]
PLAIN = ['Das ist ein "Test", nicht wahr?', "Der Hund läuft (schnell)!", "well-known; done."]


def damaged(lines, rate, seed=0):
    """Translations as a model might make them: words left out, changed, moved, repeated."""
    rng = random.Random(seed)
    vocabulary = [word for line in lines for word in line.split()]
    out = []
    for line in lines:
        words = []
        for word in line.split():
            action = rng.random()
            if action < rate / 4:
                continue
            words.append(rng.choice(vocabulary) if action < rate / 2 else word)
            if action > 1 - rate / 4:
                words.append(word)
        if len(words) > 2 and rng.random() < rate:
            at = rng.randrange(len(words) - 1)
            words[at], words[at + 1] = words[at + 1], words[at]
        out.append(" ".join(words) or "x")
    return out


def random_corpus(n, words, longest, seed):
    rng = random.Random(seed)
    lines = [" ".join(rng.choices([f"w{i}" for i in range(words)], k=rng.randint(1, longest))) for _ in range(n)]
    return damaged(lines, 0.5, seed), lines


CORPORA = {
    "real-like": (damaged(SENTENCES * 5, 0.4), SENTENCES * 5),
    "good": (damaged(SENTENCES * 20, 0.05), SENTENCES * 20),
    "too-short": ([line.rsplit(" ", 1)[0] for line in SENTENCES], SENTENCES),
    "perfect": (SENTENCES, SENTENCES),
    "random-1": random_corpus(200, 20, 30, 1),
    "random-2": random_corpus(100, 5, 12, 2),
    "random-3": random_corpus(50, 300, 60, 3),
    "no-hit": (["a b c d e"], ["v w x y z"]),
    "no-4-gram": (["a b c x d e f"], ["a b c y d e f"]),
    "under-4-words": (["a b c"], ["a b c"]),
}


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def run(*arguments):
    return main.main(["score", *map(str, arguments)])


def as_json(capsys, *arguments):
    assert run(*arguments, "--json") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys, *arguments):
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lightconv score: error: ")
    assert err.count("\n") == 1
    return err
