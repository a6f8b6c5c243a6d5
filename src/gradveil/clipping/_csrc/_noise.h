// The cipher behind the noise, and which gradients get it: for _noise.cpp and _lattice.cpp.
//
// ChaCha12 is ChaCha20 (RFC 8439) with 12 rounds in place of 20, two thirds of its time; the best known attack is on 7
// (Aumasson 2019, "Too much crypto", on the margins of ciphers).
//
// The cipher's key belongs to one run and step, its nonce to one tensor, and its counter to 16 words, so that every
// value is a function of its place alone: the result does not depend on the number of threads.

#pragma once

#include <cstring>

#include "_native.h"

static const int WORDS = 16;

static inline uvec rotate(uvec v, int by) { return (v << by) | (v >> (32 - by)); }

static inline void quarter(uvec& a, uvec& b, uvec& c, uvec& d) {
    a += b; d = rotate(d ^ a, 16);
    c += d; b = rotate(b ^ c, 12);
    a += b; d = rotate(d ^ a, 8);
    c += d; b = rotate(b ^ c, 7);
}

struct Stream {
    uint32_t key[8];
    uint32_t tensor, attempt;  // the nonce, beside the counter's upper half
};

// 16 blocks of ChaCha12, words as vectors over the blocks; ``low`` and ``high`` are the halves of their counters.
__attribute__((always_inline)) static inline void chacha(const Stream& s, uvec low, uvec high, uvec out[WORDS]) {
    static const uint32_t name[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};  // "expand 32-byte k"
    uvec x[WORDS], start[WORDS];
    for (int i = 0; i < 4; i++) start[i] = uvec{} + name[i];
    for (int i = 0; i < 8; i++) start[4 + i] = uvec{} + s.key[i];
    start[12] = low, start[13] = uvec{} + s.tensor, start[14] = high, start[15] = uvec{} + s.attempt;
    for (int i = 0; i < WORDS; i++) x[i] = start[i];
    for (int round = 0; round < 6; round++) {
        quarter(x[0], x[4], x[8], x[12]);
        quarter(x[1], x[5], x[9], x[13]);
        quarter(x[2], x[6], x[10], x[14]);
        quarter(x[3], x[7], x[11], x[15]);
        quarter(x[0], x[5], x[10], x[15]);
        quarter(x[1], x[6], x[11], x[12]);
        quarter(x[2], x[7], x[8], x[13]);
        quarter(x[3], x[4], x[9], x[14]);
    }
    for (int i = 0; i < WORDS; i++) out[i] = x[i] + start[i];
}

// Blocks with the counters first .. first + 15.
static inline void next_words(const Stream& s, uint64_t first, uvec out[WORDS]) {
    uvec low;
    for (int l = 0; l < LANES; l++) low[l] = (uint32_t)first + l;
    chacha(s, low, uvec{} + (uint32_t)(first >> 32), out);
}

struct Target {
    void* grad;
    int64_t count;
    double std;
    int32_t doubles;  // 0: float32
    uint32_t index;   // of the tensor in its step
    int64_t start;    // place of the first element in the tensor: 0, but for a shard
};

// run(target, stream, first, last) for batches first .. last - 1 of each target, of ``size(target)`` values each.
template <class Size, class Run>
static void over_batches(const uint32_t* key, const Target* targets, long n, int workers, const Size& size,
                         const Run& run) {
    in_parallel(workers, [&](int worker) {
        for (long t = 0; t < n; t++) {
            const Target& target = targets[t];
            Stream s;
            std::memcpy(s.key, key, sizeof s.key);
            s.tensor = target.index, s.attempt = 0;
            const long batch = size(target), head = target.start / batch;
            const long batches = target.count ? (target.start + target.count + batch - 1) / batch - head : 0;
            run(target, s, head + share(batches, worker, workers), head + share(batches, worker + 1, workers));
        }
    });
}
