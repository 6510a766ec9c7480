"""Structured logs: JSON lines in `logs/control.log` from every library, with every token redacted.

A log line that cannot be written is dropped, because a full disk must not stop the control plane.
"""

from __future__ import annotations

import logging
import logging.handlers
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog

MAX_FILE_BYTES = 16 << 20
KEPT_FILES = 4
TOKEN = re.compile(r"(sh[a-z]_[a-z]{3}_[0-9A-Za-z]{16,40}(?=[._])|sh[a-z](?=_[0-9a-f]{32}))[._][^\s\"'\\,;]+")
"""A token of any kind, with an id or, for a data plane, without. Any character may stand before it: after
rendering, an escaped newline ends with the letter n."""


def redact(text: str) -> str:
    """Replace the secret part of every Shoal token in the text. The public id stays for tracing."""
    return TOKEN.sub(r"\1_[redacted]", text)


def configure_log(path: Path | None, *, level: str = "INFO") -> None:
    """Send every log of this process to `path` (None: standard error). May be called again."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, delay=True, encoding="utf-8"
        )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_shared(),
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _render],
        )
    )
    logging.raiseExceptions = False
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level)
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> Any:
    """A logger whose keyword arguments become fields: `log.info("job placed", job_id=...)`."""
    return structlog.stdlib.get_logger(name)


def _shared() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]


def _render(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    """Render, then redact, so that no field is missed however deep it is."""
    rendered = structlog.processors.JSONRenderer(ensure_ascii=True, default=str)(logger, method, event)
    return redact(str(rendered))
