"""Warnings about a turn of the engine that does not end, and when it is given up."""

import asyncio

from waiting import until

from backend.engine.supervision.supervisor import TurnWatch


class Watched:
    """An engine whose present turn has taken as long as a test says."""

    def __init__(self, **limits):
        self.turn_s = 0.0
        self.is_alive = True
        self.given_up = []
        watch = TurnWatch(
            lambda: self.turn_s,
            lambda: self.is_alive,
            limit_s=0.04,
            give_up=self.given_up.append,
            **limits,
        )
        watch.look()


async def test_a_turn_that_does_not_end_is_told_until_it_does(caplog):
    watched = Watched()
    watched.turn_s = 5.0
    await until(lambda: "in one turn for 5 s" in caplog.text)
    watched.turn_s = 12.0
    await until(lambda: "in one turn for 12 s" in caplog.text)
    watched.turn_s = 0.0
    await until(lambda: "goes on" in caplog.text)
    watched.is_alive = False
    assert [record.message for record in caplog.records] == [
        "the engine has been in one turn for 5 s: it may be stuck",
        "the engine has been in one turn for 12 s: it may be stuck",
        "the engine goes on, after more than 12 s in one turn",
    ]
    assert not watched.given_up


async def test_a_turn_beyond_the_limit_is_given_up_once():
    watched = Watched(lost_after_s=3.0)
    watched.turn_s = 2.9
    await asyncio.sleep(0.01)
    assert not watched.given_up
    watched.turn_s = 3.0
    await until(lambda: watched.given_up == [3.0])
    await asyncio.sleep(0.01)
    assert watched.given_up == [3.0]
