"""The gradient of cross-entropy through a perceptron, written out.

A graph of autograd costs a tiny layer more than its arithmetic. These are the operations that autograd would do, in its
order and with its memory layout, so the bits are the same; only the graph is missing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.core.net import Net, Outputs, in_order


class Layer(NamedTuple):
    """A linear layer's weights and where their gradients go."""

    weight: Tensor
    bias: Tensor
    weight_grad: Tensor
    bias_grad: Tensor


def chain(net: Net) -> tuple[Layer, ...]:
    """The layers of a net that flattens its input and then does nothing but linear maps with ReLUs between; else ()."""
    modules = [module for part in (net.body, net.neck, net.head) for module in _leaves(part)]
    if not modules or not _flattens(modules[0]) or type(net) is not Net or hasattr(net, "aux"):
        return ()
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in net.modules()):
        return ()
    linear, between = modules[1::2], modules[2::2]
    if len(linear) != len(between) + 1 or any(type(module) is not nn.ReLU for module in between):
        return ()
    layers = [_layer(module) for module in linear]
    return tuple(layer for layer in layers if layer) if all(layers) else ()


def _flattens(module: nn.Module) -> bool:
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _layer(module: nn.Module) -> Layer | None:
    if type(module) is not nn.Linear or module.bias is None:
        return None
    weight, bias = module.weight, module.bias
    if weight.grad is None or bias.grad is None:
        return None
    return Layer(weight.detach(), bias.detach(), weight.grad, bias.grad)


def _leaves(module: nn.Module) -> list[nn.Module]:
    if in_order(module):
        return [leaf for child in module for leaf in _leaves(child)]
    return [] if type(module) is nn.Identity else [module]


def descend(layers: Sequence[Layer], x: Tensor, y: Tensor) -> tuple[Outputs, Tensor]:
    """Outputs and mean cross-entropy; every layer's gradient is overwritten."""
    inputs = [x.flatten(1)]
    for layer in layers[:-1]:
        inputs.append(F.linear(inputs[-1], layer.weight, layer.bias).relu_())
    logits = F.linear(inputs[-1], layers[-1].weight, layers[-1].bias)
    log_p = logits.log_softmax(1)
    loss = F.nll_loss(log_p, y)
    chosen = torch.zeros_like(log_p).scatter_(1, y[:, None], -1.0 / len(y))
    slope = torch._log_softmax_backward_data(chosen, log_p, 1, log_p.dtype)
    for i in reversed(range(len(layers))):
        weight, _, weight_grad, bias_grad = layers[i]
        torch.mm(slope.t(), inputs[i], out=weight_grad)
        torch.sum(slope, 0, out=bias_grad)
        if i:
            slope = torch.mm(slope, weight).mul_(inputs[i] > 0)
    return Outputs(inputs[-1], inputs[-1], logits), loss
