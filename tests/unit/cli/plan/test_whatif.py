"""`shoal whatif` and `shoal plan` over small traces; neither talks to a control plane."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.fakes.api_server import Shell

JOBS = """\
submitted_at,run_s,num_gpus,project,limit_s
0,3600,8,vision,3600
0,3600,8,vision,3600
60,3600,8,nlp,3600
60,3600,16,nlp,3600
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS)
    return str(path)


def test_more_nodes_are_compared_overall_and_for_each_project(shell: Shell, trace: str) -> None:
    result = shell("whatif", trace, "--nodes", "2x8", "--add", "3x8")
    assert result.code == 0, result.err
    lines = [line.split() for line in result.out.splitlines()]
    assert result.out.startswith("simulated: jobs.csv, add 3x8\n")
    assert ["wait,", "max", "2.0h", "0s", "-100%"] in lines
    assert ["vision", "2", "0s", "0s", "=", "0s", "0s", "=", "0.0%", "0.0%"] in lines
    assert "USER" not in result.out, "the trace names none"


def test_a_trace_with_nothing_changed_is_simulated_once(shell: Shell, trace: str) -> None:
    result = shell("whatif", trace, "--nodes", "2x8", "--json").json()
    assert result["is_simulated"] is True
    assert "after" not in result
    assert result["before"]["overall"]["num_jobs"] == 4


def test_jobs_that_would_no_longer_fit_are_counted(shell: Shell, trace: str) -> None:
    result = shell("whatif", trace, "--nodes", "2x8", "--remove", "1x8", "--json").json()
    assert (result["before"]["num_refused"], result["after"]["num_refused"]) == (0, 1)


def test_flag_without_effect_is_refused_and_an_unread_column_is_named(
    shell: Shell, trace: str, tmp_path: Path
) -> None:
    result = shell("whatif", trace, "--nodes", "2x8", "--repair", "4h")
    assert result.code == 2
    assert "--mtbf 60d --repair 4h" in result.err
    assert shell("plan", trace, "--nodes", "2x8", "--target", "p95 wait < 1h", "--repair", "4h").code == 2
    (tmp_path / "other.csv").write_text("submitted_at,run_s,num_gpu,colour\n0,60,8,red\n")
    result = shell("whatif", str(tmp_path / "other.csv"), "--nodes", "64")
    assert result.code == 0, result.err
    assert "not read: `num_gpu` (did you mean `num_gpus`?), `colour`" in result.err


def test_power_cap_of_an_empty_rack_prints_a_warning(shell: Shell, trace: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("power_caps: {r9: 1000}\n")
    result = shell("whatif", trace, "--nodes", "2x8", "--policy", str(policy))
    assert result.code == 0, result.err
    assert "no node has the label `rack` with `r9`; no node says which rack it is in" in result.err


def test_a_quota_is_guaranteed_to_a_project(shell: Shell, trace: str) -> None:
    result = shell("whatif", trace, "--nodes", "1x8", "--quota", "nlp=8", "--json").json()
    assert result["changes"] == ["quota nlp=8"]
    before, after = (result[run]["projects"]["nlp"]["wait_s"]["mean"] for run in ("before", "after"))
    assert after <= before
    assert shell("whatif", trace, "--nodes", "1x8", "--quota", "npl=8").code == 2


def test_failures_factor_needs_a_failure_rate(shell: Shell, trace: str) -> None:
    refused = shell("whatif", trace, "--nodes", "2x8", "--failures", "2x")
    assert refused.code == 2
    assert "hint: --mtbf 60d --failures 2x" in refused.err
    result = shell(
        "whatif", trace, "--nodes", "2x8", "--mtbf", "1h", "--repair", "5m", "--failures", "2x",
        "--checkpoint", "10m,10s,30s", "--json",
    ).json()  # fmt: skip
    assert result["after"]["num_failures"] > result["before"]["num_failures"] > 0
    assert result["after"]["goodput"] < result["after"]["utilisation"]


def test_a_policy_comes_from_a_file(shell: Shell, trace: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("{}")
    assert shell("whatif", trace, "--nodes", "2x8", "--policy", str(policy)).code == 0
    policy.write_text("patient_s: 5")
    refused = shell("whatif", trace, "--nodes", "2x8", "--policy", str(policy))
    assert refused.code == 2
    assert "no policy field `patient_s`" in refused.err


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_is_drawn_and_the_same_twice(shell: Shell, trace: str, tmp_path: Path, ending: str) -> None:
    drawn = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.{ending}"
        result = shell("whatif", trace, "--nodes", "2x8", "--add", "1x8", "--plot", str(path))
        assert result.code == 0, result.err
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_a_plot_of_another_kind_is_refused(shell: Shell, trace: str, tmp_path: Path) -> None:
    refused = shell("whatif", trace, "--nodes", "2x8", "--plot", str(tmp_path / "a.gif"))
    assert "hint: --plot a.png" in refused.err


def test_a_plot_that_could_not_be_written_is_refused_first(shell: Shell, trace: str, tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "none" / "a.png", "there is no directory"),
        (tmp_path / "d.png", "is a directory"),
    ):
        (tmp_path / "d.png").mkdir(exist_ok=True)
        refused = shell("whatif", trace, "--nodes", "2x8", "--plot", str(path))
        assert refused.code == 2
        assert refused.out == ""
        assert why in refused.err


def test_trace_that_cannot_be_simulated_is_refused_with_a_sentence(
    shell: Shell, trace: str, tmp_path: Path
) -> None:
    wide = tmp_path / "wide.csv"
    wide.write_text("submitted_at,run_s,num_gpus\n0,60,100\n")
    refused = shell("whatif", str(wide), "--nodes", "2x8")
    assert "error: no job fits on these nodes, 16 GPUs in all" in refused.err
    assert "Is a directory" in shell("whatif", str(tmp_path), "--nodes", "2x8").err
    plan = ("plan", trace, "--nodes", "2x8", "--target", "p95 wait < 1h")
    assert "error: `--price -1`: 0 or more" in shell(*plan, "--price", "-1").err
    assert "`--horizon -1`: months from now" in shell(*plan, "--horizon", "-1").err
    assert "more than 1,000 times the jobs" in shell(*plan, "--growth", "1000000%/month").err


def test_a_table_without_any_size_says_which_column_has_the_gpus(shell: Shell, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("submitted_at,run_s,gpus\n0,60,8\n")
    refused = shell("whatif", str(trace), "--nodes", "2x8")
    assert "hint: the column is `num_gpus`; docs/guides/yardsticks.md lists" in refused.err


def test_without_matplotlib_it_says_what_to_install(
    shell: Shell, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = shell("whatif", trace, "--nodes", "2x8", "--plot", "a.png")
    assert refused.code == 2
    assert "hint: pip install 'shoal[plots]'" in refused.err


def test_the_smallest_cluster_is_planned_with_money_and_energy(shell: Shell, trace: str) -> None:
    result = shell(
        "plan", trace, "--nodes", "2xH100:8", "--target", "max wait < 5m", "--processes", "1",
        "--price", "2.5", "--watts", "700",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "smallest that meets `max wait < 5m`: 5xH100:8 (40 GPUs, +3 nodes)" in result.out
    assert "money: 72,000 a month (assumed: 2.5 a GPU-hour" in result.out
    assert "at most 28.0 kW (assumed: 700 W" in result.out


def test_a_plan_says_from_how_much_history_it_is_and_where_its_growth_comes_from(
    shell: Shell, trace: str, tmp_path: Path
) -> None:
    arguments = (
        "--nodes",
        "2x8",
        "--target",
        "max wait < 1d",
        "--processes",
        "1",
        "--price",
        "1",
        "--watts",
        "9",
    )
    result = shell("plan", trace, *arguments, "--growth", "30%/month")
    assert result.out.startswith(
        "simulated: 8 jobs, 2.20 times those of jobs.csv (30%/month over 3 months)\n"
    )
    assert "\nhistory: 60 s, 4 jobs: too short to say much about a month\n" in result.out
    assert "used or not; from 60 s of history)" in result.out
    assert "none while it is idle; from 60 s of history)" in result.out
    facts = shell("plan", trace, *arguments, "--json").json()["history"]
    assert facts == {"span_s": 60.0, "num_jobs": 4, "is_short": True}
    long = tmp_path / "long.csv"
    long.write_text(f"{JOBS}180000,60,8,nlp,60\n")
    result = shell("plan", str(long), *arguments)
    assert result.out.startswith("simulated: 5 jobs, 1.00 times those of long.csv\nhistory: 2.1d, 5 jobs\n")
    assert "of history" not in result.out


def test_without_prices_no_money_is_invented(shell: Shell, trace: str) -> None:
    result = shell("plan", trace, "--nodes", "2x8", "--target", "max wait < 5m", "--processes", "1")
    assert "money: not computed" in result.out
    assert "energy: not computed" in result.out


def test_a_plan_is_json(shell: Shell, trace: str) -> None:
    result = shell(
        "plan", trace, "--nodes", "2x8", "--target", "max wait < 5m", "--growth", "100%/month",
        "--horizon", "1", "--price", "1", "--processes", "1", "--json",
    ).json()  # fmt: skip
    assert result["times_the_jobs"] == 2
    assert result["num_devices"] == 8 * result["num_nodes"]
    assert result["money_per_month"] == result["num_devices"] * 720
    assert result["assumed"] == {"price": 1.0, "watts": None}


def test_missed_shares_of_users_are_printed(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "users.csv"
    header, *rows = JOBS.splitlines()
    users = ["ana", "ana", "bob", "cho"]
    lines = [f"{header},user", *(f"{row},{user}" for row, user in zip(rows, users, strict=True))]
    path.write_text("\n".join(lines))
    result = shell("whatif", str(path), "--nodes", "2x8", "--add", "3x8")
    assert result.code == 0, result.err
    worst = result.out.split("USER (WORST OFF)")[1].splitlines()[1].split()
    assert worst[0] in ("bob", "cho")
    assert worst[2] == "0.0%"


def test_pool_of_processors_cannot_fail(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "cpus.csv"
    path.write_text("submitted_at,run_s,num_cpus\n0,60,4\n")
    refused = shell("whatif", str(path), "--nodes", "16", "--mtbf", "1d")
    assert refused.code == 2
    assert "`--mtbf` is for nodes" in refused.err
