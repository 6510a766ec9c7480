"""Job files: every mistake at once, each with its line; YAML's traps defused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.spec import JobSpec
from shoal.spec.files import load_job, load_service, read_job


def read(text: str, **flags: Any) -> JobSpec:
    return read_job(text.encode(), "job.yaml", flags)


def problems(text: str, **flags: Any) -> tuple[str, ...]:
    with pytest.raises(SpecError) as refused:
        read(text, **flags)
    return refused.value.problems


EIGHT_MISTAKES = """\
name: -train
resources:
  gpu: H100:8
  nodes: 4..2
  memory: 32G
time_limit: soon
retry:
  on: [exits]
name: again
mounts:
  /data: srv/data
"""


def test_eight_mistakes_and_a_missing_command_are_reported_in_one_go_with_their_lines() -> None:
    sentences = problems(EIGHT_MISTAKES)
    assert [sentence.partition(": ")[0] for sentence in sentences] == [
        f"job.yaml:{line}" for line in (1, 1, 3, 4, 5, 6, 8, 9, 11)
    ]
    assert "job.yaml:3: unknown key `gpu` in `resources`; did you mean `gpus`?" in sentences
    assert "job.yaml:9: key `name` is written twice, first on line 1; keep one" in sentences


def test_a_whole_file_means_what_it_says() -> None:
    spec = read("""
        name: train-7b
        project: vision
        priority: 10
        time_limit: 12:00:00
        resources: {gpus: H100:8, nodes: 2..4, cpus: 4+, memory: 32GB.., disk: 1TB}
        run: |
          python train.py
        env: {LR: 3e-4, SEED: 007, DEBUG: yes, RATIO: 0.10, ON: true}
        retry: {max: 2, on: [exit, oom], backoff: 10s}
        array: 0..9
        after: [17, vision/18]
    """)
    assert spec.time_limit == 43200
    assert spec.env == {"LR": "3e-4", "SEED": "007", "DEBUG": "yes", "RATIO": "0.10", "ON": "true"}
    assert spec.retry.on == ("exit", "oom")
    assert spec.array is not None
    assert spec.array.indices == tuple(range(10))
    assert [after.job for after in spec.after] == ["17", "vision/18"]
    assert spec.run == "python train.py\n"


def test_only_what_yaml_1_2_calls_a_boolean_or_a_number_is_one() -> None:
    assert problems("run: x\npriority: 010\n") == (
        "job.yaml:2: `priority` must be a whole number, not the text `010`",
    )
    assert problems("run: yes\nname: no\nmounts: [{source: /a, target: /b, read_only: on}]") == (
        "job.yaml:3: `mounts[0].read_only` must be `true` or `false`, not the text `on`",
    )


def test_a_mistake_in_a_mapping_that_stands_for_a_list_has_its_own_line() -> None:
    assert problems("run: x\nlog_rules:\n  Xid: exclude_node\n  oom: retry\n")[0].startswith("job.yaml:4: ")
    assert problems("run: x\nmounts:\n- /a:/b\n- {source: /c, target: d}\n")[0].startswith("job.yaml:4: ")


def test_an_environment_variable_without_a_value_is_asked_for() -> None:
    assert problems("run: x\nenv:\n  A:\n") == ("job.yaml:3: `env.A` has no value; give it one or remove it",)
    assert read('run: x\nenv:\n  A: ""\n').env == {"A": ""}


def test_anchors_and_aliases_work_where_they_are_plain() -> None:
    spec = read("run: x\nresources:\n  memory: &big 32GB\n  disk: *big\n")
    assert spec.resources.memory == spec.resources.disk


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml:1: `run` is missing; write the command to run"),
        ("# nothing\n", "job.yaml:1: `run` is missing"),
        ("- run\n", "job.yaml:1: a job file is a mapping"),
        ("just text", "job.yaml:1: a job file is a mapping"),
        ("run: x\n---\nrun: y\n", "job.yaml:2: a second document begins here"),
        (
            "run: !!python/object:os.system x\n",
            "job.yaml:1: the tag `tag:yaml.org,2002:python/object:os.system`",
        ),
        ("run: !x y\n", "job.yaml:1: the tag `!x`"),
        ("run: x\nenv: *nothing\n", "job.yaml:2: the alias `*nothing` names nothing"),
        ("run: x\nenv: &e {A: *e}\n", "job.yaml:2: the alias `*e` names nothing"),
        ("run: [x\nenv: {", "job.yaml:2: not YAML"),
        ("run: x\n\tenv: y\n", "job.yaml:2: not YAML"),
        ("run: x\n? [a, b]\n: c\n", "job.yaml:2: a key must be text"),
        ("run: x\n<<: {name: y}\n", "job.yaml:2: unknown key `<<`"),
        ('run: "\\0"\n', "job.yaml:1: `run` has a NUL character"),
        ("run: x\n\x01\n", "not YAML"),
    ],
)
def test_text_that_is_no_job_file_is_refused_with_the_line(text: str, message: str) -> None:
    sentences = problems(text)
    assert len(sentences) == 1, sentences
    assert message in sentences[0]


@pytest.mark.parametrize("text", ["def f(:\n  x\n", "print('hello')\n", ""])
def test_program_given_as_a_job_file_gets_the_command_that_runs_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "boom.py"
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        load_job(path)
    assert refused.value.hint == f"run a program with `shoal run -- python {path}`"
    with pytest.raises(SpecError) as refused:
        load_service(path)
    service = f"{tmp_path}/boom.yaml"
    hint = f"write `run: exec python {path}` and a `name` into {service}, and type `shoal serve` with it"
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("name", "text", "runner"),
    [
        ("job", "#!/bin/bash\npython train.py\n", "bash"),
        ("train.sh", "#!/usr/bin/env bash\nset -e\n", "bash"),
        ("train.sbatch", "#!/bin/bash -l\nsrun: x: y\n", "bash"),
        ("train", "#! /usr/bin/env -S python3 -u\nimport torch\n", "python3"),
    ],
)
def test_script_without_an_ending_is_recognised_by_its_first_line(
    tmp_path: Path, name: str, text: str, runner: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        load_job(path)
    assert refused.value.hint == f"run a program with `shoal run -- {runner} {path}`"


def test_sbatch_file_gets_the_flags_that_replace_its_directives(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
    with pytest.raises(SpecError) as refused:
        load_job(path)
    assert refused.value.hint == (
        f"run a program with `shoal run -- bash {path}`; its `#SBATCH` lines are not read: "
        "give `--nodes`, `--gpus` and `--time-limit` before the `--`"
    )


def test_a_file_that_is_not_utf8_names_the_byte_and_the_line() -> None:
    with pytest.raises(SpecError, match=r"job\.yaml:2: byte 13 is not UTF-8"):
        read_job(b"run: x\nname: \xff\n", "job.yaml")


def test_a_byte_order_mark_is_not_part_of_the_first_key() -> None:
    assert read("\ufeffrun: x\n").run == "x"


def test_a_file_that_is_missing_or_a_folder_says_what_to_look_at(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, Path("a\0b")):
        with pytest.raises(SpecError, match="cannot read the job file") as refused:
            load_job(path)
        assert refused.value.hint == "list the files here with `ls *.yaml`"


def test_a_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("run: x\nnam: y\n")
    with pytest.raises(SpecError) as refused:
        load_job(tmp_path / "job.yaml")
    assert refused.value.problems == (f"{tmp_path}/job.yaml:2: unknown key `nam`; did you mean `name`?",)
    assert refused.value.message == refused.value.problems[0]


def test_flags_win_over_the_file_value_by_value() -> None:
    spec = read(
        "run: x\nresources: {gpus: 8, nodes: 2}\nenv: {A: 1, B: 2}\nretry: 3\nmounts: [/a:/b]\n",
        gpus=0,
        env=["B=3"],
        retry_on="oom",
        mounts=("/c:/d",),
        name=None,
    )
    assert spec.resources.gpus is None
    assert spec.resources.nodes.max == 2
    assert spec.env == {"A": "1", "B": "3"}
    assert (spec.retry.max, spec.retry.on) == (3, ("oom",))
    assert [mount.target for mount in spec.mounts] == ["/d"]


def test_flags_may_complete_a_file_without_a_command() -> None:
    assert read("name: x\n", run="python x.py").run == "python x.py"


def test_mistakes_of_a_file_and_of_flags_are_reported_together_each_by_its_own_name() -> None:
    assert problems(
        "run: x\nresources: {nodes: 0}\nretry: many\n", gpus="x:y", env=["A"], retry_on="omo"
    ) == (
        "`--env`: `A` has no `=`; write `A=value`",
        "`--gpus`: `x:y` is not GPUs such as `H100:8`, `H100`, `8` or `0.5`",
        "job.yaml:2: `resources.nodes`: `0` is below the least, 1",
        "job.yaml:3: `retry`: `many` is not a whole number",
    )
