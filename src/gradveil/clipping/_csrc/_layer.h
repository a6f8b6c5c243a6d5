// One followed layer: its forward, the gradient of its input, and the clipped sums of its parameters. Included by
// _layers.cpp.

#pragma once

#include "_programs.h"

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
        if (x.numel() == 0 || g.numel() == 0) return {};  // a layer without inputs or outputs: its sizes tell nothing
        if (x.is_cuda() && x.scalar_type() == g.scalar_type()) return replay(x, kept, g, pass);
        if (x.scalar_type() != at::kFloat || g.scalar_type() != at::kFloat) return {};
        return x.is_cpu() && on_cpu ? clip_on_cpu(x.contiguous(), weight, g, pass) : Clipped{};
    }

    // Whether a use that must wait for the norms of other layers can do so here.
    bool waits(const Tensor& x, const Tensor& weight, const Tensor& g, const Pass& pass) const {
        if (!on_cpu || !x.is_cpu() || x.scalar_type() != at::kFloat || g.scalar_type() != at::kFloat) return false;
        if (x.numel() == 0 || g.numel() == 0) return false;
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
    bool whole;  // no group of its parameters reaches beyond it, and no other layer has them
    const bool bias, on_cpu;
    const Ints numbers;
    const int64_t many;
    const double eps;
    const intrusive_ptr<Watch> watch;
    const Ints slots;  // of weight and bias in the watch

   private:
    std::map<Ints, Ints> programs;  // by key_of
};
