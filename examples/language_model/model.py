"""A small GPT and text for it, made by a formula: what every program of this folder trains.

Layers are kept by their number, so a layout that cuts the model apart names its pieces as all the others do,
and a checkpoint of one layout is read by any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 16
"""Sequences in a step, over all ranks."""
STRIDES = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large the model is."""

    vocabulary: int = 61
    context: int = 32
    layers: int = 4
    width: int = 64
    heads: int = 4


class Attention(nn.Module):
    """Queries, keys and values apart: tensor parallelism gives each rank some heads of all three."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)
        self.norm_1 = nn.LayerNorm(shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """Tokens in, scores of the next token out. `layers`: only these of it, for one stage of a pipeline.

    The first layer comes with the embedding, the last one with the head.
    """

    def __init__(self, shape: Shape, layers: range | None = None) -> None:
        super().__init__()
        mine = range(shape.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(number): Layer(shape) for number in mine})
        self.tokens = self.places = self.norm = self.head = None
        if 0 in mine:
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            self.places = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        if shape.layers - 1 in mine:
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.places[: x.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def batch(shape: Shape, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """One of `parts` equal parts of a step's sequences, and what follows each token. The same whoever asks.

    A sequence counts up from somewhere in strides of 1, 2 or 3: who looks back can say what comes next.
    """
    random = torch.Generator().manual_seed(step)
    start = torch.randint(shape.vocabulary, (BATCH, 1), generator=random)
    stride = torch.randint(1, 1 + STRIDES, (BATCH, 1), generator=random)
    text = (start + stride * torch.arange(shape.context + 1)) % shape.vocabulary
    mine = text.chunk(parts)[part]
    return mine[:, :-1], mine[:, 1:]


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())
