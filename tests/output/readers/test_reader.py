from backend.core.step import ToolCallDelta
from backend.output.readers.reader import CallIds, CallLedger, Outbox


def make_ledger(tools=None):
    return CallLedger(tools, CallIds(lambda _name, number: f"new{number}"))


def test_an_id_that_the_model_wrote_is_kept():
    calls = make_ledger()
    assert calls.open("f", "functions.f:0") == ToolCallDelta(0, "functions.f:0", "f")
    assert calls.open("f") == ToolCallDelta(1, "new1", "f")


def test_an_id_is_never_used_twice():
    calls = make_ledger()
    assert [calls.open("f", "x").call_id for _ in range(3)] == ["x", "new1", "new2"]


def test_an_id_that_comes_late_replaces_the_first():
    calls = make_ledger()
    calls.open("f")
    assert calls.identify("x") == ToolCallDelta(0, "x")
    calls.open("f")
    assert [calls.identify(late).call_id for late in ("x", "", "y")] == ["new1", "new1", "y"]


def test_the_types_of_arguments_come_from_the_offered_schema():
    calls = make_ledger({"f": {"properties": {"a": {"type": "string"}}}})
    assert calls.parameter_types("f").of("a") == {"string"}
    assert not calls.parameter_types("g").of("a")
    assert not make_ledger(None).parameter_types("f").of("a")


def test_text_that_is_not_accounted_for_is_held():
    outbox = Outbox("<o>")
    outbox.begin()
    assert outbox.end("abc") == ()
    assert outbox.held == "<o>abc"
    outbox.begin()
    outbox.send(ToolCallDelta(0), -1)
    assert outbox.end("de") == (ToolCallDelta(0),)
    assert outbox.held == "cde"
    outbox.begin()
    outbox.send(ToolCallDelta(0), 1)
    outbox.end("fg")
    assert outbox.held == "g"
