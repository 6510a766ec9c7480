"""Checkpoints in a bucket: S3, GCS or Azure, by URL, through obstore.

One small object says which group holds the place and what is committed; it is only ever replaced by a
conditional put, so that of two groups the later one wins whatever the order of their requests.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from shoal.errors import SpecError, StateError
from shoal.runtime.rank.checkpoint.manifest import (
    MANIFEST,
    PIECE_BYTES,
    Fence,
    FileRecord,
    Manifest,
    Name,
    parse_name,
    problem_of,
    read_manifest,
)
from shoal.runtime.rank.checkpoint.place import fenced, said

INDEX = "index.json"
PROBE = "probe"


class Index(msgspec.Struct, frozen=True, kw_only=True):
    fence: Fence = Fence()
    names: tuple[str, ...] = ()


class Objects:
    """A `Place`. `store` is one of obstore's."""

    def __init__(self, store: Any, title: str, *, keep: int) -> None:
        self.title = title
        self._store = store
        self._keep = keep

    def claim(self, fence: Fence | None) -> Fence:
        def taken(index: Index) -> Index:
            mine = fence or Fence(epoch=index.fence.epoch + 1)
            if index.fence > mine:
                raise fenced(mine, index.fence, self.title)
            return msgspec.structs.replace(index, fence=mine)

        try:
            self._probe()
            return self._change(taken).fence
        except (_error("BaseError"), FileNotFoundError) as error:
            raise StateError(
                f"checkpoints cannot be kept at {self.title}: {said(error)}; is there such a bucket, and are "
                "its credentials in the job's environment?"
            ) from None

    def names(self) -> list[Name]:
        found = [parse_name(text) for text in self._read()[0].names]
        return sorted((name for name in found if name is not None), reverse=True)

    def manifest(self, name: Name) -> Manifest:
        return read_manifest(self._get(f"{name}/{MANIFEST}"), name)

    def take(self, name: Name, source: str, files: Iterable[str]) -> None:
        for file in files:
            with open(os.path.join(source, file), "rb") as opened:
                self._store.put(f"{name}/{file}", opened)

    def commit(self, manifest: Manifest, fence: Fence) -> None:
        self._store.put(f"{manifest.name}/{MANIFEST}", msgspec.json.encode(manifest))
        dropped: list[Name] = []

        def added(index: Index) -> Index:
            if index.fence > fence:
                raise fenced(fence, index.fence, self.title)
            names = sorted({*filter(None, map(parse_name, index.names)), manifest.name}, reverse=True)
            kept = [name for i, name in enumerate(names) if i < self._keep or name == manifest.name]
            dropped[:] = [name for name in names if name not in kept]
            return Index(fence=index.fence, names=tuple(map(str, kept)))

        self._change(added)
        for name in dropped:
            for page in self._store.list(f"{name}/"):
                self._store.delete([entry["path"] for entry in page])

    def fetch(self, name: Name, files: dict[str, FileRecord], into: str) -> str | None:
        os.makedirs(into, exist_ok=True)
        for file, record in files.items():
            path = os.path.join(into, file)
            try:
                with open(path, "wb") as opened:
                    opened.writelines(self._store.get(f"{name}/{file}").stream(min_chunk_size=PIECE_BYTES))
                    opened.flush()
                    os.fsync(opened.fileno())
            except FileNotFoundError:
                return f"{file} is gone"
            problem = problem_of(path, record)
            if problem is not None:
                return problem
        return None

    def _probe(self) -> None:
        """Some servers take a conditional put and ignore the condition: there, no fence would hold."""
        for _ in range(2):
            try:
                self._store.put(PROBE, b"", mode="create", use_multipart=False)
            except _error("AlreadyExistsError"):
                return
        raise SpecError(
            f"{self.title} ignores conditions on a put, so a stale attempt could overwrite a newer one",
            hint="keep checkpoints in a store that honours If-None-Match",
        )

    def _change(self, change: Callable[[Index], Index]) -> Index:
        """Replace the index by what `change` makes of it, again while others get in between."""
        while True:
            index, version = self._read()
            new = change(index)
            try:
                self._store.put(
                    INDEX, msgspec.json.encode(new), mode=version or "create", use_multipart=False
                )
            except (_error("AlreadyExistsError"), _error("PreconditionError")):
                continue
            return new

    def _read(self) -> tuple[Index, dict[str, Any] | None]:
        try:
            found = self._store.get(INDEX)
        except FileNotFoundError:
            return Index(), None
        # Buckets that keep versions have one of these too; a key that is there must be a text.
        version = {key: found.meta[key] for key in ("e_tag", "version") if found.meta.get(key)}
        return msgspec.json.decode(bytes(found.bytes()), type=Index), version

    def _get(self, key: str) -> bytes:
        return bytes(self._store.get(key).bytes())


def _error(name: str) -> type[Exception]:
    error: type[Exception] = getattr(importlib.import_module("obstore.exceptions"), name)
    return error


def open_objects(url: str, *, keep: int) -> Objects:
    """`SpecError`: obstore is missing, or the URL is not one of its kinds."""
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise SpecError(
            f"checkpoints at {url} need obstore, which is not installed", hint="pip install 'shoal[objects]'"
        ) from error
    try:
        return Objects(stores.from_url(url), url, keep=keep)
    except (_error("BaseError"), ValueError) as error:
        raise SpecError(
            f"checkpoints cannot be kept at `{url}`: {said(error)}; write `s3://BUCKET/PATH`, "
            "`gs://BUCKET/PATH`, `az://CONTAINER/PATH` or `file:///PATH` of a directory that is there"
        ) from None
