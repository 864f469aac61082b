"""Every net is body -> neck -> head.

The body turns a sample into features, the neck (the identity unless a method puts a projector there)
turns features into an embedding, the head turns the embedding into logits. Methods speak of these three
parts and never of an architecture.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

Kind = Literal["image", "vector", "tokens"]


@dataclass(frozen=True)
class Inputs:
    """What a net is sized by: one sample's shape, what it is, and how many classes there are."""

    kind: Kind
    shape: tuple[int, ...]  # image: (channels, height, width); vector: (width,); tokens: (length,)
    classes: int
    vocab: int = 0  # tokens only: ids run from 0 to vocab - 1, 0 is padding


class Outputs(NamedTuple):
    """What one forward pass yields. Suffixes: B batch, F features, E embedding, C classes."""

    features: Tensor  # B F
    embedding: Tensor  # B E
    logits: Tensor  # B C


class Net(nn.Module):
    """A body, a neck and a head, registered in this order so that each is one span of the flat weights."""

    aux: "Net"  # a second model that all clients have in common, where a method adds one
    channels_last = False  # images are read with the channels of a pixel side by side: often faster
    bf16 = False  # the body trains in bfloat16; weights, neck, head, losses and evaluation stay in float32

    def __init__(self, body: nn.Module, head: nn.Linear, *, width: int | None = None) -> None:
        super().__init__()
        self.body = body
        self.neck: nn.Module = nn.Identity()
        self.head: nn.Module = head
        self.width = head.in_features if width is None else width  # F, the width of the features

    def forward(self, x: Tensor) -> Outputs:
        if self.channels_last:
            x = channels_last(x)
        if self.bf16 and self.training:
            with torch.autocast(x.device.type, torch.bfloat16):
                features = self.body(x).float()
        else:
            features = self.body(x)
        embedding = self.neck(features)
        return Outputs(features, embedding, self.head(embedding))


def in_order(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module calls its children one after the other and does nothing else: a subclass may do more."""
    if not isinstance(module, nn.Sequential) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Sequential.forward


def channels_last(images: Tensor) -> Tensor:
    """The same images, B C H W, with the channels of a pixel side by side in memory."""
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    strides = images.contiguous().stride()  # with one channel nothing moves, but convolutions ask the strides
    return images.contiguous().as_strided(images.shape, (strides[0], 1, *strides[2:]))
