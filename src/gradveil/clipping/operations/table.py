"""Which operations there are rules for, and how each is called.

A layer operation is y = f(x; weight, bias) on one tensor of batch data. Its entry takes the operation's own arguments
apart and says what its rule has to know of them. Adding an operation with a rule is one entry here and one rule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from gradveil.clipping.rules.conv import ConvRule, ConvTransposeRule
from gradveil.clipping.rules.embedding import EmbeddingRule
from gradveil.clipping.rules.layer import LayerRule
from gradveil.clipping.rules.linear import Conv1DRule, LinearRule
from gradveil.clipping.rules.norm import GroupNormRule, InstanceNormRule, LayerNormRule, PReLURule, RMSNormRule

Statics = tuple[tuple[str, Hashable], ...]
Bound = tuple[Tensor, Tensor | None, Tensor | None, Statics]


@dataclass(frozen=True)
class LayerOperation:
    """``bind`` takes the operation's arguments to (x, weight, bias, statics).

    ``by_rows``: the batch is the first dimension of x and nothing else will do (a convolution); otherwise any dimension
    but the last ``trailing`` ones.
    """

    name: str
    bind: Callable[..., Bound]
    rule: Callable[[Any], LayerRule]
    by_rows: bool = False

    def make_rule(self, statics: Statics) -> LayerRule:
        return self.rule(SimpleNamespace(**dict(statics)))

    def trailing(self, statics: Statics) -> int:
        if self.name == "embedding":
            return 0
        shape = dict(statics).get("normalized_shape")
        return len(shape) if isinstance(shape, tuple) else 1


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Bound:
    return input, weight, bias, ()


def transposed_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W + b: a linear layer whose weight is stored as (inputs, outputs)."""
    if has_torch_function((input, weight)):
        return handle_torch_function(transposed_linear, (input, weight), input, weight, bias)
    found = input @ weight
    return found if bias is None else found + bias


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    found = (value,) * dims if isinstance(value, int) else tuple(value)
    return found * dims if len(found) == 1 else found


def _conv(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Bound:
    dilated = _tuple(dilation, dims)
    if isinstance(padding, str):
        total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilated, weight.shape[2:], strict=True)]
        if any(n % 2 for n in total):
            input = F.pad(input, [side for n in reversed(total) for side in (n // 2, n - n // 2)])
            total = [0] * dims
        padding = tuple(n // 2 for n in total)
    statics = (
        ("dims", dims),
        ("stride", _tuple(stride, dims)),
        ("padding", _tuple(padding, dims)),
        ("dilation", dilated),
        ("groups", groups),
    )
    return input, weight, bias, statics


def _conv_transpose(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Bound:
    statics = (
        ("dims", dims),
        ("stride", _tuple(stride, dims)),
        ("padding", _tuple(padding, dims)),
        ("output_padding", _tuple(output_padding, dims)),
        ("groups", groups),
        ("dilation", _tuple(dilation, dims)),
    )
    return input, weight, bias, statics


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Bound:
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return (
        input,
        weight,
        None,
        (
            ("padding_idx", padding_idx),
            ("max_norm", max_norm),
            ("scale_grad_by_freq", scale_grad_by_freq),
        ),
    )


def _plain_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Bound:
    return _embedding(indices, weight, None if padding_idx < 0 else padding_idx, scale_grad_by_freq=scale_grad_by_freq)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Bound:
    return input, weight, bias, (("normalized_shape", tuple(normalized_shape)), ("eps", eps))


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Bound:
    return input, weight, None, (("normalized_shape", tuple(normalized_shape)), ("eps", eps))


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Bound:
    return input, weight, bias, (("num_groups", num_groups), ("eps", eps))


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Bound:
    return input, weight, bias, (("eps", eps),)


def _prelu(input: Tensor, weight: Tensor) -> Bound:
    return input, weight, None, (("channels", weight.numel()),)


LAYERS: dict[Any, LayerOperation] = {
    F.linear: LayerOperation("linear", _linear, LinearRule),
    transposed_linear: LayerOperation("matmul", _linear, Conv1DRule),
    F.embedding: LayerOperation("embedding", _embedding, EmbeddingRule),
    torch.embedding: LayerOperation("embedding", _plain_embedding, EmbeddingRule),
    F.layer_norm: LayerOperation("layer_norm", _layer_norm, LayerNormRule),
    F.rms_norm: LayerOperation("rms_norm", _rms_norm, RMSNormRule),
    F.group_norm: LayerOperation("group_norm", _group_norm, GroupNormRule, by_rows=True),
    F.instance_norm: LayerOperation("instance_norm", _instance_norm, InstanceNormRule, by_rows=True),
    F.prelu: LayerOperation("prelu", _prelu, PReLURule, by_rows=True),
    torch.prelu: LayerOperation("prelu", _prelu, PReLURule, by_rows=True),
    Tensor.prelu: LayerOperation("prelu", _prelu, PReLURule, by_rows=True),
}
for _dims, _plain, _transposed in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    LAYERS[_plain] = LayerOperation(f"conv{_dims}d", partial(_conv, _dims), ConvRule, by_rows=True)
    LAYERS[_transposed] = LayerOperation(
        f"conv_transpose{_dims}d", partial(_conv_transpose, _dims), ConvTransposeRule, by_rows=True
    )

T = torch.Tensor


def named(names: str, *places: Any) -> set[Any]:
    """The functions of these names, as far as this torch has them."""
    return {getattr(place, name) for name in names.split() for place in places if hasattr(place, name)}


def writes_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


# Operations that broadcast: a parameter may come in as one copy for each example.
BROADCASTING: set[Any] = named(
    "add sub mul div true_divide rsub pow maximum minimum where lerp addcmul addcdiv fmod remainder atan2 hypot "
    "logaddexp __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ "
    "__itruediv__ __pow__ __rpow__ __ipow__ add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_ __div__ __rdiv__ __idiv__ "
    "copysign xlogy multiply subtract divide",
    torch,
    T,
) | {F.scaled_dot_product_attention}
BATCHED_PRODUCTS: set[Any] = {torch.matmul, T.matmul, T.__matmul__}
EXPANDING: set[Any] = {T.expand, T.expand_as, torch.broadcast_to, T.broadcast_to, T.repeat, torch.tile, T.tile}
LOOKUPS: set[Any] = {F.embedding, torch.embedding, torch.index_select, T.index_select, T.__getitem__}
# What only copies: a gradient is as long behind it as before it.
COPYING = named("clone contiguous to float double half bfloat16 type type_as reshape flatten ravel", torch, T)
# What tells of a tensor without using its values, and attributes.
PLAIN = named(
    "size dim numel nelement is_floating_point is_complex stride is_contiguous __len__ ndimension element_size "
    "__hash__ __format__ __repr__ is_signed is_inference _is_view requires_grad_ retain_grad __deepcopy__ "
    "is_same_size is_set_to untyped_storage storage_offset is_neg is_conj get_device data_ptr detach detach_ storage "
    "register_hook is_shared backward item tolist numpy __array__ __bool__ __reduce_ex__ dim_order __contains__ "
    "new_zeros new_ones new_empty new_full new_tensor zeros_like ones_like empty_like full_like rand_like randn_like",
    T,
    torch,
) | {
    attribute.__get__
    for attribute in named(
        "shape dtype device requires_grad is_leaf grad grad_fn data ndim layout is_cuda is_cpu is_sparse is_quantized "
        "is_meta is_nested is_mkldnn is_xla is_xpu is_mps names _version _base itemsize nbytes output_nr name volatile "
        "_grad _grad_fn _backward_hooks _post_accumulate_grad_hooks retains_grad",
        T,
    )
    if hasattr(attribute, "__get__")
}
