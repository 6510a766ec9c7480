"""The example's language model, its checkpoints, and what it says next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from shoal.runtime import Checkpoints, load_model

example: Any = import_module("examples.language_model.model")  # a program, which nobody type-checks


def new_checkpoint(folder: Path, step: int = 7) -> Path:
    """Of a model that nobody has trained: it says something, and always the same."""
    torch.manual_seed(step)
    with Checkpoints(str(folder)) as checkpoints:
        checkpoints.save({"model": example.LanguageModel(example.Shape())}, step)
    [made] = folder.glob(f"step-{step:012d}-*")
    return made


@lru_cache(maxsize=4)
def saved_model(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = example.LanguageModel(example.Shape()).eval()
    load_model(model, str(folder))
    return model


@torch.inference_mode()
def next_tokens(folder: Path, tokens: Sequence[int], count: int) -> str:
    """The likeliest tokens after these, by the checkpoint there and without any server."""
    model = saved_model(folder)
    text = list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return "".join(f" {token}" for token in text[len(tokens) :])
