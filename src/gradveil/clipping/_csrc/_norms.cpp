// Backward of group and layer norms in one pass: the input's gradient and every example's gradients of scale and shift.

#include <cmath>
#include <cstring>

#include "_native.h"

// Sums of g and of g x over a row; float within a lane, double over lanes.
static void moments(const float* x, const float* g, long n, double& of_g, double& of_gx) {
    vec a = vec{}, b = vec{}, c = vec{}, d = vec{};
    long j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        const vec g0 = load(g + j), g1 = load(g + j + LANES);
        a += g0, c += g1;
        b += g0 * load(x + j), d += g1 * load(x + j + LANES);
    }
    of_g = total(a + c), of_gx = total(b + d);
    for (; j < n; j++) of_g += g[j], of_gx += (double)g[j] * x[j];
}

// x, g, to_x: (B, C, pixels); mean, rstd: (B, groups); scale (C); to_scale, to_shift: (B, C). to_x may be null.
extern "C" void gradveil_group_norm_backward(const float* x, const float* g, const float* mean, const float* rstd,
                                             const float* scale, long examples, long channels, long pixels, long groups,
                                             int workers, float* to_x, float* to_scale, float* to_shift) {
    const long per_group = channels / groups, all = examples * groups;
    in_parallel(workers, [=](int worker) {
        for (long k = share(all, worker, workers); k < share(all, worker + 1, workers); k++) {
            const long example = k / groups, first = k % groups * per_group;
            const double m = mean[k], r = rstd[k];
            double sum_g = 0.0, sum_gx = 0.0;
            for (long c = first; c < first + per_group; c++) {
                const long at = (example * channels + c) * pixels;
                double of_g, of_gx;
                moments(x + at, g + at, pixels, of_g, of_gx);
                to_shift[example * channels + c] = (float)of_g;
                to_scale[example * channels + c] = (float)((of_gx - m * of_g) * r);
                sum_g += scale[c] * of_g, sum_gx += scale[c] * of_gx;
            }
            if (!to_x) continue;
            const double share_of = 1.0 / (double)(per_group * pixels);
            const double slope = (sum_g * m - sum_gx) * r * r * r * share_of;
            const double offset = -slope * m - sum_g * r * share_of;
            for (long c = first; c < first + per_group; c++) {
                const long at = (example * channels + c) * pixels;
                const float by_g = (float)(r * scale[c]), by_x = (float)slope, plus = (float)offset;
                for (long j = 0; j < pixels; j++) to_x[at + j] = by_g * g[at + j] + by_x * x[at + j] + plus;
            }
        }
    });
}

// x, g, to_x: (B, T, D); mean, rstd: (B, T); scale (D); to_scale, to_shift: (B, D). to_x may be null.
extern "C" void gradveil_layer_norm_backward(const float* x, const float* g, const float* mean, const float* rstd,
                                             const float* scale, long examples, long positions, long width, int workers,
                                             float* to_x, float* to_scale, float* to_shift) {
    in_parallel(workers, [=](int worker) {
        for (long i = share(examples, worker, workers); i < share(examples, worker + 1, workers); i++) {
            float* of_scale = to_scale + i * width;
            float* of_shift = to_shift + i * width;
            std::memset(of_scale, 0, sizeof(float) * width);
            std::memset(of_shift, 0, sizeof(float) * width);
            for (long t = i * positions; t < (i + 1) * positions; t++) {
                const float* xt = x + t * width;
                const float* gt = g + t * width;
                const float m = mean[t], r = rstd[t];
                vec sum_g = vec{}, sum_gx = vec{};  // of g times scale, and of that times the normalised input
                long j = 0;
                for (; j + LANES <= width; j += LANES) {
                    const vec normed = (load(xt + j) - m) * r, gj = load(gt + j), weighted = gj * load(scale + j);
                    store(of_scale + j, load(of_scale + j) + gj * normed);
                    store(of_shift + j, load(of_shift + j) + gj);
                    sum_g += weighted, sum_gx += weighted * normed;
                }
                double mean_g = total(sum_g), mean_gx = total(sum_gx);
                for (; j < width; j++) {
                    const float normed = (xt[j] - m) * r;
                    of_scale[j] += gt[j] * normed, of_shift[j] += gt[j];
                    mean_g += (double)gt[j] * scale[j], mean_gx += (double)gt[j] * scale[j] * normed;
                }
                if (!to_x) continue;
                const float a = (float)(mean_g / width), b = (float)(mean_gx / width);
                for (j = 0; j < width; j++)
                    to_x[t * width + j] = r * (gt[j] * scale[j] - a - (xt[j] - m) * r * b);
            }
        }
    });
}
