"""Bugs in what runs inside of a job."""

from __future__ import annotations

from tests.mutants.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "claim_not_exclusive",
        "runtime/spool.py",
        "    except FileExistsError:\n        return False\n",
        "    except FileExistsError:\n        return True\n",
        "P2: a share is run once",
        ("spool", "engine"),
    ),
    Mutant(
        "stale_claim_is_replaced",
        "runtime/spool.py",
        "    return write_once(share.claimed, msgspec.json.encode(mine))\n",
        "    with contextlib.suppress(FileNotFoundError):\n        if not is_locked(share):\n"
        "            os.unlink(share.claimed)\n"
        "    return write_once(share.claimed, msgspec.json.encode(mine))\n",
        "P2: a share is run once, also when whoever ran it is dead",
        ("spool", "engine", "supervisor"),
    ),
    Mutant(
        "share_without_its_order_is_over",
        "runtime/spool.py",
        "        return not is_there(share)\n",
        "        return True\n",
        "P3: who does not know what to look for has no evidence",
        ("spool",),
    ),
    Mutant(
        "another_users_word_kills",
        "runtime/places.py",
        "    return [one for one in (usual, *others) if _is_directory_of_ours(one)]\n",
        "    return [usual, *filter(is_own, others)]\n",
        "P8: what another user lays in /tmp ends nothing of ours",
        ("burial",),
    ),
    Mutant(
        "what_lies_in_an_open_directory_kills",
        "runtime/burial.py",
        "        if foreign := places.foreign_in(root, share.directory):\n",
        "        if foreign := None:\n",
        "P8: what others could have laid there ends nothing of ours",
        ("burial",),
    ),
    Mutant(
        "outcome_before_the_tree_is_gone",
        "runtime/share.py",
        "        self._bury()\n        self._report(self._outcome(end))\n",
        "        self._report(self._outcome(end))\n        self._bury()\n",
        "P2: an outcome means that nothing runs any more",
        ("supervisor", "engine"),
    ),
    Mutant(
        "a_dead_first_thread_is_a_dead_process",
        "runtime/tree.py",
        "    return fields[0] in ENDED and int(fields[17]) <= 1\n",
        "    return fields[0] in ENDED\n",
        "P2: what is stuck in a driver by one thread still runs",
        ("spool",),
    ),
    Mutant(
        "supervisor_outlives_its_fence",
        "runtime/reasons.py",
        "        if silent_s < self._order.fence_s:\n",
        "        if silent_s < 100 * self._order.fence_s:\n",
        "P3: a supervisor that cannot renew stops its ranks",
        ("supervisor",),
    ),
    Mutant(
        "strangers_are_believed",
        "runtime/http.py",
        "return answer if is_proven(credentials.proof_key, renewal, answer) else None",
        "return answer",
        "P3: only the control plane itself ends a lease",
        ("supervisor",),
    ),
    Mutant(
        "a_strangers_words_end_the_renewals",
        "runtime/http.py",
        "    except Exception:  # noqa",
        "    except (OSError, ValueError, http.client.HTTPException):  # noqa",
        "P3: only the control plane itself ends a lease",
        ("renewal",),
    ),
    Mutant(
        "any_answer_is_to_the_failure_told_now",
        "runtime/renewal.py",
        "self.answered_failure = renewal.failure",
        "self.answered_failure = self._failure",
        "P1: a failure is refused by the answer to it alone",
        ("renewal",),
    ),
    Mutant(
        "a_resolver_that_hangs_keeps_renewals",
        "runtime/line.py",
        "NAMES.addresses(self._host, self._port, self._left_s())",
        "socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)",
        "P3: no healthy rank is ended by a fence because a name server is away",
        ("renewal",),
    ),
    Mutant(
        "every_renewal_waits_for_a_resolver_that_hangs",
        "runtime/names.py",
        "asked.since + PATIENCE_S - CLOCK.monotonic() if is_known else timeout_s",
        "timeout_s",
        "P3: no healthy rank is ended by a fence because a name server is away",
        ("renewal",),
    ),
)
