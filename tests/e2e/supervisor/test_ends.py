"""How a task can end, each way with real processes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import tarfile
from pathlib import Path

import pytest

from shoal.runtime.files import spool
from shoal.runtime.process import tree
from shoal.wire import (
    EndKind,
    LeftBehind,
    LogRule,
    ProbeSpec,
    RuleAction,
    TaskCredentials,
    WrittenFiles,
)
from tests.support.runtime.tasks import RunningTask, StartTask, a_task_spec, stop_all_processes, until


def test_task_whose_ranks_all_exit_0_has_succeeded(start: StartTask) -> None:
    task = start(a_task_spec(ranks_per_node=3, run="echo $RANK of $WORLD_SIZE; echo oops >&2"))
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code, outcome.message) == (EndKind.SUCCEEDED, None, "")
    assert sorted(task.texts("o")) == ["0 of 3", "1 of 3", "2 of 3"]
    assert task.texts("e") == ["oops"] * 3
    assert outcome.started_at is not None
    assert outcome.started_at <= outcome.ended_at


def test_first_failing_rank_is_reported_with_code_and_output_and_others_are_stopped(
    start: StartTask,
) -> None:
    run = 'if [ $RANK = 5 ]; then echo "ValueError: bad batch" >&2; exit 3; fi; sleep 300'
    task = start(a_task_spec(ranks_per_node=2, node_rank=2, nodes=("a", "b", "node-1"), run=run))
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code, outcome.rank) == (EndKind.EXITED, 3, 5)
    assert outcome.message == "rank 5 exited with code 3\nValueError: bad batch"


def test_files_lost_with_the_task_are_counted(start: StartTask, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o777)
    kept.chmod(0o777)
    run = "mkdir out .cache; echo 12345 > out/model.pt; echo x > ckpt/model.pt; touch empty; echo > .cache/c"
    task_spec = a_task_spec(
        setup="echo made > by_setup", run=run, checkpoint_dir=str(kept), checkpoint_path="ckpt"
    )
    outcome = start(task_spec).run()
    assert (outcome.kind, outcome.message) == (EndKind.SUCCEEDED, "")
    assert outcome.written_files == WrittenFiles(
        num_files=1, num_bytes=6, names=("out/model.pt",), folder="out"
    )


def test_nodes_with_a_shared_folder_see_each_others_files_and_lose_none(
    start: StartTask, tmp_path: Path
) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    shared = {"checkpoint_dir": str(directory), "checkpoint_path": "ckpt", "has_shared_folder": True}
    nodes = ("node-1", "node-2")
    first = start(
        a_task_spec(**shared, nodes=nodes, setup="echo s >> setups", run="echo hi > made; pwd; echo $PWD")
    )
    outcome = first.run()
    assert (outcome.kind, outcome.written_files) == (EndKind.SUCCEEDED, None), outcome
    second = start(
        a_task_spec(
            **shared, node="node-2", node_rank=1, nodes=nodes, run="cat made setups; pwd; ls -d ckpt/"
        )
    )
    assert second.run().kind is EndKind.SUCCEEDED
    (place, text), output = first.texts("o"), second.texts("o")
    assert place == text == output[-2] == f"{directory}/.shared/{first.task_spec.identity.attempt_id}"
    assert output == ["hi", "s", place, "ckpt/"]


def test_file_left_behind_is_named_in_the_message(start: StartTask) -> None:
    behind = LeftBehind(folder="/home/ana/x", ignored=("data/train.bin",))
    outcome = start(a_task_spec(run="cat data/train.bin", left_behind=behind)).run()
    assert "; `data/train.bin` was not found; it is in the folder" in outcome.message.partition("\n")[0]
    assert outcome.message.endswith("No such file or directory")


def test_foreign_signal_is_reported(start: StartTask) -> None:
    outcome = start(a_task_spec(run="kill -SEGV $$")).run()
    assert (outcome.kind, outcome.signal, outcome.exit_code) == (EndKind.SIGNALED, signal.SIGSEGV, None)
    assert "SIGSEGV" in outcome.message


def test_missing_executable_is_named(start: StartTask) -> None:
    outcome = start(a_task_spec(run="no-such-program --x")).run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 127)
    assert outcome.message.startswith("rank 0 exited with code 127: program `no-such-program` not found\n")


def test_executable_missing_in_setup_is_named(start: StartTask) -> None:
    outcome = start(a_task_spec(setup="no-such-program --x", run="echo never")).run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.SETUP_FAILED, 127)
    assert "exited with code 127: program `no-such-program` not found\n" in outcome.message


def test_setup_runs_once_before_the_ranks_in_the_same_directory(start: StartTask) -> None:
    task = start(a_task_spec(setup="echo once >> made; echo preparing", run="cat made", ranks_per_node=2))
    assert task.run().kind is EndKind.SUCCEEDED
    assert task.texts("o") == ["once", "once"]
    assert ("-", "s", "preparing") in task.log()


def test_failing_setup_starts_no_rank(start: StartTask) -> None:
    task = start(a_task_spec(setup="echo no such package >&2; exit 9", run="echo never"))
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.SETUP_FAILED, 9)
    assert outcome.started_at is None
    assert outcome.message == "setup exited with code 9\nno such package"
    assert task.texts("o") == []


def put_archive(task: RunningTask, **files: bytes) -> str:
    with tarfile.open(task.task.archive, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return hashlib.sha256(Path(task.task.archive).read_bytes()).hexdigest()


def test_archive_is_unpacked_where_the_ranks_start(start: StartTask) -> None:
    task = start(a_task_spec())
    digest = put_archive(task, greeting=b"hello from the archive\n")
    spool.write_task_spec(task.task, a_task_spec(run="cat greeting; touch mine", archive_digest=digest))
    outcome = task.run()
    assert outcome.kind is EndKind.SUCCEEDED, outcome
    assert task.texts("o") == ["hello from the archive"]


def test_archive_with_another_digest_fails_the_setup(start: StartTask) -> None:
    task = start(a_task_spec(run="echo never", archive_digest="0" * 64))
    put_archive(task, greeting=b"x")
    outcome = task.run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert outcome.message.startswith("unpacking failed: the archive's SHA-256 is")
    assert outcome.started_at is None


def test_missing_archive_fails_the_setup(start: StartTask) -> None:
    assert start(a_task_spec(archive_digest="0" * 64)).run().kind is EndKind.SETUP_FAILED


def test_script_too_long_for_one_argument_still_runs(start: StartTask) -> None:
    task = start(a_task_spec(run="# " + "x" * 200_000 + "\necho long"))
    assert task.run().kind is EndKind.SUCCEEDED
    assert task.texts("o") == ["long"]


def test_environment_too_large_for_the_kernel_is_a_failed_setup(start: StartTask) -> None:
    outcome = start(a_task_spec(env={"BIG": "x" * 200_000})).run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "Argument list too long" in outcome.message


def test_time_limit_ends_the_task(start: StartTask) -> None:
    outcome = start(a_task_spec(run="sleep 300", time_limit_s=0.3)).run()
    assert (outcome.kind, outcome.message) == (EndKind.TIME_LIMIT, "the time limit of 0.3 s has passed")


def test_time_limit_covers_setup(start: StartTask) -> None:
    outcome = start(a_task_spec(setup="sleep 300", time_limit_s=0.3)).run()
    assert (outcome.kind, outcome.started_at) == (EndKind.TIME_LIMIT, None)


def test_sigterm_gives_the_ranks_their_grace_even_behind_a_shell(start: StartTask) -> None:
    # os.write, because the signal may come during a `print`, and a print inside a print raises
    program = "import os,signal,time\ndef f(*a): time.sleep(0.5); os.write(1,b'saved\\n'); os._exit(0)\n"
    program += "signal.signal(signal.SIGTERM,f); print('ready',flush=True); time.sleep(300)"
    task = start(a_task_spec(run=f'python -c "{program}"; echo not reached', grace_s=20.0))
    process = task.spawn()
    until(lambda: "ready" in task.texts(), describe=task.describe)
    assert spool.signal_supervisor(task.task)
    outcome = task.outcome()
    process.wait(20)
    assert outcome.kind is EndKind.STOPPED
    assert task.texts() == ["ready", "saved"]


@pytest.mark.parametrize("run", ["exec sleep 300", "sleep 300; exit $?"], ids=["program", "shell"])
def test_signal_to_all_processes_of_a_task_is_no_failure_of_its_rank(start: StartTask, run: str) -> None:
    task = start(a_task_spec(run=f"echo ready; {run}"))
    process = task.spawn()
    until(lambda: task.texts() == ["ready"], describe=task.describe)
    outcome = stop_all_processes(task, process)
    assert (outcome.kind, outcome.is_external_stop) == (EndKind.STOPPED, True)


@pytest.mark.parametrize("code", [1, 75])
def test_rank_that_exits_on_a_signal_to_all_has_not_failed(start: StartTask, code: int) -> None:
    task = start(a_task_spec(run=f"trap 'exit {code}' TERM; echo ready; while :; do sleep 0.01; done"))
    process = task.spawn()
    until(lambda: task.texts() == ["ready"], describe=task.describe)
    outcome = stop_all_processes(task, process)
    assert (outcome.kind, outcome.is_external_stop, outcome.exit_code) == (EndKind.STOPPED, True, None)


@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("run", ["exec {}", "{}; echo not reached"], ids=["program", "shell"])
def test_ranks_keep_their_grace_after_a_signal_to_all_processes(
    start: StartTask, run: str, max_restarts: int
) -> None:
    """No shell, sandbox or process that forks ranks ends them early."""
    program = "import os,signal,time\ndef f(*a): time.sleep(0.5); os.write(1,b'saved\\n'); os._exit(0)\n"
    program += "signal.signal(signal.SIGTERM,f); print('ready',flush=True); time.sleep(300)"
    run = run.format(f'python -c "{program}"')
    task = start(a_task_spec(run=run, grace_s=20.0, max_restarts=max_restarts))
    process = task.spawn()
    until(lambda: task.texts() == ["ready"], describe=task.describe)
    outcome = stop_all_processes(task, process)
    assert (outcome.kind, outcome.is_external_stop, outcome.restarts) == (EndKind.STOPPED, True, 0)
    assert task.texts() == ["ready", "saved"]


def test_rank_that_exits_0_on_a_signal_to_all_has_not_succeeded(start: StartTask) -> None:
    run = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    task = start(a_task_spec(run=run))
    process = task.spawn()
    until(lambda: task.texts() == ["ready"], describe=task.describe)
    process.send_signal(signal.SIGSTOP)  # it gets both signals at once
    ranks = tree.descendants(process.pid)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    started = spool.read_started(task.task)
    assert started is not None
    until(lambda: not tree.start_ticks_of(started.pids), describe=task.describe)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert task.outcome().kind is EndKind.STOPPED


def test_rank_that_ignores_sigterm_is_killed_after_the_grace_of_the_stop_file(start: StartTask) -> None:
    task = start(a_task_spec(run="trap '' TERM; echo ready; while :; do sleep 0.1; done", grace_s=300.0))
    task.spawn()
    until(lambda: task.texts() == ["ready"], describe=task.describe)
    spool.write_stop(task.task, spool.SpoolStop(grace_s=0.3, at=0.0))
    outcome = task.outcome()
    assert (outcome.kind, outcome.message) == (EndKind.STOPPED, "stopped as asked")


def test_stopped_rank_gets_the_stop_signal(start: StartTask) -> None:
    run = "trap 'echo saved; exit 0' TERM; echo ready; kill -STOP $$; while :; do sleep 0.05; done"
    task = start(a_task_spec(run=run, grace_s=300.0))
    task.spawn()
    until(lambda: task.texts() == ["ready"], describe=task.describe)
    assert spool.signal_supervisor(task.task)
    assert task.outcome().kind is EndKind.STOPPED
    assert task.texts() == ["ready", "saved"]


def test_stop_written_before_the_start_starts_nothing(start: StartTask) -> None:
    task = start(a_task_spec(run="echo never"))
    spool.write_stop(task.task, spool.SpoolStop(grace_s=1.0, at=0.0))
    outcome = task.run()
    assert (outcome.kind, outcome.started_at, task.texts()) == (EndKind.STOPPED, None, [])


def test_nothing_of_the_task_runs_when_its_outcome_is_written(start: StartTask) -> None:
    left = "setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 0.1; done' & echo $! > left"
    # Without walls, so that a pid there is a pid here.
    task = start(
        a_task_spec(run=f"{left}; echo ready; while [ ! -e go ]; do sleep 0.02; done", confinement=())
    )
    process = task.spawn()
    work = task.directory / "work"
    until(lambda: task.texts() == ["ready"], describe=task.describe)
    stat = Path(f"/proc/{(work / 'left').read_text().strip()}/stat")
    assert stat.exists()
    (work / "go").touch()
    # Without a pause, because a moment later the process would be gone anyway.
    while not Path(task.task.outcome).exists():
        assert process.poll() is None, task.describe()
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    process.wait(20)


def test_supervisor_ignores_hangup_and_interrupt(start: StartTask) -> None:
    task = start(a_task_spec(run="echo ready; while [ ! -e go ]; do sleep 0.05; done; echo done"))
    process = task.spawn()
    until(lambda: "ready" in task.texts(), describe=task.describe)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    (task.directory / "work" / "go").touch()
    assert task.outcome().kind is EndKind.SUCCEEDED
    assert task.texts() == ["ready", "done"]


def test_ranks_start_with_default_signal_handling(start: StartTask) -> None:
    task = start(a_task_spec(run="grep -E 'SigIgn|SigBlk' /proc/self/status"))
    task.run()
    # 32 and up are glibc's and real-time signals, which keep the state that a parent left
    usual = (1 << 31) - 1
    assert [int(line.split()[1], 16) & usual for line in task.texts()] == [0, 0]


def test_hits_of_log_rules_are_in_the_outcome(start: StartTask) -> None:
    rules = (
        LogRule(match="Xid 79", action=RuleAction.EXCLUDE_NODE),
        LogRule(match="never", action=RuleAction.STOP_RETRIES),
    )
    outcome = start(a_task_spec(run="echo NVRM Xid 79 >&2; exit 1", log_rules=rules)).run()
    assert outcome.rules_hit == (RuleAction.EXCLUDE_NODE,)


def test_secrets_and_job_token_reach_the_rank_but_no_file(start: StartTask) -> None:
    credentials = TaskCredentials(job_token="shj_token", secrets={"KEY": "very-secret-value"})
    task = start(a_task_spec(run='echo "$SHOAL_TOKEN ${#KEY}"'), credentials)
    task.run()
    assert task.texts() == ["shj_token 17"]
    for path in task.directory.rglob("*"):
        if path.is_file():
            assert b"very-secret-value" not in path.read_bytes(), path


def test_log_limit_drops_further_lines_and_the_job_keeps_running(start: StartTask) -> None:
    limits = {"cpus": 1.0, "max_log_bytes": 2000}
    task = start(a_task_spec(run="seq 100000; echo finished > proof", **limits))
    assert task.run().kind is EndKind.SUCCEEDED
    assert "limit of 2000 bytes" in task.texts("e")[-1]
    assert (task.directory / "work" / "proof").exists()


@pytest.mark.parametrize("node_rank", [0, 1])
def test_replica_gets_its_key_path_and_port_on_every_node(start: StartTask, node_rank: int) -> None:
    task_spec = a_task_spec(
        node=f"node-{node_rank}",
        node_rank=node_rank,
        nodes=("node-0", "node-1"),
        probe=ProbeSpec(service_path="/demo/chat"),
        run='echo "$SHOAL_REPLICA_KEY $SHOAL_SERVICE_PATH"; test -n "$PORT" -a "$PORT" = "$SHOAL_PORT"',
    )
    task = start(task_spec, TaskCredentials(replica_secret="s3cret"))
    assert task.run().kind is EndKind.SUCCEEDED
    assert task.texts("o") == ["s3cret /demo/chat"]
