"""Checkpoints made by hand whose parts have wrong types: one line that names the part, not a traceback."""

import pytest
import torch

from lightconv_plugin.checkpoints import averaging
from lightconv_plugin.checkpoints.loading import count_parameters
from lightconv_plugin.errors import InputError
from tests.checkpoints.fairseq_files import lightconv, refused, save


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


# Parameters besides "w", as (name, tensor, what is said).
PARAMETERS = {
    "number-as-name": (1, torch.ones(1), "the name of a parameter must be a text, got int 1"),
    "sparse": ("x", torch.ones(2, 2).to_sparse(), "x must be a dense tensor, got torch.sparse_coo"),
    "csr": ("x", torch.ones(2, 2).to_sparse_csr(), "x must be a dense tensor, got torch.sparse_csr"),
    "meta": ("x", torch.ones(2, device="meta"), "x must have values, got a tensor on the meta device"),
    "repeated": ("x", torch.ones(1).expand(10**13), "x has 40,000,000,000,000 bytes, more than the file"),
    "nested": ("x", nested(), "x must be a dense tensor, got a nested tensor"),
}
PARTS = {
    "history": ({"optimizer_history": "abc"}, "optimizer_history must be a list, got str 'abc'"),
    "entry": ({"optimizer_history": [None]}, "an entry of optimizer_history must be a dictionary, got NoneType None"),
    "updates": ({"optimizer_history": [{"num_updates": "x"}]}, "num_updates in optimizer_history must be an integer"),
    "no-updates": ({"optimizer_history": [{"num_updates": None}]}, "must be an integer, got NoneType None"),
    "extra-state": ({"extra_state": [1]}, "extra_state must be a dictionary, got list [1]"),
    "section": ({"cfg": {"checkpoint": "x"}}, "checkpoint in cfg must be a dictionary or a Namespace, got str 'x'"),
    "task": ({"cfg": {"task": [1]}}, "task in cfg must be a dictionary or a Namespace, got list [1]"),
    "common": ({"cfg": {"common": 5}}, "common in cfg must be a dictionary or a Namespace, got int 5"),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|nested).*")
@pytest.mark.parametrize("name, tensor, said", PARAMETERS.values(), ids=PARAMETERS)
def test_parameters_that_are_not_dense_tensors_are_named(name, tensor, said, tmp_path, output, capsys):
    path = save(tmp_path / "a.pt", {"w": torch.ones(1), name: tensor})
    assert refused(capsys, "--inputs", path, "--output", output).endswith(f"{path}: {said}")
    assert not output.exists()
    with pytest.raises(InputError, match=r"a\.pt: "):
        count_parameters(path)


@pytest.mark.parametrize("part, said", PARTS.values(), ids=PARTS)
def test_parts_of_the_wrong_type_are_named(part, said, tmp_path, output, capsys):
    path = save(tmp_path / "a.pt", {"w": torch.ones(1)}, **part)
    message = refused(capsys, "--inputs", path, "--output", output)
    assert said in message and str(path) in message
    assert not output.exists()


def test_a_name_of_a_parameter_is_shown_on_one_line(tmp_path):
    path = save(tmp_path / "a.pt", {"w": torch.ones(1), "x\n" + 1000 * "y": [1]})
    with pytest.raises(InputError) as error:
        averaging.load_checkpoint(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_value_may_be_repeated_within_reason(tmp_path, output):
    path = save(tmp_path / "a.pt", {"w": torch.ones(1).expand(9)})
    assert lightconv("--inputs", path, "--output", output) == 0
    assert torch.load(output)["model"]["w"].tolist() == [1.0] * 9


def test_parts_may_be_missing(tmp_path, output):
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    torch.save({"model": {"w": torch.zeros(2)}, "optimizer_history": None, "extra_state": None}, tmp_path / "b.pt")
    assert lightconv("--inputs", tmp_path / "a.pt", tmp_path / "b.pt", "--output", output) == 0
    assert torch.load(output)["model"]["w"].tolist() == [0.5, 0.5]
