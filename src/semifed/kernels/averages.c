/* One pass over models: their weighted sum, and how far one is from another.

   A sum runs over the models in their order, in double precision, and every product is rounded before it is added:
   the operations of PyTorch's `total.add_(term.copy_(model).mul_(share))`, so it has the same bits. What is saved is
   memory: totals of a block of numbers stay in the processor's cache while all models go by. */

#include <stdint.h>
#include <string.h>

/* As many as the processor has: vectors that a compiler has to take apart are slow. */
#if defined(__AVX512F__)
#define LANES 8
#elif defined(__AVX__)
#define LANES 4
#else
#define LANES 2
#endif
#define BLOCK 8192 /* numbers whose totals are held: 64 KB; models in files are read by pieces of half of that */
#define TOGETHER 4 /* models that are added while a total is in a register */
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define ANYWHERE "+x"
#elif defined(__aarch64__)
#define ANYWHERE "+w"
#else
#define ANYWHERE "+m"
#endif

typedef double doubles __attribute__((vector_size(8 * LANES)));

INLINE doubles widened(const float *from) {
    doubles value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = from[lane]; /* GCC takes __builtin_convertvector apart */
    return value;
}

/* A product that the compiler may not contract with a sum. */
INLINE doubles product(const float *from, double share) {
    doubles value = widened(from) * share;
    __asm__("" : ANYWHERE(value));
    return value;
}

INLINE double product_of_one(float number, double share) {
    double value = number * share;
    __asm__("" : ANYWHERE(value));
    return value;
}

/* total += Σ share · model over `models` of them, or = where these are the first; `size` is a multiple of LANES. */
INLINE void add(const float *const *tensors, const double *shares, int64_t start, int64_t size, double *total,
                const int first, const int models) {
    for (int64_t i = 0; i < size; i += LANES) {
        doubles sum = {0};
        if (!first) memcpy(&sum, total + i, sizeof sum);
        for (int model = 0; model < models; model++) {
            doubles term = product(tensors[model] + start + i, shares[model]);
            sum = first && model == 0 ? term : sum + term;
        }
        memcpy(total + i, &sum, sizeof sum);
    }
}

/* sum = Σ share · tensor over `count` of them, which has to be 1 at least. */
void weighted_sum(const float *const *tensors, const double *shares, int64_t count, int64_t size, float *sum) {
    double total[BLOCK];
    int64_t whole = size - size % LANES;
    for (int64_t start = 0; start < whole; start += BLOCK) {
        int64_t here = whole - start < BLOCK ? whole - start : BLOCK, model = 1;
        add(tensors, shares, start, here, total, 1, 1);
        for (; model + TOGETHER <= count; model += TOGETHER)
            add(tensors + model, shares + model, start, here, total, 0, TOGETHER);
        for (; model < count; model++) add(tensors + model, shares + model, start, here, total, 0, 1);
        for (int64_t i = 0; i < here; i++) sum[start + i] = (float)total[i];
    }
    for (int64_t i = whole; i < size; i++) {
        double one = product_of_one(tensors[0][i], shares[0]);
        for (int64_t model = 1; model < count; model++) one += product_of_one(tensors[model][i], shares[model]);
        sum[i] = (float)one;
    }
}

/* square = Σ (one − other)², squares and their sum in double precision. */
void squared_distance(const float *one, const float *other, int64_t size, double *square) {
    doubles sums[TOGETHER] = {{0}};
    int64_t i = 0;
    for (; i + TOGETHER * LANES <= size; i += TOGETHER * LANES)
        for (int part = 0; part < TOGETHER; part++) {
            doubles off = widened(one + i + part * LANES) - widened(other + i + part * LANES);
            sums[part] += off * off;
        }
    double total = 0;
    for (int part = 0; part < TOGETHER; part++)
        for (int lane = 0; lane < LANES; lane++) total += sums[part][lane];
    for (; i < size; i++) {
        double off = (double)one[i] - (double)other[i];
        total += off * off;
    }
    *square = total;
}
