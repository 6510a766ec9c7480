"""The example's language model, its checkpoints, and what it says next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from examples.language_model.model import LanguageModel, Shape
from shoal.runtime import Checkpoints, load_model


def new_checkpoint(folder: Path, step: int = 7) -> Path:
    """Of a model that nobody has trained: it says something, and always the same."""
    torch.manual_seed(step)
    with Checkpoints(str(folder)) as checkpoints:
        checkpoints.save({"model": LanguageModel(Shape())}, step)
    [made] = folder.glob(f"step-{step:012d}-*")
    return made


@lru_cache(maxsize=4)
def saved_model(folder: Path) -> LanguageModel:
    model = LanguageModel(Shape()).eval()
    load_model(model, str(folder))
    return model


@torch.inference_mode()
def following(folder: Path, tokens: Sequence[int], count: int) -> str:
    """The likeliest tokens after these, by the checkpoint there and without any server."""
    model = saved_model(folder)
    text = list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return "".join(f" {token}" for token in text[len(tokens) :])
