"""`lightconv translate` as it is used: text in, text out, in order, with an exit status that says what happened."""

import functools
import io
import os
import shlex
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import lightconv_plugin
from lightconv_plugin import checkpoints, generation
from lightconv_plugin.checkpoints import opening
from lightconv_plugin.cli import main, translate
from lightconv_plugin.generation import fairseq_generate
from lightconv_plugin.generation.translations import Hypothesis, Translation
from lightconv_plugin.generation.translator import Translator
from tests import programs
from tests.generation import translation_toys as toys
from tests.warm_python import warm_python

LINES = toys.lines(9, seed=21)
BAD = [LINES[0].encode(), b"gr\xfcn", b"", b"a\0b", b"a " * 64, LINES[1].encode()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(data, checkpoint): to be read only."""
    folder = tmp_path_factory.mktemp("a corpus")
    data = toys.make_corpus(folder / "corpus")
    return data, toys.make_checkpoint(folder / "a model.pt", data, seed=6)


@pytest.fixture(scope="module")
def best(made):
    return [translation.text for translation in Translator(made[1], max_len_b=20).translate(LINES)]


@pytest.fixture
def run(monkeypatch, capfd, made):
    """The command on bytes: (exit status, standard output, standard error)."""

    def command(content: bytes, *arguments, models=(made[1],)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        capfd.readouterr()
        short = [] if "--score" in arguments else ["--max-len-b", "20"]
        status = main.main(["translate", *map(str, models), *short, *map(str, arguments)])
        return status, *capfd.readouterr()

    return command


def encoded(lines) -> bytes:
    return b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines)


@pytest.mark.parametrize(
    "stream, said",
    [
        ("stdin", "standard input is closed: give --input FILE"),
        ("stdout", "standard output is closed: give --output FILE"),
    ],
)
def test_a_closed_stream_is_named(made, monkeypatch, refusal, stream, said):
    """As after <&- and >&- in a shell."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(sys, stream, None)
    assert refusal("translate", made[1]) == f"lightconv translate: error: {said}\n"


def test_a_pipe_is_read_like_a_file(run, best, tmp_path):
    """As with --input <(program)."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(encoded(LINES),))
    writer.start()
    assert run(b"", "--input", pipe)[:2] == (0, "".join(f"{line}\n" for line in best))
    writer.join()


def test_the_installed_command_streams(made, best, repository):
    """A process of its own, as in a shell; with --buffer 1 each line is answered before the next is there."""
    command = [sys.executable, "-m", "lightconv_plugin", "translate", made[1], "--max-len-b", "20"]
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*map(str, command), "--buffer", "1"], env=environment, **pipes)
    for line, translation in zip(LINES[:3], best, strict=False):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()
        assert process.stdout.readline().decode() == f"{translation}\n"
    out, err = process.communicate(f"{LINES[3]}".encode(), timeout=300)  # no line feed at the end
    assert (process.returncode, out.decode()) == (0, f"{best[3]}\n")
    assert err.decode() == ""


def test_a_model_of_fairseq_train_translates_as_fairseq_generate_does(toy_data, toy_training):
    """With the checkpoint that a training writes, and its whole configuration."""
    checkpoint, options = toy_training / "checkpoint_best.pt", ["--cpu", "--max-len-b", "20", "--min-len", "5"]
    expected = fairseq_generate.generate(toy_data, checkpoint, "test", options)
    lines = (toy_data.parent / "test.de").read_text(encoding="utf-8").splitlines()
    translator = Translator(checkpoint, tokenizer="none", max_len_b=20, min_len=5)
    assert [translation.text for translation in translator.translate(lines)] == expected.hypotheses
    assert all(len(hypothesis.split()) >= 5 for hypothesis in expected.hypotheses)


@pytest.mark.parametrize("buffer", [[], ["--buffer", 1], ["--buffer", 4]], ids=["default", "1", "4"])
def test_order_and_line_ends(buffer, run, best):
    status, out, err = run(b"\xef\xbb\xbf" + encoded(LINES).replace(b"\n", b"\r\n"), *buffer)
    assert (status, out, err) == (0, "".join(f"{line}\n" for line in best), "")


def test_no_input_no_output(run):
    assert run(b"") == (0, "", "")


@pytest.mark.parametrize("buffer", [1, 3, 100])
def test_bad_lines_are_named_and_left_empty(buffer, run, best):
    status, out, err = run(b"\n".join(BAD) + b"\n", "--buffer", buffer)
    assert status == 1
    assert out.split("\n") == [best[0], "", "", "", "", best[1], ""]
    assert err.splitlines() == [
        "lightconv translate: line 2 left empty: not UTF-8: byte 0xfc at 3",
        "lightconv translate: line 4 left empty: not text: it has a NUL",
        "lightconv translate: line 5 left empty: too long: 64 pieces, the model takes 63",
        "lightconv translate: 3 of 6 lines could not be translated",
    ]


def test_n_best_and_scores(run, best):
    content = encoded([LINES[0], "", LINES[1]])
    rows = [line.split("\t") for line in run(content, "--nbest", 3, "--with-scores")[1].splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "1", "2", "3", "3", "3"]
    assert rows[3] == ["2", "", ""]
    assert (rows[0][2], rows[4][2]) == (best[0], best[1])
    for some in (rows[:3], rows[4:]):
        scores = [float(row[1]) for row in some]
        assert scores == sorted(scores, reverse=True) and scores[0] < 0
    assert run(content, "--with-scores")[1].splitlines() == ["\t".join(rows[0][1:]), "\t", "\t".join(rows[4][1:])]
    assert run(content, "--nbest", 1)[1].splitlines() == [f"1\t{best[0]}", "2\t", f"3\t{best[1]}"]


def test_format_of_a_line():
    found = Translation("x", (Hypothesis("a b", -1.23456, ("a", "b")), Hypothesis("c", -2.0, ("c",))))
    assert translate.format_lines(found, 7, None, False)[0] == "a b"
    assert translate.format_lines(found, 7, 2, True) == ["7\t-1.2346\ta b", "7\t-2.0000\tc"]
    assert translate.format_lines(Translation("x", problem="bad"), 7, 2, False) == ["7\t"]


def test_files(run, best, tmp_path):
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(encoded(LINES))
    assert run(b"", "--input", source, "--output", output) == (0, "", "")
    assert output.read_text(encoding="utf-8") == "".join(f"{line}\n" for line in best)


def test_the_output_file_is_whole_or_not_there(run, monkeypatch, tmp_path):
    def fail_in_the_middle(self, lines, *rest):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(list(tmp_path.iterdir()))
        return [Translation("x")]

    seen = []
    monkeypatch.setattr(Translator, "translate", fail_in_the_middle)
    assert run(encoded(LINES), "--output", tmp_path / "out.txt", "--buffer", 1)[0] == 130
    assert len(seen) == 2 and len(seen[0]) == 1 and not list(tmp_path.iterdir())


def test_a_reader_that_leaves_is_no_error(made):
    """As `lightconv translate … | head -1`: no traceback."""
    script = (
        "set -o pipefail; yes 'Zwei Hunde' | head -20000 |"
        f" {shlex.quote(warm_python())} -m lightconv_plugin translate '{made[1]}'"
        " --max-len-b 2 --beam 1 --buffer 1"
        " | head -1"
    )
    done = programs.run("bash", "-c", script, status=141, OMP_NUM_THREADS=1)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_options_reach_the_translator(made, monkeypatch, run):
    taken = {}

    @functools.wraps(Translator)
    def translator(path, data, **options):
        taken.update(options, path=path, data=data)
        raise KeyboardInterrupt

    monkeypatch.setattr("lightconv_plugin.generation.translator.Translator", translator)
    status, _, _ = run(
        b"",
        *("--data", "d", "-s", "de", "-t", "en", "--bpe-codes", "c", "--tokenizer", "none"),
        *("--lowercase", "--beam", 7, "--lenpen", 0.6, "--unkpen", 1, "--min-len", 2, "--max-len-a", 1.5),
        *("--max-len-b", 10, "--no-repeat-ngram-size", 3, "--temperature", 2, "--dtype", "int8", "--device", "cuda:1"),
        *("--cuda-graphs", "--threads", 3, "--batch-tokens", 100, "--batch-size", 4, "--unk", "?"),
        *("--shortlist", made[1]),
        models=(made[1], "b.pt"),
    )
    assert status == 130
    assert list(map(str, taken.pop("path"))) == [str(made[1]), "b.pt"] and str(taken.pop("data")) == "d"
    assert taken == {
        "source_lang": "de", "target_lang": "en", "bpe_codes": "c", "sentencepiece": None, "tokenizer": "none",
        "lowercase": True, "beam": 7, "lenpen": 0.6, "unkpen": 1.0, "min_len": 2, "max_len_a": 1.5, "max_len_b": 10,
        "no_repeat_ngram_size": 3, "temperature": 2.0, "dtype": "int8", "device": "cuda:1", "threads": 3,
        "cuda_graphs": True,
        "batch_tokens": 100, "batch_size": 4, "unk": "?", "shortlist": made[1],
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--nbest", 6], "--nbest must be in 1 … --beam = 5, got 6"),
        (["--cuda-graphs"], "--cuda-graphs needs a GPU, such as --device cuda: got --device cpu"),
        (["--input", "nowhere.txt"], "--input: no such file: nowhere.txt"),
        (["--input", "/"], "--input: / is a folder"),
        (["--output", "no/such/folder/out.txt"], "there is no folder"),
        (["--bpe-codes", "nowhere"], "--bpe-codes: no such file: nowhere"),
        (["--data", "nowhere"], "no dictionaries (dict.XX.txt) in nowhere: give their folder as --data"),
        (["--min-len", -1], "--min-len must be a whole number of at least 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_words(arguments, said, run):
    status, out, err = run(encoded(LINES), *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("lightconv translate: error: ") and said in err and err.count("\n") == 1


def test_the_input_is_not_overwritten(run, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(encoded(LINES))
    assert run(b"", "--input", path, "--output", path)[0] == 2
    assert path.read_bytes() == encoded(LINES)


def test_a_terminal_is_answered_line_by_line(made, monkeypatch, capfd):
    """Reading from a terminal: each line is a buffer of its own, and a line on standard error says what is expected."""
    buffers = []

    def keep(self, lines, *rest):
        buffers.append(list(lines))
        return [Translation("x")] * len(buffers[-1])

    monkeypatch.setattr(Translator, "translate", keep)
    stdin = SimpleNamespace(isatty=lambda: True, buffer=io.BytesIO(encoded(LINES[:3])))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main.main(["translate", str(made[1])]) == 0
    assert [len(buffer) for buffer in buffers] == [1, 1, 1]
    assert "type de sentences, one per line; Ctrl-D ends" in capfd.readouterr().err


def test_without_fairseq_the_command_says_what_is_missing(monkeypatch, run):
    imported = "lightconv_plugin.generation", "lightconv_plugin.checkpoints.opening"
    for name in [name for name in sys.modules if name.startswith(imported)]:
        monkeypatch.delitem(sys.modules, name)
    # Importing them again sets these attributes, which are restored as well.
    monkeypatch.setattr(lightconv_plugin, "generation", generation)
    monkeypatch.setattr(checkpoints, "opening", opening)
    monkeypatch.setitem(sys.modules, "fairseq", None)
    status, _, err = run(b"")
    assert status == 2
    get = "pip install '.[fairseq]' in a checkout of lightconv-plugin"
    assert err == f"lightconv translate: error: fairseq is not installed: {get}\n"


def test_scores_of_given_translations(run, best, tmp_path):
    reference = tmp_path / "ref.txt"
    reference.write_bytes(encoded([best[0], "", "Two men", b"\xff\n"]))
    content = encoded([LINES[0], "", LINES[1], LINES[2]])
    status, out, err = run(content, "--score", reference, "--buffer", 3)
    scores = out.split("\n")[:-1]
    assert status == 1 and scores[1] == scores[3] == "" and max(float(scores[0]), float(scores[2])) < 0
    assert err.splitlines() == [
        "lightconv translate: line 4 left empty: the reference is not UTF-8: byte 0xff at 1",
        "lightconv translate: 1 of 4 lines could not be scored",
    ]
    rows = run(content, "--score", reference, "--with-scores")[1].split("\n")
    assert rows[:3] == [f"{scores[0]}\t{best[0]}", "\t", f"{scores[2]}\tTwo men"]
    status, _, err = run(encoded(LINES), "--score", reference)
    assert status == 2 and f"--score {reference} has 4 lines, the input has more" in err
    status, _, err = run(encoded(LINES[:3]), "--score", reference, "--buffer", 2)
    assert status == 2 and f"--score {reference} has more lines than the input, which has 3" in err


def test_running_text(run, made):
    pytest.importorskip("sentencex")
    sentences = ["Zwei Hunde.", "Wir sehen das Haus!"]
    one, two = (translation.text for translation in Translator(made[1], max_len_b=20).translate(sentences))
    content = f"{' '.join(sentences)}\n\nGr".encode() + b"\xfcn. Zwei Hunde."
    status, out, err = run(content, "--split", "sentences", "--buffer", 2)
    assert (status, out) == (1, f"{one} {two}\n\n{one}\n")
    assert err.splitlines() == [
        "lightconv translate: line 3, a sentence left out: not UTF-8: byte 0xfc at 3",
        "lightconv translate: 1 of 5 sentences could not be translated",
    ]


def test_lines_that_were_cut_are_counted(run, made, tmp_path):
    """By a model that was trained on cut texts, which reads their beginning."""
    model = toys.make_checkpoint(tmp_path / "m.pt", made[0], task={"truncate_source": True})
    content = b"Haus " * 80 + b"\nHaus\n" + b"Haus " * 99 + b"\n"
    said = "lightconv translate: 2 lines were longer than the model allows and were cut\n"
    (tmp_path / "ref.txt").write_text("house\n" * 3, encoding="utf-8")
    for arguments in ([], ["--buffer", 2], ["--score", tmp_path / "ref.txt"]):
        status, out, err = run(content, *arguments, models=[model])
        assert (status, out.count("\n"), err) == (0, 3, said)


def test_verbose_says_the_type_and_the_speed(run):
    status, _, err = run(encoded(LINES[:2]), "--verbose")
    said = err.splitlines()
    assert status == 0 and len(said) == 2 and said[0].startswith("lightconv translate: float32: ")
    assert said[1].startswith("lightconv translate: 2 lines, ") and said[1].endswith(" tokens/s")
    assert "int8: as requested" in run(encoded(LINES[:1]), "--verbose", "--dtype", "int8")[2]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--split", "sentences", "--with-scores"], "--nbest, --with-scores and --score are not valid"),
        (["--score", "ref.txt", "--nbest", 2], "--score scores one translation of each line: --nbest is not valid"),
        (["--score", "ref.txt", "--dtype", "int8"], "--score computes in float32: --dtype int8 is not valid"),
        (["--score", "nowhere.txt"], "--score: no such file: nowhere.txt"),
        *(
            (["--score", "ref.txt", option, *value], f"--score searches for no translation: {option} is not valid")
            for option, *value in (
                ("--beam", 4), ("--min-len", 0), ("--max-len-a", 1.5), ("--max-len-b", 20),
                ("--no-repeat-ngram-size", 0), ("--cuda-graphs",),
            )
        ),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_does_not_go_together(arguments, said, run):
    status, out, err = run(encoded(LINES), *arguments)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


def test_old_words_work_and_say_the_new_ones(run, made, capfd):
    content = encoded(LINES[:2])
    expected = run(content, "--with-scores")[1]
    status, out, err = run(content, "--scores")
    assert (status, out) == (0, expected)
    assert err == "lightconv translate: --scores is now --with-scores; the old word is gone in version 0.3\n"
    (made[1].parent / "in.txt").write_bytes(content)
    command = ["translate", "--path", str(made[1]), "--max-len-b", "20", "--input", str(made[1].parent / "in.txt")]
    assert main.main([*command, "--with-scores"]) == 0
    out, err = capfd.readouterr()
    assert out == expected and err.count("\n") == 1 and "--path CHECKPOINT is now CHECKPOINT alone" in err
