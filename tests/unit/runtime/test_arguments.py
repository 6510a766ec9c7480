"""Wrong arguments of a program are refused at once, with the value and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal import runtime
from shoal.errors import SpecError
from shoal.runtime import metrics
from tests.support.runtime.training_ranks import build, free_port


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outside of Shoal, because wrong arguments are refused there, too."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(metrics, "_channel", None)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("name", "value"), [("every", -3), ("every", 0), ("keep", 0)])
def test_settings_that_keep_no_checkpoint_are_refused(name: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"{name}={value} is too small; pass 1 or more"):
        runtime.Checkpoints(str(tmp_path), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [2.5, "10"])
def test_interval_that_is_no_whole_number_is_refused(every: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"every=.* is not a whole number; pass an int from 1 on"):
        runtime.Checkpoints(str(tmp_path), every=every)


def test_impossible_step_is_refused_before_anything_is_saved(tmp_path: Path) -> None:
    checkpoints = runtime.Checkpoints(str(tmp_path))
    with pytest.raises(SpecError, match="step=-1 is too small; pass 0 or more"):
        checkpoints.save(build(), -1)
    assert list(tmp_path.iterdir()) == []


def test_negative_number_of_steps_is_refused_at_once() -> None:
    def program(run: runtime.Run) -> None:
        assert list(run.steps(0)) == []
        with pytest.raises(SpecError, match="total=-3 is too small; pass 0 or more"):
            run.steps(-3)
        with pytest.raises(TypeError, match=r"total=1\.5 is not a whole number"):
            run.steps(1.5)  # type: ignore[arg-type]

    runtime.train(program, {}, backend="gloo")


@pytest.mark.parametrize(
    ("program", "parts", "message"),
    [
        (
            print,
            {"model": 3},
            r"part 'model' is 3, without `state_dict` and `load_state_dict`; pass a module",
        ),
        (print, {1: build()["model"]}, "a part is named 1; name it by a string"),
        (print, [build()["model"]], "pass a mapping such as {'model': model}"),
        ({"model": 3}, print, "pass a function that takes a `Run`"),
    ],
)
def test_parts_without_a_state_are_refused_before_a_group_is_joined(
    program: Any, parts: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        runtime.train(program, parts)
    assert not dist.is_initialized()


def test_directory_name_passed_as_checkpoints_is_refused() -> None:
    with pytest.raises(TypeError, match=r"checkpoints='saves'; pass `runtime.Checkpoints\(...\)`"):
        runtime.train(print, {}, checkpoints="saves")  # type: ignore[arg-type]


def test_parts_without_a_state_are_not_saved_either(tmp_path: Path) -> None:
    checkpoints = runtime.Checkpoints(str(tmp_path))
    parts: Any = {"model": 3}
    for act in (checkpoints.load, lambda wrong: checkpoints.save(wrong, 1)):
        with pytest.raises(TypeError, match="part 'model' is 3"):
            act(parts)


def test_step_that_is_no_whole_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"step=1\.5 is not a whole number; pass an int from 0 on"):
        runtime.log(loss=1.0, step=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", "loss='abc' is of type str; pass a number"),
        (None, "loss=None is of type NoneType"),
        (torch.zeros(3), r"loss has 3 elements; pass one number, such as loss.mean\(\)"),
        (np.zeros((2, 2)), "loss has 4 elements"),
    ],
)
def test_value_that_is_not_one_number_is_refused_outside_of_shoal(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        runtime.log(loss=value, step=1)


def test_numbers_of_numpy_and_torch_are_accepted() -> None:
    runtime.log(loss=torch.ones(1), lr=np.float32(0.1), flag=True, step=np.int64(3))  # type: ignore[arg-type]
