"""The demo's curve is drawn from log lines alone."""

from __future__ import annotations

from examples.demo.curve import COLUMNS, ROWS, Mark, Point, plot, points_of, step_at

FALLING = [Point(float(step), step, 4.0 / 2**step) for step in range(1, 8)]


def test_steps_are_read_from_log_lines() -> None:
    lines = [
        {"at": 1.5, "text": "rank 0 of 2 begins after step 20"},
        {"at": 2.5, "text": "step  21 of 120  loss 0.5000"},
    ]
    assert points_of(lines) == [Point(2.5, 21, 0.5)]


def test_a_loss_that_halves_each_step_is_a_straight_line() -> None:
    rows = [line[8:] for line in plot(FALLING, []).splitlines()[:ROWS]]
    stars = [(row.index("*"), number) for number, row in enumerate(rows) if "*" in row]
    assert stars == sorted(stars)
    assert len(stars) == len(FALLING)
    assert all(row.count("*") <= 1 for row in rows)


def test_its_ends_are_labelled_and_nothing_is_wider_than_a_screen() -> None:
    lines = plot(FALLING, [Mark("R", 3, "a rank was killed")]).splitlines()
    assert lines[0].startswith("  2.00 |")
    assert lines[ROWS - 1].startswith("  0.03 |")
    assert max(map(len, lines)) <= 8 + COLUMNS <= 80


def test_marks_stand_below_their_steps_and_beside_each_other() -> None:
    marks = [Mark("R", 3, "a rank was killed"), Mark("N", 3, "a node was lost")]
    signs = plot(FALLING, marks).splitlines()[ROWS + 1]
    assert signs.strip() == "RN"
    assert "       R a rank was killed, at step 3" in plot(FALLING, marks)


def test_a_training_whose_loss_never_changes_is_drawn_too() -> None:
    assert "*" in plot([Point(1.0, 1, 1.0), Point(2.0, 2, 1.0)], [])


def test_how_far_it_was_at_a_moment() -> None:
    assert [step_at(FALLING, moment) for moment in (0.5, 3.5, 99.0)] == [0, 3, 7]
