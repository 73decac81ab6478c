"""Which process a job gets: the first that is free, old or new."""

import queue
import threading

import pytest

from common.helper import HelperPool, ProcessEndedError


class Process:
    """One that starts when it is told to, and does a job until it is told to finish."""

    def __init__(self, *, may_start=True):
        self.is_alive, self.is_guarded = True, False
        self.may_start, self.may_finish, self.ended = (threading.Event() for _ in range(3))
        if may_start:
            self.may_start.set()

    def await_start(self):
        assert self.may_start.wait(60)
        if not self.is_alive:
            raise ProcessEndedError(was_killed=True)

    def await_end(self):
        self.ended.wait()

    def kill(self):
        self.is_alive = False
        self.ended.set()


class Talk:
    owed = 0

    def __init__(self, process):
        self.process = process

    def held(self):
        assert self.process.may_finish.wait(60)
        return self.process

    def finish(self, deadline):
        """Owe nothing."""


class Jobs:
    """Jobs of a pool on threads, whose processes are made one after another."""

    def __init__(self, processes, **options):
        self.made, self.answers = queue.SimpleQueue(), queue.SimpleQueue()
        self.pool = HelperPool(2, grace_s=60.0, **options)
        self._left = list(processes)

    def start(self):
        process = self._left.pop(0)
        self.made.put(process)
        return process

    def begin(self):
        threading.Thread(target=lambda: self.answers.put(self.pool.run(self.start, Talk))).start()

    def answer(self):
        return self.answers.get(timeout=60)


def finished(process):
    process.may_finish.set()
    return process


def test_a_job_takes_the_process_that_another_finishes_with_rather_than_wait_for_a_start():
    first, second = Process(), Process(may_start=False)
    jobs = Jobs([first, second])
    jobs.begin()
    assert jobs.made.get(timeout=60) is first
    jobs.begin()
    assert jobs.made.get(timeout=60) is second
    first.may_finish.set()
    assert [jobs.answer(), jobs.answer()] == [first, first]
    second.may_start.set()


def test_a_job_takes_a_process_that_has_started_rather_than_wait_for_the_other_job():
    first, second = Process(), finished(Process())
    jobs = Jobs([first, second])
    jobs.begin()
    assert jobs.made.get(timeout=60) is first
    jobs.begin()
    assert jobs.answer() is second
    first.may_finish.set()
    assert jobs.answer() is first


def test_a_job_waits_for_no_successor_of_an_idle_process_while_another_is_idle():
    first, second, successor = Process(), finished(Process()), Process(may_start=False)
    jobs = Jobs([first, second, successor], replaces_idle=True)
    jobs.begin()
    assert jobs.made.get(timeout=60) is first
    jobs.begin()
    assert jobs.answer() is second
    assert finished(first) is jobs.answer()
    jobs.made.get(timeout=60)
    second.kill()
    assert jobs.made.get(timeout=60) is successor
    jobs.begin()
    assert jobs.answer() is first
    successor.may_start.set()
    jobs.pool.close()


def test_a_job_waits_for_the_process_of_another_if_no_more_can_start():
    first, tries = Process(), queue.SimpleQueue()
    jobs = Jobs([first])
    jobs.begin()
    assert jobs.made.get(timeout=60) is first

    def start():
        tries.put(None)
        raise OSError("no room")

    second = threading.Thread(target=lambda: jobs.answers.put(jobs.pool.run(start, Talk)))
    second.start()
    tries.get(timeout=60)
    first.may_finish.set()
    assert [jobs.answer(), jobs.answer()] == [first, first]
    assert tries.empty()


def test_a_job_learns_why_no_process_starts():
    def start():
        raise OSError("no room")

    pool = HelperPool(2, grace_s=60.0)
    pool.prepare(start)
    with pytest.raises(ProcessEndedError) as caught:
        pool.run(start, Talk)
    assert caught.value.was_killed


def test_a_process_that_has_started_when_its_pool_is_closed_is_killed():
    process = Process(may_start=False)
    jobs = Jobs([process])
    jobs.pool.prepare(jobs.start)
    assert jobs.made.get(timeout=60) is process
    jobs.pool.close()
    process.may_start.set()
    assert process.ended.wait(60)
    assert jobs.pool.idle == []
