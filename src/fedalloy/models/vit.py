"""Vision Transformer: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021."""

import torch
from torch import Tensor, nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Dropout
from fedalloy.models.blocks import Skip, is_small


def vit_tiny(inputs: Inputs, *, dropout: Dropout = 0.0) -> Net:
    """ViT-Ti (Touvron et al., ICML 2021): width 192, 12 layers, 3 heads; 4x4 patches for sides up to 64."""
    return _vit(inputs, patch=4 if is_small(inputs) else 16, width=192, heads=3, dropout=dropout)


def vit_b16(inputs: Inputs, *, dropout: Dropout = 0.0) -> Net:
    """ViT-B/16 (Dosovitskiy et al., ICLR 2021); at least two patches a side."""
    return _vit(inputs, patch=16, width=768, heads=12, dropout=dropout)


def vit_b32(inputs: Inputs, *, dropout: Dropout = 0.0) -> Net:
    """ViT-B/32 (Dosovitskiy et al., ICLR 2021); at least two patches a side."""
    return _vit(inputs, patch=32, width=768, heads=12, dropout=dropout)


class Patches(nn.Module):
    """An image as words: B C H W -> B T D, the class token first."""

    def __init__(self, inputs: Inputs, patch: int, width: int) -> None:
        super().__init__()
        channels, high, wide = inputs.shape
        rows, columns = -(-high // patch), -(-wide // patch)
        self.frame = nn.ZeroPad2d((0, columns * patch - wide, 0, rows * patch - high))
        self.project = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, 1 + rows * columns, width).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        words = self.project(self.frame(x)).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(x.shape[0], -1, -1), words], dim=1) + self.position


class Attention(nn.Module):
    """Multi-head self-attention: Vaswani et al., NeurIPS 2017."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )  # each B heads T D/heads
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.out(mixed)
        return out


class ClassToken(nn.Module):
    """B T D -> B D."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def _vit(inputs: Inputs, *, patch: int, width: int, heads: int, dropout: float, depth: int = 12) -> Net:
    patch = min(patch, min(inputs.shape[1:]) // 2)
    body = nn.Sequential(Patches(inputs, patch, width), nn.Dropout(dropout))
    for _ in range(depth):
        body.append(Skip(_norm(width), Attention(width, heads), nn.Dropout(dropout)))
        body.append(Skip(_norm(width), *_feed_forward(width, dropout)))
    body.extend([ClassToken(), _norm(width)])
    net = Net(body, nn.Linear(width, inputs.classes))
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    return net


def _feed_forward(width: int, dropout: float) -> list[nn.Module]:
    wide = 4 * width
    inner = [nn.Linear(width, wide), nn.GELU(), nn.Dropout(dropout), nn.Linear(wide, width)]
    return [*inner, nn.Dropout(dropout)]


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6)
