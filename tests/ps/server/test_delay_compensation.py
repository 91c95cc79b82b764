"""Snapshots of table rows that trainers received are found by the keys that they push."""

import numpy as np

from jaxfleet.ps.server.staleness import ReceivedRows, RowSnapshots, compensate


def copies() -> RowSnapshots:
    """Returns trainer 1's snapshots of three keys."""
    found = RowSnapshots(are_kept=True)
    found.give("users", 1, np.array([7, -3, 5]), np.array([[70.0], [-30.0], [50.0]], np.float32))
    return found


def test_keys_are_found_in_any_order_and_company() -> None:
    found = copies().of("users", 1, np.array([5, 6, 7, 99]))
    assert found is not None
    np.testing.assert_array_equal(found.places, [0, 2])
    np.testing.assert_array_equal(found.rows, [[50.0], [70.0]])


def test_another_trainer_or_table_received_nothing() -> None:
    assert copies().of("users", 0, np.array([7])) is None
    assert copies().of("items", 1, np.array([7])) is None


def test_a_later_look_up_takes_the_place_of_the_one_before() -> None:
    found = copies()
    found.give("users", 1, np.array([1]), np.ones((1, 1), np.float32))
    again = found.of("users", 1, np.array([7]))
    assert again is not None
    assert not len(again.places)


def test_nothing_is_kept_where_nobody_asks() -> None:
    found = RowSnapshots(are_kept=False)
    found.give("users", 1, np.array([1]), np.ones((1, 1), np.float32))
    assert found.of("users", 1, np.array([1])) is None


def test_what_was_never_received_is_not_corrected() -> None:
    grads, now = np.array([[2.0], [3.0]], np.float32), np.array([[1.0], [1.0]], np.float32)
    received = ReceivedRows(np.array([1]), np.array([[0.5]], np.float32))
    made = compensate(grads, now, received, 2.0)
    np.testing.assert_array_equal(made, [[2.0], [3.0 + 2.0 * 9.0 * 0.5]])
