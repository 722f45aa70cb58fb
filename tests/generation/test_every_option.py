"""Every search option of fairseq-generate, with fairseq's task and with translation_fast.

The options are the fields of fairseq's GenerationConfig: one that a new fairseq adds fails here until OPTIONS says what
becomes of it. In every case both tasks must write the same lines, or fail with the same error.
"""

import copy
import dataclasses
import io
import logging
import re
import shutil
from dataclasses import dataclass

import pytest

pytest.importorskip("fairseq")

from fairseq import options
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import generate
from omegaconf import DictConfig, open_dict

from tests import fairseq_cli

FIELDS = {field.name for field in dataclasses.fields(GenerationConfig)} - {"_name"}
FAST, BACK = "the plugin's own search translates", "falling back to fairseq's generator"
NUMBER = re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class With:
    """Options of a command. said: what translation_fast says of its search. fails: what fairseq fails with."""

    options: str
    said: str | None = FAST
    fails: str = ""

    def __str__(self) -> str:
        return self.options


def _same(*commands: str) -> tuple[With, ...]:
    return tuple(map(With, commands))


def _back(reason: str, *commands: str, fails: str = "") -> tuple[With, ...]:
    return tuple(With(command, f"{BACK}: {reason} is not supported", fails) for command in commands)


# Of iterative refinement, of speech and of fairseq's past: translation ignores them.
WITHOUT_EFFECT = {
    "no_early_stop": "", "no_beamable_mm": "", "decoding_format": "ensemble", "iter_decode_eos_penalty": 3,
    "iter_decode_max_iter": 3, "iter_decode_force_max_iter": "", "iter_decode_with_beam": 3,
    "iter_decode_with_external_reranker": "", "beam_mt": 2, "max_len_a_mt": 2, "max_len_b_mt": 2, "lenpen_mt": 3,
    "eos_token": "HUND", "no_seed_provided": None,
}  # fmt: skip
IGNORED = " ".join(
    f"--{name.replace('_', '-')} {value}"
    for name, value in WITHOUT_EFFECT.items()
    if name in FIELDS and value is not None
)
OPTIONS: dict[str, tuple[With, ...]] = {
    **dict.fromkeys(("beam", "nbest", "lenpen"), _same("--beam 7 --nbest 7 --lenpen 2.5")),
    **dict.fromkeys(("max_len_a", "max_len_b"), _same("--beam 1 --max-len-a 0.5 --max-len-b 1")),
    "min_len": _same("--min-len 12 --max-len-b 12 --lenpen -1"),
    "match_source_len": _back("search by LengthConstrainedBeamSearch", "--match-source-len"),
    **dict.fromkeys(("unnormalized", "unkpen"), _same("--unnormalized --unkpen -5 --nbest 5")),
    "replace_unk": (
        With("--replace-unk DICT --dataset-impl raw"),
        With("--replace-unk DICT --dataset-impl raw --unkpen -90", fails="--replace-unk needs --print-alignment hard"),
        *_back(
            "--print-alignment",
            "--replace-unk DICT --dataset-impl raw --unkpen -90 --print-alignment",
            "--replace-unk --dataset-impl raw --unkpen -90 --print-alignment",
        ),
    ),
    "sacrebleu": _same("--sacrebleu --beam 40"),
    "score_reference": (With("--score-reference", said=None),),
    "prefix_size": _same("--prefix-size 1 --beam 2 --min-len 4"),
    "no_repeat_ngram_size": _same("--no-repeat-ngram-size 2 --prefix-size 2"),
    "temperature": _same("--temperature 3 --nbest 5"),
    **dict.fromkeys(
        ("sampling", "sampling_topk"), _back("search by Sampling", "--sampling --sampling-topk 3 --seed 4")
    ),
    "sampling_topp": _back("search by Sampling", "--sampling --sampling-topp 0.7 --beam 3 --seed 4"),
    # fairseq-generate reads no constraints; fairseq-interactive does.
    "constraints": _back("search by LexicallyConstrainedBeamSearch", "--constraints", fails="TypeError"),
    **dict.fromkeys(
        ("diverse_beam_groups", "diverse_beam_strength"),
        _back("search by DiverseBeamSearch", "--diverse-beam-groups 2 --beam 4 --diverse-beam-strength 0.1 --nbest 4"),
    ),
    "diversity_rate": _back("search by DiverseSiblingsSearch", "--diversity-rate 0.5 --nbest 5"),
    "print_alignment": _back("--print-alignment", "--print-alignment", "--print-alignment soft"),
    **dict.fromkeys(
        ("lm_path", "lm_weight"), _back("fusion with a language model", "--lm-path LM --lm-weight 0.9 --nbest 5")
    ),
    "retain_dropout": _back(
        "dropout at inference (retain_dropout) in encoder.dropout_module", "--retain-dropout --seed 4"
    ),
    "retain_dropout_modules": (
        *_same("--retain-dropout --retain-dropout-modules NoSuchModule"),
        *_back(
            "dropout at inference (retain_dropout) in decoder.dropout_module",
            "--retain-dropout --retain-dropout-modules LightConvDecoder --seed 4",
        ),
    ),
    "print_step": (With("--print-step", fails="KeyError: 'steps'"),),
    "retain_iter_history": (With("--retain-iter-history", fails="KeyError: 'history'"),),
    **{name: _same(IGNORED) for name in WITHOUT_EFFECT if name in FIELDS},
}


@pytest.fixture(scope="module")
def trained(toy_data, toy_training, tmp_path_factory):
    """Paths by the words that stand for them: data-bin with its text, checkpoints, a dictionary of words."""
    folder = tmp_path_factory.mktemp("every option")
    data, plain = shutil.copytree(toy_data, folder / "data-bin"), folder / "plain"
    for lang in ("de", "en"):
        shutil.copy(toy_data.parent / f"test.{lang}", data / f"test.de-en.{lang}")
    shutil.copy(data / "dict.en.txt", data / "dict.txt")
    plain.mkdir()
    shutil.copy(data / "dict.txt", plain)
    for split in ("train", "valid"):
        for end in ("bin", "idx"):
            shutil.copy(data / f"{split}.de-en.en.{end}", plain / f"{split}.{end}")
    size = "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-layers 1 --decoder-attention-heads 2".split()
    fairseq_cli.run(
        *["train", plain, "--user-dir", fairseq_cli.USER_DIR, "--task", "language_modeling"],
        *["--sample-break-mode", "eos", "--arch", "transformer_lm"],
        *[*size, *fairseq_cli.RECIPE, "--max-update", "1", "--no-epoch-checkpoints", "--save-dir", folder],
    )
    (folder / "words.txt").write_text("Hund DOG\n")
    checkpoints = {"MODEL": toy_training / "checkpoint_last.pt", "LM": folder / "checkpoint_last.pt"}
    return {"DATA": data, "DICT": folder / "words.txt", **checkpoints}


def read(trained, *arguments: str):
    """What the parser of `fairseq-generate` on the test set reads."""
    common = f"DATA --path MODEL --user-dir {fairseq_cli.USER_DIR} --cpu --batch-size 5 --num-workers 0 --max-len-b 20"
    given = [str(trained.get(word, word)) for word in (*common.split(), *arguments)]
    return options.parse_args_and_arch(options.get_generation_parser(), given)


@pytest.fixture(scope="module")
def plain(trained):
    """The configuration without other options."""
    return convert_namespace_to_omegaconf(read(trained))


@pytest.fixture(scope="module")
def fast(trained):
    """The group `task` of the configuration with this task."""
    return convert_namespace_to_omegaconf(read(trained, "--task", "translation_fast")).task


def configuration(trained, plain, *arguments: str):
    """That of a command line, as fairseq makes it with hydra, which takes longer than to translate."""
    given, cfg = vars(read(trained, *arguments)), copy.deepcopy(plain)
    for group in cfg.values():
        if isinstance(group, DictConfig):
            with open_dict(group):
                group.update({name: given[name] for name in group if name in given})
    return cfg


def translate(cfg, caplog) -> tuple[list[str], str | None, str]:
    """What `fairseq-generate` writes of the test set, what the plugin says of the search, and the error."""
    written, error = io.StringIO(), ""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        try:
            generate._main(cfg, written)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    said = [message for message in caplog.messages if message.startswith((FAST, BACK))]
    assert len(said) <= 1, said
    return written.getvalue().splitlines(), said[0] if said else None, error


def test_the_configuration_is_the_one_that_hydra_makes(trained, plain):
    command = "--beam 7 --lenpen 2.5 --sacrebleu --replace-unk DICT --dataset-impl raw --print-alignment soft --seed 4"
    command = [*command.split(), "--retain-dropout-modules", "LightConvDecoder"]
    assert configuration(trained, plain, *command) == convert_namespace_to_omegaconf(read(trained, *command))


def test_no_option_is_left_out():
    assert set(OPTIONS) == FIELDS


@pytest.mark.parametrize("command", dict.fromkeys(c for commands in OPTIONS.values() for c in commands), ids=str)
def test_both_do_the_same(command, trained, plain, fast, caplog):
    cfg = configuration(trained, plain, *command.options.split())
    expected, nothing, their_error = translate(cfg, caplog)
    with open_dict(cfg):
        cfg.task = fast
    found, said, error = translate(cfg, caplog)
    assert nothing is None and said == command.said
    assert error == their_error and command.fails in error and bool(command.fails) == bool(error)
    assert len(found) == len(expected) and (command.fails or len(found) > 12 * 5)
    for ours, theirs in zip(found, expected, strict=True):
        numbers = [[float(number) for number in NUMBER.findall(line)] for line in (ours, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], abs=3e-4)
        assert NUMBER.sub("#", ours) == NUMBER.sub("#", theirs)
