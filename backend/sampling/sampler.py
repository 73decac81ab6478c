"""One vectorised draw for rows with individual parameters, seeds and positions.

Parameters are arrays, never Python constants of a compiled graph: a new temperature must not
cost a compilation. Temperature is applied first, so top-p and min-p see the distribution that
is drawn from.
"""

from collections.abc import Sequence

import mlx.core as mx

from backend.core.request import SamplingParams
from backend.sampling.drawing import Draw, DrawFromAll, DrawFromBest


class Sampler:
    """Draws one token per row; rebuilt whenever the rows change. Belongs to the main thread.

    A row's draw does not depend on the other rows.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int) -> None:
        drawing = [row for row, p in enumerate(params) if not p.is_greedy]
        best = [row for row in drawing if 0 < params[row].top_k < vocab_size]
        groups: list[tuple[list[int], type[DrawFromAll] | type[DrawFromBest]]] = [
            (best, DrawFromBest),
            ([row for row in drawing if row not in best], DrawFromAll),
        ]
        self._count = len(params)
        self._draws: list[tuple[list[int], Draw]] = [
            (rows, kind([params[row] for row in rows])) for rows, kind in groups if rows
        ]

    def draw(self, logits: mx.array, positions: Sequence[int]) -> mx.array:
        """Return token ids [B] for logits [B, V] (float32).

        Args:
            logits: One row per request, after penalties and masks.
            positions: Number of tokens that each row has drawn before.
        """
        if self._draws and len(self._draws[0][0]) == self._count:
            return self._draws[0][1](logits, positions)
        tokens = mx.argmax(logits, axis=-1).astype(mx.uint32)
        for rows, draw in self._draws:
            places = mx.array(rows)
            tokens[places] = draw(logits[places], [positions[row] for row in rows])
        return tokens
