"""Attention on CUDA: one kernel for rows of unlike length, and passes without a plan of cuDNN.

MLX's own kernel for single queries takes no mask, so rows of unlike length fall back on matrix
products with a mask; keys in several arrays take a chain of small operations. A step of a small
model on a large GPU takes as long as launching its kernels.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from backend.model.device import Device, Pieces, is_for_all_heads

_Constant: TypeAlias = tuple[str, int | bool | mx.Dtype]
_Kernel: TypeAlias = Callable[..., Sequence[mx.array]]

log = logging.getLogger(__name__)

_THREADS = 256
# A kernel is compiled for so many arrays of keys; unused places repeat the first.
SOURCE_COUNTS = (1, 4, 16, 64)
# The heads of queries that share those of keys, held in registers.
_MOST_REPEATS = 8
_MOST_WIDTH = 256
_WIDTH_STEP = 8
# A block reads at least so many positions, and so many blocks fill a GPU.
_POSITIONS_PER_SPLIT = 128
_BLOCKS = 512
_MOST_SPLITS = 32
# MLX's own kernel is faster for fewer positions of rows of one length.
_LEAST_EVEN = 2**13

_HEADER = r"""
#define UNROLL _Pragma("unroll")

template <typename T, int E>
struct alignas(16) Pack {
  T v[E];
};

// Adds the sum of another part of the keys.
__device__ inline void add_part(float& top, float& sum, float other_top, float other_sum,
                                float& own, float& other) {
  float highest = fmaxf(top, other_top);
  own = top == -INFINITY ? 0.f : exp2f(top - highest);
  other = other_top == -INFINITY ? 0.f : exp2f(other_top - highest);
  sum = sum * own + other_sum * other;
  top = highest;
}
"""

# One block takes the query heads of one row that share a head of keys, and a part of the positions.
# A group of L lanes takes one position at a time, each lane E numbers of it.
_ATTEND = r"""
  constexpr int E = sizeof(T) == 4 ? (D > 128 ? 8 : 4) : 8;
  constexpr int USED = D / E;
  constexpr int L = USED > 16 ? 32 : USED > 8 ? 16 : USED > 4 ? 8 : 4;
  constexpr int WARPS = THREADS / 32;
  constexpr int SUBS = THREADS / L;

  const int kv_head = blockIdx.x, row = blockIdx.y, split = blockIdx.z, splits = gridDim.z;
  const int lane = threadIdx.x % L, sub = threadIdx.x / L;
  const bool is_used = lane < USED;
  const int pieces = table_shape[1];
  const int* own = table + row * pieces * 3;

  float query[G][E], sums[G][E], top[G], total[G];
  UNROLL for (int g = 0; g < G; ++g) {
    top[g] = -INFINITY;
    total[g] = 0.f;
    UNROLL for (int e = 0; e < E; ++e) {
      sums[g][e] = 0.f;
      int64_t at = row * queries_strides[0] + (kv_head * G + g) * queries_strides[1] +
                   (lane * E + e) * queries_strides[3];
      query[g][e] = is_used ? static_cast<float>(queries[at]) * scale[0] * 1.44269504f : 0.f;
    }
  }

  int length = 0;
  for (int p = 0; p < pieces; ++p) length += own[3 * p + 2];
  const int lowest = W > 0 && length > W ? length - W : 0;
  const int64_t seen = length - lowest;
  const int from = lowest + static_cast<int>(seen * split / splits);
  const int to = lowest + static_cast<int>(seen * (split + 1) / splits);

  int start = 0;
  for (int p = 0; p < pieces; ++p) {
    const int source = own[3 * p], place = own[3 * p + 1], tokens = own[3 * p + 2];
    const int first = max(from - start, 0), last = min(to - start, tokens);
    start += tokens;
    if (first >= last) continue;
    const T *key, *value;
    int64_t key_step, value_step;
    switch (source) {
      CASES
    }
    key += lane * E;
    value += lane * E;
    // The next position is read while the present one is computed.
    Pack<T, E> next_k = {}, next_v = {};
    int position = first + sub;
    if (position < last && is_used) {
      next_k = *reinterpret_cast<const Pack<T, E>*>(key + position * key_step);
      next_v = *reinterpret_cast<const Pack<T, E>*>(value + position * value_step);
    }
    for (int base = first; base < last; base += SUBS) {
      const bool is_there = position < last;
      const Pack<T, E> k = next_k, v = next_v;
      position += SUBS;
      if (position < last && is_used) {
        next_k = *reinterpret_cast<const Pack<T, E>*>(key + position * key_step);
        next_v = *reinterpret_cast<const Pack<T, E>*>(value + position * value_step);
      }
      float score[G];
      UNROLL for (int g = 0; g < G; ++g) {
        score[g] = 0.f;
        UNROLL for (int e = 0; e < E; ++e) score[g] += query[g][e] * static_cast<float>(k.v[e]);
      }
      UNROLL for (int offset = L / 2; offset > 0; offset /= 2)
        UNROLL for (int g = 0; g < G; ++g)
          score[g] += __shfl_xor_sync(0xffffffffu, score[g], offset);
      if (!is_there) continue;
      UNROLL for (int g = 0; g < G; ++g) {
        const float highest = fmaxf(top[g], score[g]);
        const float kept = exp2f(top[g] - highest), weight = exp2f(score[g] - highest);
        top[g] = highest;
        total[g] = total[g] * kept + weight;
        UNROLL for (int e = 0; e < E; ++e)
          sums[g][e] = sums[g][e] * kept + weight * static_cast<float>(v.v[e]);
      }
    }
  }

  // The groups of a warp, then the warps of the block.
  UNROLL for (int offset = L; offset < 32; offset *= 2)
    UNROLL for (int g = 0; g < G; ++g) {
      float mine, theirs;
      float their_top = __shfl_xor_sync(0xffffffffu, top[g], offset);
      float their_total = __shfl_xor_sync(0xffffffffu, total[g], offset);
      add_part(top[g], total[g], their_top, their_total, mine, theirs);
      UNROLL for (int e = 0; e < E; ++e)
        sums[g][e] = sums[g][e] * mine + theirs * __shfl_xor_sync(0xffffffffu, sums[g][e], offset);
    }
  // As many heads at once as fit into the memory that a block shares.
  constexpr int ROUND = G * D <= 1024 ? G : 1024 / D;
  __shared__ float warp_sums[WARPS][ROUND * D], warp_top[WARPS][G], warp_total[WARPS][G];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0)
    UNROLL for (int g = 0; g < G; ++g) {
      warp_top[warp][g] = top[g];
      warp_total[warp][g] = total[g];
    }
  UNROLL for (int begin = 0; begin < G; begin += ROUND) {
    if (begin > 0) __syncthreads();
    if (threadIdx.x % 32 < USED)
      UNROLL for (int g = begin; g < begin + ROUND && g < G; ++g)
        UNROLL for (int e = 0; e < E; ++e)
          warp_sums[warp][(g - begin) * D + lane * E + e] = sums[g][e];
    __syncthreads();
    for (int at = threadIdx.x; at < min(ROUND, G - begin) * D; at += THREADS) {
      const int g = begin + at / D, d = at % D, head = kv_head * G + g;
      float highest = -INFINITY, whole = 0.f, sum = 0.f, mine, theirs;
      UNROLL for (int w = 0; w < WARPS; ++w) {
        add_part(highest, whole, warp_top[w][g], warp_total[w][g], mine, theirs);
        sum = sum * mine + theirs * warp_sums[w][at];
      }
      const int64_t place = static_cast<int64_t>(row) * gridDim.x * G + head;
      if constexpr (IS_SPLIT) {
        out[(place * splits + split) * D + d] = sum;
        if (d < 2) stats[(place * splits + split) * 2 + d] = d ? whole : highest;
      } else {
        if constexpr (HAS_SINKS) {
          add_part(highest, whole, static_cast<float>(sinks[head]) * 1.44269504f, 1.f, mine,
                   theirs);
          sum *= mine;
        }
        out[place * D + d] = static_cast<T>(sum / whole);
      }
    }
  }
"""

_JOIN = r"""
  const int head = blockIdx.x, row = blockIdx.y, d = threadIdx.x;
  const int splits = stats_shape[2];
  const int64_t at = (static_cast<int64_t>(row) * gridDim.x + head) * splits;
  float highest = -INFINITY, whole = 0.f, sum = 0.f, mine, theirs;
  for (int s = 0; s < splits; ++s) {
    add_part(highest, whole, stats[(at + s) * 2], stats[(at + s) * 2 + 1], mine, theirs);
    sum = sum * mine + theirs * parts[(at + s) * D + d];
  }
  if constexpr (HAS_SINKS) {
    add_part(highest, whole, static_cast<float>(sinks[head]) * 1.44269504f, 1.f, mine, theirs);
    sum *= mine;
  }
  out[at / splits * D + d] = static_cast<T>(sum / whole);
"""


def _lean(text: str) -> str:
    """Return CUDA without comments and indents: MLX copies it at each call."""
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


# Where the keys of a source, and its values, begin.
_CASE = (
    "case {i}: key = k{i} + place * k{i}_strides[0] + kv_head * k{i}_strides[1];"
    " value = v{i} + place * v{i}_strides[0] + kv_head * v{i}_strides[1];"
    " key_step = k{i}_strides[2]; value_step = v{i}_strides[2]; break;"
)


@cache
def _attend_kernel(count: int) -> _Kernel:
    """Return the kernel for keys and values in so many arrays."""
    source = _lean(_ATTEND).replace("CASES", "\n".join(_CASE.format(i=i) for i in range(count)))
    sources = [f"{letter}{i}" for i in range(count) for letter in "kv"]
    kernel: _Kernel = mx.fast.cuda_kernel(
        name=f"attend_pieces_{count}",
        input_names=["queries", "table", "scale", "sinks", *sources],
        output_names=["out", "stats"],
        header=_lean(_HEADER),
        source=source,
        ensure_row_contiguous=False,
    )
    return kernel


@cache
def _join_kernel() -> _Kernel:
    kernel: _Kernel = mx.fast.cuda_kernel(
        name="join_splits",
        input_names=["parts", "stats", "sinks"],
        output_names=["out"],
        header=_lean(_HEADER),
        source=_lean(_JOIN),
        ensure_row_contiguous=False,
    )
    return kernel


@cache
def _number(value: float) -> mx.array:
    return mx.array([value], mx.float32)


def attend_pieces(
    queries: mx.array,
    pieces: Pieces,
    *,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Return the attention [rows, heads, 1, width]; see `AttendPieces`.

    Returns:
        `None` if the kernel is not for such shapes, or MLX's own is as fast.
    """
    seen = pieces.longest if window is None else min(pieces.longest, window)
    if not _has_kernel(queries, pieces) or _is_for_mlx(pieces, len(queries), seen):
        return None
    splits = _splits(len(queries) * pieces.sources[0][0].shape[1], seen)
    form = _Form(
        sources=next(count for count in SOURCE_COUNTS if count >= len(pieces.sources)),
        dtype=queries.dtype,
        width=queries.shape[-1],
        repeats=queries.shape[1] // pieces.sources[0][0].shape[1],
        window=window or 0,
        sinks=None if sinks is None else sinks.dtype,
        is_split=splits > 1,
    )
    if not _works(form):
        return None
    given = [_number(scale), _number(0.0) if sinks is None else sinks]
    return _attended(form, queries, pieces, given, splits)


class _Form(NamedTuple):
    """All that a kernel is compiled for.

    Attributes:
        sources: The number of arrays of keys.
        width: Of a head.
        repeats: The heads of queries that share one of keys.
        window: 0 is none.
        sinks: Their type: MLX knows a compiled kernel by its constants, not by its inputs.
        is_split: Whether several blocks share a row's positions.
    """

    sources: int
    dtype: mx.Dtype
    width: int
    repeats: int
    window: int
    sinks: mx.Dtype | None
    is_split: bool

    @property
    def of_both(self) -> list[_Constant]:
        """The constants of both kernels."""
        types = (("T", self.dtype), ("S", self.sinks or mx.float32))
        return [*types, ("D", self.width), ("HAS_SINKS", self.sinks is not None)]

    @property
    def constants(self) -> list[_Constant]:
        """The constants of the kernel that attends."""
        own = (("G", self.repeats), ("THREADS", _THREADS), ("IS_SPLIT", self.is_split))
        return [*self.of_both, ("W", self.window), *own]


@cache
def _works(form: _Form) -> bool:
    """Tell whether the kernels work here; compiles them, which a pass would do anyway.

    An error inside a pass would cost its requests, at each pass again.
    """
    queries = mx.zeros((1, form.repeats, 1, form.width), form.dtype)
    keys = queries[:, :1]
    pieces = Pieces([(keys, keys)], mx.array([[[0, 0, 1]]], mx.int32), 1, is_even=True)
    sinks = _number(0.0) if form.sinks is None else mx.zeros(form.repeats, form.sinks)
    try:
        mx.eval(_attended(form, queries, pieces, [_number(1.0), sinks], 1 + form.is_split))
    except (RuntimeError, ValueError) as error:
        log.warning("MLX attends instead of the kernel for %s: %s", form, error)
        return False
    return True


def _attended(
    form: _Form,
    queries: mx.array,
    pieces: Pieces,
    given: Sequence[mx.array],
    splits: int,
) -> mx.array:
    """Return the attention, joined from that of all splits of the positions."""
    out, stats = _parts(form, queries, pieces, given, splits)
    return _joined(form, queries, [out, stats, given[-1]]) if form.is_split else out


def _parts(
    form: _Form, queries: mx.array, pieces: Pieces, given: Sequence[mx.array], splits: int
) -> Sequence[mx.array]:
    """Return the attention; or each split's sums, and its largest score and sum of weights."""
    rows, heads, _, width = queries.shape
    kv_heads = pieces.sources[0][0].shape[1]
    unused = [pieces.sources[0]] * (form.sources - len(pieces.sources))
    arrays = [array for source in (*pieces.sources, *unused) for array in source]
    return _attend_kernel(form.sources)(
        inputs=[queries, pieces.table, *given, *arrays],
        template=form.constants,
        grid=(kv_heads * _THREADS, rows, splits),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=(
            [(rows, heads, splits, width), (rows, heads, splits, 2)]
            if form.is_split
            else [queries.shape, (1,)]
        ),
        output_dtypes=[mx.float32 if form.is_split else queries.dtype, mx.float32],
    )


def _joined(form: _Form, queries: mx.array, parts: Sequence[mx.array]) -> mx.array:
    """Return the attention from all splits of the positions."""
    rows, heads, _, width = queries.shape
    return _join_kernel()(
        inputs=parts,
        template=form.of_both,
        grid=(heads * width, rows, 1),
        threadgroup=(width, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]


def _splits(blocks: int, positions: int) -> int:
    """Return the number of blocks that share the positions of a row."""
    wanted = min(-(-positions // _POSITIONS_PER_SPLIT), -(-_BLOCKS // blocks), _MOST_SPLITS)
    return max(wanted, 1)


def _has_kernel(queries: mx.array, pieces: Pieces) -> bool:
    keys, values = pieces.sources[0]
    _, heads, tokens, width = queries.shape
    repeats, rest = divmod(heads, keys.shape[1])
    if tokens > 1 or rest or repeats > _MOST_REPEATS or len(pieces.sources) > SOURCE_COUNTS[-1]:
        return False
    types = {queries.dtype, keys.dtype, values.dtype}
    is_alike = len(types) == 1 and keys.shape[-1] == values.shape[-1] == width
    return is_alike and width <= _MOST_WIDTH and width % _WIDTH_STEP == 0


def _is_for_mlx(pieces: Pieces, rows: int, seen: int) -> bool:
    """Tell whether MLX's kernel for single queries without a mask is as fast."""
    return pieces.is_even and seen == pieces.longest and rows * seen < _LEAST_EVEN


# MLX has a kernel of its own for so few queries without a mask.
_VECTOR_QUERIES = 3
# 128 MiB of scores in float32.
_MOST_SCORES = 2**25
_MATRIX = 2
_BITS_PER_WORD = 32


def attend_unplanned(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return the result of `mx.fast.scaled_dot_product_attention`, without a plan of cuDNN.

    On CUDA MLX's function makes a plan for every new pair of lengths: 40 to 60 ms on an H100, and
    630 to 740 ms with a mask that is an array. That is more than the pass of a short prompt, and
    hardly two prompts have the same length. Large passes are left to it.

    Args:
        queries: [rows, heads, width, head width].
        keys: [rows, kv heads, positions, head width].
        values: [rows, kv heads, positions, value width].
        mask: As MLX's function takes it.
        sinks: [heads] scores of an empty position.
    """
    rows, heads, width, head_width = queries.shape
    kv_heads, positions = keys.shape[1:3]
    is_large = rows * heads * width * positions > _MOST_SCORES
    has_kernel = width == 1 or (width <= _VECTOR_QUERIES and not isinstance(mask, mx.array))
    if is_large or has_kernel or sinks is not None or not is_for_all_heads(mask):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    flat = (queries.astype(mx.float32) * scale).reshape(rows, kv_heads, -1, head_width)
    scores = flat @ keys.astype(mx.float32).swapaxes(-1, -2)
    by_head = scores.reshape(rows, kv_heads, heads // kv_heads, width, positions)
    if mask is not None:
        by_head = _masked(by_head, mask)
    weights = mx.softmax(by_head, axis=-1).astype(values.dtype).reshape(scores.shape)
    return (weights @ values).reshape(rows, heads, width, -1)


def _masked(scores: mx.array, mask: mx.array | str) -> mx.array:
    """Apply a mask to scores [rows, kv heads, repeats, width, positions]."""
    width, positions = scores.shape[-2:]
    if isinstance(mask, str):
        mask = mx.arange(positions) <= mx.arange(positions - width, positions)[:, None]
    elif mask.ndim > _MATRIX:
        # Of rows, and of one head.
        mask = mask.reshape(-1, 1, 1, *mask.shape[-2:])
    if mask.dtype != mx.bool_:
        return scores + mask
    return mx.where(mask, scores, mx.finfo(mx.float32).min)


def attend_dequantised(
    queries: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    scale: float,
    mask: mx.array | str | None,
    bits: int,
) -> mx.array:
    """Return the attention to quantised keys, as `Device.attend_quantised` describes.

    MLX's products with quantised arrays need whole buffers on CUDA: for the positions that a cache
    has filled of one, they raise an error.
    """
    whole_keys, whole_values = _dequantised(keys, bits), _dequantised(values, bits)
    return attend_unplanned(queries, whole_keys, whole_values, scale=scale, mask=mask, sinks=None)


def _dequantised(parts: Sequence[mx.array], bits: int) -> mx.array:
    """Return the numbers of words, scales and biases."""
    words, scales, biases = parts
    group_size = words.shape[-1] * _BITS_PER_WORD // bits // scales.shape[-1]
    return mx.dequantize(words, scales, biases, group_size=group_size, bits=bits)


def install(device: Device) -> None:
    """Have a device compute attention as this module does."""
    device.attend, device.attend_from = attend_unplanned, 0
    device.attend_pieces, device.attend_quantised = attend_pieces, attend_dequantised
