"""Select the files of a work directory that are sent with a job.

These are the files that git keeps, or all files if git is not used; plus those that `include` names, minus
those that `exclude` names. `exclude` is stronger. A Shoal home below the directory is never sent. The search
visits only a few more files than the limit, however many there are.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from shoal.client.left_behind import (
    MAX_EXCLUDED_BYTES,
    SKIPPED,
    LeftBehindFiles,
    PathMatcher,
    find_left_behind,
    truncate_names,
)
from shoal.errors import SpecError, TooLarge
from shoal.globs import problem_of
from shoal.home import holds_keys

PROGRESS_EVERY = 500
MAX_LOOKED = 200_000
"""Files and folders to visit for the patterns of `include`."""
MAX_EXCLUDED = 200
MAX_COMPARED = 2_000
"""Names to compare with a pattern that matches nothing, to suggest another."""
GIT_S = 60.0

Progress = Callable[[str], None]
"""Called now and then with a text that says what is being done."""
FileEntry = tuple[str, os.stat_result]


class Selection(NamedTuple):
    entries: list[FileEntry]
    """Files, links and, without git, empty folders, by sorted relative name."""
    left_behind: LeftBehindFiles


def select(
    root: Path, include: Sequence[str], exclude: Sequence[str], max_files: int, progress: Progress
) -> Selection:
    """Raise `SpecError` for an invalid pattern, or one of `include` that matches nothing; or `TooLarge`."""
    wanted, unwanted = _globs("include", include), _globs("exclude", exclude)
    entries: list[FileEntry] = []
    seen: list[str] = []
    is_by_git, default_names, not_entered = _default_names(root, unwanted, max_files, progress)
    excluded = not_entered[:MAX_EXCLUDED]
    for folder in not_entered:
        wanted.skip(folder)
        unwanted.skip(folder)
    for name, facts in _entries(root, [*default_names, *_included(root, wanted, unwanted)]):
        seen.append(name)
        is_folder = stat.S_ISDIR(facts.st_mode)
        if wanted.patterns:
            wanted.matches(name, is_folder=is_folder)
        if unwanted.patterns and unwanted.matches(name, is_folder=is_folder):
            excluded += [name] if len(excluded) < MAX_EXCLUDED else []
            continue
        entries.append((name, facts))
        if len(entries) > max_files:
            raise too_many(root, (name for name, _ in entries), max_files)
    left_behind = find_left_behind(
        root, is_by_git=is_by_git, is_sent=set(seen).__contains__, unwanted=unwanted
    )
    for pattern in wanted.unused:
        raise _names_nothing(root, pattern, (*seen, *left_behind.ignored), unwanted)
    named = truncate_names(excluded, MAX_EXCLUDED_BYTES)
    return Selection(entries, left_behind._replace(excluded=named, unused_patterns=tuple(unwanted.unused)))


def _globs(field: str, patterns: Sequence[str]) -> PathMatcher:
    for pattern in patterns:
        problem = problem_of(pattern)
        if problem is not None:
            raise SpecError(f"`{field}`: `{pattern}` {problem}")
    return PathMatcher(patterns)


def _default_names(
    root: Path, unwanted: PathMatcher, max_files: int, progress: Progress
) -> tuple[bool, list[str], list[str]]:
    """Return whether git listed the names, the names, and the folders not entered because `exclude` names
    them.

    The first few other files that `exclude` names are among the names; none of them counts for the limit.
    """
    names = _git_names(root)
    if names:
        return True, names, []
    not_entered: list[str] = []
    excluded: list[str] = []

    def is_entered(folder: str) -> bool:
        if os.path.basename(folder) in SKIPPED:  # noqa: PTH119 - as often as there are folders
            return False
        is_unwanted = unwanted.matches(folder, is_folder=True)
        if is_unwanted:
            not_entered.append(f"{folder}/")
        return not is_unwanted

    for num_looked, name in enumerate(_walk(root, "", is_entered), 1):
        if num_looked % PROGRESS_EVERY == 0:
            progress(f"reading the work directory: {num_looked:,} files ...")
        if unwanted.matches(name):
            excluded += [name] if len(excluded) < MAX_EXCLUDED else []
            continue
        names.append(name)
        if len(names) > max_files:
            raise too_many(root, names, max_files)
    return False, [*names, *excluded], not_entered


def _included(root: Path, wanted: PathMatcher, unwanted: PathMatcher) -> Iterator[str]:
    """Yield files that `include` names. A folder of `SKIPPED` is entered only if a pattern names it."""
    if not wanted.patterns:
        return
    named_folders = {part for pattern in wanted.patterns for part in pattern.split("/")}
    num_looked = 0

    def is_entered(folder: str) -> bool:
        nonlocal num_looked
        num_looked += 1
        if os.path.basename(folder) in SKIPPED - named_folders:  # noqa: PTH119 - as often as there are folders
            return False
        if unwanted.matches(folder, is_folder=True):
            return False
        return wanted.matches(folder, is_folder=True) or wanted.may_name_below(folder)

    for name in _walk(root, "", is_entered):
        num_looked += 1
        if num_looked > MAX_LOOKED:
            raise TooLarge(
                f"more than {MAX_LOOKED:,} files of {root} were looked at for `include`",
                hint="begin its patterns with the folder that they are in, such as `data/*.bin`",
            )
        if wanted.matches(name):
            yield name


def _is_link(path: Path) -> bool:
    with contextlib.suppress(OSError):  # a pattern may be longer than any name
        return path.is_symlink()
    return False


def _names_nothing(root: Path, pattern: str, seen: Sequence[str], unwanted: PathMatcher) -> SpecError:
    first = pattern.removeprefix("./").split("/")[0]
    if _is_link(root / first) and leads_outside(root, first):
        there = os.path.realpath(root / first)
        return SpecError(
            f"`include`: `{pattern}` leads outside of workdir {root}: `{first}` is a link",
            hint=f"replace it by a copy, or mount the directory: `--mount {there}:/data`",
        )
    if unwanted.matches(pattern.rstrip("/"), is_folder=True) or unwanted.matches(pattern):
        return SpecError(
            f"`include`: `{pattern}` names nothing that `exclude` does not name, too",
            hint="`exclude` is the stronger of the two: take the pattern out of one of them",
        )
    folders = {name.rpartition("/")[0] for name in seen}
    choices = [*islice(seen, MAX_COMPARED), *sorted(folders)[:MAX_COMPARED]]
    close = difflib.get_close_matches(pattern.rstrip("/"), choices, n=1, cutoff=0.6)
    meant = f"; did you mean `{close[0]}`?" if close else ""
    return SpecError(
        f"`include`: `{pattern}` names no file of workdir {root}{meant}",
        hint="patterns count from the workdir on, as in its .gitignore: `data/`, `*.bin`",
    )


def _entries(root: Path, names: Iterable[str]) -> Iterator[FileEntry]:
    """Yield files, links and empty folders, by sorted relative name, without sockets, pipes and devices."""
    inner, closed = {""}, {"": False}
    for name in sorted(set(names)):
        facts = _facts(root, name)
        if facts is None:
            continue  # in git's index, deleted on disk
        folder = os.path.dirname(name)  # noqa: PTH120 - twenty thousand times
        if folder not in inner:
            _refuse_outside(root, folder)
            inner.add(folder)
        if _is_in_home(root, folder, closed):
            continue
        if stat.S_ISDIR(facts.st_mode):  # a repository inside this one, or an empty folder
            below = _walk(root, name, lambda folder: os.path.basename(folder) not in SKIPPED)  # noqa: PTH119
            entries = ((n, _facts(root, n)) for n in sorted(below))
            yield from ((n, facts) for n, facts in entries if facts is not None)
        elif stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode):
            yield name, facts


def _is_in_home(root: Path, folder: str, results: dict[str, bool]) -> bool:
    """Return whether the folder is a Shoal home or in one. `results` caches the answer for other folders."""
    unknown = []
    above = folder
    while above not in results:
        unknown.append(above)
        above = above.rpartition("/")[0]
    for inner in reversed(unknown):
        results[inner] = results[above] or holds_keys(root / inner)
        above = inner
    return results[folder]


def _refuse_outside(root: Path, folder: str) -> None:
    """Refuse a folder that is a link: git lists what it once tracked, even if a link has replaced the
    folder.
    """
    if leads_outside(root, folder):
        raise SpecError(
            f"`{folder}` in workdir {root} leads outside it",
            hint=f"replace the link by a copy, or `git rm -r --cached {shlex.quote(folder)}`",
        )


def leads_outside(root: Path, name: str) -> bool:
    """Return whether a name in the folder is, or is below, a link out of it. Circular links are not."""
    # `Path.resolve` raises RuntimeError for a circle before Python 3.13.
    return not Path(os.path.realpath(root / name)).is_relative_to(root)


def _facts(root: Path, name: str) -> os.stat_result | None:
    """Return None if it does not exist, or not any more."""
    try:
        return os.lstat(root / name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(root, name) from error


def _git_names(root: Path) -> list[str]:
    """Return tracked files and new ones that git does not ignore. Empty if git is not used."""
    # Without a repository, asking git would only cost a process.
    if not is_in_git(root):
        return []
    options = ["-c", "core.fsmonitor=false", "-C", str(root)]
    command = ["git", *options, "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    # A repository inside this one is listed as `sub/`, and a directory ignored as a whole as `./`.
    names = (os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0"))
    return [name for name in names if name not in ("", ".")]


def is_in_git(root: Path) -> bool:
    above = (root, *root.parents)
    return "GIT_DIR" in os.environ or any(os.access(place / ".git", os.F_OK) for place in above)


def _walk(root: Path, below: str, is_entered: Callable[[str], bool]) -> Iterator[str]:
    """Yield names of files, links and empty folders. A link to a folder is a link, and is not followed."""
    waiting = [below]
    while waiting:
        above = waiting.pop()
        if above and holds_keys(root / above):
            continue
        is_empty = True
        try:
            with os.scandir(root / above) as entries:
                for entry in entries:
                    is_empty = False
                    name = f"{above}/{entry.name}" if above else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if is_entered(name):
                            waiting.append(name)
                    elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        yield name
        except OSError as error:
            raise unreadable(root, above) from error
        if is_empty and above:
            yield above


def too_many(root: Path, seen: Iterable[str], max_files: int) -> TooLarge:
    """`seen` holds the names up to the limit, because counting a whole disk would take too long."""
    weight = Counter(name.split("/", 1)[0] for name in seen)
    most = [f"{name} ({count:,} files)" for name, count in weight.most_common(3)]
    return TooLarge(
        f"workdir {root} holds more than {max_files:,} files, the most that a snapshot takes",
        hint=f"of those seen most are in: {', '.join(most)}; {ways_out(root)}",
    )


def ways_out(root: Path) -> str:
    """Return what to do about a folder that is too large, as a clause."""
    less = "ignore them in .gitignore, " if is_in_git(root) else ""
    less += "leave them out with `--exclude PATTERN`, "
    return f"{less}name a smaller directory with `--workdir DIR`, or none with `--workdir ''`"


def unreadable(root: Path, name: str) -> SpecError:
    return SpecError(
        f"cannot read `{name or '.'}` in workdir {root}",
        hint=f"make it readable or ignore it: `ls -ld {shlex.quote(str(root / name))}`",
    )
