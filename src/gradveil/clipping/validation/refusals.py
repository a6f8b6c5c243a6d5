"""What is refused while a pass is followed, whoever finds it (clipper, watch, or a layer in C++), in one place."""

from __future__ import annotations

from gradveil.errors import GradveilError, PrivacyViolation, UnsupportedModelError

_KINDS: dict[str, tuple[type[GradveilError], str]] = {
    "stranger": (
        PrivacyViolation,
        "parameter {what!r} got a gradient from a use outside the model's forward, such as F.linear(x, layer.weight) "
        "after it, a penalty on the weights in the loss, or model.forward(x) in place of model(x); or inside it from "
        "an autograd.Function of your own, a scripted module, or another thread. That part is not clipped per example. "
        "Use the parameter in forward(), through torch's operations; for a penalty, use the optimizer's weight_decay.",
    ),
    "captured": (
        PrivacyViolation,
        "torch.autograd.grad was asked for the gradient of {what}: gradients of its parameters are clipped and noised "
        "at the end of backward(), and never leave autograd before. Call loss.backward() and read .grad.",
    ),
    "released": (
        PrivacyViolation,
        "backward() was called for a forward pass from before the last release, or from before the loader was started "
        "again: each drawn batch is released once, at the end of its backward(). Add the losses of a batch and call "
        "backward() once; call the model again for a new batch.",
    ),
    "public": (
        PrivacyViolation,
        "backward() inside public_data() reaches a call of the model on private data: what the public call contributes "
        "may depend on private examples, and is neither clipped nor noised. Call backward() for the private loss "
        "outside the context, and for the public one, computed from public data alone, inside it.",
    ),
    "two passes": (
        PrivacyViolation,
        "one backward() reaches two calls of the model: a loss of both could mix their examples, and an example in "
        "both would count twice. Give all examples in one call, or call backward() for each.",
    ),
    "twice": (
        PrivacyViolation,
        "{what} was differentiated twice for the same batch (retain_graph, or two losses): each example's contribution "
        "would add up to more than the clip bound. Add the losses, call backward once.",
    ),
    "apart": (
        PrivacyViolation,
        "backward() was called more than once for the same batch, and {what} shares a clip bound with a layer that an "
        "earlier call reached: each call was clipped by itself, and an example's contributions would add up to more "
        "than the bound. Add the losses, call backward once.",
    ),
    "hook": (
        PrivacyViolation,
        "parameter {what!r} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook): autograd "
        "computes no gradient for it to see, since .grad is set when the release is made, at the end of backward(). "
        "Remove the hook and read .grad after backward().",
    ),
    "batch norm": (
        UnsupportedModelError,
        "{what} was put into training mode: its output for one example depends on the whole batch, so a per-example "
        "gradient is undefined. Keep it in eval mode, or replace it with GroupNorm: gradveil.fix(model).",
    ),
    "buffer": (
        UnsupportedModelError,
        "this call of the model has written to buffer {what!r}, and calls before it did not: whether it is computed "
        "from the examples cannot be seen. It is part of the model's state_dict, and nothing bounds or noises what it "
        "tells of them. Write to buffers in every call, and not from the batch, or leave it out.",
    ),
    "frozen": (
        PrivacyViolation,
        "parameter {what!r} was frozen (requires_grad_(False)) after make_private: what trains, and is clipped and "
        "noised, was settled there. Decide what trains before make_private; to change it later, "
        "detach() and start a new engine.",
    ),
    "replaced": (
        PrivacyViolation,
        "the weight of {what} is not the parameter that it had at make_private (torch.func.functional_call, or a "
        "weight that was replaced): gradients would be taken at one weight and released for another. Call the model "
        "itself; to change its weights, write to them in place under torch.no_grad().",
    ),
    "elsewhere": (
        PrivacyViolation,
        "{what} was differentiated from something other than the model's output: gradveil follows a pass from the "
        "output of the whole model. Return from forward() what the loss is computed from.",
    ),
    "beside": (
        PrivacyViolation,
        "the loss is computed from the model's output and from something beside it (an activation kept as an "
        "attribute, say): that part of its gradient would be smaller than the other, by the size of the batch. Return "
        "from forward() all that the loss is computed from, or use loss_reduction='sum' with a loss that is a sum.",
    ),
    "late": (
        UnsupportedModelError,
        "{what} was called for the first time after the first batch, and it could not be seen that the first dimension "
        "of its input is the batch: it only has that size, or the same call of the model did not reach it once more. "
        "Keep the batch first (for a sequence: (batch, time, features)), or call it in the first batch too.",
    ),
    "unfrozen": (
        PrivacyViolation,
        "parameter {what!r} was made trainable, or added to the model, after make_private: its gradient would be "
        "neither clipped nor noised. Decide what trains before make_private; to unfreeze or add layers later, detach() "
        "and start a new engine.",
    ),
    "checkpoints": (
        UnsupportedModelError,
        "{what} is used in a reentrant checkpoint and once more, in another or outside: the first use was clipped "
        "before the second was known of. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
    ),
    "compared": (
        UnsupportedModelError,
        "the loss is computed from an output of the model that has the batch in more than one dimension (a matrix of "
        "similarities, say): it mixes examples, and no clipping bounds what one example does. Compute the loss from "
        "outputs that have the examples along one dimension.",
    ),
    "scalar": (
        UnsupportedModelError,
        "the loss was computed inside the model, and it was not seen to be a mean over the examples ({what}). No "
        "clipping bounds what one example does to a loss that mixes examples. Use a model whose loss is the mean of "
        "each example's own loss (for one that is a sum: loss_reduction='sum'), or compute the loss from outputs that "
        "have the examples along the first dimension, such as logits.",
    ),
    "factor": (
        PrivacyViolation,
        "the loss that the model returned was multiplied by a factor that changes ({what}): if the factor follows from "
        "the examples, each of them changes every other's gradient. Multiply it by a constant, or by nothing.",
    ),
}


def refusal(why: str, what: str) -> GradveilError:
    """The error to raise: of a parameter's name, or of a unit's label."""
    kind, text = _KINDS[why]
    return kind(text.format(what=what))
