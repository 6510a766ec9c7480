"""No file that a job can write is read without a bound: `shoal.bounded_file` has the reads that have one."""

from __future__ import annotations

from pathlib import Path

from tests.style.tree import PACKAGE, Module, modules
from tests.style.unbounded import unbounded_reads

ALLOWED: dict[str, frozenset[tuple[str, str]]] = {
    "files of the home, which nobody but the control plane's user can write": frozenset(
        {
            ("control/authority.py", "load_authority"),
            ("control/authority.py", "load_certificate"),
            ("control/first.py", "home_id"),
            ("control/first.py", "load_key"),
            ("engines/cluster_id.py", "read_cluster"),
            ("engines/connection.py", "load"),
            ("engines/ray/knock.py", "knock"),
            ("engines/slurm/engine.py", "SlurmEngine.__init__"),
            ("runtime/addresses.py", "Addresses._read_file"),
        }
    ),
    "files that an operator names": frozenset(
        {
            ("control/policy_file.py", "read_policy"),
            ("control/uids.py", "subordinate_ranges"),
            ("engines/ray/config.py", "_read"),
            ("engines/slurm/rest_place.py", "read_token"),
        }
    ),
    "folders of the home with one entry for each job or upload: a job cannot add any": frozenset(
        {
            ("api/archives.py", "_names"),
            ("control/clean.py", "_drop_archives"),
            ("control/clean.py", "_old_archives"),
            ("engines/checkpoint_folder.py", "CheckpointFolder._names"),
            ("engines/cluster_id.py", "all_left"),
            ("engines/cluster_id.py", "left_of"),
            ("engines/desk.py", "Desk.__init__"),
            ("engines/desk.py", "Desk._sweep"),
            ("engines/desk.py", "Desk.kept"),
            ("engines/desk.py", "Desk.old"),
            ("engines/desk.py", "_found"),
            ("engines/drafts.py", "begin_term"),
            ("engines/local/book.py", "Book._views"),
            ("engines/local/book.py", "Book.all"),
            ("engines/local/book.py", "Book.prune"),
            ("engines/local/book.py", "Book.sweep"),
            ("engines/local/book.py", "_age_and_size"),
            ("engines/set_aside.py", "outcomes_of"),
            ("engines/set_aside.py", "set_aside"),
            ("engines/slurm/rest.py", "RestDoor.outputs"),
            ("runtime/caches.py", "_remove_unused"),
        }
    ),
    "archives, which were measured when they were uploaded": frozenset(
        {
            ("engines/desk.py", "_lay"),
            ("engines/local/book.py", "_link_or_copy"),
            ("runtime/checkpoint_folder.py", "_remove_empty"),
            ("runtime/unpack.py", "_put"),
        }
    ),
    "one entry at a time, counted, or until a time": frozenset(
        {
            ("control/owners.py", "_give"),
            ("engines/own_saves.py", "Walk.entries"),
            ("engines/ray/agent.py", "_roots"),
            ("engines/saved.py", "_names"),
            ("engines/saved.py", "_size"),
            ("runtime/cache_trim.py", "_entries"),
            ("runtime/cache_trim.py", "_finish_removals"),
            ("runtime/cache_trim.py", "_measure"),
            ("runtime/caches.py", "ProjectCache._make_own"),
            ("runtime/build_locks.py", "_names_in"),
            ("runtime/places.py", "roots_of"),
            ("runtime/removal.py", "_Emptier._pass"),
            ("runtime/saves.py", "newest_write"),
            ("runtime/written.py", "_Walk._go_through"),
        }
    ),
    "what the kernel writes, in a size that it bounds": frozenset(
        {
            ("runtime/build_locks.py", "_held_by"),
            ("runtime/build_locks.py", "_processes_of"),
            ("engines/cluster_id.py", "this_machine"),
            ("engines/local/inventory.py", "memory_bytes"),
            ("engines/ray/agent.py", "_boot_id"),
            ("engines/ray/agent.py", "_gpu_minors"),
            ("engines/ray/agent.py", "_lives"),
            ("engines/ray/agent.py", "_machine"),
            ("engines/ray/agent.py", "_memory_bytes"),
            ("engines/ray/agent.py", "ending_service"),
            ("engines/ray/head.py", "Head.stop"),
            ("engines/ray/head.py", "_session"),
            ("runtime/confine/cgroup.py", "here"),
            ("runtime/confine/cgroup.py", "read_number"),
            ("runtime/confine/cgroup1.py", "CgroupV1.make"),
            ("runtime/confine/cgroup2.py", "_words"),
            ("runtime/confine/confinement.py", "gpu_devices"),
            ("runtime/kernel.py", "rename"),
            ("runtime/network.py", "_listed"),
            ("runtime/network.py", "_read"),
            ("runtime/ports.py", "_sockets"),
            ("runtime/spool.py", "boot_id"),
            ("runtime/spool.py", "start_ticks"),
            ("runtime/tree.py", "_remove_cgroup"),
            ("runtime/tree.py", "_stat"),
            ("runtime/tree.py", "_threads"),
            ("runtime/tree.py", "all_pids"),
            ("runtime/tree.py", "pids_in"),
        },
    ),
    "folders of the job's user, listed by a process that runs as that user": frozenset(
        {
            ("runtime/shared_folder.py", "make"),
        }
    ),
    "folders of the machine that its administrator alone can write": frozenset(
        {
            ("control/uids.py", "_forget_gone"),
            ("control/uids.py", "_is_own"),
            ("runtime/confine/programs.py", "edited"),
            ("runtime/confine/view.py", "_room_for"),
            ("runtime/confine/view.py", "_system"),
        }
    ),
    "pipes whose other end is Shoal's own": frozenset(
        {
            ("engines/ray/bridge.py", "Bridge.__init__"),
            ("runtime/entry.py", "_read_credentials"),
            ("runtime/keeper.py", "main"),
            ("runtime/porch/process.py", "main"),
            ("runtime/standby/process.py", "main"),
        }
    ),
    "records of keepers, in a folder of the agent's user on a node where jobs have that user, too": frozenset(
        {("engines/ray/agent.py", "Agent._sweep")}
    ),
    "called `read` and no read of a file": frozenset(
        {
            ("api/requests.py", "ProjectLimits.given"),
            ("engines/commands.py", "_hear"),
        }
    ),
    "memory that is shared with ranks, sealed against shrinking": frozenset(
        {("runtime/board.py", "Board.__init__")}
    ),
}


def test_every_read_without_a_bound_has_a_reason() -> None:
    known = frozenset[tuple[str, str]]().union(*ALLOWED.values())
    found = unbounded_reads(modules(PACKAGE))
    assert sorted(found - known) == [], (
        "use `shoal.bounded_file`, or add it with the reason why it needs none"
    )
    assert sorted(known - found) == [], "it is gone: take it off the list"


def test_the_rule_finds_the_ways_to_read_to_the_end(tmp_path: Path) -> None:
    base = tmp_path / "shoal"
    (base / "engines").mkdir(parents=True)
    ways = {
        "whole": "path.read_bytes()",
        "until_empty": "b''.join(iter(lambda: os.read(fd, 9), b''))",
        "to_the_end": "file.read()",
        "decoded": "json.load(file)",
        "listed": "os.listdir(path)",
        "bounded": "file.read(9)",
    }
    text = "".join(f"def {name}(path, file, fd):\n    return {way}\n" for name, way in ways.items())
    (base / "engines" / "bad.py").write_text(text)
    found = unbounded_reads([Module(base / "engines" / "bad.py", base)])
    assert {name for _, name in found} == ways.keys() - {"bounded"}
