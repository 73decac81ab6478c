/* Attention of a few queries to many positions; `kernels.py` compiles this file.

   A tile is the keys or values of some positions; quantised ones are written out as numbers first.
   All queries of a head meet a tile while it lies in the core's cache, and weigh its values before
   the next one is read. Each sum has an order of its own, whatever else is computed with it. */

#include <math.h>
#include <string.h>
#include "registers.h"

#define TILE 32

typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* Keys or values; numbers of a position, and their groups, follow each other. */
struct stored {
    const void *numbers; /* floats, or words of 8 or 4 bits, the first number in the lowest */
    const float *scales, *biases;
    long row, head;             /* distances of rows and heads in floats or words */
    long group_row, group_head; /* the same of scales and biases */
    long width, bits, group;
};

struct attention {
    struct stored keys, values;
    const float *queries; /* [rows, heads, count, width], scaled */
    const uint8_t *hidden; /* whether a position is; null hides none */
    long hidden_row, hidden_owner, hidden_query; /* distances in it */
    long rows, heads, count, repeats, per_owner; /* a query is of an owner and a repeat */
    long positions, chunk, chunks;
    float *weighted, *top, *total; /* [chunks, rows, heads, count, value width, 1 and 1] */
};

/* Return the sum of the lanes of each of eight. */
static inline __attribute__((always_inline)) floats add_lanes(const floats *each)
{
#ifdef HAS_AVX2
    const floats a = _mm256_hadd_ps(_mm256_hadd_ps(each[0], each[1]), _mm256_hadd_ps(each[2], each[3]));
    const floats b = _mm256_hadd_ps(_mm256_hadd_ps(each[4], each[5]), _mm256_hadd_ps(each[6], each[7]));
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
#else
    floats sums;
    for (long n = 0; n < LANES; n++)
        sums[n] = ((each[n][0] + each[n][1]) + (each[n][2] + each[n][3]))
                + ((each[n][4] + each[n][5]) + (each[n][6] + each[n][7]));
    return sums;
#endif
}

/* Return eight numbers of 8 bits. */
static inline __attribute__((always_inline)) words load_bytes(const uint32_t *from)
{
#ifdef HAS_AVX2
    return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    bytes loaded;
    memcpy(&loaded, from, sizeof loaded);
    return __builtin_convertvector(loaded, words);
#endif
}

/* Write the numbers of some positions to a tile. */
static inline __attribute__((always_inline)) void spell_out(
    const struct stored *given, const uint32_t *packed, const float *scales, const float *biases,
    float *tile, long count, const long bits)
{
    const long groups = given->width / given->group;
    for (long number = 0; number < count * groups; number++) {
        const floats scale = all(scales[number]), bias = all(biases[number]);
        for (long at = 0; at < given->group; at += LANES) {
            words some;
            if (bits == 4) {
                const words shifts = {0, 4, 8, 12, 16, 20, 24, 28};
                some = (((words){0} + (int32_t)*packed) >> shifts) & 15;
                packed += 1;
            } else {
                some = load_bytes(packed);
                packed += 2;
            }
            store(tile, add_product(__builtin_convertvector(some, floats), scale, bias));
            tile += LANES;
        }
    }
}

/* Return TILE positions of a row and head; those after `count` are zeros. */
static const float *tile_of(
    const struct stored *given, long row, long head, long first, long count, float *scratch)
{
    const long width = given->width, groups = given->bits == 32 ? 0 : width / given->group;
    const long start = row * given->row + head * given->head + first * (width * given->bits / 32);
    const long group = row * given->group_row + head * given->group_head + first * groups;
    if (given->bits == 32 && count == TILE)
        return (const float *)given->numbers + start;
    const uint32_t *packed = (const uint32_t *)given->numbers + start;
    if (given->bits == 32)
        memcpy(scratch, packed, count * width * sizeof(float));
    else if (given->bits == 8)
        spell_out(given, packed, given->scales + group, given->biases + group, scratch, count, 8);
    else
        spell_out(given, packed, given->scales + group, given->biases + group, scratch, count, 4);
    memset(scratch + count * width, 0, (TILE - count) * width * sizeof(float));
    return scratch;
}

/* Multiply one or two queries with a tile of keys. A register of scores, and later of weights, holds
   as many positions of each query. */
static inline __attribute__((always_inline)) void multiply(
    const float *queries, const float *keys, float *scores, long width, const long rows)
{
    const long step = LANES / rows;
    for (long first = 0; first < TILE; first += step) {
        floats sums[LANES];
        for (long n = 0; n < LANES; n++)
            sums[n] = all(0);
        for (long at = 0; at < width; at += LANES)
            for (long place = 0; place < step; place++) {
                const floats key = load(keys + (first + place) * width + at);
                for (long row = 0; row < rows; row++) {
                    floats *sum = sums + row * step + place;
                    *sum = add_product(load(queries + row * width + at), key, *sum);
                }
            }
        store(scores + first * rows, add_lanes(sums));
    }
}

/* Give positions that a query does not see the lowest score. */
static inline __attribute__((always_inline)) void hide(
    float *scores, const uint8_t *hidden, long count, const long rows)
{
    const long step = LANES / rows;
    for (long place = 0; place < TILE; place++)
        if (place >= count || (hidden && hidden[place]))
            scores[place / step * LANES + place % step] = -INFINITY;
}

/* Turn scores into weights, and set by which factors the earlier ones fade. */
static inline __attribute__((always_inline)) void soften(
    float *scores, float *top, float *total, float *fading, const long rows)
{
    const long step = LANES / rows;
    floats highest = load(scores), base = all(0), sums[2] = {all(0), all(0)};
    for (long at = LANES; at < rows * TILE; at += LANES) {
        const floats other = load(scores + at);
        const words is_higher = other > highest;
        highest = (floats)((is_higher & (words)other) | (~is_higher & (words)highest));
    }
    for (long row = 0; row < rows; row++) {
        float next = top[row];
        for (long lane = row * step; lane < (row + 1) * step; lane++)
            next = highest[lane] > next ? highest[lane] : next;
        /* A query that has seen nothing yet has no largest score. */
        for (long lane = row * step; lane < (row + 1) * step; lane++)
            base[lane] = next == -INFINITY ? 0 : next;
        fading[row] = top[row] == next ? 1 : top[row] == -INFINITY ? 0 : exponential(all(top[row] - next))[0];
        top[row] = next;
    }
    for (long at = 0; at < rows * TILE; at += LANES) {
        const floats some = load(scores + at);
        const words is_seen = some != all(-INFINITY);
        const floats weights = (floats)((words)exponential(some - base) & is_seen);
        store(scores + at, weights);
        sums[at / LANES % rows] += weights;
    }
    for (long row = 0; row < rows; row++) {
        const floats *low = sums, *high = sums + rows - 1;
        const long l = row * step, h = rows == 1 ? 4 : l;
        total[row] = total[row] * fading[row]
                   + ((((*low)[l] + (*low)[l + 1]) + ((*low)[l + 2] + (*low)[l + 3]))
                      + (((*high)[h] + (*high)[h + 1]) + ((*high)[h + 2] + (*high)[h + 3])));
    }
}

/* Add the weighted values of a tile, `columns` registers of them, to sums that fade. */
static inline __attribute__((always_inline)) void weigh(
    const float *weights, const float *values, const float *fading, float *weighted, long width,
    const long rows, const long columns)
{
    const long step = LANES / rows;
    floats sums[LANES];
    for (long row = 0; row < rows; row++)
        for (long n = 0; n < columns; n++)
            sums[row * columns + n] = load(weighted + row * width + n * LANES) * all(fading[row]);
    for (long first = 0; first < TILE; first += step)
        for (long place = 0; place < step; place++)
            for (long row = 0; row < rows; row++) {
                const floats weight = all(weights[first * rows + row * step + place]);
                for (long n = 0; n < columns; n++) {
                    const float *value = values + (first + place) * width + n * LANES;
                    floats *sum = sums + row * columns + n;
                    *sum = add_product(weight, load(value), *sum);
                }
            }
    for (long row = 0; row < rows; row++)
        for (long n = 0; n < columns; n++)
            store(weighted + row * width + n * LANES, sums[row * columns + n]);
}

/* Attend with one or two queries, from number `first` on, to a tile. */
static inline __attribute__((always_inline)) void attend_tile(
    const struct attention *given, const float *queries, const float *keys, const float *values,
    const uint8_t *hidden, long count, long first, float *weighted, float *top, float *total,
    const long rows)
{
    const long width = given->values.width, owned = given->repeats * given->per_owner;
    const long step = LANES / rows;
    float scores[2 * TILE], fading[2];
    multiply(queries + first * given->keys.width, keys, scores, given->keys.width, rows);
    for (long row = 0; row < rows && (hidden || count < TILE); row++) {
        const long own = (first + row) / owned * given->hidden_owner
                       + (first + row) % given->per_owner * given->hidden_query;
        hide(scores + row * step, hidden ? hidden + own : 0, count, rows);
    }
    soften(scores, top + first, total + first, fading, rows);
    weighted += first * width;
    long at = 0;
    for (; at + step * LANES <= width; at += step * LANES)
        weigh(scores, values + at, fading, weighted + at, width, rows, step);
    for (; at < width; at += LANES)
        weigh(scores, values + at, fading, weighted + at, width, rows, 1);
}

/* Attend with all queries of a head of a row to a chunk of positions. Scratch has room for a tile
   of keys and one of values. */
static void attend_chunk(
    const struct attention *given, long row, long head, long chunk, float *scratch)
{
    const long width = given->values.width;
    const long pair = row * given->heads + head;
    const long number = (chunk * given->rows * given->heads + pair) * given->count;
    const float *queries = given->queries + pair * given->count * given->keys.width;
    float *weighted = given->weighted + number * width;
    float *top = given->top + number, *total = given->total + number;
    for (long n = 0; n < given->count; n++) {
        top[n] = -INFINITY;
        total[n] = 0;
    }
    memset(weighted, 0, given->count * width * sizeof(float));
    const long start = chunk * given->chunk, left = given->positions - start;
    const long end = start + (left < given->chunk ? left : given->chunk);
    for (long at = start; at < end; at += TILE) {
        const long count = end - at < TILE ? end - at : TILE;
        const float *keys = tile_of(&given->keys, row, head, at, count, scratch);
        const float *values = tile_of(
            &given->values, row, head, at, count, scratch + TILE * given->keys.width);
        const uint8_t *hidden = given->hidden ? given->hidden + row * given->hidden_row + at : 0;
        long n = 0;
        for (; n + 2 <= given->count; n += 2)
            attend_tile(given, queries, keys, values, hidden, count, n, weighted, top, total, 2);
        if (n < given->count)
            attend_tile(given, queries, keys, values, hidden, count, n, weighted, top, total, 1);
    }
}

/* Compute the parts from number `first` to `last`: the chunks of each head of each row. */
void attend(const struct attention *given, long first, long last, float *scratch)
{
    for (long part = first; part < last; part++) {
        const long pair = part / given->chunks;
        attend_chunk(given, pair / given->heads, pair % given->heads, part % given->chunks,
                     scratch);
    }
}
