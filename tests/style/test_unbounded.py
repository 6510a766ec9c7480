"""No file that a job can write is read without a bound: `shoal.bounded_file` has the reads that have one."""

from __future__ import annotations

from pathlib import Path

from tests.style.tree import PACKAGE, Module, modules
from tests.style.unbounded import unbounded_reads

ALLOWED: dict[str, frozenset[tuple[str, str]]] = {
    "files of the home, which nobody but the control plane's user can write": frozenset(
        {
            ("control/bootstrap.py", "load_authority"),
            ("control/bootstrap.py", "load_certificate"),
            ("control/bootstrap.py", "home_id"),
            ("control/bootstrap.py", "load_signing_key"),
            ("engines/home_records.py", "read_cluster"),
            ("engines/remote/connection.py", "load_connection"),
            ("engines/ray/probe.py", "probe"),
            ("engines/slurm/engine.py", "SlurmEngine.__init__"),
            ("runtime/lease/addresses.py", "ControlPlaneAddresses._read_file"),
        }
    ),
    "files that an operator names": frozenset(
        {
            ("control/commands/policy.py", "read_policy"),
            ("control/project_uids.py", "subordinate_ranges"),
            ("engines/ray/config.py", "_read"),
            ("engines/slurm/rest_request.py", "read_token"),
        }
    ),
    "folders of the home with one entry for each job or upload: a job cannot add any": frozenset(
        {
            ("api/archives.py", "_names"),
            ("control/loops/clean.py", "_drop_archives"),
            ("control/loops/clean.py", "_old_archives"),
            ("engines/checkpoint_folder.py", "CheckpointFolder._names"),
            ("engines/home_records.py", "unfinished_attempts"),
            ("engines/home_records.py", "unfinished_attempt"),
            ("engines/remote/mailbox.py", "Mailbox.archived"),
            ("engines/spool_directory.py", "SpoolDirectory.__init__"),
            ("engines/spool_directory.py", "SpoolDirectory.attempts"),
            ("engines/spool_directory.py", "SpoolDirectory.prunable"),
            ("engines/spool_directory.py", "SpoolDirectory.sweep"),
            ("engines/spool_directory.py", "SpoolDirectory.tasks"),
            ("engines/spool_directory.py", "_age_and_size"),
            ("engines/spool_directory.py", "begin_term"),
            ("engines/spool_directory.py", "complete_archiving"),
            ("engines/local/spool_index.py", "SpoolIndex.sweep"),
            ("engines/home_records.py", "outcomes_of"),
            ("engines/home_records.py", "set_aside"),
            ("engines/slurm/rest.py", "RestTransport.outputs"),
            ("runtime/files/caches.py", "_remove_unused"),
        }
    ),
    "archives, which were measured when they were uploaded": frozenset(
        {
            ("engines/spool_directory.py", "_link_or_copy"),
            ("runtime/files/checkpoint_storage.py", "_remove_empty"),
            ("runtime/files/unpack.py", "_put"),
        }
    ),
    "one entry at a time, counted, or until a time": frozenset(
        {
            ("control/project_uids.py", "_chown_tree"),
            ("engines/checkpoint_reader.py", "DirectoryWalk.entries"),
            ("engines/ray/agent.py", "_roots"),
            ("engines/checkpoint_reader.py", "_names"),
            ("engines/checkpoint_reader.py", "_size"),
            ("runtime/files/cache_cleanup.py", "_entries"),
            ("runtime/files/cache_cleanup.py", "_finish_removals"),
            ("runtime/files/cache_cleanup.py", "_measure"),
            ("runtime/files/caches.py", "ProjectCache._give_to_user"),
            ("runtime/files/cache_cleanup.py", "_names_in"),
            ("runtime/agent/spool_root.py", "existing_roots"),
            ("runtime/files/removal.py", "_Emptier._pass"),
            ("runtime/files/checkpoint_storage.py", "newest_write"),
            ("runtime/files/job_files.py", "_Walk._walk"),
        }
    ),
    "what the kernel writes, in a size that it bounds": frozenset(
        {
            ("runtime/files/cache_cleanup.py", "_held_by"),
            ("runtime/files/cache_cleanup.py", "_processes_of"),
            ("engines/home_records.py", "this_machine"),
            ("engines/local/inventory.py", "memory_bytes"),
            ("engines/ray/agent.py", "_boot_id"),
            ("engines/ray/agent.py", "_gpu_minors"),
            ("engines/ray/agent.py", "_lives"),
            ("engines/ray/agent.py", "_machine"),
            ("engines/ray/agent.py", "_memory_bytes"),
            ("engines/ray/agent.py", "ending_service"),
            ("engines/ray/head.py", "RayHead.stop"),
            ("engines/ray/head.py", "_session"),
            ("runtime/confine/resource_limits.py", "hierarchies_here"),
            ("runtime/confine/resource_limits.py", "read_number"),
            ("runtime/confine/resource_limits.py", "CgroupV1.make"),
            ("runtime/confine/resource_limits.py", "_words"),
            ("runtime/confine/confinement.py", "gpu_devices"),
            ("runtime/process/kernel.py", "rename"),
            ("runtime/process/network.py", "_listed"),
            ("runtime/process/network.py", "_read"),
            ("runtime/process/network.py", "_socket_inodes"),
            ("runtime/files/spool.py", "boot_id"),
            ("runtime/files/spool.py", "start_ticks"),
            ("runtime/process/tree.py", "_remove_cgroup"),
            ("runtime/process/tree.py", "_stat"),
            ("runtime/process/tree.py", "_threads"),
            ("runtime/process/tree.py", "all_pids"),
            ("runtime/process/tree.py", "pids_in_cgroups"),
        },
    ),
    "folders of the job's user, listed by a process that runs as that user": frozenset(
        {
            ("runtime/files/unpack.py", "make"),
        }
    ),
    "folders of the machine that its administrator alone can write": frozenset(
        {
            ("control/project_uids.py", "_forget_gone"),
            ("control/project_uids.py", "_is_own"),
            ("runtime/confine/sandbox_view.py", "editable_sources"),
            ("runtime/confine/sandbox_view.py", "_room_for"),
            ("runtime/confine/sandbox_view.py", "_system"),
        }
    ),
    "pipes whose other end is Shoal's own": frozenset(
        {
            ("engines/ray/bridge.py", "Bridge.__init__"),
            ("runtime/supervisor/entry.py", "_read_credentials"),
            ("runtime/agent/node_agent.py", "main"),
            ("runtime/replica/sidecar_process.py", "main"),
            ("runtime/standby/process.py", "main"),
        }
    ),
    "records of keepers, in a folder of the agent's user on a node where jobs have that user, too": frozenset(
        {("engines/ray/agent.py", "Agent._sweep")}
    ),
    "called `read` and no read of a file": frozenset(
        {
            ("api/requests.py", "ProjectLimits.changed_fields"),
            ("engines/slurm/command_runner.py", "_collect_output"),
        }
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
