"""Backends that divide a memory: the shares, and the ledger that they are written in."""

import logging
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace as changed

from backend.config import ModelOptions, TuningOptions
from backend.core.engine_status import EngineStatus
from backend.engine.machine_ledger import (
    DamagedEntryError,
    Demand,
    Entry,
    MemoryLedger,
    decoded,
    encoded,
    free_bytes,
    pool_bytes,
    shares,
)
from backend.engine.messages.protocol import Load, Resize
from common.directories import LockedDirectory

USABLE = 10_000
LEAST = 100
DEVICE = "a device"


def entry(*, wish=9_000, **facts):
    return Entry(process_id=1, model="m", device=DEVICE, wish=wish, **{"least": LEAST, **facts})


BYTES = st.integers(0, USABLE)


@st.composite
def entries(draw):
    wish = draw(st.integers(LEAST, USABLE))
    return entry(
        wish=wish,
        held=draw(st.integers(0, USABLE // 4)),
        reserved=draw(st.integers(0, wish)),
        wanted=draw(BYTES),
        cached=draw(st.integers(0, wish)),
        is_busy=draw(st.booleans()),
    )


def test_who_is_alone_gets_its_wish():
    assert shares(USABLE, [entry(held=1_000, wish=8_000)]) == [8_000]
    assert shares(USABLE, [entry(wish=12_000)]) == [pool_bytes(USABLE, [entry()])]


def test_the_busy_share_alike_and_weights_come_first():
    both = [entry(held=3_000, is_busy=True), entry(held=1_000, is_busy=True)]
    assert shares(USABLE, both) == [2_700, 2_700]


def test_an_idle_one_keeps_its_prompt_cache_beside_a_busy_one_up_to_its_part():
    busy = entry(is_busy=True)
    assert shares(USABLE, [busy, entry(cached=1_000)]) == [8_000, 1_000]
    assert shares(USABLE, [busy, entry(cached=8_000)]) == [4_500, 4_500]


def test_an_idle_one_gives_its_prompt_cache_to_one_that_wants():
    wanting = entry(is_busy=True, reserved=1_000, wanted=6_000)
    due = shares(USABLE, [wanting, entry(cached=8_000)])
    assert due == [7_000, 2_000]
    assert shares(USABLE, [changed(wanting, wanted=8_000), entry(cached=8_000)]) == [8_900, LEAST]


def test_what_running_requests_hold_comes_before_what_others_want():
    running = entry(is_busy=True, reserved=7_000)
    assert shares(USABLE, [running, entry(is_busy=True, wanted=5_000)]) == [7_000, 2_000]


def test_weights_that_leave_nothing_leave_everybody_the_least():
    assert shares(USABLE, [entry(held=6_000), entry(held=6_000)]) == [LEAST, LEAST]


@given(st.lists(entries(), min_size=1, max_size=6))
def test_shares_divide_what_there_is_and_no_more(group):
    due = shares(USABLE, group)
    pool = pool_bytes(USABLE, group)
    floors = sum(each.least for each in group)
    assert sum(due) <= max(pool, floors)
    assert all(each.least <= share <= each.wish for share, each in zip(due, group, strict=True))
    if sum(each.wish for each in group) >= pool > floors:
        # Less than a byte for each is left over.
        assert sum(due) > pool - len(group)


@given(st.lists(entries(), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_shares_do_not_depend_on_the_order_of_the_entries(group, random):
    order = list(range(len(group)))
    random.shuffle(order)
    due = shares(USABLE, group)
    assert shares(USABLE, [group[i] for i in order]) == [due[i] for i in order]


@given(st.lists(entries(), min_size=2, max_size=5))
def test_wanting_more_never_gives_less(group):
    first, *others = group
    greedy = changed(first, wanted=first.wish, is_busy=True)
    assert shares(USABLE, [greedy, *others])[0] >= shares(USABLE, group)[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"process_id": -1, "model": "m", "device": "d"}',
        b'{"process_id": 1, "model": "m", "device": "d", "held": 1e300}',
        b'{"process_id": 1, "model": "m", "device": "d", "budget": 99999999999999999999}',
        b'{"process_id": 1, "model": 3, "device": "d"}',
        b"[" * 5_000,
    ],
)
def test_what_is_no_entry_is_told_from_one(data):
    with pytest.raises(DamagedEntryError):
        decoded(data)


def test_an_entry_of_a_later_version_is_read():
    assert decoded(b'{"process_id": 1, "model": "m", "device": "d", "mood": "good"}').held == 0
    whole = entry(held=1, reserved=2, wanted=3, cached=4, budget=5, is_busy=True)
    assert decoded(encoded(whole)) == whole


class Backend:
    """A session's side of a ledger: it carries out an order when it is told to."""

    def __init__(self, path, *, usable=USABLE, held=0, wish=8_000, device=DEVICE):
        own = Entry(process_id=os.getpid(), model="m", device=device, least=LEAST)
        self.ledger = MemoryLedger(LockedDirectory(path), own, usable)
        self.ledger.make_room(held, 0.0)
        self.held, self.wish, self.orders = held, wish, []
        self.books = Demand(budget=wish)
        self.ledger.begin(held, wish, self.orders.append)
        self.obey()

    @property
    def budget(self):
        return self.books.budget

    @property
    def order(self):
        return self.orders[-1]

    def obey(self):
        """Keep to the latest order, except for the memory that running requests hold."""
        self.books = replace(
            self.books,
            budget=max(self.order.budget_bytes, self.books.reserved),
            answered=self.order.number,
        )
        self.books = replace(
            self.books, cached=min(self.books.cached, self.budget - self.books.reserved)
        )
        self.ledger.note(self.books)

    def note(self, **facts):
        self.books = replace(self.books, **facts)
        self.ledger.note(self.books)

    def leave(self):
        """End as the kernel ends a process: descriptors are closed, and nothing else."""
        directory = self.ledger.directory
        os.close(directory.file)
        os.close(directory.directory)


def settle(*backends):
    """Let everybody look and obey until nothing changes."""
    for _ in range(6):
        for backend in backends:
            backend.ledger.look()
            backend.obey()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


def test_the_second_finds_its_part_and_gets_it_back_when_the_first_has_died(path):
    first = Backend(path, held=1_000)
    assert first.order == Resize(1, 8_000, 8_000)
    second = Backend(path, held=1_000)
    settle(first, second)
    assert (first.budget, second.budget) == (3_600, 3_600)
    first.leave()
    settle(second)
    assert second.budget == 8_000
    assert [each.is_own for each in second.ledger.status.backends] == [True]
    second.leave()


def test_who_is_alone_has_what_its_options_say_and_weights_that_no_one_could_make_room_for(
    path, caplog
):
    with caplog.at_level(logging.WARNING):
        first = Backend(path, held=9_990, wish=20_000)
    assert (first.budget, caplog.text) == (20_000, "")
    with caplog.at_level(logging.WARNING):
        second = Backend(path, held=1_000)
    assert "1 other backends leave too little" in caplog.text
    settle(first, second)
    assert (first.budget, second.budget) == (LEAST, LEAST)
    first.leave()
    second.leave()


def test_a_request_that_waits_gets_what_an_idle_prompt_cache_held(path):
    idle, busy = Backend(path), Backend(path)
    settle(idle, busy)
    idle.note(cached=idle.budget)
    busy.note(is_busy=True, wanted=7_000)
    busy.ledger.look()
    assert busy.budget == 4_500
    assert busy.order.attainable_bytes == 8_000
    idle.ledger.look()
    idle.obey()
    idle.ledger.look()
    busy.ledger.look()
    assert busy.order.budget_bytes == 7_000
    assert idle.budget == 2_000
    idle.leave()
    busy.leave()


def test_nobody_takes_what_another_has_not_given_yet(path):
    slow, quick = Backend(path), Backend(path)
    settle(slow, quick)
    slow.note(is_busy=True, reserved=4_000)
    settle(slow, quick)
    slow.ledger.note(slow.books)
    quick.note(is_busy=True, wanted=8_000)
    for _ in range(3):
        quick.ledger.look()
        slow.ledger.look()
        assert slow.budget + quick.order.budget_bytes <= 9_000
    quick.obey()
    slow.note(reserved=0, is_busy=False)
    settle(slow, quick)
    assert quick.budget == 8_000
    slow.leave()
    quick.leave()


def test_weights_wait_only_while_somebody_can_give(path):
    first = Backend(path, held=1_000)
    first.note(is_busy=True, reserved=8_000)
    first.ledger.look()
    own = Entry(process_id=1, model="m", device=DEVICE, least=LEAST)
    second = MemoryLedger(LockedDirectory(path), own, USABLE)
    second.make_room(5_000, 0.0)
    assert first.order.budget_bytes == 8_000
    first.ledger.look()
    assert first.order.budget_bytes == 3_500
    first.leave()


def test_backends_of_other_devices_and_damaged_entries_do_not_count(path, caplog):
    other = Backend(path, device="another")
    own = Backend(path)
    damaged = LockedDirectory(path)
    with damaged.exclusive(1.0):
        damaged.write(b"no entry")
    with caplog.at_level(logging.WARNING):
        settle(own)
    assert own.budget == other.budget == 8_000
    assert caplog.text.count("is ignored") == 1
    damaged.close()
    own.leave()
    other.leave()


def test_a_directory_that_is_not_ours_is_no_ledger(path):
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(OSError, match="lets other users in"):
        MemoryLedger.opened(path, entry(), USABLE)


@pytest.mark.mlx
def test_a_backend_without_a_ledger_takes_a_cautious_share(path, caplog):
    from backend.engine.leading.server_port import MachineShare

    path.mkdir()
    path.chmod(0o777)
    load = MachineShare().join(Load(ModelOptions(model="m", memory_utilization=0.8), path, path))
    assert load.options.memory_utilization == pytest.approx(0.4)
    assert "Other backends may be at work unseen" in caplog.text


@pytest.mark.mlx
def test_a_backend_says_which_ledger_it_joined_and_how_many_it_met(path, caplog):
    from backend.engine.leading.server_port import MachineShare

    first, second = MachineShare(), MachineShare()
    load = Load(ModelOptions(model="m"), path, path)
    with caplog.at_level(logging.INFO):
        assert first.join(load) == second.join(load) == load
    first.leave()
    second.leave()
    assert [record.args for record in caplog.records] == [
        (path, "nobody yet"),
        (path, "1 other backend"),
    ]


@pytest.mark.mlx
@pytest.mark.parametrize("is_on", [True, False])
def test_an_option_of_the_model_switches_it_off(path, is_on):
    from backend.engine.leading.server_port import MachineShare

    options = ModelOptions(model="m", tuning=TuningOptions.of(memory_ledger=is_on))
    status = EngineStatus(memory_bytes={"weights": 1_000, "kv_budget": 5_000})
    share = MachineShare()
    share.join(Load(options, path, path))
    share.make_room(1_000)
    share.begin(status, lambda _: None, has_media=False)
    machine = share.note(status).machine
    share.leave()
    assert path.exists() is is_on
    if is_on:
        assert not list(path.iterdir())
        (own,) = machine.backends
        assert (own.model, own.held_bytes, own.budget_bytes) == ("m", 1_000, 5_000)
    else:
        assert machine is None


def test_one_that_was_stopped_inside_stops_nobody(path, caplog):
    first, second = Backend(path), Backend(path)
    settle(first, second)
    before = second.budget
    with first.ledger.directory.exclusive(1.0), caplog.at_level(logging.WARNING):
        second.ledger.look()
        second.ledger.look()
    assert caplog.text.count("cannot be used now") == 1
    assert second.budget == before
    first.leave()
    second.leave()


class Machine(RuleBasedStateMachine):
    """Backends come, work, obey late and die; their claims never exceed the machine's memory."""

    backends: list[Backend]
    path = None

    def __init__(self):
        super().__init__()
        self.directory = Machine.path / os.urandom(8).hex()
        self.backends = []

    @rule(held=st.integers(0, 2_000), wish=st.integers(LEAST, 9_000))
    def come(self, held, wish):
        if len(self.backends) < 4:
            self.backends.append(Backend(self.directory, held=held, wish=wish))

    @rule(who=st.integers(0, 3), share=st.floats(0, 1), wanted=BYTES, is_busy=st.booleans())
    def work(self, who, share, wanted, is_busy):
        for each in self.backends[who : who + 1]:
            reserved = int(each.budget * share) if is_busy else 0
            cached = int((each.budget - reserved) * share)
            each.note(reserved=reserved, cached=cached, wanted=wanted * is_busy, is_busy=is_busy)

    @rule(who=st.integers(0, 3))
    def look(self, who):
        for each in self.backends[who : who + 1]:
            each.ledger.look()

    @rule(who=st.integers(0, 3))
    def obey(self, who):
        for each in self.backends[who : who + 1]:
            each.obey()

    @rule(who=st.integers(0, 3))
    def die(self, who):
        for each in self.backends[who : who + 1]:
            each.leave()
            self.backends.remove(each)

    @invariant()
    def nobody_takes_more_than_it_has_claimed(self):
        for each in self.backends:
            assert each.budget <= max(each.ledger.entry.budget, LEAST)

    @invariant()
    def a_budget_grows_only_by_what_nobody_has(self):
        for each in self.backends:
            free = free_bytes(USABLE, [other.ledger.entry for other in self.backends])
            claimed = each.ledger.entry.budget
            each.ledger.look()
            if len(self.backends) == 1:
                continue
            assert each.ledger.entry.budget - claimed <= max(free, LEAST)

    def teardown(self):
        settle(*self.backends)
        written = [each.ledger.entry for each in self.backends]
        running = sum(max(each.books.reserved, LEAST) for each in self.backends)
        pool = pool_bytes(USABLE, written)
        taken = sum(each.budget for each in self.backends)
        if len(self.backends) == 1:
            assert taken == self.backends[0].wish
        else:
            assert taken <= max(pool, running)
        for each in self.backends:
            each.leave()


def test_claims_stay_within_the_machine_whatever_happens(path):
    path.mkdir()
    Machine.path = path
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
    )
