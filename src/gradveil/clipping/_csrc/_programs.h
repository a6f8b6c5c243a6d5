// Launches that Python has recorded (programs.py), done again with other addresses. Included by _layers.cpp.

#pragma once

#include "_passes.h"

// ---- launches that Python has recorded

// The CUDA driver's own, from the library torch has loaded: no CUDA headers are needed to compile this file.
typedef int (*Launcher)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                        void**);
static Launcher launcher() {
    static Launcher found = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        return driver ? (Launcher)dlsym(driver, "cuLaunchKernel") : nullptr;
    }();
    return found;
}

// The CUDA stream behind one of torch's. Older versions (2.6) do not tell; Python launches there.
template <class Stream>
static constexpr bool tells_its_handle = requires(const Stream& stream) { stream.native_handle(); };
template <class Stream>
static void* handle_of(const Stream& stream) {
    if constexpr (tells_its_handle<Stream>) return stream.native_handle();
    TORCH_CHECK(false, "this torch does not tell a stream's handle");
}

// A program is a list of numbers: instructions, each with its operands (see programs.py, which writes them). Tensors
// are numbered: first those that are handed in, then those the program makes.
struct Program {
    enum { END = 0, EMPTY = 1, LAUNCH = 2, PRODUCT = 3, SUM = 4, HALVES = 5, SQUARES = 6, COLUMNS = 7 };

    struct Result {
        Tensor both;  // norms and weights (2, batch)
        std::vector<Tensor> sums;
    };

    // False in ``fits``: an address is not aligned as the recorded kernel needs it, and nothing was launched.
    static Result run(const Ints& code, std::vector<Tensor> tensors, bool& fits) {
        fits = aligned(code, tensors);
        Result result;
        if (!fits) return result;
        const auto options = at::device(tensors[0].device()).dtype(at::kFloat);
        const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
        void* stream = handle_of(guard.getStream(tensors[0].device()));
        const int64_t* at = code.data();
        for (;;) switch (*at++) {
                case EMPTY: {
                    const int64_t dims = *at++;
                    tensors.push_back(at::empty(c10::IntArrayRef(at, dims), options));
                    at += dims;
                    break;
                }
                case LAUNCH:
                    at = launch(at, tensors, stream);
                    break;
                case PRODUCT: {  // g^T x, in full float32: with rounded factors a contribution could exceed its bound
                    const Tensor g = shaped(tensors[at[0]], {at[2], at[3]}), x = shaped(tensors[at[1]], {at[2], at[4]});
                    at += 5;
                    auto& context = at::globalContext();
                    const bool rounds = context.allowTF32CuBLAS();
                    if (rounds) context.setAllowTF32CuBLAS(false);
                    tensors.push_back(at::mm(g.t(), x));
                    if (rounds) context.setAllowTF32CuBLAS(true);
                    break;
                }
                case SUM:
                    tensors.push_back(shaped(tensors[at[0]], {at[1], at[2]}).sum(at[3], false, at::kFloat));
                    at += 4;
                    break;
                case HALVES: {  // a^T b of each example, of factors in half precision: added up in float32
                    const Tensor a = shaped(tensors[at[0]], {at[2], at[3], at[4]});
                    tensors.push_back(product_of_halves(a.mT(), shaped(tensors[at[1]], {at[2], at[3], at[5]})));
                    at += 6;
                    break;
                }
                case SQUARES:  // squared norms of the rows
                    tensors.push_back(at::linalg_vector_norm(tensors[at[0]].view({at[1], -1}), 2, {1}).square_());
                    at += 2;
                    break;
                case COLUMNS:  // the sum over the positions of each example
                    tensors.push_back(shaped(tensors[at[0]], {at[1], at[2], at[3]}).sum(1, false, at::kFloat));
                    at += 4;
                    break;
                default: {  // END
                    const int64_t both = *at++, examples = *at++, sums = *at++;
                    result.both = shaped(tensors[both], {2, examples});
                    for (int64_t i = 0; i < sums; i++) {
                        const int64_t from = *at++, dims = *at++;
                        result.sums.push_back(shaped(tensors[from], c10::IntArrayRef(at, dims)));
                        at += dims;
                    }
                    return result;
                }
            }
    }

   private:
    static const int MOST_ARGUMENTS = 40;

    // Found by name: torch's headers have it since 2.8 only, and Python does not record it before.
    static Tensor product_of_halves(const Tensor& a, const Tensor& b) {
        static auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::bmm", "dtype")
                             .typed<Tensor(const Tensor&, const Tensor&, at::ScalarType)>();
        return op.call(a, b, at::kFloat);
    }

    static Tensor shaped(const Tensor& t, c10::IntArrayRef sizes) { return t.sizes() == sizes ? t : t.view(sizes); }

    // Tensors that the program makes are aligned; those that are handed in may be views.
    static bool aligned(const Ints& code, const std::vector<Tensor>& tensors) {
        const int64_t needed = code.back();  // a bit for each tensor that is handed in
        for (size_t i = 0; i < tensors.size(); i++)
            if ((needed >> i & 1) && (uintptr_t)tensors[i].data_ptr() % 16) return false;
        return true;
    }

    static const int64_t* launch(const int64_t* at, const std::vector<Tensor>& tensors, void* stream) {
        void* function = (void*)at[0];
        const unsigned x = at[1], y = at[2], z = at[3], threads = at[4], shared = at[5];
        const int64_t count = at[6];
        at += 7;
        uint64_t values[MOST_ARGUMENTS] = {0};  // what follows the arguments are scratch pointers, unused: null
        void* arguments[MOST_ARGUMENTS];
        for (int i = 0; i < MOST_ARGUMENTS; i++) arguments[i] = &values[i];
        for (int64_t i = 0; i < count; i++, at += 2)
            values[i] = at[0] < 0 ? (uint64_t)at[1] : (uint64_t)tensors[at[0]].data_ptr() + (uint64_t)at[1];
        const int failed = launcher()(function, x, y, z, threads, 1, 1, shared, stream, arguments, nullptr);
        TORCH_CHECK(!failed, "a clipping kernel could not be launched: CUDA error ", failed);
        return at;
    }
};
