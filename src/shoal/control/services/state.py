"""What the control plane knows of services in memory: the newest table and the reports of data
planes.

All of it can be lost: the table is made from the records, and data planes report again.

`SidecarIdentities` makes the certificates with which sidecars and data planes prove themselves to each other,
by the cluster's own authority. They are not stored: a replica's identity goes with its task spec, and the
data planes' identity stands in the table.
"""

from __future__ import annotations

import anyio
import msgspec

from shoal.clock import Clock
from shoal.control.memory.signals import Signal
from shoal.identity.authority import SERVER_DAYS, CertifiedKey, make_client, make_sidecar
from shoal.model.service import Service
from shoal.serving.scaling.traffic import FRESH_S, Sample, Stats, Traffic
from shoal.serving.table import ServingReport, ServingTable
from shoal.sidecar_tls import DATA_PLANE, sidecar_name
from shoal.wire import TlsIdentity

IDENTITY_RENEW_S = SERVER_DAYS * 86400 / 2
"""Age at which the data planes get a new identity."""


class SidecarIdentities:
    """Certificates for a cluster whose nodes are other machines."""

    def __init__(self, authority: CertifiedKey, clock: Clock) -> None:
        self._authority = authority
        self._clock = clock
        self._data_plane_identity: TlsIdentity | None = None
        self._made_at = 0.0

    def for_sidecar(self, attempt_id: str) -> TlsIdentity:
        """Return a new identity for the sidecar of the replica that runs as this attempt. Each call makes
        another one.
        """
        return self._identity(make_sidecar(self._authority, sidecar_name(attempt_id), self._clock.now()))

    def for_data_planes(self) -> TlsIdentity:
        """Return the identity of the data planes. It stays the same for months, or until the control plane
        restarts.
        """
        now = self._clock.now()
        if self._data_plane_identity is None or not 0 <= now - self._made_at < IDENTITY_RENEW_S:
            self._data_plane_identity = self._identity(make_client(self._authority, DATA_PLANE, now))
            self._made_at = now
        return self._data_plane_identity

    def _identity(self, pair: CertifiedKey) -> TlsIdentity:
        return TlsIdentity(
            certificate=pair.certificate.decode("ascii"),
            key=pair.key.decode("ascii"),
            authority=self._authority.certificate.decode("ascii"),
        )


EMPTY_TABLE = ServingTable(version=0)


class ServiceState:
    """Used on the event loop alone."""

    def __init__(self) -> None:
        self.table = EMPTY_TABLE
        self.sidecar_identities: SidecarIdentities | None = None
        """Certificates by which data planes reach replicas. Set only if nodes are other machines."""
        self.url: str | None = None
        """Where the data plane of this machine listens. None: there is none."""
        self.wanted_port: int | None = None
        """The port that it should have, if it listens at another one."""
        self.traffic = Traffic()
        self.waker = Signal()
        """Set when there is a reason to look at services at once."""
        self.publishing = anyio.Lock()
        """Held from reading the records until the table is published, so that an older table cannot follow a
        newer one.
        """
        self._news = anyio.Event()
        self._reported = anyio.Event()
        self._drained: dict[str, int] = {}
        """By replica: the version of the first table that says that it drains."""
        self._began: dict[str, tuple[tuple[int, int], Stats, Stats]] = {}
        """By service: the step of its rollout, and the counts of both releases when the step began."""
        self._baking: dict[str, tuple[tuple[int, int], float]] = {}
        """By service: the step that is watched, and since when on the monotonic clock."""

    def note_report(self, report: ServingReport, now: float) -> None:
        """Note the report of a data plane. If a request waits for a slot, the service is looked at right
        away.
        """
        if report.epoch not in {"", self.table.epoch}:
            report = msgspec.structs.replace(report, version=0)  # of another history of versions
        self.traffic.record(report, now)
        self._reported.set()
        self._reported = anyio.Event()
        if any(count.queued for count in report.counts):
            self.waker.set()

    def load(self, service: Service, now: float) -> Sample | None:
        """Return the last whole second of load; None if no data plane reported lately."""
        samples = self.traffic.samples(service.project, service.name)
        whole = [sample for sample in samples[-3:] if int(now) - FRESH_S <= sample.at < int(now)]
        return whole[-1] if whole else None

    def publish(self, table: ServingTable) -> None:
        """Publish the table to every data plane that waits for a newer one."""
        self.table = table
        draining = {
            replica.replica_id
            for service in table.services
            for replica in service.replicas
            if replica.is_draining
        }
        self._drained = {replica_id: self._drained.get(replica_id, table.version) for replica_id in draining}
        self.traffic.forget((service.project, service.name) for service in table.services)
        self._news.set()
        self._news = anyio.Event()

    async def wait_until_applied(self, clock: Clock) -> None:
        """Wait until every data plane has reported that it serves by the present table, except those that are
        long gone.
        """
        version = self.table.version
        while not self.traffic.is_known_everywhere(version, clock.monotonic()):
            await self._reported.wait()

    def is_idle(self, replica_id: str, now: float) -> bool:
        """Whether every data plane knows that the replica drains and has no request left in it."""
        version = self._drained.get(replica_id)
        return version is not None and self.traffic.is_idle(replica_id, version, now)

    def since_step(self, service: Service) -> tuple[Stats, Stats]:
        """Return what was counted of the old and the new release since the rollout reached its step, or since
        this control plane first looked at the step.
        """
        rollout = service.rollout
        if rollout is None or not rollout.is_open:
            self._began.pop(service.service_id, None)
            return Stats(), Stats()
        numbers, step = (rollout.old, rollout.new), (rollout.new, rollout.step)
        old, new = (self.traffic.stats(service.project, service.name, number) for number in numbers)
        began = self._began.get(service.service_id)
        if began is None or began[0] != step:
            began = self._began[service.service_id] = (step, old, new)
        return old.since(began[1]), new.since(began[2])

    def watched_s(self, service: Service, at: float) -> float | None:
        """Return how long the step of a canary has been watched here; None if it is not watched.

        Time before this control plane's own start does not count, because what was seen then is lost.
        """
        rollout = service.rollout
        if rollout is None or not rollout.is_open or rollout.baking_at is None:
            self._baking.pop(service.service_id, None)
            return None
        step, began = (rollout.new, rollout.step), self._baking.get(service.service_id)
        if began is None or began[0] != step:
            began = self._baking[service.service_id] = (step, at)
        return at - began[1]

    async def wait_for_newer(self, than: int, timeout_s: float, epoch: str = "") -> ServingTable | None:
        """Return the table once it is newer than `than`, or of another epoch; None after `timeout_s`."""
        with anyio.move_on_after(timeout_s):
            while not self._is_news(than, epoch):
                await self._news.wait()
        return self.table if self._is_news(than, epoch) else None

    def _is_news(self, than: int, epoch: str) -> bool:
        table = self.table
        return table.version > than or (table is not EMPTY_TABLE and epoch not in {"", table.epoch})
