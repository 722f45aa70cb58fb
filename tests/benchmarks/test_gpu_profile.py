"""The profile of a training step: what is made of the kernels' times, and that it runs."""

import json

import pytest

from benchmarks import gpu_profile, report
from benchmarks.gpu_profile import Kernel


def test_a_summary_of_kernels():
    """Two steps: a product of 30 µs that a copy of another stream overlaps by 10, a gap of 20, a kernel of ours."""
    step = [("ampere_bf16_gemm", 0, 30), ("Memcpy DtoD", 20, 40), ("lightconv::band_forward", 60, 70)]
    kernels = [Kernel(name, start + at, end + at) for at in (0, 100) for name, start, end in step]
    found = gpu_profile.summary(reversed(kernels), 2)
    assert found["launches"] == 3
    assert found["busy_ms"] == pytest.approx(0.050)
    assert found["gaps_ms"] == pytest.approx((20 + 30 + 20) / 2 * 1e-3)
    assert found["kinds"]["matrix products"] == {"launches": 1, "ms": pytest.approx(0.030)}
    assert {name: of["launches"] for name, of in found["kinds"].items()} == {
        "matrix products": 1,
        "copies": 1,
        "ours": 1,
    }
    assert next(iter(found["longest"])) == "ampere_bf16_gemm"


def test_a_summary_of_nothing():
    assert gpu_profile.summary([], 2)["launches"] == 0 == gpu_profile.summary([], 2)["gaps_ms"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void lightconv::short_forward<__nv_bfloat16>", "ours"),
        ("nvjet_tst_128x256_64x4", "matrix products"),
        ("fmha_cutlassF_bf16_aligned", "attention"),
        ("multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("vectorized_layer_norm_kernel", "norm"),
        ("vectorized_elementwise_kernel<4, CUDAFunctor_add>", "element-wise"),
        ("something_else", "other"),
    ],
)
def test_kinds(name, kind):
    assert gpu_profile.kind(name) == kind


def test_quick(capsys, tmp_path):
    file = tmp_path / "profile.json"
    assert report.run(lambda: gpu_profile.main(["--quick", "--json", str(file)])) == 0
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["host"]["launch_s"] > content["host"]["loop_s"] > 0
    assert len(content["systems"]) == 2
    for by_tokens in content["systems"].values():
        (found,) = by_tokens.values()
        assert found["launches"] > 20 and found["busy_ms"] > 0
        assert found["kinds"]["matrix products"]["launches"] > 5
        assert sum(of["launches"] for of in found["kinds"].values()) == pytest.approx(found["launches"])
    assert "a launch takes the host" in capsys.readouterr().out
