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

static inline vec load(const float* at) { return *(const vec*)at; }
static inline void store(float* at, vec v) { *(vec*)at = v; }
static inline vec spread(float v) { return vec{} + v; }

// The sum of the lanes, in double.
static inline double total(vec v) {
    double sum = 0.0;
    for (int l = 0; l < LANES; l++) sum += v[l];
    return sum;
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
