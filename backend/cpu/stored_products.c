/* Products of stored matrices with a few vectors; `kernels.py` compiles this file.

   A word of 32 bits holds 8 or 4 quantised weights or 2 of bfloat16, the first in its lowest bits.
   Eight words are read at once; their weights of one place are a register, which meets the inputs of
   these weights. `sort_inputs` sorts the inputs so, and adds them up by group: of a group of
   quantised ones, w = scale * q + bias, so that sum(w * x) = scale * sum(q * x) + bias * sum(x). */

#include <string.h>
#include "registers.h"
#include "threads.h"

#define WORDS LANES
#define MOST_ROWS 8
#define MOST_OUTPUTS 4
/* Of weights, which all rows meet one after another while they are at hand. */
#define NEAR_BYTES (1 << 17)

struct matrix {
    const uint32_t *weights; /* [outputs, width * bits / 32] */
    const float *scales, *biases; /* [outputs, width / group]; bfloat16 has none */
    long outputs, width, bits, group;
};

static inline __attribute__((always_inline)) void sort(
    const float *inputs, float *sorted, long count, const long places)
{
    for (long block = 0; block < count; block += places * WORDS)
        for (long place = 0; place < places; place++)
            for (long word = 0; word < WORDS; word++)
                sorted[block + place * WORDS + word] = inputs[block + word * places + place];
}

/* Inputs [rows, width], sorted inputs of the same size, and sums [rows, width / group]. */
void sort_inputs(const struct matrix *given, const float *inputs, float *sorted, float *sums,
                 long rows)
{
    const long count = rows * given->width;
    switch (given->bits) {
    case 4: sort(inputs, sorted, count, 8); break;
    case 8: sort(inputs, sorted, count, 4); break;
    default: sort(inputs, sorted, count, 2); return;
    }
    for (long first = 0; first < count; first += given->group) {
        floats sum = {0};
        for (long at = first; at < first + given->group; at += WORDS)
            sum += load(sorted + at);
        float total = 0;
        for (long word = 0; word < WORDS; word++)
            total += sum[word];
        *sums++ = total;
    }
}

/* Return the weights of one place of eight words; of quantised ones, without scale and bias. */
static inline __attribute__((always_inline)) floats unpack(words packed, long place, const long bits)
{
    if (bits == 16)
        return (floats)(place ? packed & ((words){0} - (1 << 16)) : packed << 16);
    const words mask = (words){0} + ((1 << bits) - 1);
    return __builtin_convertvector((packed >> (place * bits)) & mask, floats);
}

static inline __attribute__((always_inline)) void spell_out(
    const struct matrix *given, float *outputs, long first, long last, const long bits)
{
    const long places = 32 / bits, groups = given->width / given->group;
    const uint32_t *next = given->weights + first * (given->width / places);
    for (long number = first * groups; number < last * groups; number++)
        for (long at = 0; at < given->group; at += places * WORDS) {
            words packed;
            memcpy(&packed, next, sizeof packed);
            next += WORDS;
            for (long place = 0; place < places; place++) {
                const floats weights = unpack(packed, place, bits) * given->scales[number]
                    + given->biases[number];
                store(outputs, weights);
                outputs += WORDS;
            }
        }
}

/* Write the quantised weights [last - first, width] of some outputs, in the order of sorted inputs. */
void dequantise(const struct matrix *given, float *outputs, long first, long last)
{
    if (given->bits == 4)
        spell_out(given, outputs, first, last, 4);
    else
        spell_out(given, outputs, first, last, 8);
}

/* With constant numbers the compiler keeps all of a group's products in registers. A row and an
   output have the same product in whatever company. */
static inline __attribute__((always_inline)) void multiply(
    const struct matrix *given, const float *sorted, const float *sums, float *outputs, long first,
    const long bits, const long rows, const long columns)
{
    const long places = 32 / bits, block = places * WORDS, groups = given->width / given->group;
    const uint32_t *next = given->weights + first * (given->width / places);
    floats totals[MOST_OUTPUTS][MOST_ROWS];
    float shifts[MOST_OUTPUTS][MOST_ROWS];
    for (long column = 0; column < columns; column++)
        for (long row = 0; row < rows; row++) {
            totals[column][row] = (floats){0};
            shifts[column][row] = 0;
        }
    for (long number = 0; number < groups; number++) {
        floats products[MOST_OUTPUTS][MOST_ROWS];
        for (long column = 0; column < columns; column++)
            for (long row = 0; row < rows; row++)
                products[column][row] = (floats){0};
        for (long at = number * given->group; at < (number + 1) * given->group; at += block) {
            words packed[MOST_OUTPUTS];
            for (long column = 0; column < columns; column++)
                memcpy(&packed[column], next + column * (given->width / places), sizeof *packed);
            next += WORDS;
            for (long place = 0; place < places; place++)
                for (long column = 0; column < columns; column++) {
                    const floats weights = unpack(packed[column], place, bits);
                    for (long row = 0; row < rows; row++) {
                        const floats inputs
                            = load(sorted + row * given->width + at + place * WORDS);
                        products[column][row]
                            = add_product(weights, inputs, products[column][row]);
                    }
                }
        }
        for (long column = 0; column < columns; column++)
            for (long row = 0; row < rows; row++) {
                if (bits == 16) {
                    totals[column][row] = products[column][row];
                    continue;
                }
                const long place = (first + column) * groups + number;
                const floats scale = (floats){0} + given->scales[place];
                totals[column][row] = add_product(products[column][row], scale, totals[column][row]);
                shifts[column][row] += given->biases[place] * sums[row * groups + number];
            }
    }
    for (long column = 0; column < columns; column++)
        for (long row = 0; row < rows; row++) {
            float sum = shifts[column][row];
            for (long word = 0; word < WORDS; word++)
                sum += totals[column][row][word];
            outputs[row * given->outputs + first + column] = sum;
        }
}

/* Several outputs at once, if few rows would leave registers idle. */
static inline __attribute__((always_inline)) void multiply_all(
    const struct matrix *given, const float *sorted, const float *sums, float *outputs, long first,
    long last, const long bits, const long rows)
{
    const long columns = rows == 1 ? 4 : rows == 2 ? 2 : 1;
    for (; first + columns <= last; first += columns)
        multiply(given, sorted, sums, outputs, first, bits, rows, columns);
    for (; first < last; first++)
        multiply(given, sorted, sums, outputs, first, bits, rows, 1);
}

static void multiply_near(const struct matrix *given, const float *sorted, const float *sums,
                          float *outputs, long first, long last, long rows)
{
    for (long row = 0; row < rows;) {
        const float *row_sorted = sorted + row * given->width;
        const float *row_sums = sums + row * (given->width / given->group);
        float *row_outputs = outputs + row * given->outputs;
#define MULTIPLY(bits, count) \
    multiply_all(given, row_sorted, row_sums, row_outputs, first, last, bits, count)
#define MULTIPLY_ROWS(count) \
    switch (given->bits) { \
    case 4: MULTIPLY(4, count); break; \
    case 8: MULTIPLY(8, count); break; \
    default: MULTIPLY(16, count); \
    } \
    row += count;
        if (rows - row >= 8) {
            MULTIPLY_ROWS(8)
        } else if (rows - row >= 4) {
            MULTIPLY_ROWS(4)
        } else if (rows - row >= 2) {
            MULTIPLY_ROWS(2)
        } else {
            MULTIPLY_ROWS(1)
        }
    }
}

struct products {
    const struct matrix *matrix;
    const float *sorted, *sums;
    float *outputs;
    long rows, parts;
};

static void multiply_part(const void *given, long part)
{
    const struct products *all = given;
    const struct matrix *matrix = all->matrix;
    /* Whole groups of outputs that are computed at once. */
    const long groups = (matrix->outputs + MOST_OUTPUTS - 1) / MOST_OUTPUTS;
    const long end = (part + 1) * groups / all->parts * MOST_OUTPUTS;
    const long last = end < matrix->outputs ? end : matrix->outputs;
    const long near = NEAR_BYTES * 8 / (matrix->width * matrix->bits);
    const long step = (1 + near / MOST_OUTPUTS) * MOST_OUTPUTS;
    for (long first = part * groups / all->parts * MOST_OUTPUTS; first < last; first += step)
        multiply_near(matrix, all->sorted, all->sums, all->outputs, first,
                      last < first + step ? last : first + step, all->rows);
}

/* Compute outputs [rows, outputs] in some parts at once. */
void multiply_rows(const struct matrix *given, const float *sorted, const float *sums,
                   float *outputs, long rows, long parts)
{
    parts = parts < MOST_PARTS ? parts : MOST_PARTS;
    const struct products all = {given, sorted, sums, outputs, rows, parts};
    share_parts(multiply_part, &all, parts);
}
