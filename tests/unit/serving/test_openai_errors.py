"""The stock `openai` client raises its own errors for the data plane's replies."""

from __future__ import annotations

import openai
import pytest

from shoal.serving.table import CallerLimits
from tests.support.serving.data_plane_lab import EmbeddedLab, private_service, running_lab


def client(lab: EmbeddedLab, key: str = "token-ana", service: str = "s") -> openai.AsyncOpenAI:
    url = f"http://127.0.0.1:{lab.port}/p/{service}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


async def raised(caller: openai.AsyncOpenAI) -> openai.APIStatusError:
    async with caller:
        with pytest.raises(openai.APIStatusError) as caught:
            await caller.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    return caught.value


async def test_refusals_become_the_clients_own_errors_with_the_data_planes_text() -> None:
    async with running_lab() as lab:
        lab.serve(private_service(is_off=True))
        wrong = await raised(client(lab, key="wrong"))
        unknown = await raised(client(lab, service="nothing"))
        off = await raised(client(lab))
        lab.serve(private_service(is_off=True, limits=CallerLimits(rps=0.01)))
        await raised(client(lab))
        limited = await raised(client(lab))
    assert isinstance(wrong, openai.AuthenticationError)
    assert isinstance(unknown, openai.NotFoundError)
    assert isinstance(off, openai.InternalServerError)
    assert isinstance(limited, openai.RateLimitError)
    assert int(limited.response.headers["retry-after"]) > 1
    errors = [(error.status_code, error.code, error.type) for error in (wrong, unknown, off, limited)]
    assert errors == [
        (401, "unauthenticated", "authentication_error"),
        (404, "service.unknown", "not_found_error"),
        (503, "service.off", "server_error"),
        (429, "limit.rps", "rate_limit_error"),
    ]
    assert "scaled to 0 replicas" in str(off)
