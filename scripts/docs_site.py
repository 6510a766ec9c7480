"""MkDocs hooks: add the root's Markdown pages to the site and adapt links and code fences.

The Markdown files are written for a reader of the repository: links lead to files of the repository, and
the first line of a fence may name the file that the reader saves. MkDocs knows only `docs/`. These hooks
translate both. They leave a link that leads nowhere as it is, so that the strict build fails on it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Pages outside `docs/`, and their place in the site."""
REPOSITORY_PATHS = {place: name for name, place in ROOT_PAGES.items()}
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
DIAGRAM = re.compile(r"^```mermaid\n.*?^```\n", re.MULTILINE | re.DOTALL)
"""Drawn by a script that the theme would fetch from elsewhere. The table below each diagram says the same."""
NAMED_FENCE = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make heading anchors as GitHub does, so that one anchor is right in both places."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root."""
    for name, place in ROOT_PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's text with links and fences as MkDocs wants them."""
    place = page.file.src_uri
    source = REPOSITORY_PATHS.get(place, f"docs/{place}")

    def replace(match: re.Match[str]) -> str:
        return _translate(match, source, place)

    parts = FENCE.split(DIAGRAM.sub("", markdown))
    parts[::2] = [LINK.sub(replace, part) for part in parts[::2]]
    return NAMED_FENCE.sub(r'```\1 title="\2"', "".join(parts))


def _translate(match: re.Match[str], source: str, place: str) -> str:
    bang, text, link = match.groups()
    path, hash_sign, anchor = link.partition("#")
    if "://" in link or not path:
        return match[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if target in ROOT_PAGES:
        inside = ROOT_PAGES[target]
    elif (ROOT / target).is_dir() and target.startswith("docs/"):
        inside = f"{target.removeprefix('docs/')}/README.md"
    elif target.startswith("docs/"):
        inside = target.removeprefix("docs/")
    else:
        return text if (ROOT / target).exists() else match[0]  # a file that is only in the repository
    relative = posixpath.relpath(inside, posixpath.dirname(place) or ".")
    return f"{bang}[{text}]({relative}{hash_sign}{anchor})"
