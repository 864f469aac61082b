"""The gradient of cross-entropy through a perceptron, written out.

A graph of autograd costs a tiny layer more than its arithmetic. These are the operations that autograd would do, in its
order and with its memory layout, so the bits are the same; only the graph is missing.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.nets.base import Net, Outputs


def chain(net: Net) -> tuple[nn.Linear, ...]:
    """The layers of a net that flattens its input and then does nothing but linear maps with ReLUs between; else ()."""
    modules = [module for part in (net.body, net.neck, net.head) for module in _leaves(part)]
    if not modules or type(modules[0]) is not nn.Flatten or type(net) is not Net or hasattr(net, "aux"):
        return ()
    layers, between = modules[1::2], modules[2::2]
    plain = all(type(layer) is nn.Linear and layer.bias is not None for layer in layers)
    if not plain or len(layers) != len(between) + 1 or any(type(relu) is not nn.ReLU for relu in between):
        return ()
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    return () if hooked else tuple(layer for layer in layers if isinstance(layer, nn.Linear))


def _leaves(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.Sequential):
        return [leaf for child in module for leaf in _leaves(child)]
    return [] if type(module) is nn.Identity else [module]


@torch.no_grad()
def descend(layers: Sequence[nn.Linear], x: Tensor, y: Tensor) -> tuple[Outputs, Tensor]:
    """Outputs and mean cross-entropy; every layer's gradient is overwritten."""
    inputs = [x.flatten(1)]
    for layer in layers[:-1]:
        inputs.append(torch.addmm(layer.bias, inputs[-1], layer.weight.t()).relu_())
    last = layers[-1]
    logits = torch.addmm(last.bias, inputs[-1], last.weight.t())
    log_p = F.log_softmax(logits, 1)
    loss = F.nll_loss(log_p, y)
    chosen = torch.zeros_like(log_p).scatter_(1, y[:, None], -1.0 / len(y))
    slope = torch._log_softmax_backward_data(chosen, log_p, 1, log_p.dtype)
    for i in reversed(range(len(layers))):
        torch.mm(slope.t(), inputs[i], out=layers[i].weight.grad)
        torch.sum(slope, 0, out=layers[i].bias.grad)
        if i:
            slope = torch.mm(slope, layers[i].weight).mul_(inputs[i] > 0)
    return Outputs(inputs[-1], inputs[-1], logits), loss
