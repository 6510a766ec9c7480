"""Carry steps out over connections: stage by stage, all machines at once, and every outcome reported.

A machine that fails takes no further step; the others go on. Nothing here decides what to do: `steps` and
`leaving` do, from facts that are gathered here.
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
from shoal.cluster.inventory import Host, Inventory
from shoal.cluster.machine import Machine
from shoal.cluster.node_part import pack
from shoal.cluster.objections import Takeover
from shoal.cluster.render import Secrets
from shoal.cluster.steps import Step
from shoal.errors import EngineRefused, EngineUnreachable, ShoalError, StateError

MAX_AT_ONCE = 64
MUNGE_KEY_BYTES = 1024
PASSWORD_BYTES = 24
SAY_AFTER_S, SAY_EVERY_S = 2.0, 15.0
"""Whatever takes longer is told while it is under way."""
T = TypeVar("T")


class State(StrEnum):
    UNCHANGED = "unchanged"
    CHANGED = "changed"
    WOULD_CHANGE = "would change"
    FAILED = "failed"
    UNDER_WAY = "under way"


@dataclass(frozen=True)
class Outcome:
    """What became of one step, or of the attempt to reach a machine at all (`step` is None)."""

    host: str
    label: str
    title: str
    state: State
    detail: str = ""
    hint: str = ""
    step: Step | None = None


Tell = Callable[[Outcome], None]
Connect = Callable[[Host], Awaitable[Machine]]


@dataclass
class Crew:
    """The machines of one run: those connected, what each is, and what became of everything tried."""

    connect: Connect
    tell: Tell
    now: Callable[[], float]
    pack: Callable[[str, str], bytes] = pack
    is_dry: bool = False
    machines: dict[str, Machine] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Addresses that did not answer: dead, perhaps. It does not say that no job runs there."""
    shut: set[str] = field(default_factory=set)
    """Addresses that did not let us in, or that we did not trust: not dead."""
    doubts: list[str] = field(default_factory=list)
    """What was not believed of members: told however it ends, as it may be why it fails."""

    @property
    def failed(self) -> dict[str, Outcome]:
        """By address, the first thing that went wrong there."""
        wrong = [outcome for outcome in self.outcomes if outcome.state is State.FAILED]
        return {outcome.host: outcome for outcome in reversed(wrong)}

    @property
    def num_changed(self) -> int:
        return sum(outcome.state in {State.CHANGED, State.WOULD_CHANGE} for outcome in self.outcomes)

    def note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.tell(outcome)

    def refuse(self, host: Host, detail: str, hint: str = "") -> None:
        """Let a machine take no further part; the reason is told."""
        self.note(Outcome(host.address, host.label, "is usable", State.FAILED, detail, hint))

    def absence(self, host: Host) -> str:
        """Why nothing can be done on a machine that was not met."""
        return f"{host.label} did not {'answer' if host.address in self.silent else 'let us in'}"

    async def meet(self, hosts: Iterable[Host]) -> None:
        """Connect to every machine and let it tell about itself. Those that fail are reported, not raised."""
        limit = anyio.CapacityLimiter(MAX_AT_ONCE)

        async def one(host: Host) -> None:
            async with limit:
                under_way = Outcome(host.address, host.label, "connecting", State.UNDER_WAY)
                try:
                    await self._aloud(under_way, lambda: self._meet(host))
                except ShoalError as wrong:
                    if isinstance(wrong, EngineUnreachable):
                        self.silent.add(host.address)
                    elif host.address not in self.machines:
                        self.shut.add(host.address)
                    self.refuse(host, wrong.message, wrong.hint or "")

        async with anyio.create_task_group() as group:
            for host in hosts:
                group.start_soon(one, host)

    async def _meet(self, host: Host) -> None:
        machine = self.machines.get(host.address)
        if machine is None:
            machine = self.machines[host.address] = await self.connect(host)
            # A dry run changes nothing: it may look on while somebody else works.
            if not self.is_dry and (who := await machine.hold()):
                raise StateError(
                    f"{host.label} is being changed by {who} right now",
                    hint="wait for that to end, then run the same command again; if nobody is at it, a dead"
                    f" connection is: {machine.as_root} kill that process",
                )
        asked_at = int(self.now())
        answer = await machine.run(SCRIPT)
        told = _heard(answer.out, answer.err)
        self.facts[host.address] = read_facts(told, host, asked_at, machine.as_root)

    async def parts(self, hosts: Iterable[Host]) -> dict[str, bytes]:
        """Shoal's own archive for each of these machines. One for which there is none is reported."""
        found: dict[str, bytes] = {}
        for host in hosts:
            fact = self.facts.get(host.address)
            if fact is None or not fact.python or host.address in self.failed:
                continue
            about = f"Shoal's part for Python {fact.python} on {fact.arch} is fetched"
            under_way = Outcome(host.address, host.label, about, State.UNDER_WAY)
            python, arch = fact.python, fact.arch
            try:
                found[host.address] = await self._aloud(
                    under_way,
                    lambda: anyio.to_thread.run_sync(self.pack, python, arch),  # noqa: B023 (awaited here)
                )
            except ShoalError as wrong:
                self.refuse(host, wrong.message, wrong.hint or "")
        return found

    async def _aloud(self, under_way: Outcome, work: Callable[[], Awaitable[T]]) -> T:
        """Do it, and say what is being done for as long as it takes."""

        async def say() -> None:
            await anyio.sleep(SAY_AFTER_S)
            self.tell(under_way)
            for turn in count(1):
                await anyio.sleep(SAY_EVERY_S)
                detail = f"{SAY_AFTER_S + turn * SAY_EVERY_S:.0f} s"
                self.tell(replace(under_way, detail=detail))

        done: list[T] = []
        failure: ShoalError | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(say)
            try:
                done.append(await work())
            except ShoalError as wrong:  # raised outside: a task group would wrap it
                failure = wrong
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return done[0]

    async def lacking(self, steps: Iterable[Step]) -> list[Step]:
        """Those of these steps that are not so already, looked at on all machines at once. Changes nothing.

        A machine that is lost meanwhile is reported, and lacks nothing.
        """
        found: list[Step] = []

        async def one(step: Step) -> None:
            try:
                found.extend([] if all(await self._look([step])) else [step])
            except ShoalError as wrong:
                self.note(_became(step, State.FAILED, wrong.message, wrong.hint or ""))

        async with anyio.create_task_group() as group:
            for step in steps:
                if step.where not in self.failed:
                    group.start_soon(one, step)
        return found

    async def carry_out(self, steps: Sequence[Step]) -> None:
        """Every step in its stage. A machine that has failed, here or before, takes no further one."""
        for _, stage in groupby(steps, key=lambda step: step.stage):
            lines: dict[str, list[Step]] = {}
            for step in stage:
                lines.setdefault(f"{step.host} {step.where}", []).append(step)
            async with anyio.create_task_group() as group:
                for line in lines.values():
                    group.start_soon(self._line, line)

    async def undo(self, steps: Iterable[Step]) -> None:
        """These steps by a machine that may have failed: what was done before is taken back if it can be."""
        for step in steps if not self.is_dry else ():
            try:
                is_so = all(await self._look([step]))
            except ShoalError as wrong:
                self.note(_became(step, State.FAILED, wrong.message, wrong.hint or ""))
                continue
            if not is_so:
                self.note(await self._change(step))

    async def _line(self, steps: Sequence[Step]) -> None:
        """The steps of one machine: one look at all of them, one change, and again, until all are so."""
        left = list(steps)
        while left and not {left[0].host, left[0].where} & set(self.failed):
            try:
                under_way = _became(left[0], State.UNDER_WAY, "looking")
                seen = await self._aloud(under_way, lambda: self._look(left))  # noqa: B023 (awaited here)
            except ShoalError as wrong:
                self.note(_became(left[0], State.FAILED, wrong.message, wrong.hint or ""))
                return
            if self.is_dry:
                for step, is_so in zip(left, seen, strict=True):
                    self.note(_became(step, State.UNCHANGED if is_so else State.WOULD_CHANGE))
                return
            num_so = seen.index(False) if False in seen else len(left)
            for step in left[:num_so]:
                self.note(_became(step, State.UNCHANGED))
            for step in left[num_so : num_so + 1]:
                self.note(await self._change(step))
            left = left[num_so + 1 :]

    async def _look(self, steps: Sequence[Step]) -> list[bool]:
        """Which of these are so already, in one round trip."""
        script = "\n".join(f"({step.check}\n) >/dev/null 2>&1 && echo yes || echo no" for step in steps)
        timeout_s = max(step.timeout_s for step in steps)
        answer = await self.machines[steps[0].where].run(script, timeout_s=timeout_s)
        words = answer.out.split()
        if len(words) != len(steps):
            raise EngineRefused(f"the machine did not say what is so already: {answer.last_words}")
        return [word == "yes" for word in words]

    async def _change(self, step: Step) -> Outcome:
        try:
            answer = await self._aloud(
                _became(step, State.UNDER_WAY),
                lambda: self.machines[step.where].run(step.apply, step.stdin, step.timeout_s),
            )
        except ShoalError as wrong:
            return _became(step, State.FAILED, wrong.message, wrong.hint or "")
        if answer.code == 0:
            return _became(step, State.CHANGED)
        typed = self.machines[step.where].typed
        hint = f"see for yourself with `{typed}`; afterwards run the same command again"
        return _became(step, State.FAILED, answer.last_words, answer.hint or hint)

    async def close(self) -> None:
        for machine in self.machines.values():
            await machine.close()


def _became(step: Step, state: State, detail: str = "", hint: str = "") -> Outcome:
    return Outcome(step.host, step.label, step.title, state, detail, hint, step)


def _heard(out: str, err: str) -> str:
    return out if out.strip() else err


async def known_secrets(crew: Crew, inventory: Inventory, takeover: Takeover) -> Secrets:
    """The cluster's secrets: read from the machines that have them, else made now. Kept nowhere here."""
    key = b""
    controller = inventory.controller.address
    fact = crew.facts.get(controller)
    is_kept = inventory.keeps_munge_key or takeover is Takeover.KEEP
    if fact and (fact.is_own(MUNGE_KEY) or (is_kept and MUNGE_KEY in fact.files)):
        key = base64.b64decode(await _read(crew, controller, "base64", MUNGE_KEY))
    password = ""
    database = inventory.database.address
    fact = crew.facts.get(database)
    if fact and fact.is_own(SLURMDBD_CONF):
        text = await _read(crew, database, "cat", SLURMDBD_CONF)
        found = re.search(r"^StoragePass=(\w+)$", text, re.MULTILINE)
        password = found.group(1) if found else ""
    return Secrets(
        key or randomness.token_bytes(MUNGE_KEY_BYTES), password or randomness.token_hex(PASSWORD_BYTES)
    )


async def _read(crew: Crew, address: str, reader: str, path: str) -> str:
    """What a machine has. Raises rather than answer nothing: a new secret would shut the others out.

    What is to be typed then shows who may read the file, and never what is in it.
    """
    answer = await crew.machines[address].run(f"{reader} {path}")
    if answer.code or not answer.out:
        why = answer.err.strip() or f"exit code {answer.code}"  # never what it printed: half a secret
        raise EngineRefused(
            f"{address} did not give the cluster's secret: {why}",
            hint=f"{crew.machines[address].as_root} ls -l {path}",
        )
    return answer.out


def must_have(crew: Crew, hosts: Mapping[str, str]) -> None:
    """Raise unless these machines (address to what it is for) are still with us."""
    for address, what in hosts.items():
        if (wrong := crew.failed.get(address)) is not None:
            at = f"failed at `{wrong.title}`" if wrong.step else "cannot be used"
            raise EngineRefused(
                f"the {what}, {wrong.label}, {at}: {wrong.detail}",
                hint=wrong.hint or "mend it, then run the same command again",
            )
