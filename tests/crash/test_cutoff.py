"""Connections that break while both hosts live: nobody loses what was acknowledged, and the loser is silent."""

from __future__ import annotations

from tests.crash.cutoff import (
    any_eraser_that_comes_back_late,
    any_lost_write_before_a_clean_stop,
    any_owner_that_comes_back,
    any_owner_that_comes_back_late,
    loser_acknowledges_nothing,
)


def test_an_owner_that_was_cut_off_may_come_back_at_any_moment_of_another_ones_opening() -> None:
    any_owner_that_comes_back()


def test_an_owner_that_was_cut_off_in_the_middle_of_a_store_writes_nothing_over_the_next_one() -> None:
    any_owner_that_comes_back_late()


def test_an_owner_that_was_cut_off_in_the_middle_of_a_wipe_erases_nothing_of_the_next_one() -> None:
    any_eraser_that_comes_back_late()


def test_from_a_takeover_on_the_loser_acknowledges_nothing() -> None:
    loser_acknowledges_nothing()


def test_a_write_that_was_lost_before_a_clean_stop_lands_in_nothing_of_the_next_run() -> None:
    any_lost_write_before_a_clean_stop()
