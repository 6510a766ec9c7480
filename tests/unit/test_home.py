"""Finding the home and the control plane on this machine."""

from __future__ import annotations

import os
import pwd

import pytest

from shoal.home import account_name


def test_user_without_an_account_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_account(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert account_name() == pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setattr(pwd, "getpwuid", has_no_account)
    assert account_name() == f"uid-{os.getuid()}"
    monkeypatch.setenv("USER", "ana")
    assert account_name() == "ana"
