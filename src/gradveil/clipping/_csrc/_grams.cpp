// Norms of the gradients of linear layers on a few positions, without forming them.
//
// One example's gradient is G = sum over positions t of g[t] x[t]^T, and |G|^2 is the sum over pairs of positions of
// <x[s], x[t]> <g[s], g[t]>. Of each pair (s, t) and (t, s) one is computed, both products of a tile of pairs at a time,
// so that nothing but their sum is kept. x (B, T, D), g (B, T, O), contiguous.

#include <cfloat>
#include <cmath>
#include <cstring>

#include "_native.h"

// A tile of A x B products has as many as a register has lanes, each of them added up in a register of its own.
static const int B = 4, A = REG / B;

// Otherwise the compiler loads it again for every product, and loads are what there is too little of.
static inline void in_register(reg& value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__AVX__)
    asm("" : "+x"(value));
#else
    (void)value;
#endif
}

// Two registers become one: of each, lanes with and without bit H are added.
template <int H>
static inline reg halves_added(reg a, reg b) {
    ireg lane;
    for (int l = 0; l < REG; l++) lane[l] = l;
    const ireg low = (lane & H) ? (lane ^ H) + REG : lane, high = (lane & H) ? lane + REG : (lane ^ H);
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// Lane i: the sum of the lanes of of[i], for H = 1. Not a loop: the compiler would keep what it runs over in memory.
template <int H = 1, int I = 0>
static inline reg sums_of_lanes(const reg (&of)[REG]) {
    if constexpr (H == REG)
        return of[I];
    else
        return halves_added<H>(sums_of_lanes<2 * H, I>(of), sums_of_lanes<2 * H, I + H>(of));
}

// The rows of a matrix, each padded with zeros to whole vectors, and after the last one rows of zeros: every tile is full.
class Rows {
   public:
    Rows(long count, long n)
        : count(count), n(n), width((n + LANES - 1) / LANES * LANES),
          // Rows that are a power of two apart would lie in the same few places of the nearest cache.
          step(width + (width % 256 ? 0 : LANES)), memory((count + B - 1) / B * B * step) {}

    void fill(const float* matrix) {
        for (long t = 0; t < count; t++) std::memcpy(&memory[t * step], matrix + t * n, sizeof(float) * n);
    }

    // Lane B i + j: the product of rows s + i and t + j.
    reg products(long s, long t) {
        reg sums[REG];
        for (int i = 0; i < REG; i++) sums[i] = reg{};
        const float *a = &memory[s * step], *b = &memory[t * step];
        const float* const end = a + width;
        do {
            reg of_b[B];
            for (int j = 0; j < B; j++) {
                of_b[j] = *(const reg*)(b + j * step);
                in_register(of_b[j]);
            }
            for (int i = 0; i < A; i++) {
                reg of_a = *(const reg*)(a + i * step);
                in_register(of_a);
                for (int j = 0; j < B; j++) sums[B * i + j] += of_a * of_b[j];
            }
            a += REG, b += REG;
        } while (a != end);
        return sums_of_lanes(sums);
    }

    double square(long t) { return row_square(&memory[t * step], width); }

    const long count;

   private:
    const long n, width, step;
    Buffer memory;
};

// |G|^2 of one example and, as it is a sum of terms that cancel, what rounding may have taken from it.
static double gram_square(Rows& x, Rows& g) {
    typedef double dreg __attribute__((vector_size(2 * sizeof(reg)), aligned(8), may_alias));
    dreg sum = dreg{};
    for (long s = 0; s < x.count; s += A)
        for (long t = 0; t < s + A; t += B) {
            dreg both = __builtin_convertvector(x.products(s, t), dreg);
            both *= __builtin_convertvector(g.products(s, t), dreg);
            if (t + B <= s)
                both += both;  // and its mirror image
            else
                for (int i = 0; i < A; i++)
                    for (int j = 0; j < B; j++) {
                        const long from_diagonal = (s + i) - (t + j);
                        if (from_diagonal < 0) both[B * i + j] = 0.0;  // the mirror image of another
                        if (from_diagonal > 0) both[B * i + j] *= 2.0;
                    }
            sum += both;
        }
    double square = 0.0, lengths = 0.0;
    for (int l = 0; l < REG; l++) square += sum[l];
    for (long t = 0; t < x.count; t++) lengths += std::sqrt(x.square(t) * g.square(t));
    // As gram_sq_norms in per_sample_grads.py has it. What is not a number stays so.
    return (square < 0.0 ? 0.0 : square) + 4.0 * FLT_EPSILON * lengths * lengths;
}

// squares (B): of every example's gradient of the weight. sums (B, O), where not null: its gradient of the bias.
extern "C" void gradveil_gram_squares(const float* x, const float* g, long examples, long positions, long inputs,
                                      long outputs, int workers, double* squares, float* sums) {
    in_parallel(workers, [=](int worker) {
        Rows of_x(positions, inputs), of_g(positions, outputs);
        for (long i = share(examples, worker, workers); i < share(examples, worker + 1, workers); i++) {
            const float* gi = g + i * positions * outputs;
            of_x.fill(x + i * positions * inputs), of_g.fill(gi);
            squares[i] = gram_square(of_x, of_g);
            if (!sums) continue;
            float* to = sums + i * outputs;
            std::memset(to, 0, sizeof(float) * outputs);
            for (long t = 0; t < positions; t++) add_scaled(1.f, gi + t * outputs, outputs, to);
        }
    });
}
