// Per-example clipping of a convolution's weight gradient, one example at a time, in cache.
//
// For each example: the gradient of the weight (and bias) is formed by an implicit matrix product over the
// output pixels, its norm is taken, and it is added to the sum with weight min(1, bound / norm). The gradient
// itself never leaves the cache. Plain IEEE arithmetic: no fast-math.
//
// Layout: x (B, C, H, W), g (B, O, OH, OW), both contiguous; sums are kept as (N, Opad) with N = C/G * KH * KW rows
// per group and O padded to whole vectors.

#include <cmath>
#include <cstring>
#include <vector>

typedef float vec __attribute__((vector_size(64), aligned(4)));
static const int LANES = 16;

#if defined(__AVX512F__)
static const int ROWS = 6, VECS = 4;  // 24 accumulators of 32 registers
#else
static const int ROWS = 6, VECS = 1;  // a vector is two registers: 12 of 16
#endif

struct Shape {
    int C, H, W, O, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW, G;
};

// out[r][0 .. NV*16) = sum over pixels of rows[r][pixel] * g[pixel][0 .. NV*16)
template <int MR, int NV>
static void tile(const float* const* rows, int oh, int ow, long row_step, int col_step, const float* g, long ldg,
                 float* out, long ldo) {
    vec acc[MR][NV];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = vec{};
    for (int y = 0; y < oh; y++) {
        for (int x = 0; x < ow; x++) {
            vec b[NV];
            for (int v = 0; v < NV; v++) b[v] = *(const vec*)(g + v * LANES);
            const long at = y * row_step + (long)x * col_step;
            for (int r = 0; r < MR; r++) {
                const float a = rows[r][at];
                for (int v = 0; v < NV; v++) acc[r][v] += a * b[v];
            }
            g += ldg;
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) *(vec*)(out + r * ldo + v * LANES) = acc[r][v];
}

template <int NV>
static void tile_rows(int mr, const float* const* rows, int oh, int ow, long rs, int cs, const float* g, long ldg,
                      float* out, long ldo) {
    switch (mr) {
        case 6: tile<6, NV>(rows, oh, ow, rs, cs, g, ldg, out, ldo); break;
        case 5: tile<5, NV>(rows, oh, ow, rs, cs, g, ldg, out, ldo); break;
        case 4: tile<4, NV>(rows, oh, ow, rs, cs, g, ldg, out, ldo); break;
        case 3: tile<3, NV>(rows, oh, ow, rs, cs, g, ldg, out, ldo); break;
        case 2: tile<2, NV>(rows, oh, ow, rs, cs, g, ldg, out, ldo); break;
        default: tile<1, NV>(rows, oh, ow, rs, cs, g, ldg, out, ldo); break;
    }
}

static void tile_any(int mr, int nv, const float* const* rows, int oh, int ow, long rs, int cs, const float* g, long ldg,
                     float* out, long ldo) {
#if defined(__AVX512F__)
    if (nv == 4) return tile_rows<4>(mr, rows, oh, ow, rs, cs, g, ldg, out, ldo);
    if (nv == 3) return tile_rows<3>(mr, rows, oh, ow, rs, cs, g, ldg, out, ldo);
    if (nv == 2) return tile_rows<2>(mr, rows, oh, ow, rs, cs, g, ldg, out, ldo);
#endif
    tile_rows<1>(mr, rows, oh, ow, rs, cs, g, ldg, out, ldo);
}

extern "C" int gradveil_vector_bits() {
#if defined(__AVX512F__)
    return 512;
#elif defined(__AVX2__)
    return 256;
#else
    return 128;
#endif
}

// Examples first .. last - 1. weight_sum: (G, N, Opad) and bias_sum: (O), both added to; squares: (B), written.
// bound < 0: only norms. An example whose norm is not finite adds nothing.
extern "C" void gradveil_conv2d_clip(const float* x, const float* g, long first, long last, const Shape* shape,
                                     int with_bias, float bound, float* weight_sum, float* bias_sum, double* squares) {
    const Shape s = *shape;
    const int cg = s.C / s.G, og = s.O / s.G, n = cg * s.KH * s.KW, pixels = s.OH * s.OW;
    const int opad = (og + LANES - 1) / LANES * LANES;
    const int hp = s.H + 2 * s.PH, wp = s.W + 2 * s.PW;
    std::vector<float> padded((size_t)s.C * hp * wp, 0.f), gt((size_t)pixels * opad, 0.f);
    std::vector<float> grad((size_t)s.G * n * opad), bias(s.O);
    for (long i = first; i < last; i++) {
        const float* xi = x + i * (long)s.C * s.H * s.W;
        const float* gi = g + i * (long)s.O * pixels;
        for (int c = 0; c < s.C; c++)
            for (int y = 0; y < s.H; y++)
                std::memcpy(&padded[((size_t)c * hp + y + s.PH) * wp + s.PW], xi + ((long)c * s.H + y) * s.W,
                            sizeof(float) * s.W);
        double square = 0.0;
        for (int k = 0; k < s.G; k++) {
            const float* gk = gi + (long)k * og * pixels;
            for (int o = 0; o < og; o++)
                for (int p = 0; p < pixels; p++) gt[(size_t)p * opad + o] = gk[(long)o * pixels + p];
            float* out = &grad[(size_t)k * n * opad];
            for (int row = 0; row < n; row += ROWS) {
                const int mr = n - row < ROWS ? n - row : ROWS;
                const float* rows[ROWS];
                for (int r = 0; r < mr; r++) {
                    const int c = (row + r) / (s.KH * s.KW), rest = (row + r) % (s.KH * s.KW);
                    const int kh = rest / s.KW, kw = rest % s.KW;
                    rows[r] = &padded[((size_t)(k * cg + c) * hp + kh * s.DH) * wp + kw * s.DW];
                }
                for (int o = 0; o < opad; o += VECS * LANES) {
                    const int nv = (opad - o) / LANES < VECS ? (opad - o) / LANES : VECS;
                    tile_any(mr, nv, rows, s.OH, s.OW, (long)s.SH * wp, s.SW, &gt[o], opad, out + (size_t)row * opad + o,
                             opad);
                }
            }
            for (int row = 0; row < n; row++) {  // float within a row, double over rows: as exact as a float can tell
                vec part = vec{};
                const float* at = out + (size_t)row * opad;
                for (int o = 0; o < opad; o += LANES) {
                    const vec v = *(const vec*)(at + o);
                    part += v * v;
                }
                double sum = 0.0;
                for (int l = 0; l < LANES; l++) sum += part[l];
                square += sum;
            }
        }
        if (with_bias)
            for (int o = 0; o < s.O; o++) {
                double sum = 0.0;
                for (int p = 0; p < pixels; p++) sum += gi[(long)o * pixels + p];
                bias[o] = (float)sum;
                square += sum * sum;
            }
        squares[i] = square;
        if (bound < 0 || !std::isfinite(square)) continue;
        const double norm = std::sqrt(square);
        const float weight = norm > bound ? (float)(bound / norm) : 1.f;
        const size_t size = (size_t)s.G * n * opad;
        for (size_t j = 0; j < size; j += LANES) *(vec*)(weight_sum + j) += weight * *(const vec*)(&grad[j]);
        if (with_bias)
            for (int o = 0; o < s.O; o++) bias_sum[o] += weight * bias[o];
    }
}
