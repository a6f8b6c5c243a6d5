// Noise onto gradients. Included by _layers.cpp.

#pragma once

#include "_programs.h"

// ---- noise

// The kernel noise_on_gradients of _triton.py on one GPU, and what it last ran on. It reads where the gradients are from a
// table, which is good wherever they are there again: in a training loop they come to the same few places.
struct NoiseKernel {
    struct Kernel {
        explicit Kernel(const Ints& told) : function((void*)told.at(0)), threads(told.at(1)), shared(told.at(2)) {}
        void* function;
        unsigned threads, shared;
    };

    explicit NoiseKernel(const Ints& told) : kernel(told) {}

    static const int64_t BLOCK = 1024, MOST_BLOCKS = 1 << 13;  // the first as in cuda.py; larger tables take long to send

    static std::unordered_map<int64_t, NoiseKernel>& by_device() {
        static auto* kept = new std::unordered_map<int64_t, NoiseKernel>();
        return *kept;
    }

    // False: not for these, and nothing was done.
    bool run(const std::vector<Tensor>& grads, const Tensor& draw, double scale, double divide_by) {
        if (!tells_its_handle<c10::Stream> || !launcher()) return false;
        Ints now;
        int64_t needed = 0;
        for (const Tensor& g : grads) {
            if (!g.is_contiguous()) return false;
            now.push_back((int64_t)g.data_ptr());
            now.push_back(g.numel());
            needed += (g.numel() + BLOCK - 1) / BLOCK;
        }
        if (needed == 0 || needed > MOST_BLOCKS) return false;
        const auto device = grads[0].device();
        void* on = handle_of(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(device));
        if (on != stream) tables.clear();  // what another stream has sent may not be there yet
        if (!std_there.defined() || on != stream || scale != std)
            std_there = at::full({1}, scale, grads[0].options());
        stream = on, std = scale;
        auto known = std::find_if(tables.begin(), tables.end(), [&](const Table& t) { return t.first == now; });
        if (known == tables.end()) {
            if (tables.size() == MOST_TABLES) tables.erase(tables.begin());
            known = tables.insert(tables.end(), {std::move(now), sent_table(grads, device, needed)});
        }
        const float divisor = (float)divide_by, step = 0.0f;  // the kernel's own step is not taken
        uint64_t values[8] = {(uint64_t)known->second.data_ptr(), (uint64_t)draw.data_ptr(),
                              (uint64_t)std_there.data_ptr(), 0, 0};
        std::memcpy(&values[3], &divisor, sizeof divisor);
        std::memcpy(&values[4], &step, sizeof step);
        void* arguments[8];  // what follows the five are scratch pointers, unused: null
        for (int i = 0; i < 8; i++) arguments[i] = &values[i];
        const int failed = launcher()(kernel.function, needed, 1, 1, kernel.threads, 1, 1, kernel.shared, on, arguments,
                                      nullptr);
        TORCH_CHECK(!failed, "the noise kernel could not be launched: CUDA error ", failed);
        for (const Tensor& g : grads) g.unsafeGetTensorImpl()->bump_version();
        return true;
    }

   private:
    typedef std::pair<Ints, Tensor> Table;  // where gradients are, and their sizes; the rows
    static const size_t MOST_TABLES = 8;

    // A row for each block: its address, its place in the noise, its length, and 0.
    static Tensor sent_table(const std::vector<Tensor>& grads, const c10::Device& device, int64_t blocks) {
        const Tensor here = at::empty({blocks, 4}, at::kLong);
        int64_t* row = here.mutable_data_ptr<int64_t>();
        int64_t place = 0;
        for (size_t i = 0; i < grads.size(); i++) {
            const Tensor& g = grads[i];
            for (int64_t start = 0; start < g.numel(); start += BLOCK, row += 4) {
                row[0] = (int64_t)g.data_ptr() + 4 * start;
                row[1] = place + start;
                row[2] = std::min(BLOCK, g.numel() - start);
                row[3] = 0;
            }
            place += g.numel();
        }
        return here.to(device, at::kLong, /*non_blocking=*/true);
    }

    Kernel kernel;
    void* stream = nullptr;
    std::vector<Table> tables;
    double std = 0.0;
    Tensor std_there;
};

static void learn_noise(int64_t device, const Ints& on_gradients) {
    NoiseKernel::by_device().insert_or_assign(device, NoiseKernel(on_gradients));
}

static bool all_alike(const std::vector<double>& values) {
    return std::all_of(values.begin(), values.end(), [&](double value) { return value == values[0]; });
}

// In place, each gradient g of float32 becomes (g + std z) / divide_by, with z independent N(0, 1) in their order.
static void add_noise(const std::vector<Tensor>& grads, const std::vector<double>& stds, double divide_by,
                      const std::optional<at::Generator>& generator) {
    at::AutoGradMode off(false);
    Ints sizes;
    int64_t total = 0;
    for (const Tensor& g : grads) {
        sizes.push_back(g.numel());
        total += g.numel();
    }
    const Tensor draw = at::randn({total}, generator, grads[0].options());
    const bool alike = all_alike(stds);
    const auto kernel = NoiseKernel::by_device().find(grads[0].device().index());
    const bool known = alike && grads[0].is_cuda() && kernel != NoiseKernel::by_device().end();
    if (known && kernel->second.run(grads, draw, stds[0], divide_by)) return;
    std::vector<Tensor> pieces = draw.split_with_sizes(sizes);
    if (!alike) at::_foreach_mul_(pieces, std::vector<at::Scalar>(stds.begin(), stds.end()));
    for (size_t i = 0; i < pieces.size(); i++)
        if (grads[i].dim() != 1) pieces[i] = pieces[i].view(grads[i].sizes());
    at::_foreach_add_(grads, pieces, alike ? stds[0] : 1.0);
    at::_foreach_div_(grads, divide_by);
}

// As native.py's add_noise: on the CPU, from ChaCha12 under a key of 32 bytes, the first tensor with nonce ``first``.
static void add_cipher_noise(const std::vector<Tensor>& grads, const std::vector<double>& stds, double divide_by,
                             const Ints& key, int64_t first, bool lattice) {
    TORCH_CHECK(key.size() * sizeof(int64_t) == 32, "a ChaCha12 key has 32 bytes");
    std::vector<NoiseTarget> targets;
    int64_t elements = 0;
    for (size_t i = 0; i < grads.size(); i++) {
        const Tensor& g = grads[i];
        TORCH_CHECK(g.is_cpu() && g.is_contiguous(), "noise goes onto contiguous gradients on the CPU");
        targets.push_back({g.data_ptr(), g.numel(), stds.at(i), g.scalar_type() == at::kDouble, (uint32_t)(first + i), 0});
        elements += g.numel();
        g.unsafeGetTensorImpl()->bump_version();
    }
    const auto add = lattice ? gradveil_lattice_noise : gradveil_noise;
    add(key.data(), targets.data(), (long)targets.size(), divide_by, workers_for(4 * elements, 1 << 20));
}
