"""What the pages say about commands, fields, tests and each other is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cyclopts import CycloptsError, MissingArgumentError
from pydantic import BaseModel

from shoal.cli.arguments import name_stdin
from shoal.cli.main import build_app
from shoal.settings import OPTIONS, ServerLimits
from shoal.spec import CheckpointSpec, JobSpec, Resources, RetrySpec
from shoal.spec.files import read_job
from shoal.spec.launchers import launcher_request
from tests.style.tree import ROOT
from tests.support.docs_pages import FENCE, blocks, pages, transcript

GENERATED = ROOT / "docs" / "reference" / "cli.md"
PAGES = [page for page in pages() if page != GENERATED]
GUIDES, REFERENCE = ROOT / "docs" / "guides", ROOT / "docs" / "reference"
OPERATORS = {"&&", "||", "|", ";", "&", ">", "2>&1"}
MAX_README_WIDTH = 120
NAMED_TEST = re.compile(r"tests/[\w/]+(?:\.py)?")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shoal_commands(line: str) -> list[list[str]]:
    """The `shoal` commands in a line of shell, as words after `shoal`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in OPERATORS or set(word) <= set("();<>|&"):
            found.append([])
        elif found[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            found[-1].append(word)
    return [words[1:] for words in found if words[:1] == ["shoal"]]


def typed_lines(page: Path) -> list[str]:
    """Every line a reader is shown to type: `$` lines of transcripts, and lines of `sh` blocks."""
    found: list[str] = []
    for block in blocks(page):
        if block.language == "console":
            found += [typed.command for typed in transcript(block)]
        elif block.language == "sh":
            found += block.text.splitlines()
    return [line for line in found if re.search(r"\bshoal\b", line)]


def mentioned(page: Path) -> list[str]:
    """Commands in running text: between backquotes, beginning with `shoal`, perhaps without arguments."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    spans = [" ".join(span.split()) for span in re.findall(r"`(shoal [^`]+)`", text)]
    return [span for span in spans if "..." not in span]


def refusal(words: list[str], *, is_complete: bool) -> str | None:
    """Why the command line would be refused before anything runs, or None."""
    head = name_stdin(words[: words.index("--")] if "--" in words else words)
    try:
        build_app(head[0] if head else None).parse_args(
            head or ["--help"], exit_on_error=False, print_error=False
        )
    except MissingArgumentError as wrong:
        return str(wrong) if is_complete else None
    except CycloptsError as wrong:
        return str(wrong)
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_line_to_type_is_one_that_exists(page: Path) -> None:
    lines = [(line, words) for line in typed_lines(page) for words in shoal_commands(line)]
    assert {line: why for line, words in lines if (why := refusal(words, is_complete=True))} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_is_mentioned_exists_with_its_options(page: Path) -> None:
    lines = [(span, words) for span in mentioned(page) for words in shoal_commands(span)]
    assert {span: why for span, words in lines if (why := refusal(words, is_complete=False))} == {}


def ranks_that_differ(words: list[str]) -> bool:
    """Whether the launcher behind `--` asks for another number of ranks than the flags before it give."""
    if "--ranks-per-node" not in words or "--" not in words:
        return False
    asked = launcher_request(" ".join(words[words.index("--") + 1 :])).per_node
    # One rank on each node leaves the processes to the launcher.
    return asked is not None and words[words.index("--ranks-per-node") + 1] not in ("1", str(asked))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_launcher_to_type_asks_for_ranks_that_its_job_does_not_have(page: Path) -> None:
    lines = [(line, words) for line in typed_lines(page) for words in shoal_commands(line)]
    assert [line for line, words in lines if ranks_that_differ(words)] == []


def test_the_pages_people_start_with_type_commands() -> None:
    for page in ("README.md", "docs/quickstart.md"):
        assert len(typed_lines(ROOT / page)) >= 8


@pytest.mark.parametrize(
    ("line", "commands"),
    [
        ("shoal down; shoal up --demo 2x1", [["down"], ["up", "--demo", "2x1"]]),
        ("A=1 shoal run -- sh -c 'a; b' || echo $?", [["run", "--", "sh", "-c", "a; b"]]),
        ("shoal logs 1   # shoal nothing", [["logs", "1"]]),
        ("cat shoal.txt", []),
    ],
)
def test_commands_are_found_in_lines_of_shell(line: str, commands: list[list[str]]) -> None:
    assert shoal_commands(line) == commands


def test_commands_and_options_that_do_not_exist_are_found_out() -> None:
    assert refusal(["lauch"], is_complete=False)
    assert refusal(["project", "add-member"], is_complete=False)
    assert refusal(["up", "--engine", "local"], is_complete=False)
    assert refusal(["why"], is_complete=True)
    assert refusal(["why"], is_complete=False) is None


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_page_and_its_section(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    wrong = []
    for link in (link for link in links if "://" not in link):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_test_that_is_named_exists(page: Path) -> None:
    named = set(NAMED_TEST.findall(page.read_text(encoding="utf-8")))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_lines_of_the_readme_fit_an_editor() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > MAX_README_WIDTH] == []


def test_the_readme_lists_every_guide() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Where to read on")[2]
    linked = set(re.findall(r"\(docs/guides/([\w-]+\.md)\)", text))
    assert sorted(page.name for page in GUIDES.glob("*.md") if page.name not in linked) == []


def test_every_row_of_the_recovery_table_names_what_shows_it() -> None:
    text = (GUIDES / "recovery.md").read_text(encoding="utf-8")
    rows = [row for row in text.partition("| shown by |\n")[2].partition("\n\n")[0].splitlines()[1:] if row]
    silent = [row for row in rows if not NAMED_TEST.search(row) and "not tested" not in row]
    assert len(rows) > 10
    assert silent == []


@pytest.mark.parametrize(
    "model", [JobSpec, Resources, RetrySpec, CheckpointSpec], ids=lambda model: model.__name__
)
def test_every_field_of_a_job_is_explained(model: type[BaseModel]) -> None:
    text = (REFERENCE / "jobs.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))
    assert [field for field in model.model_fields if field not in words] == []


def test_every_default_of_the_reference_is_the_one_in_force() -> None:
    text = (REFERENCE / "jobs.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", text, re.MULTILINE))
    spec = JobSpec(run="true")
    assert (said["grace"].strip(), spec.grace) == ("30s", 30.0)
    assert (said["fence"].strip(), spec.fence) == ("30m", 1800.0)
    assert (said["priority"].strip(), spec.priority) == ("0", 0)
    assert (said["retry"].strip(), spec.retry.max, spec.retry.backoff) == ("0", 0, 5.0)
    assert (said["queue"].strip(), said["workdir"].strip()) == (spec.queue, spec.workdir)
    assert {name for name, default in said.items() if default.strip() == "needed"} == {"run"}


@pytest.mark.parametrize("page", ["README.md", "docs/guides/jobs.md", "docs/quickstart.md"])
def test_every_job_file_that_is_shown_is_one(page: str) -> None:
    files = [block.text for block in blocks(ROOT / page) if block.language == "yaml"]
    assert [read_job(text.encode(), page).run for text in files] != []


def test_every_setting_of_the_server_is_named_for_operators() -> None:
    text = (REFERENCE / "server.md").read_text(encoding="utf-8")
    names = [*OPTIONS, *ServerLimits.__dataclass_fields__]
    assert [name for name in names if f"SHOAL_{name.upper()}" not in text] == []
