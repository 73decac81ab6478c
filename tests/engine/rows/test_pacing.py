import pytest

from backend.engine.rows.pacing import (
    LEAST_TOKENS,
    ChunkSizer,
    Counters,
    PassMemory,
    PrefillPacer,
    RateMeter,
)


def make_pacer(**overrides: float) -> PrefillPacer:
    return PrefillPacer(**{"cap": 512, "cap_alone": 2048, "pause_s": 0.25, **overrides})


def test_the_first_chunk_is_small_because_nothing_is_known():
    assert make_pacer().pace().alone.chunk(10_000) == 128


def warmed_up(tokens_per_s: float) -> PrefillPacer:
    pacer = make_pacer()
    for _ in range(10):
        pacer.record(1000, 1000 / tokens_per_s)
    pacer.begin_pause()
    return pacer


def test_chunks_grow_to_the_cap_on_a_fast_model():
    pacer = warmed_up(1e6)
    assert pacer.pace().shared.chunk(10_000) == 512
    assert pacer.pace().alone.chunk(10_000) == 2048


def test_chunks_shrink_to_fit_the_pause_on_a_slow_model():
    pacer = warmed_up(128.0)
    assert pacer.pace().alone.chunk(10_000) == 96
    assert pacer.pace().shared.chunk(10_000) in (16, 32)


def test_long_passes_alone_do_not_lengthen_the_pauses_of_decoding_rows():
    pacer = make_pacer()
    for _ in range(10):
        for tokens in (pacer.pace().alone.tokens, pacer.pace().shared.tokens):
            pacer.record(tokens, 0.15 + 0.001 * tokens)
            pacer.begin_pause()
    assert pacer.pace().alone.tokens == pytest.approx(600, abs=32)
    for _ in range(10):
        pacer.record(pacer.pace().alone.tokens, 0.75)
    pacer.begin_pause()
    assert pacer.pace().shared.tokens == pytest.approx(100, abs=16)


def test_chunks_shrink_to_what_is_left_of_the_pause(clock):
    pacer = warmed_up(1000.0)
    pacer.begin_pause()
    now = clock[0]
    clock[0] = now + 0.1
    pacer.record(0, 0.1)
    assert pacer.pace().has_room
    assert pacer.pace().shared.chunk(10_000) == 144
    assert pacer.pace().alone.chunk(10_000) == 736
    clock[0] = now + 0.2
    assert not pacer.pace().has_room


def test_every_pause_has_room_for_one_chunk_even_if_it_is_over_at_once(clock):
    pacer = make_pacer(pause_s=0.001)
    pacer.record(128, 1.0)
    pacer.begin_pause()
    clock[0] += 1.0
    assert pacer.pace().has_room
    assert pacer.pace().shared.chunk(10_000) == 16
    pacer.record(16, 0.1)
    assert not pacer.pace().has_room


@pytest.mark.parametrize("first", [16, 128, 4096])
def test_the_size_of_full_passes_converges_though_each_has_a_fixed_cost(first):
    sizer = ChunkSizer(target_s=0.2, cap=8192)
    sizer.record(first, 0.05 + first * 0.001)
    for _ in range(30):
        tokens = sizer.size
        sizer.record(tokens, 0.05 + tokens * 0.001)
    assert 128 <= sizer.size <= 150


def test_short_passes_whose_cost_is_fixed_do_not_shrink_the_size():
    sizer = ChunkSizer(target_s=0.2, cap=8192)
    sizer.record(1024, 0.2)
    for _ in range(30):
        sizer.record(32, 0.15)
    assert sizer.size == 1024


def test_a_slow_pass_shrinks_the_size_though_it_was_not_full():
    sizer = ChunkSizer(target_s=0.2, cap=8192)
    sizer.record(1024, 0.2)
    sizer.record(512, 0.4)
    assert sizer.size == 640


def test_a_chunk_is_never_empty():
    pacer = make_pacer()
    pacer.record(16, 100.0)
    assert pacer.pace().shared.chunk(10_000) == 16


def test_short_tails_teach_nothing():
    pacer = make_pacer()
    pacer.record(3, 10.0)
    assert pacer.pace().shared.chunk(10_000) == 128


def test_a_short_rest_is_taken_along():
    pacer = warmed_up(1000.0)
    assert pacer.pace().alone.chunk(900) == 900
    assert pacer.pace().alone.chunk(1000) == 736
    assert pacer.pace().alone.chunk(5) == 5


def test_a_rest_never_exceeds_the_cap():
    assert warmed_up(1e6).pace().shared.chunk(600) == 512


def test_a_rate_is_taken_over_a_while_however_often_it_is_read(clock):
    start = clock[0]
    meter = RateMeter()
    rates = []
    for tenths in range(1, 11):
        clock[0] = start + tenths / 10.0
        rates.append(meter.of_late(10 * tenths))
    assert rates[0] == 0.0
    assert rates[-4:] == pytest.approx([100.0] * 4, rel=0.01)


def test_drawn_tokens_are_counted_and_their_sum_tells_their_order():
    one, same, other = Counters(), Counters(), Counters()
    for counters, drawn in ((one, (3, 4)), (same, (3, 4)), (other, (4, 3))):
        for token_id in drawn:
            counters.count(token_id)
    assert one.values["generated_tokens"] == other.values["generated_tokens"] == 2
    assert one.checksum == same.checksum != other.checksum


def prefilled(taken, *sizes):
    """Return a memory of passes of these sizes, in turn over one prompt, and their end."""
    memory, stop = PassMemory(), 0
    for tokens in sizes:
        stop += tokens
        memory.record(tokens, stop, taken(tokens, stop))
    return memory, stop


@pytest.mark.parametrize(
    ("by_token", "by_position", "by_score"), [(900, 0, 0), (900, 40, 0), (900, 40, 2), (0, 0, 2)]
)
def test_what_a_pass_takes_is_foretold_from_those_before_it(by_token, by_position, by_score):
    def taken(tokens, stop):
        return by_token * tokens + by_position * stop + by_score * tokens * stop

    memory, stop = prefilled(taken, 128, *[2048] * 8, 300, 16)
    for tokens, further in [(16, 100_000), (512, 30_000), (2048, 2048)]:
        expected = taken(tokens, stop + further)
        assert memory.most(tokens, stop + further) == pytest.approx(expected, rel=0.1)


def test_one_pass_leaves_it_open_what_a_larger_one_takes():
    memory, stop = prefilled(lambda tokens, _: 100 * tokens, 128)
    assert memory.most(128, stop) == 12_800
    assert memory.most(2048, stop + 2048) > 100 * 2048


def test_the_least_that_a_prompt_takes_was_seen_in_small_passes_before_its_end():
    memory, stop = prefilled(lambda tokens, stop: tokens * stop, 128, 256)
    assert memory.least(stop) == 0
    memory.record(20, stop + 20, 20 * (stop + 20))
    assert memory.least(stop) == 0
    assert memory.least(10**6) == pytest.approx(LEAST_TOKENS * (stop + 20), rel=0.01)


def test_one_small_pass_that_took_more_than_all_others_explain_refuses_nothing():
    memory, stop = prefilled(lambda tokens, _: 100 * tokens, 128, 512, 512, 64)
    memory.record(16, stop + 16, 100_000)
    assert memory.least(stop + 16) < 10_000


def test_without_any_pass_nothing_is_foretold_and_nothing_cut():
    memory = PassMemory()
    assert memory.fitting(1000, 512, 0) == 512
    memory.record(LEAST_TOKENS - 1, 100, 10**9)
    assert memory.least(100) == memory.most(16, 100) == 0


def test_a_pass_is_cut_to_what_fits_but_not_below_a_few_tokens():
    memory, stop = prefilled(lambda tokens, stop: tokens * stop, 128, 2048, 2048)
    fitting = memory.fitting(stop, 2048, 2_000_000)
    assert fitting * (stop + fitting) <= 2_000_000 < (fitting + 1) * (stop + fitting + 1)
    assert memory.fitting(stop, 2048, 10**9) == 2048
    assert memory.fitting(stop, 2048, 0) == LEAST_TOKENS
    assert memory.fitting(stop, 5, 0) == 5
