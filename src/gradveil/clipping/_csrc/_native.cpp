// Per-example clipping of the gradients of convolutions and linear layers, one example at a time, in cache.
//
// A matrix-shaped gradient is a sum over positions (pixels, tokens) of products a[position] b[position]^T. It is formed
// by an implicit matrix product, its norm is taken on the way, and it is added to the sum with weight
// min(1, bound / norm), or put into a buffer for a weight that comes later. An example whose norm is not finite adds
// nothing.
//
// Convolution: x (B, C, H, W), g (B, O, OH, OW); the gradient is kept as (G, N, Opad) with N = C/G * KH * KW rows per
// group and O padded to whole vectors. Linear: x (B, T, D), g (B, T, O); the gradient is (O, Dpad). All contiguous.

#include <cmath>
#include <cstring>

#include "_native.h"

// Sums of a tile that are kept in registers: 24 of 32 with AVX-512, where a vector is one; 12 of 16 with AVX, where it is
// two; 24 of 32 elsewhere.
static const int ROWS = 6, VECS = REG == LANES ? 4 : 1;

struct Shape {
    int C, H, W, O, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW, G;
};

// Where the factors of a product lie. Of position (y, x): a row's scalar is row[y * row_step + x * col_step], and the
// vector is the x-th from b[y * vector_step] on.
struct Positions {
    int oh, ow;
    long row_step, col_step, vector_step;
};

static inline int padded_to_lanes(int n) { return (n + LANES - 1) / LANES * LANES; }

// out[r][0 .. NV*16) = sum over positions of rows[r][position] * b[position][0 .. NV*16). Its squares are added to
// ``squares``: float within a tile, double over tiles.
template <int MR, int NV>
static void tile(const float* const* rows, const Positions& at, const float* b, long ldb, float* out, long ldo,
                 dvec& squares) {
    const int NR = NV * LANES / REG;  // registers for a row
    reg acc[MR][NR];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NR; v++) acc[r][v] = reg{};
    for (int y = 0; y < at.oh; y++) {
        long place = y * at.row_step;
        const float* from = b + y * at.vector_step;
        for (int x = 0; x < at.ow; x++) {
            reg bs[NR];
            for (int v = 0; v < NR; v++) bs[v] = *(const reg*)(from + v * REG);
            for (int r = 0; r < MR; r++) {
                const float a = rows[r][place];
                for (int v = 0; v < NR; v++) acc[r][v] += a * bs[v];
            }
            from += ldb;
            place += at.col_step;
        }
    }
    reg of_rows[MR];  // not one sum: each addition would wait for the last
    for (int r = 0; r < MR; r++) {
        of_rows[r] = reg{};
        for (int v = 0; v < NR; v++) {
            *(reg*)(out + r * ldo + v * REG) = acc[r][v];
            of_rows[r] += acc[r][v] * acc[r][v];
        }
    }
    for (int r = 1; r < MR; r++) of_rows[0] += of_rows[r];
    vec of_tile = vec{};
    std::memcpy(&of_tile, &of_rows[0], sizeof(reg));
    squares += __builtin_convertvector(of_tile, dvec);
}

template <int NV>
static void tile_rows(int mr, const float* const* rows, const Positions& at, const float* b, long ldb, float* out,
                      long ldo, dvec& squares) {
    switch (mr) {
        case 6: return tile<6, NV>(rows, at, b, ldb, out, ldo, squares);
        case 5: return tile<5, NV>(rows, at, b, ldb, out, ldo, squares);
        case 4: return tile<4, NV>(rows, at, b, ldb, out, ldo, squares);
        case 3: return tile<3, NV>(rows, at, b, ldb, out, ldo, squares);
        case 2: return tile<2, NV>(rows, at, b, ldb, out, ldo, squares);
        default: return tile<1, NV>(rows, at, b, ldb, out, ldo, squares);
    }
}

static void tile_any(int mr, int nv, const float* const* rows, const Positions& at, const float* b, long ldb, float* out,
                     long ldo, dvec& squares) {
#if defined(__AVX512F__)
    if (nv == 4) return tile_rows<4>(mr, rows, at, b, ldb, out, ldo, squares);
    if (nv == 3) return tile_rows<3>(mr, rows, at, b, ldb, out, ldo, squares);
    if (nv == 2) return tile_rows<2>(mr, rows, at, b, ldb, out, ldo, squares);
#endif
    (void)nv;
    tile_rows<1>(mr, rows, at, b, ldb, out, ldo, squares);
}

// How many tiles n rows are cut into, all about as high.
static inline int tiles_of(int n) { return (n + ROWS - 1) / ROWS; }

// One example's gradient from n rows of scalars and the vectors b (positions, width): row r is out[r * ldo]. Its sum of
// squares is added to ``squares``.
template <class RowAt>
static void product(int n, int width, const RowAt& row_at, const Positions& at, const float* b, float* out, long ldo,
                    dvec& squares) {
    const int tiles = tiles_of(n);
    for (int o = 0; o < width; o += VECS * LANES) {  // the panel of b stays in the nearest cache while rows pass by
        const int nv = (width - o) / LANES < VECS ? (width - o) / LANES : VECS;
        for (int t = 0; t < tiles; t++) {
            const int row = (int)share(n, t, tiles), mr = (int)share(n, t + 1, tiles) - row;
            const float* rows[ROWS];
            for (int r = 0; r < mr; r++) rows[r] = row_at(row + r);
            tile_any(mr, nv, rows, at, b + o, width, out + (size_t)row * ldo + o, ldo, squares);
        }
    }
}

static double total(const dvec& squares) {
    double sum = 0.0;
    for (int l = 0; l < LANES; l++) sum += squares[l];
    return sum;
}

// One example's convolution, a group of its channels: the gradient out (N, Opad), its squares added to ``squares``.
struct Convolution {
    const Shape& s;
    const int cg, opad, hp, wp;  // channels of a group; outputs of it, padded; height and width of a padded field

    Convolution(const Shape& s)
        : s(s), cg(s.C / s.G), opad(padded_to_lanes(s.O / s.G)), hp(s.H + 2 * s.PH), wp(s.W + 2 * s.PW) {}

    // One kernel element at a time, a row for each channel: what lies in the padding is left out. Where that makes low
    // tiles, which wait for their vectors: all elements together, and the padding is multiplied too.
    bool by_element() const { return cg >= (ROWS - 1) * tiles_of(cg); }
    bool needs_padding() const { return !by_element() && (s.PH || s.PW); }

    // field: the group's channels, padded if need be.
    void run(const float* field, const float* gt, float* out, dvec& squares) const {
        const int taps = s.KH * s.KW;
        const long step = (long)s.OW * opad;  // from row to row of gt
        if (!by_element()) {
            const auto row_at = [&](int row) {
                const int c = row / taps, tap = row % taps;
                return field + ((size_t)c * hp + tap / s.KW * s.DH) * wp + tap % s.KW * s.DW;
            };
            return product(cg * taps, opad, row_at, {s.OH, s.OW, (long)s.SH * wp, s.SW, step}, gt, out, opad, squares);
        }
        for (int tap = 0; tap < taps; tap++) {
            const int up = tap / s.KW * s.DH - s.PH, left = tap % s.KW * s.DW - s.PW;
            const Span ys = inside(up, s.SH, s.H, s.OH), xs = inside(left, s.SW, s.W, s.OW);
            const float* corner = field + ((long)ys.first * s.SH + up) * s.W + (long)xs.first * s.SW + left;
            const auto row_at = [=](int c) { return corner + (size_t)c * s.H * s.W; };
            const Positions at = {ys.size, xs.size, (long)s.SH * s.W, s.SW, step};
            product(cg, opad, row_at, at, gt + ((size_t)ys.first * s.OW + xs.first) * opad, out + (size_t)tap * opad,
                    (long)taps * opad, squares);
        }
    }

   private:
    struct Span {
        int first, size;
    };

    // The positions p of 0 .. count - 1 for which offset + p * stride lies in 0 .. size - 1.
    static Span inside(int offset, int stride, int size, int count) {
        const int first = offset < 0 ? (-offset + stride - 1) / stride : 0;
        int last = size - 1 - offset < 0 ? -1 : (size - 1 - offset) / stride;
        last = last < count - 1 ? last : count - 1;
        return last < first ? Span{0, 0} : Span{first, last - first + 1};
    }
};

// What is said of each example: its norm before clipping, and its weight, 0 where the norm is not finite.
struct Told {
    double* norms;
    double* weights;

    float weigh(long example, double square, double bound) const {
        const double norm = std::sqrt(square);
        norms[example] = norm;
        const float weight = !std::isfinite(norm) ? 0.f : norm > bound ? (float)(bound / norm) : 1.f;
        weights[example] = weight;
        return weight;
    }

    long not_finite(long examples) const {
        long count = 0;
        for (long i = 0; i < examples; i++) count += !std::isfinite(norms[i]);
        return count;
    }
};

// to[column][row] = from[row][column].
static void transpose(const float* from, size_t from_step, int rows, int columns, float* to, size_t to_step) {
    const int B = 16;      // whole cache lines on both sides
    const int AHEAD = 64;  // elements: so many rows at once are not foreseen by the processor
    for (int r0 = 0; r0 < rows; r0 += B)
        for (int c0 = 0; c0 < columns; c0 += B) {
            const int rs = rows - r0 < B ? rows - r0 : B, cs = columns - c0 < B ? columns - c0 : B;
            const float* block = from + r0 * from_step + c0;
            float* out = to + c0 * to_step + r0;
            if (REG == LANES && rs == B && cs == B) {
                vec r[B];
                for (int i = 0; i < B; i++) {
                    __builtin_prefetch(block + i * from_step + AHEAD, 0, 2);
                    r[i] = load(block + i * from_step);
                }
                // Four rounds of swapping halves between rows that are 8, 4, 2, 1 apart.
                const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
                for (int h = 8; h; h /= 2) {
                    const ivec low = (lane & h) ? (lane ^ h) + LANES : lane;  // lanes without h: own; with h: the other's
                    const ivec high = (lane & h) ? lane + LANES : (lane ^ h);
                    for (int i = 0; i < B; i++)
                        if (!(i & h)) {
                            const vec a = r[i], b = r[i + h];
                            r[i] = __builtin_shuffle(a, b, low);
                            r[i + h] = __builtin_shuffle(a, b, high);
                        }
                }
                for (int i = 0; i < B; i++) store(out + i * to_step, r[i]);
            } else {
                for (int c = 0; c < cs; c++)
                    for (int r = 0; r < rs; r++) out[c * to_step + r] = block[r * from_step + c];
            }
        }
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

extern "C" int gradveil_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// Either every example's gradient goes into buffer (B, G N Opad) and biases (B, O), and norms (B) are of the weight
// alone; or, where these are null, the clipped ones are added to weight_sums (workers, G N Opad) and bias_sums
// (workers, O), one part per worker, and norms are of weight and bias together. Returns how many are not finite.
extern "C" long gradveil_conv2d(const float* x, const float* g, long examples, const Shape* shape, int with_bias,
                                double bound, int workers, float* weight_sums, float* bias_sums, double* norms,
                                double* weights, float* buffer, float* biases) {
    const Shape s = *shape;
    const Told told = {norms, weights};
    const int og = s.O / s.G, pixels = s.OH * s.OW;
    const size_t size = (size_t)s.C * s.KH * s.KW * padded_to_lanes(og);
    in_parallel(workers, [=](int worker) {
        const Convolution of_group(s);
        const int opad = of_group.opad, hp = of_group.hp, wp = of_group.wp;
        const bool pads = of_group.needs_padding();
        const long channel = pads ? (long)hp * wp : (long)s.H * s.W;
        Buffer padded(pads ? (size_t)s.C * hp * wp : 0), gt((size_t)pixels * opad);
        Buffer own(buffer ? 0 : size), own_bias(s.O);
        const long first = share(examples, worker, workers), last = share(examples, worker + 1, workers);
        for (long i = first; i < last; i++) {
            const float* field = x + i * (long)s.C * s.H * s.W;
            const float* gi = g + i * (long)s.O * pixels;
            if (pads) {
                for (int c = 0; c < s.C; c++)
                    for (int y = 0; y < s.H; y++)
                        std::memcpy(&padded[((size_t)c * hp + y + s.PH) * wp + s.PW], field + ((long)c * s.H + y) * s.W,
                                    sizeof(float) * s.W);
                field = padded.data();
            }
            float* grad = buffer ? buffer + i * size : own.data();
            float* bias = biases ? biases + i * s.O : own_bias.data();
            dvec squares = dvec{};
            for (int k = 0; k < s.G; k++) {
                transpose(gi + (long)k * og * pixels, pixels, og, pixels, gt.data(), opad);
                of_group.run(field + k * of_group.cg * channel, gt.data(), grad + k * (size / s.G), squares);
            }
            double square = total(squares);
            if (with_bias)
                for (int o = 0; o < s.O; o++) {
                    const float* row = gi + (long)o * pixels;
                    vec part = vec{};
                    int p = 0;
                    for (; p + LANES <= pixels; p += LANES) part += load(row + p);
                    double sum = total(part);
                    for (; p < pixels; p++) sum += row[p];
                    bias[o] = (float)sum;
                    if (!buffer) square += sum * sum;
                }
            const float weight = told.weigh(i, square, bound);
            if (buffer || weight == 0.f) continue;
            add_scaled(weight, grad, size, weight_sums + worker * size);
            if (with_bias) add_scaled(weight, bias, s.O, bias_sums + (size_t)worker * s.O);
        }
    });
    return told.not_finite(examples);
}

// out (O, N) = the sum over parts (parts, G, N, Opad), each group transposed.
extern "C" void gradveil_conv2d_fold(float* sums, long parts, long groups, long n, long og, float* out) {
    const long opad = padded_to_lanes((int)og), size = groups * n * opad;
    for (long part = 1; part < parts; part++) add_scaled(1.f, sums + part * size, size, sums);
    for (long k = 0; k < groups; k++) transpose(sums + k * n * opad, opad, (int)n, (int)og, out + k * og * n, n);
}

// A linear layer on T positions: clipped sums, per worker: weight_sums (workers, O, Dpad), bias_sums (workers, O).
extern "C" long gradveil_linear_clip(const float* x, const float* g, long examples, long positions, int inputs,
                                     int outputs, int with_bias, double bound, int workers, float* weight_sums,
                                     float* bias_sums, double* norms, double* weights) {
    const Told told = {norms, weights};
    const int width = padded_to_lanes(inputs);
    const size_t size = (size_t)outputs * width;
    const Positions at = {1, (int)positions, 0, outputs, 0};
    in_parallel(workers, [=](int worker) {
        Buffer wide(width == inputs ? 0 : positions * width), grad(size), bias(outputs);
        const long first = share(examples, worker, workers), last = share(examples, worker + 1, workers);
        for (long i = first; i < last; i++) {
            const float* xi = x + i * positions * inputs;
            const float* gi = g + i * positions * outputs;
            if (width != inputs) {
                for (long t = 0; t < positions; t++)
                    std::memcpy(&wide[t * width], xi + t * inputs, sizeof(float) * inputs);
                xi = wide.data();
            }
            const auto row_at = [=](int row) { return gi + row; };
            dvec squares = dvec{};
            product(outputs, width, row_at, at, xi, grad.data(), width, squares);
            double square = total(squares);
            if (with_bias) {
                std::memset(bias.data(), 0, sizeof(float) * outputs);
                for (long t = 0; t < positions; t++) add_scaled(1.f, gi + t * outputs, outputs, bias.data());
                for (int o = 0; o < outputs; o++) square += (double)bias[o] * bias[o];
            }
            const float weight = told.weigh(i, square, bound);
            if (weight == 0.f) continue;
            add_scaled(weight, grad.data(), size, weight_sums + worker * size);
            if (with_bias) add_scaled(weight, bias.data(), outputs, bias_sums + (size_t)worker * outputs);
        }
    });
    return told.not_finite(examples);
}

// Rank-one gradients g x^T (T = 1), weight, bias or both. scaled (B, O) = weight_i g_i,
// zero for an example that is not finite; sum (O) of scaled, where not null. Returns how many examples are not finite.
extern "C" long gradveil_rank_one_clip(const float* x, const float* g, long examples, long inputs, long outputs,
                                       int with_weight, int with_bias, double bound, int workers, float* scaled,
                                       float* sum, double* norms, double* weights) {
    const Told told = {norms, weights};
    in_parallel(workers, [=](int worker) {
        const long first = share(examples, worker, workers), last = share(examples, worker + 1, workers);
        for (long i = first; i < last; i++) {
            const double of_x = with_weight ? row_square(x + i * inputs, inputs) : 0.0;
            const float* gi = g + i * outputs;
            const double square = row_square(gi, outputs) * (of_x + (with_bias ? 1.0 : 0.0));
            const float weight = told.weigh(i, square, bound);
            float* to = scaled + i * outputs;
            if (weight == 0.f)
                std::memset(to, 0, sizeof(float) * outputs);
            else
                for (long j = 0; j < outputs; j++) to[j] = weight * gi[j];
        }
    });
    if (sum) in_parallel(examples * outputs < 1 << 16 ? 1 : workers, [=](int worker) {
        const int of = examples * outputs < 1 << 16 ? 1 : workers;
        const long first = share(outputs, worker, of), last = share(outputs, worker + 1, of);
        std::memset(sum + first, 0, sizeof(float) * (last - first));
        for (long i = 0; i < examples; i++) add_scaled(1.f, scaled + i * outputs + first, last - first, sum + first);
    });
    return told.not_finite(examples);
}

// squares (B): the sum of squares of every row of (B, n).
extern "C" void gradveil_row_squares(const float* rows, long examples, long n, int workers, double* squares) {
    in_parallel(workers, [=](int worker) {
        const long first = share(examples, worker, workers), last = share(examples, worker + 1, workers);
        for (long i = first; i < last; i++) squares[i] = row_square(rows + i * n, n);
    });
}

// out (n) = sum over examples of weights[i] rows[i]; a row of weight zero is not looked at.
extern "C" void gradveil_weighted_rows(const float* rows, long examples, long n, const float* weights, int workers,
                                       float* out) {
    const long chunk = 4096, chunks = (n + chunk - 1) / chunk;  // a part of the sum stays in the nearest cache
    in_parallel(workers, [=](int worker) {
        for (long c = share(chunks, worker, workers); c < share(chunks, worker + 1, workers); c++) {
            const long first = c * chunk, size = n - first < chunk ? n - first : chunk;
            std::memset(out + first, 0, sizeof(float) * size);
            for (long i = 0; i < examples; i++)
                if (weights[i] != 0.f) add_scaled(weights[i], rows + i * n + first, size, out + first);
        }
    });
}
