// What the kernels share: vectors of 16 floats, and running work on as many threads as torch uses.
//
// Plain IEEE arithmetic throughout: no fast-math.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#if !defined(_OPENMP)
#include <thread>
#endif

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
typedef double dvec __attribute__((vector_size(128), aligned(8), may_alias));  // as many lanes
static const int LANES = 16;

// What one register holds: the compiler keeps sums of wider vectors in memory.
#if defined(__AVX512F__)
static const int REG = 16;
#elif defined(__AVX__)
static const int REG = 8;
#else
static const int REG = 4;
#endif
typedef float reg __attribute__((vector_size(REG * 4), aligned(4), may_alias));
typedef int32_t ireg __attribute__((vector_size(REG * 4), aligned(4), may_alias));

static inline vec load(const float* at) { return *(const vec*)at; }
static inline void store(float* at, vec v) { *(vec*)at = v; }
static inline vec spread(float v) { return vec{} + v; }

// The sum of the lanes, in double.
static inline double total(vec v) {
    double sum = 0.0;
    for (int l = 0; l < LANES; l++) sum += v[l];
    return sum;
}

// The sum of squares of a row: float within 1024 elements, double over them.
static inline double row_square(const float* row, long n) {
    double sum = 0.0;
    long j = 0;
    while (n - j >= LANES) {
        const long end = n - j > 1024 ? j + 1024 : j + (n - j) / LANES * LANES;
        vec a = vec{}, b = vec{};
        for (; j + 2 * LANES <= end; j += 2 * LANES) {
            const vec u = load(row + j), v = load(row + j + LANES);
            a += u * u, b += v * v;
        }
        for (; j < end; j += LANES) a += load(row + j) * load(row + j);
        sum += total(a + b);
    }
    for (; j < n; j++) sum += (double)row[j] * row[j];
    return sum;
}

// to += weight * from.
static inline void add_scaled(float weight, const float* from, size_t size, float* to) {
    size_t j = 0;
    for (; j + LANES <= size; j += LANES) store(to + j, load(to + j) + weight * load(from + j));
    for (; j < size; j++) to[j] += weight * from[j];
}

// Zeroed floats that begin with a cache line: a vector that lies across two of them takes two loads.
class Buffer {
   public:
    explicit Buffer(size_t size) : memory(size + LANES, 0.f) {
        const size_t past = (uintptr_t)memory.data() % 64 / sizeof(float);
        start = memory.data() + (past ? LANES - past : 0);
    }
    Buffer(const Buffer&) = delete;
    float* data() { return start; }
    float& operator[](size_t at) { return start[at]; }

   private:
    std::vector<float> memory;
    float* start;
};

static inline long share(long count, int worker, int workers) { return count * worker / workers; }

// run(worker) for every worker in 0 .. workers - 1. How work is split depends on the number of workers alone, never on
// which thread is free first, so that a step that is done again gives the same bits.
template <class Run>
static void in_parallel(int workers, const Run& run) {
    if (workers <= 1) {
        run(0);
        return;
    }
#if defined(_OPENMP)
#pragma omp parallel for schedule(static, 1) num_threads(workers)
    for (int worker = 0; worker < workers; worker++) run(worker);
#else
    std::vector<std::thread> others;
    for (int worker = 1; worker < workers; worker++) others.emplace_back(run, worker);
    run(0);
    for (auto& other : others) other.join();
#endif
}
