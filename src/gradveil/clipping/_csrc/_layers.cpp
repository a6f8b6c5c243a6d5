// Followed layers without Python: their forward, their backward, and the clipped sums of their parameters.
//
// A layer's autograd node lives here so that a small layer is not slowed down by interpreting Python. What is decided
// here is only the ordinary case: a float32 layer that holds its whole clipping group, used once in the pass,
// differentiated once, with a kernel that fits. In every other case the node hands over to Python (gradveil::collect),
// where all cases are known; so do refusals (gradveil::refuse).
//
// On the CPU the kernels are those of _native.cpp. On a GPU the layer replays launches that Python has recorded for
// the same shapes (programs.py): the same kernels, with this call's addresses.

#include "_layer.h"
#include "_on_gradients.h"

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
        if (!pass->started) refuse(pass->clipper, layer->unit, "elsewhere");
        TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
        const bool asked = is_asked_for();
        done |= asked;
        const bool differentiable = at::GradMode::is_enabled();
        at::AutoGradMode off(false);
        const Tensor input = x.unpack(), matrix = weight.unpack();
        variable_list others;
        for (const auto& t : kept) others.push_back(t.unpack());
        const variable_list found = differentiate(input, matrix, others, gradient(grads).contiguous(), asked);
        return differentiable ? once(found) : found;
    }

   private:
    // Whether this backward pass is to reach the parameters; refused where autograd.grad would hand out their gradients.
    bool is_asked_for() const {
        const auto* info = torch::autograd::get_current_graph_task_exec_info();
        if (!info || info->empty()) return true;
        bool asked = false;
        for (size_t i = 1; i < num_outputs(); i++) {
            const auto found = info->find(next_edge(i).function.get());
            if (found == info->end()) continue;
            if (found->second.captures_) refuse(pass->clipper, layer->unit, "captured");
            asked |= found->second.needed_;
        }
        return asked;
    }

    // The gradient of the input. The parameters' clipped sums go to the pass; autograd gets none.
    variable_list differentiate(const Tensor& input, const Tensor& weight, const variable_list& kept, const Tensor& g,
                                bool asked) {
        // For backward() inside an autocast block: as clipped_functions.py has it.
        c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
        const Tensor x = layer->kind == CONVOLUTION ? input : input.contiguous();
        variable_list found(3);
        if (task_should_compute_output(0)) found[0] = layer->input_gradient(x, weight, kept, g);
        if (!asked) return found;
        if (pass->was_clipped(layer->unit)) refuse(pass->clipper, layer->unit, "checkpoints");
        pass->asked = true;
        const Tensor factor = layer->as_multiplied(x, g);
        Clipped clipped;
        const bool once_used = pass->uses(layer->unit) == 1;
        if (layer->whole && once_used) clipped = layer->clip(factor, weight, kept, g, *pass);
        if (!layer->whole && once_used && layer->waits(x, weight, g, *pass)) {
            pass->wait(layer->wait(x, weight, g, *pass));
        } else if (clipped.done) {
            pass->set_clipped(layer->unit);
        } else {
            clipped.sums = collect(*layer, *pass, factor, weight, kept, g);
        }
        for (size_t i = 0; i < clipped.sums.size(); i++) pass->deliver(layer->slots[i], std::move(clipped.sums[i]));
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

// The uses that waited, clipped together: nothing of their groups is kept elsewhere.
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
        for (size_t j = 0; j < sums.size(); j++) pass.deliver(layer.slots[j], sums[j]);
    }
}

// Leaves that the backward pass under way may reach, other than the parameters that are followed.
static std::vector<Tensor> other_leaves(const Watch& watch) {
    std::vector<Tensor> found;
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (!nodes) return found;
    for (torch::autograd::Node* node : *nodes) {
        if (!node->next_edges().empty()) continue;
        const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node);
        if (leaf && leaf->variable.defined() && !watch.follows(leaf->variable)) found.push_back(leaf->variable);
    }
    return found;
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
        const auto watch = Watch::find(pass->clipper);
        if (watch->lenient) refuse(pass->clipper, 0, "public");
        if (pass->number < watch->oldest) refuse(pass->clipper, 0, "released");
        watch->differentiating = pass->number;
        pass->started = true;
        const auto* info = torch::autograd::get_current_graph_task_exec_info();
        pass->asked |= !info || info->empty();
        const int task = torch::autograd::get_current_graph_task_id();
        if (watch->task != task) {  // a model with several outputs comes here for each of them
            watch->task = task;
            const std::vector<Tensor> leaves = other_leaves(*watch);
            if (!leaves.empty()) {
                static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gradveil::look_at_leaves", "");
                torch::jit::Stack stack{pass->clipper, leaves};
                op.callBoxed(stack);
            }
            torch::autograd::Engine::get_default_engine().queue_callback([pass = pass, watch] { finish(*pass, *watch); });
        } else if (watch->reached != pass->number) {
            refuse(pass->clipper, 0, "two passes");
        }
        watch->reached = pass->number;
        return {scale == 1.0 ? g : g * scale};
    }

   private:
    // The backward pass has ended: what had to wait for it is clipped, and the sums are the watch's.
    static void finish(Pass& pass, Watch& watch) {
        watch.differentiating = watch.task = -1;
        if (!std::exchange(pass.asked, false)) return;  // only the gradient of an input was asked for
        if (pass.kept_in_python) {
            static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gradveil::finish", "");
            torch::jit::Stack stack{pass.clipper, pass.number};
            op.callBoxed(stack);
        } else if (!pass.waiting.empty()) {
            c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
            clip_waiting(pass);
        }
        watch.finish(pass);
        static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("gradveil::ended", "");
        torch::jit::Stack stack{pass.clipper, pass.number};
        op.callBoxed(stack);
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
        .def("learn", &Layer::learn)
        .def("share", [](const intrusive_ptr<Layer>& layer) { layer->whole = false; });
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
    m.def("started(int current) -> bool", [](int64_t pass) { return Pass::find(pass)->started; });
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
    m.def("start_step(int clipper) -> ()", [](int64_t clipper) { Watch::find(clipper)->start_step(); });
    m.def("deliver(int current, int slot, Tensor sum) -> ()",
          [](int64_t pass, int64_t slot, const Tensor& sum) { Pass::find(pass)->deliver(slot, sum.alias()); });
    m.def("take_sums(int clipper) -> (int[], Tensor[])", [](int64_t clipper) {
        auto found = Watch::find(clipper)->take_sums();
        return std::tuple<Ints, std::vector<Tensor>>(std::move(found.first), std::move(found.second));
    });
    m.def("other_leaves(int clipper) -> Tensor[]", [](int64_t clipper) { return other_leaves(*Watch::find(clipper)); });
    m.def("lenient(int clipper, bool on) -> ()", [](int64_t clipper, bool on) { Watch::find(clipper)->lenient = on; });
    m.def("differentiating(int clipper) -> int", [](int64_t clipper) { return Watch::find(clipper)->differentiating; });
    m.def("learn_noise(int device, int[] on_gradients) -> ()", learn_noise);
    m.def("add_noise(Tensor(a!)[] grads, float[] stds, float divide_by, Generator? generator) -> ()", add_noise);
    m.def("add_cipher_noise(Tensor(a!)[] grads, float[] stds, float divide_by, int[] key, int first, bool lattice) -> ()",
          add_cipher_noise);
    // What the C++ code calls; layers.py implements it.
    m.def("collect(int clipper, int current, int unit, Tensor x, Tensor weight, Tensor[] kept, Tensor g) -> Tensor[]");
    m.def("finish(int clipper, int current) -> ()");
    m.def("ended(int clipper, int current) -> ()");
    m.def("look_at_leaves(int clipper, Tensor[] leaves) -> ()");
    m.def("refuse(int clipper, int place, str why) -> ()");
}
