// Gaussian noise onto gradients, on a lattice: docs/noise.md has the proof that goes with this file.
//
// A gradient in units of std / 2^32 is rounded to a whole number, and a draw is added: a whole number n, |n| < 12 * 2^32,
// with probability proportional to exp(-(n / 2^32)^2 / 2). Whole numbers of this size are exact in double; their sum is
// what is released, and its product with a public number is what is stored.
//
// Sampling is by a ziggurat of 2048 layers (Marsaglia & Tsang 2000) in whole numbers: no value depends on how a logarithm
// is rounded, and lattice.py, which has the same tables, gives the same bits. A word of 64 bits is a layer (11
// bits), a sign (1) and a share of the layer's width (52). One word in 390 does not decide its value by itself; such
// places have further words of their own, at nonce[2] = 1, 2, ...
//
// Words are laid out as the vectors have them: 16 consecutive blocks side by side make 128 values, word w of block b at
// place 16 w + b, and two neighbouring words make a value. The tail of a tensor uses a part of such a batch.

#include <cmath>
#include <cstring>

#include "_noise.h"

typedef unsigned __int128 uint128;
typedef uint64_t wvec __attribute__((vector_size(64), aligned(8), may_alias));
typedef double real __attribute__((vector_size(64), aligned(8), may_alias));
typedef int8_t bytes __attribute__((vector_size(8)));

static const long BATCH = WORDS * LANES / 2;  // values
static const int MOST_OPEN = 2 * BATCH;       // places that wait for more words

// ---- the ziggurat

static const int LAYERS = 2048;
static const uint64_t WIDEST = 12ull << 32;
static const uint128 AREA = (uint128)0x28291002 << 84;  // of a layer, in units of 2^-92: the least that reaches the top

// Layer i holds the points (n, y) with 0 <= n < width[i] and bottom[i] <= y < bottom[i] + height[i], y in units of
// 2^-92. From width[i] on the density exp(-(n / 2^32)^2 / 2) is at most bottom[i]; below inner[i] it is at least
// bottom[i + 1]. Both hold with a margin of some hundred n, far more than the rounding of the logarithm.
struct Layers {
    uint64_t width[LAYERS], inner[LAYERS];
    uint64_t entry[LAYERS];  // the width as a double, whose last 24 bits are zeros, plus the share of it within inner
    uint128 bottom[LAYERS], height[LAYERS];

    Layers() {
        uint64_t wide = WIDEST;
        uint128 y = 0;
        for (int i = 0; i < LAYERS; i++) {
            width[i] = wide, bottom[i] = y, height[i] = AREA / wide;
            y += height[i];
            const double top = (double)y * 0x1p-92;
            wide = top < 1.0 ? (uint64_t)(std::ceil(std::sqrt(-2.0 * std::log(top)) * 0x1p24) + 1.0) * 256 : 0;
            inner[i] = wide < 1024 ? 0 : wide - 1024;
            const double as_double = (double)width[i];
            std::memcpy(&entry[i], &as_double, 8);
            entry[i] |= (inner[i] << 24) / width[i];
        }
    }
};
static const Layers layers;

// The upper 128 bits of a product.
static uint128 product_high(uint128 a, uint128 b) {
    const uint64_t a1 = a >> 64, a0 = (uint64_t)a, b1 = b >> 64, b0 = (uint64_t)b;
    const uint128 low = (uint128)a0 * b0, x = (uint128)a1 * b0 + (low >> 64), y = (uint128)a0 * b1 + (uint64_t)x;
    return (uint128)a1 * b1 + (x >> 64) + (y >> 64);
}

// exp(-square / 2^65) in units of 2^-120, by Taylor's series after taking out powers of two; wrong by less than 2^-113.
static uint128 density(uint128 square) {
    const uint128 log_2 = (uint128)0xb17217f7d1cf79ull << 64 | 0xabc9e3b39803f2f6ull, one = (uint128)1 << 120;
    const uint128 t = square << 55;
    const int halvings = (int)(t / log_2);
    const uint128 rest = (t - log_2 * halvings) << 8;
    uint128 sum = one;
    for (int k = 34; k > 0; k--) sum = one - product_high(rest, sum) / k;
    return halvings < 120 ? sum >> halvings : 0;
}

static bool below_density(uint64_t n, int layer, uint128 uniform) {
    const uint128 y = (layers.bottom[layer] << 28) + product_high(layers.height[layer] << 28, uniform);
    const double at = (double)n * 0x1p-32, near = std::exp(-0.5 * at * at), height = (double)y * 0x1p-120;
    if (std::fabs(near - height) > 0x1p-40) return height < near;  // nearly always; otherwise to the last bit
    return y < density((uint128)n * n);
}

// What the words decide: the value, or false where it is rejected and the last of ``more`` takes the place of ``word``.
static bool decided(uint64_t word, const uint64_t more[4], double& value) {
    const int layer = word & (LAYERS - 1);
    const uint64_t width = layers.width[layer], share = word >> 11 & ~0ull >> 12;
    const uint128 product = (uint128)share * width + (uint64_t)((uint128)more[0] * width >> 64);
    const uint64_t n = (uint64_t)((product + (1ull << 51)) >> 52);
    value = word >> 63 ? -(double)n : (double)n;
    return n < layers.inner[layer] || below_density(n, layer, (uint128)more[1] << 64 | more[2]);
}

struct Scale {
    double units, back;  // of a gradient; of what is stored
};

// To cut sums off at 2^51 keeps what is added to them exact, and moves no two of them further apart.
static inline double noised(double x, double value, Scale scale) {
    x *= scale.units;
    x = x > 0x1p51 ? 0x1p51 : x;
    x = x < -0x1p51 ? -0x1p51 : x;
    return ((x + 0x1.8p52 - 0x1.8p52) + value) * scale.back;
}

struct Open {  // a place whose word did not decide its value
    uint64_t place, word;
    long at;   // in the gradient
    double x;  // the gradient there
};

// Places get words of their own, 16 of them at a time.
template <class Real>
static void decide(Stream s, Open* open, int count, Real* grad, Scale scale) {
    for (s.attempt = 1; count > 0; s.attempt++) {
        int left = 0;
        for (int first = 0; first < count; first += LANES) {
            const int here = count - first < LANES ? count - first : LANES;
            uvec low = {}, high = {}, words[WORDS];
            for (int l = 0; l < here; l++) {
                const uint64_t place = open[first + l].place;
                low[l] = (uint32_t)place, high[l] = (uint32_t)(place >> 32);
            }
            chacha(s, low, high, words);
            for (int l = 0; l < here; l++) {
                uint64_t more[4];
                for (int i = 0; i < 4; i++) more[i] = (uint64_t)words[2 * i + 1][l] << 32 | words[2 * i][l];
                Open one = open[first + l];
                double value;
                if (decided(one.word, more, value)) {
                    grad[one.at] = (Real)noised(one.x, value, scale);
                } else {
                    one.word = more[3];
                    open[left++] = one;
                }
            }
        }
        count = left;
    }
}

// A batch of words and the values that they decide; ``left`` has a byte for each of the others. Whether any is left.
// The share of a layer's width is multiplied in double, which is wrong by less than 2^-17; where that, or the bits after
// the word's, could change the whole number, the value is left.
static inline bool draw(const Stream& s, uint64_t batch, uint64_t* bits, double* values, uint64_t* left) {
    uvec words[WORDS];
    next_words(s, batch * LANES, words);
    std::memcpy(bits, words, sizeof words);
    uint64_t entries[BATCH], any = 0;
#pragma GCC unroll 8
    for (long i = 0; i < BATCH; i++) {
        uint64_t layer = bits[i] & (LAYERS - 1);
        asm("" : "+r"(layer));  // one by one: gathers of whole vectors take longer
        entries[i] = layers.entry[layer];
    }
    for (long i = 0; i < BATCH / 8; i++) {
        const wvec word = ((const wvec*)bits)[i], entry = ((const wvec*)entries)[i];
        const wvec one = wvec{} + 0x3ff0000000000000ull, fraction = wvec{} + 0x000fffffffffffffull;
        const real share = (real)((word >> 11 & fraction) | one), inside = (real)((entry << 28 & fraction) | one);
        const real product = (share - 1.0) * (real)(entry & ~0xffffffull);
        const real n = product + 0x1.8p52 - 0x1.8p52, past = (real)((wvec)(product - n) & ~0ull >> 1);
        const bytes undecided = __builtin_convertvector((share >= inside) | (past > 0.5 - 0x1p-15), bytes);
        std::memcpy(&left[i], &undecided, 8);
        any |= left[i];
        ((real*)values)[i] = (real)((wvec)n ^ (word & 1ull << 63));
    }
    return any;
}

// Batches first .. last - 1 of a tensor, of which grad is places start and after: grad <- (its whole number of units +
// draw) * unit / divide_by.
template <class Real>
static void add_batches(const Target& target, const Stream& s, double divide_by, long first, long last) {
    Real* const grad = (Real*)target.grad;
    const Scale scale = {std::fmin(0x1p32 / target.std, 1e300), target.std * 0x1p-32 / divide_by};
    uint64_t bits[BATCH], left[BATCH / 8];
    double values[BATCH];
    Open open[MOST_OPEN];
    int count = 0;
    for (long b = first; b < last; b++) {
        const bool some = draw(s, b, bits, values, left);
        const long at = b * BATCH - target.start;  // of the batch in grad: before it, where grad begins inside the batch
        const long from = at < 0 ? -at : 0, to = target.count - at < BATCH ? target.count - at : BATCH;
        for (long g = 0; some && g < BATCH / 8; g++)
            for (long i = 8 * g; left[g]; left[g] >>= 8, i++)
                if (left[g] & 1 && i >= from && i < to)
                    open[count++] = {(uint64_t)b * BATCH + i, bits[i], at + i, (double)grad[at + i]};
        if (from == 0 && to == BATCH)
            for (long i = 0; i < BATCH; i++) grad[at + i] = (Real)noised(grad[at + i], values[i], scale);
        else
            for (long i = from; i < to; i++) grad[at + i] = (Real)noised(grad[at + i], values[i], scale);
        if (count > MOST_OPEN - BATCH || b == last - 1) {
            decide(s, open, count, grad, scale);
            count = 0;
        }
    }
}

extern "C" void gradveil_lattice_noise(const uint32_t* key, const Target* targets, long n, double divide_by,
                                       int workers) {
    over_batches(
        key, targets, n, workers, [](const Target&) { return BATCH; },
        [=](const Target& target, const Stream& s, long first, long last) {
            if (target.doubles)
                add_batches<double>(target, s, divide_by, first, last);
            else
                add_batches<float>(target, s, divide_by, first, last);
        });
}

// The widths of the ziggurat's layers, for the test that lattice.py has the same.
extern "C" void gradveil_lattice_layers(uint64_t* widths) { std::memcpy(widths, layers.width, sizeof layers.width); }
