"""Slots for connections: a flood closes only its own, and signed connections have slots that no
flood takes.
"""

from __future__ import annotations

from shoal.api.http.connections import ConnectionSlots


class Link:
    def __init__(self, holder: str = "10.0.0.1") -> None:
        self._holder = holder
        self.is_cut_off = False

    def holder(self, *, is_scarce: bool) -> str:
        return self._holder

    def abort(self) -> None:
        self.is_cut_off = True


def entered(slots: ConnectionSlots, count: int, holder: str) -> list[Link]:
    links = [Link(holder) for _ in range(count)]
    assert all(slots.enter(link) for link in links)
    return links


def test_a_newcomer_gets_the_place_that_the_largest_holder_has_had_longest() -> None:
    slots = ConnectionSlots(80)  # and 20 strangers
    few = entered(slots, 4, "10.0.0.1")
    many = entered(slots, 16, "10.6.6.6")
    newcomer = Link("10.0.0.2")
    assert slots.enter(newcomer)
    assert [link.is_cut_off for link in many] == [True] + [False] * 15
    assert not any(link.is_cut_off for link in (*few, newcomer))


def test_a_flood_ends_its_own_connections_however_long_it_lasts() -> None:
    slots = ConnectionSlots(80)
    [person] = entered(slots, 1, "10.0.0.1")
    flood = entered(slots, 1000, "10.6.6.6")
    assert not person.is_cut_off
    assert sum(not link.is_cut_off for link in flood) == 19


def test_a_request_under_way_keeps_its_slot_even_if_new_connections_are_refused() -> None:
    slots = ConnectionSlots(80)
    busy = entered(slots, 20, "10.0.0.1")
    for link in busy:
        slots.begin(link)
    assert not slots.enter(Link())
    slots.wait(busy[7])
    assert slots.enter(Link())
    assert [link.is_cut_off for link in busy].index(True) == 7


def test_signed_connections_are_not_ended_for_strangers() -> None:
    slots = ConnectionSlots(80)
    signed = entered(slots, 20, "10.0.0.1")
    assert all(slots.sign(link, f"user {number}", is_machine=False) for number, link in enumerate(signed))
    entered(slots, 100, "10.0.0.1")
    assert not any(link.is_cut_off for link in signed)


def sign(slots: ConnectionSlots, count: int, account: str, *, is_machine: bool = False) -> list[Link]:
    """As many of `count` as there are slots for."""
    taken = []
    for _ in range(count):
        link = Link()
        assert slots.enter(link)
        if slots.sign(link, account, is_machine=is_machine):
            taken.append(link)
        else:
            slots.leave(link)
    return taken


def test_one_account_holds_a_quarter_and_all_people_three_quarters() -> None:
    slots = ConnectionSlots(80)
    assert len(sign(slots, 50, "user ben")) == 20
    others = [len(sign(slots, 50, f"user {name}")) for name in ("a", "b", "c")]
    assert others == [20, 20, 15]  # the last from the accounts that hold more
    assert len(slots._signed) == 60
    assert len(sign(slots, 50, "supervisor 1", is_machine=True)) == 20


def test_a_person_gets_a_place_however_many_accounts_hold_all_of_them() -> None:
    slots = ConnectionSlots(80)
    held = [link for account in ("user eve", "jobs of a", "jobs of b") for link in sign(slots, 20, account)]
    slots.wait(held[45])
    assert len(sign(slots, 1, "user ada")) == 1
    assert [number for number, link in enumerate(held) if link.is_cut_off] == [45]  # it waited for its client
    assert len(sign(slots, 2, "user oz")) == 2
    assert sum(link.is_cut_off for link in held) == 3


def test_an_account_takes_no_busy_place_of_one_that_holds_no_more() -> None:
    slots = ConnectionSlots(8)
    three = [sign(slots, 2, f"user {name}") for name in ("a", "b", "c")]
    assert sign(slots, 3, "user d")
    assert sum(link.is_cut_off for links in three for link in links) == 1
    assert not sign(slots, 1, "user d")


def test_places_come_back_and_a_connection_may_change_its_owner() -> None:
    slots = ConnectionSlots(80)
    for _ in range(3):
        taken = sign(slots, 50, "user ben")
        assert len(taken) == 20
        assert slots.sign(taken[0], "user ana", is_machine=False)
        assert len(sign(slots, 5, "user ben")) == 1
        for link in list(slots._signed):
            slots.leave(link)
            slots.leave(link)
    assert not slots._signed
    assert not slots._strangers
    assert not slots._waiting
    assert not slots._people
