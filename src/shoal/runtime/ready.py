"""What a share starts with that a standby made ready: walls, files, a zygote with its imports."""

from __future__ import annotations

from collections.abc import Callable

from shoal.runtime.board import Board
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.launch import Launcher, Pipes
from shoal.runtime.meter import Meter
from shoal.wire import Order


class Ready:
    """Used once, by the share that it was made for. Descriptors have the numbers that the zygote knows."""

    def __init__(
        self,
        *,
        confinement: Confinement,
        launcher: Launcher,
        page: tuple[int, Board],
        meter: Meter,
        zygote: tuple[int, Pipes],
    ) -> None:
        self.confinement = confinement
        self.launcher = launcher
        self.page = page
        self.meter = meter
        self.zygote = zygote
        self.on_settled: Callable[[], None] = lambda: None

    def settle(self, order: Order) -> None:
        """The share has been claimed: what was made ready is its own from here on."""
        self.confinement.settle(order)
        self.on_settled()
