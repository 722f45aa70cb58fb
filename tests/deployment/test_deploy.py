"""`lightconv deploy`: a process that has torch alone decodes with what it writes, in Python and in C++."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lightconv_plugin.cli import main
from lightconv_plugin.deployment import package, state_tensors
from tests import ROOT, programs
from tests.checkpoints import exports
from tests.deployment import toys

EXAMPLES = ROOT / "docs" / "examples"
EOS = 2
LONGEST = 64 - 1  # the models have 64 positions
LINES = ["w3 w15 w9 w3 unknown", "w4", "", "w100 w90 w80 w70 w60 w50 w40 w30 w20"]


def deploy(*arguments):
    return main.main(["deploy", *map(str, arguments)])


def numbers(line, begin):
    words = {f"{begin}{i}": i + 4 for i in range(exports.WORDS)}
    return [words.get(piece, 3) for piece in line.split()]


def expected(model):
    """What greedy decoding of LINES finds, as decode.py prints it."""
    found = []
    for line in LINES:
        if model.config.encoder is None:
            *before, token = [EOS, *numbers(line, "w")]
            found.append(toys.greedy(model, before, token, LONGEST - len(before)))
        else:
            found.append(toys.greedy(model, [*numbers(line, "w"), EOS], EOS, LONGEST))
    return found


def decode(directory):
    """docs/examples/decode.py in a process without this package: the pieces that it prints."""
    program = [sys.executable, "-I", EXAMPLES / "decode.py", directory]
    assert "lightconv_plugin" not in (EXAMPLES / "decode.py").read_text(encoding="utf-8")
    return programs.run(*program, input="".join(f"{line}\n" for line in LINES), cwd="/").stdout.splitlines()


def pieces(found, begin):
    return [" ".join(f"{begin}{number - 4}" if number != 3 else "<unk>" for number in line) for line in found]


def test_python_decodes_without_this_package(deployed, deployed_model):
    wanted = pieces(expected(deployed_model), "v")
    assert len(set(wanted)) > 2 and max(len(line.split()) for line in wanted) > 5
    assert decode(deployed) == wanted


def test_python_reads_a_dictionary_as_fairseq_does(tmp_path):
    words = pytest.importorskip("fairseq.data").Dictionary()
    for word in ("a", "b\u2028c", "\x85", "d\x0be", "two words"):
        words.add_symbol(word)
    words.add_symbol("a", overwrite=True)
    path = tmp_path / "dict.txt"
    words.save(str(path))
    lines = path.read_text(encoding="utf-8").split("\n")
    path.write_text("\n".join([*lines[:-2], f"{lines[-2]} #fairseq:overwrite\r\n"]), encoding="utf-8", newline="")
    found = runpy.run_path(str(EXAMPLES / "decode.py"))["dictionary"](path)
    assert found == type(words).load(str(path)).symbols == words.symbols


def test_what_lies_beside_the_graphs(exported, deployed, deployed_model):
    about = json.loads((deployed / "deployment.json").read_text())
    assert {name: about[name] for name in ("eos", "pad", "source_lang", "max_source_positions")} == {
        "eos": 2, "pad": 1, "source_lang": "de", "max_source_positions": 64,
    }  # fmt: skip
    names = [tensor["name"] for tensor in about["state"]]
    assert names == [tensor.name for tensor in state_tensors(deployed_model)]
    assert names[:2] == ["seen", "mixers.0.inputs"] and names[-1] == "sources.pads"
    for name in ("dict.de.txt", "dict.en.txt", "source.bpe", "text.json"):
        assert (deployed / name).read_bytes() == (exported / name).read_bytes()


def test_what_is_there_is_replaced_on_demand_only(exported, tmp_path, monkeypatch, capsys):
    graph = torch.export.export(torch.nn.Identity(), (torch.zeros(1),))
    monkeypatch.setattr(package, "export_start", lambda model: graph)
    monkeypatch.setattr(package, "export_step", lambda model: graph)
    command = (exported, tmp_path / "out", "--format", "torch.export")
    assert deploy(*command) == 0
    assert json.loads((tmp_path / "out" / "deployment.json").read_text(encoding="utf-8"))["format"] == "export"
    assert deploy(*command) == 2
    assert "give --force to replace it" in capsys.readouterr().err
    assert deploy(exported, tmp_path / "old word", "--format", "export") == 0
    said = "lightconv deploy: --format export is now --format torch.export; the old word is gone in version 0.3\n"
    assert capsys.readouterr().err == said
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert deploy(*command, "--force") == 2
    assert "has files that are not part of a deployed model: notes.txt; move them away" in capsys.readouterr().err
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    (tmp_path / "out" / "notes.txt").unlink()
    assert deploy(*command, "--force") == 0
    assert deploy(exported, exported, "--format", "torch.export", "--force") == 2
    assert "not a deployed model" in capsys.readouterr().err


def test_without_a_compiler(exported, tmp_path, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise RuntimeError("\nNo working C++ compiler found in torch._inductor.config.cpp.cxx\n")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", fails)
    monkeypatch.setattr(package, "export_start", lambda model: None)
    assert deploy(exported, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "No working C++ compiler" in line and "--format torch.export needs none" in line
    assert not [*tmp_path.iterdir()]


def test_what_is_no_exported_model(tmp_path, capsys):
    assert deploy(tmp_path, tmp_path / "out") == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.long
def test_compiled_for_python_and_for_cpp(exported, deployed_model, tmp_path):
    """By AOTInductor, as docs/deployment.md does it; minutes of compiling."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler: g++, or CXX")
    assert deploy(exported, tmp_path / "out") == 0
    wanted = expected(deployed_model)
    assert decode(tmp_path / "out") == pieces(wanted, "v")
    torch_at = Path(torch.__file__).parent
    includes = [f"-I{torch_at / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    libraries = [f"-L{torch_at / 'lib'}", f"-Wl,-rpath,{torch_at / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    program = tmp_path / "decode"
    programs.run(compiler, "-std=c++20", abi, EXAMPLES / "decode.cpp", "-o", program, *includes, *libraries)
    lines = "".join(" ".join(map(str, numbers(line, "w"))) + "\n" for line in LINES)
    done = programs.run(program, tmp_path / "out", LONGEST, input=lines)
    assert [[*map(int, line.split())] for line in done.stdout.splitlines()] == wanted


@pytest.mark.long
def test_a_compiled_language_model(tmp_path):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler: g++, or CXX")
    model = toys.sharp(toys.language_model(["lightweight", "window_attention"], share_input_output=True))
    assert deploy(exports.export(tmp_path / "model", model), tmp_path / "out") == 0
    assert decode(tmp_path / "out") == pieces(expected(model), "w")
