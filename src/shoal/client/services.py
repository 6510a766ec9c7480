"""Services, as those who run them do and everybody sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.client.people import Answer, items_of
from shoal.client.submission import send
from shoal.client.transport import Transport, path_of
from shoal.errors import NotFound, SpecError


class Services:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def serve(
        self,
        spec: Mapping[str, Any],
        *,
        workdir: Path | None = None,
        env: Mapping[str, str],
        key: str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Answer:
        """A new service or a new release of it; `spec` is what a YAML file says. Secrets come from `env`."""
        return send(
            self._transport,
            {"spec": dict(spec)},
            workdir=workdir,
            secrets=tuple(spec.get("secrets", ())),
            env=env,
            key=key,
            progress=progress,
            to="services",
        )

    def all(self, project: str | None = None, name: str | None = None) -> list[Answer]:
        return items_of(self._transport, path_of("services"), project=project, name=name)

    def show(self, ref: str) -> Answer:
        """With its replicas and releases. `ref`: a name, `PROJECT/NAME` or `svc_...`."""
        return dict(self._transport.call("GET", path_of("services", self.service_id(ref))))

    def scale(self, ref: str, low: int, high: int) -> Answer:
        path = path_of("services", self.service_id(ref), "scale")
        return dict(self._transport.call("POST", path, json_body={"min": low, "max": high}))

    def rollout(self, ref: str, action: str) -> Answer:
        """`undo` or `promote`."""
        path = path_of("services", self.service_id(ref), "rollout")
        return dict(self._transport.call("POST", path, json_body={"action": action}))

    def stop(self, ref: str) -> Answer:
        return dict(self._transport.call("POST", path_of("services", self.service_id(ref), "stop")))

    def named(self, ref: str) -> list[Answer]:
        """Those that `NAME` or `PROJECT/NAME` may mean."""
        project, slash, name = ref.rpartition("/")
        return self.all(project if slash else None, name)

    def service_id(self, ref: str) -> str:
        """The id of the one service that `ref` names."""
        if ref.startswith("svc_"):
            return ref
        found = self.named(ref)
        if not found:
            raise NotFound(f"no service `{ref}`", hint="list what you can see with `shoal services`")
        if len(found) > 1:
            names = ", ".join(f"`{one['ref']}`" for one in found)
            raise SpecError(f"`{ref}` is a service in {len(found)} projects", hint=f"type one of {names}")
        return str(found[0]["id"])
