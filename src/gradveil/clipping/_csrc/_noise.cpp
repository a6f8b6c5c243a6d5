// Gaussian noise onto gradients: ChaCha12 words to normal values by Box-Muller, added in the same pass. In ordinary
// floating point, which attacks on its last bits see through; _lattice.cpp is proof against them, at twice the time.
//
// Float32. Two words make a pair: u = (k + 1/2) / 2^32 in (0, 1) gives the radius sqrt(-2 log u), which is at most
// sqrt(2 * 33 log 2) = 6.76 (beyond it a normal value lies once in 7e10), and the other word the angle. Near u = 1 the
// logarithm is taken of 1 + f with f = u - 1 exact, so that small radii are as fine as large ones.
// Float64. Two words each for u and the angle, 53 bits of which are used; radius at most 8.65.
//
// Words are laid out as the vectors have them: 16 consecutive blocks side by side make 256 values (128 in float64),
// word w of block b at place 16 w + b. The tail of a tensor uses a part of such a batch.

#include <cmath>
#include <cstring>

#include "_noise.h"

static const long BATCH = WORDS * LANES;

static inline vec as_float(ivec v) { return __builtin_convertvector(v, vec); }

// -2 log u for u = (k + 1/2) / 2^32, always positive. The polynomial is Cephes' logf on [sqrt(1/2), sqrt(2)).
static inline vec minus_two_log(uvec k) {
    // u = high + low to the last bit of k: a float holds 24 of its 32 bits, which is enough below sqrt(1/2).
    const vec u = __builtin_convertvector(k, vec) * 0x1p-32f + 0x1p-33f;
    const ivec bits = (ivec)u;
    ivec e = (bits >> 23) - 126;
    vec m = (vec)((bits & 0x007fffff) | 0x3f000000);  // u = m 2^e, m in [1/2, 1)
    const ivec small = m < 0.70710678f;
    e += small;  // a true comparison is -1
    m = (vec)((ivec)m + (small & 0x00800000));  // doubled: m in [sqrt(1/2), sqrt(2))
    vec f = m - 1.f;
    // u from sqrt(1/2) on: u - 1 from the word itself, without the rounding of u.
    const ivec near_one = k > (uvec{} + 0xb504f334u);
    f = near_one ? as_float((ivec)k) * 0x1p-32f + 0x1p-33f : f;
    const vec n = as_float(near_one ? ivec{} : e);
    const vec z = f * f;
    vec y = spread(7.0376836292e-2f);
    y = y * f - 1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f - 1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f - 1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f - 2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y = y * f * z;
    y += n * -2.12194440e-4f;  // log 2 in two parts, the first exact in few bits
    y += z * -0.5f;
    return (f + y + n * 0.693359375f) * -2.f;
}

// cos and sin of 2 pi (k + 1/2) / 2^32: the quadrant from the top bits, Cephes' polynomials within a quarter of pi.
static inline void cos_sin(uvec k, vec& cosine, vec& sine) {
    const uvec quadrant = (k + 0x20000000u) >> 30;
    const ivec rest = (ivec)(k - (quadrant << 30));  // in [-2^29, 2^29)
    const vec a = (as_float(rest) + 0.5f) * (float)(6.283185307179586 / 4294967296.0);
    const vec z = a * a;
    vec s = spread(-1.9515295891e-4f);
    s = s * z + 8.3321608736e-3f;
    s = s * z - 1.6666654611e-1f;
    s = s * z * a + a;
    vec c = spread(2.443315711809948e-5f);
    c = c * z - 1.388731625493765e-3f;
    c = c * z + 4.166664568298827e-2f;
    c = c * z * z - z * 0.5f + 1.f;
    const ivec swap = (ivec)(quadrant & 1u) != 0;
    const uvec flip_cos = ((quadrant + 1u) & 2u) << 30, flip_sin = (quadrant & 2u) << 30;
    cosine = (vec)((uvec)(swap ? s : c) ^ flip_cos);
    sine = (vec)((uvec)(swap ? c : s) ^ flip_sin);
}

static void normals(const Stream& s, uint64_t first, float* out) {
    uvec words[WORDS];
    next_words(s, first, words);
    float radius[BATCH / 2];
    for (int w = 0; w < WORDS / 2; w++) store(radius + w * LANES, minus_two_log(words[w]));
    for (int i = 0; i < BATCH / 2; i++) radius[i] = __builtin_sqrtf(radius[i]);
    for (int w = 0; w < WORDS / 2; w++) {
        vec c, n;
        cos_sin(words[w + WORDS / 2], c, n);
        const vec r = load(radius + w * LANES);
        store(out + w * LANES, r * c);
        store(out + (w + WORDS / 2) * LANES, r * n);
    }
}

static void normals(const Stream& s, uint64_t first, double* out) {
    uvec words[WORDS];
    next_words(s, first, words);
    for (int w = 0; w < WORDS / 4; w++)
        for (int l = 0; l < LANES; l++) {
            const uint64_t j = ((uint64_t)words[w][l] << 32 | words[w + 4][l]) >> 11;
            const uint64_t k = ((uint64_t)words[w + 8][l] << 32 | words[w + 12][l]) >> 11;
            const uint64_t last = (1ull << 53) - 1;
            const double below = ((double)(last - j) + 0.5) * 0x1p-53;  // 1 - u, exact where u is near 1
            const double log_u = j > last / 2 ? std::log1p(-below) : std::log(((double)j + 0.5) * 0x1p-53);
            const double radius = std::sqrt(-2.0 * log_u), angle = 6.283185307179586 * 0x1p-53 * ((double)k + 0.5);
            out[w * LANES + l] = radius * std::cos(angle);
            out[(w + 4) * LANES + l] = radius * std::sin(angle);
        }
}

// grad <- (grad + std z) / divide_by, as grad / divide_by + (std / divide_by) z by one reciprocal: a vector division takes
// longer than the cipher's rounds. Batches first .. last - 1 of a tensor, of which grad is places start and after.
template <class Real>
static void add_batches(const Target& target, const Stream& s, Real divide_by, long first, long last) {
    const long batch = sizeof(Real) == 4 ? BATCH : BATCH / 2, count = target.count, start = target.start;
    const Real share = 1 / divide_by, scale = (Real)target.std * share;
    Real* const grad = (Real*)target.grad;
    Real z[BATCH];
    for (long b = first; b < last; b++) {
        normals(s, (uint64_t)b * LANES, z);
        const long place = b * batch - start;  // of the batch in grad: before it, where grad begins inside the batch
        const long from = place < 0 ? -place : 0, to = count - place < batch ? count - place : batch;
        Real* at = grad + place;
        if (from == 0 && to == batch)
            for (long i = 0; i < batch; i++) at[i] = at[i] * share + scale * z[i];
        else
            for (long i = from; i < to; i++) at[i] = at[i] * share + scale * z[i];
    }
}

extern "C" void gradveil_noise(const uint32_t* key, const Target* targets, long n, double divide_by, int workers) {
    over_batches(
        key, targets, n, workers, [](const Target& target) { return target.doubles ? BATCH / 2 : BATCH; },
        [=](const Target& target, const Stream& s, long first, long last) {
            if (target.doubles)
                add_batches<double>(target, s, divide_by, first, last);
            else
                add_batches<float>(target, s, (float)divide_by, first, last);
        });
}

// One block, for the test against the published vector.
extern "C" void gradveil_chacha_block(const uint32_t* key, uint32_t counter, const uint32_t* nonce, uint32_t* out) {
    Stream s;
    std::memcpy(s.key, key, sizeof s.key);
    s.tensor = nonce[0], s.attempt = nonce[2];
    uvec words[WORDS];
    chacha(s, uvec{} + counter, uvec{} + nonce[1], words);
    for (int w = 0; w < WORDS; w++) out[w] = words[w][0];
}
