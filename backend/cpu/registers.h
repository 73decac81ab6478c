/* Registers of eight numbers, for the kernels that `kernels.py` compiles. */

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define HAS_AVX2
#endif

#define LANES 8

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t words __attribute__((vector_size(4 * LANES)));

static inline __attribute__((always_inline)) floats load(const float *from)
{
    floats loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

static inline __attribute__((always_inline)) void store(float *to, floats stored)
{
    memcpy(to, &stored, sizeof stored);
}

static inline __attribute__((always_inline)) floats all(float number)
{
    return (floats){number, number, number, number, number, number, number, number};
}

/* Return a * b + c, always in one way, which is why the compiler fuses nothing itself. */
static inline __attribute__((always_inline)) floats add_product(floats a, floats b, floats c)
{
#ifdef HAS_AVX2
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

/* Return e to the power of numbers that are not positive; 2^-126 for those below. */
static inline __attribute__((always_inline)) floats exponential(floats numbers)
{
    floats powers = numbers * all(1.44269504f);
    const words is_low = powers < all(-126.0f);
    powers = (floats)((is_low & (words)all(-126.0f)) | (~is_low & (words)powers));
    /* A float of this size has no bits after the point: adding it rounds. */
    const floats rounding = all(12582912.0f);
    const floats rounded = powers + rounding;
    const floats rest = powers - (rounded - rounding);
    floats value = all(0.0013264727f);
    value = add_product(value, rest, all(0.009671513f));
    value = add_product(value, rest, all(0.055507336f));
    value = add_product(value, rest, all(0.24022242f));
    value = add_product(value, rest, all(0.693147f));
    value = add_product(value, rest, all(1.0f));
    return (floats)((words)value + ((words)rounded << 23));
}
