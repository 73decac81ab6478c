"""From the keys of the prompt cache back to tokens, where they may be read."""

import pytest

from backend.core.prompt import Hidden, MediaSpan, Prompt, token_of_key

IDS = (5, 6, 7, 2**20)


def read(prompt, scope=""):
    return [token_of_key(key_id, scope) for key_id in prompt.key_ids]


def test_tokens_of_no_scope_are_read_by_everybody():
    assert read(Prompt(IDS)) == list(IDS)
    assert read(Prompt(IDS), "named anna") == list(IDS)


@pytest.mark.parametrize("scope", ["", "named bert", "anna"])
def test_tokens_of_a_scope_are_hidden_from_others(scope):
    assert read(Prompt(IDS, scope="named anna"), scope) == [Hidden.SCOPE] * len(IDS)


def test_tokens_of_a_scope_are_read_by_who_names_it():
    assert read(Prompt(IDS, scope="named anna"), "named anna") == list(IDS)


def test_what_is_public_of_a_scope_is_read_by_everybody():
    prompt = Prompt(IDS, scope="named anna", public_tokens=2)
    assert read(prompt) == [5, 6, Hidden.SCOPE, Hidden.SCOPE]


def test_media_are_no_tokens():
    prompt = Prompt(IDS, media=(MediaSpan(1, 3, b"digest", {}),))
    assert read(prompt) == [5, Hidden.MEDIUM, Hidden.MEDIUM, 2**20]
