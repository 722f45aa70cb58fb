"""fairseq's dropout modules in our models, by the plugin's operator."""

import pytest
import torch

pytest.importorskip("fairseq")
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import nn
from torch.autograd import forward_ad

from lightconv_plugin.models.token_mixers import RetainableDropout as Dropout
from lightconv_plugin.models.token_mixers import replace_dropout
from lightconv_plugin.ops import backends


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def run(module, x):
    with Calls() as calls:
        out = module(x)
    return out, any("lightconv.dropout" in name for name in calls.names)


def test_trains_by_the_operator_where_there_is_a_native_kernel():
    out, by_ours = run(Dropout(0.25, "Name"), torch.ones(100_000))
    assert by_ours == (backends.backend("cpu") == "cpu")
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}


def test_does_nothing_in_evaluation_and_keeps_going_where_it_is_retained():
    module = Dropout(0.5, "Name").eval()
    x = torch.ones(1000)
    assert module(x) is x
    module.make_generation_fast_("model.dropout", retain_dropout=True, retain_dropout_modules=["Name"])
    assert (module(x) == 0).any()


def test_torch_s_own_where_the_operator_does_not_serve(monkeypatch):
    monkeypatch.setattr(backends, "backend", lambda device_type: "reference")
    out, by_ours = run(Dropout(0.5), torch.ones(1000))
    assert not by_ours and (out == 0).any()


def test_torch_s_own_inside_functorch_s_transforms_and_dual_levels():
    module, x = Dropout(0.5), torch.ones(1000)
    gradient = torch.func.grad(lambda x: module(x).sum())(x)
    assert set(gradient.tolist()) == {0.0, 2.0}
    out, tangent = torch.func.jvp(module, (x,), (x,))
    assert torch.equal(out, tangent) and set(out.tolist()) == {0.0, 2.0}
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(x, x)))
        assert torch.equal(out, tangent) and set(out.tolist()) == {0.0, 2.0}


def test_everything_is_dropped_at_one():
    assert not Dropout(1.0)(torch.ones(10)).any()


def test_compiles_in_one_graph():
    module = torch.compile(Dropout(0.5), fullgraph=True, backend="aot_eager")
    assert (module(torch.ones(1000)) == 0).any()


def test_replaces_fairseq_s_at_any_depth_and_no_others():
    class Own(FairseqDropout):
        pass

    own, shared = Own(0.3), nn.Dropout(0.3)
    tree = nn.Sequential(nn.ModuleDict({"a": FairseqDropout(0.1, "A"), "b": own}), shared, FairseqDropout(0.2))
    replace_dropout(tree)
    assert type(tree[0]["a"]) is Dropout and (tree[0]["a"].p, tree[0]["a"].module_name) == (0.1, "A")
    assert tree[0]["b"] is own and tree[1] is shared and type(tree[2]) is Dropout
