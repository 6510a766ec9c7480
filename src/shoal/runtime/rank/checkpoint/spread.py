"""The newest checkpoint in the memory of several nodes: each holds its own ranks' part and its neighbour's.

Any one node may be lost and all of it is still in memory somewhere. Every method is a collective of all
ranks, and one that fails in the middle goes on to its end: the others must not wait for what never comes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable

import msgspec

from shoal.runtime.rank.checkpoint.folder import Folder
from shoal.runtime.rank.checkpoint.manifest import Fence, Manifest, Name, problem_of
from shoal.runtime.rank.checkpoint.peers import Peers
from shoal.runtime.rank.checkpoint.transfer import exchange, hand_over

METADATA = ".metadata"
READING = ".reading-"


class Held(msgspec.Struct, frozen=True):
    """What one rank has looked at on its node and found to be right."""

    node: int
    files: list[str]


class Spread:
    def __init__(self, folder: Folder, peers: Peers) -> None:
        self._folder = folder
        self._peers = peers
        self._per_node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._node, self._local = divmod(peers.rank, self._per_node)

    def claim(self, fence: Fence) -> str | None:
        """Shut out earlier groups on every node. Returns why that failed on one of them."""
        return self._worst(self._tried_by_one(lambda: self._begin(fence)))

    def commit(self, manifest: Manifest | None, own: list[str], fence: Fence) -> str | None:
        """Have what each rank wrote on the next node too, then visible on all. Returns why it is not.

        `manifest`: rank 0's. What was written stays where it is if it fails.
        """
        told = self._peers.from_first(lambda: manifest)
        if told is None:
            return "nothing was written"
        into = self._folder.unfinished(told.name)
        metadata = self._peers.from_first(lambda: _content(os.path.join(into, METADATA)))
        problem = self._tried_by_one(lambda: _put(os.path.join(into, METADATA), metadata))
        problem = self._worst(self._swap(told, own, into) or problem)
        if problem is None:
            problem = self._worst(self._tried_by_one(lambda: self._folder.commit(told, fence)))
        return problem

    def names(self) -> list[Name]:
        """What is committed on any node."""
        return sorted({name for names in self._peers.all(_names(self._folder)) for name in names})

    def find(self, name: Name) -> tuple[Manifest, dict[str, int]] | str:
        """The manifest, and for each of its files a node that has it right; or why it cannot be used."""
        manifests = self._peers.all(_manifest(self._folder, name))
        manifest = next((one for one in manifests if one is not None), None)
        if manifest is None:
            return "its manifest is on no node"
        here = self._folder.where(name)
        mine = sorted(manifest.files)[self._local :: self._per_node]
        right = [file for file in mine if problem_of(os.path.join(here, file), manifest.files[file]) is None]
        where = {
            file: held.node
            for held in reversed(self._peers.all(Held(self._node, right)))
            for file in held.files
        }
        missing = sorted(manifest.files.keys() - where.keys())
        if missing:
            return f"{missing[0]} is in no node's memory"
        return manifest, where

    def open(self, manifest: Manifest, where: dict[str, int]) -> str:
        """A folder on this node to read from, with what the node has of it."""
        path = self._reading(manifest)
        here = self._folder.where(manifest.name)

        def link() -> None:
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
            for file in manifest.files:
                if problem_of(os.path.join(here, file), manifest.files[file]) is None:
                    os.link(os.path.join(here, file), os.path.join(path, file))

        self._check(self._tried_by_one(link))
        self.fetch(manifest, where, [METADATA])
        return path

    def fetch(self, manifest: Manifest, where: dict[str, int], wanted: Iterable[str]) -> None:
        """Have the files that this rank wants on its node, from those that have them. `OSError`: not so."""
        path = self._reading(manifest)
        lacking = sorted(file for file in set(wanted) if not os.path.exists(os.path.join(path, file)))
        wishes = {
            (file, one.node) for one in self._peers.all(Held(self._node, lacking)) for file in one.files
        }
        problem = None
        for number, (file, node) in enumerate(sorted(wishes)):
            at = number % self._per_node
            record, target = manifest.files[file], os.path.join(path, file)
            source = os.path.join(self._folder.where(manifest.name), file)
            sender, receiver = (one * self._per_node + at for one in (where[file], node))
            failed = hand_over(self._peers, sender, source, receiver, target, record)
            problem = problem or failed
        self._check(problem)

    def close(self, manifest: Manifest) -> None:
        """Nobody reads any more."""
        self._peers.all(None)
        self._tried_by_one(lambda: shutil.rmtree(self._reading(manifest), ignore_errors=True))

    def _begin(self, fence: Fence) -> None:
        self._folder.claim(fence)
        for entry in os.listdir(self._folder.title):
            if entry.startswith(READING):
                shutil.rmtree(self._folder.beside(entry), ignore_errors=True)

    def _swap(self, manifest: Manifest, own: list[str], into: str) -> str | None:
        """Give my files to my like on the next node, and take those of the one before."""
        shards = [file for file in own if file != METADATA]
        everyone = self._peers.all(shards)
        world = self._peers.world_size
        after, before = (
            (self._peers.rank + self._per_node) % world,
            (self._peers.rank - self._per_node) % world,
        )
        return exchange(
            self._peers,
            after,
            [(os.path.join(into, file), manifest.files[file]) for file in shards],
            before,
            [(os.path.join(into, file), manifest.files[file]) for file in everyone[before]],
        )

    def _reading(self, manifest: Manifest) -> str:
        return self._folder.beside(f"{READING}{manifest.name}")

    def _tried_by_one(self, action: Callable[[], object]) -> str | None:
        """Done by the first rank of each node alone. What it raised, as a sentence."""
        if self._local != 0:
            return None
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the others wait for an answer either way
            return str(error) or type(error).__name__
        return None

    def _worst(self, problem: str | None) -> str | None:
        return next((one for one in self._peers.all(problem) if one is not None), None)

    def _check(self, problem: str | None) -> None:
        """`OSError`, on every rank, where one of them has a problem."""
        worst = self._worst(problem)
        if worst is not None:
            raise OSError(worst)


def _names(folder: Folder) -> list[Name]:
    with contextlib.suppress(OSError):
        return folder.names()
    return []


def _manifest(folder: Folder, name: Name) -> Manifest | None:
    with contextlib.suppress(OSError, ValueError):
        return folder.manifest(name)
    return None


def _content(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _put(path: str, data: bytes) -> None:
    if not os.path.exists(path):
        with open(path, "wb") as file:
            file.write(data)
