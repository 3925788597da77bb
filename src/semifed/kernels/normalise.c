/* Batch norm together with what follows it, in as few passes over memory as its statistics allow.

   Maps are float32 [rows, channels], a row being a pixel: PyTorch's channels_last. Every number is computed by the
   operations of PyTorch's own kernels on one thread, in their order, so it has the same bits: sums run over rows one
   after the other, a channel a lane, and a product that is added at once is not rounded before (-ffp-contract=fast,
   with which PyTorch's kernels are compiled too). What is saved is memory: a normalised map of which only the maxima
   are wanted is never written, and one that is rectified is not read again.

   Channels come in blocks of LANES; callers see to it that their number is a multiple of the most there are. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* As many as the processor has: vectors that a compiler has to take apart are slower than PyTorch's. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define WIDE 4 /* blocks whose sums are held in registers together */
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* What follows batch norm; the numbers are those of `_After` in normalise.py. */
enum { PLAIN, RELU, LEAKY };

/* Where the gradient of a window of 2 x 2 pixels goes: to pixel 0, 1, 2 or 3, or nowhere as ReLU cut it off. */
enum { NOWHERE = 4 };

INLINE floats load(const float *from) {
    floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, floats value) { memcpy(to, &value, sizeof value); }

/* A comparison gives all bits or none. */
INLINE ints choose(ints where, ints yes, ints no) { return (where & yes) | (~where & no); }

INLINE floats select(ints where, floats yes, floats no) { return (floats)choose(where, (ints)yes, (ints)no); }

INLINE floats relu(floats value) { return select(value < 0, (floats){0}, value); }

/* A product that is rounded before it is added to something. */
INLINE float rounded(float product) {
    __asm__("" : "+m"(product));
    return product;
}

/* One pass for as many blocks of channels as fit into registers, then for the rest. */
#define FOR_BLOCKS(channels, call)                                                             \
    do {                                                                                       \
        int64_t c = 0;                                                                         \
        for (; c + WIDE * LANES <= (channels); c += WIDE * LANES) call(WIDE);                  \
        for (; c + 2 * LANES <= (channels); c += 2 * LANES) call(2);                           \
        for (; c < (channels); c += LANES) call(1);                                            \
    } while (0)

INLINE void moments_of(const float *x, int64_t rows, int64_t channels, float *mean, float *squares, const int blocks) {
    floats sum[WIDE], centre[WIDE];
    for (int b = 0; b < blocks; b++) sum[b] = (floats){0};
    for (int64_t row = 0; row < rows; row++)
        for (int b = 0; b < blocks; b++) sum[b] += load(x + row * channels + b * LANES);
    for (int b = 0; b < blocks; b++) {
        for (int lane = 0; lane < LANES; lane++) mean[b * LANES + lane] = (float)((double)sum[b][lane] / (double)rows);
        centre[b] = load(mean + b * LANES);
        sum[b] = (floats){0};
    }
    for (int64_t row = 0; row < rows; row++)
        for (int b = 0; b < blocks; b++) {
            floats off = load(x + row * channels + b * LANES) - centre[b];
            sum[b] += off * off;
        }
    for (int b = 0; b < blocks; b++) store(squares + b * LANES, sum[b]);
}

/* Mean, inverse deviation, and by them the factor and offset of each channel. Running statistics, if there are any,
   move by `momentum` towards mean and unbiased variance. */
void statistics(const float *x, int64_t rows, int64_t channels, double eps, const float *weight, const float *bias,
                float *mean, float *inverse, float *factor, float *offset, float momentum,
                float *running_mean, float *running_var) {
#define MOMENTS(blocks) moments_of(x + c, rows, channels, mean + c, inverse + c, blocks)
    FOR_BLOCKS(channels, MOMENTS);
    for (int64_t c = 0; c < channels; c++) {
        float squares = inverse[c];
        inverse[c] = (float)(1 / sqrt((double)(squares / (float)rows) + eps));
        factor[c] = rounded(inverse[c] * weight[c]);
        offset[c] = bias[c] - mean[c] * factor[c];
        if (running_mean) {
            double unbiased = squares / (float)(rows - 1);
            running_mean[c] = rounded(momentum * mean[c]) + rounded((1 - momentum) * running_mean[c]);
            running_var[c] = (float)((double)momentum * unbiased + (double)rounded((1 - momentum) * running_var[c]));
        }
    }
}

/* out = after(x * factor + offset + plus) */
INLINE void apply_as(const float *x, int64_t rows, int64_t channels, const float *factor, const float *offset,
                     const float *plus, float slope, float *out, const int after, const int adds) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < channels; c += LANES) {
            int64_t here = row * channels + c;
            floats value = load(x + here) * load(factor + c) + load(offset + c);
            if (adds) value += load(plus + here);
            if (after == RELU) value = relu(value);
            if (after == LEAKY) value = select(value > 0, value, value * slope);
            store(out + here, value);
        }
}

void apply(const float *x, int64_t rows, int64_t channels, const float *factor, const float *offset, const float *plus,
           int after, float slope, float *out) {
#define APPLY(kind, adds) apply_as(x, rows, channels, factor, offset, plus, slope, out, kind, adds)
    switch (after) {
    case PLAIN: APPLY(PLAIN, 0); break;
    case RELU:
        if (plus) APPLY(RELU, 1);
        else APPLY(RELU, 0);
        break;
    case LEAKY: APPLY(LEAKY, 0); break;
    }
}

/* The gradient before what followed batch norm, by the gradient after it. What came out is computed again: that takes
   less time than to read it. */
INLINE floats before(floats gradient, floats x, floats factor, floats offset, float slope, const int after) {
    if (after == PLAIN) return gradient;
    floats value = x * factor + offset;
    if (after == RELU) return select(value <= 0, (floats){0}, gradient);
    return select(value > 0, gradient, gradient * slope);
}

/* Sums of the gradient and of its product with x; where something was added, its gradient is written. */
INLINE void slopes_of(const float *x, const float *out, const float *gradient, int64_t rows, int64_t channels,
                      const float *mean, const float *factor, const float *offset, float slope, float *by_plus,
                      float *sum, float *dot, const int after, const int adds, const int blocks) {
    floats sums[WIDE], dots[WIDE], centre[WIDE], scale[WIDE], shift[WIDE];
    for (int b = 0; b < blocks; b++) {
        sums[b] = dots[b] = (floats){0}, centre[b] = load(mean + b * LANES);
        scale[b] = load(factor + b * LANES), shift[b] = load(offset + b * LANES);
    }
    for (int64_t row = 0; row < rows; row++)
        for (int b = 0; b < blocks; b++) {
            int64_t here = row * channels + b * LANES;
            floats value = load(x + here), dy = load(gradient + here);
            if (adds) {
                dy = select(load(out + here) <= 0, (floats){0}, dy);
                store(by_plus + here, dy);
            } else
                dy = before(dy, value, scale[b], shift[b], slope, after);
            sums[b] += dy;
            dots[b] += (value - centre[b]) * dy;
        }
    for (int b = 0; b < blocks; b++) store(sum + b * LANES, sums[b]), store(dot + b * LANES, dots[b]);
}

/* What the gradient by x needs of a channel: `sum` becomes its mean gradient, `dot` the projection on x. */
INLINE void finish_sums(int64_t rows, int64_t channels, const float *inverse, float *sum, float *dot, float *by_weight,
                        float *by_bias) {
    for (int64_t c = 0; c < channels; c++) {
        by_weight[c] = rounded(dot[c] * inverse[c]);
        by_bias[c] = sum[c];
        dot[c] = rounded(rounded(dot[c] * inverse[c]) * inverse[c]) / (float)rows;
        sum[c] = sum[c] / (float)rows;
    }
}

/* What the gradient by x needs of a block of channels. */
typedef struct {
    floats mean, inverse, weight, average, projection;
} channel_terms;

INLINE channel_terms terms_of(int64_t c, const float *mean, const float *inverse, const float *weight,
                              const float *average, const float *projection) {
    return (channel_terms){load(mean + c), load(inverse + c), load(weight + c), load(average + c), load(projection + c)};
}

/* The gradient by x, given that by its normalised self. */
INLINE floats by_input(floats x, floats dy, channel_terms of) {
    floats along = (x - of.mean) * of.projection;
    return (dy - of.average - along) * of.inverse * of.weight;
}

INLINE void unapply_as(const float *x, const float *out, const float *gradient, int64_t rows, int64_t channels,
                       const float *mean, const float *inverse, const float *factor, const float *offset,
                       const float *weight, float slope, float *by_x, float *by_plus, float *by_weight, float *by_bias,
                       float *sum, float *dot, const int after, const int adds) {
#define SLOPES(blocks)                                                                                              \
    slopes_of(x + c, adds ? out + c : out, gradient + c, rows, channels, mean + c, factor + c, offset + c, slope, \
              adds ? by_plus + c : by_plus, sum + c, dot + c, after, adds, blocks)
    FOR_BLOCKS(channels, SLOPES);
    finish_sums(rows, channels, inverse, sum, dot, by_weight, by_bias);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < channels; c += LANES) {
            int64_t here = row * channels + c;
            floats value = load(x + here), dy;
            if (adds) dy = load(by_plus + here);
            else dy = before(load(gradient + here), value, load(factor + c), load(offset + c), slope, after);
            store(by_x + here, by_input(value, dy, terms_of(c, mean, inverse, weight, sum, dot)));
        }
}

/* Gradients of `statistics` and `apply`; `sum` and `dot` are room for a number a channel. */
void unapply(const float *x, const float *out, const float *gradient, int64_t rows, int64_t channels, const float *mean,
             const float *inverse, const float *factor, const float *offset, const float *weight, int after,
             float slope, float *by_x, float *by_plus, float *by_weight, float *by_bias, float *sum, float *dot) {
#define UNAPPLY(kind, adds)                                                                                            \
    unapply_as(x, out, gradient, rows, channels, mean, inverse, factor, offset, weight, slope, by_x, by_plus, by_weight, \
               by_bias, sum, dot, kind, adds)
    switch (after) {
    case PLAIN: UNAPPLY(PLAIN, 0); break;
    case RELU:
        if (by_plus) UNAPPLY(RELU, 1);
        else UNAPPLY(RELU, 0);
        break;
    case LEAKY: UNAPPLY(LEAKY, 0); break;
    }
}

/* out = relu(maxima of x * factor + offset over windows of 2 x 2 pixels); `taken` says whose they are, `best` their x.
   Pixels that fill no window are left out. */
void apply_pooled(const float *x, int64_t images, int64_t height, int64_t width, int64_t channels, const float *factor,
                  const float *offset, float *out, float *best, int32_t *taken) {
    int64_t high = height / 2, wide = width / 2;
    for (int64_t line = 0; line < images * high; line++) {
        const float *upper = x + (line / high * height + line % high * 2) * width * channels;
        for (int64_t column = 0; column < wide; column++, out += channels, best += channels, taken += channels)
            for (int64_t c = 0; c < channels; c += LANES) {
                const float *corner = upper + 2 * column * channels + c;
                const int64_t pixels[4] = {0, channels, width * channels, (width + 1) * channels};
                floats scale = load(factor + c), shift = load(offset + c);
                floats first = load(corner), most = first * scale + shift;
                ints whose = {0};
                for (int pixel = 1; pixel < 4; pixel++) {
                    floats next = load(corner + pixels[pixel]), value = next * scale + shift;
                    ints larger = (value > most) | (value != value);
                    most = select(larger, value, most);
                    first = select(larger, next, first);
                    whose = choose(larger, (ints){0} + pixel, whose);
                }
                most = relu(most);
                whose = choose(most <= 0, (ints){0} + NOWHERE, whose);
                store(out + c, most);
                store(best + c, first);
                memcpy(taken + c, &whose, sizeof whose);
            }
    }
}

INLINE ints load_codes(const int32_t *from) {
    ints codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

/* Sums over pixels in their order: of a line of windows first the upper pixels, then the lower ones. */
INLINE void pooled_slopes_of(const float *best, const int32_t *taken, const float *gradient, int64_t lines,
                             int64_t wide, int64_t channels, const float *mean, float *sum, float *dot,
                             const int blocks) {
    floats sums[WIDE], dots[WIDE], centre[WIDE];
    for (int b = 0; b < blocks; b++) sums[b] = dots[b] = (floats){0}, centre[b] = load(mean + b * LANES);
    for (int64_t line = 0; line < lines; line++)
        for (int below = 0; below < 2; below++)
            for (int64_t column = 0; column < wide; column++)
                for (int b = 0; b < blocks; b++) {
                    int64_t window = (line * wide + column) * channels + b * LANES;
                    ints here = (load_codes(taken + window) >> 1) == below;
                    floats dy = select(here, load(gradient + window), (floats){0});
                    sums[b] += dy;
                    dots[b] += (load(best + window) - centre[b]) * dy;
                }
    for (int b = 0; b < blocks; b++) store(sum + b * LANES, sums[b]), store(dot + b * LANES, dots[b]);
}

/* The gradient by x: of a window it is that of one pixel, pixels that fill no window have none. */
INLINE void pooled_gradient_of(const float *x, const int32_t *taken, const float *gradient, int64_t images,
                               int64_t height, int64_t width, int64_t channels, const float *mean, const float *inverse,
                               const float *weight, const float *average, const float *projection, float *by_x,
                               const int blocks) {
    int64_t high = height / 2, wide = width / 2;
    channel_terms of[WIDE];
    for (int b = 0; b < blocks; b++) of[b] = terms_of(b * LANES, mean, inverse, weight, average, projection);
    for (int64_t line = 0; line < images * height; line++) {
        int64_t row = line % height, pixel = line * width * channels, column = 0;
        if (row / 2 < high) {
            int64_t window = (line / height * high + row / 2) * wide * channels;
            for (; column < wide; column++, pixel += 2 * channels, window += channels)
                for (int b = 0; b < blocks; b++) {
                    int64_t left = pixel + b * LANES, right = left + channels;
                    ints whose = load_codes(taken + window + b * LANES) - (int32_t)(row % 2 * 2);
                    floats slope = load(gradient + window + b * LANES), none = {0};
                    store(by_x + left, by_input(load(x + left), select(whose == 0, slope, none), of[b]));
                    store(by_x + right, by_input(load(x + right), select(whose == 1, slope, none), of[b]));
                }
        }
        for (column *= 2; column < width; column++, pixel += channels)
            for (int b = 0; b < blocks; b++)
                store(by_x + pixel + b * LANES, by_input(load(x + pixel + b * LANES), (floats){0}, of[b]));
    }
}

/* Gradients of `statistics` and `apply_pooled`. */
void unapply_pooled(const float *x, const float *best, const int32_t *taken, const float *gradient, int64_t images,
                    int64_t height, int64_t width, int64_t channels, const float *mean, const float *inverse,
                    const float *weight, float *by_x, float *by_weight, float *by_bias, float *sum, float *dot) {
#define POOLED_SLOPES(blocks)                                                                                        \
    pooled_slopes_of(best + c, taken + c, gradient + c, images * (height / 2), width / 2, channels, mean + c, sum + c, \
                     dot + c, blocks)
#define POOLED_GRADIENT(blocks)                                                                                  \
    pooled_gradient_of(x + c, taken + c, gradient + c, images, height, width, channels, mean + c, inverse + c, \
                       weight + c, sum + c, dot + c, by_x + c, blocks)
    FOR_BLOCKS(channels, POOLED_SLOPES);
    finish_sums(images * height * width, channels, inverse, sum, dot, by_weight, by_bias);
    FOR_BLOCKS(channels, POOLED_GRADIENT);
}
