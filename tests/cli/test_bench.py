import json

import grpc
import pytest
from click.testing import CliRunner

from backend.cli.app import main
from backend.cli.bench import Figures, Spread, Stream


@pytest.fixture
def run_bench(scripted):
    def run(*options):
        arguments = ["bench", "--addr", scripted.address, *options]
        return CliRunner(env={"COLUMNS": "100"}).invoke(main, arguments)

    return run


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([], None),
        ([7.0], Spread(1, 7.0, 7.0, 7.0)),
        ([4.0, 1.0, 3.0, 2.0], Spread(4, 2.0, 4.0, 4.0)),
        ([float(i) for i in range(1, 201)], Spread(200, 100.0, 198.0, 200.0)),
    ],
)
def test_a_spread_is_of_values_that_were_measured(values, spread):
    assert Spread.of(values) == spread


def test_a_stream_counts_from_its_request_and_its_rate_from_the_first_text():
    stream = Stream(10.0, 30, ((10.5, 2), (11.0, 3), (12.5, 8)))
    assert (stream.first_token_ms, stream.tokens) == (500.0, 8)
    assert list(stream.gaps_ms()) == [500.0, 1500.0]
    assert Figures.of([[stream]]).stream_tokens_per_s == 3.0


def test_tokens_that_come_late_and_together_make_no_stream_fast():
    steady = Stream(0.0, 30, ((1.0, 1), (2.0, 11)))
    late = Stream(0.0, 30, ((1.999, 9), (2.0, 11)))
    assert Figures.of([[steady, late, late]]).stream_tokens_per_s == pytest.approx(14 / 1.002)


def test_a_reply_of_one_piece_has_no_rate():
    figures = Figures.of([[Stream(0.0, 30, ((0.5, 4),))]])
    assert (figures.stream_tokens_per_s, figures.gap_ms) == (None, None)
    assert figures.tokens_per_s == 8.0


def test_the_rate_of_all_is_over_the_whole_round_and_that_of_the_median_round():
    def round_of(seconds):
        return [Stream(0.0, 30, ((1.0, 1), (seconds, 6))), Stream(1.0, 34, ((2.0, 4),))]

    figures = Figures.of([round_of(2.0), round_of(5.0), round_of(4.0)])
    assert figures.tokens_per_s == 10 / 4.0
    assert (figures.prompt_tokens, figures.tokens) == ((30, 34), (4, 6))


def test_a_backend_that_tells_little_is_measured_by_its_replies_alone(run_bench, scripted, script):
    scripted.scripts = [[script.content("a", 1), script.content("b", 3)] for _ in range(3)]
    result = run_bench("--streams", "2", "--rounds", "1", "--tokens", "3")
    assert result.exit_code == 0, result.stderr
    assert "2 streams, 1 round · prompts of 30 tokens · replies of 3" in result.output
    assert len({request.Prompt for request in scripted.requests}) == 3
    assert all(request.PromptCacheRO and request.IgnoreEOS for request in scripted.requests)
    assert {request.Tokens for request in scripted.requests} == {3}


def test_json_is_an_object_with_what_was_asked_and_what_was_measured(run_bench, scripted, script):
    scripted.reports = [script.report()]
    scripted.scripts = [[script.content("a", 1), script.content("b", 4)] for _ in range(2)]
    told = json.loads(run_bench("--streams", "1", "--rounds", "1", "--json").stdout)
    assert (told["model"], told["streams"], told["prompt_tokens"]) == ("org/tiny", 1, 512)
    assert told["measured"]["tokens"] == [4, 4]
    assert told["measured"]["first_token_ms"]["count"] == told["measured"]["gap_ms"]["count"] == 1


def test_an_error_ends_the_measurement_in_one_line(run_bench, scripted, script):
    busy = script.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "16 requests\nare waiting")
    scripted.scripts = [[script.content("a")], [busy], [script.hang]]
    result = run_bench("--streams", "2")
    assert result.exit_code == 1
    assert "RESOURCE_EXHAUSTED: 16 requests are waiting" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_reply_without_a_token_is_no_measurement(run_bench, scripted):
    scripted.scripts = [[]]
    result = run_bench()
    assert (result.exit_code, "without a token" in result.stderr) == (1, True)
