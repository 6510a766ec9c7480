"""How a share can end, each way with real processes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import tarfile
from pathlib import Path

import pytest

from shoal.runtime import spool, tree
from shoal.wire import Credentials, EndKind, LeftBehind, Limits, LogRule, Probe, RuleAction, Written
from tests.support.shares import RunningShare, Start, an_order, told_to_end, until


def test_share_whose_ranks_all_exit_0_has_succeeded(start: Start) -> None:
    share = start(an_order(ranks_per_node=3, run="echo $RANK of $WORLD_SIZE; echo oops >&2"))
    outcome = share.run()
    assert (outcome.kind, outcome.exit_code, outcome.message) == (EndKind.SUCCEEDED, None, "")
    assert sorted(share.texts("o")) == ["0 of 3", "1 of 3", "2 of 3"]
    assert share.texts("e") == ["oops"] * 3
    assert outcome.started_at is not None
    assert outcome.started_at <= outcome.ended_at


def test_first_failing_rank_its_code_and_its_last_words_are_reported_and_the_others_stopped(
    start: Start,
) -> None:
    run = 'if [ $RANK = 5 ]; then echo "ValueError: bad batch" >&2; exit 3; fi; sleep 300'
    share = start(an_order(ranks_per_node=2, node_rank=2, nodes=("a", "b", "node-1"), run=run))
    outcome = share.run()
    assert (outcome.kind, outcome.exit_code, outcome.rank) == (EndKind.EXITED, 3, 5)
    assert outcome.message == "rank 5 exited with code 3\nValueError: bad batch"


def test_files_that_are_lost_with_the_share_are_counted(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o777)
    kept.chmod(0o777)
    run = "mkdir out .cache; echo 12345 > out/model.pt; echo x > ckpt/model.pt; touch empty; echo > .cache/c"
    order = an_order(setup="echo made > by_setup", run=run, checkpoint_dir=str(kept), checkpoint_path="ckpt")
    outcome = start(order).run()
    assert (outcome.kind, outcome.message) == (EndKind.SUCCEEDED, "")
    assert outcome.written == Written(num_files=1, num_bytes=6, names=("out/model.pt",), folder="out")


def test_nodes_that_share_a_folder_find_what_the_first_wrote_and_lose_nothing(
    start: Start, tmp_path: Path
) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    shared = {"checkpoint_dir": str(directory), "checkpoint_path": "ckpt", "has_shared_folder": True}
    nodes = ("node-1", "node-2")
    first = start(
        an_order(**shared, nodes=nodes, setup="echo s >> setups", run="echo hi > made; pwd; echo $PWD")
    )
    outcome = first.run()
    assert (outcome.kind, outcome.written) == (EndKind.SUCCEEDED, None), outcome
    second = start(
        an_order(**shared, node="node-2", node_rank=1, nodes=nodes, run="cat made setups; pwd; ls -d ckpt/")
    )
    assert second.run().kind is EndKind.SUCCEEDED
    (place, told), words = first.texts("o"), second.texts("o")
    assert place == told == words[-2] == f"{directory}/.shared/{first.order.attempt_id}"
    assert words == ["hi", "s", place, "ckpt/"]


def test_a_file_that_stayed_behind_is_named_in_the_reason(start: Start) -> None:
    behind = LeftBehind(folder="/home/ana/x", ignored=("data/train.bin",))
    outcome = start(an_order(run="cat data/train.bin", left_behind=behind)).run()
    assert "; `data/train.bin` was not found; it is in the folder" in outcome.message.partition("\n")[0]
    assert outcome.message.endswith("No such file or directory")


def test_signal_that_was_not_ours_is_reported_as_such(start: Start) -> None:
    outcome = start(an_order(run="kill -SEGV $$")).run()
    assert (outcome.kind, outcome.signal, outcome.exit_code) == (EndKind.SIGNALED, signal.SIGSEGV, None)
    assert "SIGSEGV" in outcome.message


def test_missing_executable_is_said_in_words(start: Start) -> None:
    outcome = start(an_order(run="no-such-program --x")).run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 127)
    assert outcome.message.startswith("rank 0 exited with code 127: program `no-such-program` not found\n")


def test_executable_that_setup_misses_is_said_in_words(start: Start) -> None:
    outcome = start(an_order(setup="no-such-program --x", run="echo never")).run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.SETUP_FAILED, 127)
    assert "exited with code 127: program `no-such-program` not found\n" in outcome.message


def test_setup_runs_once_before_the_ranks_in_the_same_directory(start: Start) -> None:
    share = start(an_order(setup="echo once >> made; echo preparing", run="cat made", ranks_per_node=2))
    assert share.run().kind is EndKind.SUCCEEDED
    assert share.texts("o") == ["once", "once"]
    assert ("-", "s", "preparing") in share.log()


def test_failing_setup_starts_no_rank(start: Start) -> None:
    share = start(an_order(setup="echo no such package >&2; exit 9", run="echo never"))
    outcome = share.run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.SETUP_FAILED, 9)
    assert outcome.started_at is None
    assert outcome.message == "setup exited with code 9\nno such package"
    assert share.texts("o") == []


def put_archive(share: RunningShare, **files: bytes) -> str:
    with tarfile.open(share.share.archive, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return hashlib.sha256(Path(share.share.archive).read_bytes()).hexdigest()


def test_archive_is_unpacked_where_the_ranks_start(start: Start) -> None:
    share = start(an_order())
    digest = put_archive(share, greeting=b"hello from the archive\n")
    spool.write_order(share.share, an_order(run="cat greeting; touch mine", archive_digest=digest))
    outcome = share.run()
    assert outcome.kind is EndKind.SUCCEEDED, outcome
    assert share.texts("o") == ["hello from the archive"]


def test_archive_with_another_digest_fails_the_setup(start: Start) -> None:
    share = start(an_order(run="echo never", archive_digest="0" * 64))
    put_archive(share, greeting=b"x")
    outcome = share.run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert outcome.message.startswith("unpacking failed: the archive's SHA-256 is")
    assert outcome.started_at is None


def test_missing_archive_fails_the_setup(start: Start) -> None:
    assert start(an_order(archive_digest="0" * 64)).run().kind is EndKind.SETUP_FAILED


def test_script_too_long_for_one_argument_still_runs(start: Start) -> None:
    share = start(an_order(run="# " + "x" * 200_000 + "\necho long"))
    assert share.run().kind is EndKind.SUCCEEDED
    assert share.texts("o") == ["long"]


def test_environment_too_large_for_the_kernel_is_a_failed_setup(start: Start) -> None:
    outcome = start(an_order(env={"BIG": "x" * 200_000})).run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "Argument list too long" in outcome.message


def test_time_limit_ends_it(start: Start) -> None:
    outcome = start(an_order(run="sleep 300", time_limit_s=0.3)).run()
    assert (outcome.kind, outcome.message) == (EndKind.TIME_LIMIT, "the time limit of 0.3 s has passed")


def test_time_limit_covers_setup(start: Start) -> None:
    outcome = start(an_order(setup="sleep 300", time_limit_s=0.3)).run()
    assert (outcome.kind, outcome.started_at) == (EndKind.TIME_LIMIT, None)


def test_sigterm_gives_the_ranks_their_grace_even_behind_a_shell(start: Start) -> None:
    # os.write: the signal may come while `print` is not quite through, and a print inside a print raises.
    program = "import os,signal,time\ndef f(*a): time.sleep(0.5); os.write(1,b'saved\\n'); os._exit(0)\n"
    program += "signal.signal(signal.SIGTERM,f); print('ready',flush=True); time.sleep(300)"
    share = start(an_order(run=f'python -c "{program}"; echo not reached', grace_s=20.0))
    process = share.spawn()
    until(lambda: "ready" in share.texts(), describe=share.describe)
    assert spool.signal_supervisor(share.share)
    outcome = share.outcome()
    process.wait(20)
    assert outcome.kind is EndKind.STOPPED
    assert share.texts() == ["ready", "saved"]


@pytest.mark.parametrize("run", ["exec sleep 300", "sleep 300; exit $?"], ids=["program", "shell"])
def test_signal_to_all_of_a_share_is_no_failure_of_its_rank(start: Start, run: str) -> None:
    share = start(an_order(run=f"echo ready; {run}"))
    process = share.spawn()
    until(lambda: share.texts() == ["ready"], describe=share.describe)
    outcome = told_to_end(share, process)
    assert (outcome.kind, outcome.is_unasked) == (EndKind.STOPPED, True)


@pytest.mark.parametrize("code", [1, 75])
def test_rank_that_ends_in_its_own_way_because_it_was_told_to_has_not_failed(start: Start, code: int) -> None:
    share = start(an_order(run=f"trap 'exit {code}' TERM; echo ready; while :; do sleep 0.01; done"))
    process = share.spawn()
    until(lambda: share.texts() == ["ready"], describe=share.describe)
    outcome = told_to_end(share, process)
    assert (outcome.kind, outcome.is_unasked, outcome.exit_code) == (EndKind.STOPPED, True, None)


@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("run", ["exec {}", "{}; echo not reached"], ids=["program", "shell"])
def test_signal_to_all_of_a_share_leaves_its_ranks_their_grace(
    start: Start, run: str, max_restarts: int
) -> None:
    """Neither a shell, nor the sandbox, nor the process that forks ranks takes them along."""
    program = "import os,signal,time\ndef f(*a): time.sleep(0.5); os.write(1,b'saved\\n'); os._exit(0)\n"
    program += "signal.signal(signal.SIGTERM,f); print('ready',flush=True); time.sleep(300)"
    run = run.format(f'python -c "{program}"')
    share = start(an_order(run=run, grace_s=20.0, max_restarts=max_restarts))
    process = share.spawn()
    until(lambda: share.texts() == ["ready"], describe=share.describe)
    outcome = told_to_end(share, process)
    assert (outcome.kind, outcome.is_unasked, outcome.restarts) == (EndKind.STOPPED, True, 0)
    assert share.texts() == ["ready", "saved"]


def test_rank_that_ends_well_because_it_was_told_to_has_not_succeeded(start: Start) -> None:
    run = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    share = start(an_order(run=run))
    process = share.spawn()
    until(lambda: share.texts() == ["ready"], describe=share.describe)
    process.send_signal(signal.SIGSTOP)  # it hears of both at once
    ranks = tree.descendants(process.pid)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    started = spool.read_started(share.share)
    assert started is not None
    until(lambda: not tree.living(started.pids), describe=share.describe)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert share.outcome().kind is EndKind.STOPPED


def test_rank_that_ignores_sigterm_is_killed_after_the_grace_of_the_stop_file(start: Start) -> None:
    share = start(an_order(run="trap '' TERM; echo ready; while :; do sleep 0.1; done", grace_s=300.0))
    share.spawn()
    until(lambda: share.texts() == ["ready"], describe=share.describe)
    spool.write_stop(share.share, spool.Stop(grace_s=0.3, at=0.0))
    outcome = share.outcome()
    assert (outcome.kind, outcome.message) == (EndKind.STOPPED, "stopped as asked")


def test_rank_that_is_stopped_hears_that_it_is_to_end(start: Start) -> None:
    run = "trap 'echo saved; exit 0' TERM; echo ready; kill -STOP $$; while :; do sleep 0.05; done"
    share = start(an_order(run=run, grace_s=300.0))
    share.spawn()
    until(lambda: share.texts() == ["ready"], describe=share.describe)
    assert spool.signal_supervisor(share.share)
    assert share.outcome().kind is EndKind.STOPPED
    assert share.texts() == ["ready", "saved"]


def test_stop_written_before_the_start_starts_nothing(start: Start) -> None:
    share = start(an_order(run="echo never"))
    spool.write_stop(share.share, spool.Stop(grace_s=1.0, at=0.0))
    outcome = share.run()
    assert (outcome.kind, outcome.started_at, share.texts()) == (EndKind.STOPPED, None, [])


def test_when_there_is_an_outcome_nothing_of_the_share_runs_any_more(start: Start) -> None:
    left = "setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 0.1; done' & echo $! > left"
    # No walls, so that a pid there is a pid here.
    share = start(an_order(run=f"{left}; echo ready; while [ ! -e go ]; do sleep 0.02; done", confinement=()))
    process = share.spawn()
    work = share.directory / "work"
    until(lambda: share.texts() == ["ready"], describe=share.describe)
    stat = Path(f"/proc/{(work / 'left').read_text().strip()}/stat")
    assert stat.exists()
    (work / "go").touch()
    # Without a pause: a moment later it would be gone in any case.
    while not Path(share.share.outcome).exists():
        assert process.poll() is None, share.describe()
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    process.wait(20)


def test_hangup_and_interrupt_do_not_disturb_a_supervisor(start: Start) -> None:
    share = start(an_order(run="echo ready; while [ ! -e go ]; do sleep 0.05; done; echo done"))
    process = share.spawn()
    until(lambda: "ready" in share.texts(), describe=share.describe)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    (share.directory / "work" / "go").touch()
    assert share.outcome().kind is EndKind.SUCCEEDED
    assert share.texts() == ["ready", "done"]


def test_ranks_start_with_the_usual_signals(start: Start) -> None:
    share = start(an_order(run="grep -E 'SigIgn|SigBlk' /proc/self/status"))
    share.run()
    # 32 and up are glibc's and real-time signals: what a parent left of those, nobody here can reset.
    usual = (1 << 31) - 1
    assert [int(line.split()[1], 16) & usual for line in share.texts()] == [0, 0]


def test_log_rules_that_hit_are_in_the_outcome(start: Start) -> None:
    rules = (
        LogRule(match="Xid 79", action=RuleAction.EXCLUDE_NODE),
        LogRule(match="never", action=RuleAction.STOP_RETRIES),
    )
    outcome = start(an_order(run="echo NVRM Xid 79 >&2; exit 1", log_rules=rules)).run()
    assert outcome.rules_hit == (RuleAction.EXCLUDE_NODE,)


def test_secrets_and_job_token_reach_the_rank_and_no_file(start: Start) -> None:
    credentials = Credentials(job_token="shj_token", secrets={"KEY": "very-secret-value"})
    share = start(an_order(run='echo "$SHOAL_TOKEN ${#KEY}"'), credentials)
    share.run()
    assert share.texts() == ["shj_token 17"]
    for path in share.directory.rglob("*"):
        if path.is_file():
            assert b"very-secret-value" not in path.read_bytes(), path


def test_log_limit_drops_further_lines_and_the_job_runs_on(start: Start) -> None:
    limits = Limits(cpus=1.0, max_log_bytes=2000)
    share = start(an_order(run="seq 100000; echo finished > proof", limits=limits))
    assert share.run().kind is EndKind.SUCCEEDED
    assert "limit of 2000 bytes" in share.texts("e")[-1]
    assert (share.directory / "work" / "proof").exists()


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_replica_finds_its_key_path_and_port_on_every_node(start: Start, node_rank: int) -> None:
    order = an_order(
        node=f"node-{node_rank}",
        node_rank=node_rank,
        nodes=("node-0", "node-1"),
        probe=Probe(service_path="/demo/chat"),
        run='echo "$SHOAL_REPLICA_KEY $SHOAL_SERVICE_PATH"; test -n "$PORT" -a "$PORT" = "$SHOAL_PORT"',
    )
    share = start(order, Credentials(replica_secret="s3cret"))
    assert share.run().kind is EndKind.SUCCEEDED
    assert share.texts("o") == ["s3cret /demo/chat"]
