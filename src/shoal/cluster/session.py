"""Apply steps over connections: stage by stage, on all machines at once, and report every outcome.

A machine that fails gets no further step; the others continue. `steps` and `teardown` decide what to do, from
the facts that are gathered here.
"""

from __future__ import annotations

import base64
import re
import secrets as randomness
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, groupby
from typing import TypeVar

import anyio

from shoal.cluster.facts import MUNGE_KEY, SCRIPT, SLURMDBD_CONF, Facts, read_facts
from shoal.cluster.inventory import Inventory, InventoryHost
from shoal.cluster.machine import RemoteMachine
from shoal.cluster.node_archive import pack
from shoal.cluster.preflight import Takeover
from shoal.cluster.render import ClusterSecrets
from shoal.cluster.steps import Step
from shoal.errors import EngineRefused, EngineUnreachable, ShoalError, StateError

MAX_AT_ONCE = 64
MUNGE_KEY_BYTES = 1024
PASSWORD_BYTES = 24
SAY_AFTER_S, SAY_EVERY_S = 2.0, 15.0
"""A step that takes longer than 2 s is reported as under way, then every 15 s."""
T = TypeVar("T")


class StepState(StrEnum):
    UNCHANGED = "unchanged"
    CHANGED = "changed"
    WOULD_CHANGE = "would change"
    FAILED = "failed"
    UNDER_WAY = "under way"


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one step, or of the attempt to reach a machine (`step` is None)."""

    host: str
    label: str
    title: str
    state: StepState
    detail: str = ""
    hint: str = ""
    step: Step | None = None


OutcomeCallback = Callable[[StepOutcome], None]
Connect = Callable[[InventoryHost], Awaitable[RemoteMachine]]


@dataclass
class ClusterSession:
    """The machines of one run: the connections, the facts of each machine, and all outcomes."""

    connect: Connect
    on_outcome: OutcomeCallback
    now: Callable[[], float]
    pack: Callable[[str, str], bytes] = pack
    is_dry: bool = False
    machines: dict[str, RemoteMachine] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    outcomes: list[StepOutcome] = field(default_factory=list)
    unreachable: set[str] = field(default_factory=set)
    """Addresses that did not answer. The machine may be dead, or may run jobs."""
    inaccessible: set[str] = field(default_factory=set)
    """Addresses that refused the login, or that we did not trust. The machine is not dead."""
    warnings: list[str] = field(default_factory=list)
    """Differences of members that were not accepted. They are printed in any case: they may explain a
    failure.
    """

    @property
    def failed(self) -> dict[str, StepOutcome]:
        """Return the first failure of each address."""
        wrong = [outcome for outcome in self.outcomes if outcome.state is StepState.FAILED]
        return {outcome.host: outcome for outcome in reversed(wrong)}

    @property
    def num_changed(self) -> int:
        return sum(outcome.state in {StepState.CHANGED, StepState.WOULD_CHANGE} for outcome in self.outcomes)

    def record(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)
        self.on_outcome(outcome)

    def refuse(self, host: InventoryHost, detail: str, hint: str = "") -> None:
        """Let a machine take no further part, and report the reason."""
        self.record(StepOutcome(host.address, host.label, "is usable", StepState.FAILED, detail, hint))

    def absence_text(self, host: InventoryHost) -> str:
        """Say why nothing can be done on a machine without a connection."""
        return f"{host.label} did not {'answer' if host.address in self.unreachable else 'let us in'}"

    async def gather_facts(self, hosts: Iterable[InventoryHost]) -> None:
        """Connect to every machine and gather its facts. Failures are reported, not raised."""
        limit = anyio.CapacityLimiter(MAX_AT_ONCE)

        async def handle(host: InventoryHost) -> None:
            async with limit:
                under_way = StepOutcome(host.address, host.label, "connecting", StepState.UNDER_WAY)
                try:
                    await self._with_progress(under_way, lambda: self._gather_facts(host))
                except ShoalError as wrong:
                    if isinstance(wrong, EngineUnreachable):
                        self.unreachable.add(host.address)
                    elif host.address not in self.machines:
                        self.inaccessible.add(host.address)
                    self.refuse(host, wrong.message, wrong.hint or "")

        async with anyio.create_task_group() as group:
            for host in hosts:
                group.start_soon(handle, host)

    async def _gather_facts(self, host: InventoryHost) -> None:
        machine = self.machines.get(host.address)
        if machine is None:
            machine = self.machines[host.address] = await self.connect(host)
            # A dry run changes nothing, so it may run while another command holds the machine.
            if not self.is_dry and (holder := await machine.hold()):
                raise StateError(
                    f"{host.label} is being changed by {holder} right now",
                    hint="wait for that to end, then run the same command again; if none is running, end"
                    f" the dead connection: {machine.as_root} kill that process",
                )
        asked_at = int(self.now())
        answer = await machine.run(SCRIPT)
        text = _output(answer.out, answer.err)
        self.facts[host.address] = read_facts(text, host, asked_at, machine.as_root)

    async def node_archives(self, hosts: Iterable[InventoryHost]) -> dict[str, bytes]:
        """Return the node archive for each of these machines. A machine for which there is none is
        reported.
        """
        archives: dict[str, bytes] = {}
        for host in hosts:
            fact = self.facts.get(host.address)
            if fact is None or not fact.python or host.address in self.failed:
                continue
            about = f"Shoal's node archive for Python {fact.python} on {fact.arch} is fetched"
            under_way = StepOutcome(host.address, host.label, about, StepState.UNDER_WAY)
            python, arch = fact.python, fact.arch
            try:
                archives[host.address] = await self._with_progress(
                    under_way,
                    lambda: anyio.to_thread.run_sync(self.pack, python, arch),  # noqa: B023 (awaited here)
                )
            except ShoalError as wrong:
                self.refuse(host, wrong.message, wrong.hint or "")
        return archives

    async def _with_progress(self, under_way: StepOutcome, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work, and report while it takes long."""

        async def say() -> None:
            await anyio.sleep(SAY_AFTER_S)
            self.on_outcome(under_way)
            for turn in count(1):
                await anyio.sleep(SAY_EVERY_S)
                detail = f"{SAY_AFTER_S + turn * SAY_EVERY_S:.0f} s"
                self.on_outcome(replace(under_way, detail=detail))

        done: list[T] = []
        failure: ShoalError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(say)
            try:
                done.append(await work())
            except ShoalError as wrong:  # raised outside, because a task group would wrap it
                failure = wrong
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return done[0]

    async def unmet_steps(self, steps: Iterable[Step]) -> list[Step]:
        """Return the steps that are still needed, checked on all machines at once. Changes nothing.

        A machine that is lost meanwhile is reported, and none of its steps is returned.
        """
        unmet: list[Step] = []

        async def handle(step: Step) -> None:
            try:
                unmet.extend([] if all(await self._check([step])) else [step])
            except ShoalError as wrong:
                self.record(_outcome(step, StepState.FAILED, wrong.message, wrong.hint or ""))

        async with anyio.create_task_group() as group:
            for step in steps:
                if step.runs_on not in self.failed:
                    group.start_soon(handle, step)
        return unmet

    async def apply_steps(self, steps: Sequence[Step]) -> None:
        """Apply every step in its stage. A machine that has failed, here or before, takes no further step."""
        for _, stage in groupby(steps, key=lambda step: step.stage):
            lines: dict[str, list[Step]] = {}
            for step in stage:
                lines.setdefault(f"{step.host} {step.runs_on}", []).append(step)
            async with anyio.create_task_group() as group:
                for line in lines.values():
                    group.start_soon(self._apply_in_order, line)

    async def undo(self, steps: Iterable[Step]) -> None:
        """Apply steps that take back earlier ones, if possible also on a machine that has failed."""
        for step in steps if not self.is_dry else ():
            try:
                is_so = all(await self._check([step]))
            except ShoalError as wrong:
                self.record(_outcome(step, StepState.FAILED, wrong.message, wrong.hint or ""))
                continue
            if not is_so:
                self.record(await self._apply(step))

    async def _apply_in_order(self, steps: Sequence[Step]) -> None:
        """Apply the steps of one machine: check all of them, apply one, and again, until all are done."""
        left = list(steps)
        while left and not {left[0].host, left[0].runs_on} & set(self.failed):
            try:
                under_way = _outcome(left[0], StepState.UNDER_WAY, "looking")
                seen = await self._with_progress(under_way, lambda: self._check(left))  # noqa: B023 (awaited here)
            except ShoalError as wrong:
                self.record(_outcome(left[0], StepState.FAILED, wrong.message, wrong.hint or ""))
                return
            if self.is_dry:
                for step, is_so in zip(left, seen, strict=True):
                    self.record(_outcome(step, StepState.UNCHANGED if is_so else StepState.WOULD_CHANGE))
                return
            num_so = seen.index(False) if False in seen else len(left)
            for step in left[:num_so]:
                self.record(_outcome(step, StepState.UNCHANGED))
            for step in left[num_so : num_so + 1]:
                self.record(await self._apply(step))
            left = left[num_so + 1 :]

    async def _check(self, steps: Sequence[Step]) -> list[bool]:
        """Return which of these are done already, in one round trip."""
        script = "\n".join(f"({step.check}\n) >/dev/null 2>&1 && echo yes || echo no" for step in steps)
        timeout_s = max(step.timeout_s for step in steps)
        answer = await self.machines[steps[0].runs_on].run(script, timeout_s=timeout_s)
        fields = answer.out.split()
        if len(fields) != len(steps):
            raise EngineRefused(f"the machine did not report which steps are done: {answer.last_words}")
        return [word == "yes" for word in fields]

    async def _apply(self, step: Step) -> StepOutcome:
        try:
            answer = await self._with_progress(
                _outcome(step, StepState.UNDER_WAY),
                lambda: self.machines[step.runs_on].run(step.apply, step.stdin, step.timeout_s),
            )
        except ShoalError as wrong:
            return _outcome(step, StepState.FAILED, wrong.message, wrong.hint or "")
        if answer.code == 0:
            return _outcome(step, StepState.CHANGED)
        typed = self.machines[step.runs_on].typed
        hint = f"look there with `{typed}`; afterwards run the same command again"
        return _outcome(step, StepState.FAILED, answer.last_words, answer.hint or hint)

    async def close(self) -> None:
        for machine in self.machines.values():
            await machine.close()


def _outcome(step: Step, state: StepState, detail: str = "", hint: str = "") -> StepOutcome:
    return StepOutcome(step.host, step.label, step.title, state, detail, hint, step)


def _output(out: str, err: str) -> str:
    return out if out.strip() else err


async def load_secrets(session: ClusterSession, inventory: Inventory, takeover: Takeover) -> ClusterSecrets:
    """Return the cluster's secrets, read from the machines that have them, else new. They are not saved
    here.
    """
    key = b""
    controller = inventory.controller.address
    fact = session.facts.get(controller)
    is_kept = inventory.keeps_munge_key or takeover is Takeover.KEEP
    if fact and (fact.is_own(MUNGE_KEY) or (is_kept and MUNGE_KEY in fact.files)):
        key = base64.b64decode(await _read_secret(session, controller, "base64", MUNGE_KEY))
    password = ""
    database = inventory.database.address
    fact = session.facts.get(database)
    if fact and fact.is_own(SLURMDBD_CONF):
        text = await _read_secret(session, database, "cat", SLURMDBD_CONF)
        match = re.search(r"^StoragePass=(\w+)$", text, re.MULTILINE)
        password = match.group(1) if match else ""
    return ClusterSecrets(
        key or randomness.token_bytes(MUNGE_KEY_BYTES), password or randomness.token_hex(PASSWORD_BYTES)
    )


async def _read_secret(session: ClusterSession, address: str, reader: str, path: str) -> str:
    """Read a secret. Raise rather than return nothing: a new secret would shut out the other machines.

    The hint shows who may read the file, and never its content.
    """
    answer = await session.machines[address].run(f"{reader} {path}")
    if answer.code or not answer.out:
        why = answer.err.strip() or f"exit code {answer.code}"  # never its output, which may be half a secret
        raise EngineRefused(
            f"the cluster's secret cannot be read at {address}: {why}",
            hint=f"{session.machines[address].as_root} ls -l {path}",
        )
    return answer.out


def require_hosts(session: ClusterSession, hosts: Mapping[str, str]) -> None:
    """Raise unless these machines (address to role) still take part."""
    for address, role in hosts.items():
        if (wrong := session.failed.get(address)) is not None:
            at = f"failed at `{wrong.title}`" if wrong.step else "cannot be used"
            raise EngineRefused(
                f"the {role}, {wrong.label}, {at}: {wrong.detail}",
                hint=wrong.hint or "fix it, then run the same command again",
            )
