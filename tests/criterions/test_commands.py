"""fairseq-train with R-Drop and SimCut, by one process and by two."""

import pytest

pytest.importorskip("fairseq", reason="fairseq is not installed")

from tests.fairseq_cli import RECIPE, SIZE, USER_DIR, logged, run

AT = RECIPE.index("--criterion")
BASE = RECIPE[:AT] + RECIPE[AT + 2 :]  # without the criterion's name


@pytest.mark.parametrize(
    "name, options, architecture",
    [
        (
            "rdrop",
            ("--rdrop-alpha", "5", "--distributed-world-size", "2", "--ddp-backend", "pytorch_ddp"),
            "dynamicconv",
        ),
        ("simcut", ("--distributed-world-size", "2", "--ddp-backend", "pytorch_ddp"), "dynamicconv"),
        ("simcut", ("--simcut-alpha", "2", "--simcut-p", "0.1"), "transformer"),
    ],
    ids=["rdrop", "simcut", "transformer"],
)
def test_a_training(toy_data, tmp_path, name, options, architecture):
    size = [word for word in SIZE if "kernel" not in word and word != "3,7"] if architecture == "transformer" else SIZE
    criterion = ("--criterion", f"label_smoothed_cross_entropy_with_{name}", *options)
    log = run(
        "train", toy_data, "--user-dir", USER_DIR, "--arch", architecture, *size, *BASE, "--max-epoch", "1",
        "--save-dir", tmp_path, *criterion,
    )  # fmt: skip
    updates, [valid] = logged(log), logged(log, "valid")
    assert len(updates) > 1 and all(float(update[f"{name}_kl_loss"]) > 0 for update in updates)
    assert f"valid_{name}_kl_loss" not in valid
    # A loss of one pass: about the entropy of the words that there are, not twice as much.
    passes = 2 if name == "rdrop" else 1
    assert float(valid["valid_nll_loss"]) < 1.2 * float(updates[-1]["nll_loss"]) / passes
