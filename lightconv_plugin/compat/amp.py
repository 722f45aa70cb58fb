"""A patch for --amp, torch's automatic mixed precision."""

import functools
from typing import Any

from lightconv_plugin.compat.registry import patch


@patch(versions="all versions of fairseq")
def amp_scales_once() -> None:
    """With --amp on a GPU fairseq divides gradients by the loss scale twice, so that updates are too small, or vanish.

    GradScaler notes which optimizers have unscaled gradients: clip_grad_norm names torch's optimizer, and step names
    fairseq's wrapper of it, so the same gradients are divided again. fairseq also reads the value of --amp-init-scale
    where --amp-scale-window is given.
    """
    from fairseq.optim.amp_optimizer import AMPOptimizer

    original = AMPOptimizer.__init__

    @functools.wraps(original)
    def __init__(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
        original(self, cfg, *args, **kwargs)
        window = getattr(cfg.common, "amp_scale_window", None)
        if window is not None:
            self.scaler.set_growth_interval(window)

    def step(self: Any) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    AMPOptimizer.__init__, AMPOptimizer.step = __init__, step
