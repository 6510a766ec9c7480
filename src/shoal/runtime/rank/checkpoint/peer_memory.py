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

from shoal.runtime.rank.checkpoint.folder_store import FolderStore
from shoal.runtime.rank.checkpoint.manifest import CheckpointManifest, CheckpointName, Fence, problem_of
from shoal.runtime.rank.checkpoint.peers import Peers, exchange, hand_over

METADATA = ".metadata"
READING = ".reading-"


class VerifiedFiles(msgspec.Struct, frozen=True):
    """What one rank has looked at on its node and found to be right."""

    node: int
    files: list[str]


class PeerMemoryStore:
    def __init__(self, folder: FolderStore, peers: Peers) -> None:
        self._folder = folder
        self._peers = peers
        self._per_node = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._node, self._local = divmod(peers.rank, self._per_node)

    def claim(self, fence: Fence) -> str | None:
        """Shut out earlier groups on every node. Returns why that failed on one of them."""
        return self._first_problem(self._run_on_first_rank(lambda: self._begin(fence)))

    def commit(self, manifest: CheckpointManifest | None, files: list[str], fence: Fence) -> str | None:
        """Have what each rank wrote on the next node too, then visible on all. Returns why it is not.

        `manifest`: rank 0's. What was written stays where it is if it fails.
        """
        committed = self._peers.from_rank_zero(lambda: manifest)
        if committed is None:
            return "nothing was written"
        into = self._folder.unfinished(committed.name)
        metadata = self._peers.from_rank_zero(lambda: _content(os.path.join(into, METADATA)))
        problem = self._run_on_first_rank(lambda: _put(os.path.join(into, METADATA), metadata))
        problem = self._first_problem(self._exchange_neighbours(committed, files, into) or problem)
        if problem is None:
            problem = self._first_problem(
                self._run_on_first_rank(lambda: self._folder.commit(committed, fence))
            )
        return problem

    def names(self) -> list[CheckpointName]:
        """What is committed on any node."""
        return sorted({name for names in self._peers.gather(_names(self._folder)) for name in names})

    def find(self, name: CheckpointName) -> tuple[CheckpointManifest, dict[str, int]] | str:
        """The manifest, and for each of its files a node that has it right; or why it cannot be used."""
        manifests = self._peers.gather(_manifest(self._folder, name))
        manifest = next((one for one in manifests if one is not None), None)
        if manifest is None:
            return "its manifest is on no node"
        here = self._folder.where(name)
        mine = sorted(manifest.files)[self._local :: self._per_node]
        right = [file for file in mine if problem_of(os.path.join(here, file), manifest.files[file]) is None]
        where = {
            file: held.node
            for held in reversed(self._peers.gather(VerifiedFiles(self._node, right)))
            for file in held.files
        }
        missing = sorted(manifest.files.keys() - where.keys())
        if missing:
            return f"{missing[0]} is in no node's memory"
        return manifest, where

    def open(self, manifest: CheckpointManifest, where: dict[str, int]) -> str:
        """A folder on this node to read from, with what the node has of it."""
        path = self._reading(manifest)
        here = self._folder.where(manifest.name)

        def link() -> None:
            shutil.rmtree(path, ignore_errors=True)
            os.makedirs(path)
            for file in manifest.files:
                if problem_of(os.path.join(here, file), manifest.files[file]) is None:
                    os.link(os.path.join(here, file), os.path.join(path, file))

        self._raise_first(self._run_on_first_rank(link))
        self.fetch(manifest, where, [METADATA])
        return path

    def fetch(self, manifest: CheckpointManifest, where: dict[str, int], wanted: Iterable[str]) -> None:
        """Have the files that this rank wants on its node, from those that have them. `OSError`: not so."""
        path = self._reading(manifest)
        lacking = sorted(file for file in set(wanted) if not os.path.exists(os.path.join(path, file)))
        wishes = {
            (file, one.node)
            for one in self._peers.gather(VerifiedFiles(self._node, lacking))
            for file in one.files
        }
        problem = None
        for number, (file, node) in enumerate(sorted(wishes)):
            at = number % self._per_node
            record, target = manifest.files[file], os.path.join(path, file)
            source = os.path.join(self._folder.where(manifest.name), file)
            sender, receiver = (one * self._per_node + at for one in (where[file], node))
            failed = hand_over(self._peers, sender, source, receiver, target, record)
            problem = problem or failed
        self._raise_first(problem)

    def close(self, manifest: CheckpointManifest) -> None:
        """No rank reads any more."""
        self._peers.gather(None)
        self._run_on_first_rank(lambda: shutil.rmtree(self._reading(manifest), ignore_errors=True))

    def _begin(self, fence: Fence) -> None:
        self._folder.claim(fence)
        for entry in os.listdir(self._folder.title):
            if entry.startswith(READING):
                shutil.rmtree(self._folder.beside(entry), ignore_errors=True)

    def _exchange_neighbours(self, manifest: CheckpointManifest, files: list[str], into: str) -> str | None:
        """Give my files to my like on the next node, and take those of the one before."""
        shards = [file for file in files if file != METADATA]
        everyone = self._peers.gather(shards)
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

    def _reading(self, manifest: CheckpointManifest) -> str:
        return self._folder.beside(f"{READING}{manifest.name}")

    def _run_on_first_rank(self, action: Callable[[], object]) -> str | None:
        """Done by the first rank of each node alone. What it raised, as a sentence."""
        if self._local != 0:
            return None
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the others wait for an answer either way
            return str(error) or type(error).__name__
        return None

    def _first_problem(self, problem: str | None) -> str | None:
        return next((one for one in self._peers.gather(problem) if one is not None), None)

    def _raise_first(self, problem: str | None) -> None:
        """`OSError`, on every rank, where one of them has a problem."""
        worst = self._first_problem(problem)
        if worst is not None:
            raise OSError(worst)


def _names(folder: FolderStore) -> list[CheckpointName]:
    with contextlib.suppress(OSError):
        return folder.names()
    return []


def _manifest(folder: FolderStore, name: CheckpointName) -> CheckpointManifest | None:
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
