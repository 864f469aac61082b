"""How large a net is and how much work one sample takes."""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fedalloy.core.net import Inputs, Net


class Size(NamedTuple):
    """Counts of numbers, not bytes; buffers are the floating-point ones, such as BatchNorm's statistics."""

    parameters: int
    buffers: int
    flops: int  # of one sample's forward pass; a multiplication with an addition counts two


def samples(inputs: Inputs, count: int) -> Tensor:
    """Made-up samples, always the same; the global random state is left alone."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, *inputs.shape)
    if inputs.kind == "tokens":
        return torch.randint(1, max(inputs.vocab, 2), shape, generator=generator, device="cpu")
    return torch.randn(shape, generator=generator, device="cpu")


def measure(net: Net, inputs: Inputs) -> Size:
    """The size of a net, which is left in evaluation mode."""
    parameters = list(net.parameters())
    buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    sample = samples(inputs, 1).to(parameters[0].device)
    # the counter knows matrix products and convolutions: attention is taken apart, fused LSTMs are taught
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mkldnn_rnn_layer: _lstm_flops})
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        net.eval()(sample)
    return Size(
        sum(p.numel() for p in parameters), sum(b.numel() for b in buffers), counter.get_total_flops()
    )


def _lstm_flops(
    words: tuple[int, ...], inner: tuple[int, ...], recurrent: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """Both weight matrices at each of T steps: words are T B I, the matrices 4H I and 4H H."""
    return 2 * words[0] * words[1] * (prod(inner) + prod(recurrent))
