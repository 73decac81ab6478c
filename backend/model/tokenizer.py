"""Text to token ids and back, from any thread."""

import json
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType

from backend.errors import InvalidRequestError
from backend.model.pieces import PieceTable, piece_table
from backend.model.upstream import HfTokenizer


class Tokenizer:
    """A Hugging Face tokenizer behind a lock, with the facts that detokenizing needs.

    Attributes:
        vocabulary: All tokens, added ones included.
        special_ids: Ids whose text is markup for the model, not for a reader.
        special_texts: How they are written.
        added_texts: How all tokens are written that are never spelled out, special or not.
        pieces: Token id to bytes, or `None` where only `decode` knows.
        trims_leading_space: Whether decoding drops one space at the start of a text.
        longest_piece_bytes: No token stands for more bytes than this.
    """

    def __init__(self, hf_tokenizer: HfTokenizer, *, bos_id: int | None = None) -> None:
        """Read the tables.

        Args:
            hf_tokenizer: Used by nobody else from here on.
            bos_id: Begins raw prompts in place of what the tokenizer would put there.
        """
        self._hf = hf_tokenizer
        self._lock = threading.Lock()
        self._visible: dict[frozenset[int], Sequence[bytes]] = {}
        self.vocabulary: Mapping[str, int] = MappingProxyType(hf_tokenizer.get_vocab())
        self._ids = frozenset(self.vocabulary.values())
        self.special_ids = _special_ids(hf_tokenizer)
        self.added_texts: Mapping[int, str] = {
            token_id: token.content for token_id, token in hf_tokenizer.added_tokens_decoder.items()
        }
        self.special_texts: Mapping[int, str] = {
            token_id: text
            for text, token_id in self.vocabulary.items()
            if token_id in self.special_ids
        }
        table = _piece_table(hf_tokenizer, self.vocabulary)
        self.pieces = table.pieces if table else None
        self.trims_leading_space = table is not None and table.trims_leading_space
        pieces = self.pieces or [token.encode() for token in self.vocabulary]
        self.longest_piece_bytes = max(map(len, pieces), default=0)
        self._prefix = self._prompt_prefix() if bos_id is None else [bos_id]

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Return the token ids of `text`; markers written in it become special tokens.

        Args:
            text: Any text without lone surrogates.
            adds_special: Whether to put in what the tokenizer adds by itself, such as BOS.

        Raises:
            InvalidRequestError: The text is not Unicode.
        """
        try:
            with self._lock:
                ids: list[int] = self._hf.encode(
                    text, add_special_tokens=adds_special, verbose=False
                )
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError("Prompt", "holds a lone surrogate") from error
        return ids

    def encode_pair(
        self, first: str, second: str, *, limit: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the ids of two texts read as one, and which of them each token belongs to.

        Args:
            first: Stays whole.
            second: Loses its end to fit.
            limit: Tokens that there may be; with `first` alone they must not be more.
        """
        try:
            with self._lock:
                encoded = self._hf(
                    first,
                    second,
                    max_length=limit,
                    truncation=False if limit is None else "only_second",
                    verbose=False,
                )
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError("Prompt", "holds a lone surrogate") from error
        return encoded["input_ids"], encoded.get("token_type_ids") or []

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a raw prompt: BOS comes first, once, if the model wants one."""
        ids = self.encode(text, adds_special=False)
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included; ids without a token have none."""
        known = [token_id for token_id in ids if token_id in self._ids]
        with self._lock:
            text: str = self._hf.decode(
                known, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return text

    def token_id(self, text: str) -> int | None:
        """Return the id of the one token that is written so in the vocabulary."""
        return self.vocabulary.get(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, none for an id without a token."""
        if self.pieces is None:
            return self.decode([token_id]).encode()
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def visible_pieces(self, markers: Container[str]) -> Sequence[bytes] | None:
        """Return the piece table with special tokens blanked, except those in `markers`.

        `None` where there is no table. The same markers give the same object again.
        """
        if self.pieces is None:
            return None
        hidden = self._hidden_ids(markers)
        if hidden not in self._visible:
            self._visible[hidden] = tuple(
                b"" if token_id in hidden else piece for token_id, piece in enumerate(self.pieces)
            )
        return self._visible[hidden]

    def visible_decoder(self, markers: Container[str]) -> Callable[[Sequence[int]], str]:
        """Return a decoder that leaves out special tokens, except those in `markers`."""
        hidden = self._hidden_ids(markers)
        return lambda ids: self.decode([token_id for token_id in ids if token_id not in hidden])

    def _hidden_ids(self, markers: Container[str]) -> frozenset[int]:
        return frozenset(
            token_id for token_id, text in self.special_texts.items() if text not in markers
        )

    def _prompt_prefix(self) -> list[int]:
        """Find what the tokenizer puts before a text by itself."""
        bare = self.encode("a", adds_special=False)
        full = self.encode("a", adds_special=True)
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return []


def _special_ids(hf_tokenizer: HfTokenizer) -> frozenset[int]:
    added = hf_tokenizer.added_tokens_decoder
    marked = (token_id for token_id, token in added.items() if token.special)
    return frozenset(marked) | frozenset(hf_tokenizer.all_special_ids)


def _piece_table(hf_tokenizer: HfTokenizer, vocabulary: Mapping[str, int]) -> PieceTable | None:
    if not hf_tokenizer.is_fast or hf_tokenizer.backend_tokenizer.decoder is None:
        return None
    # The state of a decoder is its JSON; the whole tokenizer's would be megabytes.
    decoder = json.loads(hf_tokenizer.backend_tokenizer.decoder.__getstate__())
    return piece_table(decoder, vocabulary)
