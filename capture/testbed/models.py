"""Two models small enough for one core: a transformer and a convolutional network, and what they train on.

Both are sequences of blocks, so that any of them may be recomputed. Their gradients take about as long over 1 Gbit/s as
their computes do on a core of today: what hides behind what depends on the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MODELS", "Trained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model, and a function that gives its loss on a batch of random samples."""

    model: nn.Sequential
    loss: Callable[[nn.Module], torch.Tensor]


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual (pre-norm)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [batch, tokens, hidden]."""
        batch, tokens, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer(*, vocab: int = 2048, hidden: int = 256, layers: int = 4, batch: int = 4, tokens: int = 128) -> Trained:
    """A decoder: embedding, blocks, head; cross entropy of random tokens."""
    model = nn.Sequential(
        nn.Embedding(vocab, hidden), *(Block(hidden, hidden // 64) for _ in range(layers)), nn.LayerNorm(hidden),
        nn.Linear(hidden, vocab, bias=False),
    )  # fmt: skip
    seen = torch.randint(vocab, (batch, tokens + 1))

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(seen[:, :-1]).flatten(0, 1), seen[:, 1:].flatten())

    return Trained(model=model, loss=loss)


def cnn(*, width: int = 64, classes: int = 100, dense: int = 1024, batch: int = 16, pixels: int = 32) -> Trained:
    """After VGG (Simonyan & Zisserman 2014): stages of convolutions that halve the picture, and two dense layers."""
    stages: list[nn.Module] = []
    channels, size = 3, pixels
    for stage in range(3):
        wide = width << stage
        stages += [
            nn.Sequential(nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        ]
        channels, size = wide, size // 2
    model = nn.Sequential(
        *stages, nn.Flatten(), nn.Sequential(nn.Linear(channels * size * size, dense), nn.ReLU()),
        nn.Linear(dense, classes),
    )  # fmt: skip
    pictures, kinds = torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,))

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(pictures), kinds)

    return Trained(model=model, loss=loss)


MODELS: dict[str, Callable[..., Trained]] = {"transformer": transformer, "cnn": cnn}
