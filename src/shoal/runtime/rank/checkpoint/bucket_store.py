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
from shoal.runtime.rank.checkpoint.folder_store import error_summary, fenced_error
from shoal.runtime.rank.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    CheckpointManifest,
    CheckpointName,
    Fence,
    FileRecord,
    parse_name,
    problem_of,
    read_manifest,
)

INDEX = "index.json"
PROBE = "probe"


class BucketIndex(msgspec.Struct, frozen=True, kw_only=True):
    fence: Fence = Fence()
    names: tuple[str, ...] = ()


class BucketStore:
    """A `Place`. `store` is one of obstore's."""

    def __init__(self, store: Any, title: str, *, keep: int) -> None:
        self.title = title
        self._store = store
        self._keep = keep

    def claim(self, fence: Fence | None) -> Fence:
        def taken(index: BucketIndex) -> BucketIndex:
            mine = fence or Fence(epoch=index.fence.epoch + 1)
            if index.fence > mine:
                raise fenced_error(mine, index.fence, self.title)
            return msgspec.structs.replace(index, fence=mine)

        try:
            self._probe()
            return self._change(taken).fence
        except (_error("BaseError"), FileNotFoundError) as error:
            raise StateError(
                f"checkpoints cannot be kept at {self.title}: {error_summary(error)}; is "
                "there such a bucket, and are "
                "its credentials in the job's environment?"
            ) from None

    def names(self) -> list[CheckpointName]:
        parsed = [parse_name(text) for text in self._read()[0].names]
        return sorted((name for name in parsed if name is not None), reverse=True)

    def manifest(self, name: CheckpointName) -> CheckpointManifest:
        return read_manifest(self._get(f"{name}/{MANIFEST}"), name)

    def take(self, name: CheckpointName, source: str, files: Iterable[str]) -> None:
        for file in files:
            with open(os.path.join(source, file), "rb") as opened:
                self._store.put(f"{name}/{file}", opened)

    def commit(self, manifest: CheckpointManifest, fence: Fence) -> None:
        self._store.put(f"{manifest.name}/{MANIFEST}", msgspec.json.encode(manifest))
        dropped: list[CheckpointName] = []

        def added(index: BucketIndex) -> BucketIndex:
            if index.fence > fence:
                raise fenced_error(fence, index.fence, self.title)
            names = sorted({*filter(None, map(parse_name, index.names)), manifest.name}, reverse=True)
            kept = [name for i, name in enumerate(names) if i < self._keep or name == manifest.name]
            dropped[:] = [name for name in names if name not in kept]
            return BucketIndex(fence=index.fence, names=tuple(map(str, kept)))

        self._change(added)
        for name in dropped:
            for page in self._store.list(f"{name}/"):
                self._store.delete([entry["path"] for entry in page])

    def fetch(self, name: CheckpointName, files: dict[str, FileRecord], into: str) -> str | None:
        os.makedirs(into, exist_ok=True)
        for file, record in files.items():
            path = os.path.join(into, file)
            try:
                with open(path, "wb") as opened:
                    opened.writelines(self._store.get(f"{name}/{file}").stream(min_chunk_size=CHUNK_BYTES))
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

    def _change(self, change: Callable[[BucketIndex], BucketIndex]) -> BucketIndex:
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

    def _read(self) -> tuple[BucketIndex, dict[str, Any] | None]:
        try:
            response = self._store.get(INDEX)
        except FileNotFoundError:
            return BucketIndex(), None
        # Buckets that keep versions have one of these too; a key that is there must be a text.
        version = {key: response.meta[key] for key in ("e_tag", "version") if response.meta.get(key)}
        return msgspec.json.decode(bytes(response.bytes()), type=BucketIndex), version

    def _get(self, key: str) -> bytes:
        return bytes(self._store.get(key).bytes())


def _error(name: str) -> type[Exception]:
    error: type[Exception] = getattr(importlib.import_module("obstore.exceptions"), name)
    return error


def open_bucket(url: str, *, keep: int) -> BucketStore:
    """`SpecError`: obstore is missing, or the URL is not one of its kinds."""
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise SpecError(
            f"checkpoints at {url} need obstore, which is not installed", hint="pip install 'shoal[objects]'"
        ) from error
    try:
        return BucketStore(stores.from_url(url), url, keep=keep)
    except (_error("BaseError"), ValueError) as error:
        raise SpecError(
            f"checkpoints cannot be kept at `{url}`: {error_summary(error)}; write `s3://BUCKET/PATH`, "
            "`gs://BUCKET/PATH`, `az://CONTAINER/PATH` or `file:///PATH` of a directory that is there"
        ) from None
