// Passes through a model as C++ knows them, and the clipped sums that they leave. Included by _layers.cpp.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
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
#include <unordered_set>
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
    void* grad;
    int64_t count;
    double std;
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
void gradveil_lattice_noise(const void*, const NoiseTarget*, long, double, int);
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

    void count(int64_t unit, bool again) {
        if (unit >= (int64_t)calls.size()) {  // it has come up in this pass
            calls.resize(unit + 1, 0);
            recalls.resize(unit + 1, 0);
            clipped.resize(unit + 1, 0);
        }
        (again ? recalls : calls)[unit]++;
    }
    // A checkpoint that keeps its graph calls a unit again without using it again.
    int64_t uses(int64_t unit) const {
        return unit < (int64_t)calls.size() ? std::max(calls[unit], recalls[unit]) : 0;
    }
    bool was_clipped(int64_t unit) const { return clipped.at(unit); }
    void set_clipped(int64_t unit) { clipped.at(unit) = 1; }
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

    // A clipped sum of the parameter in a slot. Nodes on several devices deliver from several threads.
    void deliver(int64_t slot, Tensor sum) {
        std::lock_guard<std::mutex> guard(sums_lock);
        if (sum.is_cuda()) streams.push_back(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(sum.device()));
        sums.emplace_back(slot, std::move(sum));
    }

    const int64_t clipper, batch;
    const std::shared_ptr<const Settings> settings;

    std::vector<std::pair<int64_t, Tensor>> sums;  // by slot; the watch's only when the backward pass has ended
    std::vector<c10::Stream> streams;              // on which they were computed
    bool asked = false;  // whether the backward pass under way is to reach the parameters
    std::vector<std::pair<int64_t, Tensor>> noted;  // group, norms and weights (2, batch)
    std::vector<Waiting> waiting;
    bool started = false;                     // its backward pass has come through the model's output
    bool kept_in_python = false;              // uses that wait there for their groups
    bool counted = false, told_lost = false;  // in what its watch has gathered
    std::optional<Tensor> lost;  // (batch,): 1 where an example was not finite in some group

   private:
    std::mutex sums_lock;
    std::vector<int64_t> calls, recalls;
    std::vector<char> clipped, claimed;
};

// ---- the clipped sums of passes that have ended

// Every parameter has a hook that refuses any gradient: clipped sums come past autograd, so what arrives is from a use
// that nobody clipped.
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
                                parameter.getIntrusivePtr()), hook});
        known.insert(parameter.unsafeGetTensorImpl());
        return slot;
    }

    void forget(const Tensor& parameter, int64_t slot) { parameter.remove_hook(followed.at(slot).hook); }

    bool follows(const Tensor& t) const { return known.count(t.unsafeGetTensorImpl()) != 0; }

    Tensor parameter(int64_t slot) const { return Tensor(followed[slot].parameter.lock()); }

    // Nothing is gathered yet, and passes that began before can no longer be differentiated.
    void start_step() {
        if (current) oldest = current->number + 1;
        sums.clear();
        gathered = Gathered();
    }

    // The sums since they were last taken; a slot comes once for each pass and use that has left one.
    std::pair<Ints, std::vector<Tensor>> take_sums() {
        std::pair<Ints, std::vector<Tensor>> found;
        for (auto& [slot, sum] : sums) {
            found.first.push_back(slot);
            found.second.push_back(std::move(sum));
        }
        sums.clear();
        return found;
    }

    // The backward pass of a pass has ended.
    void finish(Pass& pass) {
        wait_for(pass.streams);
        for (auto& each : pass.sums) sums.push_back(std::move(each));
        pass.sums.clear();
        pass.streams.clear();
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
    bool lenient = false;          // passes that nobody tracks are differentiated
    int64_t oldest = 0;            // the first pass of this step
    int64_t reached = -1;          // the pass that ``task`` has come to
    int task = -1;                 // the last backward() that has come to an output of the model

   private:
    struct Followed {
        c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter;  // the user's
        unsigned hook;
    };

    void check(int64_t slot, const Tensor& grad) {
        if (grad.defined() && !lenient) refuse(number, slot, "stranger");
    }

    // Parts of a model that ran on other streams than the one that goes on: rare, so the host waits for them.
    static void wait_for(const std::vector<c10::Stream>& streams) {
        for (const c10::Stream& stream : streams) {
            const c10::impl::VirtualGuardImpl device(c10::DeviceType::CUDA);
            if (stream != device.getStream(stream.device())) device.synchronizeStream(stream);
        }
    }

    std::vector<std::pair<int64_t, Tensor>> sums;
    std::vector<Followed> followed;
    std::unordered_set<const c10::TensorImpl*> known;
    Tensor flag_rows;
    int64_t next_flags = 0;
};

inline Tensor Pass::flags(const Tensor& like) {
    if (!lost.has_value())
        lost = like.is_cuda() ? Watch::find(clipper)->flags(batch, like)
                              : at::zeros({batch}, like.options().dtype(at::kInt));
    return *lost;
}
