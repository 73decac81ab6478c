"""All families of the sweep, and those due on a day."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.sweep.small_towers import SMALL_TOWERS
from scripts.sweep.text_check import text_reference
from scripts.sweep.text_models import TEXT_FAMILIES, build_text_model, text_library
from scripts.sweep.variants import VARIANTS, Variant
from scripts.sweep.verdict import Expected
from scripts.sweep.vision_check import vision_reference
from scripts.sweep.vision_models import SWEPT_VISION_FAMILIES, build_vision_model

# A month covers all of them.
PARTS = 20

_SLOW = frozenset({"deepseekocr", "deepseekocr_2", "jina_vlm", "phi3_v"})
# Requirements of upstream processors that cannot be built here.
_NEEDS = {
    "plamo2vl": "its tokenizer is code that comes with a checkpoint from a hub",
}
# The library always takes the tokenizer from there, not from the checkpoint.
_HUB_TOKENIZERS = {"moondream2": "moondream/starmie-v1"}
_CRASHING = frozenset({"phi3small"})


@dataclass(frozen=True, slots=True)
class Family:
    """A family, or a variant of one, and the library that loads its checkpoints."""

    name: str
    sees: bool

    @property
    def variant(self) -> Variant | None:
        """Its quantisation and adapters, if any."""
        return None if self.sees else VARIANTS.get(self.name)

    @property
    def library(self) -> str:
        """The library with its reference replies."""
        if self.sees:
            return "mlx-vlm"
        return text_library(self.variant.base if self.variant else self.name)

    @property
    def is_slow(self) -> bool:
        """Whether trying it takes minutes, because upstream's shape cannot be made small."""
        return self.sees and self.name in _SLOW

    @property
    def crashes(self) -> bool:
        """Whether the library itself ends the process."""
        return not self.sees and self.name in _CRASHING

    @property
    def hub_tokenizer(self) -> str | None:
        """The repository of its tokenizer, if not in the checkpoint."""
        return _HUB_TOKENIZERS.get(self.name) if self.sees else None

    @property
    def has_code(self) -> bool:
        """Whether its checkpoint has code of its own, for a small tower."""
        return self.sees and self.name in SMALL_TOWERS

    @property
    def is_quick(self) -> bool:
        """Whether a test can try it."""
        return not (self.is_slow or self.crashes or self.needs or self.hub_tokenizer)

    @property
    def needs(self) -> str | None:
        """Why it cannot be tried without a download."""
        return _NEEDS.get(self.name) if self.sees else None

    def build(self, directory: Path) -> Path:
        """Write a tiny checkpoint, and its adapters inside."""
        if self.variant:
            return self.variant.build(directory)
        build = build_vision_model if self.sees else build_text_model
        return build(self.name, directory)

    def adapters(self, directory: Path) -> Sequence[Path]:
        """Return the directories of a checkpoint's adapters."""
        return self.variant.adapter_paths(directory) if self.variant else []

    def reference(self, directory: Path) -> dict[str, Expected]:
        """Return the library's own replies with a checkpoint."""
        if self.sees:
            return vision_reference(directory, briefly=self.is_slow)
        return text_reference(directory, self.library, self.adapters(directory))


def all_families() -> Sequence[Family]:
    """Return all families, by name."""
    text = (Family(name, sees=False) for name in (*TEXT_FAMILIES, *VARIANTS))
    vision = (Family(name, sees=True) for name in (*SWEPT_VISION_FAMILIES, *_NEEDS))
    return sorted([*text, *vision], key=lambda family: (family.sees, family.name))


def due(day: datetime.date) -> Sequence[Family]:
    """Return the families to try on a day: a different twentieth every day."""
    quick = [family for family in all_families() if family.is_quick]
    return quick[day.toordinal() % PARTS :: PARTS]


def to_json(replies: dict[str, Expected]) -> str:
    """Return replies as text."""
    return json.dumps({name: [*map(list, (r.tokens, r.gaps))] for name, r in replies.items()})


def from_json(text: str) -> dict[str, Expected]:
    """Return replies from text."""
    return {name: Expected(tokens, gaps) for name, (tokens, gaps) in json.loads(text).items()}
