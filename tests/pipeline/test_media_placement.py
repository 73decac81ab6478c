import logging

import pytest

from backend.core.prompt import MediaKind, Message
from backend.pipeline.media_placement import FILE_NAME, MAX_QUESTIONS, PlacementMemory

IMAGE, AUDIO = MediaKind.IMAGE, MediaKind.AUDIO
A, B, C = b"a", b"b", b"c"


def talk(*said):
    roles = ("user", "assistant")
    return [Message(role=roles[n % 2], content=text) for n, text in enumerate(said)]


def placed(memory, messages, *images, audios=()):
    counts = memory.place(messages, {IMAGE: list(images), AUDIO: list(audios)})
    return [count.get(IMAGE, 0) for count in counts]


@pytest.fixture
def memory():
    return PlacementMemory()


def test_what_is_new_belongs_to_the_last_question(memory):
    assert placed(memory, talk("what?", "a dog", "and?"), A, B) == [0, 0, 2]


def test_what_an_earlier_question_brought_stays_there(memory):
    placed(memory, talk("what?"), A)
    assert placed(memory, talk("what?", "a dog", "and?"), A, B) == [1, 0, 1]
    assert placed(memory, talk("what?", "a dog", "and?", "a cat", "no"), A, B) == [1, 0, 1, 0, 0]


def test_another_picture_at_the_same_question_is_not_the_one_that_was_seen(memory):
    placed(memory, talk("what?"), A)
    assert placed(memory, talk("what?", "a dog", "and?"), B) == [0, 0, 1]


def test_two_conversations_with_the_same_words_are_kept_apart(memory):
    placed(memory, talk("what?"), A)
    placed(memory, talk("what?"), B)
    placed(memory, talk("what?"), A, B)
    for images, expected in (((A,), [1, 0, 0]), ((B,), [1, 0, 0]), ((A, B), [2, 0, 0])):
        assert placed(memory, talk("what?", "a dog", "and?"), *images) == expected


def test_what_a_question_brought_stays_there_though_an_answer_was_edited(memory):
    placed(memory, talk("what?"), A)
    placed(memory, talk("what?", "a dog", "and?"), A, B)
    assert placed(memory, talk("what?", "a cow", "and?", "x", "no"), A, B) == [1, 0, 1, 0, 0]


def test_what_a_question_brought_stays_there_though_the_oldest_turns_were_dropped(memory):
    placed(memory, talk("what?"), A)
    placed(memory, talk("what?", "a dog", "and?"), A, B)
    assert placed(memory, talk("and?", "a cat", "no"), B) == [1, 0, 0]


def test_a_question_that_forgot_its_picture_and_was_asked_again_stays_without(memory):
    placed(memory, talk("what?"))
    placed(memory, talk("what?", "I see none", "what?"), A)
    follow_up = talk("what?", "I see none", "what?", "a dog", "and?")
    assert placed(memory, follow_up, A) == [0, 0, 1, 0, 0]


def test_a_system_prompt_that_changes_makes_no_other_conversation(memory):
    def at(clock, *said):
        return [Message(role="system", content=f"It is {clock}."), *talk(*said)]

    placed(memory, at("12:01", "what?"), A)
    follow_up = at("12:02", "what?", "a dog", "and?")
    assert placed(memory, follow_up, A, B) == [0, 1, 0, 1]


def test_kinds_are_placed_side_by_side(memory):
    media = {IMAGE: [A], AUDIO: [B]}
    memory.place(talk("what?"), media)
    counts = memory.place(talk("what?", "a dog", "and?"), media | {AUDIO: [B, C]})
    assert counts == [{IMAGE: 1, AUDIO: 1}, {}, {IMAGE: 0, AUDIO: 1}]


def test_a_conversation_without_a_question_gives_all_to_its_last_message(memory):
    messages = [Message(role="system", content="x"), Message(role="tool", content="y")]
    assert placed(memory, messages, A) == [0, 1]


def test_the_oldest_questions_are_forgotten(memory):
    placed(memory, talk("what?"), A)
    for number in range(MAX_QUESTIONS):
        placed(memory, talk(f"{number}"), B)
    assert placed(memory, talk("what?", "a dog", "and?"), A) == [0, 0, 1]


def test_places_are_known_after_a_restart_where_there_is_a_directory(tmp_path):
    placed(PlacementMemory(str(tmp_path / "new")), talk("what?"), A)
    follow_up = talk("what?", "a dog", "and?")
    assert placed(PlacementMemory(str(tmp_path / "new")), follow_up, A, B) == [1, 0, 1]
    assert placed(PlacementMemory(), follow_up, A, B) == [0, 0, 2]


def test_two_processes_share_a_directory(tmp_path):
    one, other = PlacementMemory(str(tmp_path)), PlacementMemory(str(tmp_path))
    placed(one, talk("what?"), A)
    placed(other, talk("where?"), B)
    later = PlacementMemory(str(tmp_path))
    assert placed(later, talk("what?", "a dog", "and?"), A) == [1, 0, 0]
    assert placed(later, talk("where?", "there", "and?"), B) == [1, 0, 0]


def test_a_place_that_is_known_is_not_written_again(tmp_path):
    for _ in range(3):
        memory = PlacementMemory(str(tmp_path))
        placed(memory, talk("what?"), A)
        placed(memory, talk("what?"), A)
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) == 3


def test_a_foreign_file_stays_and_places_are_kept_in_memory(tmp_path, caplog):
    (tmp_path / FILE_NAME).write_text("mine")
    memory = PlacementMemory(str(tmp_path))
    placed(memory, talk("what?"), A)
    assert placed(memory, talk("what?", "a dog", "and?"), A, B) == [1, 0, 1]
    assert (tmp_path / FILE_NAME).read_text() == "mine"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "was not written by this backend" in record.getMessage()


def test_a_directory_that_cannot_be_made_costs_no_request(tmp_path, caplog):
    (tmp_path / "file").touch()
    memory = PlacementMemory(str(tmp_path / "file"))
    placed(memory, talk("what?"), A)
    assert placed(memory, talk("what?", "a dog", "and?"), A, B) == [1, 0, 1]
    assert len(caplog.records) == 1
