"""Unknown keys and groups, and every configuration with a list of kernels of another length: named before any work."""

import copy
import itertools
import re
import sys
from argparse import Namespace

import pytest
import torch
import yaml

pytest.importorskip("fairseq", reason="fairseq is not installed")

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightconv_plugin.recipes.training.errors import ConfigError, check_model, explain
from lightconv_plugin.recipes.training.plan import read_config
from lightconv_plugin.recipes.training.worker import check_before_work, train
from tests.recipes.test_configs import CONFIGS, PLAIN_GROUPS, name_of, schema
from tests.recipes.training.trainings import CONFIG

OURS = [path for path in CONFIGS if path.stem != "transformer" and "self_attention.yaml" not in path.name]
NUMBERS = itertools.count()
HEAD = "# @package _global_\n"


def test_a_key_that_nobody_knows():
    """In every group that any configuration has, of every name, as hydra and fairseq put them together."""
    groups = {
        (group, None if group in PLAIN_GROUPS else options["_name"])
        for config in CONFIGS
        for group, options in read_config(config).items()
    }
    groups.remove(("model", "transformer"))  # its options are of the older kind, argparse's: fairseq reads no others
    assert {group for group, _ in groups} > {*PLAIN_GROUPS[:4], "model", "task", "criterion", "optimizer"}
    for group, name in groups:
        with pytest.raises(OmegaConfBaseException) as refused:
            OmegaConf.merge(OmegaConf.structured(schema(group, name)), OmegaConf.create({"no_such_key": 1}))
        assert "no_such_key" in explain(refused.value, 1), (group, name)


def test_a_group_that_nobody_knows(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(HEAD + yaml.safe_dump({**CONFIG, "no_such_group": {"a": 1}}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong.yaml: there is no group no_such_group, only bmuf, bpe, checkpoint"):
        read_config(wrong)


@pytest.mark.parametrize("config", OURS, ids=name_of)
def test_a_list_of_another_length(config):
    """Kernel sizes and mixers, one too many and, where there are several, one too few, on each side."""
    model = read_config(config)["model"]
    # What the task's group says, and hydra fills in.
    model = {**model, "tokens_per_sample": 64} if "_lm" in model["_name"] else model
    check_model(Namespace(**model))
    tried = 0
    for side in ("encoder", "decoder"):
        layers = model.get(f"{side}_layers")
        if layers is None or (side == "encoder" and "_lm" in model["_name"]):
            continue
        wrong = [(f"{side}_conv_type", "dynamic")]
        if model.get(f"{side}_conv_type") != "attention":  # which reads no kernel sizes, in all layers
            wrong.append((f"{side}_kernel_size_list", 3))
        for key, entry in wrong:
            for length in {layers + 1, layers - 1} - {0, 1}:
                entries = [entry] * length
                value = entries if entry == 3 else ",".join(entries)
                with pytest.raises(ConfigError) as refused:
                    check_model(Namespace(**{**model, key: value}))
                said = explain(refused.value, 1)
                assert said.startswith(
                    f"model: --{key.replace('_', '-')} needs one entry, or one for each of the {layers}"
                )
                assert f"got {length} in " in said and "\n" not in said
                tried += 1
    assert tried or "layers" not in str(model)


@pytest.mark.parametrize(
    "name, said",
    [
        ("dynamicconvv", "model._name: there is no model dynamicconvv; did you mean dynamicconv"),
        ("zzz", "model._name: there is no model zzz"),
        (None, "model._name is missing: a configuration names its model"),
    ],
)
def test_a_model_that_is_none(name, said):
    with pytest.raises(ConfigError, match="^" + re.escape(said)):
        check_model(Namespace(_name=name))


@pytest.fixture
def data(tmp_path):
    """A data-bin that lacks its data sets."""
    folder = tmp_path / "data-bin"
    folder.mkdir()
    for lang in ("de", "en"):
        (folder / f"dict.{lang}.txt").write_text("word 3\nother 2\n", encoding="utf-8")
    return folder


@pytest.fixture
def start(tmp_path, data, monkeypatch, capsys):
    """What one process of train.sh says, and how it ends, for CONFIG with changes; it runs in this process."""
    from fairseq.distributed import utils
    from fairseq_cli import hydra_train

    monkeypatch.setattr(utils, "call_main", utils.call_main)  # check_before_work's is taken back
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)
    check_before_work()

    def run(change, *overrides):
        content = copy.deepcopy(CONFIG)
        content["task"]["data"] = str(data)
        change(content)
        # fairseq leaves a schema under the configuration's name with hydra, which a second one must not find.
        name = f"tiny{next(NUMBERS)}"
        (tmp_path / f"{name}.yaml").write_text(HEAD + yaml.safe_dump(content), encoding="utf-8")
        GlobalHydra.instance().clear()
        arguments = ["--config-dir", str(tmp_path), "--config-name", name, f"hydra.run.dir={tmp_path}/hydra"]
        arguments += [f"checkpoint.save_dir={tmp_path}/run", *overrides]
        monkeypatch.setattr(sys, "argv", [hydra_train.__file__, *arguments])
        before = torch.get_rng_state()
        try:
            with pytest.raises(SystemExit) as stopped:
                train(hydra_train.cli_main, 600)
        finally:
            torch.set_rng_state(before)
        assert stopped.value.code == 1
        assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("*.pt"))
        said = capsys.readouterr().err
        assert "Traceback" not in said
        (line,) = [line for line in said.splitlines() if line.startswith("lightconv train: error: process 0: ")]
        return line

    return run


def put(group, key, value, **more):
    return lambda content: content[group].update({key: value, **more})


def without(group, key=None):
    def change(content):
        del (content[group] if key else content)[key or group]

    return change


def consistency(kind, **options):
    return put("criterion", "_name", f"label_smoothed_cross_entropy_with_{kind}", **options)


def nothing(content):
    pass


@pytest.mark.parametrize(
    "change, overrides, names",
    [
        (put("common", "no_such_key", 1), [], "no_such_key"),
        (put("optimization", "max_update", "many"), [], "optimization.max_update"),
        (put("model", "dropout", "much"), [], "dropout"),
        (without("optimizer"), [], "optimizer._name is missing: a configuration names its optimizer"),
        (without("lr_scheduler"), [], "lr_scheduler._name is missing"),
        (without("task", "_name"), [], "task._name is missing"),
        (put("task", "_name", "translate"), [], "there is no task translate; did you mean translation"),
        (put("criterion", "_name", "label_smooth"), [], "there is no criterion label_smooth"),
        (without("dataset", "max_tokens"), [], "dataset.max_tokens is missing"),
        (
            put("criterion", "label_smoothing", 2.0),
            [],
            "criterion.label_smoothing must be in 0 … 1, but not 1, got 2.0",
        ),
        (nothing, ["optimization.lr=[]"], "0: optimization.lr must be a list such as [0.005], got []"),
        (nothing, ["optimization.update_freq=[2,0]"], "update_freq must be a list of whole numbers from 1, got [2, 0]"),
        (put("common", "log_interval", 0), [], "0: common.log_interval must be at least 1, got 0"),
        (nothing, ["common.seed=-1"], "0: common.seed must be at least 0, got -1"),
        (nothing, ["common.seed=4294967296"], "0: common.seed must be below 4294967296, got 4294967296"),
        (consistency("rdrop", rdrop_alpha=-1.0), [], "--rdrop-alpha must be a number of at least 0, got -1.0"),
        (consistency("simcut", simcut_p=1.5), [], "--simcut-p must be a probability, 0 … 1, got 1.5"),
        (nothing, ["model.encoder_kernel_size_list=[3,5]"], "--encoder-kernel-size-list needs one entry"),
        (
            put("optimization", "max_updates", 1),
            [],
            "0: optimization.max_updates: OptimizationConfig has no such option; did you mean max_update",
        ),
        (
            nothing,  # hydra itself advises to add it with +
            ["optimization.max_updates=1"],
            "0: optimization.max_updates: OptimizationConfig has no such option; did you mean max_update",
        ),
        (nothing, ["+model.dropuot=1"], "0: dropuot: DynamicconvConfig has no such option; did you mean dropout or "),
        (nothing, ["optimisation.lr=[1]"], "FairseqConfig has no such option; did you mean optimization?"),
        (nothing, ["+model.no_such_key=1"], "no_such_key"),
        (
            put("model", "_name", "transformer"),  # its options are argparse's
            ["+model.encoder_layrs=1"],
            "model.encoder_layrs: the model transformer has no such option; did you mean encoder_layers or ",
        ),
        (nothing, ["nonsense"], "nonsense"),
    ],
)
def test_one_line_and_nothing_begun(change, overrides, names, start):
    assert names in start(change, *overrides)


def test_a_criterion_of_a_user_dir_is_known(data, tmp_path, start):
    (tmp_path / "their_own").mkdir()
    (tmp_path / "their_own/__init__.py").write_text(
        "from fairseq.criterions import register_criterion\n"
        "from fairseq.criterions import label_smoothed_cross_entropy as own\n"
        "kind = type('Theirs', (own.LabelSmoothedCrossEntropyCriterion,), {})\n"
        "options = own.LabelSmoothedCrossEntropyCriterionConfig\n"
        "register_criterion('theirs_of_a_user_dir', dataclass=options)(kind)\n"
    )
    assert str(data) in start(
        put("criterion", "_name", "theirs_of_a_user_dir"), f"common.user_dir={tmp_path}/their_own"
    )


def test_data_that_are_not_there(data, start):
    line = start(nothing)
    assert "valid" in line and str(data) in line and "is the data prepared, and complete? (task.data)" in line


def test_a_dictionary_that_is_not_there(data, start):
    (data / "dict.de.txt").unlink()
    line = start(nothing)
    assert f"{data}/dict.de.txt" in line and "is the data prepared, and complete? (task.data)" in line


def raised(function):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        function()
    return caught.value


LATE, CLOSED = "no response from a peer process after 9 s: it hangs", "lost the connection to a peer process"
MESSAGES = {
    "[…/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 9000ms for recv operation": LATE,
    "wait timeout after 9000ms, keys: /default_pg/0//cuda//0": LATE,
    "[…/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2": CLOSED,
    "Read error [127.0.0.1]:3: Connection reset by peer": CLOSED,
    "CUDA out of memory. Tried to allocate 2.00 GiB": "not enough memory: a smaller dataset.max_tokens with a larger",
    "The dataset is empty. This could indicate that all elements have been skipped.": "The dataset is empty.",
    "shape '[2]' is invalid for input of size 3": "",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_what_an_error_means(message):
    said = explain(RuntimeError(f"{message}\nException raised from somewhere"), 9)
    assert said.startswith(MESSAGES[message]) and bool(said) == bool(MESSAGES[message]) and "\n" not in said


def test_too_little_memory():
    """What torch says when the system gives no more."""
    for error in raised(lambda: torch.empty(1 << 60)), MemoryError():
        assert explain(error, 9).startswith("not enough memory: a smaller dataset.max_tokens")
