"""What the stock `openai` client makes of the data plane's own answers."""

from __future__ import annotations

import openai
import pytest

from shoal.serving.table import Limits
from tests.support.serving import Lab, closed, running_lab


def client(lab: Lab, key: str = "token-ana", service: str = "s") -> openai.AsyncOpenAI:
    url = f"http://127.0.0.1:{lab.port}/p/{service}/v1"
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


async def raised(caller: openai.AsyncOpenAI) -> openai.APIStatusError:
    async with caller:
        with pytest.raises(openai.APIStatusError) as found:
            await caller.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    return found.value


async def test_refusals_are_raised_as_the_clients_own_errors_with_our_words() -> None:
    async with running_lab() as lab:
        lab.serve(closed(is_off=True))
        wrong = await raised(client(lab, key="wrong"))
        unknown = await raised(client(lab, service="nothing"))
        off = await raised(client(lab))
        lab.serve(closed(is_off=True, limits=Limits(rps=0.01)))
        await raised(client(lab))
        limited = await raised(client(lab))
    assert isinstance(wrong, openai.AuthenticationError)
    assert isinstance(unknown, openai.NotFoundError)
    assert isinstance(off, openai.InternalServerError)
    assert isinstance(limited, openai.RateLimitError)
    assert int(limited.response.headers["retry-after"]) > 1
    found = [(one.status_code, one.code, one.type) for one in (wrong, unknown, off, limited)]
    assert found == [
        (401, "unauthenticated", "authentication_error"),
        (404, "service.unknown", "not_found_error"),
        (503, "service.off", "server_error"),
        (429, "limit.rps", "rate_limit_error"),
    ]
    assert "scaled to 0 replicas" in str(off)
