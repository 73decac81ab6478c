/* Products of stored matrices with a few vectors; `quantised_products.py` compiles this file.

   A word of 32 bits holds 8 or 4 quantised weights, the first in its lowest bits. Eight words are
   read at once; their weights of one place are a register, which meets the inputs of these weights.
   `sort_inputs` sorts the inputs so, and adds them up by group: of a group, w = scale * q + bias, so
   that sum(w * x) = scale * sum(q * x) + bias * sum(x). */

#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#define WORDS 8
#define MOST_ROWS 4

typedef float floats __attribute__((vector_size(4 * WORDS)));
typedef int32_t words __attribute__((vector_size(4 * WORDS)));

struct matrix {
    const uint32_t *weights; /* [outputs, width * bits / 32] */
    const float *scales, *biases; /* [outputs, width / group] */
    long outputs, width, bits, group;
};

/* Return a * b + c; the same for any number of rows, which is why the compiler fuses nothing. */
static inline __attribute__((always_inline)) floats add_product(floats a, floats b, floats c)
{
#ifdef __FMA__
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

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
    if (given->bits == 4)
        sort(inputs, sorted, count, 8);
    else
        sort(inputs, sorted, count, 4);
    for (long first = 0; first < count; first += given->group) {
        floats sum = {0};
        for (long at = first; at < first + given->group; at += WORDS) {
            floats some;
            memcpy(&some, sorted + at, sizeof some);
            sum += some;
        }
        float total = 0;
        for (long word = 0; word < WORDS; word++)
            total += sum[word];
        *sums++ = total;
    }
}

static inline __attribute__((always_inline)) void spell_out(
    const struct matrix *given, float *outputs, long first, long last, const long bits)
{
    const long places = 32 / bits, groups = given->width / given->group;
    const words mask = (words){0} + ((1 << bits) - 1);
    const uint32_t *next = given->weights + first * (given->width / places);
    for (long number = first * groups; number < last * groups; number++)
        for (long at = 0; at < given->group; at += places * WORDS) {
            words packed;
            memcpy(&packed, next, sizeof packed);
            next += WORDS;
            for (long place = 0; place < places; place++) {
                const floats weights
                    = __builtin_convertvector((packed >> (place * bits)) & mask, floats)
                    * given->scales[number] + given->biases[number];
                memcpy(outputs, &weights, sizeof weights);
                outputs += WORDS;
            }
        }
}

/* Write the weights [last - first, width] of some outputs, in the order of sorted inputs. */
void dequantise(const struct matrix *given, float *outputs, long first, long last)
{
    if (given->bits == 4)
        spell_out(given, outputs, first, last, 4);
    else
        spell_out(given, outputs, first, last, 8);
}

/* With constant `bits` and `rows` the compiler keeps all of a group's numbers in registers. */
static inline __attribute__((always_inline)) void multiply(
    const struct matrix *given, const float *sorted, const float *sums, float *outputs, long first,
    long last, const long bits, const long rows)
{
    const long places = 32 / bits, block = places * WORDS, groups = given->width / given->group;
    const words mask = (words){0} + ((1 << bits) - 1);
    for (long output = first; output < last; output++) {
        const uint32_t *next = given->weights + output * (given->width / places);
        floats totals[MOST_ROWS];
        float shifts[MOST_ROWS];
        for (long row = 0; row < rows; row++) {
            totals[row] = (floats){0};
            shifts[row] = 0;
        }
        for (long number = 0; number < groups; number++) {
            floats products[MOST_ROWS];
            for (long row = 0; row < rows; row++)
                products[row] = (floats){0};
            for (long at = number * given->group; at < (number + 1) * given->group; at += block) {
                words packed;
                memcpy(&packed, next, sizeof packed);
                next += WORDS;
                for (long place = 0; place < places; place++) {
                    const floats weights
                        = __builtin_convertvector((packed >> (place * bits)) & mask, floats);
                    for (long row = 0; row < rows; row++) {
                        floats inputs;
                        memcpy(&inputs, sorted + row * given->width + at + place * WORDS,
                               sizeof inputs);
                        products[row] = add_product(weights, inputs, products[row]);
                    }
                }
            }
            const long place = output * groups + number;
            const floats scale = (floats){0} + given->scales[place];
            for (long row = 0; row < rows; row++) {
                totals[row] = add_product(products[row], scale, totals[row]);
                shifts[row] += given->biases[place] * sums[row * groups + number];
            }
        }
        for (long row = 0; row < rows; row++) {
            float sum = shifts[row];
            for (long word = 0; word < WORDS; word++)
                sum += totals[row][word];
            outputs[row * given->outputs + output] = sum;
        }
    }
}

/* Compute outputs [rows, outputs] from `first` to `last`. */
void multiply_rows(const struct matrix *given, const float *sorted, const float *sums,
                   float *outputs, long first, long last, long rows)
{
    for (long row = 0; row < rows;) {
        const float *row_sorted = sorted + row * given->width;
        const float *row_sums = sums + row * (given->width / given->group);
        float *row_outputs = outputs + row * given->outputs;
#define MULTIPLY(bits, count) \
    multiply(given, row_sorted, row_sums, row_outputs, first, last, bits, count)
        const long left = rows - row;
        const long count = left >= MOST_ROWS ? MOST_ROWS : left >= 2 ? 2 : 1;
        switch (10 * count + given->bits) {
        case 44: MULTIPLY(4, 4); break;
        case 48: MULTIPLY(8, 4); break;
        case 24: MULTIPLY(4, 2); break;
        case 28: MULTIPLY(8, 2); break;
        case 14: MULTIPLY(4, 1); break;
        default: MULTIPLY(8, 1);
        }
        row += count;
    }
}
