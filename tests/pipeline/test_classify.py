import numpy as np
import pytest

from backend.core.scoring import PathBiases, PlacedToken, TagProfile, TokenLabel
from backend.pipeline.entities import entities_of, token_labels

NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MAIL")
TEXT = "Ada Lovelace left Ölbach, ada@b.c"


def found(*labelled):
    """Give each word of the text a label: its place and the label of each of its tokens."""
    tokens, labels, at = [], [], 0
    for word, (piece, names) in enumerate(labelled):
        start = TEXT.index(piece, at)
        at = start + len(piece)
        for number, name in enumerate(names):
            stop = at if number == len(names) - 1 else start + 1
            tokens.append(PlacedToken(0, start, stop, word))
            labels.append(TokenLabel(NAMES.index(name), 0.5 + 0.1 * number))
            start = stop
    return [
        (entity.group, entity.text, entity.start, entity.end, round(entity.probability, 2))
        for entity in entities_of(TEXT, tokens, labels, NAMES)
    ]


def test_words_of_one_group_are_one_entity():
    assert found(("Ada", ["B-PER"]), ("Lovelace", ["I-PER", "I-PER"]), ("left", ["O"])) == [
        ("PER", "Ada Lovelace", 0, 12, 0.53)
    ]


def test_an_entity_begins_anew_where_its_label_says_so():
    entities = found(("Ada", ["B-PER"]), ("Lovelace", ["B-PER"]))
    assert [entity[1] for entity in entities] == ["Ada", "Lovelace"]


def test_a_word_has_the_label_of_its_first_labelled_token_and_places_are_bytes():
    assert found(("left", ["O"]), ("Ölbach", ["O", "B-LOC", "O"])) == [
        ("LOC", "Ölbach", 18, 25, 0.6)
    ]


def test_labels_may_be_groups_alone():
    assert [entity[:2] for entity in found(("ada@b.c", ["MAIL"]))] == [("MAIL", "ada@b.c")]


@pytest.mark.parametrize("labelled", [[], [("left", ["O"])]])
def test_a_text_may_have_no_entities(labelled):
    assert found(*labelled) == []


class ReadText(str):
    """A text that counts the characters taken from it."""

    taken = 0

    def __getitem__(self, place):
        part = super().__getitem__(place)
        self.taken += len(part)
        return part


def test_a_text_is_read_a_few_times_however_many_entities_it_has():
    text = ReadText("Ölbach " * 500)
    tokens = [PlacedToken(0, 7 * word, 7 * word + 6, word) for word in range(500)]
    entities = list(entities_of(text, tokens, [TokenLabel(3, 0.5)] * 500, NAMES))
    assert [entity.start for entity in entities] == [8 * word for word in range(500)]
    assert [entity.end for entity in entities] == [8 * word + 7 for word in range(500)]
    assert text.taken < 4 * len(text)


def test_places_are_right_where_words_share_a_character():
    tokens = [PlacedToken(0, 18, 22, 0), PlacedToken(0, 20, 24, 1)]
    entities = entities_of(TEXT, tokens, [TokenLabel(3, 0.5)] * 2, NAMES)
    for entity in entities:
        assert TEXT.encode()[entity.start : entity.end].decode() == entity.text


BIOES = ("O", *(f"{place}-{group}" for group in ("A", "B") for place in "BIES"))
BIASES = {
    "background_stay": -0.5,
    "background_to_start": 0.25,
    "inside_to_continue": 0.75,
    "inside_to_end": -0.25,
    "end_to_background": 0.5,
    "end_to_start": -1.0,
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("biases", [{}, BIASES])
def test_labels_are_those_of_the_likeliest_path_as_upstream_finds_it(seed, biases):
    from mlx_vlm.privacy_filter import ViterbiDecoder

    random = np.random.default_rng(seed)
    scores = random.normal(size=(1 + seed * 3, len(BIOES)), scale=2).astype(np.float32)
    profile = TagProfile(labels=BIOES, biases=PathBiases(**biases))
    labels = token_labels(scores.tobytes(), profile)
    named = {f"transition_bias_{name}": bias for name, bias in biases.items()}
    assert [each.label for each in labels] == ViterbiDecoder(BIOES, named).decode(scores)
    chosen = scores[np.arange(len(scores)), [each.label for each in labels]]
    assert np.allclose([each.probability for each in labels], np.exp(chosen))
