"""The commands that fairseq's users know, with `--user-dir` added and nothing else."""

import re

import pytest
import torch

from tests import programs
from tests.fairseq_cli import RECIPE, REPOSITORY, SIZE, USER_DIR, logged, run
from tests.warm_python import warm_python

PLUGIN = ["--user-dir", str(USER_DIR)]
# Models of a few updates do not know when to stop.
SEARCH = ["--cpu", "--max-len-b", 20]


@pytest.fixture(scope="module")
def data(toy_data):
    return toy_data


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A checkpoint of two epochs, with BLEU in its validation, as upstream's recipe for IWSLT writes it."""
    folder = tmp_path_factory.mktemp("run")
    log = run(
        "train", data, *PLUGIN, "--arch", "lightconv_iwslt_de_en", *SIZE, *RECIPE, "--save-dir", folder,
        "--max-epoch", 2, "--dropout", 0.3, "--attention-dropout", 0.1, "--weight-dropout", 0.1,
        "--encoder-glu", 0, "--decoder-glu", 0, "--keep-last-epochs", 10, "--eval-bleu", "--eval-bleu-args",
        '{"beam": 2, "max_len_b": 12}', "--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric",
    )  # fmt: skip
    assert "lightconv architectures are lightconv_plugin's" in log
    assert '"valid_bleu"' in log
    return folder


def test_generate_and_interactive_agree(data, trained):
    checkpoint = trained / "checkpoint_best.pt"
    log = run("generate", data, *PLUGIN, "--path", checkpoint, "--beam", 3, *SEARCH, "--gen-subset", "test")
    assert "Generate test with beam=3: BLEU4" in log
    source = dict(re.findall(r"^S-(\d+)\t(.*)$", log, re.M))
    hypotheses = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", log, re.M))
    typed = "".join(source[str(i)] + "\n" for i in range(4))
    answers = run(
        "interactive", data, *PLUGIN, "--path", checkpoint, "--beam", 3, *SEARCH, stdin=typed
    )  # fmt: skip
    assert re.findall(r"^H-\d+\t\S+\t(.*)$", answers, re.M) == [hypotheses[str(i)] for i in range(4)]


def test_validate(data, trained):
    log = run(
        "validate", data, *PLUGIN, "--task", "translation", "--path", trained / "checkpoint_best.pt", "--cpu",
        "--valid-subset", "valid", "--max-tokens", 200,
    )  # fmt: skip
    assert re.search(r"valid \| .*loss", log)


def test_from_pretrained(data, trained, tmp_path):
    """In a process of its own, as a user's script."""
    (tmp_path / "code").write_text("#version: 0.2\nH u\nn d</w>\n", encoding="utf-8")
    script = f"""
import lightconv_plugin.models as m
model = m.architectures.LightconvIwsltDeEnModel.from_pretrained(
    {str(trained)!r}, "checkpoint_best.pt", {str(data)!r}, source_lang="de", target_lang="en",
    bpe="subword_nmt", bpe_codes={str(tmp_path / "code")!r})
assert model.apply_bpe("den Hund") == "d@@ e@@ n Hu@@ nd"
print("TRANSLATION", repr(model.translate("ich sieht den Hund", beam=2)))
"""
    done = programs.run(warm_python(), "-c", script)
    assert re.search(r"^TRANSLATION '.*'$", done.stdout, re.M)


@pytest.mark.parametrize("conv_type", ["lightweight", pytest.param("dynamic", marks=pytest.mark.long)])
def test_a_training_that_fairseq_began(data, tmp_path, conv_type):
    """fairseq's own LightConv for two epochs, then the same command with the plugin: it resumes and translates."""
    command = [
        data, *PLUGIN, "--arch", "lightconv_iwslt_de_en", *SIZE, *RECIPE, "--save-dir", tmp_path, "--dropout", 0,
        "--attention-dropout", 0, "--weight-dropout", 0, "--encoder-conv-type", conv_type, "--decoder-conv-type",
        conv_type, "--encoder-kernel-size-list", 3, "--decoder-kernel-size-list", 3,
    ]  # fmt: skip
    theirs = run("train", *command, "--max-epoch", 2, LIGHTCONV_KEEP_UPSTREAM="1")
    assert "lightconv_plugin's" not in theirs
    (tmp_path / "theirs").mkdir()
    more = [*command, "--max-epoch", 3, "--restore-file", tmp_path / "checkpoint2.pt"]
    expected = logged(run("train", *more, "--save-dir", tmp_path / "theirs", LIGHTCONV_KEEP_UPSTREAM="1"))
    ours = logged(run("train", *more, "--save-dir", tmp_path / "ours"))
    assert len(ours) == len(expected) > 1
    assert [float(u["loss"]) for u in ours] == pytest.approx([float(u["loss"]) for u in expected], abs=0.005)
    log = run("generate", data, *PLUGIN, "--path", tmp_path / "checkpoint2.pt", "--beam", 2, *SEARCH)
    assert "Generate test with beam=2" in log


CONFIG = """\
# @package _group_
common: {{log_format: json, log_interval: 1, cpu: true, user_dir: {plugin}}}
checkpoint: {{save_dir: {folder}/checkpoints}}
task: {{_name: translation, data: {data}, source_lang: de, target_lang: en}}
criterion: {{_name: label_smoothed_cross_entropy, label_smoothing: 0.1}}
dataset: {{max_tokens: 200, num_workers: 0}}
optimization: {{max_update: 3, lr: [0.001]}}
optimizer: {{_name: adam, adam_betas: "(0.9,0.98)"}}
lr_scheduler: {{_name: inverse_sqrt, warmup_updates: 4}}
model:
  _name: lightweightconv_iwslt_de_en
  encoder_embed_dim: 16
  decoder_embed_dim: 16
  encoder_layers: 2
  decoder_layers: 2
  encoder_kernel_size_list: [3, 7]
  decoder_kernel_size_list: [5]
"""


def test_hydra_train_then_generate(data, tmp_path):
    """The architecture's own numbers must hold wherever the file says nothing."""
    (tmp_path / "small.yaml").write_text(CONFIG.format(plugin=USER_DIR, data=data, folder=tmp_path))
    log = run(
        "hydra-train", "--config-dir", tmp_path, "--config-name", "small", f"hydra.run.dir={tmp_path}/hydra",
        "+model.decoder_ffn_embed_dim=40",
    )  # fmt: skip
    checkpoint = tmp_path / "checkpoints" / "checkpoint_last.pt"
    model = torch.load(checkpoint, weights_only=False)["cfg"]["model"]
    assert model["encoder_ffn_embed_dim"] == 1024 and model["decoder_ffn_embed_dim"] == 40
    assert model["encoder_attention_heads"] == 4 and model["encoder_glu"] is False
    assert model["weight_dropout"] == 0.1 and model["encoder_conv_type"] == "lightweight"
    assert len(logged(log)) == 3
    log = run("generate", data, *PLUGIN, "--path", checkpoint, "--beam", 2, *SEARCH)
    assert "Generate test with beam=2" in log


def test_hydra_train_without_a_file(data, tmp_path):
    """docs/faq.md: `model=NAME` is read before fairseq imports the plugin, an option of the model after it."""
    command = [
        f"common.user_dir={USER_DIR}", "common.cpu=true", "common.log_format=json", "common.log_interval=1",
        "task=translation", f"task.data={data}", "criterion=cross_entropy", "optimizer=adam", "dataset.max_tokens=200",
        "dataset.num_workers=0", "dataset.disable_validation=true", "optimization.max_update=1",
        "checkpoint.no_save=true", f"hydra.run.dir={tmp_path}",
    ]  # fmt: skip
    size = ["encoder_embed_dim=16", "encoder_layers=1", "decoder_layers=1"]
    size += [f"{side}_kernel_size_list=[3]" for side in ("encoder", "decoder")]
    name = "dynamicconv_iwslt_de_en"
    log = run("hydra-train", *command, f"+model._name={name}", *(f"+model.{option}" for option in size))
    assert len(logged(log)) == 1
    assert f"Could not find 'model/{name}'" in run("hydra-train", *command, f"model={name}", fails=True)


USERS = """\
from fairseq.models import register_model_architecture

@register_model_architecture("lightconv", "lightconv_of_a_user")
def lightconv_of_a_user(args):
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 32)
    args.decoder_embed_dim = getattr(args, "decoder_embed_dim", 32)
    args.encoder_layers = getattr(args, "encoder_layers", 7)

import lightconv_plugin
"""


def test_an_architecture_of_a_users_own(data, tmp_path):
    """Registered on top of a model, and even before the plugin replaces that model; the command line comes first."""
    user_dir = tmp_path / "users_own"
    user_dir.mkdir()
    (user_dir / "__init__.py").write_text(USERS)
    environment = {"PYTHONPATH": str(REPOSITORY)}
    size = [word for pair in zip(SIZE[::2], SIZE[1::2], strict=True) if "embed-dim" not in pair[0] for word in pair]
    run(
        "train", data, "--user-dir", user_dir, "--arch", "lightconv_of_a_user", *size, *RECIPE, "--save-dir", tmp_path,
        "--max-update", 2, **environment,
    )  # fmt: skip
    checkpoint = tmp_path / "checkpoint_last.pt"
    state = torch.load(checkpoint, weights_only=False)
    assert state["cfg"]["model"]["_name"] == "lightconv_of_a_user"
    assert state["model"]["encoder.embed_tokens.weight"].shape[1] == 32
    assert state["cfg"]["model"]["encoder_layers"] == 2 and "encoder.layers.2.fc1.weight" not in state["model"]
    log = run("generate", data, "--user-dir", user_dir, "--path", checkpoint, "--beam", 2, *SEARCH, **environment)
    assert "Generate test with beam=2" in log


def test_a_hydra_checkpoint_holds_nothing_but_plain_values(data, trained):
    """It loads with torch's safe loader and no exceptions for the model's options."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    assert isinstance(state["cfg"]["model"], dict) and state["args"] is None


@pytest.mark.parametrize(
    "architecture",
    [
        "dynamicconv_iwslt_de_en",
        pytest.param("lightweightconv_iwslt_de_en", marks=pytest.mark.long),
        pytest.param("talkconv_iwslt_de_en", marks=pytest.mark.long),
    ],
)
def test_plain_ddp_with_two_processes(data, tmp_path, architecture):
    """--ddp-backend pytorch_ddp, which fails or hangs on a parameter that gets no gradient."""
    log = run(
        "train", data, *PLUGIN, "--arch", architecture, *SIZE, *RECIPE, "--save-dir", tmp_path, "--max-update", 2,
        "--distributed-world-size", 2, "--ddp-backend", "pytorch_ddp", "--distributed-backend", "gloo",
        "--disable-validation", "--no-save",
    )  # fmt: skip
    assert len(logged(log)) == 2


@pytest.mark.parametrize(
    "flags",
    [
        "--amp --checkpoint-activations",
        "--adaptive-softmax-cutoff 8,12 --criterion adaptive_loss --ddp-backend legacy_ddp",
    ],
)
def test_flags_of_training(data, tmp_path, flags):
    recipe = RECIPE
    if "--criterion" in flags:
        at = RECIPE.index("--criterion")
        recipe = RECIPE[:at] + RECIPE[at + 4 :]  # without its own, and its label smoothing
    log = run(
        "train", data, *PLUGIN, "--arch", "dynamicconv_iwslt_de_en", *SIZE, *recipe, "--save-dir", tmp_path,
        "--max-update", 2, "--no-save", "--disable-validation", *flags.split(),
    )  # fmt: skip
    assert all(float(u["loss"]) < 20 for u in logged(log)) and len(logged(log)) == 2


MIXERS = (
    "--encoder-layers 3 --encoder-conv-type talk,window_attention,attention --encoder-attention-conv q,k,v"
    " --decoder-layers 4 --decoder-conv-type depthwise,conv,dynamic,attention --decoder-attention-conv k"
    " --decoder-cross-attention-conv q --decoder-dynamic-rank 0,0,4,0 --dynamic-residual"
    " --encoder-kernel-size-list 3 --decoder-kernel-size-list 3"
).split()


def test_a_mixer_of_each_kind(data, tmp_path):
    """Trained in bfloat16, with filters dropped, resumed, and translating by beam search."""
    command = [
        "train", data, *PLUGIN, "--arch", "talkconv_iwslt_de_en", *SIZE, *RECIPE, *MIXERS, "--save-dir", tmp_path,
        "--bf16", "--weight-dropout", 0.2, "--attention-dropout", 0.2,
    ]  # fmt: skip
    first = logged(run(*command, "--max-epoch", 1))
    log = run(*command, "--max-epoch", 2)
    again = logged(log)
    assert all(float(u["loss"]) < 20 for u in first) and "Loaded checkpoint" in log
    assert int(again[0]["num_updates"]) == int(first[-1]["num_updates"]) + 1
    log = run("generate", data, *PLUGIN, "--path", tmp_path / "checkpoint_last.pt", "--beam", 3, *SEARCH)
    assert "Generate test with beam=3" in log and len(re.findall(r"^H-\d+\t", log, re.M)) == 12


def test_a_wrong_option_is_one_clear_error(data, tmp_path):
    log = run(
        "train", data, *PLUGIN, "--arch", "dynamicconv_iwslt_de_en", *SIZE, *RECIPE, "--save-dir", tmp_path,
        "--encoder-conv-type", "dynamic,lightweight,dynamic", fails=True,
    )  # fmt: skip
    assert "ValueError: --encoder-conv-type needs one entry, or one for each of the 2 layers" in log
