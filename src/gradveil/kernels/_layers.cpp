// Followed layers without Python: their forward, their backward, and the clipped sums of their parameters.
//
// A layer's autograd node lives here so that a small layer is not slowed down by interpreting Python. What is decided
// here is only the ordinary case: a float32 layer that holds its whole clipping group, used once in the pass,
// differentiated once, with a kernel that fits. In every other case the node hands over to Python (gradveil::collect),
// where all cases are known; so do refusals (gradveil::refuse).
//
// On the CPU the kernels are those of _native.cpp. On a GPU the layer replays launches that Python has recorded for
// the same shapes (programs.py): the same kernels, with this call's addresses.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

using at::Tensor;
using c10::intrusive_ptr;
using torch::autograd::variable_list;
typedef std::vector<int64_t> Ints;

// ---- the CPU's kernels (_native.cpp)

struct ConvShape {
    int values[15];
};
struct NoiseTarget {
    void *grad, *parameter;
    int64_t count;
    double std, rate;
    int32_t doubles;
    uint32_t index;
    int64_t start;
};
extern "C" {
long gradveil_conv2d(const float*, const float*, long, const ConvShape*, int, double, int, float*, float*, double*,
                     double*, float*, float*);
void gradveil_conv2d_fold(const float*, long, long, long, long, float*);
long gradveil_linear_clip(const float*, const float*, long, long, int, int, int, double, int, float*, float*, double*,
                          double*);
long gradveil_rank_one_clip(const float*, const float*, long, long, long, int, int, double, int, float*, float*,
                            double*, double*);
void gradveil_noise(const void*, const NoiseTarget*, long, double, int);
void gradveil_row_squares(const float*, long, long, int, double*);
void gradveil_weighted_rows(const float*, long, long, const float*, int, float*);
}

static const int64_t LANES = 16, WORTH_A_THREAD = 1 << 16;  // as in native.py

static int workers_for(int64_t elements, int64_t most) {
    return (int)std::max<int64_t>(1, std::min<int64_t>({at::get_num_threads(), most, elements / WORTH_A_THREAD}));
}

// For gradients of size elements, each a sum over positions.
static int workers_for_products(int64_t examples, int64_t size, int64_t positions) {
    return workers_for(examples * size * std::max<int64_t>(1, positions / LANES), examples);
}

static int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// ---- handing over to Python

static void refuse(int64_t clipper, int64_t place, const char* why) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gradveil::refuse", "");
    torch::jit::Stack stack{clipper, place, std::string(why)};
    op.callBoxed(stack);
    TORCH_CHECK(false, "gradveil refused a gradient: ", why);  // Python has raised its own error before this
}

// ---- numbers that Python knows things by: handing an object over from Python costs more than a small layer's work

template <class T>
struct Numbered : torch::CustomClassHolder {
    explicit Numbered(int64_t number) : number(number) {}
    // The last reference is gone; the one in the list is weak, and would keep the memory.
    void release_resources() override {
        std::lock_guard<std::mutex> guard(lock());
        all().erase(number);
    }

    static intrusive_ptr<T> enter(intrusive_ptr<T> made) {
        std::lock_guard<std::mutex> guard(lock());
        all().insert_or_assign(made->number, c10::weak_intrusive_ptr<T>(made));
        return made;
    }

    static intrusive_ptr<T> find(int64_t number) {
        std::lock_guard<std::mutex> guard(lock());
        const auto found = all().find(number);
        intrusive_ptr<T> alive;
        if (found != all().end()) alive = found->second.lock();
        TORCH_CHECK(alive, "gradveil: what is numbered ", number, " is gone");
        return alive;
    }

    const int64_t number;

   private:
    static std::unordered_map<int64_t, c10::weak_intrusive_ptr<T>>& all() {
        static auto* kept = new std::unordered_map<int64_t, c10::weak_intrusive_ptr<T>>();  // outlives every object
        return *kept;
    }
    static std::mutex& lock() {
        static auto* kept = new std::mutex();
        return *kept;
    }
};

// ---- one pass through the model

// A use whose group reaches beyond it: it waits for the end of the pass. Of a linear layer on one position, as it is; of
// a convolution, with every example's gradient.
struct Waiting {
    int64_t layer;
    Tensor x, g;
    Tensor rows, biases, norms;  // (B, elements as the kernel has them), (B, outputs), and norms (B) of the first
};

// Large buffers that are used again in every step: fresh memory costs more to get than to fill. One that nobody else
// holds is free.
struct Room {
    // most: elements that are held on to between steps.
    static Tensor take(int64_t rows, int64_t columns, int64_t most) {
        static auto* lock = new std::mutex();
        static auto* all = new std::vector<Tensor>();  // outlives every tensor
        std::lock_guard<std::mutex> guard(*lock);
        const int64_t size = rows * columns;
        Tensor found;
        for (const Tensor& t : *all)
            if (is_free(t) && size <= t.numel() && t.numel() <= 2 * size && (!found.defined() || t.numel() < found.numel()))
                found = t;
        if (!found.defined()) {
            found = at::empty({size}, at::kFloat);
            int64_t held = size;
            for (const Tensor& t : *all) held += t.numel();
            for (auto t = all->begin(); held > most && t != all->end();) {
                const bool goes = is_free(*t);
                held -= goes ? t->numel() : 0;
                t = goes ? all->erase(t) : t + 1;
            }
            if (held <= most) all->push_back(found);
        }
        return found.slice(0, 0, size).view({rows, columns});
    }

   private:
    static bool is_free(const Tensor& t) { return t.use_count() == 1 && t.storage().use_count() == 1; }
};

// What passes go by, until it changes.
struct Settings {
    std::vector<double> bounds;  // per group, a little inside
    std::optional<Tensor> device_bounds;
    int64_t most_kept;  // elements of a layer's gradients that may be kept on the CPU
};

struct Pass : Numbered<Pass> {
    Pass(int64_t number, int64_t clipper, int64_t batch, int64_t units, std::shared_ptr<const Settings> settings)
        : Numbered(number),
          clipper(clipper),
          batch(batch),
          settings(std::move(settings)),
          calls(units, 0),
          recalls(units, 0),
          clipped(units, 0),
          claimed(this->settings->bounds.size(), 0) {}

    void count(int64_t unit, bool again) { (again ? recalls : calls)[unit]++; }
    // A checkpoint that keeps its graph calls a unit again without using it again.
    int64_t uses(int64_t unit) const { return std::max(calls[unit], recalls[unit]); }
    bool was_clipped(int64_t unit) const { return clipped[unit]; }
    void set_clipped(int64_t unit) { clipped[unit] = 1; }
    // Whether a group was not clipped yet, at the end of an earlier backward pass through this; now it is.
    bool claim(int64_t group) { return std::exchange(claimed.at(group), 1) == 0; }

    // A layer that is used in a reentrant checkpoint and outside it comes twice, and looks as if it were used once: the
    // norm is then that of a sum, which Python adds up.
    void wait(Waiting use) {
        for (const Waiting& other : waiting) kept_in_python |= other.layer == use.layer;
        waiting.push_back(std::move(use));
    }

    void note(int64_t group, const Tensor& norms_and_weights) { noted.emplace_back(group, norms_and_weights); }
    Tensor flags(const Tensor& like);

    const int64_t clipper, batch;
    const std::shared_ptr<const Settings> settings;

    std::vector<std::pair<int64_t, Tensor>> noted;  // group, norms and weights (2, batch)
    std::vector<Waiting> waiting;
    bool kept_in_python = false;              // uses that wait there for their groups
    bool counted = false, told_lost = false;  // in what its watch has gathered
    std::optional<Tensor> lost;  // (batch,): 1 where an example was not finite in some group

   private:
    std::vector<int64_t> calls, recalls;
    std::vector<char> clipped, claimed;
};

// ---- gradients on their way to .grad, and what they are when step() looks at them again

// Every parameter has a hook that lets only the clipped sum through, and a stamp that shows whether .grad was changed.
struct Watch : Numbered<Watch> {
    using Numbered::Numbered;

    // A number for the parameter; the hook is taken off by forget().
    int64_t follow(const Tensor& parameter) {
        const int64_t slot = (int64_t)followed.size();
        const c10::weak_intrusive_ptr<Watch> weak(intrusive_ptr<Watch>::unsafe_reclaim_from_nonowning(this));
        const unsigned hook = parameter.register_hook([weak, slot](const Tensor& grad) -> Tensor {
            if (auto self = weak.lock()) self->check(slot, grad);
            return Tensor();
        });
        followed.push_back({c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                                parameter.getIntrusivePtr()), Tensor(), hook, NONE});
        return slot;
    }

    void forget(const Tensor& parameter, int64_t slot) { parameter.remove_hook(followed.at(slot).hook); }

    // The reference that is held until the hook has run keeps autograd from adding another gradient into this tensor.
    void expect(int64_t slot, const Tensor& sum) { followed[slot].expected = sum; }

    Tensor parameter(int64_t slot) const { return Tensor(followed[slot].parameter.lock()); }

    // At the end of a pass.
    void add_gradient(int64_t slot, const Tensor& sum) {
        const Tensor parameter = this->parameter(slot);
        if (!parameter.defined()) return;
        Tensor& grad = parameter.mutable_grad();
        if (grad.defined())
            grad.add_(sum);
        else
            grad = sum;
    }

    void stamp() {
        for (Followed& f : followed) f.stamp = f.stamp_now();
    }

    // Nothing is gathered yet.
    void start_step() {
        for (Followed& f : followed) f.stamp = NONE;
        gathered = Gathered();
    }

    // The first parameter whose .grad is not as it was stamped; -1: none.
    int64_t touched() {
        for (size_t i = 0; i < followed.size(); i++) {
            const Stamp now = followed[i].stamp_now();
            if (now != NONE && now != followed[i].stamp) return (int64_t)i;
        }
        return -1;
    }

    // The backward pass of a pass has ended, and its gradients are what they should be.
    void finish(Pass& pass) {
        stamp();
        for (auto& [group, both] : pass.noted) {
            gathered.groups.push_back(group);
            gathered.found.push_back(std::move(both));
        }
        pass.noted.clear();
        if (!pass.counted) {
            gathered.passes++;
            gathered.examples += pass.batch;
        }
        if (pass.lost.has_value() && !pass.told_lost) gathered.lost.push_back(*pass.lost);
        pass.counted = true;
        pass.told_lost = pass.lost.has_value();
    }

    // Zeros (batch) for a pass on a GPU. Many at a time: they are kept for a while, and a small piece of memory here and
    // there would move the next step's gradients.
    Tensor flags(int64_t batch, const Tensor& like) {
        const bool fits = flag_rows.defined() && flag_rows.device() == like.device() && flag_rows.size(1) >= batch;
        if (!fits || next_flags == flag_rows.size(0)) {
            flag_rows = at::zeros({64, (batch + 255) / 256 * 256}, like.options().dtype(at::kInt));
            next_flags = 0;
        }
        return flag_rows[next_flags++].slice(0, 0, batch);
    }

    // What the passes add up to since it was last asked for.
    struct Gathered {
        int64_t passes = 0, examples = 0;
        Ints groups;  // whose examples were clipped,
        std::vector<Tensor> found, lost;  // norms and weights of each; of every pass, who was not finite
    };
    Gathered gathered;

    std::shared_ptr<const Settings> settings;  // of the coming passes
    intrusive_ptr<Pass> current;  // the model's last call
    int64_t differentiating = -1;  // the pass whose backward is under way

   private:
    typedef std::pair<const void*, int64_t> Stamp;  // where a gradient is, and how often it was written to
    inline static const Stamp NONE{nullptr, -1};

    struct Followed {
        c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter;  // the user's
        Tensor expected;
        unsigned hook;
        Stamp stamp;

        Stamp stamp_now() const {
            const Tensor alive(parameter.lock());
            if (!alive.defined() || !alive.grad().defined()) return NONE;
            return Stamp(alive.grad().data_ptr(), alive.grad()._version());
        }
    };

    void check(int64_t slot, const Tensor& grad) {
        Tensor mine;
        std::swap(mine, followed[slot].expected);
        if (!grad.defined()) return;  // kept for the end of the pass
        if (!mine.defined() || mine.data_ptr() != grad.data_ptr()) refuse(number, slot, "stranger");
    }

    std::vector<Followed> followed;
    Tensor flag_rows;
    int64_t next_flags = 0;
};

inline Tensor Pass::flags(const Tensor& like) {
    if (!lost.has_value())
        lost = like.is_cuda() ? Watch::find(clipper)->flags(batch, like)
                              : at::zeros({batch}, like.options().dtype(at::kInt));
    return *lost;
}

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

// ---- layers

enum Kind { LINEAR = 0, CONVOLUTION = 1, GROUP_NORM = 2, LAYER_NORM = 3, TRANSPOSED_LINEAR = 4 };

struct Clipped {
    bool done = false;
    std::vector<Tensor> sums;  // of weight and bias
};

struct Layer : Numbered<Layer> {
    // numbers: stride, padding, dilation of a convolution; shape of a layer norm. many: groups.
    Layer(int64_t number, int64_t kind, int64_t unit, int64_t group, bool whole, bool bias, bool on_cpu, Ints numbers,
          int64_t many, double eps, intrusive_ptr<Watch> watch, Ints slots)
        : Numbered(number),
          kind(kind),
          unit(unit),
          group(group),
          whole(whole),
          bias(bias),
          on_cpu(on_cpu),
          numbers(std::move(numbers)),
          many(many),
          eps(eps),
          watch(std::move(watch)),
          slots(std::move(slots)) {}

    Tensor forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& b, variable_list& kept) const {
        switch (kind) {
            case LINEAR:
                return at::linear(x, weight, b);
            case TRANSPOSED_LINEAR: {  // not x W + b: under autocast that would be of float32
                const Tensor rows = x.reshape({-1, x.size(-1)});
                auto sizes = x.sizes().vec();
                sizes.back() = weight.size(1);
                return (b.has_value() ? at::addmm(*b, rows, weight) : at::mm(rows, weight)).view(sizes);
            }
            case CONVOLUTION:
                return at::conv2d(x, weight, b, span(0), span(1), span(2), many);
            case GROUP_NORM: {
                const int64_t n = x.size(0), c = x.size(1), pixels = x.numel() / std::max<int64_t>(1, n * c);
                auto [out, mean, rstd] = at::native_group_norm(x.contiguous(), weight, b, n, c, pixels, many, eps);
                kept = {mean, rstd};
                return out;
            }
            default: {
                auto [out, mean, rstd] = at::native_layer_norm(x, numbers, weight, b, eps);
                kept = {mean, rstd};
                return out;
            }
        }
    }

    Tensor input_gradient(const Tensor& x, const Tensor& weight, const variable_list& kept, const Tensor& g) const {
        switch (kind) {
            case LINEAR:
                return product(g, weight, x);
            case TRANSPOSED_LINEAR:
                return product(g, weight.t(), x);
            case CONVOLUTION:
                return std::get<0>(at::convolution_backward(g, x, weight, {}, span(0), span(1), span(2), false, {0, 0},
                                                            many, {true, false, false}));
            case GROUP_NORM: {
                const int64_t n = x.size(0), c = x.size(1), pixels = x.numel() / std::max<int64_t>(1, n * c);
                return std::get<0>(at::native_group_norm_backward(g.contiguous(), x.contiguous(), kept[0], kept[1],
                                                                  weight, n, c, pixels, many, {true, false, false}));
            }
            default:
                return std::get<0>(at::native_layer_norm_backward(g, x, numbers, kept[0], kept[1], weight, {},
                                                                  {true, false, false}));
        }
    }

    // Under autocast the gradient is in half precision, and the input was rounded to it: on a sequence it is clipped so.
    Tensor as_multiplied(const Tensor& x, const Tensor& g) const {
        const bool sequence = (kind == LINEAR || kind == TRANSPOSED_LINEAR) && x.numel() != x.size(0) * x.size(-1);
        return sequence && g.is_cuda() && at::isReducedFloatingType(g.scalar_type()) ? x.to(g.scalar_type()) : x;
    }

    Clipped clip(const Tensor& x, const Tensor& weight, const variable_list& kept, const Tensor& g, Pass& pass) {
        if (x.is_cuda() && x.scalar_type() == g.scalar_type()) return replay(x, kept, g, pass);
        if (x.scalar_type() != at::kFloat || g.scalar_type() != at::kFloat) return {};
        return x.is_cpu() && on_cpu ? clip_on_cpu(x.contiguous(), weight, g, pass) : Clipped{};
    }

    // Whether a use that must wait for the norms of other layers can do so here.
    bool waits(const Tensor& x, const Tensor& weight, const Tensor& g, const Pass& pass) const {
        if (!on_cpu || !x.is_cpu() || x.scalar_type() != at::kFloat || g.scalar_type() != at::kFloat) return false;
        if (kind == LINEAR) return x.numel() == x.size(0) * x.size(-1);
        return kind == CONVOLUTION && x.size(0) * kernel_elements(weight) <= pass.settings->most_kept;
    }

    // A convolution's gradients are formed at once, while its factors are in the cache.
    Waiting wait(const Tensor& x, const Tensor& weight, const Tensor& g, const Pass& pass) const {
        Waiting use{number, x, g, Tensor(), Tensor(), Tensor()};
        if (kind != CONVOLUTION) return use;
        const int64_t examples = x.size(0), size = kernel_elements(weight);
        use.x = x.contiguous();
        use.rows = Room::take(examples, size, pass.settings->most_kept);
        use.biases = at::empty({examples, bias ? g.size(1) : 0}, g.options());
        const Tensor both = at::empty({2, examples}, at::kDouble);
        const ConvShape shape = shape_of(use.x, weight, g);
        gradveil_conv2d(use.x.const_data_ptr<float>(), g.const_data_ptr<float>(), examples, &shape, bias, 0.0,
                        workers_for_products(examples, size, g.size(2) * g.size(3)), nullptr, nullptr,
                        both.mutable_data_ptr<double>(), both.mutable_data_ptr<double>() + examples,
                        use.rows.mutable_data_ptr<float>(), bias ? use.biases.mutable_data_ptr<float>() : nullptr);
        use.norms = both[0];
        return use;
    }

    // The squared norms (B), in double, of a use that waits.
    Tensor squares(const Waiting& use) const {
        if (kind == CONVOLUTION) {
            const Tensor found = use.norms.square();
            return bias ? found.add_(squares_of_rows(use.biases)) : found;
        }
        const Tensor of_g = squares_of_rows(use.g), found = squares_of_rows(use.x).mul_(of_g);
        return bias ? found.add_(of_g) : found;
    }

    // Its sums, with a weight for each example; ``lost``: some weigh nothing, and may not be finite.
    std::vector<Tensor> weighted_sums(const Waiting& use, const Tensor& weight, const Tensor& w, bool lost) const {
        if (kind == CONVOLUTION) {
            const Tensor folded = at::empty(weight.sizes(), use.rows.options());
            const int64_t inputs = weight.numel() / weight.size(0);
            gradveil_conv2d_fold(weighted_rows(use.rows, w).const_data_ptr<float>(), 1, many, inputs,
                                 weight.size(0) / many, folded.mutable_data_ptr<float>());
            return bias ? std::vector<Tensor>{folded, weighted_rows(use.biases, w)} : std::vector<Tensor>{folded};
        }
        const Tensor column = w.unsqueeze(1);
        Tensor x = use.x.view({w.size(0), -1}), g = use.g.view({w.size(0), -1});
        if (lost) {  // zero times what is not finite is not zero
            const Tensor kept = column > 0, zero = at::zeros({}, x.options());
            x = at::where(kept, x, zero), g = at::where(kept, g, zero);
        }
        const Tensor scaled = g * column, sum = at::mm(scaled.t(), x);
        return bias ? std::vector<Tensor>{sum, scaled.sum(0)} : std::vector<Tensor>{sum};
    }

    // What Python has recorded for inputs of these shapes.
    void learn(Ints key, Ints program) { programs[std::move(key)] = std::move(program); }

   private:
    // Elements of one example's gradient of a convolution's weight, as the kernel has them.
    int64_t kernel_elements(const Tensor& weight) const {
        return weight.numel() / weight.size(0) * many * padded(weight.size(0) / many);
    }

    ConvShape shape_of(const Tensor& x, const Tensor& weight, const Tensor& g) const {
        ConvShape shape;
        int* value = shape.values;
        for (int64_t n : {x.size(1), x.size(2), x.size(3), g.size(1), g.size(2), g.size(3), weight.size(2), weight.size(3)})
            *value++ = (int)n;
        for (int64_t n : numbers) *value++ = (int)n;
        *value = (int)many;
        return shape;
    }

    static Tensor squares_of_rows(const Tensor& rows) {
        const int64_t count = rows.size(0), size = rows.numel() / std::max<int64_t>(1, count);
        Tensor found = at::empty({count}, at::kDouble);
        gradveil_row_squares(rows.const_data_ptr<float>(), count, size, workers_for(rows.numel(), count),
                             found.mutable_data_ptr<double>());
        return found;
    }

    // The sum of the rows, each with its weight; one of weight zero is not looked at.
    static Tensor weighted_rows(const Tensor& rows, const Tensor& w) {
        const Tensor found = at::empty({rows.size(1)}, rows.options());
        gradveil_weighted_rows(rows.const_data_ptr<float>(), rows.size(0), rows.size(1), w.const_data_ptr<float>(),
                               workers_for(rows.numel(), rows.size(1)), found.mutable_data_ptr<float>());
        return found;
    }

    static Ints key_of(const Tensor& x, const Tensor& g) {
        Ints key(x.sizes().begin(), x.sizes().end());
        key.insert(key.end(), x.strides().begin(), x.strides().end());
        key.insert(key.end(), g.sizes().begin(), g.sizes().end());
        key.push_back(at::globalContext().allowTF32CuDNN());
        key.push_back(g.element_size());
        return key;
    }

    // g W, in the precision of g and then of x, which differ under autocast.
    static Tensor product(const Tensor& g, const Tensor& weight, const Tensor& x) {
        if (g.scalar_type() == weight.scalar_type()) return at::matmul(g, weight);
        return at::matmul(g, weight.to(g.scalar_type())).to(x.scalar_type());
    }

    c10::IntArrayRef span(int which) const { return c10::IntArrayRef(numbers.data() + 2 * which, 2); }

    Clipped clip_on_cpu(const Tensor& x, const Tensor& weight, const Tensor& g, Pass& pass) {
        const int64_t examples = x.size(0);
        const double bound = pass.settings->bounds.at(group);
        const Tensor both = at::empty({2, examples}, at::kDouble);
        double *norms = both.mutable_data_ptr<double>(), *weights = norms + examples;
        Clipped found;
        found.done = true;
        long lost = 0;
        if (kind == CONVOLUTION) {
            lost = convolution(x, weight, g, bound, norms, weights, found.sums);
        } else if (x.numel() == examples * x.size(-1)) {
            lost = rank_one(x, g, bound, norms, weights, found.sums);
        } else {
            lost = sequence(x, g, bound, norms, weights, found.sums);
        }
        pass.note(group, both);
        if (lost) pass.flags(x).bitwise_or_(both[0].isfinite().logical_not());
        return found;
    }

    long rank_one(const Tensor& x, const Tensor& g, double bound, double* norms, double* weights,
                  std::vector<Tensor>& sums) const {
        const int64_t examples = x.size(0), inputs = x.size(-1), outputs = g.size(-1);
        const Tensor scaled = at::empty({examples, outputs}, g.options());
        const Tensor total = at::empty({bias ? outputs : 0}, g.options());
        const long lost = gradveil_rank_one_clip(
            x.const_data_ptr<float>(), g.const_data_ptr<float>(), examples, inputs, outputs, 1, bias, bound,
            workers_for(examples * (inputs + outputs), examples), scaled.mutable_data_ptr<float>(),
            bias ? total.mutable_data_ptr<float>() : nullptr, norms, weights);
        Tensor rows = x.view({examples, inputs});
        if (lost)  // zero times an input that is not finite is not zero
            rows = at::where(at::from_blob(norms, {examples, 1}, at::kDouble).isfinite(), rows, at::zeros({}, x.options()));
        sums.push_back(at::mm(scaled.t(), rows));
        if (bias) sums.push_back(total);
        return lost;
    }

    long sequence(const Tensor& x, const Tensor& g, double bound, double* norms, double* weights,
                  std::vector<Tensor>& sums) const {
        const int64_t examples = x.size(0), inputs = x.size(-1), outputs = g.size(-1), width = padded(inputs);
        const int64_t positions = x.numel() / std::max<int64_t>(1, examples * inputs);
        const int workers = workers_for_products(examples, outputs * width, positions);
        const Tensor parts = at::zeros({workers, outputs, width}, g.options());
        const Tensor bias_parts = at::zeros({workers, outputs}, g.options());
        const long lost = gradveil_linear_clip(x.const_data_ptr<float>(), g.const_data_ptr<float>(), examples, positions,
                                               inputs, outputs, bias, bound, workers, parts.mutable_data_ptr<float>(),
                                               bias_parts.mutable_data_ptr<float>(), norms, weights);
        sums.push_back(parts.sum(0).slice(1, 0, inputs).contiguous());
        if (bias) sums.push_back(bias_parts.sum(0));
        return lost;
    }

    long convolution(const Tensor& x, const Tensor& weight, const Tensor& g, double bound, double* norms,
                     double* weights, std::vector<Tensor>& sums) const {
        const int64_t examples = x.size(0), outputs = g.size(1), rows = weight.numel() / weight.size(0);
        const int64_t size = kernel_elements(weight);
        const ConvShape shape = shape_of(x, weight, g);
        const int workers = workers_for_products(examples, size, g.size(2) * g.size(3));
        const Tensor parts = at::zeros({workers, size}, g.options());
        const Tensor bias_parts = at::zeros({workers, outputs}, g.options());
        const long lost = gradveil_conv2d(x.const_data_ptr<float>(), g.const_data_ptr<float>(), examples, &shape, bias,
                                          bound, workers, parts.mutable_data_ptr<float>(),
                                          bias_parts.mutable_data_ptr<float>(), norms, weights, nullptr, nullptr);
        const Tensor folded = at::empty(weight.sizes(), g.options());
        gradveil_conv2d_fold(parts.const_data_ptr<float>(), workers, many, rows, outputs / many,
                             folded.mutable_data_ptr<float>());
        sums.push_back(folded);
        if (bias) sums.push_back(bias_parts.sum(0));
        return lost;
    }

    Clipped replay(const Tensor& x, const variable_list& kept, const Tensor& g, Pass& pass) {
        const auto known = programs.find(key_of(x, g));
        if (known == programs.end() || !pass.settings->device_bounds.has_value() || !launcher()) return {};
        if (!tells_its_handle<c10::Stream>) return {};
        std::vector<Tensor> tensors{x, g, *pass.settings->device_bounds, pass.flags(x)};
        tensors.insert(tensors.end(), kept.begin(), kept.end());
        Clipped found;
        Program::Result result = Program::run(known->second, std::move(tensors), found.done);
        if (!found.done) return found;
        pass.note(group, result.both);
        found.sums = std::move(result.sums);
        return found;
    }

   public:
    const int64_t kind, unit, group;
    const bool whole, bias, on_cpu;
    const Ints numbers;
    const int64_t many;
    const double eps;
    const intrusive_ptr<Watch> watch;
    const Ints slots;  // of weight and bias in the watch

   private:
    std::map<Ints, Ints> programs;  // by key_of
};

// ---- the autograd node

static std::vector<Tensor> collect(const Layer& layer, const Pass& pass, const Tensor& x, const Tensor& weight,
                                   const variable_list& kept, const Tensor& g) {
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gradveil::collect", "");
    torch::jit::Stack stack{pass.clipper, pass.number, layer.unit, x, weight, std::vector<Tensor>(kept), g};
    op.callBoxed(stack);
    return stack.at(0).toTensorVector();
}

// A node of our own: the book-keeping of torch::autograd::Function costs as much as a small layer.
struct OwnNode : torch::autograd::Node {
    typedef decltype(torch::autograd::Edge::function) Held;  // torch's own pointer; std::shared_ptr in older versions

    template <class T, class Pointer = Held>
    static std::pair<Pointer, T*> make() {
        if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
            T* made = new T();
            return {Pointer(made, [](auto* node) { deleteNode(node); }), made};
        } else {
            auto made = c10::make_intrusive<T>();
            return {made, made.get()};
        }
    }

   protected:
    static void no_tangent(const std::optional<Tensor>& t) {
        TORCH_CHECK(!torch::autograd::isFwGradDefined(t), "gradveil: what is clipped has no derivative in forward mode");
    }

    // What was not used downstream has a gradient of zeros.
    Tensor gradient(const variable_list& grads) const { return grads[0].defined() ? grads[0] : input_metadata(0).zeros_like(); }
};

struct LayerNode : OwnNode {
    static Tensor run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                      const intrusive_ptr<Layer>& layer, const intrusive_ptr<Pass>& pass) {
        const bool tracked = torch::autograd::compute_requires_grad(x, weight, bias);
        no_tangent(x), no_tangent(weight), no_tangent(bias);
        variable_list kept;
        Tensor out;
        {
            at::AutoDispatchBelowADInplaceOrView below;
            at::AutoGradMode off(false);
            out = layer->forward(x, weight, bias, kept);
        }
        if (!tracked) return out;
        auto [held, node] = make<LayerNode>();
        node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
        node->layer = layer;
        node->pass = pass;
        node->x = torch::autograd::SavedVariable(x, false);
        node->weight = torch::autograd::SavedVariable(weight, false);
        for (const Tensor& t : kept) node->kept.emplace_back(t, false);
        torch::autograd::set_history(out, held);
        return out;
    }

    std::string name() const override { return "gradveil::layer"; }

    void release_variables() override {
        std::lock_guard<std::mutex> guard(mutex_);
        x.reset_data();
        weight.reset_data();
        for (auto& t : kept) t.reset_data();
        released = true;
    }

    variable_list apply(variable_list&& grads) override {
        std::lock_guard<std::mutex> guard(mutex_);
        if (done) refuse(pass->clipper, layer->unit, "twice");
        TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
        done = true;
        const bool differentiable = at::GradMode::is_enabled();
        at::AutoGradMode off(false);
        const Tensor input = x.unpack(), matrix = weight.unpack();
        variable_list others;
        for (const auto& t : kept) others.push_back(t.unpack());
        const variable_list found = differentiate(input, matrix, others, gradient(grads).contiguous());
        return differentiable ? once(found) : found;
    }

   private:
    // The gradients of input, weight and bias.
    variable_list differentiate(const Tensor& input, const Tensor& weight, const variable_list& kept, const Tensor& g) {
        // For backward() inside an autocast block: see no_autocast in clipping/function_state.py.
        c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        const Tensor x = layer->kind == CONVOLUTION ? input : input.contiguous();
        if (pass->was_clipped(layer->unit)) refuse(pass->clipper, layer->unit, "checkpoints");
        variable_list found(3);
        if (task_should_compute_output(0)) found[0] = layer->input_gradient(x, weight, kept, g);
        const Tensor factor = layer->as_multiplied(x, g);
        Clipped clipped;
        const bool once_used = pass->uses(layer->unit) == 1;
        if (layer->whole && once_used) clipped = layer->clip(factor, weight, kept, g, *pass);
        if (!layer->whole && once_used && layer->waits(x, weight, g, *pass)) {
            pass->wait(layer->wait(x, weight, g, *pass));
        } else if (clipped.done) {
            pass->set_clipped(layer->unit);
            for (size_t i = 0; i < clipped.sums.size(); i++) layer->watch->expect(layer->slots[i], clipped.sums[i]);
        } else {
            clipped.sums = collect(*layer, *pass, factor, weight, kept, g);
        }
        for (size_t i = 0; i < clipped.sums.size(); i++) found[1 + i] = std::move(clipped.sums[i]);
        return found;
    }

    // With create_graph, what was computed here must not be differentiated again.
    static variable_list once(const variable_list& found) {
        variable_list inputs;
        for (const Tensor& t : found)
            if (t.defined()) inputs.push_back(t.detach().set_requires_grad(true));
        auto refusal = std::make_shared<torch::autograd::DelayedError>(
            "trying to differentiate twice a layer that gradveil clips: a clipped sum has no derivative", inputs.size());
        at::AutoGradMode on(true);
        const variable_list marked = (*refusal)(std::move(inputs));
        variable_list out(found.size());
        for (size_t i = 0, next = 0; i < found.size(); i++)
            if (found[i].defined()) out[i] = marked[next++];
        return out;
    }

    intrusive_ptr<Layer> layer;
    intrusive_ptr<Pass> pass;
    torch::autograd::SavedVariable x, weight;
    std::vector<torch::autograd::SavedVariable> kept;
    bool done = false, released = false;
};

// ---- the end of a pass

// The uses that waited, clipped together: nothing of their groups is kept elsewhere. The clipped sums become, or are added
// to, the gradients of their parameters.
static void clip_waiting(Pass& pass) {
    at::AutoGradMode off(false);
    std::vector<Waiting> waiting;
    std::swap(waiting, pass.waiting);
    std::vector<intrusive_ptr<Layer>> layers;
    std::map<int64_t, Tensor> totals;
    for (const Waiting& use : waiting) {
        const auto layer = layers.emplace_back(Layer::find(use.layer));
        const Tensor square = layer->squares(use);
        const auto [place, is_new] = totals.emplace(layer->group, square);
        if (!is_new) place->second.add_(square);
    }
    std::map<int64_t, Tensor> weights;
    bool lost = false;
    for (const auto& [group, total] : totals) {
        if (!pass.claim(group)) refuse(pass.clipper, layers[0]->unit, "apart");
        const Tensor both = at::empty({2, pass.batch}, at::kDouble);
        double *norm = both.mutable_data_ptr<double>(), *weight = norm + pass.batch;
        const double *square = total.const_data_ptr<double>(), bound = pass.settings->bounds.at(group);
        for (int64_t i = 0; i < pass.batch; i++) {
            norm[i] = std::sqrt(square[i]);
            const bool finite = norm[i] < INFINITY;  // false for nan as well
            weight[i] = !finite ? 0.0 : norm[i] > bound ? bound / norm[i] : 1.0;
            lost |= !finite;
        }
        pass.note(group, both);
        if (lost) pass.flags(waiting[0].x).bitwise_or_(both[0].isfinite().logical_not());
        weights.emplace(group, both[1].to(at::kFloat));
    }
    for (size_t i = 0; i < waiting.size(); i++) {
        const Layer& layer = *layers[i];
        const Tensor weight = layer.watch->parameter(layer.slots[0]);
        if (!weight.defined()) continue;
        const std::vector<Tensor> sums = layer.weighted_sums(waiting[i], weight, weights.at(layer.group), lost);
        for (size_t j = 0; j < sums.size(); j++) layer.watch->add_gradient(layer.slots[j], sums[j]);
    }
}

// The model's output: its backward begins the pass, and turns the gradient of a mean into that of each loss.
struct OutputNode : OwnNode {
    static Tensor run(const Tensor& x, const intrusive_ptr<Pass>& pass, double scale) {
        no_tangent(x);
        Tensor out;
        {
            at::AutoDispatchBelowADInplaceOrView below;
            out = x.view_as(x);
        }
        // Whoever writes to the output writes to what the model has kept of it, and autograd must see that.
        out.unsafeGetTensorImpl()->set_version_counter(x.unsafeGetTensorImpl()->version_counter());
        if (!torch::autograd::compute_requires_grad(x)) return out;
        auto [held, node] = make<OutputNode>();
        node->set_next_edges(torch::autograd::collect_next_edges(x));
        node->pass = pass;
        node->scale = scale;
        torch::autograd::set_history(out, held);
        return out;
    }

    std::string name() const override { return "gradveil::output"; }

    variable_list apply(variable_list&& grads) override {
        const Tensor g = gradient(grads);
        if (g.dim() == 0 && pass->batch > 1) refuse(pass->clipper, 0, "scalar");
        const auto watch = Watch::find(pass->clipper);
        watch->differentiating = pass->number;
        torch::autograd::Engine::get_default_engine().queue_callback([pass = pass, watch] { finish(*pass, *watch); });
        return {scale == 1.0 ? g : g * scale};
    }

   private:
    // The backward pass has ended: what had to wait for it is clipped.
    static void finish(Pass& pass, Watch& watch) {
        watch.differentiating = -1;
        if (pass.kept_in_python) {
            static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gradveil::finish", "");
            torch::jit::Stack stack{pass.clipper, pass.number};
            op.callBoxed(stack);
        } else if (!pass.waiting.empty()) {
            c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
            clip_waiting(pass);
        }
        watch.finish(pass);
    }

    intrusive_ptr<Pass> pass;
    double scale = 1.0;
};

// ---- what Python calls

static void begin(int64_t clipper, int64_t number, int64_t batch, int64_t units) {
    const auto watch = Watch::find(clipper);
    watch->current = Pass::enter(c10::make_intrusive<Pass>(number, clipper, batch, units, watch->settings));
}

static void set_settings(int64_t clipper, std::vector<double> bounds, const std::optional<Tensor>& device_bounds,
                         int64_t most_kept) {
    Watch::find(clipper)->settings =
        std::make_shared<const Settings>(Settings{std::move(bounds), device_bounds, most_kept});
}

static Tensor run_output(const Tensor& x, int64_t pass, double scale) {
    return OutputNode::run(x, Pass::find(pass), scale);
}

static Tensor run_layer(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t number) {
    const auto layer = Layer::find(number);
    const auto pass = layer->watch->current;
    if (at::GradMode::is_enabled()) pass->count(layer->unit, false);
    return LayerNode::run(x, weight, bias, layer, pass);
}

// In the backward pass, by a checkpoint.
static Tensor run_layer_again(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t number,
                              int64_t of_pass) {
    const auto layer = Layer::find(number);
    const auto pass = Pass::find(of_pass);
    pass->count(layer->unit, true);
    return LayerNode::run(x, weight, bias, layer, pass);
}

// The same uses, for Python to clip with what it has kept: units, and the fields of each use.
typedef std::vector<Tensor> Tensors;
static std::tuple<Ints, Tensors, Tensors, Tensors, Tensors, Tensors> take_waiting(int64_t number) {
    const auto pass = Pass::find(number);
    const Tensor nothing = at::empty({0});
    std::tuple<Ints, Tensors, Tensors, Tensors, Tensors, Tensors> found;
    auto& [units, xs, gs, rows, biases, norms] = found;
    for (const Waiting& use : pass->waiting) {
        const bool formed = use.rows.defined();
        units.push_back(Layer::find(use.layer)->unit);
        xs.push_back(use.x);
        gs.push_back(use.g);
        rows.push_back(formed ? use.rows : nothing);
        biases.push_back(formed ? use.biases : nothing);
        norms.push_back(formed ? use.norms : nothing);
    }
    pass->waiting.clear();
    return found;
}

// What the passes add up to since this was last asked for: how many there were, how many examples, groups with norms and
// weights of each, and who was not finite.
static std::tuple<int64_t, int64_t, Ints, std::vector<Tensor>, std::vector<Tensor>> gathered(int64_t clipper) {
    Watch::Gathered found;
    std::swap(found, Watch::find(clipper)->gathered);
    return {found.passes, found.examples, std::move(found.groups), std::move(found.found), std::move(found.lost)};
}

// ---- noise

// Whether a parameter's elements lie one after the other as those of its gradient do.
static bool lies_as(const Tensor& parameter, const Tensor& g) {
    return parameter.is_contiguous() && g.is_contiguous() && parameter.sizes() == g.sizes() &&
           parameter.scalar_type() == g.scalar_type() && parameter.device() == g.device();
}

// The kernel noise_on_gradients of _triton.py on one GPU, and what it last ran on. It reads where the gradients are from a
// table, which is good wherever they are there again: in a training loop they come to the same few places.
struct NoiseKernel {
    struct Kernel {
        explicit Kernel(const Ints& told) : function((void*)told.at(0)), threads(told.at(1)), shared(told.at(2)) {}
        void* function;
        unsigned threads, shared;
    };

    NoiseKernel(const Ints& on_gradients, const Ints& with_step) : on_gradients(on_gradients), with_step(with_step) {}

    static const int64_t BLOCK = 1024, MOST_BLOCKS = 1 << 13;  // the first as in cuda.py; larger tables take long to send

    static std::unordered_map<int64_t, NoiseKernel>& by_device() {
        static auto* kept = new std::unordered_map<int64_t, NoiseKernel>();
        return *kept;
    }

    // False: not for these, and nothing was done. Parameters, where there are any, take a step of ``rate``.
    bool run(const std::vector<Tensor>& grads, const Tensor& draw, double scale, double divide_by,
             const std::vector<Tensor>& parameters, double rate) {
        if (!tells_its_handle<c10::Stream> || !launcher()) return false;
        Ints now;
        int64_t needed = 0;
        for (const Tensor& g : grads) {
            if (!g.is_contiguous()) return false;
            now.push_back((int64_t)g.data_ptr());
            now.push_back(g.numel());
            needed += (g.numel() + BLOCK - 1) / BLOCK;
        }
        for (size_t i = 0; i < parameters.size(); i++) {
            if (!lies_as(parameters[i], grads[i])) return false;
            now.push_back((int64_t)parameters[i].data_ptr());
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
            known = tables.insert(tables.end(), {std::move(now), sent_table(grads, parameters, device, needed)});
        }
        const float divisor = (float)divide_by, step = (float)rate;
        uint64_t values[8] = {(uint64_t)known->second.data_ptr(), (uint64_t)draw.data_ptr(),
                              (uint64_t)std_there.data_ptr(), 0, 0};
        std::memcpy(&values[3], &divisor, sizeof divisor);
        std::memcpy(&values[4], &step, sizeof step);
        void* arguments[8];  // what follows the five are scratch pointers, unused: null
        for (int i = 0; i < 8; i++) arguments[i] = &values[i];
        const Kernel& kernel = parameters.empty() ? on_gradients : with_step;
        const int failed = launcher()(kernel.function, needed, 1, 1, kernel.threads, 1, 1, kernel.shared, on, arguments,
                                      nullptr);
        TORCH_CHECK(!failed, "the noise kernel could not be launched: CUDA error ", failed);
        for (const Tensor& g : grads) g.unsafeGetTensorImpl()->bump_version();
        for (const Tensor& p : parameters) p.unsafeGetTensorImpl()->bump_version();
        return true;
    }

   private:
    typedef std::pair<Ints, Tensor> Table;  // where gradients and parameters are, and their sizes; the rows
    static const size_t MOST_TABLES = 8;

    // A row for each block: its address, its place in the noise, its length, the address of its parameter.
    static Tensor sent_table(const std::vector<Tensor>& grads, const std::vector<Tensor>& parameters,
                             const c10::Device& device, int64_t blocks) {
        const Tensor here = at::empty({blocks, 4}, at::kLong);
        int64_t* row = here.mutable_data_ptr<int64_t>();
        int64_t place = 0;
        for (size_t i = 0; i < grads.size(); i++) {
            const Tensor& g = grads[i];
            for (int64_t start = 0; start < g.numel(); start += BLOCK, row += 4) {
                row[0] = (int64_t)g.data_ptr() + 4 * start;
                row[1] = place + start;
                row[2] = std::min(BLOCK, g.numel() - start);
                row[3] = parameters.empty() ? 0 : (int64_t)parameters[i].data_ptr() + 4 * start;
            }
            place += g.numel();
        }
        return here.to(device, at::kLong, /*non_blocking=*/true);
    }

    Kernel on_gradients, with_step;
    void* stream = nullptr;
    std::vector<Table> tables;
    double std = 0.0;
    Tensor std_there;
};

static void learn_noise(int64_t device, const Ints& on_gradients, const Ints& with_step) {
    NoiseKernel::by_device().insert_or_assign(device, NoiseKernel(on_gradients, with_step));
}

static bool all_alike(const std::vector<double>& values) {
    return std::all_of(values.begin(), values.end(), [&](double value) { return value == values[0]; });
}

// In place, each gradient g of float32 becomes (g + std z) / divide_by, with z independent N(0, 1) in their order; and
// each parameter p, where they are given, p - rate g.
static void add_noise(const std::vector<Tensor>& grads, const std::vector<double>& stds, double divide_by,
                      const std::optional<at::Generator>& generator, const std::vector<Tensor>& parameters,
                      const std::vector<double>& rates) {
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
    const bool known = alike && all_alike(rates) && grads[0].is_cuda() && kernel != NoiseKernel::by_device().end();
    if (known && kernel->second.run(grads, draw, stds[0], divide_by, parameters, rates.empty() ? 0.0 : rates[0])) return;
    std::vector<Tensor> pieces = draw.split_with_sizes(sizes);
    if (!alike) at::_foreach_mul_(pieces, std::vector<at::Scalar>(stds.begin(), stds.end()));
    for (size_t i = 0; i < pieces.size(); i++)
        if (grads[i].dim() != 1) pieces[i] = pieces[i].view(grads[i].sizes());
    at::_foreach_add_(grads, pieces, alike ? stds[0] : 1.0);
    at::_foreach_div_(grads, divide_by);
    for (size_t i = 0; i < parameters.size(); i++) parameters[i].add_(grads[i], -rates[i]);
}

// As native.py's add_noise: on the CPU, from ChaCha12 under a key of 32 bytes, the first tensor with nonce ``first``.
// Parameters take their steps as above.
static void add_cipher_noise(const std::vector<Tensor>& grads, const std::vector<double>& stds, double divide_by,
                             const Ints& key, int64_t first, const std::vector<Tensor>& parameters,
                             const std::vector<double>& rates) {
    TORCH_CHECK(key.size() * sizeof(int64_t) == 32, "a ChaCha12 key has 32 bytes");
    TORCH_CHECK(parameters.empty() || parameters.size() == grads.size(), "one parameter for each gradient");
    TORCH_CHECK(parameters.size() == rates.size(), "one rate for each parameter");
    std::vector<NoiseTarget> targets;
    int64_t elements = 0;
    for (size_t i = 0; i < grads.size(); i++) {
        const Tensor& g = grads[i];
        TORCH_CHECK(g.is_cpu() && g.is_contiguous(), "noise goes onto contiguous gradients on the CPU");
        NoiseTarget target{g.data_ptr(), nullptr, g.numel(), stds.at(i), 0.0, g.scalar_type() == at::kDouble,
                           (uint32_t)(first + i), 0};
        if (!parameters.empty() && lies_as(parameters[i], g)) {
            target.parameter = parameters[i].data_ptr();
            target.rate = rates[i];
            parameters[i].unsafeGetTensorImpl()->bump_version();
        }
        targets.push_back(target);
        elements += g.numel();
        g.unsafeGetTensorImpl()->bump_version();
    }
    gradveil_noise(key.data(), targets.data(), (long)targets.size(), divide_by, workers_for(4 * elements, 1 << 20));
    at::AutoGradMode off(false);
    for (size_t i = 0; i < parameters.size(); i++)
        if (!targets[i].parameter) parameters[i].add_(grads[i], -rates[i]);
}

TORCH_LIBRARY(gradveil, m) {
    m.class_<Pass>("Pass");  // kept by autograd nodes
    m.class_<Watch>("Watch")
        .def(torch::init([](int64_t number) { return Watch::enter(c10::make_intrusive<Watch>(number)); }))
        .def("follow", &Watch::follow)
        .def("forget", &Watch::forget);
    m.class_<Layer>("Layer")
        .def(torch::init([](int64_t number, int64_t kind, int64_t unit, int64_t group, bool whole, bool bias,
                            bool on_cpu, Ints numbers, int64_t many, double eps, const intrusive_ptr<Watch>& watch,
                            Ints slots) {
            return Layer::enter(c10::make_intrusive<Layer>(number, kind, unit, group, whole, bias, on_cpu,
                                                           std::move(numbers), many, eps, watch, std::move(slots)));
        }))
        .def("learn", &Layer::learn);
    m.def("begin(int clipper, int current, int batch, int units) -> ()", begin);
    m.def("set_settings(int clipper, float[] bounds, Tensor? device_bounds, int most_kept) -> ()", set_settings);
    m.def("layer(Tensor x, Tensor weight, Tensor? bias, int layer) -> Tensor");
    m.def("layer_again(Tensor x, Tensor weight, Tensor? bias, int layer, int current) -> Tensor");
    m.def("output(Tensor x, int current, float scale) -> Tensor");
    m.impl("layer", torch::kAutograd, run_layer);
    m.impl("layer_again", torch::kAutograd, run_layer_again);
    m.impl("output", torch::kAutograd, run_output);
    m.def("count(int current, int unit, bool again) -> ()",
          [](int64_t pass, int64_t unit, bool again) { Pass::find(pass)->count(unit, again); });
    m.def("uses(int current, int unit) -> int", [](int64_t pass, int64_t unit) { return Pass::find(pass)->uses(unit); });
    m.def("was_clipped(int current, int unit) -> bool",
          [](int64_t pass, int64_t unit) { return Pass::find(pass)->was_clipped(unit); });
    m.def("set_clipped(int current, int unit) -> ()",
          [](int64_t pass, int64_t unit) { Pass::find(pass)->set_clipped(unit); });
    m.def("claim(int current, int group) -> bool",
          [](int64_t pass, int64_t group) { return Pass::find(pass)->claim(group); });
    m.def("flags(int current, Tensor like) -> Tensor",
          [](int64_t pass, const Tensor& like) { return Pass::find(pass)->flags(like).alias(); });
    m.def("keeps_uses(int current) -> ()", [](int64_t pass) { Pass::find(pass)->kept_in_python = true; });
    m.def("take_waiting(int current) -> (int[], Tensor[], Tensor[], Tensor[], Tensor[], Tensor[])", take_waiting);
    m.def("gathered(int clipper) -> (int, int, int[], Tensor[], Tensor[])", gathered);
    m.def("expect(int clipper, int slot, Tensor total) -> ()",
          [](int64_t clipper, int64_t slot, const Tensor& total) { Watch::find(clipper)->expect(slot, total); });
    m.def("stamp(int clipper) -> ()", [](int64_t clipper) { Watch::find(clipper)->stamp(); });
    m.def("start_step(int clipper) -> ()", [](int64_t clipper) { Watch::find(clipper)->start_step(); });
    m.def("touched(int clipper) -> int", [](int64_t clipper) { return Watch::find(clipper)->touched(); });
    m.def("differentiating(int clipper) -> int", [](int64_t clipper) { return Watch::find(clipper)->differentiating; });
    m.def("learn_noise(int device, int[] on_gradients, int[] with_step) -> ()", learn_noise);
    m.def("add_noise(Tensor(a!)[] grads, float[] stds, float divide_by, Generator? generator, Tensor(b!)[] parameters, "
          "float[] rates) -> ()", add_noise);
    m.def("add_cipher_noise(Tensor(a!)[] grads, float[] stds, float divide_by, int[] key, int first, "
          "Tensor(b!)[] parameters, float[] rates) -> ()", add_cipher_noise);
    // What the C++ code calls; layers.py implements it.
    m.def("collect(int clipper, int current, int unit, Tensor x, Tensor weight, Tensor[] kept, Tensor g) -> Tensor[]");
    m.def("finish(int clipper, int current) -> ()");
    m.def("refuse(int clipper, int place, str why) -> ()");
}
