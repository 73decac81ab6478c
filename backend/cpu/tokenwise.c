/* Computations of each token alone, between the products with matrices; `kernels.py` compiles this
   file. Each number has the same result in any company. */

#include <math.h>
#include "registers.h"
#include "threads.h"

enum { SILU, GELU };

struct norm {
    const float *inputs, *weights, *biases; /* [rows, width]; [width] or null */
    float *outputs;
    long rows, width, parts; /* the width is a multiple of LANES */
    long is_centred;         /* whether the mean is subtracted first */
    float epsilon;
};

static float sum_lanes(floats each)
{
    return ((each[0] + each[4]) + (each[2] + each[6]))
         + ((each[1] + each[5]) + (each[3] + each[7]));
}

static void normalise_row(const struct norm *given, const float *inputs, float *outputs)
{
    const long width = given->width;
    floats sums = {0}, squares = {0};
    for (long at = 0; given->is_centred && at < width; at += LANES)
        sums += load(inputs + at);
    const floats mean = all(sum_lanes(sums) / width);
    for (long at = 0; at < width; at += LANES) {
        const floats some = load(inputs + at) - mean;
        squares = add_product(some, some, squares);
    }
    const floats scale = all(1 / sqrtf(sum_lanes(squares) / width + given->epsilon));
    for (long at = 0; at < width; at += LANES) {
        floats some = (load(inputs + at) - mean) * scale;
        if (given->weights)
            some *= load(given->weights + at);
        if (given->biases)
            some += load(given->biases + at);
        store(outputs + at, some);
    }
}

static void normalise_part(const void *of, long part)
{
    const struct norm *given = of;
    const long last = (part + 1) * given->rows / given->parts;
    for (long row = part * given->rows / given->parts; row < last; row++) {
        const long at = row * given->width;
        normalise_row(given, given->inputs + at, given->outputs + at);
    }
}

/* Divide rows by their root mean square, or by their standard deviation. */
void normalise(const float *inputs, const float *weights, const float *biases, float *outputs,
               long rows, long width, long is_centred, double epsilon, long parts)
{
    const struct norm given
        = {inputs, weights, biases, outputs, rows, width, parts, is_centred, (float)epsilon};
    share_parts(normalise_part, &given, parts);
}

struct gate {
    const float *gates, *inputs; /* null for the activation alone */
    float *outputs;
    long numbers, kind, parts; /* the numbers are a multiple of LANES */
};

/* Return gates / (1 + e^-powers). */
static inline __attribute__((always_inline)) floats scale_by_logistic(floats gates, floats powers)
{
    const words is_negative = powers < all(0);
    const floats falling = exponential(-(floats)((words)powers & 0x7fffffff));
    const floats above = (floats)((is_negative & (words)falling) | (~is_negative & (words)all(1)));
    return gates * (above / (all(1) + falling));
}

static void gate_part(const void *of, long part)
{
    const struct gate *given = of;
    const long count = given->numbers / LANES, last = (part + 1) * count / given->parts * LANES;
    for (long at = part * count / given->parts * LANES; at < last; at += LANES) {
        const floats some = load(given->gates + at);
        floats powers = some;
        if (given->kind == GELU)
            powers = (some * some * all(0.044715f) + all(1)) * (some * all(1.59576912f));
        const floats active = scale_by_logistic(some, powers);
        store(given->outputs + at, given->inputs ? active * load(given->inputs + at) : active);
    }
}

/* Compute an activation of gates, times the inputs. */
void open_gates(const float *gates, const float *inputs, float *outputs, long numbers, long kind,
                long parts)
{
    const struct gate given = {gates, inputs, outputs, numbers, kind, parts};
    share_parts(gate_part, &given, parts);
}

struct rotation {
    const float *inputs, *table; /* [rows, heads, tokens, width]; [rows or 1, tokens, dims] */
    float *outputs;
    long rows, heads, tokens, width, dims;
    long table_row; /* the distance of rows in the table; 0 if they share one */
    long has_pairs; /* whether neighbours are rotated, not numbers that are dims / 2 apart */
    long parts;
};

/* Of a table, cosines lie where the first number of each pair does, and sines where the second. */
static void rotate_token(
    const struct rotation *given, const float *inputs, const float *table, float *outputs)
{
    const long half = given->dims / 2, rest = given->width - given->dims;
    const long other = given->has_pairs ? 1 : half, step = given->has_pairs ? 2 : 1;
    for (long n = 0; n < half; n++) {
        const long at = n * step;
        const float first = inputs[at], second = inputs[at + other];
        outputs[at] = first * table[at] - second * table[at + other];
        outputs[at + other] = first * table[at + other] + second * table[at];
    }
    memcpy(outputs + given->dims, inputs + given->dims, sizeof *inputs * rest);
}

static void rotate_part(const void *of, long part)
{
    const struct rotation *given = of;
    const long count = given->rows * given->heads, last = (part + 1) * count / given->parts;
    for (long head = part * count / given->parts; head < last; head++) {
        const float *table = given->table + head / given->heads * given->table_row;
        for (long token = 0; token < given->tokens; token++) {
            const long at = (head * given->tokens + token) * given->width;
            rotate_token(given, given->inputs + at, table + token * given->dims, given->outputs + at);
        }
    }
}

/* Rotate pairs of numbers by the angles of their positions. */
void rotate(const float *inputs, const float *table, float *outputs, long rows, long heads,
            long tokens, long width, long dims, long table_row, long has_pairs, long parts)
{
    const struct rotation given = {inputs, table, outputs, rows, heads, tokens, width, dims,
                                   table_row, has_pairs, parts};
    share_parts(rotate_part, &given, parts);
}
