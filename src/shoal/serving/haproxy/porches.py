"""How HAProxy comes to replicas on other machines: the files that it shows and trusts, and words. Pure."""

from __future__ import annotations

import hashlib

from shoal.porch import SCHEME
from shoal.serving.table import Replica
from shoal.wire import Papers


def files(papers: Papers | None) -> dict[str, str]:
    """What a configuration names, by names of their content: HAProxy reads them when it starts."""
    if papers is None:
        return {}
    shown, trusted = names(papers)
    return {shown: papers.certificate + papers.key, trusted: papers.authority}


def names(papers: Papers) -> tuple[str, str]:
    """Of the file with the certificate and its key, and of that with the authority."""
    digest = hashlib.sha256(f"{papers.certificate}{papers.authority}".encode()).hexdigest()[:16]
    return f"papers-{digest}.pem", f"papers-{digest}.ca"


def options(replica: Replica, papers: Papers | None) -> str:
    """For its server line. Without papers a porch lets nobody in, and HAProxy must not try without TLS."""
    if not replica.address.startswith(SCHEME):
        return ""
    if papers is None:
        return "disabled ssl verify required "
    shown, trusted = names(papers)
    told = f"ssl verify required verifyhost {replica.name} ca-file {trusted} crt {shown}"
    return f"{told} ssl-min-ver TLSv1.3 "
